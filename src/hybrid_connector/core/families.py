"""Which boxes does a tensor-parallel rank of a model family hold?

A family is a function from the model's global numbers to (tensor, box) pairs. Where the bytes lie is not its concern.
"""

from dataclasses import dataclass

from hybrid_connector.core.geometry import Box, CacheTensor, Interval, Shard, StateKind, dense_shard


@dataclass(frozen=True, slots=True)
class ElementType:
    """Name and size of an element: ``ElementType("bfloat16", 2)``."""

    name: str
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes <= 0:
            raise ValueError(f"{self.name}: expected num_bytes > 0, got {self.num_bytes}")


def split(extent: int, rank: int, num_ranks: int, what: str) -> Interval:
    """Rank's part of ``extent`` units: an even share, or one unit held by several consecutive ranks.

    Raises ``ValueError`` where neither number divides the other.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}")
    if extent % num_ranks == 0:
        share = extent // num_ranks
        return Interval(rank * share, (rank + 1) * share)
    if num_ranks % extent == 0:
        unit = rank // (num_ranks // extent)
        return Interval(unit, unit + 1)
    raise ValueError(f"{extent} {what} cannot be split over {num_ranks} ranks, nor the ranks over them")


def attention(
    layer: str,
    *,
    num_kv_heads: int,
    content_bytes: int,
    element: ElementType,
    page_tokens: int,
    rank: int,
    num_ranks: int,
) -> tuple[CacheTensor, Box]:
    """Paged attention K/V of one layer: axes H (``num_kv_heads`` of the model), N (tokens), C (K and V of one token).

    GQA with fewer heads than ranks needs nothing more: equal boxes are replicas.
    """
    if content_bytes % element.num_bytes:
        raise ValueError(f"{layer}: {content_bytes} bytes per token and head are no multiple of {element}")
    content = content_bytes // element.num_bytes
    tensor = CacheTensor(
        f"{layer}.kv",
        StateKind.ATTENTION,
        ("H", "N", "C"),
        (num_kv_heads, None, content),
        element.name,
        element.num_bytes,
    )
    heads = split(num_kv_heads, rank, num_ranks, "KV heads")
    return tensor, Box((heads, Interval(0, page_tokens), Interval(0, content)))


@dataclass(frozen=True, slots=True)
class ConvSection:
    """One independently sharded part of a short convolution's channels, in units of ``unit`` channels (a head)."""

    name: str
    num_units: int
    unit: int

    def channels(self, rank: int, num_ranks: int) -> Interval:
        units = split(self.num_units, rank, num_ranks, f"units of conv section {self.name}")
        return Interval(units.start * self.unit, units.stop * self.unit)


def conv_state(
    layer: str,
    sections: tuple[ConvSection, ...],
    *,
    num_taps: int,
    element: ElementType,
    offset: int,
    channel_first: bool,
    rank: int,
    num_ranks: int,
) -> tuple[Shard, ...]:
    """The conv state of one layer, a shard per section; the sections lie one after the other along the channels.

    ``channel_first``: memory is (channels, taps) (vLLM's DS), else (taps, channels) (SD).
    ``offset``: bytes into the page.
    """
    held = [section.channels(rank, num_ranks) for section in sections]
    row = element.num_bytes if not channel_first else element.num_bytes * num_taps
    num_channels = sum(map(len, held))
    strides = (row, element.num_bytes) if channel_first else (row, element.num_bytes * num_channels)
    shards = []
    for section, channels in zip(sections, held, strict=True):
        tensor = CacheTensor(
            f"{layer}.conv.{section.name}",
            StateKind.CONV,
            ("channel", "tap"),
            (section.num_units * section.unit, num_taps),
            element.name,
            element.num_bytes,
        )
        shards.append(Shard(tensor, Box((channels, Interval(0, num_taps))), offset, strides))
        offset += len(channels) * row
    return tuple(shards)


def gated_delta_net(
    layer: str,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    num_taps: int,
    conv_element: ElementType,
    temporal_element: ElementType,
    channel_first: bool,
    rank: int,
    num_ranks: int,
) -> tuple[Shard, ...]:
    """Gated delta net: conv sections q, k, v, then the temporal state (value heads, value_dim, key_dim)."""
    sections = (
        ConvSection("q", num_key_heads, key_dim),
        ConvSection("k", num_key_heads, key_dim),
        ConvSection("v", num_value_heads, value_dim),
    )
    conv = conv_state(
        layer,
        sections,
        num_taps=num_taps,
        element=conv_element,
        offset=0,
        channel_first=channel_first,
        rank=rank,
        num_ranks=num_ranks,
    )
    temporal = CacheTensor(
        f"{layer}.temporal",
        StateKind.TEMPORAL,
        ("head", "value", "key"),
        (num_value_heads, value_dim, key_dim),
        temporal_element.name,
        temporal_element.num_bytes,
    )
    heads = split(num_value_heads, rank, num_ranks, "value heads")
    box = Box((heads, Interval(0, value_dim), Interval(0, key_dim)))
    return (*conv, dense_shard(temporal, box, offset=sum(shard.num_bytes for shard in conv)))
