"""What happens in the processes that hold the NIXL agents of a check? Should they hang or die, the doctor does not.

1. ``hold MEMORY``: say what NIXL has here, register a made-up engine's caches, digest what it is asked for.
2. ``read MEMORY``: read one block of a holder's as a decode engine would, and digest what came.
3. ``reach``: read a few bytes from every rank of a running engine.

One JSON object a line: ``Order`` on stdin, ``Line`` on stdout.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from hybrid_connector.core.digests import RunList
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.tools.checks import ucx
from hybrid_connector.tools.checks.made_up import PAGE_TOKENS, made_up_decode, made_up_prefill
from hybrid_connector.wire.manifest import EngineManifest, RankManifest

READ_LIMIT_S = 20.0
"""For one read; a connection that comes up over TCP takes some 10 ms."""
REACH_BYTES = 64
_PAUSE_S = 0.0005


class Inventory(Struct, frozen=True, tag="inventory"):
    """What NIXL has here. ``transports``: UCX's, ``None`` with the reason in ``problem`` where it does not say."""

    plugins: tuple[str, ...]
    memories: tuple[str, ...]
    ucx_version: str
    transports: tuple[str, ...] | None = None
    problem: str = ""


class Registered(Struct, frozen=True, tag="registered"):
    """A holder's caches are registered."""

    rank: RankManifest
    seconds: float


class ReadBack(Struct, frozen=True, tag="read_back"):
    """What one read moved, and the digests of what came."""

    num_bytes: int
    num_descriptors: int
    seconds: float
    src: tuple[RunList, ...]
    digests: tuple[int, ...]


class Digested(Struct, frozen=True, tag="digested"):
    """A holder's answer to the run lists of a read."""

    digests: tuple[int, ...]


class Reached(Struct, frozen=True, tag="reached"):
    """How reading from a rank went; ``error`` is empty where it went well."""

    rank: int
    seconds: float
    error: str = ""


class Failed(Struct, frozen=True, tag="failed"):
    """The process ends here."""

    stage: str
    error: str


class ReadOrder(Struct, frozen=True, tag="read"):
    """Of a reader."""

    rank: RankManifest


class DigestOrder(Struct, frozen=True, tag="digest"):
    """Of a holder."""

    runs: tuple[RunList, ...]


class ReachOrder(Struct, frozen=True, tag="reach"):
    """Of whom ``reach`` is asked."""

    manifest: EngineManifest


Line = Inventory | Registered | ReadBack | Digested | Reached | Failed
Order = ReadOrder | DigestOrder | ReachOrder
Say = Callable[[Line], None]


class _StageError(Exception):
    """Something went wrong, and during what."""


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _StageError(name, f"{type(error).__name__}: {error}") from error


class _Memory:
    """A made-up engine's caches. The array or tensor is kept alive here."""

    def __init__(self, num_bytes: int, kind: str, *, fill: bool) -> None:
        import numpy as np

        from hybrid_connector.transport.base import Region, host_region
        from hybrid_connector.transport.digest import CudaDigester, Digester, HostDigester

        data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8) if fill else np.zeros(num_bytes, np.uint8)
        self._kept: Any = data
        self.region: Region
        self.digester: Digester
        if kind == "DRAM":
            self.region = host_region(data)
            self.digester = HostDigester(self.region)
            return
        import torch

        tensor = torch.from_numpy(data).cuda()
        self._kept = tensor
        self.region = Region(tensor.data_ptr(), num_bytes, "VRAM", tensor.device.index)
        self.digester = CudaDigester(tensor)

    def digests(self, runs: tuple[RunList, ...]) -> tuple[int, ...]:
        return tuple(self._digest(one) for one in runs)

    def _digest(self, runs: RunList) -> int:
        job = self.digester.begin(runs)
        while (digest := job.poll()) is None:
            time.sleep(_PAUSE_S)
        return digest


def hold(kind: str, orders: Iterator[Order], say: Say) -> None:
    """P's part."""
    with _stage("import"):
        from hybrid_connector.transport.nixl import NixlTransport
    with _stage("inventory"):
        say(_take_inventory())
    layout = made_up_prefill().layout
    with _stage("agent"):
        transport = NixlTransport()
    with _stage("memory"):
        memory = _Memory(layout.region_bytes, kind, fill=True)
    with _stage("registration"):
        began = time.perf_counter()
        transport.register(memory.region)
        seconds = time.perf_counter() - began
        region = memory.region
        rank = RankManifest(
            0, layout, region.address, region.memory, region.device, transport.kind, transport.identity()
        )
    say(Registered(rank, seconds))
    for order in orders:
        assert isinstance(order, DigestOrder)
        with _stage("digest"):
            say(Digested(memory.digests(order.runs)))


