"""How does one process run several vLLM servers and a router, quickly, and leave nothing behind?

1. On CPU a *nursery* (``tools.nursery``) imports vLLM once and forks every server from there: an import costs
   seconds, a fork milliseconds. On CUDA each server is an ordinary subprocess.
2. Each server leads its own session, so that its engine core and workers are stopped with it.
3. `Servers.wait_ready` polls `/health` and raises `ServerDiedError` with the end of the log once one is gone.
4. Leaving `Servers` sends SIGTERM, then SIGKILL after a grace. The nursery does so when its caller dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Protocol, Self, TypeAlias

from hybrid_connector.tools.sessions import POLL_S, session_members, stop_sessions, uninterrupted

Device: TypeAlias = Literal["cpu", "cuda"]

HOST = "127.0.0.1"
STOP_GRACE_S = 15.0
_PORTS = range(12000, 32000)
_NUM_LOG_LINES = 40
_API_SERVER = "vllm.entrypoints.openai.api_server"

CPU_ENV: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",  # a forked child must not inherit an OpenMP pool
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with TP 1 the worker lives in the engine core: one process less
    "TORCH_COMPILE_DISABLE": "1",  # else the first requests compile small helpers (sampling, embedding)
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ARGS: tuple[str, ...] = (
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    "1073741824",  # only a bound; being explicit, it skips the profiling run
    "--num-gpu-blocks-override",
    "128",  # what is really allocated: few blocks, since touching the memory first costs time
)
_COMMON_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": f"{HOST},localhost",
    "no_proxy": f"{HOST},localhost",
    "VLLM_HOST_IP": HOST,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_NO_USAGE_STATS": "1",
}
_UNSET_ENV = ("UCX_TLS",)  # without tcp in it, UCX has no active-message transport and NIXL fails


class ServerError(RuntimeError):
    """A server could not be started, died, or did not become ready."""


class ServerDiedError(ServerError):
    """A server ended while it was needed; the message ends with its log's last lines."""


class ServerNotReadyError(ServerError):
    """A server did not answer `/health` in time; the message ends with its log's last lines."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One vLLM API server: `args` and `env` come after, and override, the device's defaults."""

    name: str
    port: int
    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name: expected a file name, got {self.name!r}")
        if not 0 < self.port < 65536:
            raise ValueError(f"{self.name}.port: expected 1..65535, got {self.port}")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def command_args(self, device: Device) -> tuple[str, ...]:
        """The arguments of the API server; a repeated option's last value counts."""
        defaults = CPU_ARGS if device == "cpu" else ()
        return ("--host", HOST, "--port", str(self.port), *defaults, *self.args)


