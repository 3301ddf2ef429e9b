"""Is every cell of docs/support.md true? "yes" to the byte, a refusal to the letter."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.families import ElementType
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.wire.manifest import Factors, refuse_difference

from layouts import BF16, Model, Storage, build_engine, edited, place
from oracle import differences, execute, expected, prefilled
from refusals import refused

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
NUM_TOKENS = (1, 4, 7, 12, 24)
Layouts = tuple[RankLayout, ...]


@cache
def section(title: str) -> str:
    return next(part for part in PAGE.read_text().split("\n## ") if part.startswith(title))


def rows(title: str) -> list[list[str]]:
    """The cells of the table under ``title``, its head first."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [table[0], *table[2:]]


def note(cell: str) -> str:
    """The text that ``refused (2)`` points to."""
    number = re.fullmatch(r"refused \((\d)\)", cell)
    assert number is not None, cell
    text = re.search(rf"^{number[1]}\. `([^`]*)`", section("Families"), re.MULTILINE)
    assert text is not None, cell
    return text[1]


@dataclass(frozen=True, slots=True)
class Row:
    """A family: a small model of it, and the element type of its K/V."""

    model: Model
    element: ElementType = BF16

    def engine(self, storage: Storage, cpu: bool = False) -> Layouts:
        name = f"{self.element.name} in CPU pages of {storage.page_tokens} tokens" if cpu else self.element.name
        layouts = build_engine(self.model, storage)
        for layer in range(self.model.num_attention):
            changes = {"dtype": name, "item_bytes": self.element.num_bytes}
            layouts = tuple(edited(layout, f"layers.{layer}.attn.kv", **changes) for layout in layouts)
        return layouts


def attention(kv_heads: int, content: int) -> Model:
    return Model(2, num_kv_heads=kv_heads, content=content)


def hybrid(family: str, groups: int = 4, heads: int = 4) -> Model:
    return Model(2, 2, 4, num_recurrent=2, family=family, num_heads=heads, num_groups=groups)  # type: ignore[arg-type]


FAMILIES = {
    "attention, GQA or MHA": Row(attention(4, 4)),
    "attention, MQA": Row(attention(1, 4)),
    "attention, fp8 K/V": Row(attention(4, 4), ElementType("float8_e4m3fn", 1)),
    "MLA": Row(attention(1, 5)),
    "sliding window": Row(attention(2, 4)),
    "gated delta net": Row(hybrid("gdn")),
    "KDA": Row(hybrid("kda")),
    "Mamba1": Row(hybrid("mamba1")),
    "Mamba2, groups divisible by TP": Row(hybrid("mamba2")),
    "Mamba2, one group": Row(hybrid("mamba2", groups=1)),
    "Mamba2, groups neither divisible nor one": Row(hybrid("mamba2", groups=3, heads=12)),
    "short convolution": Row(hybrid("short_conv")),
    "linear attention": Row(hybrid("linear")),
}


@dataclass(frozen=True, slots=True)
class Change:
    """How P and D store, and what D holds already."""

    p: Storage
    d: Storage
    cached_tokens: int = 0
    cpu: bool = False


HERE = Storage(page_tokens=4, max_tokens=24)
UP = ((1, 2), (2, 4), (1, 4))


def but(**changes: object) -> Storage:
    return dataclasses.replace(HERE, **changes)  # type: ignore[arg-type]


CHANGES = {
    "TP up": [Change(but(num_ranks=few), but(num_ranks=many)) for few, many in UP],
    "TP down": [Change(but(num_ranks=many), but(num_ranks=few)) for few, many in UP],
    "SD": [
        Change(but(channel_first=p), but(channel_first=d))
        for p, d in itertools.product((False, True), repeat=2)
        if not (p and d)
    ],
    "PP": [Change(but(num_stages=p), but(num_stages=d)) for p, d in ((2, 1), (1, 2), (2, 2))],
    "other page length": [
        Change(HERE, but(page_tokens=6)),
        Change(but(page_tokens=6, placement="shared"), but(placement="shared", order="NHD")),
        Change(but(pages_per_block=3), but(page_tokens=8)),
    ],
    "other page length, CPU": [Change(HERE, but(page_tokens=6), cpu=True)],
    "prefix caching": [
        Change(HERE, HERE, cached_tokens=4),
        Change(HERE, but(page_tokens=6), cached_tokens=6),
        Change(but(pages_per_block=2), HERE, cached_tokens=12),
    ],
}


