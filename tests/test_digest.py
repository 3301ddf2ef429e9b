"""Is a changed, lost, moved or repeated byte found, wherever it is, and nothing else? (case 20)"""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_connector.core.digests import MAX_RUNS, RunList
from hybrid_connector.transport.base import Region, host_region
from hybrid_connector.transport.binding import BoundCopies
from hybrid_connector.transport.digest import (
    ROW_WORDS,
    HostDigester,
    Rows,
    Runs,
    column_weights,
    host_digest,
    run_lists,
)

from refusals import refused

REGION_BYTES = 1 << 20


def packed(values: Sequence[int]) -> bytes:
    return np.array(values, "<u8").tobytes()


def runs_of(runs: Sequence[tuple[int, int]], word_bytes: int = 4) -> RunList:
    """``runs``: offset and length of each."""
    return RunList(word_bytes, packed([run[0] for run in runs]), packed([run[1] for run in runs]))


def noise(num_bytes: int = REGION_BYTES, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def some_runs(seed: int, word_bytes: int, num_runs: int = 40) -> RunList:
    """Short and long runs, in no order, that do not overlap."""
    dice = random.Random(seed)
    slot = REGION_BYTES // num_runs // word_bytes * word_bytes
    runs = []
    for i in dice.sample(range(num_runs), num_runs):
        length = dice.choice([word_bytes, 3 * word_bytes, slot // 2 // word_bytes * word_bytes, slot])
        runs.append((i * slot + dice.randrange(0, slot - length + 1, word_bytes), length))
    return runs_of(runs, word_bytes)


def covered(runs: RunList) -> np.ndarray:
    """Every byte of the runs."""
    offsets, lengths = (np.frombuffer(data, "<u8").astype(int) for data in (runs.offsets, runs.num_bytes))
    return np.concatenate([np.arange(start, start + size) for start, size in zip(offsets, lengths, strict=True)])


def digest_in_plain_python(memory: np.ndarray, runs: RunList) -> int:
    """What the module's docstring says, word by word."""
    rows, columns = Rows.of(Runs.of(runs)), column_weights().tolist()
    total = 0
    for start, num_words, weight in zip(
        rows.starts.tolist(), rows.num_words.tolist(), rows.weights.tolist(), strict=True
    ):
        for column in range(num_words):
            first = (start + column) * runs.word_bytes
            word = int.from_bytes(memory[first : first + runs.word_bytes].tobytes(), "little", signed=True)
            total += word * columns[column] * weight
    return total % 2**64


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_the_digest_is_what_the_docstring_says(word_bytes: int) -> None:
    runs = some_runs(word_bytes, word_bytes, num_runs=7)
    assert host_digest(noise(), runs) == digest_in_plain_python(noise(), runs)


def test_rows_cover_every_word_once_in_order() -> None:
    lengths = [1, ROW_WORDS - 1, ROW_WORDS, ROW_WORDS + 1, 3 * ROW_WORDS + 5]
    offsets = [10 * ROW_WORDS * i for i in range(5)]
    runs = runs_of([(4 * offset, 4 * length) for offset, length in zip(offsets, lengths, strict=True)])
    rows = Rows.of(Runs.of(runs))
    assert rows.num_words.max() == ROW_WORDS
    words = np.concatenate([np.arange(s, s + n) for s, n in zip(rows.starts, rows.num_words, strict=True)])
    assert (words == np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, lengths, strict=True)])).all()


def test_all_weights_are_odd_and_differ() -> None:
    rows = Rows.of(Runs.of(runs_of([(0, 4 * ROW_WORDS * 1000)]))).weights
    assert (rows % 2 == 1).all()
    assert (column_weights() % 2 == 1).all()
    assert len(np.unique(np.concatenate((rows, column_weights())))) == 1000 + ROW_WORDS


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_a_flipped_byte_is_found_in_1000_of_1000_tries(word_bytes: int) -> None:
    dice = random.Random(word_bytes)
    runs = some_runs(3, word_bytes, num_runs=200 if word_bytes == 4 else 1000)
    runs = RunList(word_bytes, runs.offsets[: 8 * 20], runs.num_bytes[: 8 * 20])
    memory, places = noise(), covered(runs)
    right = host_digest(memory, runs)
    found = 0
    for _ in range(1000):
        place = dice.choice(places)
        before = memory[place]
        memory[place] = dice.choice([value for value in range(256) if value != before])
        found += host_digest(memory, runs) != right
        memory[place] = before
    assert found == 1000
    assert host_digest(memory, runs) == right


@pytest.mark.parametrize("bit", range(8))
def test_two_flips_of_the_same_bit_are_found(bit: int) -> None:
    """Words as long as the sum would lose two flips of their highest bit, always."""
    dice = np.random.default_rng(bit)
    runs = runs_of([(0, 4 * ROW_WORDS), (8 * ROW_WORDS, 4 * ROW_WORDS)])
    memory, places = noise(), covered(runs)
    right = host_digest(memory, runs)
    for _ in range(200):
        chosen = dice.choice(places[3::4], 2, replace=False)  # the highest bytes of two words
        memory[chosen] ^= 1 << bit
        assert host_digest(memory, runs) != right
        memory[chosen] ^= 1 << bit


