"""What do vLLM's cache structures say about where this rank's state lies?

The only module that knows them. It reads, and a test fails first when an upgrade moves one of:
``KVCacheConfig``: num_blocks, transfer_groups, select_transfer_block_ids, needs_kv_cache_zeroing;
``KVCacheGroupSpec``: layer_names, kv_cache_spec, host_resident;
``UniformTypeKVCacheSpecs``: kv_cache_specs;
``FullAttentionSpec``, ``SlidingWindowSpec``, ``MLAAttentionSpec``: block_size, num_kv_heads, kv_quant_mode,
num_head_slots, tokens_per_state, state_content_size_bytes;
``MambaSpec``: block_size, shapes, dtypes, mamba_type, tp_replicated;
registered tensors: attention ``[kernel blocks, H, N, C]``, recurrent ``[blocks, 1, 1, bytes]``, one backing storage;
``mamba_utils.is_conv_state_dim_first``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from hybrid_connector.core import families
from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.errors import UnsupportedError
from hybrid_connector.core.families import Attention, ElementType, Recurrent, StatePage, TokenPage
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
    for group in kv_cache_config.transfer_groups:
        if group.host_resident:
            raise UnsupportedError(f"{group.layer_names[0]}: host-resident caches are not supported")
        for name in group.layer_names:
            _refuse_unsupported_spec(name, spec_of(group, name))


def _refuse_unsupported_spec(name: str, spec: KVCacheSpec) -> None:
    if isinstance(spec, MambaSpec):
        if spec.mamba_type not in _RECURRENT:
            raise UnsupportedError(f"{name}: recurrent layers of type {spec.mamba_type.name} are not supported")
        if spec.tp_replicated:
            raise UnsupportedError(f"{name}: recurrent states that every rank holds whole are not supported yet")
        return
    # Other subclasses (sink, chunked, compressed attention, ...) place or choose their bytes differently.
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
        raise UnsupportedError(f"{name}: caches of type {type(spec).__name__} are not supported yet")
    if spec.num_head_slots not in (None, spec.num_kv_heads) or spec.tokens_per_state != 1:
        raise UnsupportedError(
            f"{name}: packed attention pages are not supported yet: {spec.num_head_slots} slots for "
            f"{spec.num_kv_heads} KV heads, {spec.tokens_per_state} tokens per entry"
        )


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
    try:
        if isinstance(spec, MambaSpec):
            family = _RECURRENT[spec.mamba_type](spec, num_ranks, vllm_config.model_config.hf_text_config)
            page = StatePage(conv_channel_first())
            shapes = family.shapes(page, rank=rank, num_ranks=num_ranks)
            if shapes != tuple(map(tuple, spec.shapes)):
                raise UnsupportedError(f"{name}: expected states of shapes {shapes}, vLLM has {spec.shapes}")
            return family.shards(name, page, rank=rank, num_ranks=num_ranks)
        return _describe_attention(vllm_config, spec, cache).shards(
            name,
            TokenPage(cache.shape[2], _byte_strides(cache)),
            rank=rank,
            num_ranks=num_ranks,
        )
    except ValueError as error:
        raise UnsupportedError(f"{name}: {error}") from error


def _byte_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    _, heads, tokens, content = (stride * cache.element_size() for stride in cache.stride())
    return heads, tokens, content


def _describe_attention(vllm_config: VllmConfig, spec: KVCacheSpec, cache: torch.Tensor) -> Attention:
    """Attention of the whole model; a rank's cache is ``[pages, H, N, C]``, C being K and V, or one latent vector."""
    num_kv_heads = 1 if isinstance(spec, MLAAttentionSpec) else vllm_config.model_config.get_total_num_kv_heads()
    _, heads, tokens, content = cache.shape
    if heads != max(1, num_kv_heads // vllm_config.parallel_config.tensor_parallel_size):
        raise UnsupportedError(f"expected a rank's share of {num_kv_heads} KV heads, vLLM registered {heads}")
    if content * cache.element_size() != spec.state_content_size_bytes:
        raise UnsupportedError(f"expected {spec.state_content_size_bytes} bytes per token, vLLM registered {content}")
    element = element_type(cache.dtype)
    if cache.device.type == "cpu":
        # The CPU's kernels lay a head's page out in an order of their own, K before V (cpu_attn.py), whatever the view
        # says: pages move whole, and only between engines whose pages are of the same length.
        element = ElementType(f"{element.name} in CPU pages of {tokens} tokens", element.num_bytes)
    return Attention(num_kv_heads, content, element)


def _mamba1(spec: MambaSpec, num_ranks: int, config: Any) -> Recurrent:
    num_channels, state_dim = spec.shapes[1]
    return families.mamba1(
        num_channels=num_channels * num_ranks,
        state_dim=state_dim,
        num_taps=_conv_shape(spec)[1],
        conv_element=element_type(spec.dtypes[0]),
        temporal_element=element_type(spec.dtypes[1]),
    )


def _mamba2(spec: MambaSpec, num_ranks: int, config: Any) -> Recurrent:
    num_heads, head_dim, state_dim = spec.shapes[1]
    num_channels, num_taps = _conv_shape(spec)
    num_groups = (num_channels - num_heads * head_dim) // (2 * state_dim) * num_ranks
    if num_groups == num_ranks:
        # One group per rank: the model may have that many, or a single one that every rank holds.
        num_groups = next((getattr(config, key) for key in _NUM_GROUPS if hasattr(config, key)), num_groups)
    return families.mamba2(
        num_heads=num_heads * num_ranks,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=state_dim,
        num_taps=num_taps,
        conv_element=element_type(spec.dtypes[0]),
        temporal_element=element_type(spec.dtypes[1]),
    )


def _delta_net(spec: MambaSpec, num_ranks: int, config: Any) -> Recurrent:
    """Also KDA. q and k are alike; what is left of the channels after v is theirs."""
    num_heads, value_dim, key_dim = spec.shapes[1]
    num_channels, num_taps = _conv_shape(spec)
    return families.delta_net(
        num_key_heads=(num_channels - num_heads * value_dim) // (2 * key_dim) * num_ranks,
        num_value_heads=num_heads * num_ranks,
        key_dim=key_dim,
        value_dim=value_dim,
        num_taps=num_taps,
        conv_element=element_type(spec.dtypes[0]),
        temporal_element=element_type(spec.dtypes[1]),
    )


def _short_convolution(spec: MambaSpec, num_ranks: int, config: Any) -> Recurrent:
    num_channels, num_taps = _conv_shape(spec)
    return families.short_convolution(
        num_channels=num_channels * num_ranks, num_taps=num_taps, element=element_type(spec.dtypes[0])
    )


def _linear_attention(spec: MambaSpec, num_ranks: int, config: Any) -> Recurrent:
    num_heads, head_dim, _ = spec.shapes[0]
    return families.linear_attention(
        num_heads=num_heads * num_ranks, head_dim=head_dim, element=element_type(spec.dtypes[0])
    )


_RECURRENT: Mapping[MambaAttentionBackendEnum, Callable[[MambaSpec, int, Any], Recurrent]] = {
    MambaAttentionBackendEnum.MAMBA1: _mamba1,
    MambaAttentionBackendEnum.MAMBA2: _mamba2,
    MambaAttentionBackendEnum.GDN_ATTN: _delta_net,
    MambaAttentionBackendEnum.SHORT_CONV: _short_convolution,
    MambaAttentionBackendEnum.LINEAR: _linear_attention,
}
"""How a rank's shapes become the whole model's numbers, by vLLM's name of the layer type."""

_NUM_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""What model configs call the number of B and C groups."""


def _conv_shape(spec: MambaSpec) -> tuple[int, int]:
    """Channels and taps of a rank's conv state."""
    first, second = spec.shapes[0]
    return (first, second) if conv_channel_first() else (second, first)


def conv_channel_first() -> bool:
    """Whether vLLM keeps conv states as (channels, taps) (DS) rather than (taps, channels) (SD)."""
    return bool(is_conv_state_dim_first())


def element_type(dtype: torch.dtype) -> ElementType:
    """A torch dtype as the core knows it: ``bfloat16``, 2 bytes."""
    return ElementType(str(dtype).removeprefix("torch."), dtype.itemsize)


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


def overwrites_state(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the state after N tokens no longer contains the state after N - 1.

    Recurrent layers overwrite it, and sliding windows drop the block that token N - 1 still needs.
    """
    return any(
        isinstance(group_spec(group), MambaSpec | SlidingWindowSpec) for group in kv_cache_config.transfer_groups
    )


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
