"""Which P rank supplies which part of which tensor, in how many runs, and why so? Two manifests are all it needs.

A manifest is what an engine tells its peers: a file that --save wrote, or HOST:PORT of an engine's side channel (the
secret comes from the environment, as for the engine). A decode engine of role kv_consumer has one where it was given
VLLM_NIXL_SIDE_CHANNEL_PORT; `hybrid-connector plan --save` writes what it would say. Two files are all a bug report
about geometry needs.

example:
  hybrid-connector explain p:5600 --save p.json
  hybrid-connector explain p:5600 d:5600
  hybrid-connector explain p.json d.json
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_connector.core.blocks import BlockIds, RankLayout
from hybrid_connector.core.errors import ConfigError, IncompatibleError, TransferError
from hybrid_connector.core.planning import Origin, plan_engine, trace_transfer
from hybrid_connector.tools.manifests import fetch_manifest, save_manifest
from hybrid_connector.tools.models.engine import Blocks
from hybrid_connector.tools.plan import add_cost_options, choose_costs
from hybrid_connector.tools.reads import Part, RankReads, list_reads
from hybrid_connector.transport.cost import SCATTER, START, Cost, Read
from hybrid_connector.wire.manifest import EngineManifest, refuse_difference

MAX_TOKENS = 8192
"""Of the request that is counted where nobody names one; fewer where the engines have not the blocks for it."""


def add_parser(subcommands: Any) -> None:
    """Add ``explain`` to the command line."""
    parser = subcommands.add_parser(
        "explain",
        help="which P rank supplies which part of which tensor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefill", metavar="P", help="P's manifest: a file, or HOST:PORT of its side channel")
    parser.add_argument("decode", metavar="D", nargs="?", help="D's manifest, likewise")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write P's manifest there and end, where there is no D"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help=f"count a request of N tokens (up to {MAX_TOKENS})")
    parser.add_argument("--fragmented", type=int, default=0, metavar="PERCENT", help="as for plan (0)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds to wait for an engine (5)")
    add_cost_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation; the exit status is 1 where the engines refuse each other."""
    src = fetch_manifest(args.prefill, args.timeout)
    if args.save is not None:
        save_manifest(src, args.save)
    if args.decode is None:
        if args.save is None:
            raise ConfigError("expected two manifests to explain, or one and --save FILE")
        return 0
    explanation = _explain(src, fetch_manifest(args.decode, args.timeout), args)
    if args.json:
        print(json.dumps(_as_json(explanation), indent=1))
    else:
        print("\n".join(_say(explanation)))
    return int(bool(explanation.refusals))


