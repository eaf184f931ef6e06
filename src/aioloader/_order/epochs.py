"""Which epoch is next, and with which order: counted here, not by the samplers."""

import operator
from typing import Any, TypeAlias

from aioloader._order.permutation import ShuffledIndices

State: TypeAlias = tuple[int, int | None, int | None]


class Epochs:
    """Numbers the epochs of a loader, and moves its ``ShuffledIndices`` along.

    Args:
        sampler: The loader's sampler; only a ``ShuffledIndices`` is touched.
    """

    def __init__(self, sampler: Any) -> None:
        self.next = 0
        self._order = sampler if isinstance(sampler, ShuffledIndices) else None
        self._shuffled: int | None = None

    def begin(self) -> int:
        """Begin an epoch: return its number, and give it an order of its own."""
        number, self.next = self.next, self.next + 1
        if self._order is not None:
            # A new order each epoch, unless the user has chosen one.
            if self._order.epoch == self._shuffled:
                self._order.set_epoch(self._order.epoch + 1)
            self._shuffled = self._order.epoch
        return number

    def begin_again(self, number: int, order: int | None) -> None:
        """Begin an epoch that was begun before, with the order that it had then.

        Args:
            number: Of the epoch.
            order: The epoch of the ``ShuffledIndices``, if there is one.
        """
        self.next = number + 1
        if self._order is not None and order is not None:
            self._order.set_epoch(order)
            self._shuffled = order

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next; the user has seen to the sampler.

        Raises:
            TypeError: If it is no integer.
            ValueError: If it is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self.next = epoch
        self._shuffled = None

    def upcoming(self) -> int | None:
        """Return the epoch that the next ``begin`` gives the ``ShuffledIndices``."""
        if self._order is None:
            return None
        return self._order.epoch + (self._order.epoch == self._shuffled)

    def state(self) -> State:
        """Return what ``begin`` changes."""
        epoch = None if self._order is None else self._order.epoch
        return self.next, self._shuffled, epoch

    def restore(self, state: State) -> None:
        """Undo what happened since ``state`` was taken."""
        self.next, self._shuffled, epoch = state
        if self._order is not None and epoch is not None:
            self._order.set_epoch(epoch)
