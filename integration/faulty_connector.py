"""How do the real parts go wrong on purpose? A connector for the fault bench, named by ``kv_connector_module_path``.

1. ``FaultyConnector`` is the product's connector; on D its reads pass ``FaultyTransport``, which looks for a
   ``ReadFault`` in the folder ``FAULT_DIR`` before each read.
2. ``FAULT_WITHOUT`` names one guard to take out of this process, so that the bench can show that it would notice.
3. ``FAULT_DIR/wall_clock`` holds seconds by which ``time.time`` is moved in this process.
"""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from hybrid_connector.connector import HybridNixlConnector
from hybrid_connector.core import leases
from hybrid_connector.engine import consumer, loads, producer, reading, scheduler, verification
from hybrid_connector.transport.base import Region, Transfer, TransferState
from hybrid_connector.transport.binding import BoundCopies

from read_faults import DIR_VARIABLE, WALL_CLOCK, WITHOUT_VARIABLE, ReadFault

_UNREGISTERED = 4096
"""An address that no region of a peer holds."""


class FaultyTransfer:
    """A read that starts late, fails, or ends with a changed byte."""

    def __init__(self, fault: ReadFault, copies: BoundCopies, start: Callable[[], Transfer]) -> None:
        self._fault = fault
        self._copies = copies
        self._start = start
        self._starts_at = time.monotonic() + fault.delay_s
        self._read: Transfer | None = None
        self._error: str | None = None

    @property
    def num_descriptors(self) -> int:
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        return self._copies.total_bytes

    @property
    def error(self) -> str | None:
        return self._error or (self._read.error if self._read is not None else None)

    def poll(self) -> TransferState:
        if self._error is not None:
            return TransferState.FAILED
        if self._read is None:
            if time.monotonic() < self._starts_at:
                return TransferState.PENDING
            try:
                if self._fault.error:
                    raise RuntimeError("failed on purpose")
                self._read = self._start()
            except Exception as error:  # what would have failed at once fails late here
                self._error = str(error)
                return TransferState.FAILED
        state = self._read.poll()
        if state is TransferState.DONE and self._fault.flip:
            self._fault = ReadFault()  # once
            ctypes.c_uint8.from_address(int(self._copies.dst[0])).value ^= 0x40
        return state


class FaultyTransport:
    """The worker's transport, but for the reads that an order is found for."""

    def __init__(self, inner: loads.Transport, directory: Path) -> None:
        self._inner = inner
        self._directory = directory

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read(self, peer: str, copies: BoundCopies, local: Region, remote: Region) -> Transfer:
        fault = ReadFault.take(self._directory, copies.src_rank)
        if fault.bad_descriptor:
            src = copies.src.copy()
            src[-1] = _UNREGISTERED
            copies = BoundCopies(copies.src_rank, src, copies.dst, copies.num_bytes, copies.kind_bytes)
            remote = Region(1, 2**62, remote.memory, remote.device)  # so that our own check lets it through
        if fault == ReadFault() or fault.bad_descriptor:
            return self._inner.read(peer, copies, local, remote)
        return FaultyTransfer(fault, copies, lambda: self._inner.read(peer, copies, local, remote))


