"""Is a request loaded only if P confirms the bytes that D has read? (verification mode, case 20)

P's and D's halves are the real ones, as are the bytes; clock, side channel and engine steps are the test's.
"""

import dataclasses
import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import PeerError, WireError
from hybrid_connector.engine.consumer import RemoteRequest
from hybrid_connector.engine.exchange import DigestOrder, DigestRecord, LoadRecord, ReadDigest
from hybrid_connector.engine.lease_digests import LeaseDigests
from hybrid_connector.engine.producer import DIGEST_RETRY_S, Producer
from hybrid_connector.engine.verification import (
    MAX_ASKED,
    RETRY_S,
    VERIFY_TIMEOUT_S,
    Reference,
    Verdict,
    Verifications,
)
from hybrid_connector.transport.base import Region
from hybrid_connector.transport.digest import DigestJob, HostDigester
from hybrid_connector.wire.messages import (
    Acquire,
    Granted,
    RefusalReason,
    Refused,
    Released,
    Reply,
    Verified,
    Verify,
    decode_reply,
    decode_request,
    encode,
)
from hybrid_connector.wire.side_channel import Address, SideChannelClient, SideChannelServer
from test_loads import HYBRID, PAGE_TOKENS, World

from fakes import Call, Clock, ScriptedCaller
from layouts import Family, Model

P = ("10.0.0.1", 5600)
REFERENCE = Reference(RemoteRequest("P", "remote-r", "token", P), "holder", "first")
TP_PAIRS = [(1, 1), (1, 2), (2, 1)]