def _take_inventory() -> Inventory:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("hybrid-connector-doctor", nixl_agent_config(backends=["UCX"]))
    plugins = tuple(agent.get_plugin_list())
    memories = tuple(agent.get_plugin_mem_types("UCX")) if "UCX" in plugins else ()
    library = ucx.loaded_library()
    if library is None:
        return Inventory(plugins, memories, "", None, "no libucp is loaded")
    try:
        with tempfile.NamedTemporaryFile() as report:
            transports = ucx.list_transports(library, Path(report.name))
    except (OSError, AttributeError) as error:
        return Inventory(plugins, memories, library.name, None, str(error))
    return Inventory(plugins, memories, library.name, transports)


def read(kind: str, orders: Iterator[Order], say: Say) -> None:
    """D's part."""
    from hybrid_connector.transport.base import Region
    from hybrid_connector.transport.binding import Binder
    from hybrid_connector.transport.digest import run_lists
    from hybrid_connector.transport.nixl import NixlTransport

    src_ids, dst_ids, layout = made_up_prefill().block_ids, made_up_decode().block_ids, made_up_decode().layout
    with _stage("agent"):
        transport = NixlTransport(is_read_from=False)
    with _stage("registration"):
        memory = _Memory(layout.region_bytes, kind, fill=False)
        transport.register(memory.region)
    order = next(orders)
    assert isinstance(order, ReadOrder)
    rank = order.rank
    remote = Region(rank.region_address, rank.layout.region_bytes, rank.memory, rank.device)
    (plan,) = plan_engine([layout], [rank.layout])
    binder = Binder(plan, layout, [rank.layout], dst_base=memory.region.address, src_bases={0: remote.address})
    (copies,) = binder.bind(src_ids, dst_ids, PAGE_TOKENS)
    with _stage("connection"):
        peer = transport.add_peer(rank.identity)
    with _stage("read"):
        began = time.perf_counter()
        _wait(transport.read(peer, copies, memory.region, remote))
        seconds = time.perf_counter() - began
    pairs = run_lists(copies, memory.region, remote)
    with _stage("digest"):
        digests = memory.digests(tuple(pair.dst for pair in pairs))
    say(ReadBack(copies.total_bytes, len(copies), seconds, tuple(pair.src for pair in pairs), digests))


def reach(orders: Iterator[Order], say: Say) -> None:
    """A few bytes of page 0 of every rank's first layer: of the block that vLLM gives to no request."""
    from hybrid_connector.transport.nixl import NixlTransport

    order = next(orders)
    assert isinstance(order, ReachOrder)
    ranks = order.manifest.ranks
    with _stage("agent"):
        transport = NixlTransport(is_read_from=False)
    with _stage("registration"):
        memory = _Memory(REACH_BYTES, ranks[0].memory, fill=False)
        transport.register(memory.region)
    for rank in ranks:
        began = time.perf_counter()
        try:
            _reach_rank(transport, memory, rank)
        except Exception as error:
            say(Reached(rank.rank, time.perf_counter() - began, f"{type(error).__name__}: {error}"))
        else:
            say(Reached(rank.rank, time.perf_counter() - began))


def _reach_rank(transport: Any, memory: _Memory, rank: RankManifest) -> None:
    import numpy as np

    from hybrid_connector.transport.base import Region
    from hybrid_connector.transport.binding import BoundCopies

    layer = rank.layout.layers[0]
    remote = Region(rank.region_address, rank.layout.region_bytes, rank.memory, rank.device)
    size = min(REACH_BYTES, layer.page_stride)
    src, dst, num_bytes = (
        np.array([value], np.uint64) for value in (remote.address + layer.offset, memory.region.address, size)
    )
    peer = transport.add_peer(rank.identity)
    _wait(transport.read(peer, BoundCopies(rank.rank, src, dst, num_bytes), memory.region, remote))


def _wait(transfer: Any) -> None:
    """Until the read has ended; raises where it failed or does not end."""
    deadline = time.monotonic() + READ_LIMIT_S
    while (state := transfer.poll()) == "pending":
        if time.monotonic() > deadline:
            raise TimeoutError(f"no byte within {READ_LIMIT_S:g} s")
        time.sleep(_PAUSE_S)
    if state != "done":
        raise OSError(transfer.error)


def main() -> int:
    """Run one role. What libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Order)

        def say(line: Line) -> None:
            out.write(encoder.encode(line) + b"\n")

        orders = (decoder.decode(line) for line in sys.stdin.buffer)
        role, *arguments = sys.argv[1:]
        roles: dict[str, Callable[..., None]] = {"hold": hold, "read": read, "reach": reach}
        try:
            roles[role](*arguments, orders, say)
        except _StageError as error:
            say(Failed(*error.args))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
