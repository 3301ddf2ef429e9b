"""How does one process run several vLLM servers and a router, quickly, and leave nothing behind?

1. On CPU a *nursery* (this module run as a program) imports vLLM once and forks every server from there: an
   import costs seconds, a fork milliseconds. On CUDA each server is an ordinary subprocess.
2. Each server leads its own session, so that its engine core and workers are stopped with it.
3. `Servers.wait_ready` polls `/health` and raises `ServerDiedError` with the end of the log once one is gone.
4. Leaving `Servers` sends SIGTERM, then SIGKILL after a grace. The nursery does so when its caller dies.

vLLM on CPU wants spawned children, its dependencies may bring CUDA builds beside a CPU torch, and it spins where it
waits. The nursery deals with these (`_import_vllm`, `_adapt_vllm`), and nothing else has to.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
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
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Protocol, Self, TypeAlias

Device: TypeAlias = Literal["cpu", "cuda"]

HOST = "127.0.0.1"
STOP_GRACE_S = 15.0
_POLL_S = 0.1
_PORTS = range(12000, 32000)
_IDLE_POLL_MS = 2
_NIXL_DELAY_US = 100
_SHM_DIR = "/dev/shm/"
_NUM_LOG_LINES = 40
_PR_SET_CHILD_SUBREAPER = 36
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


class _SpinCondition(Protocol):
    busy_loop_s: float


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

    def start_router(self, prefill_url: str, decode_url: str, port: int, log: Path | None = None) -> str:
        """Start `vllm-router` for one P and one D, and return its URL.

        Start it once both engines are ready: it waits for them itself, but says nothing meanwhile.
        """
        path = self._new_log("router") if log is None else log
        (prometheus_port,) = free_ports(1)
        command = [_router_binary(), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", prefill_url, "--decode", decode_url, "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(prometheus_port), "--worker-startup-check-interval", "1"]
        url = f"http://{HOST}:{port}"
        pid = self._routers.run(command, path, _environment({}))
        self._processes["router"] = _Process("router", url, path, pid)
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
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise `ServerDiedError` if any server has ended."""
        for process in self._processes.values():
            code = self._exit_code(process)
            if code is not None:
                raise ServerDiedError(f"{process.name}: ended with {_describe(code)}\n{_tail(process.log)}")

    def stop(self, name: str | None = None, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop one server, or everything. Returns when none of their processes is left."""
        chosen = list(self._processes.values()) if name is None else [self._processes[name]]
        _stop_sessions([p.pid for p in chosen], grace_s, reap=lambda: [self._exit_code(p) for p in chosen])
        for process in chosen:
            del self._processes[process.name]
        if name is None:
            self._launcher.close()

    def kill(self, name: str) -> None:
        """Kill one server without any chance to clean up, as a lost host would."""
        self.stop(name, grace_s=0.0)

    def _exit_code(self, process: _Process) -> int | None:
        owner = self._routers if process.name == "router" else self._launcher
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
        with log.open("ab") as out:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        self._popens[popen.pid] = popen
        return popen.pid

    def exit_code(self, pid: int) -> int | None:
        return self._popens[pid].poll()

    def close(self) -> None:
        pass


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
                [
                    sys.executable,
                    "-m",
                    __name__ if __name__ != "__main__" else "hybrid_connector.tools.servers",
                ],
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


def _all_pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def _session_members(session: int) -> Iterator[int]:
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


def _stop_sessions(sessions: Iterable[int], grace_s: float, *, reap: Callable[[], object]) -> None:
    """SIGTERM to the leaders, who stop their children; SIGKILL to whatever is left after `grace_s`.

    Then remove the shared memory that only they had mapped: vLLM kills its own children before they can.
    """
    left = set(sessions)
    shared = {path for session in left for pid in _session_members(session) for path in _shared_memory(pid)}
    for leader in left if grace_s > 0 else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left:
        overdue = time.monotonic() >= deadline
        for session in tuple(left):
            members = list(_session_members(session))
            if not members:
                left.remove(session)
            elif overdue or session not in members:  # without its leader nobody stops the children
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ServerError):
            reap()
        if left:
            time.sleep(_POLL_S)
    if shared:
        shared -= {path for pid in _all_pids() for path in _shared_memory(pid)}
    for path in shared:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# The nursery process


def _import_vllm() -> Callable[[], None]:
    """Import what every server needs, without starting threads, and return the API server's entry point.

    Packages whose compiled part does not fit this torch are hidden, as if they were not installed. torchvision
    is needed to import Qwen3.5 (its module imports the vision variant's), so there only the two operators'
    schemas are added that torchvision's Python part refers to; nothing ever calls them.
    """
    import torch

    for name in ("torchaudio", "torchcodec"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            sys.modules[name] = None  # type: ignore[assignment]
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for schema in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        ):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(schema)  # type: ignore[no-untyped-call]
            _KEPT_LIBRARIES.append(library)
        importlib.import_module("torchvision")

    for name in (
        _API_SERVER,
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "vllm.model_executor.models.qwen3_5",
    ):
        importlib.import_module(name)
    _adapt_vllm()
    main: Callable[[], None] = importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main
    return main


def _adapt_vllm() -> None:
    """Change, before any fork, what vLLM assumes of processes and cores where no option can."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    envs = importlib.import_module("vllm.envs")
    queues = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    # vLLM looks at a model class in a fresh interpreter to keep CUDA out of this one. There is no CUDA here, and
    # a fresh interpreter would lack the fixes above.
    registry.__dict__["_run_in_subprocess"] = lambda inspect: inspect()
    # The CPU platform sets this variable to "spawn" in os.environ whatever the caller chose.
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"

    # With TP 2 every worker spins for a second after each message, which starves the engine whose turn it is
    # where processes outnumber cores. With this and `_calm_nixl` a request fell from 5.5 s to 0.2 s on two cores.
    wait = queues.SpinCondition.wait

    def wait_idle(condition: _SpinCondition, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = 0.0
        wait(condition, _IDLE_POLL_MS if timeout_ms is None else min(timeout_ms, _IDLE_POLL_MS))

    queues.SpinCondition.wait = wait_idle
    _calm_nixl()


def _calm_nixl() -> None:
    """Let NIXL's progress thread rest between polls: its Python API asks for no rest, which costs a core each."""
    try:
        bindings = importlib.import_module("nixl._api").nixlBind
    except ImportError:
        return

    class CalmAgentConfig(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _NIXL_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = CalmAgentConfig


_KEPT_LIBRARIES: list[object] = []
"""torch forgets an operator when its library object is collected."""


def _run_nursery() -> None:
    """Fork a server per line of stdin until stdin closes, then stop them all."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the reports
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = _import_vllm()
    running: set[int] = set()

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in running:
                    running.discard(pid)
                    with contextlib.suppress(BrokenPipeError):
                        print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), file=reports)

    pending = b""
    try:
        while True:
            reap()
            if not select.select([0], [], [], _POLL_S)[0]:
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    reports.close()
                    _become_server(main, order)
                running.add(pid)
                print(json.dumps({"name": order["name"], "pid": pid}), file=reports)
    finally:
        _stop_sessions(tuple(running), STOP_GRACE_S, reap=reap)


def _become_server(main: Callable[[], None], order: Mapping[str, object]) -> None:
    """Never returns: runs the API server in this forked process, in a session of its own."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        args, env = order["args"], order["env"]
        assert isinstance(args, list)
        assert isinstance(env, dict)
        os.environ.update(env)
        sys.argv = ["vllm", *args]
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # a forked child must not return into the nursery's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _run_nursery()
