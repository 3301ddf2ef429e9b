"""How does P answer for the blocks of finished requests?

1. The scheduler opens a lease when a request finishes and seals leases as engine steps complete.
2. The side channel's thread answers Hello, Acquire, Renew and Release from the lease table.
3. Verify becomes an order for the workers' next step; its answer is what they report.
4. The scheduler takes the leases that ended, once each, and gives their blocks back.

One lock guards the table and the counts; nothing slow happens under it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.leases import Lease, LeaseGrant, LeaseRefusal, LeaseTable
from hybrid_connector.engine.exchange import DigestOrder, DigestRecord
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Granted,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Verified,
    Verify,
    Welcome,
)

SEAL_RETRY_S = 0.005
"""When to ask again for a lease that is not sealed yet: about the length of an engine step."""

DIGEST_RETRY_S = 0.005
"""When to ask again for a digest: it takes the step that computes it and the next, which reports it."""
MAX_DIGESTS_PER_LEASE = 2**14
"""Run lists that P remembers per lease: 57 million runs."""
MAX_DIGESTS_UNDER_WAY = 256
"""Run lists that wait for a step, 14 MB of them; more are put off."""

_DETAILS = {
    LeaseRefusal.UNKNOWN: "no request of this id finished here with do_remote_decode, or long ago",
    LeaseRefusal.EXPIRED: "its reader did not renew in time and the blocks were given back",
    LeaseRefusal.CONSUMED: "it was read, or given up, before",
    LeaseRefusal.HELD: "another reader holds it, or the one that renews never acquired it",
    LeaseRefusal.NOT_SEALED: "an engine step that may still write the state is running",
    LeaseRefusal.WRONG_TOKEN: "the token is not the one that was given out with the answer",
    LeaseRefusal.WITHDRAWN: "P's cache was reset",
}


class Producer:
    """P's side of the control plane."""

    def __init__(self, lease_s: float, incarnation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._table = LeaseTable(lease_s)
        self._incarnation = incarnation
        self._welcome: Welcome | None = None
        # Per lease and number; None while it is being computed.
        self._digests: dict[str, dict[int, DigestRecord | None]] = {}
        self._digest_orders: list[DigestOrder] = []
        self._num_under_way = 0
        self._counts: Counter[str] = Counter()

    def publish(self, manifest: EngineManifest) -> None:
        """What peers get in answer to Hello from now on."""
        self._welcome = Welcome(incarnation=self._incarnation, manifest=manifest)

    @property
    def counts(self) -> Counter[str]:
        """How often what happened so far, by name: a copy, for the side channel's thread goes on counting."""
        with self._lock:
            return Counter(self._counts)

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._table)

    def open(self, request_id: str, token: str, block_ids: BlockIds, num_tokens: int, seal_step: int) -> None:
        """Lease a finished request's blocks; see ``LeaseTable.open``."""
        with self._lock:
            self._table.open(request_id, token, block_ids, num_tokens, seal_step, self._clock())

    def seal(self, completed_step: int) -> None:
        """Every engine step up to ``completed_step`` has completed on all ranks."""
        with self._lock:
            self._table.seal(completed_step)

    def take_ended(self) -> list[str]:
        """Requests whose blocks go back to the pool now; each comes once."""
        with self._lock:
            self._table.expire(self._clock())
            ended = self._table.take_ended()
            for request_id, end in ended:
                self._counts[f"leases_{end}"] += 1
                digests = self._digests.pop(request_id, {})
                self._num_under_way -= sum(record is None for record in digests.values())
        return [request_id for request_id, _ in ended]

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        """What the workers are to digest in the next step; each comes once."""
        with self._lock:
            orders, self._digest_orders = self._digest_orders, []
            return tuple(order for order in orders if order.request_id in self._digests)

    def note_digests(self, records: Iterable[DigestRecord]) -> None:
        """What the workers reported; what it was for may have ended meanwhile."""
        with self._lock:
            for record in records:
                digests = self._digests.get(record.request_id, {})
                if record.number in digests and digests[record.number] is None:
                    digests[record.number] = record
                    self._num_under_way -= 1

    def withdraw_all(self) -> None:
        """Let nobody begin to read what is leased now; see ``LeaseTable.withdraw_all``."""
        with self._lock:
            self._table.withdraw_all(self._clock())

    def expire_all(self) -> None:
        """End every lease now; what reads from them fails on its own side."""
        with self._lock:
            self._table.expire_all()

    def answer(self, request: Request) -> Reply:
        """The side channel's answer to one request; runs on its thread."""
        match request:
            case Hello(protocol_version=version):
                if version != PROTOCOL_VERSION:
                    return self._refuse(
                        "",
                        RefusalReason.UNSUPPORTED_PROTOCOL,
                        f"P speaks version {PROTOCOL_VERSION}, D speaks {version}: install the same release on both",
                    )
                if self._welcome is None:
                    return self._refuse("", RefusalReason.OVERLOADED, "P is still starting", retry_after_s=0.5)
                return self._welcome
            case Acquire(request_id=request_id, token=token, holder=holder):
                with self._lock:
                    granted = self._table.acquire(request_id, token, holder, self._clock())
                if isinstance(granted, LeaseGrant):
                    return Granted(
                        incarnation=self._incarnation,
                        request_id=request_id,
                        block_ids=granted.block_ids,
                        num_tokens=granted.num_tokens,
                        promise_s=granted.promise_s,
                    )
                retry = SEAL_RETRY_S if granted is LeaseRefusal.NOT_SEALED else None
                return self._refuse(request_id, RefusalReason(granted.value), _DETAILS[granted], retry_after_s=retry)
            case Renew(request_id=request_id, token=token, holder=holder):
                with self._lock:
                    renewed = self._table.renew(request_id, token, holder, self._clock())
                if isinstance(renewed, LeaseRefusal):
                    return self._refuse(request_id, RefusalReason(renewed.value), _DETAILS[renewed])
                return Renewed(incarnation=self._incarnation, request_id=request_id, promise_s=renewed)
            case Verify():
                return self._verify(request)
            case Release(request_id=request_id, token=token, holder=holder):
                with self._lock:
                    refusal = self._table.release(request_id, token, holder, self._clock())
                if refusal is not None:
                    return self._refuse(request_id, RefusalReason(refusal.value), _DETAILS[refusal])
                return Released(incarnation=self._incarnation, request_id=request_id)

    def _verify(self, asked: Verify) -> Reply:
        """The digest, once the workers have reported it; the first time it is ordered."""
        with self._lock:
            lease = self._table.find_held(asked.request_id, asked.token, asked.holder, self._clock())
            known = self._digests.get(asked.request_id, {}).get(asked.number)
            if isinstance(lease, Lease) and known is None:
                reason, detail, retry_after_s = self._order_digest(asked, lease)
        if isinstance(lease, LeaseRefusal):
            return self._refuse(asked.request_id, RefusalReason(lease.value), _DETAILS[lease])
        if known is None:
            return self._refuse(asked.request_id, reason, detail, retry_after_s=retry_after_s)
        if known.digest is None:
            return self._refuse(asked.request_id, RefusalReason.MALFORMED, known.error or "there is no digest")
        return Verified(
            incarnation=self._incarnation, request_id=asked.request_id, number=asked.number, digest=known.digest
        )

    def _order_digest(self, asked: Verify, lease: Lease) -> tuple[RefusalReason, str, float | None]:
        """Order a digest unless it is under way, and say when to ask again."""
        num_ranks = 0 if self._welcome is None else len(self._welcome.manifest.ranks)
        if asked.rank >= num_ranks:
            return RefusalReason.MALFORMED, f"expected a rank below {num_ranks}, got {asked.rank}", None
        digests = self._digests.setdefault(asked.request_id, {})
        if asked.number not in digests:
            if len(digests) >= MAX_DIGESTS_PER_LEASE:
                return RefusalReason.OVERLOADED, f"expected at most {MAX_DIGESTS_PER_LEASE} run lists per lease", None
            if self._num_under_way >= MAX_DIGESTS_UNDER_WAY:
                return RefusalReason.OVERLOADED, f"{self._num_under_way} digests are under way", DIGEST_RETRY_S
            digests[asked.number] = None
            self._num_under_way += 1
            self._digest_orders.append(
                DigestOrder(asked.request_id, asked.number, asked.rank, asked.runs, lease.block_ids, lease.num_tokens)
            )
        return RefusalReason.NOT_READY, "the digest is being computed", DIGEST_RETRY_S

    def _refuse(
        self, request_id: str, reason: RefusalReason, detail: str, retry_after_s: float | None = None
    ) -> Refused:
        with self._lock:
            self._counts[f"refused_{reason}"] += 1
        return Refused(
            incarnation=self._incarnation,
            request_id=request_id,
            reason=reason,
            detail=detail,
            retry_after_s=retry_after_s,
        )
