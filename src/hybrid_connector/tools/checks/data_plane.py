"""Does NIXL work here, and does it reach the peers? Asked of processes of their own.

1. ``check_nixl``: plugins, UCX transports, registration, and one block read from one process into another and verified.
2. ``check_reach``: a few bytes read from every rank of a running engine.
"""

import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hybrid_connector.tools.checks import nixl_process as process
from hybrid_connector.tools.checks import ucx
from hybrid_connector.tools.checks.finding import Finding, ok, problem, skipped, warning
from hybrid_connector.wire.manifest import EngineManifest, RankManifest

START_LIMIT_S = 120.0
"""Until a process has said what it has to say first: imports of torch, and a CUDA context."""
MAX_RANKS_REACHED = 64

_REGISTRATION_TODO = "raise the limit of locked memory (ulimit -l unlimited), or see why NIXL refuses, above"
_LOOPBACK_TODO = "run it with UCX_LOG_LEVEL=info, unset UCX_TLS and UCX_NET_DEVICES, and compare"
_NEEDS_NIXL = "install nixl into this environment"


class ProcessError(Exception):
    """A process said why it cannot go on, or ended without a word, or said nothing in time."""

    def __init__(self, stage: str, why: str) -> None:
        super().__init__(why)
        self.stage = stage


