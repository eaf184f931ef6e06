"""The queue to the consumer: ordered, bounded by the window, never polled.

Producers are threads and loops of the pipeline; the consumer is a task on any event
loop, or any thread. An item stays in the queue until it is taken, so that a cancelled
wait loses nothing.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeAlias

from aioloader._order.reorder import Reorder
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.pumping import Pump, PumpingWaiters
from aioloader._pipeline.waiting import Waiters
from aioloader.errors import LoaderClosedError

Items: TypeAlias = deque[tuple[int, BatchResult]]


class ReadyQueue:
    """Results on their way to the consumer.

    Args:
        in_order: Deliver by number, or else as they complete.
        start: The first number.
        without: Later numbers that will not come.
        pump: The pump for the consumer to operate while it waits, or None.
    """

    def __init__(
        self,
        *,
        in_order: bool,
        start: int = 0,
        without: frozenset[int] = frozenset(),
        pump: Pump | None = None,
    ) -> None:
        self._reorder: Reorder[BatchResult] = Reorder(
            in_order=in_order, start=start, without=without
        )
        items: Items = deque()
        self._items = items
        self._broken: BaseException | None = None
        ends = self._ends = list[None]()  # not empty: every wait ends
        self._is_closed = False
        self._naps = False  # whether the consumer wakes soon by itself
        self._pump = pump

        is_settled = self._settled(items, ends)
        self._waiters = (
            Waiters(is_settled) if pump is None else PumpingWaiters(is_settled, pump)
        )
        self.wait: Callable[..., bool] = self._waiters.wait
        self.wait_async: Callable[..., Coroutine[Any, Any, bool]] = (
            self._waiters.wait_async
        )

    def _settled(self, items: Items, ends: list[None]) -> Callable[[], bool]:
        """Return what tells that a wait ends; it must not refer to the queue."""
        return lambda: bool(items or ends)

    def put(self, number: int, result: BatchResult, *, more: bool = False) -> None:
        """Add the result of request ``number``, from any thread.

        Args:
            number: The request's number.
            result: Its result.
            more: Whether more results follow at once: a ``napping`` consumer is only
                woken by the last one, or by its timeout.
        """
        with self._waiters.lock:
            if self._is_closed:
                return
            self._items.extend(self._reorder.accept(number, result))
            is_quiet = more and self._naps
        if self._items and not is_quiet:
            self._waiters.wake(len(self._items))

    @contextlib.contextmanager
    def napping(self) -> Iterator["ReadyQueue"]:
        """Wake the consumer only with the last of several results."""
        self._naps = True
        try:
            yield self
        finally:
            self._naps = False

    def fail(self, error: BaseException) -> None:
        """End every wait with ``error`` once the items are taken."""
        self._broken = self._broken or error
        self._ends.append(None)
        self._waiters.wake()

    def finish(self) -> None:
        """End every wait: there will be no more items."""
        self._ends.append(None)
        self._waiters.wake()

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item, or None if there is none yet.

        Raises:
            BaseException: The error given to ``fail``, when nothing is left.
        """
        if not self._items and self._pump is not None:
            self._pump.collect()
        try:
            return self._items.popleft()
        except IndexError:
            self._raise_broken()
        return None

    def _raise_broken(self) -> None:
        """Raise the error given to ``fail``, once: its traceback would keep frames."""
        error = self._broken
        if error is not None:
            self._broken = LoaderClosedError("the iterator has failed before")
            try:
                raise error
            finally:
                del error

    def restart(self, number: int) -> None:
        """Expect ``number`` next; nothing is under way."""
        self._reorder.restart(number)

    def close(self) -> None:
        """Drop ready and later results: they may hold workers' memory."""
        with self._waiters.lock:
            self._is_closed = True
            self._items.clear()
            self._reorder.clear()

    def drop_pump(self) -> None:
        """Release the pump: the consumer is gone."""
        self._pump = None
        self._waiters.drop_pump()

    def join(self) -> bool:
        """Wait, bounded, for threads of its own; return whether they have ended."""
        return True

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""
        return True

    def __len__(self) -> int:
        return len(self._items)

    def held_back(self) -> int:
        """Return how many results wait for an earlier one."""
        return self._reorder.held_back()
