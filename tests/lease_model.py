"""What can happen to two requests between one P and two readers on D, and what must hold whenever it has?

P has two blocks, computes requests in steps of which two may be in flight, and leases what it finished; its lease table
is the real one. D's readers ask, wait, read and give back over a network that delays and loses; their belief is the
real ``Hold``. Whatever either side may do in a state is an ``Op``; ``World.do`` does it and checks I2, I3 and I4.
Time passes by an op of its own. Paused is who takes no step; a state in which only the clock moved is one of these.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

from hybrid_connector.core.leases import Hold, LeaseGrant, LeaseRefusal, LeaseTable

LEASE_S = 2.0
NUM_BLOCKS = 2
MAX_STEPS_IN_FLIGHT = 2

Op = tuple[str, str]
"""What happens, and to which request or reader."""


class Stage(IntEnum):
    """Of a request on P, or a reader on D."""

    NEW = 0
    RUNNING = 1
    LEASED = 2
    ABORTED = 3
    WANTING = 4
    HELD = 5
    READING = 6
    LANDED = 7
    DONE = 8


@dataclass(frozen=True, slots=True)
class Computed:
    """A request on P. ``block``: the one it computes in. ``was_computed``: a step of it was scheduled."""

    stage: Stage = Stage.NEW
    block: int | None = None
    was_computed: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    verb: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    content: object


@dataclass(frozen=True, slots=True)
class Reader:
    """A request on D. ``src``: the block it was granted. ``dst``: the one it reads into.

    ``was_right``: the source held the request's state whenever it was read.
    """

    request: str
    stage: Stage = Stage.NEW
    hold: Hold | None = None
    src: int | None = None
    dst: int | None = None
    was_right: bool = True
    is_wanted: bool = True
    questions: tuple[Question, ...] = ()
    answers: tuple[Answer, ...] = ()

    @property
    def is_waiting(self) -> bool:
        return bool(self.questions or self.answers)


class World:
    """A state. Subclasses break one rule each."""

    table_class = LeaseTable

    def __init__(self, *requests_of_readers: str) -> None:
        self.table = self.table_class(LEASE_S)
        self.now = 0.0
        self.is_up = True
        self.is_paused = False
        self.num_steps = 0
        self.steps: tuple[tuple[tuple[int, str], ...], ...] = ()  # in flight: what each will write where
        self.memory: tuple[str | None, ...] = (None,) * NUM_BLOCKS
        self.free = frozenset(range(NUM_BLOCKS))
        self.computed = {name: Computed() for name in ("r1", "r2")}
        self.readers = {name: Reader(request) for name, request in zip("AB", requests_of_readers, strict=True)}
        self.free_on_d = frozenset({0, 1})

    def fork(self) -> "World":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.computed, twin.readers = self.computed.copy(), self.readers.copy()
        twin.table = object.__new__(type(self.table))
        twin.table.__dict__.update(
            {name: v.copy() if isinstance(v, (dict, list)) else v for name, v in vars(self.table).items()}
        )
        return twin

    def key(self) -> object:
        """Equal for states with the same futures: times are relative to now, what has run out is alike."""
        now, past, completed = self.now, self.now - LEASE_S, self.num_steps - len(self.steps) - 1
        return (
            tuple(
                (
                    lease.request_id,
                    lease.expires_at - now,
                    max(lease.seal_step - completed, 0),
                    lease.sealed,
                    lease.holder,
                    lease.withdrawn,
                )
                for lease in self.table._leases.values()
            ),
            tuple(self.table._ends.items()),
            tuple(self.table._ended),
            (self.is_up, self.is_paused, self.steps, self.memory, self.free, self.free_on_d),
            tuple((c.stage, c.block, c.was_computed) for c in self.computed.values()),
            tuple(
                (
                    (r.stage, r.src, r.dst, r.was_right, r.is_wanted),
                    None if r.hold is None else max(r.hold.expires_at - now, 0.0),
                    tuple((q.verb, max(q.asked_at, past) - now) for q in r.questions),
                    tuple((a.question.verb, max(a.question.asked_at, past) - now, a.content) for a in r.answers),
                )
                for r in self.readers.values()
            ),
        )

    # What can happen.

    def ops(self) -> Iterator[Op]:
        yield "wait", ""
        if self.is_up:
            yield from self._ops_of_p()
        for name, reader in self.readers.items():
            yield from ((verb, name) for verb in self._ops_of_reader(reader))
        if any(reader.is_wanted and reader.stage is not Stage.DONE for reader in self.readers.values()):
            yield "stop_d", ""

    def _ops_of_p(self) -> Iterator[Op]:
        yield from (("stop_p", ""), ("resume" if self.is_paused else "pause", ""))
        if any(computed.stage is Stage.LEASED for computed in self.computed.values()):
            yield "reset", ""
        if self.steps:
            yield "complete", ""
        if self.is_paused:
            return
        if len(self.steps) < MAX_STEPS_IN_FLIGHT:
            yield "step", ""
        for name, computed in self.computed.items():
            if computed.stage is Stage.NEW and self.free:
                yield "admit", name
            elif computed.stage is Stage.RUNNING:
                yield from (("preempt", name), ("abort", name))
                if computed.was_computed:
                    yield "finish", name

    def _ops_of_reader(self, reader: Reader) -> Iterator[str]:
        if reader.is_waiting:
            yield "lose"
        if reader.questions and self.is_up:
            yield "serve"
        if reader.answers:
            yield "hear"
        if not reader.is_wanted:
            if reader.stage is Stage.READING:
                yield "land"
            elif reader.stage is Stage.LANDED:
                yield "learn"
            return
        if reader.stage is not Stage.DONE:
            yield "give_up"
        match reader.stage:
            case Stage.NEW | Stage.WANTING if not reader.is_waiting:
                yield "acquire"
            case Stage.HELD if reader.hold is not None and reader.hold.is_valid(self.now) and self.free_on_d:
                yield "begin"
            case Stage.READING:
                yield "land"
            case Stage.LANDED:
                yield "learn"
        if reader.stage in (Stage.HELD, Stage.READING, Stage.LANDED) and not reader.is_waiting:
            yield "renew"

    def do(self, op: Op) -> None:
        getattr(self, f"do_{op[0]}")(*filter(None, op[1:]))
        self.check()

    def do_wait(self) -> None:
        self.now += 1.0

    # P.

    def do_admit(self, name: str) -> None:
        block = min(self.free)
        self.free -= {block}
        self.computed[name] = Computed(Stage.RUNNING, block)

    def do_preempt(self, name: str) -> None:
        """Its block goes to whoever comes next; a step in flight still writes it."""
        self._free_block(self.computed[name].block)
        self.computed[name] = Computed()

    def do_abort(self, name: str) -> None:
        self._free_block(self.computed[name].block)
        self.computed[name] = Computed(Stage.ABORTED)

    def do_step(self) -> None:
        self.take_ended()
        writes = []
        for name, computed in self.computed.items():
            if computed.stage is Stage.RUNNING and computed.block is not None:
                writes.append((computed.block, name))
                self.computed[name] = replace(computed, was_computed=True)
        self.steps += (tuple(writes),)
        self.num_steps += 1

    def do_complete(self) -> None:
        memory = list(self.memory)
        for block, name in self.steps[0]:
            memory[block] = name
        self.memory, self.steps = tuple(memory), self.steps[1:]
        self.table.seal(self.num_steps - len(self.steps) - 1)

    def do_finish(self, name: str) -> None:
        computed = self.computed[name]
        self.computed[name] = replace(computed, stage=Stage.LEASED)
        self.table.open(name, "t", ((computed.block,),), 1, self.seal_step(name), self.now)

    def seal_step(self, name: str) -> int:
        in_flight = any(name == written for step in self.steps for _, written in step)
        return self.num_steps - 1 if in_flight else -1

    def do_pause(self) -> None:
        self.is_paused = True

    def do_resume(self) -> None:
        self.is_paused = False

    def do_reset(self) -> None:
        self.table.withdraw_all(self.now)

    def do_stop_p(self) -> None:
        self.is_up = False
        self.table.expire_all()
        self.take_ended()

    def take_ended(self) -> None:
        self.table.expire(self.now)
        for name, _ in self.table.take_ended():
            computed = self.computed[name]
            assert computed.stage is Stage.LEASED, f"I4: {name} was handed back twice"
            self._free_block(computed.block)
            self.computed[name] = Computed(Stage.DONE)

    def _free_block(self, block: int | None) -> None:
        assert block is not None
        assert block not in self.free, "I4: freed twice"
        self.free |= {block}

    # D.

    def do_acquire(self, name: str) -> None:
        self._ask(name, "acquire", stage=Stage.WANTING)

    def do_renew(self, name: str) -> None:
        self._ask(name, "renew")

    def _ask(self, name: str, verb: str, **changes: object) -> None:
        reader = self.readers[name]
        self.readers[name] = replace(reader, questions=(*reader.questions, Question(verb, self.now)), **changes)

    def do_lose(self, name: str) -> None:
        reader = self.readers[name]
        if reader.answers:
            self.readers[name] = replace(reader, answers=reader.answers[1:])
        else:
            self.readers[name] = replace(reader, questions=reader.questions[1:])

    def do_serve(self, name: str) -> None:
        reader = self.readers[name]
        question = reader.questions[0]
        answer = getattr(self.table, question.verb)(reader.request, "t", name, self.now)
        answers = (*reader.answers, Answer(question, answer))
        self.readers[name] = replace(reader, questions=reader.questions[1:], answers=answers)

    def do_hear(self, name: str) -> None:
        reader = self.readers[name]
        answer, reader = reader.answers[0], replace(reader, answers=reader.answers[1:])
        self.readers[name] = reader
        if not reader.is_wanted or answer.question.verb == "release":
            return
        if answer.question.verb == "acquire":
            self._hear_acquire(name, reader, answer)
        elif isinstance(answer.content, LeaseRefusal):
            self.readers[name] = replace(reader, hold=None)
            if reader.stage is Stage.HELD:
                self.do_give_up(name)
        elif reader.hold is not None and reader.hold.is_valid(self.now):  # one that ran out stays broken
            self.readers[name] = replace(reader, hold=self.believe(answer))

    def _hear_acquire(self, name: str, reader: Reader, answer: Answer) -> None:
        if isinstance(answer.content, LeaseGrant):
            hold = self.believe(answer)
            if hold.is_valid(self.now):
                ((src,),) = answer.content.block_ids
                self.readers[name] = replace(reader, stage=Stage.HELD, hold=hold, src=src)
        elif answer.content is not LeaseRefusal.NOT_SEALED:
            self.do_give_up(name)

    def believe(self, answer: Answer) -> Hold:
        return Hold.since(answer.question.asked_at, LEASE_S)

    def do_begin(self, name: str) -> None:
        reader = self.readers[name]
        dst = min(self.free_on_d)
        self.free_on_d -= {dst}
        self.readers[name] = replace(reader, stage=Stage.READING, dst=dst, was_right=self._is_right(reader))

    def do_land(self, name: str) -> None:
        reader = self.readers[name]
        was_right = reader.was_right and self._is_right(reader)
        # From a P that is gone nothing arrives: the read fails, which nobody takes for a success.
        hold = reader.hold if self.is_up else None
        self.readers[name] = replace(reader, stage=Stage.LANDED, was_right=was_right, hold=hold)

    def _is_right(self, reader: Reader) -> bool:
        return reader.src is not None and self.memory[reader.src] == reader.request

    def do_learn(self, name: str) -> None:
        """D's scheduler hears of the end of a read; it counts if the promise has not run out."""
        reader = self.readers[name]
        if self.is_loaded(reader):
            assert reader.was_right, "I2: stale bytes"
        assert reader.dst is not None
        self.free_on_d |= {reader.dst}
        self.readers[name] = replace(reader, dst=None)
        self._give_back(name)

    def is_loaded(self, reader: Reader) -> bool:
        return reader.is_wanted and reader.hold is not None and reader.hold.is_valid(self.now)

    def do_give_up(self, name: str) -> None:
        """The request is aborted, or has lost its lease: what is in flight is seen through first."""
        reader = self.readers[name]
        self.readers[name] = replace(reader, is_wanted=False)
        if reader.stage not in (Stage.READING, Stage.LANDED):
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        self._ask(name, "release", stage=Stage.DONE, is_wanted=False, hold=None)

    def do_stop_d(self) -> None:
        for name, reader in self.readers.items():
            if reader.is_wanted and reader.stage is not Stage.DONE:
                self.do_give_up(name)

    # What must hold.

    def check(self) -> None:
        for name, reader in self.readers.items():
            if reader.hold is not None and reader.hold.is_valid(self.now) and self.is_up:
                computed = self.computed[reader.request]
                assert computed.stage is Stage.LEASED, f"I2: {name} holds what was handed back"
                assert (computed.block, self._is_right(reader)) == (reader.src, True), f"I2: {name} holds stale bytes"
            if reader.stage is Stage.READING:
                assert reader.dst is not None
                assert reader.dst not in self.free_on_d, f"I3: {name}'s block was given back under its read"
        in_use = [reader.dst for reader in self.readers.values() if reader.dst is not None]
        assert sorted([*in_use, *self.free_on_d]) == [0, 1], "I3: a block has two owners, or none"
        owned = [c.block for c in self.computed.values() if c.block is not None]
        assert sorted([*owned, *self.free]) == list(range(NUM_BLOCKS)), "I4: a block has two owners, or none"

    def check_end(self) -> None:
        """Whatever was leased is handed back, once nobody asks any more."""
        self.now += 2 * LEASE_S
        if self.is_up:
            self.take_ended()
        assert not any(c.stage is Stage.LEASED for c in self.computed.values()), "I4: a lease never ends"
        assert self.table.take_ended() == [], "I4: an end is told twice"


