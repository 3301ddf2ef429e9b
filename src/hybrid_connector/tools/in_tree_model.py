"""What would vLLM's own ``NixlConnector`` copy for the same request? A model of its published offset arithmetic.

1. ``read_attention`` and ``read_state`` give the byte ranges that one D rank reads, for one layer.
2. What the connector refuses raises ``RefusedError``; what this model does not cover raises ``NotModelledError``.

Written from vLLM 0.32.0, below ``distributed/kv_transfer/kv_connector``: ``utils.py`` (P ranks), ``v1/nixl``'s
``tp_mapping.py`` (heads) and ``base_worker.py`` (descriptors, checks), ``v1/ssm_conv_transfer_utils.py`` (sections).
For a hybrid model: ``_has_mamba``, no prefix caching, no host buffer, no pipeline or context parallelism.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybrid_connector.tools.byte_oracle import Ints, Ranges

Order = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC"]
StateType = Literal["mamba1", "mamba2", "gdn", "short_conv", "linear"]


class RefusedError(ValueError):
    """The connector fails at its handshake, or at start, or while posting."""


class NotModelledError(ValueError):
    """This model says nothing about such engines."""


@dataclass(frozen=True, slots=True)
class AttentionSide:
    """An engine's attention layer: one entry of its region list per ``bases``; ``page_bytes`` of a region's page."""

    num_ranks: int
    order: Order
    bases: tuple[int, ...]
    page_bytes: int
    page_stride: int
    page_tokens: int
    pages_per_block: int


@dataclass(frozen=True, slots=True)
class StateSide:
    """An engine's recurrent layer: the shapes and bytes that ``MambaSpec`` tells the connector."""

    num_ranks: int
    channel_first: bool
    base: int
    page_stride: int
    conv_shape: tuple[int, int]
    conv_item: int
    temporal_shape: tuple[int, ...]
    temporal_item: int

    @property
    def conv_bytes(self) -> int:
        return math.prod(self.conv_shape) * self.conv_item

    @property
    def temporal_bytes(self) -> int:
        return math.prod(self.temporal_shape) * self.temporal_item


