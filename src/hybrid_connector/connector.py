"""``HybridNixlConnector``: the class vLLM loads. It delegates, and decides nothing itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from hybrid_connector.engine.config import decode_config
from hybrid_connector.engine.exchange import StepOrders, StepReport
from hybrid_connector.engine.layout import Place, refuse_unsupported
from hybrid_connector.engine.metrics import HybridConnectorPromMetrics, HybridConnectorStats
from hybrid_connector.engine.scheduler import Scheduler
from hybrid_connector.engine.worker import Worker
from hybrid_connector.wire.manifest import RankManifest

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class OrdersMetadata(KVConnectorMetadata):
    """A step's orders, as vLLM carries them to the workers."""

    orders: StepOrders


@dataclass(frozen=True, slots=True)
class ReportMetadata(KVConnectorWorkerMetadata):
    """A worker's report, as vLLM carries it back."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.aggregate(other.report))


@dataclass(frozen=True, slots=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """A worker's manifest, as vLLM carries it to the scheduler."""

    manifest: RankManifest


class HybridNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the cache state of hybrid models from prefill to decode engines over NIXL."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = decode_config(self._kv_transfer_config.kv_connector_extra_config)
        refuse_unsupported(vllm_config, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, kv_cache_config, config)
        else:
            from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

            parallel = vllm_config.parallel_config
            place = Place(
                pp_rank=get_pp_group().rank_in_group,
                pp_size=parallel.pipeline_parallel_size,
                tp_rank=get_tensor_model_parallel_rank(),
                tp_size=parallel.tensor_parallel_size,
            )
            self._worker = Worker(vllm_config, kv_cache_config, config, place)

    @property
    def _in_scheduler(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _in_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    # What vLLM asks of either half.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load always brings the recurrent state, however deep the local attention hit is."""
        return True

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Every transferable group is loaded, so vLLM zeroes none of the blocks behind the load's back."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @property
    def supports_sleep_mode(self) -> bool:
        """Registered memory must stay where it is."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads apart, so that a rank's heads of a page are one run; vLLM warns where a backend has no such layout."""
        assert vllm_config.kv_transfer_config is not None
        layout = decode_config(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_cache_layout
        return "LBHNC" if layout == "auto" else layout

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return HybridConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return HybridConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = {}
        for key, rank in metadata.items():
            assert isinstance(rank, RankMetadata)
            ranks[key] = rank.manifest
        self._in_scheduler.publish(ranks)

    def on_new_request(self, request: "Request") -> None:
        self._in_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._in_scheduler.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._in_scheduler.after_allocation(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        return OrdersMetadata(self._in_scheduler.build_orders(is_idle=is_idle))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._in_scheduler.take_reports(connector_output)

    def reset_cache(self) -> bool | None:
        self._in_scheduler.reset_cache()
        return True

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finish(request, block_ids)

    # Workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        manifest = self._in_worker.manifest()
        return None if manifest is None else RankMetadata(manifest)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OrdersMetadata)
        self._in_worker.run_orders(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests run only once their load is complete."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing to save: D reads the blocks where they lie."""

    def wait_for_save(self) -> None:
        self._in_worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._in_worker.collect()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return ReportMetadata(self._in_worker.take_report())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None
