"""What does the connector do in a worker process?

1. ``register``: read the layout of the caches, register their memory with the transport once.
2. ``run_orders``, each step after the forward pass was queued: start loads, write captures.
3. ``end_step``: mark the end of the step's device work.
4. ``collect``: post and poll reads and digests, report what ended.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.errors import TransferError
from hybrid_connector.engine import capture
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord, StepOrders, StepReport
from hybrid_connector.engine.layout import Place, RankCaches, conv_channel_first, read_caches, tail_views
from hybrid_connector.engine.lease_digests import LeaseDigests
from hybrid_connector.engine.loads import Loads
from hybrid_connector.engine.ordering import StepFence, compute_stream
from hybrid_connector.transport.base import Transport
from hybrid_connector.transport.digest import CudaDigester, Digester, HostDigester
from hybrid_connector.transport.nixl import NixlTransport
from hybrid_connector.transport.scatter import CudaScatter, HostScatter
from hybrid_connector.transport.staging import StagingArea
from hybrid_connector.wire.manifest import RankManifest

logger = logging.getLogger(__name__)

IDLE_POLL_S = 2e-3
"""How long a step without computation polls reads: most end within it, and vLLM sleeps for 1 ms after such a step."""

IDLE_PAUSE_S = 2e-5
"""Between two of these polls, for the process's other threads."""

CUDA_STAGING_BYTES = 256 << 20
"""A 397B hybrid's request of 8,192 tokens fits; of the GPU's memory 2 in 1,000."""

HOST_STAGING_BYTES = 64 << 20

SHUTDOWN_WAIT_S = 10.0
"""How long a worker that shuts down waits for its reads; UCX reports a lost peer sooner."""


