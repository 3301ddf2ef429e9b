"""When is it cheaper to read whole pages and scatter them than to read the runs? Measured over NIXL on this machine.

1. Two processes: P holds pages in which every ``1/share``-th run is wanted, D reads.
2. Per cell (run length, total of wanted bytes, share): the runs directly, then the pages that contain them and a numpy
   copy to the runs' places, in turn, ``--repeats`` times each.
3. A line of JSON per cell, after one that says where, when and with what it was measured.

    python integration/benchmarks/cost_grid.py --output docs/performance/cost-grid-cpu.jsonl
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from hybrid_connector.transport.base import Region, TransferState, host_region
from hybrid_connector.transport.binding import BoundCopies

KIB, MIB = 2**10, 2**20
RUN_BYTES = (1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
TOTAL_BYTES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SHARES = (2, 4, 16)
"""A run in so many is wanted: as many D ranks as share P's heads, or the tokens of a block that D lacks."""
MIN_PAGE_BYTES = 256 * KIB
MAX_READ_BYTES = 256 * MIB
ENVIRONMENTS = {"shared_memory": {}, "tcp": {"UCX_TLS": "tcp,self"}}
"""What UCX is told: nothing, so that it takes what is best on one machine; or sockets alone."""


def serve(connection: Connection, num_bytes: int) -> None:
    """P: hold pages until D has read them."""
    from hybrid_connector.transport.nixl import NixlTransport

    pages = np.resize(np.arange(251, dtype=np.uint8), num_bytes)
    transport = NixlTransport()
    region = host_region(pages)
    transport.register(region)
    connection.send((transport.identity(), region))
    connection.recv()
    transport.close()


class Reader:
    """D: a region that runs arrive in, one for whole pages, and a peer."""

    def __init__(self, identity: bytes, remote: Region) -> None:
        from hybrid_connector.transport.nixl import NixlTransport

        self._transport = NixlTransport(is_read_from=False)
        self._remote = remote
        self._arrays = [np.zeros(size, np.uint8) for size in (max(TOTAL_BYTES), MAX_READ_BYTES)]
        self._regions = [host_region(array) for array in self._arrays]
        for region in self._regions:
            self._transport.register(region)
        self._identity = identity

    @property
    def placed(self) -> np.ndarray:
        return self._arrays[0]

    @property
    def staged(self) -> np.ndarray:
        return self._arrays[1]

    def read(self, src: np.ndarray, dst: np.ndarray, run_bytes: int, *, staged: bool) -> None:
        """Read runs from and to these offsets."""
        local = self._regions[staged]
        copies = BoundCopies(
            0,
            (src + self._remote.address).astype(np.uint64),
            (dst + local.address).astype(np.uint64),
            np.full(len(src), run_bytes, np.uint64),
        )
        transfer = self._transport.read(self._transport.add_peer(self._identity), copies, local, self._remote)
        while (state := transfer.poll()) is TransferState.PENDING:
            time.sleep(0)
        if state is not TransferState.DONE:
            raise SystemExit(f"read failed: {transfer.error}")

    def close(self) -> None:
        self._transport.close()


def measure(reader: Reader, run_bytes: int, total_bytes: int, share: int, repeats: int) -> dict[str, object]:
    """Seconds of both ways, each reading the same wanted bytes to the same place."""
    page_bytes = max(MIN_PAGE_BYTES, share * run_bytes)
    num_runs = total_bytes // run_bytes
    num_pages = -(-num_runs * run_bytes * share // page_bytes)
    dst = np.arange(num_runs, dtype=np.int64) * run_bytes
    src = dst * share
    pages = np.arange(num_pages, dtype=np.int64) * page_bytes
    wanted = reader.placed[:total_bytes].reshape(num_runs, run_bytes)
    direct: list[float] = []
    staged: list[float] = []
    read: list[float] = []
    scatter: list[float] = []
    # The other way round on D: NIXL joins what touches on both sides, and pages of a fragmented pool do not.
    places = pages[::-1]
    for _ in range(repeats + 1):
        began = time.perf_counter()
        reader.read(src, dst, run_bytes, staged=False)
        direct.append(time.perf_counter() - began)
        expected = wanted[:: max(1, num_runs // 64)].copy()
        wanted[:] = 0

        began = time.perf_counter()
        reader.read(pages, places, page_bytes, staged=True)
        read.append(time.perf_counter() - began)
        began = time.perf_counter()
        held = reader.staged[: num_pages * page_bytes].reshape(num_pages, page_bytes // run_bytes, run_bytes)
        wanted.reshape(num_pages, -1, run_bytes)[:] = held[::-1, ::share]
        scatter.append(time.perf_counter() - began)
        staged.append(read[-1] + scatter[-1])
        if not np.array_equal(wanted[:: max(1, num_runs // 64)], expected):
            raise SystemExit(f"both ways must bring the same bytes: runs of {run_bytes}, share {share}")
    return {
        "run_bytes": run_bytes,
        "share": share,
        "direct": {"descriptors": num_runs, "bytes": total_bytes, **_say(direct[1:])},
        "staged": {
            "descriptors": num_pages,
            "bytes": num_pages * page_bytes,
            **_say(staged[1:]),
            "read_s": min(read[1:]),
            "scatter_s": min(scatter[1:]),
        },
    }


def _say(seconds: list[float]) -> dict[str, float]:
    """The best is what a way costs; how far the median is off says how busy the machine was."""
    return {"s": min(seconds), "median_s": statistics.median(seconds)}


def cells() -> Iterator[tuple[int, int, int]]:
    for share in SHARES:
        for total_bytes in TOTAL_BYTES:
            for run_bytes in RUN_BYTES:
                page_bytes = max(MIN_PAGE_BYTES, share * run_bytes)
                if total_bytes * share <= MAX_READ_BYTES and (total_bytes * share) % page_bytes == 0:
                    yield run_bytes, total_bytes, share


def run_transport(name: str, repeats: int) -> Iterator[dict[str, object]]:
    os.environ.pop("UCX_TLS", None)
    os.environ.update(ENVIRONMENTS[name])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, MAX_READ_BYTES), daemon=True)
    process.start()
    try:
        reader = Reader(*ours.recv())
        for run_bytes, total_bytes, share in cells():
            yield {"transport": name, **measure(reader, run_bytes, total_bytes, share, repeats)}
        reader.close()
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="lines of JSON go here")
    parser.add_argument("--transport", choices=ENVIRONMENTS, help="measure this one, in this process (default: each)")
    parser.add_argument("--repeats", type=int, default=9, help="readings per way and cell (default: 9)")
    args = parser.parse_args()
    if args.transport is None:
        head = {
            "command": "python integration/benchmarks/cost_grid.py --output docs/performance/cost-grid-cpu.jsonl",
            "date": datetime.now(UTC).date().isoformat(),
            "nixl": version("nixl"),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "environments": ENVIRONMENTS,
            "repeats": args.repeats,
        }
        args.output.write_text(json.dumps(head) + "\n")
        for name in ENVIRONMENTS:  # UCX reads its environment once per process
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=_append, args=(args.output, name, args.repeats))
            child.start()
            child.join()
            if child.exitcode:
                sys.exit(f"{name}: exit status {child.exitcode}")
    else:
        _append(args.output, args.transport, args.repeats)


def _append(output: Path, name: str, repeats: int) -> None:
    with output.open("a") as file:
        for cell in run_transport(name, repeats):
            file.write(json.dumps(cell) + "\n")
            file.flush()
            print(cell["transport"], cell["run_bytes"], cell["share"], cell["direct"], cell["staged"], flush=True)


if __name__ == "__main__":
    main()
