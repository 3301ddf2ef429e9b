"""Does guard I5 keep a read from overtaking what is still queued on a real compute stream? And what does a read cost?

1. P holds made bytes, D an empty region of the same layout: a process and a GPU each.
2. On D's compute stream: a long kernel, then a kernel that refills blocks which their former owner has given back.
3. A load into these blocks begins at once, first with the guard off, then with it on.
4. Off: the read lands first and is overwritten, so bytes are wrong. On: they are right, and no poll ever waited.
5. The times to bind, describe, post and transfer one request of 8,192 tokens, layer- and block-outermost.

The engine's own parts (`Loads`, `CudaStream`, `NixlTransport`, `Binder`) without vLLM. Exit status 0 only if both hold.
`--device cpu` plays the same on threads, for trying the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord
from hybrid_connector.engine.loads import Loads
from hybrid_connector.engine.ordering import ComputeStream, CudaStream, HostStream, Mark
from hybrid_connector.transport.base import Region, TransferState
from hybrid_connector.transport.binding import Binder, BoundCopies
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest

BF16, FP32 = ElementType("bfloat16", 2), ElementType("float32", 4)
PEER = ("prefill", "1")
DELAY_S, DELAY_CYCLES = 0.4, 800_000_000
"""0.4 s at the highest clock of an H200, longer at a lower one."""
MAX_POLL_S = 0.1
"""A poll that waited for the compute stream would take at least ``DELAY_S``."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Shape:
    """A model: ``num_attention`` layers of one cache group, three groups of as many delta nets."""

    num_attention: int
    kv_heads: int
    head_bytes: int
    key_heads: int
    value_heads: int
    head_dim: int
    kernel_tokens: int
    kernel_blocks: int
    num_blocks: int
    num_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer in one logical block; a state fits into it."""
        return self.kv_heads * self.head_bytes * self.kernel_tokens * self.kernel_blocks


HYBRID_92 = Shape(23, 2, 1024, 32, 64, 128, 64, 33, 24, 8192)
"""69 delta nets and 23 attention layers: 2 KiB a token, 4 MiB + 96 KiB of state, blocks of 2,112 tokens."""
TINY = Shape(2, 2, 128, 2, 4, 32, 16, 5, 24, 200)


def layout_of(shape: Shape, *, block_outermost: bool) -> RankLayout:
    """As vLLM lays caches out: four groups over the same bytes, layer ``i`` of each in place ``i`` of a block."""
    blocks, size = shape.num_blocks, shape.block_bytes
    # A block-outermost layout is not split into kernel blocks: the next kernel block lies behind the other layers.
    split = 1 if block_outermost else shape.kernel_blocks
    page_tokens = shape.kernel_tokens * shape.kernel_blocks // split
    block_stride = size * shape.num_attention if block_outermost else size
    layer_stride = size if block_outermost else size * blocks
    head = shape.head_bytes
    token_page = TokenPage(page_tokens, (head * page_tokens, head, 2))
    attention = Attention(shape.kv_heads, head // 2, BF16)
    state = delta_net(
        num_key_heads=shape.key_heads,
        num_value_heads=shape.value_heads,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        num_taps=3,
        conv_element=BF16,
        temporal_element=FP32,
    )
    layers = []
    for group in range(4):
        for place in range(shape.num_attention):
            name = f"layers.{group * shape.num_attention + place}"
            shards = (
                attention.shards(name, token_page, rank=0, num_ranks=1)
                if group == 0
                else state.shards(name, StatePage(channel_first=True), rank=0, num_ranks=1)
            )
            stride = block_stride // split if group == 0 else block_stride
            layers.append(Layer(name, group, place * layer_stride, stride, shards))
    groups = (Group(blocks, split, page_tokens), Group(blocks), Group(blocks), Group(blocks))
    return RankLayout(0, blocks * shape.num_attention * size, groups, tuple(layers))


def blocks_of(shape: Shape, first: int) -> BlockIds:
    """A request's blocks, every second one from ``first`` on, so that none joins its neighbour."""
    num_attention = -(-shape.num_tokens // (shape.kernel_tokens * shape.kernel_blocks))
    ids = range(first, shape.num_blocks, 2)
    assert num_attention + 3 <= len(ids)
    return (tuple(ids[:num_attention]), *((ids[num_attention + i],) for i in range(3)))


def _memory(device: str, num_bytes: int, seed: int) -> Any:
    """Bytes that both processes can make; 0 for ``seed`` 0."""
    import torch

    if seed == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # By place, so that bytes are the same on every device: a large odd factor, then the high byte.
    place = torch.arange(num_bytes // 8, dtype=torch.int64, device=device)
    return ((place + seed) * 0x5851F42D4C957F2D).view(torch.uint8)


def _region(tensor: Any) -> Region:
    cuda = tensor.device.type == "cuda"
    return Region(tensor.data_ptr(), tensor.numel(), "VRAM" if cuda else "DRAM", tensor.device.index or 0)


def _manifest(layout: RankLayout, region: Region, transport: Any) -> EngineManifest:
    rank = RankManifest(
        rank=0,
        layout=layout,
        region_address=region.address,
        memory=region.memory,
        device=region.device,
        transport=transport.kind,
        identity=transport.identity(),
    )
    return EngineManifest(
        protocol_version=1,
        engine_id=PEER[0],
        incarnation=PEER[1],
        tp_size=1,
        factors=Factors.of({}),
        vllm_version="",
        connector_version="",
        lease_s=30.0,
        ranks=(rank,),
    )


def hold(conn: Connection, device: str, shape: Shape, block_outermost: bool) -> None:
    """P's process: register made bytes, tell D, and wait until D is done."""
    from hybrid_connector.transport.nixl import NixlTransport

    layout = layout_of(shape, block_outermost=block_outermost)
    memory = _memory(device, layout.region_bytes, seed=1)
    _synchronize(device)
    transport = NixlTransport()
    transport.register(_region(memory))
    conn.send(_manifest(layout, _region(memory), transport))
    with contextlib.suppress(EOFError):  # D has hung up
        conn.recv()
    transport.close()


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class CudaCompute:
    """A device that works off a queue: torch's current stream, the one model runners compute on."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.guard: ComputeStream = CudaStream()

    def delay(self) -> None:
        self._torch.cuda._sleep(DELAY_CYCLES)

    def then(self, work: Callable[[], object]) -> None:
        work()

    def finish(self) -> None:
        self._torch.cuda.synchronize()


class ThreadCompute:
    """The same on threads: work runs in order, later."""

    def __init__(self) -> None:
        self._last = threading.Thread(target=lambda: None)
        self._last.start()
        self.guard: ComputeStream = self

    def mark(self) -> Mark:
        @dataclass
        class Done:
            thread: threading.Thread

            def has_passed(self) -> bool:
                return not self.thread.is_alive()

        return Done(self._last)

    def delay(self) -> None:
        self.then(lambda: time.sleep(DELAY_S))

    def then(self, work: Callable[[], object]) -> None:
        before = self._last

        def run() -> None:
            before.join()
            work()

        self._last = threading.Thread(target=run)
        self._last.start()

    def finish(self) -> None:
        self._last.join()


@dataclass(frozen=True)
class Trial:
    """One load while the compute stream was busy.

    ``differing``: bytes of the request that are wrong in the end. ``overtook``: whether the load ended before the work
    that was queued before it.
    """

    record: LoadRecord
    differing: int
    overtook: bool
    landed_s: float
    slowest_poll_s: float


class Decode:
    """D's side: a region, a transport, and what P said."""

    def __init__(self, device: str, shape: Shape, manifest: EngineManifest, *, block_outermost: bool) -> None:
        from hybrid_connector.transport import nixl

        self._device = device
        self._shape = shape
        self._manifest = manifest
        self._layout = layout_of(shape, block_outermost=block_outermost)
        self._memory = _memory(device, self._layout.region_bytes, seed=0)
        self._expected = _memory(device, self._layout.region_bytes, seed=1)
        self._transport = nixl.NixlTransport()
        self._transport.register(_region(self._memory))
        self._src, self._dst = blocks_of(shape, 1), blocks_of(shape, 2)
        self._binder = Binder(
            plan_transfer(self._layout, [manifest.ranks[0].layout]),
            self._layout,
            [manifest.ranks[0].layout],
            dst_base=self._memory.data_ptr(),
            src_bases={0: manifest.ranks[0].region_address},
        )
        self._compute = CudaCompute() if device == "cuda" else ThreadCompute()

    def close(self) -> None:
        self._transport.close()

    def trial(self, *, guard: bool) -> Trial:
        """A former owner's work is queued on the blocks, then the load begins."""
        loads = Loads(
            self._layout,
            _region(self._memory),
            self._transport,
            self._compute.guard if guard else HostStream(),
            time.monotonic,
        )
        loads.add_peer(self._manifest)
        self._memory.zero_()
        self._compute.finish()
        copies = self._copies()
        began = time.monotonic()
        self._compute.delay()
        self._compute.then(lambda: self._refill(copies))
        refilled = self._compute.guard.mark()
        loads.start(LoadOrder("r", "r", PEER, self._src, self._dst, self._shape.num_tokens, 0))
        records: list[LoadRecord] = []
        slowest_poll_s = 0.0
        while not records:
            polled_at = time.monotonic()
            records = loads.poll()
            slowest_poll_s = max(slowest_poll_s, time.monotonic() - polled_at)
            if polled_at - began > TIMEOUT_S:
                raise TimeoutError(f"no end of the load after {TIMEOUT_S} s")
        overtook, landed_s = not refilled.has_passed(), time.monotonic() - began
        self._compute.finish()
        return Trial(records[0], self._differing(copies), overtook, landed_s, slowest_poll_s)

    def _copies(self) -> list[tuple[int, int, int]]:
        """What must be equal in the end: offsets on P and on D, and bytes."""
        bound = self._binder.bind(self._src, self._dst, self._shape.num_tokens)
        src_base, dst_base = self._manifest.ranks[0].region_address, self._memory.data_ptr()
        return [
            (int(src) - src_base, int(dst) - dst_base, int(size))
            for copies in bound
            for src, dst, size in zip(copies.src, copies.dst, copies.num_bytes, strict=True)
        ]

    def _refill(self, copies: list[tuple[int, int, int]]) -> None:
        for _, dst, size in copies:
            self._memory[dst : dst + size].fill_(0xAB)

    def _differing(self, copies: list[tuple[int, int, int]]) -> int:
        return sum(
            int((self._memory[dst : dst + size] != self._expected[src : src + size]).sum()) for src, dst, size in copies
        )

    def bind(self) -> BoundCopies:
        (copies,) = self._binder.bind(self._src, self._dst, self._shape.num_tokens)
        return copies

    def bind_whole(self) -> BoundCopies:
        """For comparison: whole blocks with their padding, as few copies as the layout allows."""
        src_base = self._manifest.ranks[0].region_address
        spans: set[tuple[int, int, int]] = set()
        for layer in self._layout.layers:
            block_bytes = layer.page_stride * self._layout.groups[layer.group].pages_per_block
            # Block-outermost, all layers of a block lie side by side: one copy a block.
            start = 0 if block_bytes > self._shape.block_bytes else layer.offset
            for src, dst in zip(self._src[layer.group], self._dst[layer.group], strict=True):
                assert src is not None
                assert dst is not None
                spans.add((start + src * block_bytes, start + dst * block_bytes, block_bytes))
        src, dst, size = (np.array(column, dtype=np.uint64) for column in zip(*sorted(spans), strict=True))
        base = np.uint64(self._memory.data_ptr())
        return BoundCopies(0, src + np.uint64(src_base), dst + base, size)

    def measure(self, repeats: int, bind: Callable[[], BoundCopies]) -> dict[str, float]:
        """Medians in seconds, of one request into an idle device."""
        local, remote = _region(self._memory), self._manifest.ranks[0]
        region = Region(remote.region_address, remote.layout.region_bytes, remote.memory, remote.device)
        peer = self._transport.add_peer(remote.identity)
        samples: dict[str, list[float]] = {}
        for number in range(repeats + 2):
            stamps = [time.perf_counter()]
            copies = bind()
            stamps.append(time.perf_counter())
            read = self._transport.read(peer, copies, local, region)
            stamps.append(time.perf_counter())
            while read.poll() is TransferState.PENDING:
                pass
            stamps.append(time.perf_counter())
            if number < 2:
                continue  # connects, and opens the memory of the peer
            for name, start, end in (("bind_s", 0, 1), ("post_s", 1, 2), ("transfer_s", 1, 3), ("total_s", 0, 3)):
                samples.setdefault(name, []).append(stamps[end] - stamps[start])
        medians = {name: statistics.median(values) for name, values in samples.items()}
        medians["best_transfer_s"] = min(samples["transfer_s"])
        medians |= {"descriptors": len(copies), "bytes": copies.total_bytes}
        medians["gb_per_s"] = copies.total_bytes / medians["transfer_s"] / 1e9
        return medians


def run(args: argparse.Namespace, *, block_outermost: bool) -> dict[str, Any]:
    """Start P, play D, and say what went wrong under ``problems``."""
    shape = TINY if args.device == "cpu" else HYBRID_92
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.prefill_gpu)
    process = context.Process(target=hold, args=(theirs, args.device, shape, block_outermost), daemon=True)
    process.start()
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("P does not answer")
        decode = Decode(args.device, shape, ours.recv(), block_outermost=block_outermost)
        timing = decode.measure(args.repeats, decode.bind)
        whole = decode.measure(args.repeats, decode.bind_whole)
        trials = {"off": decode.trial(guard=False), "on": decode.trial(guard=True)}
        decode.close()
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
    result: dict[str, Any] = {
        "layout": "BLHNC" if block_outermost else "LBHNC",
        **timing,
        "whole_blocks": whole,
        "problems": [],
    }
    for name, trial in trials.items():
        result[f"guard_{name}"] = {
            "differing_bytes": trial.differing,
            "overtook": trial.overtook,
            "landed_s": trial.landed_s,
            "slowest_poll_s": trial.slowest_poll_s,
            "post_s": trial.record.post_s,
            "error": trial.record.error,
        }
        if trial.record.error is not None:
            result["problems"].append(f"guard {name}: the load failed: {trial.record.error}")
        if trial.slowest_poll_s > MAX_POLL_S:
            result["problems"].append(f"guard {name}: a poll took {trial.slowest_poll_s:.3f} s, it must never wait")
    off, on = trials["off"], trials["on"]
    if not (off.differing and off.overtook):
        result["problems"].append("guard off: the read did not overtake the queued work, so this proves nothing")
    if on.differing:
        result["problems"].append(f"guard on: {on.differing} bytes are wrong")
    if on.overtook:
        result["problems"].append("guard on: the read ended before the work queued before it")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prefill-gpu", type=int, default=0, help="P's GPU (default: 0)")
    parser.add_argument("--decode-gpu", type=int, default=1, help="D's GPU; may be P's (default: 1)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON lines are appended")
    args = parser.parse_args()
    os.environ.pop("UCX_TLS", None)  # without tcp in it, UCX has no active messages and NIXL fails
    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.decode_gpu)  # before this process imports torch
    results = [run(args, block_outermost=order) for order in (False, True)]
    for result in results:
        print(json.dumps(result, indent=1))
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps({"kind": "ordering", **result}) + "\n" for result in results)
    problems = [f"{result['layout']}: {problem}" for result in results for problem in result["problems"]]
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    print("ordering:", "failed" if problems else "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
