"""When is a step over? Only when the device has passed its mark, and those of all steps before."""

import itertools
from types import SimpleNamespace

import pytest

from hybrid_connector.engine.ordering import HostStream, Mark, StepFence, compute_stream

from fakes import Stream


class SwitchedStream:
    """Marks that pass when the test says so, in any order: more than a device may do."""

    def __init__(self) -> None:
        self.passed: list[bool] = []

    def mark(self) -> Mark:
        index = len(self.passed)
        self.passed.append(False)
        return SimpleNamespace(has_passed=lambda: self.passed[index])


def test_nothing_has_completed_before_the_first_step() -> None:
    fence = StepFence(HostStream())
    assert fence.completed_step() == -1
    fence.record(0)
    assert fence.completed_step() == 0


def test_a_step_completes_with_the_work_queued_before_its_mark() -> None:
    stream = Stream()
    fence = StepFence(stream)
    seen = []
    for step in range(3):
        stream.queue()
        stream.queue()
        fence.record(step)
    for _ in range(6):
        seen.append(fence.completed_step())
        stream.run(1)
    assert seen == [-1, -1, 0, 0, 1, 1]
    assert fence.completed_step() == 2
    stream.queue()
    assert fence.completed_step() == 2


def test_steps_without_work_complete_at_once_but_not_before_others() -> None:
    stream = Stream()
    fence = StepFence(stream)
    fence.record(0)
    assert fence.completed_step() == 0
    stream.queue()
    fence.record(1)
    fence.record(2)
    assert fence.completed_step() == 0
    stream.run()
    assert fence.completed_step() == 2


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_only_completed_prefixes_are_reported(order: tuple[int, ...]) -> None:
    stream = SwitchedStream()
    fence = StepFence(stream)
    steps = (3, 4, 7, 8)  # vLLM may leave out some
    for step in steps:
        fence.record(step)
    last = -1
    for index in order:
        stream.passed[index] = True
        prefix = list(itertools.takewhile(bool, stream.passed))
        assert fence.completed_step() == (steps[len(prefix) - 1] if prefix else -1)
        assert fence.completed_step() >= last
        last = fence.completed_step()
    assert last == 8


def test_a_passed_step_is_not_asked_again() -> None:
    stream = SwitchedStream()
    fence = StepFence(stream)
    fence.record(0)
    stream.passed[0] = True
    assert fence.completed_step() == 0
    stream.passed[0] = False  # no device takes a mark back; a pool of events might
    assert fence.completed_step() == 0


def test_a_host_computes_before_it_returns() -> None:
    assert isinstance(compute_stream(SimpleNamespace(type="cpu")), HostStream)  # type: ignore[arg-type]
    assert HostStream().mark().has_passed()