class Engines:
    """P and D with a request that P leases to D, from the load to the verdict."""

    def __init__(self, p_ranks: int = 1, d_ranks: int = 1, *, cached_tokens: int = 0, model: Model = HYBRID) -> None:
        self.world = World(p_ranks, d_ranks, cached_tokens=cached_tokens, model=model)
        self.clock = Clock()
        self.producer = Producer(1e6, "first", self.clock)
        self.producer.publish(self.world.manifest)
        self.digests = [
            LeaseDigests(rank.layout, HostDigester(Region(rank.region_address, rank.layout.region_bytes)))
            for rank in self.world.manifest.ranks
        ]
        self.caller = ScriptedCaller(self.clock, self.respond)
        self.verifications = Verifications(self.caller, 5.0, self.clock)
        request = self.world.request
        self.producer.open("remote-r", "token", request.src_blocks, request.num_tokens, -1)
        assert isinstance(self.producer.answer(Acquire("remote-r", "token", "holder")), Granted)

    def respond(self, call: Call) -> Reply:
        return decode_reply(encode(self.producer.answer(decode_request(encode(call.request)))))

    def load(self) -> list[LoadRecord]:
        self.world.start(verify=True)
        return self.world.poll()

    def step_prefill(self) -> list[DigestOrder]:
        """One engine step of P: its orders, carried out and reported."""
        orders = list(self.producer.take_digest_orders())
        for rank in self.digests:
            for order in orders:
                rank.start(order)
            self.producer.note_digests(rank.poll())
        return orders

    def verdict(self, records: Sequence[LoadRecord]) -> Verdict:
        """What D's scheduler is told about a load that ended."""
        assert [record.error for record in records] == [None] * len(records)
        reads = [read for record in records for read in record.digests]
        self.verifications.start("r", REFERENCE, reads)
        for _ in range(5):
            verdicts = self.verifications.poll()
            if verdicts:
                (verdict,) = verdicts
                return verdict
            self.step_prefill()
            self.clock.advance(DIGEST_RETRY_S)
        raise AssertionError("no verdict after 5 steps")

    def sent_bytes(self) -> list[tuple[int, int, int]]:
        """Of every read: D rank, P rank, bytes."""
        return [(record.rank, read.src_rank, read.src.total_bytes) for record in self.load() for read in record.digests]


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [*TP_PAIRS, (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("cached_pages", [0, 3, 10])
def test_what_arrived_whole_passes(p_ranks: int, d_ranks: int, cached_pages: int) -> None:
    engines = Engines(p_ranks, d_ranks, cached_tokens=cached_pages * PAGE_TOKENS)
    records = engines.load()
    assert engines.world.wrong() == []
    for record in records:  # exactly the bytes that moved
        assert sum(read.src.total_bytes for read in record.digests) == record.num_bytes
    assert engines.verdict(records) == Verdict("r")
    assert engines.verifications.poll() == []


@pytest.mark.parametrize("family", ["gdn", "kda", "linear", "mamba1", "mamba2", "short_conv"])
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_every_family_passes_and_a_flip_in_it_does_not(family: Family, p_ranks: int, d_ranks: int) -> None:
    num_groups = {"mamba2": 1, "gdn": 4}.get(family, 1)
    model = Model(1, 2, num_recurrent=2, family=family, num_heads=4, num_groups=num_groups)
    engines = Engines(p_ranks, d_ranks, model=model)
    assert engines.verdict(engines.load()) == Verdict("r")
    engines.world.fabric.flip_next(p_ranks)
    assert engines.verdict(engines.load()).reason is not None


@pytest.mark.parametrize(("p_ranks", "d_ranks"), TP_PAIRS)
def test_a_byte_flipped_in_flight_is_found_in_1000_of_1000_tries(p_ranks: int, d_ranks: int) -> None:
    engines = Engines(p_ranks, d_ranks)
    reads = engines.sent_bytes()
    # D's ranks read one after the other, so a fault hits the first of them that reads from its peer.
    first_reads = {src: (dst, size) for dst, src, size in reversed(reads)}
    dice = random.Random(p_ranks)
    found = 0
    for _ in range(1000):
        src, (dst, size) = dice.choice(list(first_reads.items()))
        engines.world.fabric.flip_next(dice.randrange(size), peer=f"P.first.{src}")
        verdict = engines.verdict(engines.load())
        assert verdict.reason is not None
        found += verdict.reason.startswith(f"verification failed: P rank {src}, D rank {dst}: the digest of {size} ")
    assert found == 1000
    assert engines.verdict(engines.load()) == Verdict("r")


@pytest.mark.parametrize(("p_ranks", "d_ranks"), TP_PAIRS)
def test_a_byte_that_changes_on_p_is_found(p_ranks: int, d_ranks: int) -> None:
    engines = Engines(p_ranks, d_ranks)
    records = engines.load()
    memory = engines.world.kept[0]  # P rank 0's
    assert isinstance(memory, np.ndarray)
    memory[first_offset(records[0].digests[0].src)] ^= 1
    verdict = engines.verdict(records)
    assert verdict.reason is not None
    assert " is 0x" in verdict.reason
    assert verdict.reason.count(" on P, 0x") == verdict.reason.count(" on D") == 1


def first_offset(runs: RunList) -> int:
    return int.from_bytes(runs.offsets[:8], "little")


def test_only_loads_that_are_to_be_verified_are_digested() -> None:
    world = World()
    world.start()
    (record,) = world.poll()
    assert (record.digests, record.verified) == ((), None)


def test_a_failed_read_is_not_digested() -> None:
    engines = Engines(p_ranks=2)
    engines.world.fabric.fail_next(5, peer="P.first.1")
    (record,) = engines.load()
    assert record.error == "P.first.1: failed on purpose after 5 bytes"
    assert record.digests == ()


class SlowJob:
    def __init__(self) -> None:
        self.digest: int | None = None

    def poll(self) -> int | None:
        return self.digest


class SlowDigester:
    """A device that digests when told to."""

    def __init__(self) -> None:
        self.jobs: list[SlowJob] = []

    def begin(self, runs: RunList) -> DigestJob:
        self.jobs.append(SlowJob())
        return self.jobs[-1]


def test_a_load_ends_with_its_last_digest_and_its_time_with_its_last_byte() -> None:
    world = World(p_ranks=2)
    (loads,) = world.loads
    digester = loads._digester = SlowDigester()
    world.start(verify=True)
    assert world.poll() == []
    first, second = digester.jobs
    world.clock.advance(1.0)
    first.digest = 7
    assert world.poll() == []
    assert len(loads) == 1  # its blocks stay taken
    second.digest = 0  # a digest like any other
    (record,) = world.poll()
    assert [(read.src_rank, read.digest) for read in record.digests] == [(0, 7), (1, 0)]
    assert record.transfer_s == 0.0
    assert len(digester.jobs) == 2


def test_a_device_that_cannot_digest_costs_the_request() -> None:
    world = World()
    world.loads[0]._digester = None  # type: ignore[assignment]
    world.start(verify=True)
    (record,) = world.poll()
    assert record.error is not None
    assert record.error.startswith("what arrived cannot be digested: ")
    assert record.digests == ()


def test_verdicts_are_reported_once_by_each_rank() -> None:
    world = World(d_ranks=2)
    for loads in world.loads:
        loads.accept("good")
        loads.refute("bad", "why")
    assert world.poll() == [
        record
        for rank in range(2)
        for record in (LoadRecord("good", rank, verified=True), LoadRecord("bad", rank, error="why", verified=False))
    ]
    assert world.poll() == []


# P: what is answered, and what is not.


def asks(engines: Engines, number: int = 0, **changes: object) -> Verify:
    """D's question about its first read, with some fields changed."""
    read = engines.load()[0].digests[0]
    asked = Verify("remote-r", "token", "holder", number, read.src_rank, read.src)
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
    return Verify(**(fields | changes))


def test_over_the_real_side_channel() -> None:
    engines = Engines()
    read = engines.load()[0].digests[0]
    with (
        SideChannelServer("127.0.0.1", 0, engines.producer.answer, incarnation="first", security=None) as server,
        SideChannelClient(security=None) as client,
    ):
        asked = Verify("remote-r", "token", "holder", 0, 0, read.src)
        address = Address("127.0.0.1", server.port)
        assert client.call(address, asked, 20.0).result(20.0) == NOT_READY
        engines.step_prefill()
        answer = client.call(address, asked, 20.0).result(20.0)
    assert answer == Verified("remote-r", 0, read.digest, incarnation="first")


NOT_READY = Refused(
    "remote-r", RefusalReason.NOT_READY, "the digest is being computed", DIGEST_RETRY_S, incarnation="first"
)


def test_p_digests_once_and_answers_as_often_as_it_is_asked() -> None:
    engines = Engines()
    asked = asks(engines)
    for _ in range(3):
        assert engines.producer.answer(asked) == NOT_READY
    assert len(engines.step_prefill()) == 1
    answer = engines.producer.answer(asked)
    assert answer == Verified("remote-r", 0, engines.load()[0].digests[0].digest, incarnation="first")
    assert engines.producer.answer(asked) == answer
    assert engines.step_prefill() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": "other"}, RefusalReason.UNKNOWN),
        ({"token": "x"}, RefusalReason.WRONG_TOKEN),
        ({"holder": "x"}, RefusalReason.HELD),
        ({"rank": 1}, RefusalReason.MALFORMED),
    ],
)
def test_p_digests_for_the_holder_of_a_lease_only(changes: dict[str, object], reason: RefusalReason) -> None:
    engines = Engines()
    answer = engines.producer.answer(asks(engines, **changes))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.retry_after_s) == (reason, None)
    assert engines.producer.take_digest_orders() == ()


