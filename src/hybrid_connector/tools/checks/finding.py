"""What does a check say? A ``Finding``; one that is not well says what to do."""

from dataclasses import dataclass
from enum import StrEnum

THIS_MACHINE = "this machine"


class Status(StrEnum):
    """``SKIPPED``: the check could not be made, and why is said."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """``check``: its name, for scripts. ``what``: what was found. ``todo``: what to do about it.

    ``where``: this machine, or the address that the finding is about.
    """

    check: str
    status: Status
    what: str
    todo: str = ""
    where: str = THIS_MACHINE

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (not self.todo):
            raise ValueError(f"{self.check}: expected something to do where the status is not ok, got {self}")


def ok(check: str, what: str, where: str = THIS_MACHINE) -> Finding:
    return Finding(check, Status.OK, what, where=where)


def warning(check: str, what: str, todo: str, where: str = THIS_MACHINE) -> Finding:
    return Finding(check, Status.WARNING, what, todo, where)


def problem(check: str, what: str, todo: str, where: str = THIS_MACHINE) -> Finding:
    return Finding(check, Status.PROBLEM, what, todo, where)


def skipped(check: str, what: str, todo: str, where: str = THIS_MACHINE) -> Finding:
    return Finding(check, Status.SKIPPED, what, todo, where)