def test_bytes_that_are_not_of_the_request_do_not_count() -> None:
    runs = some_runs(4, 4)
    memory = noise()
    right = host_digest(memory, runs)
    others = np.ones(REGION_BYTES, bool)
    others[covered(runs)] = False
    memory[others] ^= 0xFF
    assert others.any()
    assert host_digest(memory, runs) == right


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_the_digest_does_not_depend_on_where_the_bytes_lie(word_bytes: int) -> None:
    runs = some_runs(5, word_bytes)
    lengths = np.frombuffer(runs.num_bytes, "<u8").astype(int)
    elsewhere = np.cumsum(lengths) - lengths + 52
    memory, other = noise(seed=1), noise(seed=2)
    for start, to, size in zip(np.frombuffer(runs.offsets, "<u8").astype(int), elsewhere, lengths, strict=True):
        other[to : to + size] = memory[start : start + size]
    assert host_digest(memory, runs) == host_digest(other, RunList(word_bytes, packed(elsewhere), runs.num_bytes))


@pytest.mark.parametrize("swap", ["pages", "words of a row", "rows"])
def test_bytes_in_the_wrong_order_are_found(swap: str) -> None:
    size = 16 * ROW_WORDS
    memory = noise()
    runs = runs_of([(0, size), (size, size)])
    right = host_digest(memory, runs)
    first, second, length = {"pages": (0, size, size), "words of a row": (8, 96, 4), "rows": (0, size // 4, size // 4)}[
        swap
    ]
    memory[first : first + length], memory[second : second + length] = (
        memory[second : second + length].copy(),
        memory[first : first + length].copy(),
    )
    assert host_digest(memory, runs) != right


def test_a_page_that_stayed_as_it_was_is_found() -> None:
    memory = noise()
    runs = runs_of([(0, 4096), (8192, 4096)])
    right = host_digest(memory, runs)
    for stale in (0, 0xFF):
        changed = memory.copy()
        changed[8192:12288] = stale
        assert host_digest(changed, runs) != right


def copies_of(src: Sequence[int], dst: Sequence[int], num_bytes: Sequence[int]) -> BoundCopies:
    return BoundCopies(3, *(np.array(values, np.uint64) for values in (src, dst, num_bytes)))


@pytest.mark.parametrize(
    ("src", "dst", "num_bytes", "word_bytes"),
    [
        ([0, 64], [128, 256], [16, 32], 4),
        ([2, 64], [128, 256], [16, 32], 2),
        ([0, 64], [128, 257], [16, 32], 1),
        ([0, 64], [128, 256], [16, 34], 2),
        ([0, 64], [128, 256], [15, 32], 1),
    ],
)
def test_words_are_as_long_as_both_sides_allow(
    src: list[int], dst: list[int], num_bytes: list[int], word_bytes: int
) -> None:
    """Addresses count, not offsets: the memory itself may begin anywhere."""
    local, remote = Region(64, 1 << 20), Region(4096, 1 << 20)
    copies = copies_of([4096 + x for x in src], [64 + x for x in dst], num_bytes)
    (pair,) = run_lists(copies, local, remote)
    assert pair.src_rank == 3
    assert pair.src == RunList(word_bytes, packed(src), packed(num_bytes))
    assert pair.dst == RunList(word_bytes, packed(dst), packed(num_bytes))
    odd = run_lists(copies_of([4097 + x for x in src], [64 + x for x in dst], num_bytes), local, Region(4097, 1 << 20))
    assert odd[0].src == RunList(1, packed(src), packed(num_bytes))


def test_long_lists_are_cut() -> None:
    num_runs = 2 * MAX_RUNS + 1
    places = np.arange(num_runs) * 16
    copies = copies_of(places + 4096, places + 64, np.full(num_runs, 8))
    pairs = run_lists(copies, Region(64, 1 << 20), Region(4096, 1 << 20))
    assert [len(pair.src) for pair in pairs] == [MAX_RUNS, MAX_RUNS, 1]
    assert b"".join(pair.src.offsets for pair in pairs) == packed(places)
    assert b"".join(pair.dst.offsets for pair in pairs) == packed(places)


def test_a_digester_reads_the_region_it_was_made_for() -> None:
    memory, runs = noise(), some_runs(6, 4)
    assert HostDigester(host_region(memory)).begin(runs).poll() == host_digest(memory, runs)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((8, bytes(8), bytes(8)), "expected words of 1, 2 or 4 bytes, got 8"),
        ((4, b"", b""), f"expected 1 to {MAX_RUNS} offsets of 8 bytes, got 0 bytes"),
        ((4, bytes(7), bytes(7)), f"expected 1 to {MAX_RUNS} offsets of 8 bytes, got 7 bytes"),
        (
            (4, bytes(8 * MAX_RUNS + 8), bytes(8 * MAX_RUNS + 8)),
            f"expected 1 to {MAX_RUNS} offsets of 8 bytes, got {8 * MAX_RUNS + 8} bytes",
        ),
        ((4, bytes(16), bytes(8)), "expected 2 lengths of 8 bytes, got 8 bytes"),
    ],
)
def test_impossible_run_lists_cannot_be_built(arguments: tuple[int, bytes, bytes], problem: str) -> None:
    with refused(problem):
        RunList(*arguments)


def test_a_list_knows_its_bytes() -> None:
    runs = runs_of([(0, 16), (64, 4)])
    assert (len(runs), runs.total_bytes) == (2, 20)
