"""Which measured points does no other point beat? Both axes are better where larger."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def frontier(items: Sequence[T], place: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other item beats: is at least as large on both axes and larger on one. By the first axis.

    ``place``: an item's two coordinates. Items in one place do not beat each other; all of them are kept.
    """
    kept: list[T] = []
    highest = float("-inf")
    reached_at = float("-inf")
    # From the right, the higher of equals first: what is not above everything so far is beaten by it.
    for item in sorted(items, key=place, reverse=True):
        x, y = place(item)
        if y > highest or (x, y) == (reached_at, highest):
            kept.append(item)
            reached_at, highest = x, y
    return kept[::-1]
