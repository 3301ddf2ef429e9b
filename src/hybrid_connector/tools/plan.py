"""Can these two engines exchange state, how much moves, and how long does it take? No GPU, no weights, no vLLM.

1. Read the model's config.json, and the arguments of both sides as vllm serve takes them.
2. Lay out both sides' caches by vLLM's rules (docs/plan.md), plan as the connector does, or say what it would refuse.
3. Per prompt length: bytes by kind, descriptors, and the time by the cost model of each transport.

Where vLLM is installed, --check compares the layouts with its own.

example:
  hybrid-connector plan MODEL --prefill "--tensor-parallel-size 4" --decode "--tensor-parallel-size 2 --block-size 64"
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.errors import ConfigError, IncompatibleError, TransferError, UnsupportedError
from hybrid_connector.core.families import Attention
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.tools.manifests import planned_manifest, save_manifest
from hybrid_connector.tools.models.check import compare_with_vllm
from hybrid_connector.tools.models.config import load_config
from hybrid_connector.tools.models.engine import Blocks, Engine, describe_engine, parse_serve
from hybrid_connector.tools.reads import RankReads, list_reads, seconds, total_kinds
from hybrid_connector.transport.cost import DEFAULTS, SCATTER, Cost
from hybrid_connector.wire.manifest import refuse_difference

PROMPT_TOKENS = (1024, 8192, 32768)
_TRANSPORTS = {"cuda": ("cuda_ipc", "rdma", "tcp"), "cpu": ("shared_memory", "tcp")}
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt's blocks on both sides. ``num_tokens`` move, one less than it has where D recomputes the last."""

    prompt_tokens: int
    num_tokens: int
    src_block_ids: BlockIds
    dst_block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class Row:
    """``scattered``: descriptors where no block follows another, ``None`` where the blocks are a real request's."""

    request: Request
    reads: tuple[RankReads, ...]
    scattered: int | None

    @property
    def num_descriptors(self) -> int:
        return sum(rank.num_descriptors for rank in self.reads)


@dataclass(frozen=True, slots=True)
class Planned:
    """All there is to say. ``refusal``: the handshake's, and then no rows. ``differences``: to vLLM, if asked for."""

    model: str
    src: Engine
    dst: Engine
    refusal: str | None
    rows: tuple[Row, ...]
    costs: Mapping[str, Cost]
    scatter: Cost
    differences: Mapping[str, list[str]] | None

    @property
    def sides(self) -> tuple[tuple[str, Engine], tuple[str, Engine]]:
        return ("P", self.src), ("D", self.dst)


