"""How long does a request's state take through NIXL: as vLLM's connector describes it, and each of our ways?

1. P and D are a process each (``--device cuda``: a GPU each, where there are two). P holds made bytes in all its ranks'
   layouts, D the layout of its first rank; other ranks of D would read the same amount beside it.
2. Per case (model, TP of P and D, tokens, per cent of blocks that do not follow the one before), in turn ``--repeats``
   times, from the block ids until the bytes are there: *in-tree*, as vLLM's own connector does it (a descriptor per
   kernel block and section, prepared for every block of both pools before; the request picks numbers); then ours:
   *direct*, *staged* and *auto*; and as the limit *plain*, as many bytes as wanted in one descriptor.
3. After each, bytes of D are compared with P's; the exit status is 0 only if all were right.
4. A line of JSON per case: medians in seconds, descriptors, bytes read; ratios are printed on stderr.

    python integration/benchmarks/transfer.py --scale 8 --output transfer.jsonl
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from shapes import MODELS, Pair, Section, make_pair, one_by_one, sections

from hybrid_connector.core.blocks import Group
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord
from hybrid_connector.engine.loads import Loads
from hybrid_connector.engine.ordering import HostStream
from hybrid_connector.transport.base import Region, TransferState, Transport
from hybrid_connector.transport.binding import BoundCopies
from hybrid_connector.transport.cost import Staging
from hybrid_connector.transport.nixl import NixlTransport
from hybrid_connector.transport.scatter import CudaScatter, HostScatter, Scatter
from hybrid_connector.transport.staging import StagingArea
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest

TP_PAIRS = ("1-1", "2-2", "1-2", "2-1")
STAGING_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
WAYS: Mapping[str, Staging] = {"direct": "never", "staged": "always", "auto": "auto"}
WARM_UPS = 1
TIMEOUT_S = 120.0
_FACTOR = 0x5851F42D4C957F2D


class Memory:
    """Registered memory on a device. P's is filled: word ``i`` of 8 bytes holds ``i`` times a constant."""

    def __init__(self, device: str, num_bytes: int, transport: Transport, *, is_filled: bool) -> None:
        import torch

        num_words = -(-num_bytes // 8)
        if is_filled:
            words = torch.arange(num_words, dtype=torch.int64, device=device).mul_(_FACTOR)
        else:
            words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.tensor = words.view(torch.uint8)
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._synchronize()
        kind = "VRAM" if device == "cuda" else "DRAM"
        self.region = Region(self.tensor.data_ptr(), 8 * num_words, kind, self.tensor.device.index or 0)
        transport.register(self.region)

    def clear(self) -> None:
        self.tensor.zero_()
        self._synchronize()


def made_bytes(offset: int, num_bytes: int) -> np.ndarray:
    """What P holds there."""
    words = np.arange(offset // 8, (offset + num_bytes - 1) // 8 + 1, dtype=np.int64) * _FACTOR
    return words.view(np.uint8)[offset % 8 : offset % 8 + num_bytes]


def serve(connection: Connection, device: str) -> None:
    """P: hold a region per rank for each case, until D hangs up."""
    while (sizes := connection.recv()) is not None:
        transport = NixlTransport()
        memories = [Memory(device, size, transport, is_filled=True) for size in sizes]
        connection.send((transport.identity(), [memory.region for memory in memories]))
        connection.recv()
        transport.close()
        del memories
    connection.close()


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one way."""

    seconds: float
    num_descriptors: int
    direct_bytes: int
    staged_bytes: int


class Prepared:
    """Descriptors of every block of both pools, prepared once; a request names those it wants by number."""

    def __init__(
        self, pair: Pair, transport: NixlTransport, local: Region, remotes: Sequence[Region], peer: str
    ) -> None:
        self._agent = transport._agent
        self._pair = pair
        self._src_tables: dict[int, Any] = {}
        self._dst_tables: dict[int, Any] = {}
        self._wanted: dict[int, list[tuple[Section, np.ndarray, np.ndarray]]] = {}
        found = sections(pair, local.address, [remote.address for remote in remotes])
        for rank in sorted({section.src_rank for section in found}):
            some = [section for section in found if section.src_rank == rank]
            src = [_table(s.src_start, s.src_stride, s.num_src, s.num_bytes, remotes[rank]) for s in some]
            dst = [_table(s.dst_start, s.dst_stride, s.num_dst, s.num_bytes, local) for s in some]
            self._src_tables[rank] = self._prepare(peer, src, remotes[rank])
            self._dst_tables[rank] = self._prepare("NIXL_INIT_AGENT", dst, local)
            firsts = [np.cumsum([0, *map(len, tables)]) for tables in (src, dst)]
            alike: dict[tuple[int, ...], list[int]] = {}
            for number, s in enumerate(some):
                key = s.src_group, s.dst_group, s.src_first, s.dst_first, s.src_step, s.dst_step
                alike.setdefault(key, []).append(number)
            self._wanted[rank] = [
                (some[numbers[0]], *(first[numbers][:, None] for first in firsts)) for numbers in alike.values()
            ]

    def _prepare(self, agent: str, tables: Sequence[np.ndarray], region: Region) -> Any:
        descriptors = self._agent.get_xfer_descs(np.concatenate(tables), region.memory)
        return self._agent.prep_xfer_dlist(agent, descriptors, backends=["UCX"])

    def read(self) -> Sample:
        """Read the pair's request."""
        began = time.perf_counter()
        pair = self._pair
        src_pages = [_pages(*of) for of in zip(pair.srcs[0].groups, pair.src_blocks, strict=True)]
        dst_pages = [_pages(*of) for of in zip(pair.dst.groups, pair.dst_blocks, strict=True)]
        limits = [group.num_request_pages(pair.num_tokens) for group in pair.dst.groups]
        handles, num_descriptors = [], 0
        for rank, wanted in self._wanted.items():
            src_numbers, dst_numbers = [], []
            for section, src_at, dst_at in wanted:
                of_src = src_pages[section.src_group][section.src_first :: section.src_step]
                of_dst = dst_pages[section.dst_group][: limits[section.dst_group]]
                of_dst = of_dst[section.dst_first :: section.dst_step]
                number = min(len(of_src), len(of_dst))
                src_numbers.append((of_src[:number] + src_at).ravel())
                dst_numbers.append((of_dst[:number] + dst_at).ravel())
            numbers = np.concatenate(dst_numbers), np.concatenate(src_numbers)
            tables = self._dst_tables[rank], self._src_tables[rank]
            handle = self._agent.make_prepped_xfer(
                "READ", tables[0], numbers[0], tables[1], numbers[1], backends=["UCX"]
            )
            self._agent.transfer(handle)
            handles.append(handle)
            num_descriptors += len(numbers[0])
        running = list(handles)
        while running:
            states = [(handle, self._agent.check_xfer_state(handle)) for handle in running]
            if any(state == "ERR" for _, state in states):
                raise SystemExit("read failed")
            running = [handle for handle, state in states if state != "DONE"]
            if time.perf_counter() - began > TIMEOUT_S:
                raise TimeoutError("a read does not end")
        took = time.perf_counter() - began
        for handle in handles:
            handle.release()
        return Sample(took, num_descriptors, 0, 0)

    def close(self) -> None:
        for tables in (self._src_tables, self._dst_tables):
            while tables:
                tables.popitem()[1].release()


def _table(start: int, stride: int, number: int, num_bytes: int, region: Region) -> np.ndarray:
    rows = np.empty((number, 3), dtype=np.uint64)
    rows[:, 0] = start + np.arange(number) * stride
    rows[:, 1], rows[:, 2] = num_bytes, region.device
    return rows


def _pages(group: Group, block_ids: Sequence[int | None]) -> np.ndarray:
    blocks = np.array([0 if block is None else block for block in block_ids], dtype=np.int32)
    return (blocks[:, None] * group.pages_per_block + np.arange(group.pages_per_block, dtype=np.int32)).ravel()


class Case:
    """D, and P's answer, for one pair of engines."""

    def __init__(self, pair: Pair, device: str, identity: bytes, remotes: Sequence[Region]) -> None:
        self.pair = pair
        self.transport = NixlTransport(is_read_from=False)
        self.memory = Memory(device, pair.dst.region_bytes, self.transport, is_filled=False)
        self.remotes = remotes
        self._identity = identity
        manifest = EngineManifest(
            protocol_version=1,
            engine_id="P",
            incarnation="1",
            tp_size=len(pair.srcs),
            factors=Factors(()),
            vllm_version="",
            connector_version="",
            lease_s=30.0,
            ranks=tuple(
                RankManifest(src.rank, src, remote.address, remote.memory, remote.device, "nixl", identity)
                for src, remote in zip(pair.srcs, remotes, strict=True)
            ),
        )
        self.loads = {way: self._make_loads(device, use, manifest) for way, use in WAYS.items()}
        self.alone = one_by_one(pair, self.memory.region.address, [remote.address for remote in remotes])
        self.num_bytes = sum(copies.total_bytes for copies in self.alone)
        self.prepared = Prepared(pair, self.transport, self.memory.region, remotes, self.transport.add_peer(identity))
        self._number = 0

    def _make_loads(self, device: str, use: Staging, manifest: EngineManifest) -> Loads:
        region = self.memory.region

        def make(num_bytes: int) -> Scatter:
            if device == "cuda":
                return CudaScatter(num_bytes, self.memory.tensor)
            return HostScatter(num_bytes, region)

        area = StagingArea(STAGING_BYTES[device], make)
        loads = Loads(
            self.pair.dst, region, self.transport, HostStream(), time.perf_counter, staging=area, use_staging=use
        )
        loads.add_peer(manifest)
        return loads

    def ways(self) -> dict[str, Callable[[], Sample]]:
        return {
            "in_tree": self.prepared.read,
            **{way: lambda loads=loads: self._load(loads) for way, loads in self.loads.items()},
            "plain": lambda: self._read(self._plain()),
        }

    def _plain(self) -> list[BoundCopies]:
        """As many bytes as are wanted of each rank, in one descriptor."""
        plain, place = [], self.memory.region.address
        for copies in self.alone:
            size = min(copies.total_bytes, self.remotes[copies.src_rank].num_bytes)
            arrays = (np.array([value], np.uint64) for value in (self.remotes[copies.src_rank].address, place, size))
            plain.append(BoundCopies(copies.src_rank, *arrays))
            place += size
        return plain

    def _read(self, lists: Sequence[BoundCopies]) -> Sample:
        began = time.perf_counter()
        reads = []
        for copies in lists:
            peer = self.transport.add_peer(self._identity)
            reads.append(self.transport.read(peer, copies, self.memory.region, self.remotes[copies.src_rank]))
        while any(read.poll() is TransferState.PENDING for read in reads):
            if time.perf_counter() - began > TIMEOUT_S:
                raise TimeoutError("a read does not end")
        took = time.perf_counter() - began
        if errors := [read.error for read in reads if read.error is not None]:
            raise SystemExit(f"read failed: {errors[0]}")
        return Sample(took, sum(map(len, lists)), sum(copies.total_bytes for copies in lists), 0)

    def _load(self, loads: Loads) -> Sample:
        pair = self.pair
        self._number += 1
        order = LoadOrder(f"{self._number}", "", ("P", "1"), pair.src_blocks, pair.dst_blocks, pair.num_tokens, 0)
        began = time.perf_counter()
        loads.start(order)
        records: list[LoadRecord] = []
        while not records:
            records = loads.poll()
            if time.perf_counter() - began > TIMEOUT_S:
                raise TimeoutError("a load does not end")
        took = time.perf_counter() - began
        (record,) = records
        if record.error is not None:
            raise SystemExit(f"load failed: {record.error}")
        return Sample(took, record.num_descriptors, record.direct_bytes, record.staged_bytes)

    def is_right(self) -> bool:
        """Whether D holds P's bytes: both ends of some pieces, and nothing right before the first of them."""
        rng = np.random.default_rng(0)
        for copies in self.alone:
            remote, local = self.remotes[copies.src_rank], self.memory.region
            for i in rng.choice(len(copies), min(64, len(copies)), replace=False):
                size = int(copies.num_bytes[i])
                for at in (0, max(0, size - 64)):
                    length = min(64, size)
                    src, dst = int(copies.src[i]) - remote.address + at, int(copies.dst[i]) - local.address + at
                    held = self.memory.tensor[dst : dst + length].cpu().numpy()
                    if not np.array_equal(held, made_bytes(src, length)):
                        return False
        return True

    def close(self) -> None:
        self.prepared.close()
        self.transport.close()


def measure(case: Case, repeats: int) -> tuple[dict[str, Any], bool]:
    """Each way's median and what it read; and whether all bytes were right."""
    samples: dict[str, list[Sample]] = {}
    is_right = True
    ways = list(case.ways().items())
    for number in range(WARM_UPS + repeats):
        for way, run in ways:
            if number == 0:
                case.memory.clear()
            sample = run()
            if number == 0 and way != "plain":
                is_right = is_right and case.is_right()
            if number >= WARM_UPS:
                samples.setdefault(way, []).append(sample)
        ways.append(ways.pop(0))  # what a way leaves in the caches is not always the same one's gain
    found = {}
    for way in case.ways():
        some, last = samples[way], samples[way][-1]
        found[way] = {
            "s": statistics.median(sample.seconds for sample in some),
            "best_s": min(sample.seconds for sample in some),
            "descriptors": last.num_descriptors,
            "direct_bytes": last.direct_bytes,
            "staged_bytes": last.staged_bytes,
        }
    return found, is_right


def say(result: Mapping[str, Any]) -> str:
    """One line for people: milliseconds, and how many times as fast as in-tree style."""
    ways = result["ways"]
    base = ways["in_tree"]["s"]
    times = "  ".join(f"{way} {some['s'] * 1e3:8.2f} ms x{base / some['s']:5.2f}" for way, some in ways.items())
    head = f"{result['model']:14} TP{result['tp']} {result['tokens']:>6} tokens {result['fragmented']:>3} %"
    return f"{head} {result['bytes'] / 1e6:8.1f} MB  {times}{'' if result['is_right'] else '  WRONG BYTES'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tp", nargs="+", default=list(TP_PAIRS), metavar="P-D", help=f"default: {' '.join(TP_PAIRS)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--fragmented", type=int, nargs="+", default=[0, 50, 100], metavar="PERCENT")
    parser.add_argument("--backend", default="FLASHINFER", help="of attention, for the length of pages (FLASHINFER)")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="one layer in N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="FILE", help="lines of JSON go there, not to stdout")
    args = parser.parse_args()
    os.environ.pop("UCX_TLS", None)  # without tcp in it, UCX has no active messages and NIXL fails
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    gpus = _gpus()
    if args.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    process = context.Process(target=serve, args=(theirs, args.device), daemon=True)
    process.start()
    theirs.close()
    if args.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[:2][-1]  # before this process makes use of CUDA
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "nixl": version("nixl"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "gpus": min(len(gpus), 2) if args.device == "cuda" else 0,
        **{key: value for key, value in vars(args).items() if key != "output"},
    }
    lines = [json.dumps({"kind": "transfer", **head})]
    all_right = True
    try:
        for model, tp, num_tokens, fragmented in product(args.models, args.tp, args.tokens, args.fragmented):
            src_tp, dst_tp = map(int, tp.split("-"))
            pair = make_pair(model, (src_tp, dst_tp), num_tokens, fragmented, scale=args.scale, backend=args.backend)
            ours.send([src.region_bytes for src in pair.srcs])
            if not ours.poll(TIMEOUT_S):
                raise TimeoutError("P does not answer")
            case = Case(pair, args.device, *ours.recv())
            ways, is_right = measure(case, args.repeats)
            case.close()
            ours.send("next")
            all_right = all_right and is_right
            result = {"model": model, "tp": tp, "tokens": num_tokens, "fragmented": fragmented}
            result |= {"bytes": case.num_bytes, "ways": ways, "is_right": is_right}
            lines.append(json.dumps(result))
            print(say(result), file=sys.stderr, flush=True)
            if args.output is None:
                print(lines[-1], flush=True)
            else:
                args.output.write_text("\n".join(lines) + "\n")
        ours.send(None)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
    return 0 if all_right else 1


def _gpus() -> list[str]:
    """Numbers of the GPUs, found without making use of CUDA, which would fix what this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    devices = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return [str(number) for number in range(len(devices))]


if __name__ == "__main__":
    sys.exit(main())
