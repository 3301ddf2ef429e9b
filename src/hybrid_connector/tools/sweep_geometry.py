"""Does every D rank get every byte, for every family and parallelism? One command: a table, and 0 or 1 as exit status.

1. ``sweep_grid.FAMILIES``: small models of each family, and the storages that are paired, both ways.
2. Each pair of all P ranks and one D rank is planned and bound; ``byte_oracle`` says what arrived and what should have.
3. ``in_tree_model`` says what vLLM's own connector would have copied for the same request, where it accepts the pair.
"""

import argparse
import contextlib
import dataclasses
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.families import Attention, Conv, Recurrent, StatePage, Temporal, TokenPage
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.tools import in_tree_model
from hybrid_connector.tools.byte_oracle import NO_STATE, PLACE_BITS, Arrival, Ints, Ranges, follow, identities, steps
from hybrid_connector.tools.in_tree_model import AttentionSide, NotModelledError, RefusedError, StateSide
from hybrid_connector.tools.sweep_grid import FAMILIES, Family, Model, Row, Storage
from hybrid_connector.transport.binding import Binder

LAYER = "layer"
LEAD_BYTES = 8
"""Bytes before and behind the pages that belong to somebody else."""


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The layouts of all ranks, one block table for all of them, and how they came about; compared by identity."""

    model: Model
    storage: Storage
    ranks: tuple[RankLayout, ...]
    blocks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)


@dataclass(slots=True)
class Tally:
    """A row of the table.

    ``wrong_cells``: per model and TP size of P, the TP sizes of D for which the in-tree connector copies wrong bytes.
    ``mistaken``: bytes by what they should have been and what came instead.
    """

    tried: int = 0
    impossible: int = 0
    wrong_bytes: int = 0
    outside_bytes: int = 0
    accepted: int = 0
    refused: int = 0
    not_modelled: int = 0
    in_tree_wrong: int = 0
    in_tree_wrong_bytes: int = 0
    in_tree_outside_bytes: int = 0
    wrong_cells: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    mistaken: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers, in the order of the fields."""
        return tuple(getattr(self, name) for name in COUNTS)


COUNTS = tuple(spec.name for spec in dataclasses.fields(Tally) if spec.type is int)