def test_p_digests_nothing_of_a_lease_that_nobody_was_granted() -> None:
    engines = Engines()
    engines.producer.open("waiting", "token", engines.world.request.src_blocks, engines.world.request.num_tokens, 5)
    for sealed in (False, True):
        if sealed:
            engines.producer.seal(5)
        answer = engines.producer.answer(asks(engines, request_id="waiting"))
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.HELD


def test_a_lease_that_ends_takes_its_digests_along() -> None:
    engines = Engines()
    asked = asks(engines)
    engines.producer.answer(asked)
    (order,) = engines.producer.take_digest_orders()
    engines.producer.answer(asks(engines, number=1))
    engines.producer.expire_all()
    assert engines.producer.take_ended() == ["remote-r"]
    assert engines.producer.take_digest_orders() == ()  # its blocks may be another request's by now
    engines.producer.note_digests([DigestRecord("remote-r", order.number, 7)])
    answer = engines.producer.answer(asked)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.EXPIRED
    assert engines.producer._digests == {}
    assert engines.producer._num_under_way == 0


def test_p_computes_a_bounded_number_of_digests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_connector.engine.producer.MAX_DIGESTS_UNDER_WAY", 2)
    monkeypatch.setattr("hybrid_connector.engine.producer.MAX_DIGESTS_PER_LEASE", 3)
    engines = Engines()
    questions = [asks(engines, number=number) for number in range(4)]
    answers = [engines.producer.answer(asked) for asked in questions]
    overloaded = Refused(
        "remote-r", RefusalReason.OVERLOADED, "2 digests are under way", DIGEST_RETRY_S, incarnation="first"
    )
    assert answers == [NOT_READY, NOT_READY, overloaded, overloaded]
    assert len(engines.step_prefill()) == 2
    assert [engines.producer.answer(asked) for asked in questions[2:]] == [
        NOT_READY,
        Refused(
            "remote-r", RefusalReason.OVERLOADED, "expected at most 3 run lists per lease", None, incarnation="first"
        ),
    ]


def changed_runs(
    runs: RunList, offsets: Sequence[int] | None = None, num_bytes: Sequence[int] | None = None
) -> RunList:
    def pack(values: Sequence[int] | None, before: bytes) -> bytes:
        return before if values is None else b"".join(value.to_bytes(8, "little") for value in values)

    return dataclasses.replace(runs, offsets=pack(offsets, runs.offsets), num_bytes=pack(num_bytes, runs.num_bytes))