class Worker:
    """The connector's half in one worker."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig, place: Place
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._place = place
        self._transport: Transport | None = None
        self._caches: RankCaches | None = None
        self._loads: Loads | None = None
        self._digests: LeaseDigests | None = None
        self._fence: StepFence | None = None
        self._tails: tuple[tuple[int, tuple[torch.Tensor, ...]], ...] = ()
        self._step, self._is_idle = -1, False
        self._failures: dict[str, str] = {}
        self._frees: set[str] = set()
        self._report = StepReport(-1)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take over the caches vLLM allocated. Raises ``UnsupportedError`` where they are not as expected."""
        self._caches = read_caches(self._vllm_config, self._kv_cache_config, kv_caches, self._place)
        self._tails = tail_views(self._kv_cache_config, kv_caches)
        transfer = self._vllm_config.kv_transfer_config
        self._transport = NixlTransport(is_read_from=transfer is not None and transfer.is_kv_producer)
        self._transport.register(self._caches.region)
        stream = compute_stream(self._caches.device)
        self._fence = StepFence(stream)
        memory = self._device_memory(kv_caches)
        digester: Digester = HostDigester(self._caches.region) if memory is None else CudaDigester(memory)
        self._digests = LeaseDigests(self._caches.layout, digester)
        self._loads = Loads(
            self._caches.layout,
            self._caches.region,
            self._transport,
            stream,
            time.monotonic,
            on_loaded=self._capture_load if self._config.capture_dir else None,
            digester=digester,
            staging=self._staging_area(memory),
            use_staging=self._config.staging,
            cost=self._config.start_cost,
        )

    def _device_memory(self, kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The caches, which all lie in one allocation, as uint8; ``None`` where they are not on a GPU."""
        assert self._caches is not None
        if self._caches.device.type != "cuda":
            return None
        storage = next(iter(kv_caches.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self._caches.device).set_(storage)

    def _staging_area(self, memory: torch.Tensor | None) -> StagingArea:
        """Beside the caches, and allocated when a peer is met."""
        assert self._caches is not None
        region, wanted = self._caches.region, self._config.staging_bytes
        if memory is None:
            return StagingArea(wanted or HOST_STAGING_BYTES, lambda size: HostScatter(size, region))
        return StagingArea(wanted or CUDA_STAGING_BYTES, lambda size: CudaScatter(size, memory))

    def manifest(self) -> RankManifest | None:
        """What peers need to read from this rank; ``None`` before ``register``."""
        if self._caches is None or self._transport is None:
            return None
        region = self._caches.region
        return RankManifest(
            rank=self._place.rank,
            layout=self._caches.layout,
            region_address=region.address,
            memory=region.memory,
            device=region.device,
            transport=self._transport.kind,
            identity=self._transport.identity(),
        )

    def run_orders(self, orders: StepOrders) -> None:
        """Carry out the scheduler's orders for this step; the forward pass, if any, has been queued."""
        self._step, self._is_idle = orders.step, orders.is_idle
        self._frees.update(orders.frees)
        if self._loads is None or self._caches is None or self._digests is None:
            return
        for peer in orders.gone:
            self._loads.forget_peer(peer)
        for manifest in orders.manifests:
            self._loads.add_peer(manifest)
        for finished in orders.captures:
            self._capture("produced", finished.request_id, finished.block_ids, finished.num_tokens)
        for order in orders.loads:
            self._zero_tail(order)
            self._loads.start(order)
        for request_id, reason in orders.failures.items():
            self._loads.fail(request_id, reason)
        for request_id in orders.passed:
            self._loads.accept(request_id)
        for request_id, reason in orders.refuted.items():
            self._loads.refute(request_id, reason)
        for digest in orders.digests:
            self._digests.start(digest)

    def end_step(self) -> None:
        """All device work of the step has been queued."""
        if self._fence is not None and self._step >= 0:
            self._fence.record(self._step)

    def collect(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose blocks are no longer leased, whose loads ended, and of these the failed ones."""
        frees, self._frees = self._frees, set()
        records = self._loads.poll() if self._loads is not None else []
        if self._is_idle and not records and self._loads is not None:
            records = self._poll_on(self._loads)
        completed = self._fence.completed_step() if self._fence is not None else self._step
        digests = self._digests.poll() if self._digests is not None else []
        self._report = StepReport(completed, tuple(records), tuple(digests))
        ended = {record.request_id for record in records}
        return frees, ended, {record.request_id for record in records if record.error is not None}

    def take_report(self) -> StepReport:
        """The report of the step that ``collect`` ended."""
        report, self._report = self._report, replace(self._report, loads=(), digests=())
        return report

    def close(self) -> None:
        """Wait for reads in flight, so that nothing writes into memory that is given back, then leave the transport."""
        deadline = time.monotonic() + SHUTDOWN_WAIT_S
        while self._loads is not None and self._loads.drain() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._transport is not None:
            try:
                self._transport.close()
            except TransferError as error:  # a stopped peer can hold a read for ever; the process ends all the same
                logger.warning("reads still in flight at shutdown after %g s: %s", SHUTDOWN_WAIT_S, error)
            self._transport = None

    def _poll_on(self, loads: Loads) -> list[LoadRecord]:
        """In a step that computes nothing, see short reads through: the next step would notice them a step later."""
        records: list[LoadRecord] = []
        deadline = time.monotonic() + IDLE_POLL_S
        while len(loads) and not records and time.monotonic() < deadline:
            time.sleep(IDLE_PAUSE_S)
            records += loads.poll()
        return records

    def _zero_tail(self, order: LoadOrder) -> None:
        """Zero the pages from the last token on: vLLM leaves the zeroing of loaded blocks to the load.

        The read then fills the last page as far as P's page goes; what it does not fill must not be another
        request's bytes, which as K/V could be NaN. Queued before the load's mark, so it cannot overtake the read.
        """
        assert self._caches is not None
        for index, views in self._tails:
            group = self._caches.layout.groups[index]
            if group.page_tokens is None:
                continue
            last = order.dst_block_ids[index][-1]
            assert last is not None, "the last token's block is inside every window"
            # Only the last block can have such pages, and they follow each other: no index tensor, no synchronisation.
            first = order.num_tokens // group.page_tokens % group.pages_per_block
            if order.num_tokens % (group.page_tokens * group.pages_per_block):
                start = last * group.pages_per_block
                for view in views:
                    view[start + first : start + group.pages_per_block].zero_()

    def _capture_load(self, order: LoadOrder, record: LoadRecord) -> None:
        moved = {
            "local_request_id": order.request_id,
            "transport": self._transport.kind if self._transport is not None else "",
            "kind_bytes": dict(record.kind_bytes),
            "num_descriptors": record.num_descriptors,
            "direct_bytes": record.direct_bytes,
            "staged_bytes": record.staged_bytes,
            "src_block_ids": order.src_block_ids,
            "dst_block_ids": order.dst_block_ids,
            "post_s": record.post_s,
            "transfer_s": record.transfer_s,
        }
        self._capture("loaded", order.remote_request_id, order.dst_block_ids, order.num_tokens, moved)

    def _capture(
        self, what: str, request_id: str, block_ids: BlockIds, num_tokens: int, moved: Mapping[str, Any] | None = None
    ) -> None:
        """Write down what the layers of this rank hold for a request, and how it moved."""
        if self._config.capture_dir is None or self._caches is None:
            return
        layout = self._caches.layout
        layers = self._vllm_config.compilation_config.static_forward_context
        arrays = capture.gather(
            {layer.name: layers[layer.name].kv_cache for layer in layout.layers},
            {layer.name: layer.group for layer in layout.layers},
            [group.pages_per_block for group in layout.groups],
            block_ids,
            num_tokens,
        )
        meta = {
            "request_id": request_id,
            "rank": self._place.rank,
            "tp_size": self._place.tp_size,
            "pp_size": self._place.pp_size,
            "num_tokens": num_tokens,
            "conv_channel_first": conv_channel_first(),
            "moved": moved,
        }
        capture.write(Path(self._config.capture_dir) / f"{what}.{request_id}.rank{self._place.rank}.npz", arrays, meta)
