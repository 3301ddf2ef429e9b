"""Which bytes of a rank's region are a request's state?

1. ``StateMap``: the runs of each layer's page, from its shards; built once per rank.
2. ``StateMap.ranges``: those of all pages of one request, joined where they touch.
3. ``Ranges.refuse_outside``: what a peer names must lie inside.
"""

from dataclasses import dataclass

import numpy as np

from hybrid_connector.core.blocks import BlockIds, RankLayout
from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import TransferError
from hybrid_connector.core.geometry import Shard
from hybrid_connector.core.lowering import expand, lower
from hybrid_connector.transport.binding import Ints, request_pages

PageRuns = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Disjoint half-open ranges of byte offsets that do not touch, in order."""

    starts: Ints
    stops: Ints

    def refuse_outside(self, runs: RunList) -> None:
        """Raise ``TransferError`` for the first run that leaves the ranges or is no whole number of words.

        Also where the runs have more bytes than the ranges: whoever asks gets each byte's work once.
        """
        offsets, num_bytes = (np.frombuffer(packed, "<u8") for packed in (runs.offsets, runs.num_bytes))
        held = np.uint64((self.stops - self.starts).sum())
        # Each alone first: sums and differences of what a peer sent may wrap.
        bad = (num_bytes == 0) | (num_bytes > held) | (offsets >= np.uint64(self.stops[-1]))
        if not bad.any():
            at = np.searchsorted(self.starts, offsets.astype(np.int64), side="right") - 1
            ends = offsets.astype(np.int64) + num_bytes.astype(np.int64)
            bad = (at < 0) | (ends > self.stops[at])
        if bad.any():
            i = int(bad.argmax())
            start, size = int(offsets[i]), int(num_bytes[i])
            raise TransferError(f"run {i} of {len(runs)}: [{start}, {start + size}) is no state of the lease")
        if int(np.bitwise_or.reduce(offsets | num_bytes)) % runs.word_bytes:
            raise TransferError(f"expected runs of whole words of {runs.word_bytes} bytes")
        if (asked := int(num_bytes.sum())) > held:
            raise TransferError(f"expected at most the {held} bytes of the lease, got runs of {asked} bytes")


class StateMap:
    """Where one rank keeps its state: by group, stride and runs of a page, the offsets of layers that share them."""

    def __init__(self, layout: RankLayout) -> None:
        self._groups = layout.groups
        alike: dict[tuple[int, int, PageRuns], list[int]] = {}
        for layer in layout.layers:
            alike.setdefault((layer.group, layer.page_stride, _page_runs(layer.shards)), []).append(layer.offset)
        self._layers = [
            (group, page_stride, np.array(offsets), *np.array(runs, dtype=np.int64).reshape(-1, 2).T)
            for (group, page_stride, runs), offsets in alike.items()
        ]

    def ranges(self, block_ids: BlockIds, num_tokens: int) -> Ranges:
        """The state of a request of ``num_tokens`` tokens in these blocks."""
        pages = request_pages("P", self._groups, block_ids, num_tokens)
        starts, stops = [], []
        for group, page_stride, offsets, run_offsets, run_bytes in self._layers:
            held = pages[group][pages[group] >= 0] * page_stride
            first = offsets[:, None, None] + held[:, None] + run_offsets
            starts.append(first.ravel())
            stops.append((first + run_bytes).ravel())
        all_starts, all_stops = np.concatenate(starts), np.concatenate(stops)
        order = np.argsort(all_starts, kind="stable")
        all_starts, all_stops = all_starts[order], all_stops[order]
        apart = np.flatnonzero(all_starts[1:] != all_stops[:-1])
        return Ranges(
            all_starts[np.concatenate(([0], apart + 1))], all_stops[np.concatenate((apart, [len(all_stops) - 1]))]
        )


def _page_runs(shards: tuple[Shard, ...]) -> PageRuns:
    """Offset and length of every contiguous run of state in a page."""
    runs = [run for shard in shards for run in expand(lower(shard, shard.box, shard, shard.box), 0, 0)]
    return tuple((run.src_offset, run.num_bytes) for run in runs)
