"""What does it cost to say what is to be read? No bytes move, no NIXL.

1. *bind*: per request, addresses of all runs (``Binder``), the choice of a way for each part, and, where the pages
   differ, chunks of whole pages with their runs; over tokens, layers and per cent of blocks that do not follow the one
   before. Best of ``--repeats``, milliseconds.
2. *handshake*, with so many blocks in 60 layers: P encodes its manifest; D's scheduler decodes, compares and plans it;
   a worker of D plans its own part and prepares to bind. Each in a process of its own, so each is held against
   ``--handshake-limit-ms``; also, what the worker keeps in memory must not grow with the blocks, else exit status 1.

A line of JSON each; the same for people on stderr.

    python integration/benchmarks/bind.py --output bind.jsonl
"""

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from shapes import MODELS, Pair, make_pair

from hybrid_connector.core.planning import plan_engine, plan_transfer
from hybrid_connector.tools.models.config import read_config
from hybrid_connector.tools.models.engine import describe_engine, parse_serve
from hybrid_connector.transport.binding import Binder, join_parts
from hybrid_connector.transport.cost import DEFAULTS, SCATTER, is_staged
from hybrid_connector.transport.scatter import Rows
from hybrid_connector.transport.staging import cut
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest, refuse_difference

CHUNK_BYTES = 64 << 20


def best_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return round(min(times) * 1e3, 4)


def bind(pair: Pair, repeats: int) -> dict[str, Any]:
    """Milliseconds of each step for one request, and what comes of it."""
    binder = Binder(plan_transfer(pair.dst, pair.srcs), pair.dst, pair.srcs)
    ids = pair.src_blocks, pair.dst_blocks, pair.num_tokens
    bound = binder.bind_parts(*ids)
    cost, scatter = DEFAULTS["cuda_ipc"], SCATTER["VRAM"]
    staged = [part for parts in bound for part in parts if part.pages() is not None]
    by_rank = [[part for part in parts if part.pages() is not None] for parts in bound]
    chunks = [chunk for parts in by_rank if parts for chunk in cut(parts, CHUNK_BYTES)]
    return {
        "runs": sum(map(len, map(join_parts, bound))),
        "bind_ms": best_ms(lambda: [join_parts(parts) for parts in binder.bind_parts(*ids)], repeats),
        "choose_ms": best_ms(lambda: [is_staged(part, cost, scatter) for parts in bound for part in parts], repeats),
        "picks_staged": sum(is_staged(part, cost, scatter) for parts in bound for part in parts),
        "parts": sum(map(len, bound)),
        "pages": sum(len(chunk.page_src) for chunk in chunks),
        "cut_ms": best_ms(lambda: [cut(parts, CHUNK_BYTES) for parts in by_rank if parts], repeats) if staged else 0.0,
        "rows_ms": best_ms(lambda: [Rows.of(0, c.run_at, c.run_dst, c.run_bytes) for c in chunks], repeats),
    }


def handshake(num_blocks: int, repeats: int) -> dict[str, Any]:
    """What D does when it meets P (TP 2 to TP 1, 60 layers), from P's manifest to a binder."""
    config = read_config({**MODELS["qwen3.5-397b"][0], "num_hidden_layers": 60}, "config")
    src, dst = (describe_engine(config, parse_serve(f"-tp {tp}", "cuda")) for tp in (2, 1))
    manifest = EngineManifest(
        protocol_version=1,
        engine_id="P",
        incarnation="1",
        tp_size=2,
        factors=src.factors,
        vllm_version="",
        connector_version="",
        lease_s=30.0,
        ranks=tuple(
            RankManifest(layout.rank, layout, 1 << 30, "VRAM", 0, "nixl", b"identity")
            for layout in src.layouts(num_blocks)
        ),
    )
    (mine,) = dst.layouts(num_blocks)

    encoded = msgspec.msgpack.encode(manifest)

    def schedule() -> None:
        theirs = msgspec.msgpack.decode(encoded, type=EngineManifest)
        refuse_difference(Factors(dst.factors.items), theirs.factors)
        plan_engine([mine], [rank.layout for rank in theirs.ranks])

    def work() -> Binder:
        srcs = [rank.layout for rank in manifest.ranks]
        return Binder(plan_transfer(mine, srcs), mine, srcs, src_bases={rank.rank: 1 << 30 for rank in manifest.ranks})

    times = {
        "encode_ms": best_ms(lambda: msgspec.msgpack.encode(manifest), repeats),
        "scheduler_ms": best_ms(schedule, repeats),
        "worker_ms": best_ms(work, repeats),
    }
    tracemalloc.start()
    kept = work()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return {"blocks": num_blocks, "layers": 60, "manifest_bytes": len(encoded), **times, "kept_bytes": num_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3.8-2.4t")
    parser.add_argument("--tp", nargs="+", default=["1-1", "1-2", "2-1"], metavar="P-D")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192, 32768, 131072])
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2, 4], help="one layer in so many (1 2 4)")
    parser.add_argument("--fragmented", type=int, nargs="+", default=[0, 50, 100], metavar="PERCENT")
    parser.add_argument("--backend", default="FLASH_ATTN", help="of attention, for the length of pages (FLASH_ATTN)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000], help="of the handshake")
    parser.add_argument("--handshake-limit-ms", type=float, default=50.0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="lines of JSON go there, not to stdout")
    args = parser.parse_args()
    lines = []

    def tell(line: dict[str, Any]) -> None:
        lines.append(json.dumps(line))
        print(" ".join(f"{key}={value}" for key, value in line.items()), file=sys.stderr, flush=True)
        if args.output is None:
            print(lines[-1], flush=True)
        else:
            args.output.write_text("\n".join(lines) + "\n")

    for tp, tokens, scale, fragmented in product(args.tp, args.tokens, args.scales, args.fragmented):
        if scale != args.scales[0] and tokens != 8192:
            continue  # layers vary at one length
        src_tp, dst_tp = map(int, tp.split("-"))
        pair = make_pair(args.model, (src_tp, dst_tp), tokens, fragmented, scale=scale, backend=args.backend)
        case = {"kind": "bind", "model": args.model, "backend": args.backend, "tp": tp, "tokens": tokens}
        case |= {"layers": len(pair.dst.layers), "fragmented": fragmented}
        tell({**case, **bind(pair, args.repeats)})
    met = [handshake(number, min(args.repeats, 5)) for number in args.blocks]
    for line in met:
        tell({"kind": "handshake", **line})
    is_flat = met[-1]["kept_bytes"] < 1.2 * met[0]["kept_bytes"]
    limit_ms = args.handshake_limit_ms
    is_short = all(line[name] < limit_ms for line in met for name in line if name.endswith("_ms"))
    return 0 if is_flat and is_short else 1


if __name__ == "__main__":
    sys.exit(main())