class Process:
    """A ``nixl_process``; leaving the context ends it."""

    def __init__(self, directory: Path, *role: str) -> None:
        self._name = "-".join(role)
        self.ucx_log = directory / f"{self._name}.ucx"
        self._stderr = directory / f"{self._name}.err"
        environment = {**os.environ, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(self.ucx_log)}
        command = [sys.executable, "-m", process.__name__, *role]
        with self._stderr.open("wb") as stderr:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment
            )
        self._partial = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(0 if kind is not None else 5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def order(self, order: process.Order) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(msgspec.json.encode(order) + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:  # why it ended is the next thing it said
            pass

    def next(self, limit_s: float = START_LIMIT_S) -> process.Line:
        """What it says next. Raises ``ProcessError``."""
        assert self._popen.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._partial:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._popen.stdout], [], [], left)[0]:
                raise ProcessError("time", f"the process said nothing within {limit_s:g} s")
            data = os.read(self._popen.stdout.fileno(), 65536)
            if not data:
                raise ProcessError("end", f"the process ended with status {self._popen.wait()}: {self._last_words()}")
            self._partial += data
        first, _, self._partial = self._partial.partition(b"\n")
        line = msgspec.json.decode(first, type=process.Line)
        if isinstance(line, process.Failed):
            raise ProcessError(line.stage, line.error)
        return line

    def _last_words(self) -> str:
        lines = self._stderr.read_text(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


def has_nixl() -> bool:
    """Whether it is installed; it may still not start."""
    return importlib.util.find_spec("nixl") is not None


def check_nixl(is_installed: bool) -> list[Finding]:
    """NIXL on this machine, with main memory and, where there is a GPU, with its memory."""
    if not is_installed:
        checks = ("NIXL", "UCX transports", "registration of DRAM", "loopback through DRAM")
        return [skipped(check, "NIXL is not installed", _NEEDS_NIXL) for check in checks]
    findings, works = _check_memory("DRAM")
    gpus = list(Path("/dev").glob("nvidia[0-9]*"))
    if not gpus:
        todo = "where engines use GPUs, run the doctor there, in a container with --gpus all"
        return [*findings, skipped("loopback through VRAM", "no GPU here", todo)]
    if not works:
        return [*findings, skipped("loopback through VRAM", "it does not work with DRAM", "mend that first")]
    again, _ = _check_memory("VRAM")
    said = {(finding.check, finding.status) for finding in findings}
    return findings + [finding for finding in again if (finding.check, finding.status) not in said]


def _check_memory(memory: str) -> tuple[list[Finding], bool]:
    """All that one pair of processes shows, and whether bytes moved."""
    registration, loopback = f"registration of {memory}", f"loopback through {memory}"
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as name, Process(Path(name), "hold", memory) as holder:
        reader = Process(Path(name), "read", memory)  # started now, because most of its time goes into imports
        with reader:
            try:
                inventory = holder.next()
                assert isinstance(inventory, process.Inventory)
                findings += check_inventory(inventory)
                registered = holder.next()
                assert isinstance(registered, process.Registered)
            except ProcessError as error:
                return [*findings, *_stopped(error, registration, loopback)], False
            findings.append(check_registration(registration, registered))
            try:
                read = _read_block(reader, registered.rank)
                holder.order(process.DigestOrder(read.src))
                digested = holder.next()
                assert isinstance(digested, process.Digested)
            except ProcessError as error:
                return [*findings, problem(loopback, f"{error.stage}: {error}", _LOOPBACK_TODO)], False
        # UCX writes its log when the process ends.
        lanes = ucx.parse_lanes(reader.ucx_log.read_text()) if reader.ucx_log.exists() else ""
    return [*findings, check_loopback(loopback, read, digested.digests, lanes)], True


def _read_block(reader: Process, rank: RankManifest) -> process.ReadBack:
    reader.order(process.ReadOrder(rank))
    read = reader.next()
    assert isinstance(read, process.ReadBack)
    return read


def _stopped(error: ProcessError, registration: str, loopback: str) -> list[Finding]:
    """Which check ended it, and which could not be made for it."""
    what = f"{error.stage}: {error}"
    if error.stage in ("memory", "registration"):
        return [
            problem(registration, what, _REGISTRATION_TODO),
            skipped(loopback, "nothing is registered", "mend that first"),
        ]
    todo = "reinstall nixl for the CUDA version of this torch; UCX_TLS without tcp also ends here"
    checks = (registration, loopback)
    return [
        problem("NIXL", what, todo),
        *(skipped(check, "NIXL does not start", "mend that first") for check in checks),
    ]


def check_inventory(inventory: process.Inventory) -> list[Finding]:
    """Plugins and transports."""
    if "UCX" not in inventory.plugins:
        found = ", ".join(inventory.plugins) or "none"
        return [problem("NIXL", f"plugins: {found}, expected UCX among them", "install NIXL with its UCX plugin")]
    nixl = ok("NIXL", f"starts; plugins: {', '.join(inventory.plugins)}")
    if inventory.transports is None:
        todo = "none needed if the loopback below is well; ucx_info -d of a UCX package says more"
        return [nixl, skipped("UCX transports", inventory.problem, todo)]
    names = sorted(set(inventory.transports))
    finding = ok("UCX transports", ", ".join(names))
    if not any(name.startswith(("tcp/", "rc", "dc", "ud", "srd")) for name in names):
        finding = warning(
            "UCX transports", f"{', '.join(names)}: none leaves this host", "add tcp to UCX_TLS, or unset it"
        )
    return [nixl, finding]


def check_registration(check: str, registered: process.Registered) -> Finding:
    return ok(check, f"{registered.rank.layout.region_bytes:,} bytes in {registered.seconds * 1e3:.1f} ms")


def check_loopback(check: str, read: process.ReadBack, held: Sequence[int], lanes: str) -> Finding:
    """What was read against what is held, by digest."""
    what = f"{read.num_bytes:,} bytes in {read.num_descriptors} descriptors between two processes"
    if lanes:
        what += f", UCX: {lanes}"
    if tuple(held) != read.digests:
        return problem(
            check,
            f"{what}: digests differ, {_hex(held)} held, {_hex(read.digests)} read",
            "do not use this machine: report it with these digests, and try UCX_TLS=tcp to find the faulty transport",
        )
    return ok(check, f"{what}, {read.seconds * 1e3:.1f} ms with the connection; digest {_hex(held)} on both sides")


def _hex(digests: Sequence[int]) -> str:
    return " ".join(f"{digest:#018x}" for digest in digests)


def check_reach(manifest: EngineManifest, where: str, is_installed: bool) -> list[Finding]:
    """Reads ``REACH_BYTES`` from every rank, at most ``MAX_RANKS_REACHED``."""
    check = "data plane"
    if not is_installed:
        return [skipped(check, "NIXL is not installed", _NEEDS_NIXL, where)]
    ranks = manifest.ranks[:MAX_RANKS_REACHED]
    if other := {rank.transport for rank in ranks} - {"nixl"}:
        return [
            skipped(check, f"transport {', '.join(sorted(other))}", "look at it with that transport's tools", where)
        ]
    reached: list[process.Reached] = []
    order = process.ReachOrder(msgspec.structs.replace(manifest, ranks=ranks, tp_size=1))
    with tempfile.TemporaryDirectory() as directory, Process(Path(directory), "reach") as reader:
        reader.order(order)
        try:
            while len(reached) < len(ranks):
                line = reader.next(START_LIMIT_S if not reached else process.READ_LIMIT_S + 10)
                assert isinstance(line, process.Reached)
                reached.append(line)
        except ProcessError as error:
            if error.stage == "registration":
                return [skipped(check, str(error), "run the doctor where a decode engine runs", where)]
            return [problem(check, f"{error.stage}: {error}", _reach_todo(), where)]
    return [check_reached(reached, where)]


def check_reached(reached: Sequence[process.Reached], where: str) -> Finding:
    failed = [line for line in reached if line.error]
    if failed:
        what = "; ".join(f"rank {line.rank}: {line.error}" for line in failed[:4])
        return problem("data plane", f"{len(failed)} of {len(reached)} ranks: {what}", _reach_todo(), where)
    slowest = max(line.seconds for line in reached)
    ranks = f"{len(reached)} rank" + "s" * (len(reached) > 1)
    return ok("data plane", f"read from {ranks} over NIXL, {slowest * 1e3:.1f} ms at most with the connection", where)


def _reach_todo() -> str:
    return (
        "let UCX's ports through between the hosts (it chooses them), and check that both use the same network devices"
    )
