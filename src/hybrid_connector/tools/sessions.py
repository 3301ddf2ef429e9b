"""How are a server's processes stopped so that none is left behind?

Every server leads a session of its own; whatever still runs in that session belongs to it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

POLL_S = 0.1
_SHM_DIR = "/dev/shm/"


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put SIGINT and SIGTERM off until the end of the block, where the first that came is delivered.

    Around the start of a process: an exception out of `Popen` leaves one running that nobody knows to stop. In another
    thread than the main one, which no signal interrupts, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    # What was ignored stays so. A handler, not a mask, which the process would inherit.
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = [number for number, handler in former.items() if handler not in (signal.SIG_IGN, None)]
    for number in heeded:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, former[number])
        if came:
            signal.raise_signal(came[0])


def _all_pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def session_members(session: int) -> Iterator[int]:
    """Processes of `session` that still run; zombies do not count."""
    for pid in _all_pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, process_session = stat.rpartition(")")[2].split()[:4]
        if int(process_session) == session and state not in "ZX":
            yield pid


def _shared_memory(pid: int) -> set[str]:
    """Files in shared memory that `pid` has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return {path for path in paths if path.startswith(_SHM_DIR)}


def stop_sessions(sessions: Iterable[int], grace_s: float, *, reap: Callable[[], object]) -> None:
    """SIGTERM to the leaders, who stop their children; SIGKILL to whatever is left after `grace_s`.

    Then remove the shared memory that only they had mapped: vLLM kills its own children before they can.
    """
    left = set(sessions)
    shared = {path for session in left for pid in session_members(session) for path in _shared_memory(pid)}
    for leader in left if grace_s > 0 else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left:
        overdue = time.monotonic() >= deadline
        for session in tuple(left):
            members = list(session_members(session))
            if not members:
                left.remove(session)
            elif overdue or session not in members:  # without its leader nobody stops the children
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        reap()
        if left:
            time.sleep(POLL_S)
    if shared:
        shared -= {path for pid in _all_pids() for path in _shared_memory(pid)}
    for path in shared:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
