"""What does verification cost, beside the transfer it checks?

1. P and D are a process each, with real NIXL between them; P holds made bytes, D an empty region of its own layout.
2. D reads a request of 1k, 8k and 32k tokens, then digests what it has read; P digests the same bytes.
3. Both must agree, and must not once a byte on D is flipped; the last line of a case says whether they did.
4. Printed as JSON, one line a case: seconds, and ``ratio`` = (D's digest + P's digest) / transfer. ``ratio_on_d`` and
   ``ratio_on_p`` are the parts of it.

The engine's own parts (`NixlTransport`, `Binder`, `Digester`) without vLLM. The model has 32 layers: 24 gated delta
nets with 64 value heads, 8 attention layers with 2 KV heads of 256, blocks of 1,072 tokens. With ``--decode-tp 2`` D is
one rank of two: it reads a part of every page, in many more runs. Exit status 0 only if every digest was right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.digests import RunList
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.transport.base import Region, TransferState
from hybrid_connector.transport.binding import Binder
from hybrid_connector.transport.digest import CudaDigester, Digester, HostDigester, run_lists
from hybrid_connector.transport.ranges import StateMap

BF16 = ElementType("bfloat16", 2)
LAYERS_PER_GROUP, STATE_GROUPS = 8, 3
KV_HEADS, HEAD_DIM = 2, 256
KERNEL_TOKENS, KERNEL_BLOCKS = 16, 67
WARM_UPS = 2
TIMEOUT_S = 120.0


def layout_of(num_blocks: int, rank: int = 0, num_ranks: int = 1) -> RankLayout:
    """As vLLM lays caches out: four groups over the same bytes, layer ``i`` of each in place ``i``."""
    heads = KV_HEADS // num_ranks
    row = 2 * HEAD_DIM * BF16.num_bytes
    kernel_page = heads * row * KERNEL_TOKENS
    block = kernel_page * KERNEL_BLOCKS
    attention = Attention(KV_HEADS, 2 * HEAD_DIM, BF16)
    state = delta_net(
        num_key_heads=16,
        num_value_heads=64,
        key_dim=128,
        value_dim=128,
        num_taps=3,
        conv_element=BF16,
        temporal_element=BF16,
    )
    page = TokenPage(KERNEL_TOKENS, (row * KERNEL_TOKENS, row, BF16.num_bytes))
    layers = []
    for group in range(1 + STATE_GROUPS):
        for place in range(LAYERS_PER_GROUP):
            name = f"layers.{group * LAYERS_PER_GROUP + place}"
            if group == 0:
                shards = attention.shards(name, page, rank=rank, num_ranks=num_ranks)
            else:
                shards = state.shards(name, StatePage(channel_first=True), rank=rank, num_ranks=num_ranks)
            stride = kernel_page if group == 0 else block
            layers.append(Layer(name, group, place * num_blocks * block, stride, shards))
    groups = (Group(num_blocks, KERNEL_BLOCKS, KERNEL_TOKENS), *(Group(num_blocks) for _ in range(STATE_GROUPS)))
    return RankLayout(rank, num_blocks * LAYERS_PER_GROUP * block, groups, tuple(layers))


def blocks_of(num_tokens: int, num_blocks: int, seed: int) -> BlockIds:
    """A request's blocks, drawn at random; groups share the memory, so none twice."""
    ids = np.random.default_rng(seed).permutation(num_blocks).tolist()
    num_attention = -(-num_tokens // (KERNEL_TOKENS * KERNEL_BLOCKS))
    return (tuple(ids[:num_attention]), *((ids[num_attention + i],) for i in range(STATE_GROUPS)))


class Rank:
    """A region on a device, registered with NIXL, and what digests it."""

    def __init__(self, device: str, layout: RankLayout, *, is_filled: bool) -> None:
        import torch

        from hybrid_connector.transport.nixl import NixlTransport

        self._device = device
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.layout = layout
        if is_filled:
            words = torch.arange(layout.region_bytes // 8, dtype=torch.int64, device=device)
            self.memory = words.mul_(0x5851F42D4C957F2D).view(torch.uint8)
        else:
            self.memory = torch.zeros(layout.region_bytes, dtype=torch.uint8, device=device)
        self._synchronize()
        kind = "VRAM" if device == "cuda" else "DRAM"
        self.region = Region(self.memory.data_ptr(), self.memory.numel(), kind, self.memory.device.index or 0)
        self.transport = NixlTransport()
        self.transport.register(self.region)
        self._digester: Digester = CudaDigester(self.memory) if device == "cuda" else HostDigester(self.region)

    def digest(self, lists: Sequence[RunList]) -> tuple[list[int], float]:
        """The digests, and the seconds from the first ``begin`` until the last one was there."""
        self._synchronize()
        began = time.perf_counter()
        jobs = [self._digester.begin(runs) for runs in lists]
        digests = [poll_until(job.poll, lambda digest: digest is not None) for job in jobs]
        return digests, time.perf_counter() - began


def poll_until(poll: Callable[[], Any], is_there: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_there(value := poll()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing after {TIMEOUT_S} s")
    return value


def serve_prefill(connection: Connection, device: str, num_blocks: int) -> None:
    """P's process: say where the bytes are, then digest what D names, until D hangs up."""
    rank = Rank(device, layout_of(num_blocks), is_filled=True)
    connection.send((rank.layout, rank.region, rank.transport.identity()))
    state = StateMap(rank.layout)
    with contextlib.suppress(EOFError):
        while True:
            lists, blocks, num_tokens = connection.recv()
            began = time.perf_counter()
            ranges = state.ranges(blocks, num_tokens)
            for runs in lists:
                ranges.refuse_outside(runs)
            check_s = time.perf_counter() - began
            connection.send((*rank.digest(lists), check_s))
    rank.transport.close()


def measure(args: argparse.Namespace, decode: Rank, connection: Connection, prefill: Any, num_tokens: int) -> Any:
    """One request, read and verified ``--repeats`` times: medians."""
    layout, remote, identity = prefill
    plan = plan_transfer(decode.layout, [layout])
    bases = {0: remote.address}
    binder = Binder(plan, decode.layout, [layout], dst_base=decode.region.address, src_bases=bases)
    src = blocks_of(num_tokens, layout.groups[0].num_blocks, 1)
    (copies,) = binder.bind(src, blocks_of(num_tokens, decode.layout.groups[0].num_blocks, 2), num_tokens)
    peer = decode.transport.add_peer(identity)
    samples: dict[str, list[float]] = {}
    right = True
    for number in range(WARM_UPS + args.repeats):
        decode.memory.zero_()
        if args.device == "cuda":
            decode._synchronize()
        began = time.perf_counter()
        read = decode.transport.read(peer, copies, decode.region, remote)
        state = poll_until(read.poll, lambda state: state is not TransferState.PENDING)
        transfer_s = time.perf_counter() - began
        assert state is TransferState.DONE, read.error
        began = time.perf_counter()
        pairs = run_lists(copies, decode.region, remote)
        list_s = time.perf_counter() - began
        on_d, on_d_s = decode.digest([pair.dst for pair in pairs])
        connection.send(([pair.src for pair in pairs], src, num_tokens))
        on_p, on_p_s, check_s = connection.recv()
        right = right and on_p == on_d
        if number < WARM_UPS:
            continue
        seconds = {"transfer_s": transfer_s, "digest_on_d_s": on_d_s + list_s, "digest_on_p_s": on_p_s + check_s}
        for name, value in seconds.items():
            samples.setdefault(name, []).append(value)
    victim = int(np.random.default_rng(num_tokens).integers(len(copies)))
    decode.memory[int(copies.dst[victim]) - decode.region.address] ^= 1
    flip_is_found = decode.digest([pair.dst for pair in pairs])[0] != on_p
    medians = {name: statistics.median(values) for name, values in samples.items()}
    on_d_s, on_p_s, transfer_s = medians["digest_on_d_s"], medians["digest_on_p_s"], medians["transfer_s"]
    return {
        "kind": "verify",
        "device": args.device,
        "decode_tp": args.decode_tp,
        "tokens": num_tokens,
        "bytes": copies.total_bytes,
        "descriptors": len(copies),
        "run_lists": len(pairs),
        "word_bytes": pairs[0].src.word_bytes,
        **{name: round(value, 6) for name, value in medians.items()},
        "ratio": round((on_d_s + on_p_s) / transfer_s, 3),
        "ratio_on_d": round(on_d_s / transfer_s, 3),
        "ratio_on_p": round(on_p_s / transfer_s, 3),
        "digests_agree": right,
        "flip_is_found": flip_is_found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--decode-tp", type=int, choices=(1, 2), default=1, help="D is rank 0 of so many (default: 1)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefill-gpu", type=int, default=0, help="P's GPU (default: 0)")
    parser.add_argument("--decode-gpu", type=int, help="D's GPU; may be P's (default: 1, or 0 where there is only one)")
    args = parser.parse_args()
    os.environ.pop("UCX_TLS", None)  # without tcp in it, UCX has no active messages and NIXL fails
    if args.decode_gpu is None:
        args.decode_gpu = 1 if args.device == "cuda" and _num_gpus() > 1 else 0
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    num_blocks = -(-max(args.tokens) // (KERNEL_TOKENS * KERNEL_BLOCKS)) + STATE_GROUPS + 2
    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.prefill_gpu)
    process = context.Process(target=serve_prefill, args=(theirs, args.device, num_blocks), daemon=True)
    process.start()
    theirs.close()
    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.decode_gpu)  # before this process makes use of CUDA
    results = []
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("P does not answer")
        prefill = ours.recv()
        decode = Rank(args.device, layout_of(num_blocks, 0, args.decode_tp), is_filled=False)
        for num_tokens in args.tokens:
            results.append(measure(args, decode, ours, prefill, num_tokens))
            print(json.dumps(results[-1]), flush=True)
        decode.transport.close()
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
    return 0 if all(result["digests_agree"] and result["flip_is_found"] for result in results) else 1


def _num_gpus() -> int:
    """Counted without making use of CUDA, which would fix what this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])


if __name__ == "__main__":
    sys.exit(main())
