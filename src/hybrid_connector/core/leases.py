"""Who may read a finished request's blocks, and until when?

P keeps one ``LeaseTable``: a request's blocks are leased when it finishes, sealed once no engine step that was in
flight can still write them, granted to one holder, and handed back exactly once: released, withdrawn or expired.
D keeps one ``Hold`` per grant: the promise, measured on D's own clock from before it asked.
Both are pure state machines; the clock (seconds, monotonic, own process) is an argument.
"""

import hmac
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum

from hybrid_connector.core.blocks import BlockIds

REMEMBERED_LEASES = 4096
"""Ended leases whose end P can still name; an older one is answered with "unknown"."""

MAX_CLOCK_DRIFT = 1e-3
"""By how much D's clock may run slower than P's: NTP slews a clock by at most 500 ppm, so 1000 between two."""


class LeaseRefusal(StrEnum):
    """Why P does not grant, renew or release."""

    UNKNOWN = "unknown"
    EXPIRED = "expired"
    CONSUMED = "consumed"
    HELD = "held"
    NOT_SEALED = "not_sealed"
    WRONG_TOKEN = "wrong_token"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Lease:
    """The blocks of one finished request, per cache group, and how long they stay."""

    request_id: str
    token: str
    block_ids: BlockIds
    num_tokens: int
    seal_step: int
    expires_at: float
    sealed: bool = False
    holder: str | None = None
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What the holder of a lease may read, and for how long P promises to keep it."""

    block_ids: BlockIds
    num_tokens: int
    promise_s: float


class LeaseTable:
    """All leases of a P engine. Not thread-safe: its owner holds a lock around every call.

    Every leased request id comes out of ``take_ended`` exactly once.
    """

    def __init__(self, lease_s: float) -> None:
        if not lease_s > 0:
            raise ValueError(f"expected lease_s > 0, got {lease_s}")
        self._lease_s = lease_s
        self._completed_step = -1
        self._leases: dict[str, Lease] = {}
        self._ends: OrderedDict[str, tuple[str, LeaseRefusal]] = OrderedDict()
        self._ended: list[tuple[str, LeaseRefusal]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self,
        request_id: str,
        token: str,
        block_ids: BlockIds,
        num_tokens: int,
        seal_step: int,
        now: float,
    ) -> None:
        """Lease a finished request's blocks; readable once step ``seal_step`` has completed, -1 for at once."""
        if request_id in self._leases:
            raise ValueError(f"request {request_id} is leased already")
        self._ends.pop(request_id, None)
        sealed = seal_step <= self._completed_step
        self._leases[request_id] = Lease(
            request_id, token, block_ids, num_tokens, seal_step, now + self._lease_s, sealed
        )

    def seal(self, completed_step: int) -> None:
        """Every engine step up to ``completed_step`` has completed."""
        self._completed_step = max(self._completed_step, completed_step)
        for request_id, lease in self._leases.items():
            if not lease.sealed and lease.seal_step <= completed_step:
                self._leases[request_id] = replace(lease, sealed=True)

    def acquire(self, request_id: str, token: str, holder: str, now: float) -> LeaseGrant | LeaseRefusal:
        """Grant the blocks to ``holder`` and start the promise anew; asking twice is answered twice."""
        lease = self._find(request_id, token, now)
        if isinstance(lease, LeaseRefusal):
            return lease
        if lease.holder not in (None, holder):
            return LeaseRefusal.HELD
        if lease.withdrawn:
            return LeaseRefusal.WITHDRAWN
        if not lease.sealed:
            return LeaseRefusal.NOT_SEALED
        self._leases[request_id] = replace(lease, holder=holder, expires_at=now + self._lease_s)
        return LeaseGrant(lease.block_ids, lease.num_tokens, self._lease_s)

    def renew(self, request_id: str, token: str, holder: str, now: float) -> float | LeaseRefusal:
        """Start the promise anew for the holder; returns its length in seconds."""
        lease = self.find_held(request_id, token, holder, now)
        if isinstance(lease, LeaseRefusal):
            return lease
        if lease.withdrawn:
            return LeaseRefusal.WITHDRAWN
        self._leases[request_id] = replace(lease, expires_at=now + self._lease_s)
        return self._lease_s

    def find_held(self, request_id: str, token: str, holder: str, now: float) -> Lease | LeaseRefusal:
        """The lease that ``holder`` was granted."""
        lease = self._find(request_id, token, now)
        if isinstance(lease, Lease) and lease.holder != holder:
            return LeaseRefusal.HELD
        return lease

    def release(self, request_id: str, token: str, holder: str, now: float) -> LeaseRefusal | None:
        """End the lease: its reader is done, or whoever knows the token does not want it."""
        lease = self._find(request_id, token, now)
        if isinstance(lease, LeaseRefusal):
            return lease
        if lease.holder not in (None, holder):
            return LeaseRefusal.HELD
        self._end(lease, LeaseRefusal.CONSUMED)
        return None

    def expire(self, now: float) -> None:
        """End every lease whose promise is over."""
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now]:
            self._end(lease, LeaseRefusal.WITHDRAWN if lease.withdrawn else LeaseRefusal.EXPIRED)

    def withdraw_all(self, now: float) -> None:
        """Grant and renew nothing any more of what is leased now: the engine's cache is reset.

        A promise that was given stands until its holder releases or it is over. Blocks that were handed back sooner
        would be written under a reader that believes in it (I2).
        """
        self.expire(now)
        for lease in list(self._leases.values()):
            if lease.holder is None:
                self._end(lease, LeaseRefusal.WITHDRAWN)
            else:
                self._leases[lease.request_id] = replace(lease, withdrawn=True)

    def expire_all(self) -> None:
        """End every lease now, promised or not: the engine shuts down, and writes no block any more."""
        for lease in list(self._leases.values()):
            self._end(lease, LeaseRefusal.EXPIRED)

    def take_ended(self) -> list[tuple[str, LeaseRefusal]]:
        """Requests whose blocks may be handed back since the last call, and how each lease ended."""
        ended, self._ended = self._ended, []
        return ended

    def _find(self, request_id: str, token: str, now: float) -> Lease | LeaseRefusal:
        self.expire(now)
        lease = self._leases.get(request_id)
        if lease is not None:
            return lease if _same(lease.token, token) else LeaseRefusal.WRONG_TOKEN
        if request_id in self._ends:
            known_token, end = self._ends[request_id]
            return end if _same(known_token, token) else LeaseRefusal.WRONG_TOKEN
        return LeaseRefusal.UNKNOWN

    def _end(self, lease: Lease, end: LeaseRefusal) -> None:
        del self._leases[lease.request_id]
        self._ends[lease.request_id] = (lease.token, end)
        while len(self._ends) > REMEMBERED_LEASES:
            self._ends.popitem(last=False)
        self._ended.append((lease.request_id, end))


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


@dataclass(frozen=True, slots=True)
class Hold:
    """D's side of a grant: valid until ``expires_at`` on D's clock."""

    promise_s: float
    expires_at: float

    @classmethod
    def since(cls, asked_at: float, promise_s: float) -> "Hold":
        """A promise counts from before the question was sent, so clocks must agree in their rates only."""
        return cls(promise_s, asked_at + promise_s * (1 - MAX_CLOCK_DRIFT))

    def is_valid(self, now: float) -> bool:
        return now < self.expires_at

    def should_renew(self, now: float) -> bool:
        """A third of the promise is used: there is time for two more tries."""
        return now >= self.expires_at - self.promise_s * 2 / 3