@pytest.mark.parametrize("p_ranks", [1, 2])
def test_a_run_outside_of_the_lease_s_state_is_refused(p_ranks: int) -> None:
    """A client must not learn anything about the bytes of other requests, or of what is no state."""
    engines = Engines(p_ranks)
    layout = engines.world.srcs[0]
    read = engines.load()[0].digests[0]
    held = np.zeros(layout.region_bytes, bool)
    for start, size in pairs(read.src):
        held[start : start + size] = True
    edges = np.flatnonzero(np.diff(held.astype(int)))
    outside = [
        *((int(edge), 2) for edge in edges[:6]),  # over an edge, either way
        (0, layout.region_bytes),
        (layout.region_bytes, 1),
        (layout.region_bytes - 1, 1),
        (2**64 - 1, 1),
        (2**63, 8),
        (0, 2**64 - 1),
        (first_offset(read.src), 2**63),
        (first_offset(read.src), 0),
        (2**64 - 4, first_offset(read.src) + 8),
    ]
    for number, (start, size) in enumerate(outside):
        runs = changed_runs(dataclasses.replace(read.src, word_bytes=1), [start], [size])
        asked = asks(engines, number, runs=runs)
        assert engines.producer.answer(asked) == NOT_READY
        engines.step_prefill()
        answer = engines.producer.answer(asked)
        assert isinstance(answer, Refused), (start, size)
        problem = f"run 0 of 1: [{start}, {start + size}) is no state of the lease"
        assert (answer.reason, answer.detail) == (RefusalReason.MALFORMED, problem)


def pairs(runs: RunList) -> list[tuple[int, int]]:
    offsets, lengths = (np.frombuffer(data, "<u8").tolist() for data in (runs.offsets, runs.num_bytes))
    return list(zip(offsets, lengths, strict=True))


def test_more_bytes_than_the_lease_has_are_refused() -> None:
    engines = Engines()
    read = engines.load()[0].digests[0]
    twice = RunList(read.src.word_bytes, read.src.offsets * 2, read.src.num_bytes * 2)
    asked = asks(engines, runs=twice)
    engines.producer.answer(asked)
    engines.step_prefill()
    answer = engines.producer.answer(asked)
    assert isinstance(answer, Refused)
    held = read.src.total_bytes
    assert answer.detail == f"expected at most the {held} bytes of the lease, got runs of {2 * held} bytes"


def test_parts_of_words_are_refused() -> None:
    engines = Engines()
    read = engines.load()[0].digests[0]
    assert read.src.word_bytes > 1
    start, size = max(pairs(read.src), key=lambda run: run[1])
    for number, run in enumerate([(start + 1, read.src.word_bytes), (start, read.src.word_bytes + 1)]):
        asked = asks(engines, number, runs=changed_runs(read.src, [run[0]], [run[1]]))
        engines.producer.answer(asked)
        engines.step_prefill()
        answer = engines.producer.answer(asked)
        assert isinstance(answer, Refused)
        assert answer.detail == f"expected runs of whole words of {read.src.word_bytes} bytes"
    assert size > read.src.word_bytes + 1


# D: every answer a peer may give.


class Asking:
    """D's half alone; the test plays P."""

    def __init__(self, num_reads: int = 1) -> None:
        self.clock = Clock()
        self.caller = ScriptedCaller(self.clock)
        self.verifications = Verifications(self.caller, 5.0, self.clock)
        runs = RunList(4, bytes(8), (64).to_bytes(8, "little"))
        self.reads = [ReadDigest(i, 0, runs, 100 + i) for i in range(num_reads)]
        self.verifications.start("r", REFERENCE, self.reads)
        assert self.verifications.poll() == []

    def answer(self, reply: Reply | Exception, index: int = 0) -> list[Verdict]:
        self.caller.open()[index].answer(reply)
        return self.verifications.poll()

    def agree(self, number: int = 0) -> Verified:
        return Verified("remote-r", number, 100 + number, incarnation="first")


def test_a_question_names_the_lease_and_the_bytes() -> None:
    scene = Asking()
    call = scene.caller.only(Verify)
    assert (call.address, call.timeout_s) == (P, 5.0)
    assert call.request == Verify("remote-r", "token", "holder", 0, 0, scene.reads[0].src)
    assert scene.answer(scene.agree()) == [Verdict("r")]
    assert scene.caller.open() == []


def test_an_engine_that_waits_for_a_digest_goes_on_as_soon_as_there_is_one() -> None:
    scene = Asking(num_reads=2)
    scene.verifications.wait_answer(0.001)  # returns though nobody answers
    answers = threading.Thread(target=scene.caller.open()[1].answer, args=(scene.agree(1),))
    answers.start()
    scene.verifications.wait_answer(60)
    answers.join()
    assert scene.verifications.poll() == []
    assert scene.answer(scene.agree(0)) == [Verdict("r")]
    scene.verifications.wait_answer(60)  # nothing is asked


