"""How do many vLLM servers start quickly on a CPU? One process imports vLLM and forks a server per order.

1. Import what every server needs, around packages whose compiled part does not fit this torch.
2. Adapt what vLLM's CPU build assumes of its processes and gets wrong, before any fork.
3. Read orders from stdin, one JSON object a line, and fork; report pids and exit codes on stdout.
4. When stdin closes, stop every server.

Run as a program by ``tools.servers``; nothing imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from hybrid_connector.tools.cpu_kernels import supply_missing_kernels
from hybrid_connector.tools.sessions import POLL_S, stop_sessions
from hybrid_connector.tools.unfit_packages import hide_unfit_packages

STOP_GRACE_S = 15.0
_IDLE_POLL_MS = 2
_NIXL_DELAY_US = 100
_PR_SET_CHILD_SUBREAPER = 36


class _SpinCondition(Protocol):
    busy_loop_s: float


def import_vllm() -> Callable[[], None]:
    """Import what every server needs, without starting threads, and return the API server's entry point."""
    hide_unfit_packages()
    for name in (
        "vllm.entrypoints.openai.api_server",
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
    supply_missing_kernels()


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


def _run_nursery() -> None:
    """Fork a server per line of stdin until stdin closes, then stop them all."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the reports
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = import_vllm()
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
            if not select.select([0], [], [], POLL_S)[0]:
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
        stop_sessions(tuple(running), STOP_GRACE_S, reap=reap)


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
        faulthandler.enable(2)  # else a crash in native code leaves no word in the log
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