def add_parser(subcommands: Any) -> None:
    """Add ``plan`` to the command line."""
    parser = subcommands.add_parser(
        "plan",
        help="what would move between two engines, and how long it takes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory with a config.json, such a file, or OWNER/NAME")
    parser.add_argument("--prefill", default="", metavar="'...'", help="P's line of vllm serve, or its arguments")
    parser.add_argument("--decode", default="", metavar="'...'", help="D's line of vllm serve, or its arguments")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where they run (default: cuda)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=PROMPT_TOKENS, metavar="N", help="prompt lengths (1024 8192 32768)"
    )
    parser.add_argument(
        "--fragmented", type=int, default=0, metavar="PERCENT", help="blocks that do not follow the one before (0)"
    )
    parser.add_argument(
        "--like", type=Path, metavar="FILE", help="the blocks of a real request instead: a capture of capture_dir"
    )
    add_cost_options(parser)
    parser.add_argument("--check", action="store_true", help="compare the layouts with the vLLM that is installed here")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write p.json and d.json there, for explain")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """``--transport`` and ``--cost``, as ``explain`` has them too."""
    parser.add_argument("--transport", choices=sorted(DEFAULTS), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="NAME=US,US,GB/s",
        help="a transport's microseconds a read, microseconds a descriptor, and GB/s, as in rdma=30,0.5,45",
    )


def choose_costs(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Cost]:
    """The transports to show, with their costs. Raises ``ConfigError``."""
    given: dict[str, Cost] = {}
    for text in args.cost:
        name, equals, figures = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--cost: expected NAME=US,US,GB/s, got {text!r}")
        given[name] = Cost.parse(figures)
    shown = args.transport or [*names, *(name for name in given if name not in names)]
    return {name: given[name] if name in given else DEFAULTS[name] for name in shown}


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit status is 1 where the engines refuse each other or vLLM differs."""
    costs = choose_costs(args, _TRANSPORTS[args.device])
    config = load_config(args.model)
    engines = {}
    for side, line in (("P", args.prefill), ("D", args.decode)):
        try:
            engines[side] = describe_engine(config, parse_serve(line, args.device))
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"{side}: {error}") from error
    src, dst = engines["P"], engines["D"]
    requests = _requests(args, src, dst)
    refusal = _refusal(src, dst)
    rows = [] if refusal else [_row(src, dst, request, may_scatter=args.like is None) for request in requests]
    if args.save is not None:
        _save(args.save, src, dst, requests)
    differences = _check(args, src, dst) if args.check else None
    scatter = SCATTER["VRAM" if args.device == "cuda" else "DRAM"]
    planned = Planned(args.model, src, dst, refusal, tuple(rows), costs, scatter, differences)
    if args.json:
        print(json.dumps(_as_json(planned), indent=1))
    else:
        _show(planned, args.fragmented)
    return int(refusal is not None or any((differences or {}).values()))


def _refusal(src: Engine, dst: Engine) -> str | None:
    """What the handshake would say, ``None`` where it would say welcome."""
    try:
        refuse_difference(dst.factors, src.factors)
        plan_engine(dst.layouts(1), src.layouts(1))
    except IncompatibleError as error:
        return str(error)
    return None


def _requests(args: argparse.Namespace, src: Engine, dst: Engine) -> list[Request]:
    if args.like is not None:
        return [_captured(args.like, src)]
    requests = []
    for prompt_tokens in args.tokens:
        num_tokens = prompt_tokens - src.model.overwrites_state
        if num_tokens < 1:
            raise ConfigError(f"--tokens: expected at least {1 + src.model.overwrites_state}, got {prompt_tokens}")
        src_ids, dst_ids = (engine.block_ids(num_tokens, Blocks(args.fragmented)) for engine in (src, dst))
        requests.append(Request(prompt_tokens, num_tokens, src_ids, dst_ids))
    return requests


