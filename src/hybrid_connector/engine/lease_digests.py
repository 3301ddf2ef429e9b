"""How does a P worker digest what a peer names of a leased request? (verification mode)

1. ``start`` lets nothing be digested that is not state of the lease, then begins.
2. ``poll`` reports what has ended, and what was refused; it never waits.
"""

from functools import lru_cache

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.engine.exchange import DigestOrder, DigestRecord
from hybrid_connector.transport.digest import Digester, DigestJob
from hybrid_connector.transport.ranges import StateMap


class LeaseDigests:
    """The digests under way on one P rank."""

    def __init__(self, layout: RankLayout, digester: Digester) -> None:
        self._rank = layout.rank
        # A peer names a lease's bytes in several lists, one right after the other.
        self._ranges = lru_cache(maxsize=4)(StateMap(layout).ranges)
        self._digester = digester
        self._jobs: list[tuple[DigestOrder, DigestJob]] = []
        self._refused: list[DigestRecord] = []

    def start(self, order: DigestOrder) -> None:
        """Begin a digest of this rank's; those of other ranks are not for us."""
        if order.rank != self._rank:
            return
        try:
            self._ranges(order.block_ids, order.num_tokens).refuse_outside(order.runs)
            self._jobs.append((order, self._digester.begin(order.runs)))
        except Exception as error:  # whatever a peer asked for, or a device without memory: the engine goes on
            self._refused.append(DigestRecord(order.request_id, order.number, error=str(error)))

    def poll(self) -> list[DigestRecord]:
        """The orders that have ended since the last call."""
        records, self._refused = self._refused, []
        running = []
        for order, job in self._jobs:
            digest = job.poll()
            if digest is None:
                running.append((order, job))
            else:
                records.append(DigestRecord(order.request_id, order.number, digest))
        self._jobs = running
        return records