# What there is to say.


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers of a D rank that get the same parts of their tensors from the same ranks, and the first's origins."""

    layers: tuple[str, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class RankExplanation:
    """One D rank: where its tensors come from, and what it reads for the request; neither where there is no plan."""

    rank: int
    alike: tuple[Alike, ...]
    reads: RankReads


@dataclass(frozen=True, slots=True)
class Explanation:
    """``refusals``: what the handshake would say. ``ranks``: empty where even the geometry does not fit."""

    src: EngineManifest
    dst: EngineManifest
    num_tokens: int
    transport: str
    transfer: Cost
    scatter: Cost
    refusals: tuple[str, ...]
    ranks: tuple[RankExplanation, ...]


def _explain(src: EngineManifest, dst: EngineManifest, args: argparse.Namespace) -> Explanation:
    memory = dst.ranks[0].memory
    costs = choose_costs(args, [START[memory]])
    transport, transfer = next(iter(costs.items()))
    refusals = []
    srcs, dsts = ([rank.layout for rank in manifest.ranks] for manifest in (src, dst))
    ranks: tuple[RankExplanation, ...] = ()
    num_tokens = args.tokens or _fitting_tokens(srcs, dsts)
    for check in (lambda: refuse_difference(dst.factors, src.factors), lambda: plan_engine(dsts, srcs)):
        try:
            check()
        except IncompatibleError as error:
            refusals.append(str(error))
    try:
        src_ids, dst_ids = (_block_ids(layouts, num_tokens, args.fragmented) for layouts in (srcs, dsts))
        reads = list_reads(dsts, srcs, dst_ids, src_ids, num_tokens)
        ranks = tuple(
            RankExplanation(rank.rank, _alike(trace_transfer(rank, srcs)), read)
            for rank, read in zip(dsts, reads, strict=True)
        )
    except IncompatibleError:
        pass  # said above
    except TransferError as error:
        raise ConfigError(f"--tokens {num_tokens}: {error}") from error
    return Explanation(src, dst, num_tokens, transport, transfer, SCATTER[memory], tuple(refusals), ranks)


def _block_ids(layouts: Sequence[RankLayout], num_tokens: int, fragmented: int) -> BlockIds:
    blocks = Blocks(fragmented)
    return tuple(blocks.take(group.num_request_blocks(num_tokens)) for group in layouts[0].groups)


def _fitting_tokens(*sides: Sequence[RankLayout]) -> int:
    """A power of two of tokens that both engines have blocks for."""
    num_tokens = MAX_TOKENS
    while num_tokens > 1 and not all(_fits(layouts, num_tokens) for layouts in sides):
        num_tokens //= 2
    return num_tokens


def _fits(layouts: Sequence[RankLayout], num_tokens: int) -> bool:
    last = max(ids[-1] or 0 for ids in _block_ids(layouts, num_tokens, 0))
    return last < min(group.num_blocks for group in layouts[0].groups)


def _alike(origins: Sequence[Origin]) -> tuple[Alike, ...]:
    """The origins by layer, layers with the same ones together."""
    by_layer: dict[str, list[Origin]] = defaultdict(list)
    for origin in origins:
        by_layer[origin.layer].append(origin)
    same: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for layer, its in by_layer.items():
        same[tuple((_short(o), o.box, o.src_rank, o.replicas, o.src_page, o.dst_page, o.copy) for o in its)].append(
            layer
        )
    return tuple(Alike(tuple(layers), tuple(by_layer[layers[0]])) for layers in same.values())


def _short(origin: Origin) -> str:
    """The tensor's name within its layer."""
    return origin.tensor.removeprefix(f"{origin.layer}.")


# What is printed.


def _say(explanation: Explanation) -> list[str]:
    lines = [f"{side}: {_say_engine(manifest)}" for side, manifest in (("P", explanation.src), ("D", explanation.dst))]
    lines += [f"P and D refuse each other: {refusal}" for refusal in explanation.refusals]
    axes = _axes(explanation.dst)
    for rank in explanation.ranks:
        lines.append(f"\nD rank {rank.rank}")
        for alike in rank.alike:
            lines.append(f"  {_say_layers(alike.layers)}")
            lines += [f"    {_say_origin(origin, axes)}" for origin in alike.origins]
        lines.append(
            f"  a request of {explanation.num_tokens:,} tokens: {rank.reads.num_descriptors:,} descriptors, "
            + ", ".join(f"{num_bytes:,} bytes {kind}" for kind, num_bytes in sorted(rank.reads.kinds.items()))
        )
        lines += [f"    {_say_part(part, explanation)}" for part in rank.reads.parts]
    if explanation.ranks:
        lines.append(f"\nTimes by the cost model of {explanation.transport}: {explanation.transfer}.")
    return lines


def _say_engine(manifest: EngineManifest) -> str:
    rank = manifest.ranks[0]
    lengths = [group.block_tokens for group in rank.layout.groups]
    groups = ", ".join("recurrent" if tokens is None else f"blocks of {tokens} tokens" for tokens in lengths)
    return (
        f"{manifest.engine_id} (vLLM {manifest.vllm_version}): TP {manifest.tp_size}, PP {manifest.pp_size}; "
        f"{rank.memory}, {rank.transport}; {groups}"
    )


def _axes(manifest: EngineManifest) -> Mapping[str, tuple[str, ...]]:
    return {
        shard.tensor.name: shard.tensor.axes
        for rank in manifest.ranks
        for layer in rank.layout.layers
        for shard in layer.shards
    }


def _say_layers(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}, {len(layers)} layers alike"


def _say_origin(origin: Origin, axes: Mapping[str, tuple[str, ...]]) -> str:
    box = " ".join(f"{axis} {part}" for axis, part in zip(axes[origin.tensor], origin.box.intervals, strict=True))
    others = [str(rank) for rank in origin.replicas if rank != origin.src_rank]
    replicas = f" (as well on {', '.join(others)})" if others else ""
    pages = f", P's page {origin.src_page} to D's page {origin.dst_page} of a period" if _in_period(origin) else ""
    num_runs = origin.num_bytes // origin.copy.run_bytes
    runs = f"{num_runs} run{'s' * (num_runs > 1)} of {origin.copy.run_bytes:,} bytes"
    return f"{_short(origin)}: {box} from P rank {origin.src_rank}{replicas}{pages}, {runs}"


def _in_period(origin: Origin) -> bool:
    return (origin.src_page, origin.dst_page) != (0, 0)


def _say_part(part: Part, explanation: Explanation) -> str:
    weighed = part.choose(explanation.transfer, explanation.scatter)
    choice = weighed.choice
    direct = _say_read(weighed.direct, "runs", choice.direct_s)
    where = f"P rank {part.src_rank}, group {part.bound.src_group} to group {part.bound.dst_group}"
    if weighed.staged is None or choice.staged_s is None:
        return f"{where}: direct, {direct}; whole pages would be no fewer"
    staged = _say_read(weighed.staged, "pieces", choice.staged_s)
    if weighed.is_staged:
        return f"{where}: staged is cheaper, whole pages in {staged}; direct {direct}"
    return f"{where}: direct, {direct}; staged in {staged}"


def _say_read(read: Read, what: str, seconds: float) -> str:
    return f"{read.num_descriptors:,} {what}, {read.num_bytes:,} bytes, {seconds * 1e3:.3g} ms"


def _as_json(explanation: Explanation) -> dict[str, Any]:
    axes = _axes(explanation.dst)
    return {
        "p": explanation.src.engine_id,
        "d": explanation.dst.engine_id,
        "refusals": list(explanation.refusals),
        "num_tokens": explanation.num_tokens,
        "transport": explanation.transport,
        "ranks": [
            {
                "rank": rank.rank,
                "num_descriptors": rank.reads.num_descriptors,
                "kind_bytes": dict(rank.reads.kinds),
                "layers": [
                    {"layers": list(alike.layers), "parts": [_origin_as_json(origin, axes) for origin in alike.origins]}
                    for alike in rank.alike
                ],
                "reads": [_part_as_json(part, explanation) for part in rank.reads.parts],
            }
            for rank in explanation.ranks
        ],
    }


def _origin_as_json(origin: Origin, axes: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    bounds = [[part.start, part.stop] for part in origin.box.intervals]
    return {
        "tensor": _short(origin),
        "kind": origin.kind,
        "box": dict(zip(axes[origin.tensor], bounds, strict=True)),
        "src_rank": origin.src_rank,
        "replicas": list(origin.replicas),
        "src_page": origin.src_page,
        "dst_page": origin.dst_page,
        "run_bytes": origin.copy.run_bytes,
        "num_runs": origin.num_bytes // origin.copy.run_bytes,
    }


def _part_as_json(part: Part, explanation: Explanation) -> dict[str, Any]:
    weighed = part.choose(explanation.transfer, explanation.scatter)
    direct, staged, choice = weighed.direct, weighed.staged, weighed.choice
    return {
        "src_rank": part.src_rank,
        "src_group": part.bound.src_group,
        "dst_group": part.bound.dst_group,
        "direct": {"descriptors": direct.num_descriptors, "bytes": direct.num_bytes, "s": choice.direct_s},
        "staged": None
        if staged is None
        else {"descriptors": staged.num_descriptors, "bytes": staged.num_bytes, "s": choice.staged_s},
        "cheaper": "staged" if weighed.is_staged else "direct",
    }
