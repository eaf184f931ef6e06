"""Restore the order of requests among their results, or pass results as they come.

Pure and synchronous. Memory is bounded by the window of requests in flight.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Reorder(Generic[T]):
    """Hold back results that arrive early.

    Args:
        in_order: Release by number, or else at once.
        start: The first number.
        without: Later numbers that will not come.
    """

    def __init__(
        self,
        *,
        in_order: bool = True,
        start: int = 0,
        without: frozenset[int] = frozenset(),
    ) -> None:
        self.in_order = in_order
        self._next = start
        self._without = without
        self._early: dict[int, T] = {}

    def accept(self, number: int, result: T) -> list[tuple[int, T]]:
        """Take the result of request ``number``; return what may now be delivered."""
        if not self.in_order:
            return [(number, result)]
        self._early[number] = result
        released: list[tuple[int, T]] = []
        while self._next in self._early or self._next in self._without:
            if self._next not in self._without:
                released.append((self._next, self._early.pop(self._next)))
            self._next += 1
        return released

    def restart(self, number: int) -> None:
        """Expect ``number`` next; no result waits."""
        self._next = number

    def clear(self) -> None:
        """Drop the waiting results."""
        self._early.clear()

    def held_back(self) -> int:
        """Return how many results wait for an earlier one."""
        return len(self._early)
