"""What do vLLM's cache structures say about where this rank's state lies?

The only module that knows them. It reads, and a test fails first when an upgrade moves one of:
``KVCacheConfig``: num_blocks, transfer_groups, select_transfer_block_ids, has_mamba_layers, needs_kv_cache_zeroing;
``KVCacheGroupSpec``: layer_names, kv_cache_spec, host_resident;
``UniformTypeKVCacheSpecs``: kv_cache_specs;
``FullAttentionSpec``: block_size, num_kv_heads, dtype, kv_quant_mode, sliding_window, attention_chunk_size,
num_head_slots, tokens_per_state, state_content_size_bytes;
``MambaSpec``: block_size, shapes, dtypes, mamba_type, tp_replicated;
registered tensors: attention ``[kernel blocks, H, N, C]``, recurrent ``[blocks, 1, 1, bytes]``, one backing storage;
``mamba_utils.is_conv_state_dim_first``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.errors import UnsupportedError
from hybrid_connector.core.families import ElementType, attention, gated_delta_net
from hybrid_connector.core.geometry import Shard
from hybrid_connector.transport.base import Region


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its engine."""

    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int

    @property
    def rank(self) -> int:
        """Position among all ranks of the engine: stages one after the other."""
        return self.pp_rank * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class RankCaches:
    """The registered caches of one rank: their layout, and the memory they lie in."""

    layout: RankLayout
    region: Region
    device: torch.device


def group_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec of a group, of its first layer where they differ; also for a group without layers on this stage."""
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def spec_of(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group, also where the group's layers differ."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ``UnsupportedError`` for an engine whose state this release cannot move, naming the feature."""
    parallel = vllm_config.parallel_config
    for size, feature in (
        (parallel.decode_context_parallel_size, "decode context parallelism"),
        (parallel.prefill_context_parallel_size, "prefill context parallelism"),
    ):
        if size > 1:
            raise UnsupportedError(f"{feature} of size {size} is not supported yet: use size 1")
    if vllm_config.speculative_config is not None:
        raise UnsupportedError("speculative decoding is not supported yet: start without a speculative config")
    for group in kv_cache_config.transfer_groups:
        if group.host_resident:
            raise UnsupportedError(f"{group.layer_names[0]}: host-resident caches are not supported")
        for name in group.layer_names:
            _refuse_unsupported_spec(name, spec_of(group, name))


def _refuse_unsupported_spec(name: str, spec: KVCacheSpec) -> None:
    if isinstance(spec, MambaSpec):
        if spec.mamba_type != MambaAttentionBackendEnum.GDN_ATTN:
            raise UnsupportedError(f"{name}: recurrent layers of type {spec.mamba_type.name} are not supported yet")
        if spec.tp_replicated or len(spec.shapes) != 2:
            raise UnsupportedError(f"{name}: expected a conv and a temporal state split over ranks, got {spec.shapes}")
        return
    # Subclasses (MLA, sink attention, ...) place their bytes differently.
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedError(f"{name}: caches of type {type(spec).__name__} are not supported yet")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise UnsupportedError(f"{name}: sliding-window and chunked attention are not supported yet")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise UnsupportedError(f"{name}: K/V quantised as {spec.kv_quant_mode.name} are not supported yet")
    if spec.num_head_slots not in (None, spec.num_kv_heads) or spec.tokens_per_state != 1:
        raise UnsupportedError(f"{name}: packed attention pages are not supported yet")


def read_caches(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    place: Place,
) -> RankCaches:
    """The layout of the caches that vLLM registered on one rank.

    Raises ``UnsupportedError`` where the tensors are not as the specs say.
    """
    groups, layers = [], []
    region: Region | None = None
    device = torch.device("cpu")
    for group_index, group in enumerate(kv_cache_config.transfer_groups):
        described: set[Group] = set()
        for name in group.layer_names:
            if name not in caches:
                raise UnsupportedError(f"{name}: vLLM registered no cache for it; it registered {sorted(caches)}")
            cache, spec = caches[name], spec_of(group, name)
            storage = cache.untyped_storage()
            own = Region(
                storage.data_ptr(),
                storage.nbytes(),
                "VRAM" if cache.device.type == "cuda" else "DRAM",
                cache.device.index or 0,
            )
            if region is not None and own != region:
                raise UnsupportedError(f"{name}: lies in another allocation than its siblings; one region is expected")
            region, device = own, cache.device
            described.add(_describe_group(name, spec, cache, kv_cache_config.num_blocks))
            shards = _describe_shards(vllm_config, name, spec, cache, place.tp_rank, place.tp_size)
            page_stride = cache.stride(0) * cache.element_size()
            layers.append(Layer(name, group_index, cache.data_ptr() - own.address, page_stride, shards))
        if not described:
            described.add(_describe_absent(group_spec(group), kv_cache_config.num_blocks))
        if len(described) != 1:
            raise UnsupportedError(f"{group.layer_names[0]}: layers of one group differ in block size: {described}")
        groups.append(described.pop())
    if region is None:
        raise UnsupportedError("the model registered no cache to move")
    return RankCaches(RankLayout(place.rank, region.num_bytes, tuple(groups), tuple(layers)), region, device)