def test_all_digests_must_agree() -> None:
    scene = Asking(num_reads=3)
    assert scene.answer(scene.agree(1), 1) == []
    assert scene.answer(scene.agree(0), 0) == []
    assert scene.answer(scene.agree(2), 0) == [Verdict("r")]


def test_one_that_differs_fails_the_request_at_once_and_names_both() -> None:
    scene = Asking(num_reads=3)
    assert scene.answer(Verified("remote-r", 1, 2**64 - 1, incarnation="first"), 1) == [
        Verdict(
            "r",
            "verification failed: P rank 1, D rank 0: the digest of 64 bytes in 1 runs is 0xffffffffffffffff on P, "
            "0x0000000000000065 on D",
        )
    ]
    assert scene.verifications.poll() == []


def test_nothing_was_read_nothing_is_asked() -> None:
    scene = Asking()
    scene.verifications.start("other", REFERENCE, [])
    assert scene.verifications.poll() == [Verdict("other")]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            Refused("remote-r", RefusalReason.EXPIRED, "too late", incarnation="first"),
            "refused by engine P: expired: too late",
        ),
        (Verified("remote-r", 0, 100, incarnation="second"), "engine P restarted"),
        (Refused("remote-r", RefusalReason.NOT_READY, "", 0.1, incarnation="second"), "engine P restarted"),
        (Verified("remote-r", 1, 100, incarnation="first"), "engine P answered Verify 0 with Verified("),
        (Released("remote-r", incarnation="first"), "engine P answered Verify 0 with Released("),
    ],
)
def test_other_answers_fail_the_request(reply: Reply, reason: str) -> None:
    (verdict,) = Asking().answer(reply)
    assert verdict.reason is not None
    assert verdict.reason.startswith(f"verification failed: {reason}")


@pytest.mark.parametrize(
    ("reply", "pause_s"),
    [
        (Refused("remote-r", RefusalReason.NOT_READY, "soon", 0.5, incarnation="first"), 0.5),
        (PeerError("no answer"), RETRY_S),
        (WireError("rubbish"), RETRY_S),
    ],
)
def test_what_is_not_answered_yet_is_asked_again(reply: Reply | Exception, pause_s: float) -> None:
    scene = Asking()
    for _ in range(3):
        assert scene.answer(reply) == []
        scene.clock.advance(pause_s * 0.9)
        assert scene.verifications.poll() == []
        assert scene.caller.open() == []
        scene.clock.advance(pause_s * 0.2)
        assert scene.verifications.poll() == []
        assert scene.caller.only(Verify).request == scene.caller.calls[0].request
    assert scene.answer(scene.agree()) == [Verdict("r")]


def test_a_verification_ends_with_its_deadline_and_says_what_was_missing() -> None:
    scene = Asking(num_reads=2)
    scene.answer(scene.agree(0))
    scene.answer(Refused("remote-r", RefusalReason.NOT_READY, "not yet", 0.5, incarnation="first"))
    scene.clock.advance(VERIFY_TIMEOUT_S - 1e-3)
    assert scene.verifications.poll() == []
    scene.clock.advance(2e-3)
    reason = f"P did not confirm 1 digests within {VERIFY_TIMEOUT_S:g} s: not_ready: not yet"
    assert scene.verifications.poll() == [Verdict("r", f"verification failed: {reason}")]
    assert scene.verifications.poll() == []


def test_an_answer_that_came_with_the_deadline_counts() -> None:
    scene = Asking()
    scene.clock.advance(VERIFY_TIMEOUT_S)
    assert scene.answer(scene.agree()) == [Verdict("r")]


def test_a_long_request_asks_a_few_questions_at_a_time() -> None:
    scene = Asking(num_reads=MAX_ASKED + 5)
    assert len(scene.caller.open()) == MAX_ASKED
    assert scene.answer(scene.agree(0)) == []
    assert len(scene.caller.open()) == MAX_ASKED
    asked = {call.request.number for call in scene.caller.calls}
    assert asked == set(range(MAX_ASKED + 1))


def test_requests_are_decided_apart_from_each_other() -> None:
    scene = Asking()
    scene.verifications.start("other", REFERENCE, scene.reads)
    scene.verifications.poll()
    assert scene.answer(Verified("remote-r", 0, 5, incarnation="first"), 1)[0].request_id == "other"
    assert scene.answer(scene.agree()) == [Verdict("r")]
