"""How does P answer for the blocks of finished requests?

1. The scheduler opens a lease when a request finishes and seals leases as engine steps complete.
2. The side channel's thread answers Hello, Acquire, Renew and Release from the lease table.
3. The scheduler takes the leases that ended, once each, and gives their blocks back.

One lock guards the table and the counts; nothing slow happens under it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.leases import LeaseGrant, LeaseRefusal, LeaseTable
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
    Welcome,
)

SEAL_RETRY_S = 0.005
"""When to ask again for a lease that is not sealed yet: about the length of an engine step."""

_DETAILS = {
    LeaseRefusal.UNKNOWN: "no request of this id finished here with do_remote_decode, or long ago",
    LeaseRefusal.EXPIRED: "its reader did not renew in time and the blocks were given back",
    LeaseRefusal.CONSUMED: "it was read, or given up, before",
    LeaseRefusal.HELD: "another reader holds it, or the one that renews never acquired it",
    LeaseRefusal.NOT_SEALED: "an engine step that may still write the state is running",
    LeaseRefusal.WRONG_TOKEN: "the token is not the one that was given out with the answer",
}


class Producer:
    """P's side of the control plane."""

    def __init__(self, lease_s: float, incarnation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._table = LeaseTable(lease_s)
        self._incarnation = incarnation
        self._manifest: EngineManifest | None = None
        self.counts: Counter[str] = Counter()

    def publish(self, manifest: EngineManifest) -> None:
        """What peers get in answer to Hello from now on."""
        self._manifest = manifest

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
            for _, end in ended:
                self.counts[f"leases_{end}"] += 1
        return [request_id for request_id, _ in ended]

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
                if self._manifest is None:
                    return self._refuse("", RefusalReason.OVERLOADED, "P is still starting", retry_after_s=0.5)
                return Welcome(incarnation=self._incarnation, manifest=self._manifest)
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
            case Release(request_id=request_id, token=token, holder=holder):
                with self._lock:
                    refusal = self._table.release(request_id, token, holder, self._clock())
                if refusal is not None:
                    return self._refuse(request_id, RefusalReason(refusal.value), _DETAILS[refusal])
                return Released(incarnation=self._incarnation, request_id=request_id)

    def _refuse(
        self, request_id: str, reason: RefusalReason, detail: str, retry_after_s: float | None = None
    ) -> Refused:
        with self._lock:
            self.counts[f"refused_{reason}"] += 1
        return Refused(
            incarnation=self._incarnation,
            request_id=request_id,
            reason=reason,
            detail=detail,
            retry_after_s=retry_after_s,
        )