def _captured(path: Path, src: Engine) -> Request:
    """The request that a D rank's capture is of."""
    try:
        with np.load(path) as file:
            meta = json.loads(bytes(file["meta"]))
        moved = meta["moved"]
        src_ids, dst_ids = (tuple(map(tuple, moved[key])) for key in ("src_block_ids", "dst_block_ids"))
        num_tokens = int(meta["num_tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--like {path}: expected what D captured of a load: {error!r}") from error
    return Request(num_tokens + src.model.overwrites_state, num_tokens, src_ids, dst_ids)


def _row(src: Engine, dst: Engine, request: Request, *, may_scatter: bool) -> Row:
    reads = _reads(src, dst, request)
    if not may_scatter:
        return Row(request, reads, None)
    src_ids, dst_ids = (engine.block_ids(request.num_tokens, Blocks(100)) for engine in (src, dst))
    scattered = Request(request.prompt_tokens, request.num_tokens, src_ids, dst_ids)
    return Row(request, reads, sum(rank.num_descriptors for rank in _reads(src, dst, scattered)))


def _reads(src: Engine, dst: Engine, request: Request) -> tuple[RankReads, ...]:
    try:
        return list_reads(
            dst.layouts(_num_blocks(dst, request.dst_block_ids)),
            src.layouts(_num_blocks(src, request.src_block_ids)),
            request.dst_block_ids,
            request.src_block_ids,
            request.num_tokens,
        )
    except TransferError as error:
        raise ConfigError(f"{request.num_tokens} tokens: these blocks are not of such engines: {error}") from error


def _num_blocks(engine: Engine, block_ids: BlockIds) -> int:
    """A pool that the blocks fit into; how large it is says nothing about what moves."""
    last = max(block for ids in block_ids for block in ids if block is not None)
    return max(last + 1, engine.settings.num_blocks or 0)


def _check(args: argparse.Namespace, src: Engine, dst: Engine) -> dict[str, list[str]]:
    return {
        side: compare_with_vllm(engine, args.model, line)
        for side, engine, line in (("P", src, args.prefill), ("D", dst, args.decode))
    }


def _save(directory: Path, src: Engine, dst: Engine, requests: Sequence[Request]) -> None:
    """What each side would tell its peers, with a pool as large as the requests need."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, engine, ids in (
        ("p", src, [request.src_block_ids for request in requests]),
        ("d", dst, [request.dst_block_ids for request in requests]),
    ):
        num_blocks = max(_num_blocks(engine, block_ids) for block_ids in ids)
        save_manifest(planned_manifest(name, engine, num_blocks), directory / f"{name}.json")


# What is printed.


def _show(planned: Planned, fragmented: int) -> None:
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{planned.model}: {_say_model(planned.src)}")
    for side, engine in planned.sides:
        console.print(f"{side}: {_say_engine(engine)}")
        if engine.settings.ignored:
            console.print(f"   says nothing about caches, or is not known here: {' '.join(engine.settings.ignored)}")
    for note in _notes(planned):
        console.print(f"note: {note}")
    if planned.refusal is not None:
        console.print(f"P and D refuse each other: {planned.refusal}")
    else:
        console.print("P and D can exchange state. A request, all ranks of D together:")
        console.print(_table(planned))
        for line in _legend(planned, fragmented):
            console.print(line)
    for side, found in (planned.differences or {}).items():
        console.print(f"{side}: vLLM lays out the same caches" if not found else f"{side}: vLLM differs:")
        for difference in found:
            console.print(f"   {difference}")


def _table(planned: Planned) -> Table:
    table = Table()
    for heading in ("prompt\ntokens", *(f"{kind}\nbytes" for kind in StateKind), "descrip-\ntors"):
        table.add_column(heading, justify="right")
    for name in planned.costs:
        table.add_column(f"{name}\nms", justify="right")
    for row in planned.rows:
        kinds = total_kinds(row.reads)
        table.add_row(
            f"{row.request.prompt_tokens:,}",
            *(f"{kinds.get(kind, 0):,}" for kind in StateKind),
            f"{row.num_descriptors:,}" + (f"\nto {row.scattered:,}" if _is_range(row) else ""),
            *("\n".join(_say_times(row, cost, planned.scatter)) for cost in planned.costs.values()),
        )
    return table


def _is_range(row: Row) -> bool:
    return row.scattered is not None and row.scattered > row.num_descriptors


def _say_times(row: Row, cost: Cost, scatter: Cost) -> list[str]:
    direct, cheaper = (seconds(row.reads, cost, scatter, may_stage=may_stage) * 1e3 for may_stage in (False, True))
    return [f"{direct:.3g}"] if cheaper >= direct else [f"{direct:.3g}", f"staged {cheaper:.3g}"]


def _legend(planned: Planned, fragmented: int) -> list[str]:
    lines = []
    if any(map(_is_range, planned.rows)):
        lines.append(f"Descriptors: {fragmented} % of the blocks not following the one before, to none that does.")
    shown = "; ".join(f"{name} {cost}" for name, cost in planned.costs.items())
    lines.append(f"Times are estimates by the cost model: {shown}.")
    times = [_say_times(row, cost, planned.scatter) for row in planned.rows for cost in planned.costs.values()]
    if any(len(time) > 1 for time in times):
        lines.append("Staged: whole pages through a local buffer, shown where that is faster.")
    return lines


def _say_model(engine: Engine) -> str:
    model = engine.model
    attention = sum(isinstance(layer.state, Attention) for layer in model.layers)
    parts = [f"{attention} attention"] if attention else []
    if recurrent := len(model.layers) - attention:
        parts.append(f"{recurrent} recurrent")
    return f"{model.architecture}, {' and '.join(parts)} caches in {model.num_layers} layers"


def _say_engine(engine: Engine) -> str:
    settings, elements = engine.settings, engine.elements
    parts = [f"TP {settings.tp}", f"PP {settings.pp}"]
    if engine.backend is not None:
        pages = "" if engine.page_tokens == engine.block_tokens else f" in pages of {engine.page_tokens}"
        parts.append(
            f"{engine.backend.name}, blocks of {engine.block_tokens} tokens{pages}, K/V {elements.attention.name}"
        )
    if engine.model.is_hybrid or engine.backend is None:
        order = "DS" if settings.channel_first else "SD"
        parts.append(f"conv {elements.conv.name} ({order}), temporal {elements.temporal.name}")
    parts.append(f"{engine.num_groups} cache group{'s' * (engine.num_groups > 1)}, layout {settings.layout}")
    return "; ".join(parts)


def _notes(planned: Planned) -> list[str]:
    engines = planned.src, planned.dst
    notes = []
    if planned.src.model.overwrites_state:
        notes.append("P stops one token early, D computes the last prompt token itself.")
    if any(engine.settings.speculative for engine in engines):
        notes.append("layers of a draft model are not counted.")
    assumed = sorted({e.backend.name for e in engines if e.backend is not None and e.settings.backend is None})
    if assumed:
        notes.append(f"attention backend {' and '.join(assumed)} assumed; --attention-backend chooses another.")
    return notes


def _as_json(planned: Planned) -> dict[str, Any]:
    return {
        "model": planned.model,
        "architecture": planned.src.model.architecture,
        "p": _engine_as_json(planned.src),
        "d": _engine_as_json(planned.dst),
        "notes": _notes(planned),
        "refusal": planned.refusal,
        "requests": [_row_as_json(row, planned) for row in planned.rows],
        "differs_from_vllm": planned.differences,
    }


def _row_as_json(row: Row, planned: Planned) -> dict[str, Any]:
    direct_s, cheapest_s = (
        {name: seconds(row.reads, cost, planned.scatter, may_stage=may_stage) for name, cost in planned.costs.items()}
        for may_stage in (False, True)
    )
    return {
        "prompt_tokens": row.request.prompt_tokens,
        "moved_tokens": row.request.num_tokens,
        "kind_bytes": total_kinds(row.reads),
        "num_descriptors": row.num_descriptors,
        "num_descriptors_scattered": row.scattered,
        "ranks": [
            {"rank": rank.dst_rank, "kind_bytes": rank.kinds, "num_descriptors": rank.num_descriptors}
            for rank in row.reads
        ],
        "direct_s": direct_s,
        "cheapest_s": cheapest_s,
    }


def _engine_as_json(engine: Engine) -> dict[str, Any]:
    settings, elements = engine.settings, engine.elements
    return {
        "tp": settings.tp,
        "pp": settings.pp,
        "device": settings.device,
        "attention_backend": None if engine.backend is None else engine.backend.name,
        "block_tokens": engine.block_tokens,
        "page_tokens": engine.page_tokens,
        "num_groups": engine.num_groups,
        "layout": settings.layout,
        "conv_channel_first": settings.channel_first,
        "attention_dtype": elements.attention.name,
        "conv_dtype": elements.conv.name,
        "temporal_dtype": elements.temporal.name,
        "ignored": list(settings.ignored),
    }
