"""Which boxes does a tensor-parallel rank of a model family hold?

1. ``split`` shares out units (heads, groups, channels) over ranks, or gives one unit to several ranks.
2. ``Attention`` and ``Recurrent`` describe one layer's state as plain numbers of the whole model.
3. Their ``shards`` place a rank's part in a page, which ``TokenPage`` and ``StatePage`` describe.
4. A family is a function from its own vocabulary to such a description; a new one needs nothing else.

Speculative decoding only adds taps. A sliding window only chooses pages. An 8-bit cache is another element type.
"""

from collections.abc import Iterator
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


# Paged state: one entry per token.


@dataclass(frozen=True, slots=True)
class TokenPage:
    """How a page of tokens lies in memory: ``offset`` into the page, then bytes from head to head, token to token,
    and element to element.
    """

    page_tokens: int
    strides: tuple[int, int, int]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention K/V of one layer: axes H (``num_kv_heads`` of the model), N (tokens), C (K and V of one token).

    GQA and MQA with fewer heads than ranks need nothing more: equal boxes are replicas.
    """

    num_kv_heads: int
    content: int
    element: ElementType

    def shards(self, layer: str, page: TokenPage, *, rank: int, num_ranks: int) -> tuple[Shard, ...]:
        """What rank ``rank`` of ``num_ranks`` holds. Raises ``ValueError`` where the heads cannot be shared out."""
        tensor = CacheTensor(
            f"{layer}.kv",
            StateKind.ATTENTION,
            ("H", "N", "C"),
            (self.num_kv_heads, None, self.content),
            self.element.name,
            self.element.num_bytes,
        )
        heads = split(self.num_kv_heads, rank, num_ranks, "KV heads")
        box = Box((heads, Interval(0, page.page_tokens), Interval(0, self.content)))
        return (Shard(tensor, box, page.offset, page.strides),)


def latent_attention(*, latent: int, element: ElementType) -> Attention:
    """MLA: one vector of ``latent`` elements (compressed K/V and rotary part) per token, the same on every rank."""
    return Attention(1, latent, element)


# Recurrent state: one page per request.


@dataclass(frozen=True, slots=True)
class StatePage:
    """How a recurrent page lies in memory: its parts follow each other from ``offset`` on, without gaps.

    ``channel_first``: conv states are (channels, taps) (vLLM's DS), else (taps, channels) (SD).
    """

    channel_first: bool
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ConvSection:
    """One independently sharded part of a short convolution: ``num_units`` heads or groups of ``unit`` channels."""

    name: str
    num_units: int
    unit: int

    def channels(self, rank: int, num_ranks: int) -> Interval:
        units = split(self.num_units, rank, num_ranks, f"units of conv section {self.name}")
        return Interval(units.start * self.unit, units.stop * self.unit)


@dataclass(frozen=True, slots=True)
class Conv:
    """The last ``num_taps`` inputs of a short convolution; its sections lie side by side along the channels."""

    sections: tuple[ConvSection, ...]
    num_taps: int
    element: ElementType

    def shape(self, page: StatePage, rank: int, num_ranks: int) -> tuple[int, ...]:
        num_channels = sum(len(section.channels(rank, num_ranks)) for section in self.sections)
        return (num_channels, self.num_taps) if page.channel_first else (self.num_taps, num_channels)

    def shards(self, layer: str, page: StatePage, rank: int, num_ranks: int) -> Iterator[Shard]:
        """One shard per section, as each is shared out on its own."""
        item = self.element.num_bytes
        _, inner = self.shape(page, rank, num_ranks)
        channel_stride, tap_stride = (item * inner, item) if page.channel_first else (item, item * inner)
        offset = page.offset
        for section in self.sections:
            channels = section.channels(rank, num_ranks)
            tensor = CacheTensor(
                f"{layer}.conv.{section.name}",
                StateKind.CONV,
                ("channel", "tap"),
                (section.num_units * section.unit, self.num_taps),
                self.element.name,
                item,
            )
            box = Box((channels, Interval(0, self.num_taps)))
            yield Shard(tensor, box, offset, (channel_stride, tap_stride))
            offset += len(channels) * channel_stride


@dataclass(frozen=True, slots=True)
class Temporal:
    """A dense state whose first axis (heads, channels) is shared out over the ranks.

    ``extents`` are the whole model's; ``name`` tells several states of one layer apart.
    """

    axes: tuple[str, ...]
    extents: tuple[int, ...]
    element: ElementType
    name: str = "temporal"

    def shape(self, page: StatePage, rank: int, num_ranks: int) -> tuple[int, ...]:
        return (len(split(self.extents[0], rank, num_ranks, f"{self.name} {self.axes[0]}s")), *self.extents[1:])

    def shards(self, layer: str, page: StatePage, rank: int, num_ranks: int) -> Iterator[Shard]:
        tensor = CacheTensor(
            f"{layer}.{self.name}",
            StateKind.TEMPORAL,
            self.axes,
            self.extents,
            self.element.name,
            self.element.num_bytes,
        )
        held = split(self.extents[0], rank, num_ranks, f"{self.name} {self.axes[0]}s")
        yield dense_shard(tensor, Box((held, *(Interval(0, extent) for extent in self.extents[1:]))), page.offset)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The state of one recurrent layer: its parts in the order in which they lie in a page."""

    parts: tuple[Conv | Temporal, ...]

    def shapes(self, page: StatePage, *, rank: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each part on a rank: what vLLM calls ``MambaSpec.shapes``."""
        return tuple(part.shape(page, rank, num_ranks) for part in self.parts)

    def shards(self, layer: str, page: StatePage, *, rank: int, num_ranks: int) -> tuple[Shard, ...]:
        """What rank ``rank`` of ``num_ranks`` holds. Raises ``ValueError`` where a part cannot be shared out."""
        held: list[Shard] = []
        for part in self.parts:
            offset = page.offset + sum(shard.num_bytes for shard in held)
            held.extend(part.shards(layer, StatePage(page.channel_first, offset), rank, num_ranks))
        return tuple(held)


def mamba1(
    *, num_channels: int, state_dim: int, num_taps: int, conv_element: ElementType, temporal_element: ElementType
) -> Recurrent:
    """Conv section x, then the temporal state (channels, state)."""
    return Recurrent(
        (
            Conv((ConvSection("x", num_channels, 1),), num_taps, conv_element),
            Temporal(("channel", "state"), (num_channels, state_dim), temporal_element),
        )
    )


def mamba2(
    *,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_dim: int,
    num_taps: int,
    conv_element: ElementType,
    temporal_element: ElementType,
) -> Recurrent:
    """Conv sections x (heads), B and C (groups), then the temporal state (heads, head_dim, state).

    A group serves consecutive heads, so with fewer groups than ranks each rank holds the one that its heads need.
    """
    groups = (num_groups, state_dim)
    sections = ConvSection("x", num_heads, head_dim), ConvSection("B", *groups), ConvSection("C", *groups)
    return Recurrent(
        (
            Conv(sections, num_taps, conv_element),
            Temporal(("head", "dim", "state"), (num_heads, head_dim, state_dim), temporal_element),
        )
    )


def delta_net(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    num_taps: int,
    conv_element: ElementType,
    temporal_element: ElementType,
) -> Recurrent:
    """Gated delta net: conv sections q, k, v, then the temporal state (value heads, value_dim, key_dim)."""
    keys = (num_key_heads, key_dim)
    sections = ConvSection("q", *keys), ConvSection("k", *keys), ConvSection("v", num_value_heads, value_dim)
    return Recurrent(
        (
            Conv(sections, num_taps, conv_element),
            Temporal(("head", "value", "key"), (num_value_heads, value_dim, key_dim), temporal_element),
        )
    )


def kda(
    *, num_heads: int, head_dim: int, num_taps: int, conv_element: ElementType, temporal_element: ElementType
) -> Recurrent:
    """KDA: the same tensors as a gated delta net, with as many key heads as value heads and one dimension."""
    return delta_net(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        num_taps=num_taps,
        conv_element=conv_element,
        temporal_element=temporal_element,
    )


def short_convolution(*, num_channels: int, num_taps: int, element: ElementType) -> Recurrent:
    """A gated short convolution alone: conv section x, no temporal state."""
    return Recurrent((Conv((ConvSection("x", num_channels, 1),), num_taps, element),))


def linear_attention(*, num_heads: int, head_dim: int, element: ElementType) -> Recurrent:
    """Linear attention without a convolution: the temporal state (heads, head_dim, head_dim)."""
    return Recurrent((Temporal(("head", "value", "key"), (num_heads, head_dim, head_dim), element),))