def build(model: Model, storage: Storage, num_ranks: int, turn: int) -> Engine:
    """All ranks of an engine; ``turn`` chooses the request's blocks. Raises ``ValueError`` where TP does not fit."""
    paged = isinstance(model.family, Attention)
    block_tokens = storage.page_tokens * storage.pages_per_block
    needed = -(-model.num_tokens // block_tokens) if paged else 1
    num_blocks = needed + 1
    blocks = tuple((turn + 2 * i + (2 * i >= num_blocks and num_blocks % 2 == 0)) % num_blocks for i in range(needed))
    group = Group(num_blocks, storage.pages_per_block, storage.page_tokens) if paged else Group(num_blocks)
    ranks = tuple(_build_rank(model.family, storage, group, rank, num_ranks) for rank in range(num_ranks))
    return Engine(model, storage, ranks, blocks)


def _build_rank(family: Family, storage: Storage, group: Group, rank: int, num_ranks: int) -> RankLayout:
    num_pages = group.num_blocks * group.pages_per_block
    if isinstance(family, Recurrent):
        page = StatePage(storage.channel_first)
        shards = family.shards(LAYER, page, rank=rank, num_ranks=num_ranks)
        page_stride = sum(shard.num_bytes for shard in shards) + storage.padding
        all_bytes = num_pages * page_stride
    else:
        item, tokens, heads = family.element.num_bytes, storage.page_tokens, -(-family.num_kv_heads // num_ranks)
        row = family.content * item
        page_stride = tokens * row * (1 if storage.order == "LHBNC" else heads) + storage.padding
        strides = {
            "LBNHC": (row, heads * row, item),
            "LHBNC": (num_pages * page_stride, row, item),
        }.get(storage.order, (tokens * row, row, item))
        shards = family.shards(LAYER, TokenPage(tokens, strides), rank=rank, num_ranks=num_ranks)
        all_bytes = num_pages * page_stride * (heads if storage.order == "LHBNC" else 1)
    layer = Layer(LAYER, 0, LEAD_BYTES, page_stride, shards)
    return RankLayout(rank, LEAD_BYTES + all_bytes + LEAD_BYTES, (group,), (layer,))


# What should lie where.


@cache
def numbers(engine: Engine) -> dict[str, int]:
    """A number for each tensor, in order of the names: the same for all engines of a model."""
    return {name: i for i, name in enumerate(sorted({s.tensor.name for r in engine.ranks for s in r.layers[0].shards}))}


def num_pages(engine: Engine) -> int:
    """Pages that hold the request's state."""
    tokens = engine.ranks[0].groups[0].page_tokens
    return 1 if tokens is None else -(-engine.model.num_tokens // tokens)


@cache
def source(engine: Engine, all_slots: bool = False) -> dict[int, Ints]:
    """Identities per rank, of the request's pages or (``all_slots``) of all its blocks' pages."""
    return {rank.rank: _identities(engine, rank, all_slots) for rank in engine.ranks}


def _identities(engine: Engine, rank: RankLayout, all_slots: bool) -> Ints:
    count = len(engine.blocks) * rank.groups[0].pages_per_block if all_slots else num_pages(engine)
    return identities(rank, numbers(engine), (engine.blocks,), (count,))


@cache
def token_bytes(engine: Engine) -> int:
    """Places of one token in the tensor's order; 0 for a recurrent state."""
    tensor = engine.ranks[0].layers[0].shards[0].tensor
    return next((step for step, extent in zip(steps(tensor), tensor.shape, strict=True) if extent is None), 0)


@cache
def wanted(engine: Engine, rank: int, num_tokens: int, all_slots: bool = False) -> Ints:
    """Identities of a D rank, but for slots of tokens from ``num_tokens`` on."""
    held = source(engine, all_slots)[rank]
    if per_token := token_bytes(engine):
        place = held & ((1 << PLACE_BITS) - 1)
        return np.where((held != NO_STATE) & (place < num_tokens * per_token), held, NO_STATE)
    return held


def wrong_bytes(arrival: Arrival, want: Ints) -> int:
    """Bytes of ``want`` that did not arrive, or another did, or that were written more than once."""
    return int(np.count_nonzero((want != NO_STATE) & ((arrival.identities != want) | (arrival.writes != 1))))


def outside_bytes(arrival: Arrival, own: Ints) -> int:
    """Bytes written where ``own`` holds no state."""
    return int(np.count_nonzero((own == NO_STATE) & (arrival.writes > 0)))


# The two connectors.


def read_planned(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    """What this package's planner and binder copy."""
    plan = plan_transfer(dst.ranks[rank], src.ranks)
    binder = Binder(plan, dst.ranks[rank], src.ranks)
    return [
        Ranges(bound.src_rank, *(array.astype(np.int64) for array in (bound.src, bound.dst, bound.num_bytes)))
        for bound in binder.bind((src.blocks,), (dst.blocks,), dst.model.num_tokens)
    ]


def read_in_tree(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    """What vLLM's own connector copies; raises ``RefusedError`` or ``NotModelledError``."""
    model = dst.model
    if isinstance(model.family, Recurrent):
        if model.state_type is None:
            raise NotModelledError("vLLM has no such engine")
        return in_tree_model.read_state(
            _state_side(src),
            _state_side(dst),
            rank,
            state_type=model.state_type,
            src_block=src.blocks[0],
            dst_block=dst.blocks[0],
        )
    for engine in (src, dst):
        if engine.storage.padding and engine.storage.order != "BLHNC":
            raise NotModelledError("padded attention pages")
    return in_tree_model.read_attention(
        _attention_side(src),
        _attention_side(dst),
        rank,
        num_kv_heads=model.family.num_kv_heads,
        latent=model.latent,
        src_blocks=src.blocks,
        dst_blocks=dst.blocks,
    )


@cache
def _attention_side(engine: Engine) -> AttentionSide:
    rank, storage = engine.ranks[0], engine.storage
    layer, group = rank.layers[0], rank.groups[0]
    (shard,) = layer.shards
    heads_apart = storage.order == "LHBNC"
    heads = shard.box.shape[0] if heads_apart else 1
    return AttentionSide(
        engine.num_ranks,
        storage.order,
        tuple(layer.offset + head * shard.strides[0] for head in range(heads)),
        shard.num_bytes // heads,
        layer.page_stride,
        storage.page_tokens,
        group.pages_per_block,
    )


@cache
def _state_side(engine: Engine) -> StateSide:
    family, layer = engine.model.family, engine.ranks[0].layers[0]
    assert isinstance(family, Recurrent)
    shapes = family.shapes(StatePage(engine.storage.channel_first), rank=0, num_ranks=engine.num_ranks)
    conv = [(s, p) for s, p in zip(shapes, family.parts, strict=True) if isinstance(p, Conv)]
    temporal = [(s, p) for s, p in zip(shapes, family.parts, strict=True) if isinstance(p, Temporal)]
    (conv_rows, conv_columns), conv_item = (conv[0][0], conv[0][1].element.num_bytes) if conv else ((1, 1), 1)
    temporal_shape, temporal_item = (temporal[0][0], temporal[0][1].element.num_bytes) if temporal else ((1,), 1)
    return StateSide(
        engine.num_ranks,
        engine.storage.channel_first,
        layer.offset,
        layer.page_stride,
        (conv_rows, conv_columns),
        conv_item,
        temporal_shape,
        temporal_item,
    )


Reader = Callable[[Engine, Engine, int], list[Ranges]]
"""What is copied from all ranks of P to one rank of D."""


def compare(src: Engine, dst: Engine, rank: int, tally: Tally, read: Reader = read_planned) -> None:
    """Try one pair: all ranks of P, one rank of D."""
    region_bytes = dst.ranks[rank].region_bytes
    covered = num_pages(src) * (src.storage.page_tokens if token_bytes(src) else 1)
    want = wanted(dst, rank, covered)
    arrival = follow(read(src, dst, rank), source(src), region_bytes)
    tally.tried += 1
    tally.wrong_bytes += wrong_bytes(arrival, want)
    tally.outside_bytes += outside_bytes(arrival, want)
    try:
        ranges = read_in_tree(src, dst, rank)
    except RefusedError:
        tally.refused += 1
        return
    except NotModelledError:
        tally.not_modelled += 1
        return
    tally.accepted += 1
    arrival = follow(ranges, source(src, all_slots=True), region_bytes)
    valid = wanted(dst, rank, dst.model.num_tokens)
    wrong = wrong_bytes(arrival, valid)
    if wrong:
        tally.in_tree_wrong += 1
        tally.in_tree_wrong_bytes += wrong
        _remember(src, dst, arrival, valid, tally)
    tally.in_tree_outside_bytes += outside_bytes(arrival, source(dst, all_slots=True)[rank])


def _remember(src: Engine, dst: Engine, arrival: Arrival, valid: Ints, tally: Tally) -> None:
    """Note the cell, and which tensors were mistaken for which."""
    order = f", {dst.storage.order}" if isinstance(dst.model.family, Attention) else ""
    tally.wrong_cells[dst.model.name + order, src.num_ranks].add(dst.num_ranks)
    names = dict(enumerate(name.removeprefix(f"{LAYER}.") for name in numbers(dst)))
    wrong = (valid != NO_STATE) & (arrival.identities != valid)
    pairs = Counter(zip(valid[wrong] >> PLACE_BITS, arrival.identities[wrong] >> PLACE_BITS, strict=True))
    for (want, got), count in pairs.items():
        tally.mistaken[names[int(want)], names.get(int(got), "no state")] += count


# All of them.


def sweep(row: Row, read: Reader = read_planned) -> Tally:
    """Every TP size of each model on both sides, for each of its pairs of storages."""
    tally = Tally()
    for model, pairs in row:
        for src_storage, dst_storage in pairs:
            srcs, dsts = _engines(model, src_storage, 0), _engines(model, dst_storage, 1)
            tally.impossible += len(model.sizes) * sum(model.sizes) - len(srcs) * sum(dst.num_ranks for dst in dsts)
            for src, dst in itertools.product(srcs, dsts):
                for rank in range(dst.num_ranks):
                    compare(src, dst, rank, tally, read)
        for remembered in (_engines, numbers, source, token_bytes, wanted, _attention_side, _state_side):
            remembered.cache_clear()
    return tally


@cache
def _engines(model: Model, storage: Storage, turn: int) -> tuple[Engine, ...]:
    """An engine per TP size; sizes that the family cannot be shared out to are left out."""
    found = []
    for num_ranks in model.sizes:
        with contextlib.suppress(ValueError):
            found.append(build(model, storage, num_ranks, turn))
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan and copy every family at every parallelism; count wrong bytes.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all")
    chosen = parser.parse_args(argv).families or list(FAMILIES)
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"unknown families {', '.join(sorted(unknown))}; expected some of {', '.join(FAMILIES)}")
    start = time.perf_counter()
    tallies = {name: sweep(FAMILIES[name]) for name in chosen}
    report(tallies, Console(width=140 if not sys.stdout.isatty() else None), time.perf_counter() - start)
    return exit_status(tallies.values())


def exit_status(tallies: Iterable[Tally]) -> int:
    """1 where this package copied a wrong byte or wrote one too many."""
    return int(any(tally.wrong_bytes or tally.outside_bytes for tally in tallies))


def report(tallies: Mapping[str, Tally], console: Console, elapsed_s: float) -> None:
    """The table, and the cells in which vLLM's own connector would have copied wrong bytes."""
    table = Table(title="Pairs of all P ranks and one D rank; in-tree: vLLM 0.32's NixlConnector, modelled")
    table.add_column("family", no_wrap=True)
    for heading in ("tried", "no such TP", "wrong B", "outside B"):
        table.add_column(heading, justify="right")
    for heading in ("accepts", "refuses", "not modelled", "wrong pairs", "wrong B", "outside B"):
        table.add_column(f"in-tree\n{heading}", justify="right")
    for name, tally in tallies.items():
        table.add_row(name, *map("{:,}".format, tally.counts))
    table.add_section()
    table.add_row("all", *(f"{sum(column):,}" for column in zip(*(t.counts for t in tallies.values()), strict=True)))
    console.print(table)
    for name, tally in tallies.items():
        if tally.in_tree_wrong:
            console.print(f"In-tree, wrong bytes in {name}:", highlight=False)
            for line in _cell_lines(tally):
                console.print(f"  {line}", highlight=False)
    tried = sum(tally.tried for tally in tallies.values())
    console.print(f"{tried:,} pairs in {elapsed_s:.0f} s", highlight=False)


def _cell_lines(tally: Tally) -> Iterator[str]:
    """The wrong cells, a line per model: ``n_groups 1: TP 1 -> 2, 4; 2 -> 1, 4``."""
    for model, cells in itertools.groupby(sorted(tally.wrong_cells.items()), lambda item: item[0][0]):
        sizes = "; ".join(f"{src} -> {', '.join(map(str, sorted(dsts)))}" for (_, src), dsts in cells)
        yield f"{model}: TP {sizes}"
    mistaken = (f"{want} from {got} ({count:,} B)" for (want, got), count in tally.mistaken.most_common())
    yield "what came: " + ", ".join(mistaken)


if __name__ == "__main__":
    sys.exit(main())