def assert_exact(srcs: Layouts, dsts: Layouts, cached_tokens: int) -> None:
    """D's memory after the transfer is what it must be, for requests of several lengths."""
    plans = plan_engine(dsts, srcs)
    for num_tokens in NUM_TOKENS:
        request = place(srcs, dsts, num_tokens, cached_tokens if cached_tokens < num_tokens else 0)
        regions = [prefilled(src, request) for src in srcs]
        for plan, dst in zip(plans, dsts, strict=True):
            assert differences(execute(plan, dst, srcs, request, regions), expected(dst, srcs, request)) == []


def cells() -> Iterator[tuple[str, str, str]]:
    (_, *changes), *families = rows("Families")
    for family, *values in families:
        for change, value in zip(changes, values, strict=True):
            yield family, change, value


@pytest.mark.parametrize(("family", "change", "cell"), list(cells()))
def test_a_cell_of_the_families(family: str, change: str, cell: str) -> None:
    row = FAMILIES[family]
    for case in CHANGES[change]:
        if cell in ("yes", "none"):
            srcs, dsts = row.engine(case.p, case.cpu), row.engine(case.d, case.cpu)
            assert_exact(srcs, dsts, case.cached_tokens)
            has_conv = any(".conv." in shard.tensor.name for layer in srcs[0].layers for shard in layer.shards)
            assert change != "SD" or has_conv == (cell == "yes")
            continue
        text = note(cell)
        num_ranks = max(case.p.num_ranks, case.d.num_ranks)
        if "cannot be split" in text:
            # Not at the handshake: the engine with the ranks has no such layout.
            with refused(text.replace("over 2 ranks", f"over {num_ranks} ranks")):
                row.engine(but(num_ranks=num_ranks))
        else:
            with refused(text, IncompatibleError):
                plan_engine(row.engine(case.d, case.cpu), row.engine(case.p, case.cpu))


def test_the_table_has_every_family_and_every_change() -> None:
    assert {family for family, _, _ in cells()} == set(FAMILIES)
    assert {change for _, change, _ in cells()} == set(CHANGES)
    assert {cell for _, _, cell in cells()} == {"yes", "none", "refused (1)", "refused (2)", "refused (3)"}


GDN = hybrid("gdn", groups=2)


def model(**changes: object) -> Layouts:
    return build_engine(dataclasses.replace(GDN, **{"num_kv_heads": 4, **changes}), HERE)  # type: ignore[arg-type]


def other(tensor: str, dtype: str, item_bytes: int) -> Layouts:
    return tuple(edited(layout, tensor, dtype=dtype, item_bytes=item_bytes) for layout in model())


GEOMETRY: dict[str, Callable[[], tuple[Layouts, Layouts]]] = {
    "KV heads": lambda: (model(num_kv_heads=8), model()),
    "element type of K/V": lambda: (other("layers.0.attn.kv", "float8_e4m3fn", 1), model()),
    "element type of the temporal state": lambda: (other("layers.0.gdn.temporal", "bfloat16", 2), model()),
    "taps (speculative decoding)": lambda: (model(num_taps=5), model()),
    "a layer missing on P": lambda: (model(num_attention=1), model()),
    "a layer missing on D": lambda: (model(), model(num_attention=1)),
    "page lengths that repeat too late": lambda: (
        build_engine(dataclasses.replace(GDN, num_kv_heads=4), but(page_tokens=1025)),
        model(),
    ),
}
"""Layouts of P and D that differ as the table says."""


@pytest.mark.parametrize(("difference", "text"), rows("What P and D must")[1:])
def test_a_difference_is_refused_as_the_table_says(difference: str, text: str) -> None:
    text = text.strip("`")
    if difference in GEOMETRY:
        p, d = GEOMETRY[difference]()
        with refused(text, IncompatibleError):
            plan_engine(d, p)
        return
    said = re.fullmatch(rf"{re.escape(difference)}: (.*) on P, (.*) on D", text)
    assert said is not None
    with refused(text, IncompatibleError):
        refuse_difference(ours=Factors.of({difference: said[2]}), theirs=Factors.of({difference: said[1]}))


def test_the_readme_points_here_and_says_no_more() -> None:
    readme = (PAGE.parent.parent / "README.md").read_text()
    assert "docs/support.md" in readme
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if "|" in line]
    columns = ["TP up", "TP down", "SD", "PP", "other page length", "prefix caching"]
    (start,) = [number for number, row in enumerate(table) if row[1:] == columns]
    named = list(itertools.takewhile(lambda row: len(row) == len(columns) + 1, table[start + 2 :]))
    assert named
    full = {(family, change): cell for family, change, cell in cells()}
    covered = set()
    for families, *values in named:
        for family in families.split("; "):
            covered.add(family)
            assert values == [full[family, column].split(" (")[0] for column in columns], family
    assert covered == set(FAMILIES) - {"Mamba2, groups neither divisible nor one"}
