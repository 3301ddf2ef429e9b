"""Does it work on this machine? Two real vLLM engines, a real router, and every byte compared.

1. Make a tiny hybrid model (or take ``--model``).
2. Start a prefill engine, a decode engine, one aggregated engine for reference, then ``vllm-router``.
3. Send prompts through the router's OpenAI API, and the same to the aggregated engine.
4. Compare what D loaded with what P held, byte for byte, and the answers.
5. Print a table; the exit status is 0 only if every prompt moved over NIXL and agreed.
"""

import argparse
import json
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.errors import PeerError
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.tools.compare import Captured, Comparison, Shapes, compare, read_captures
from hybrid_connector.tools.completions import MAX_TIE_NATS, Agreement, Answer, agree, complete, text_of
from hybrid_connector.tools.servers import Device, Servers, ServerSpec, Startup, count_gpus, free_ports

PROMPT_TOKENS = (5, 31, 32, 33, 200, 639, 640, 641, 1000, 1281, 2000)
"""Short, around the kernel block (32 tokens) and the logical block (640) of the tiny model, and long."""

_MODEL_NAME = "demo"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: its answer, the reference, and what moved for it. ``error``: what went wrong instead."""

    prompt_tokens: int
    answer: Answer | None = None
    agreement: Agreement | None = None
    captured: Captured | None = None
    comparison: Comparison | None = None
    error: str | None = None

    def problems(self) -> list[str]:
        """Everything about this prompt that must not be."""
        if self.error is not None:
            return [self.error]
        found = []
        if self.agreement is None or not self.agreement.within(MAX_TIE_NATS):
            found.append(f"answers differ: {self.agreement}")
        if self.captured is None or self.comparison is None:
            found.append("nothing was loaded: D computed the prompt itself")
            return found
        transports = {capture.meta["moved"]["transport"] for capture in self.captured.loaded}
        if transports != {"nixl"}:
            found.append(f"moved over {', '.join(sorted(transports))}, expected nixl")
        found.extend(f"bytes differ: {what}" for what in self.comparison.differing)
        return found


def add_parser(subcommands: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = subcommands.add_parser(
        "demo",
        help="run prefill, decode and router here, compare every byte and answer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engines run (default: cpu)")
    parser.add_argument("--prefill-tp", type=_positive, default=1, metavar="N", help="tensor-parallel size of P (1)")
    parser.add_argument("--decode-tp", type=_positive, default=1, metavar="N", help="tensor-parallel size of D (1)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this model, not a tiny one made here")
    parser.add_argument(
        "--engine-args",
        type=shlex.split,
        default=[],
        metavar="'...'",
        help="further options of vllm serve, for all engines",
    )
    parser.add_argument("--keep", action="store_true", help="leave the servers up until Ctrl-C and print a curl line")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="for logs and captures (default: temporary)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    console = Console()
    # What the user sees must not depend on the terminal being as wide as ours.
    if not console.is_terminal:
        console = Console(width=140)
    model = None if args.model is None else args.model.resolve()
    if model is not None and not (model / "config.json").is_file():
        raise ValueError(f"--model: expected a directory with a config.json, got {model}")
    work_dir = args.work_dir or Path(tempfile.mkdtemp(prefix="hybrid-connector-demo."))
    shutil.rmtree(work_dir / "captures", ignore_errors=True)
    if model is None:
        from hybrid_connector.tools.tiny_model import make_tiny_model  # torch, which other subcommands do without

        model = make_tiny_model(work_dir / "model")
    console.print(f"Model {model}; logs in {work_dir / 'logs'}")
    with Servers(work_dir / "logs", device=args.device) as servers:
        for spec in _specs(args, model, work_dir / "captures"):
            servers.add(spec)
        announce = _Announcer(console)
        announce.wait(servers)
        (port,) = free_ports(1)
        router = servers.start_router(servers.url("prefill"), servers.url("decode"), port)
        announce.wait(servers)
        with httpx.Client(timeout=300, trust_env=False) as client:
            rows = _send_all(console, client, router, servers.url("aggregated"), model, work_dir / "captures")
        console.print(_table(rows, args.prefill_tp, args.decode_tp))
        status = _conclude(console, rows, servers)
        if args.keep:
            _keep(console, router)
    if status == 0 and args.work_dir is None:
        shutil.rmtree(work_dir, ignore_errors=True)
    return status


def _specs(args: argparse.Namespace, model: Path, captures: Path) -> tuple[ServerSpec, ...]:
    """P, D and the aggregated engine. On CUDA each takes the next devices, starting anew where they run out."""
    ports = free_ports(3)
    common = ("--model", str(model), "--served-model-name", _MODEL_NAME, "--max-model-len", "4096")
    device: Device = args.device
    specs, next_gpu = [], 0
    num_gpus = count_gpus() if device == "cuda" else 0
    for name, port, role, size in (
        ("prefill", ports[0], "kv_producer", args.prefill_tp),
        ("decode", ports[1], "kv_consumer", args.decode_tp),
        ("aggregated", ports[2], None, 1),
    ):
        env: dict[str, str] = {}
        arguments = [*common, "--tensor-parallel-size", str(size)]
        if device == "cuda":
            if size > num_gpus:
                raise ValueError(f"{name}: tensor-parallel size {size} needs {size} GPUs, found {num_gpus}")
            gpus = [(next_gpu + i) % num_gpus for i in range(size)]
            next_gpu += size
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(gpus)))
            # All three may share a GPU, and a tiny model needs little.
            arguments += ["--gpu-memory-utilization", "0.25"]
        arguments += args.engine_args
        if role is not None:
            (side_port,) = free_ports(1)
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
            transfer = {
                "kv_connector": "HybridNixlConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"capture_dir": str(captures)},
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        specs.append(ServerSpec(name, port, tuple(arguments), env))
    return tuple(specs)


class _Announcer:
    """Says which server is ready when, each once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._seen: set[str] = set()

    def wait(self, servers: Servers) -> None:
        """Wait for every server."""
        if self._console.is_terminal:
            with self._console.status("starting the servers"):
                servers.wait_ready(progress=self._announce)
        else:
            servers.wait_ready(progress=self._announce)

    def _announce(self, startup: Startup) -> None:
        for name in startup.ready:
            if name not in self._seen:
                self._seen.add(name)
                self._console.print(f"  {name} is ready after {time.monotonic() - self._began:.0f} s")


