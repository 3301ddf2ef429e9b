"""What does the operating system allow, and which network devices are there?"""

import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hybrid_connector.tools.checks.finding import Finding, ok, problem, skipped, warning

MIN_OPEN_FILES = 4096
"""Of a process: vLLM's own, a connection to each peer, and a few per UCX connection."""
MIN_SHARED_MEMORY_BYTES = 2**30
"""Where ranks of one engine, and UCX on one host, exchange data. Containers get 64 MiB unless told otherwise."""
MAX_CLOCK_RESOLUTION_S = 1e-3
_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device; ``state`` and ``rate`` as the kernel writes them: ``4: ACTIVE``, ``400 Gb/sec``."""

    device: str
    number: str
    state: str
    rate: str

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.state.partition(':')[2].strip() or self.state}, {self.rate}"


def check_host(root: Path = Path("/")) -> list[Finding]:
    """Limits, shared memory, clock and RDMA devices. ``root``: where the file system begins."""
    ports = read_ports(root)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        check_clock(time.get_clock_info("monotonic").monotonic, time.get_clock_info("monotonic").resolution),
        check_open_files(None if files == resource.RLIM_INFINITY else files),
        check_shared_memory(root / "dev/shm"),
        check_rdma(ports),
        check_locked_memory(
            None if locked == resource.RLIM_INFINITY else locked, bool(ports), may_lock=_may_lock(root)
        ),
    ]


def check_clock(is_monotonic: bool, resolution_s: float) -> Finding:
    """Leases count on it: each side on its own, so the hosts' clocks need not agree."""
    what = f"resolution {resolution_s:g} s"
    if is_monotonic and resolution_s <= MAX_CLOCK_RESOLUTION_S:
        return ok("clock", f"monotonic, {what}; clocks of different hosts need not agree")
    kind = "monotonic" if is_monotonic else "not monotonic"
    return problem("clock", f"{kind}, {what}", "choose another clock source of the kernel, such as tsc or kvm-clock")


def check_open_files(limit: int | None) -> Finding:
    if limit is None or limit >= MIN_OPEN_FILES:
        return ok("open files", "no limit" if limit is None else f"at most {limit} per process")
    return warning(
        "open files", f"at most {limit} per process", f"ulimit -n {MIN_OPEN_FILES}, or more, before vllm serve"
    )


def check_shared_memory(directory: Path) -> Finding:
    check = "shared memory"
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        return problem(check, f"{directory}: {error.strerror}", "mount a tmpfs there; vLLM's ranks need it too")
    what = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free in {directory}"
    if usage.free >= MIN_SHARED_MEMORY_BYTES:
        return ok(check, what)
    return warning(
        check, what, "give the container more: --ipc=host or --shm-size=8g, in Kubernetes an emptyDir of Memory"
    )


def read_ports(root: Path) -> list[Port]:
    """Every port of every RDMA device that the kernel knows."""
    return [
        Port(path.parent.parent.name, path.name, _read(path / "state"), _read(path / "rate"))
        for path in sorted(root.glob("sys/class/infiniband/*/ports/*"))
    ]


def check_rdma(ports: list[Port]) -> Finding:
    check = "RDMA devices"
    if not ports:
        return ok(check, "none: between hosts UCX has TCP only")
    what = "; ".join(map(str, ports))
    if any(port.is_active for port in ports):
        return ok(check, what)
    return warning(check, what, "no port is active: check cables and switch (ibstat), or data moves over TCP")


def check_locked_memory(limit_bytes: int | None, has_rdma: bool, *, may_lock: bool) -> Finding:
    """RDMA pins the whole cache, which the limit must allow unless the process has ``CAP_IPC_LOCK``."""
    check = "locked memory"
    what = "no limit" if limit_bytes is None else f"at most {limit_bytes / 2**10:g} KiB"
    if limit_bytes is None or may_lock or not has_rdma:
        why = "" if limit_bytes is None else ", which does not bind this process" if may_lock else ", no RDMA here"
        return ok(check, what + why)
    return problem(check, f"{what}, and RDMA pins the whole cache", "ulimit -l unlimited, or the capability IPC_LOCK")


def check_net_devices(wanted: str | None, root: Path = Path("/")) -> Finding:
    """``wanted``: the value of ``UCX_NET_DEVICES``."""
    check = "UCX_NET_DEVICES"
    if not wanted or wanted == "all" or wanted.startswith("^"):
        return ok(check, wanted or "unset: UCX may use all")
    known = {path.name for kind in ("net", "infiniband") for path in root.glob(f"sys/class/{kind}/*")}
    if not known:
        return skipped(check, f"{wanted}, and the kernel's list of devices cannot be read", "mount /sys, or unset it")
    missing = [name for name in wanted.split(",") if name.partition(":")[0] not in known]
    if missing:
        return problem(
            check, f"no device {', '.join(missing)} here", f"use some of {', '.join(sorted(known))}, or unset it"
        )
    return ok(check, wanted)


def _may_lock(root: Path) -> bool:
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_IPC_LOCK)
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
