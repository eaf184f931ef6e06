"""States of a map-style dataset's copies in worker processes, where it has a state.

Batch k is for worker k modulo the number of workers, as in torch, so that what a copy
has read, and with it its state, depends on nothing else. Pure and synchronous.
"""

from typing import Any


class Copies:
    """What state the copy of each worker is in, in case that the worker dies."""

    def __init__(self) -> None:
        self._left: dict[int, Any] = {}  # by worker: the latest that was sent
        self._lost: set[int] = set()  # workers whose successors have not begun

    def note(self, worker: int, left: tuple[int, Any] | None) -> None:
        """Note a result, and what state its batch has left the copy in."""
        self._lost.discard(worker)
        if left is not None:
            self._left[worker] = left[1]

    def lose(self, worker: int) -> None:
        """Note that a worker has died: its successor has a copy as it was at first."""
        self._lost.add(worker)

    def lost_by(self, worker: int) -> tuple[Any] | None:
        """Return the state that the successor of a dead worker is to begin in."""
        is_known = worker in self._lost and worker in self._left
        return (self._left[worker],) if is_known else None