def parallel_ratio(src_ranks: int, dst_ranks: int) -> int:
    """``TransferTopology.tp_ratio``: D's ranks per P rank, or minus P's ranks per D rank."""
    if dst_ranks >= src_ranks:
        if dst_ranks % src_ranks:
            raise RefusedError(f"D's TP {dst_ranks} is no multiple of P's {src_ranks}")
        return dst_ranks // src_ranks
    if src_ranks % dst_ranks:
        raise RefusedError(f"P's TP {src_ranks} is no multiple of D's {dst_ranks}")
    return -(src_ranks // dst_ranks)


# Attention.


@dataclass(frozen=True, slots=True)
class _Mapping:
    """``compute_tp_mapping``: P ranks to read attention from, each one's slot in D's page, D's offset in P's page."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]
    offset_factor: int


def _map_heads(src_ranks: int, dst_ranks: int, rank: int, num_kv_heads: int, latent: bool) -> _Mapping:
    if latent or dst_ranks >= src_ranks:
        ranks = [rank * src_ranks // dst_ranks]
    else:
        share = src_ranks // dst_ranks
        first_of: dict[int, int] = {}
        for candidate in range(rank * share, (rank + 1) * share):
            first_of.setdefault(candidate * num_kv_heads // src_ranks, candidate)
        ranks = sorted(first_of.values())
    slot_of = {src_rank * num_kv_heads // src_ranks: slot for slot, src_rank in enumerate(ranks)}
    slots = tuple(slot_of.get(src_rank * num_kv_heads // src_ranks, 0) for src_rank in ranks)
    if latent or dst_ranks <= src_ranks:
        factor = 0
    elif dst_ranks > num_kv_heads:
        factor = rank * num_kv_heads // dst_ranks - ranks[0] * num_kv_heads // src_ranks
    else:
        factor = rank % (dst_ranks // src_ranks)
    return _Mapping(tuple(ranks), slots, factor)


def _check_attention(src: AttentionSide, dst: AttentionSide, num_kv_heads: int, latent: bool) -> int:
    """``_validate_remote_agent_handshake`` for the attention layers of a hybrid; the ratio of kernel page lengths."""
    ratio = parallel_ratio(src.num_ranks, dst.num_ranks)
    if dst.page_tokens % src.page_tokens:
        raise RefusedError(f"D's page of {dst.page_tokens} tokens is no multiple of P's {src.page_tokens}")
    length_ratio = dst.page_tokens // src.page_tokens
    if not latent:
        if src.order != dst.order:
            raise RefusedError(f"layout {dst.order} on D, {src.order} on P")
        replicated = src.num_ranks > num_kv_heads
        if abs(ratio) != 1 and not replicated and dst.order not in ("LBHNC", "BLHNC"):
            raise RefusedError(f"different TP with layout {dst.order}")
    elif dst.page_bytes != src.page_bytes * length_ratio:
        raise RefusedError(f"pages of {dst.page_bytes} bytes on D, {src.page_bytes} on P")
    if len(src.bases) != len(dst.bases):
        raise RefusedError(f"{len(dst.bases)} regions on D, {len(src.bases)} on P")
    return length_ratio


def read_attention(
    src: AttentionSide,
    dst: AttentionSide,
    rank: int,
    *,
    num_kv_heads: int,
    latent: bool,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
) -> list[Ranges]:
    """What D's rank ``rank`` holds after reading one attention layer and rearranging what arrived.

    D's longer pages are filled by P's shorter ones in turn; for block-contiguous layouts the connector then brings the
    tokens of each head together (``kv_postprocess_blksize_on_receive``), which is folded into the ranges here.
    """
    length_ratio = _check_attention(src, dst, num_kv_heads, latent)
    mapping = _map_heads(src.num_ranks, dst.num_ranks, rank, num_kv_heads, latent)
    num_reads = 1 if latent else len(mapping.ranks)
    if length_ratio > 1 and num_reads > 1:
        raise RefusedError("heads from several P ranks into longer pages")
    part_bytes = dst.page_bytes // length_ratio  # of a D page, filled by one P page
    chunk = part_bytes // num_reads
    src_pages = _pages(src_blocks, src.pages_per_block)
    dst_parts = _pages(dst_blocks, dst.pages_per_block * length_ratio)
    count = min(len(src_pages), len(dst_parts))
    src_pages, dst_parts = src_pages[:count], dst_parts[:count]
    together = length_ratio > 1 and not latent and dst.order in ("LBHNC", "BLHNC")
    heads = max(1, num_kv_heads // dst.num_ranks) if together else 1
    head = np.arange(heads, dtype=np.int64)
    found = []
    for src_rank, slot in zip(mapping.ranks, mapping.slots, strict=True):
        at_src: list[Ints] = []
        at_dst: list[Ints] = []
        for src_base, dst_base in zip(src.bases, dst.bases, strict=True):
            start = src_base + mapping.offset_factor * part_bytes + src_pages * src.page_stride
            page, part = np.divmod(dst_parts, length_ratio)
            into = dst_base + page * dst.page_stride + slot * chunk
            if together:
                into = into[:, None] + head * (dst.page_bytes // heads) + part[:, None] * (part_bytes // heads)
            else:
                into = (into + part * part_bytes)[:, None]
            at_src.append((start[:, None] + head * (chunk // heads)).ravel())
            at_dst.append(into.ravel())
        lengths = np.full(sum(map(len, at_src)), chunk // heads, np.int64)
        found.append(Ranges(src_rank, np.concatenate(at_src), np.concatenate(at_dst), lengths))
    return found


def _pages(blocks: Sequence[int], ratio: int) -> Ints:
    """``_logical_to_kernel_block_ids`` and ``get_mapped_blocks``: the parts of blocks, in order."""
    return (np.array(blocks, np.int64)[:, None] * ratio + np.arange(ratio)).ravel()


# Recurrent state.


def _sections(side: StateSide, state_type: StateType) -> tuple[int, ...]:
    """``derive_mamba_conv_split``: channels of each conv section on a rank, from the shapes alone."""
    num_channels = side.conv_shape[0]
    if state_type == "mamba1":
        return (num_channels,)
    inner = side.temporal_shape[0] * side.temporal_shape[1]
    if state_type == "mamba2":
        group = (num_channels * side.num_ranks - inner * side.num_ranks) // 2 // side.num_ranks
        return inner, group, group
    key = (num_channels - inner) // 2
    return key, key, inner


def read_state(
    src: StateSide, dst: StateSide, rank: int, *, state_type: StateType, src_block: int, dst_block: int
) -> list[Ranges]:
    """What D's rank ``rank`` reads for one recurrent layer: ``_build_mamba_local`` and ``_build_mamba_remote``."""
    if state_type in ("short_conv", "linear"):
        raise RefusedError(f"conv sections of {state_type} are not known")
    if not (src.channel_first and dst.channel_first):
        raise RefusedError("conv state layout SD")
    ratio = parallel_ratio(src.num_ranks, dst.num_ranks)
    tap_bytes = dst.conv_shape[1] * dst.conv_item
    local = [channels * tap_bytes for channels in _sections(dst, state_type)]
    src_page, dst_page = src.base + src_block * src.page_stride, dst.base + dst_block * dst.page_stride
    local_starts = [*(sum(local[:i]) for i in range(len(local))), dst.conv_bytes]
    if ratio >= 1:
        turn = rank % ratio
        starts = [size * turn + ratio * sum(local[:i]) for i, size in enumerate(local)]
        starts.append(src.conv_bytes + turn * dst.temporal_bytes)
        sizes = [*local, dst.temporal_bytes]
        reads = [(rank // ratio, starts, local_starts, sizes)]
    else:
        share = -ratio
        sizes = [*(size // share for size in local), src.temporal_bytes]
        starts = [sum(sizes[:i]) for i in range(len(local))] + [src.conv_bytes]
        reads = []
        for turn in range(share):
            chunks = [size // share for size in (*local, dst.temporal_bytes)]
            if chunks != sizes:
                raise RefusedError(f"descriptors of {chunks} bytes on D, {sizes} on P")
            into = [start + turn * chunk for start, chunk in zip(local_starts, chunks, strict=True)]
            reads.append((rank * share + turn, starts, into, sizes))
    return [
        Ranges(
            src_rank,
            src_page + np.array(starts, np.int64),
            dst_page + np.array(into, np.int64),
            np.array(sizes, np.int64),
        )
        for src_rank, starts, into, sizes in reads
    ]