@dataclass(slots=True)
class Exploration:
    """``num_histories``: those of full length. ``num_by_verb``: transitions that were checked, by what happened."""

    num_histories: int = 0
    num_states: int = 0
    num_by_verb: Counter[str] = field(default_factory=Counter)


def explore(start: World, path: tuple[Op, ...], depth: int) -> Exploration:
    """Every history that follows ``path`` for some of its ops, or none, and then does any ``depth`` ops.

    A state that several histories lead to is gone on from once, and counts as many.
    """
    layer: dict[object, tuple[World, int]] = {start.key(): (start, 1)}
    for op in path:
        assert op in tuple(start.ops()), op
        start = start.fork()
        start.do(op)
        layer[start.key()] = start, 1
    found = Exploration(num_states=len(layer))
    for _ in range(depth):
        following: dict[object, tuple[World, int]] = {}
        for world, num_histories in layer.values():
            for op in world.ops():
                then = world.fork()
                then.do(op)
                found.num_by_verb[op[0]] += 1
                key = then.key()
                known, number = following.get(key, (then, 0))
                following[key] = known, number + num_histories
        for world, _ in following.values():
            world.fork().check_end()
        layer = following
        found.num_states += len(layer)
    found.num_histories = sum(number for _, number in layer.values())
    return found