def _send_all(
    console: Console, client: httpx.Client, router: str, aggregated: str, model: Path, captures: Path
) -> list[Row]:
    shapes = Shapes.from_model(model)
    rows: list[Row] = []
    seen: set[str] = set()
    for num_tokens in PROMPT_TOKENS:
        prompt = text_of(num_tokens)
        try:
            answer = complete(client, router, prompt, max_tokens=16, extra={"model": _MODEL_NAME})
            reference = complete(client, aggregated, prompt, max_tokens=16, extra={"model": _MODEL_NAME})
        except (PeerError, httpx.HTTPError) as error:
            rows.append(Row(num_tokens, error=str(error)))
            continue
        new = [captured for captured in read_captures(captures) if captured.request_id not in seen]
        seen.update(captured.request_id for captured in new)
        captured = new[-1] if new else None
        comparison = None if captured is None else compare(captured, shapes)
        rows.append(Row(answer.prompt_tokens, answer, agree(answer, reference), captured, comparison))
    return rows


def _table(rows: Sequence[Row], prefill_tp: int, decode_tp: int) -> Table:
    table = Table(title=f"Moved from P (TP {prefill_tp}) to D (TP {decode_tp}) over NIXL")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("answer against\naggregated engine")
    table.add_column("state bytes\ncompared")
    for kind in StateKind:
        table.add_column(f"{kind}\nbytes", justify="right")
    table.add_column("descrip-\ntors", justify="right")
    table.add_column("transfer\nms", justify="right")
    table.add_column("first\ntoken ms", justify="right")
    for row in rows:
        table.add_row(str(row.prompt_tokens), _say_agreement(row), _say_comparison(row), *_say_moved(row))
    return table


def _say_agreement(row: Row) -> str:
    if row.error is not None or row.agreement is None:
        return "[red]failed[/red]"
    parting = row.agreement
    if parting.parted_at is None:
        return "same"
    gap = "not in its top" if parting.gap_nats is None else f"{parting.gap_nats:.3f} nats"
    if parting.within(MAX_TIE_NATS):
        return f"same, tie at {parting.parted_at + 1} ({gap})"
    return f"[red]differs at {parting.parted_at + 1} ({gap})[/red]"


def _say_comparison(row: Row) -> str:
    if row.comparison is None:
        return "[red]none[/red]"
    if row.comparison.differing:
        return f"[red]{len(row.comparison.differing)} tensors differ[/red]"
    return f"{row.comparison.num_bytes:,} equal"


def _say_moved(row: Row) -> list[str]:
    first_token = "-" if row.answer is None else f"{row.answer.first_token_s * 1e3:.0f}"
    if row.captured is None:
        return ["-"] * (len(StateKind) + 2) + [first_token]
    moved = [capture.meta["moved"] for capture in row.captured.loaded]
    kinds: Counter[str] = Counter()
    for rank in moved:
        kinds.update(rank["kind_bytes"])
    return [
        *(f"{kinds[kind]:,}" for kind in StateKind),
        str(sum(rank["num_descriptors"] for rank in moved)),
        f"{max(rank['transfer_s'] + rank['post_s'] for rank in moved) * 1e3:.1f}",
        first_token,
    ]


def _conclude(console: Console, rows: Sequence[Row], servers: Servers) -> int:
    problems = [f"{row.prompt_tokens} tokens: {problem}" for row in rows for problem in row.problems()]
    if problems:
        for problem in problems:
            console.print(f"[red]{problem}[/red]")
        console.print(f"[red]{len(problems)} problems.[/red] Logs: {servers.log_dir}")
        return 1
    console.print(
        f"[green]All {len(rows)} prompts moved over NIXL; all state on D equals P's byte for byte; all answers agree."
    )
    return 0


def _keep(console: Console, router: str) -> None:
    body = json.dumps({"model": _MODEL_NAME, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0})
    console.print("\nThe servers stay up until Ctrl-C. Try:")
    console.print(f"curl -s {router}/v1/completions -H 'Content-Type: application/json' -d '{body}'", soft_wrap=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("stopping")