class FaultyConnector(HybridNixlConnector):
    """``HybridNixlConnector`` in a process where things go wrong on purpose."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        reads = self._in_worker._loads._reads
        reads._transport = FaultyTransport(reads._transport, Path(os.environ[DIR_VARIABLE]))


# The guards, each as what the code would be without it.


def _failed_reads_count_as_done() -> None:
    reading.Job.fail = lambda self, reason: None


def _first_failed_read_ends_the_load() -> None:
    """Blocks go back while other reads still land (I3)."""
    has_ended = loads.Loads._has_ended

    def ended_early(self, load):
        if has_ended(self, load):
            return True
        load.error = load.error or (load.job.error if load.job is not None else None)
        return load.error is not None

    loads.Loads._has_ended = ended_early


def _lost_grants_stay_valid() -> None:
    consumer.Consumer._check_hold = lambda self, wanted: None
    lose = consumer.Consumer._lose

    def lose_unless_held(self, wanted, *why):
        if not isinstance(wanted.status, consumer.Held):
            lose(self, wanted, *why)

    consumer.Consumer._lose = lose_unless_held


def _ended_leases_stay_readable() -> None:
    """P answers for blocks it gave back: what a connector does that takes block ids from the client."""
    end = leases.LeaseTable._end
    find = leases.LeaseTable._find
    ghosts: dict[str, leases.Lease] = {}

    def end_and_keep(self, lease, why):
        ghosts[lease.request_id] = leases.replace(lease, holder=None, sealed=True)
        end(self, lease, why)

    def find_or_recall(self, request_id, token, now):
        found = find(self, request_id, token, now)
        return ghosts.get(request_id, found) if isinstance(found, leases.LeaseRefusal) else found

    def acquire(self, request_id, token, holder, now):
        lease = find_or_recall(self, request_id, token, now)
        if isinstance(lease, leases.LeaseRefusal):
            return lease
        return leases.LeaseGrant(lease.block_ids, lease.num_tokens, self._lease_s)

    leases.LeaseTable._end = end_and_keep
    leases.LeaseTable.acquire = acquire
    leases.LeaseTable.renew = lambda self, request_id, token, holder, now: self._lease_s


def _any_token_will_do() -> None:
    leases._same = lambda a, b: True


def _leases_never_expire() -> None:
    leases.LeaseTable.expire = lambda self, now: None


def _no_renewals() -> None:
    leases.Hold.should_renew = lambda self, now: False


def _wall_clock() -> None:
    """Promises measured on a clock that is set, instead of one that only runs."""
    for init in (producer.Producer.__init__, consumer.Consumer.__init__):
        assert time.monotonic in init.__defaults__
        init.__defaults__ = tuple(_time_of_day if value is time.monotonic else value for value in init.__defaults__)


def _manifests_are_kept() -> None:
    """What a peer at an address said first is believed for ever."""
    consumer.Consumer._shake_again_or_lose = lambda self, wanted, peer, reason: self._lose(wanted, reason)


def _aborted_loads_are_forgotten() -> None:
    """The scheduler drops an aborted request's load, so nobody says when its blocks are free."""
    take = scheduler.Scheduler.take_reports

    def take_known(self, output):
        for request_id in list(output.finished_recving or ()):
            if request_id in gone:
                output.finished_recving.discard(request_id)
                output.failed_recving.discard(request_id)
        take(self, output)

    finish = scheduler.Scheduler.finish
    gone: set[str] = set()

    def finish_and_drop(self, request, block_ids):
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and fetch.ordered:
            gone.add(request.request_id)
        return finish(self, request, block_ids)

    scheduler.Scheduler.take_reports = take_known
    scheduler.Scheduler.finish = finish_and_drop


def _leased_blocks_go_back_at_once() -> None:
    finish = scheduler.Scheduler.finish
    scheduler.Scheduler.finish = lambda self, request, block_ids: (False, finish(self, request, block_ids)[1])
    # vLLM does not know these requests any more when their leases end.
    producer.Producer.take_ended = lambda self: []


def _grants_may_take_for_ever() -> None:
    consumer.Consumer._give_up = lambda self, wanted: None


def _what_was_not_answered_is_not_asked_again() -> None:
    consumer.RETRY_S = 3600.0


def _releases_are_waited_for() -> None:
    release = consumer.Consumer.release

    def release_and_wait(self, request_id):
        release(self, request_id)
        for future in list(self._releasing):
            future.result()

    consumer.Consumer.release = release_and_wait


def _any_digest_will_do() -> None:
    agrees = verification.Verifications._agrees

    def agrees_always(self, reference, question, answer):
        try:
            return agrees(self, reference, question, answer)
        except verification._FailedError:
            return True

    verification.Verifications._agrees = agrees_always


_set_time = time.time


def _time_of_day() -> float:
    offset = Path(os.environ[DIR_VARIABLE]) / WALL_CLOCK
    return _set_time() + (float(offset.read_text()) if offset.exists() else 0.0)


time.time = _time_of_day

GUARDS: dict[str, Callable[[], None]] = {
    "failed reads fail the load": _failed_reads_count_as_done,
    "a load ends with its last read": _first_failed_read_ends_the_load,
    "a lost grant fails the load": _lost_grants_stay_valid,
    "ended leases are not granted": _ended_leases_stay_readable,
    "tokens are compared": _any_token_will_do,
    "leases expire": _leases_never_expire,
    "grants are renewed": _no_renewals,
    "promises run on a monotonic clock": _wall_clock,
    "a restart is noticed": _manifests_are_kept,
    "ends of aborted loads are reported": _aborted_loads_are_forgotten,
    "digests are compared": _any_digest_will_do,
    "blocks stay while leased": _leased_blocks_go_back_at_once,
    "grants have a deadline": _grants_may_take_for_ever,
    "what was not answered is asked again": _what_was_not_answered_is_not_asked_again,
    "nobody waits for a release": _releases_are_waited_for,
}

if os.environ.get(WITHOUT_VARIABLE):
    GUARDS[os.environ[WITHOUT_VARIABLE]]()
