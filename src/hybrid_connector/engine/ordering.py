"""When has the device finished what was queued before? (invariants I5 and I6)

1. ``ComputeStream.mark`` notes the end of what is queued now.
2. ``Mark.has_passed`` asks, without waiting, whether the device got there.
3. ``StepFence`` turns one mark per engine step into "every step up to N has completed".
"""

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A point in a stream of device work."""

    def has_passed(self) -> bool:
        """Whether all work queued before the mark has completed. Never waits."""
        ...


class ComputeStream(Protocol):
    """The stream on which the engine computes."""

    def mark(self) -> Mark: ...


class _Passed:
    def has_passed(self) -> bool:
        return True


class HostStream:
    """A device that computes synchronously (CPU): everything queued has completed."""

    def mark(self) -> Mark:
        return _Passed()


class _CudaMark:
    def __init__(self, event: "torch.cuda.Event") -> None:
        self._event = event

    def has_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """The calling thread's current CUDA stream, which is the one the model runner computes on."""

    def __init__(self) -> None:
        import torch  # here, so that the engine's logic runs where torch is not installed

        self._new_event = torch.cuda.Event

    def mark(self) -> Mark:
        event = self._new_event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaMark(event)


def compute_stream(device: "torch.device") -> ComputeStream:
    """The compute stream of the device that holds the cache."""
    return CudaStream() if device.type == "cuda" else HostStream()


class StepFence:
    """Completed engine steps, from one mark recorded at the end of each."""

    def __init__(self, stream: ComputeStream) -> None:
        self._stream = stream
        self._pending: deque[tuple[int, Mark]] = deque()
        self._completed = -1

    def record(self, step: int) -> None:
        """All device work of ``step`` has been queued."""
        self._pending.append((step, self._stream.mark()))

    def completed_step(self) -> int:
        """The last step that has completed together with all before it; -1 before the first."""
        while self._pending and self._pending[0][1].has_passed():
            self._completed, _ = self._pending.popleft()
        return self._completed