@dataclass(frozen=True, slots=True)
class Startup:
    """What `wait_ready` reports while it waits."""

    ready: tuple[str, ...]
    waiting: tuple[str, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Process:
    """One running program; `pid` is also its session and process group."""

    name: str
    url: str
    log: Path
    pid: int


class _Launcher(Protocol):
    def launch(self, spec: ServerSpec, log: Path) -> int: ...
    def exit_code(self, pid: int) -> int | None: ...
    def close(self) -> None: ...


def count_gpus() -> int:
    """At least one. Raises ``ValueError`` where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    return torch.cuda.device_count()


def free_ports(count: int) -> tuple[int, ...]:
    """`count` different loopback ports that nobody uses at the moment.

    They lie below the range the kernel picks ports from: a server binds seconds later, and until then any outgoing
    connection could take a port from that range.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            ports.append(port)
        if len(ports) == count:
            return tuple(ports)
    raise ServerError(f"free_ports: expected {count} free ports in {_PORTS}, found {len(ports)}")


def start(specs: Sequence[ServerSpec], log_dir: Path, *, device: Device = "cpu") -> Servers:
    """Start every server without waiting; use the result as a context manager. Logs go to `log_dir/NAME.log`.

    Raises `ServerError` if vLLM cannot be imported.
    """
    servers = Servers(log_dir, device=device)
    try:
        for spec in specs:
            servers.add(spec)
    except BaseException:
        servers.stop()
        raise
    return servers


class Servers:
    """Running servers and routers, by name. Leaving the context stops them all."""

    def __init__(self, log_dir: Path, *, device: Device = "cpu") -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = log_dir
        self._processes: dict[str, _Process] = {}
        self._routers = _Subprocesses()
        self._launcher: _Launcher = _Nursery(log_dir / "nursery.log") if device == "cpu" else _Subprocesses()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def url(self, name: str) -> str:
        return self._processes[name].url

    def log(self, name: str) -> Path:
        return self._processes[name].log

    def add(self, spec: ServerSpec) -> None:
        """Start one more server; it costs no second import on CPU."""
        log = self._new_log(spec.name)
        self._processes[spec.name] = _Process(spec.name, spec.url, log, self._launcher.launch(spec, log))

    def start_router(self, prefill_url: str, decode_url: str, port: int, name: str = "router") -> str:
        """Start `vllm-router` for one P and one D, and return its URL.

        Start it once both engines are ready: it waits for them itself, but says nothing meanwhile.
        """
        log = self._new_log(name)
        (prometheus_port,) = free_ports(1)
        command = [_router_binary(), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", prefill_url, "--decode", decode_url, "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(prometheus_port), "--worker-startup-check-interval", "1"]
        url = f"http://{HOST}:{port}"
        self._processes[name] = _Process(name, url, log, self._routers.run(command, log, _environment({})))
        return url

    def wait_ready(
        self, timeout_s: float = 300.0, progress: Callable[[Startup], None] | None = None
    ) -> Mapping[str, float]:
        """Wait until every server answers `/health`; returns the seconds each took from this call on.

        Raises `ServerDiedError` at once when one ends, `ServerNotReadyError` after `timeout_s`.
        """
        began = time.monotonic()
        took_s: dict[str, float] = {}
        while True:
            self.check_alive()
            for process in self._processes.values():
                if process.name not in took_s and _is_healthy(process.url):
                    took_s[process.name] = time.monotonic() - began
            elapsed_s = time.monotonic() - began
            waiting = tuple(name for name in self._processes if name not in took_s)
            if progress is not None:
                progress(Startup(tuple(took_s), waiting, elapsed_s))
            if not waiting:
                return took_s
            if elapsed_s > timeout_s:
                late = self._processes[waiting[0]]
                expected = f"expected {late.url}/health to answer within {timeout_s:.0f} s"
                raise ServerNotReadyError(f"{late.name}: {expected}\n{_tail(late.log)}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise `ServerDiedError` if any server has ended."""
        for process in self._processes.values():
            code = self._exit_code(process)
            if code is not None:
                raise ServerDiedError(f"{process.name}: ended with {_describe(code)}\n{_tail(process.log)}")

    def stop(self, name: str | None = None, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop one server, or everything. Returns when none of their processes is left."""
        chosen = list(self._processes.values()) if name is None else [self._processes[name]]

        def reap() -> None:
            for process in chosen:
                with contextlib.suppress(ServerError):
                    self._exit_code(process)

        stop_sessions([process.pid for process in chosen], grace_s, reap=reap)
        for process in chosen:
            del self._processes[process.name]
        if name is None:
            self._launcher.close()
            self._routers.close()

    def pids(self, name: str) -> tuple[int, ...]:
        """All processes of one server."""
        return tuple(session_members(self._processes[name].pid))

    def kill(self, name: str) -> None:
        """Kill one server without any chance to clean up, as a lost host would."""
        self.stop(name, grace_s=0.0)

    def _exit_code(self, process: _Process) -> int | None:
        owner = self._routers if self._routers.has(process.pid) else self._launcher
        return owner.exit_code(process.pid)

    def _new_log(self, name: str) -> Path:
        if name in self._processes:
            raise ValueError(f"{name}: expected a new server name, one is running already")
        log = self.log_dir / f"{name}.log"
        log.write_bytes(b"")
        return log


class _Subprocesses:
    """Programs started the ordinary way."""

    def __init__(self) -> None:
        self._popens: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, spec: ServerSpec, log: Path) -> int:
        command = [sys.executable, "-m", _API_SERVER, *spec.command_args("cuda")]
        return self.run(command, log, _environment(spec.env))

    def run(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        with log.open("ab") as out, uninterrupted():
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
            self._popens[popen.pid] = popen
        return popen.pid

    def has(self, pid: int) -> bool:
        return pid in self._popens

    def exit_code(self, pid: int) -> int | None:
        return self._popens[pid].poll()

    def close(self) -> None:
        """Stop what still runs: an interruption may have come before anybody else knew of it."""
        running = [pid for pid in self._popens if self.exit_code(pid) is None]
        stop_sessions(running, STOP_GRACE_S, reap=lambda: [self.exit_code(pid) for pid in running])


class _Nursery:
    """The caller's end of the process that imports vLLM once and forks servers.

    Lines of JSON both ways: `{"name", "args", "env", "log"}` in; `{"name", "pid"}` and `{"pid", "code"}` out.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._exit_codes: dict[int, int] = {}
        self._pids: dict[str, int] = {}
        self._partial_line = b""
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "hybrid_connector.tools.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=_environment(CPU_ENV),
                start_new_session=True,
            )

    def launch(self, spec: ServerSpec, log: Path) -> int:
        order = {
            "name": spec.name,
            "args": spec.command_args("cpu"),
            "env": dict(spec.env),
            "log": str(log.absolute()),
        }
        self._pids.pop(spec.name, None)
        try:
            _stream(self._popen.stdin).write(json.dumps(order).encode() + b"\n")
            _stream(self._popen.stdin).flush()
        except BrokenPipeError:
            raise self._died() from None
        while spec.name not in self._pids:
            self._read(timeout_s=None)
        return self._pids[spec.name]

    def exit_code(self, pid: int) -> int | None:
        self._read(timeout_s=0.0)
        return self._exit_codes.get(pid)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            _stream(self._popen.stdin).close()
        try:
            self._popen.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        _stream(self._popen.stdout).close()

    def _read(self, timeout_s: float | None) -> None:
        stdout = _stream(self._popen.stdout)
        if not select.select([stdout], [], [], timeout_s)[0]:
            return
        data = os.read(stdout.fileno(), 65536)
        if not data:
            raise self._died()
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "code" in report:
                self._exit_codes[report["pid"]] = report["code"]
            else:
                self._pids[report["name"]] = report["pid"]
                self._exit_codes.pop(report["pid"], None)

    def _died(self) -> ServerDiedError:
        return ServerDiedError(f"nursery: ended with {_describe(self._popen.wait())}\n{_tail(self._log)}")


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, **_COMMON_ENV, **extra}
    for name in _UNSET_ENV:
        if name not in extra:
            env.pop(name, None)
    return env


def _router_binary() -> str:
    beside = Path(sys.executable).with_name("vllm-router")
    found = str(beside) if beside.exists() else shutil.which("vllm-router")
    if found is None:
        raise ServerError("vllm-router: expected it beside the Python interpreter or on PATH (pip install vllm-router)")
    return found


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = "\n".join(f"  | {line}" for line in lines[-_NUM_LOG_LINES:])
    return f"last lines of {log}:\n{shown}"


def _describe(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the nursery is always started with pipes"
    return stream