def _describe_group(name: str, spec: KVCacheSpec, cache: torch.Tensor, num_blocks: int) -> Group:
    if cache.shape[0] % num_blocks:
        raise UnsupportedError(f"{name}: {cache.shape[0]} pages are no multiple of {num_blocks} blocks")
    if isinstance(spec, MambaSpec):
        return Group(num_blocks)
    pages_per_block = cache.shape[0] // num_blocks
    if cache.shape[2] * pages_per_block != spec.block_size:
        raise UnsupportedError(
            f"{name}: {pages_per_block} pages of {cache.shape[2]} tokens are no block of {spec.block_size} tokens"
        )
    return Group(num_blocks, pages_per_block, cache.shape[2])


def _describe_absent(spec: KVCacheSpec, num_blocks: int) -> Group:
    """A group none of whose layers is on this pipeline stage: nothing moves, but requests have blocks in it."""
    return Group(num_blocks) if isinstance(spec, MambaSpec) else Group(num_blocks, 1, spec.block_size)


def _describe_shards(
    vllm_config: VllmConfig, name: str, spec: KVCacheSpec, cache: torch.Tensor, rank: int, num_ranks: int
) -> tuple[Shard, ...]:
    if isinstance(spec, MambaSpec):
        return _describe_gated_delta_net(name, spec, rank, num_ranks)
    assert isinstance(spec, FullAttentionSpec)
    try:
        tensor, box = attention(
            name,
            num_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
            content_bytes=spec.state_content_size_bytes,
            element=element_type(spec.dtype),
            page_tokens=cache.shape[2],
            rank=rank,
            num_ranks=num_ranks,
        )
    except ValueError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    if box.shape != tuple(cache.shape[1:]):
        raise UnsupportedError(
            f"{name}: expected pages of (H, N, C) = {box.shape}, vLLM registered {tuple(cache.shape[1:])}"
        )
    return (Shard(tensor, box, 0, tuple(stride * cache.element_size() for stride in cache.stride()[1:])),)


def _describe_gated_delta_net(name: str, spec: MambaSpec, rank: int, num_ranks: int) -> tuple[Shard, ...]:
    """A page holds the conv state, then the temporal state (value heads, value_dim, key_dim); q and k are alike."""
    channel_first = conv_channel_first()
    num_channels, num_taps = spec.shapes[0] if channel_first else reversed(spec.shapes[0])
    value_heads, value_dim, key_dim = spec.shapes[1]
    key_channels = num_channels - value_heads * value_dim
    if key_channels <= 0 or key_channels % (2 * key_dim):
        raise UnsupportedError(
            f"{name}: {num_channels} conv channels are not q and k (of {key_dim} a head) and v ({value_heads} heads)"
        )
    return gated_delta_net(
        name,
        num_key_heads=key_channels // (2 * key_dim) * num_ranks,
        num_value_heads=value_heads * num_ranks,
        key_dim=key_dim,
        value_dim=value_dim,
        num_taps=num_taps,
        conv_element=element_type(spec.dtypes[0]),
        temporal_element=element_type(spec.dtypes[1]),
        channel_first=channel_first,
        rank=rank,
        num_ranks=num_ranks,
    )


def conv_channel_first() -> bool:
    """Whether vLLM keeps conv states as (channels, taps) (DS) rather than (taps, channels) (SD)."""
    return bool(is_conv_state_dim_first())


def element_type(dtype: torch.dtype) -> ElementType:
    """A torch dtype as the core knows it: ``bfloat16``, 2 bytes."""
    return ElementType(str(dtype).removeprefix("torch."), dtype.itemsize)


def model_factors(vllm_config: VllmConfig, model_id: str) -> dict[str, str]:
    """What two engines must agree on besides the geometry of their tensors."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    # Where the files lie and which library wrote them says nothing about the model.
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return {
        "architecture": ",".join(model.architectures or ()),
        "model config": digest,
        "model revision": str(model.revision or ""),
        "model_id": model_id,
        "computation dtype": element_type(model.dtype).name,
    }


def state_block_ids(kv_cache_config: KVCacheConfig, block_ids: Sequence[list[int]], num_tokens: int) -> BlockIds:
    """The blocks that hold the state of a request's first ``num_tokens`` tokens, per transferable group.

    ``block_ids``: the scheduler's lists, per cache group. A recurrent group keeps one state per request, in the block
    whose tokens include the last one; what stands before it is null or superseded (mamba_utils.preprocess_mamba).
    Block 0 is vLLM's null block: a place in the list without content.
    """
    chosen: list[tuple[int | None, ...]] = []
    groups = kv_cache_config.transfer_groups
    for group, ids in zip(groups, kv_cache_config.select_transfer_block_ids(block_ids), strict=True):
        spec = group_spec(group)
        num_blocks = -(-num_tokens // spec.block_size)
        wanted = ids[num_blocks - 1 : num_blocks] if isinstance(spec, MambaSpec) else ids[:num_blocks]
        chosen.append(tuple(block or None for block in wanted))
    return tuple(chosen)


def is_recurrent(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the model has layers whose state cannot be cut back to fewer tokens."""
    return bool(kv_cache_config.has_mamba_layers)


def tail_views(
    kv_cache_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]
) -> tuple[tuple[int, tuple[torch.Tensor, ...]], ...]:
    """Per paged group: its index, and its layers' caches, where vLLM wants new blocks zeroed before use; else none."""
    if not kv_cache_config.needs_kv_cache_zeroing:
        return ()
    return tuple(
        (index, tuple(caches[name] for name in group.layer_names))
        for index, group in enumerate(kv_cache_config.transfer_groups)
        if not isinstance(group_spec(group), MambaSpec)
    )
