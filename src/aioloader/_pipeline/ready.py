"""The hand-over to the consumer: ordered, bounded by the window, woken, never polled.

Producers are threads and loops of the pipeline; the consumer is a task on any event
loop, or any thread. An item stays in the queue until it is taken, so that a cancelled
wait loses nothing.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from aioloader._order.reorder import Reorder
from aioloader._pipeline.work import Outcome
from aioloader.errors import LoaderClosedError


class Waiters:
    """Who waits for something to become true: tasks of any loop, and threads."""

    def __init__(self, is_true: Callable[[], bool]) -> None:
        self.lock = threading.RLock()  # a finalizer may come in between
        self._is_true = is_true
        self._wakes: deque[Callable[[], None]] = deque()

    def wake(self, count: int | None = None) -> None:
        """Wake ``count`` waiters (all, if None); called without the lock."""
        with self.lock:
            number = len(self._wakes) if count is None else count
            wakes = [
                self._wakes.popleft() for _ in range(min(number, len(self._wakes)))
            ]
        for wake in wakes:
            wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until woken; tell whether it was, within ``timeout`` s."""
        gate = threading.Lock()
        gate.acquire()
        if not self._enter(gate.release):
            return True
        try:
            woken = gate.acquire(timeout=-1 if timeout is None else timeout)
        except BaseException:
            self._leave(gate.release)
            raise
        return woken or not self._leave(gate.release)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend this task until woken; tell whether it was, within ``timeout`` s."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            call_threadsafe(loop, _resolve, woken)

        if not self._enter(wake):
            return True
        try:
            async with asyncio.timeout(timeout):
                await woken
        except TimeoutError:
            return not self._leave(wake)
        except BaseException:
            self._leave(wake)
            raise
        return True

    def _enter(self, wake: Callable[[], None]) -> bool:
        with self.lock:
            if self._is_true():
                return False
            self._wakes.append(wake)
            return True

    def _leave(self, wake: Callable[[], None]) -> bool:
        """Stop waiting; tell whether nobody had woken it. Else pass the wake on."""
        with self.lock:
            if wake in self._wakes:
                self._wakes.remove(wake)
                return True
        self.wake(1)
        return False


class Latch:
    """A one-way switch that threads and tasks can wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = Waiters(lambda: self._is_set)

    def is_set(self) -> bool:
        """Tell whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """Open for good, and wake all."""
        self._is_set = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until set; tell whether it is."""
        return self._waiters.wait(timeout)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend until set; tell whether it is."""
        return await self._waiters.wait_async(timeout)


class ReadyQueue:
    """Outcomes on their way to the consumer.

    Args:
        in_order: Deliver by number; else as they complete.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._reorder: Reorder[Outcome] = Reorder(in_order=in_order)
        self._items: deque[tuple[int, Outcome]] = deque()
        self._broken: BaseException | None = None
        self._is_finished = False
        self._waiters = Waiters(self._is_settled)
        self.wait = self._waiters.wait
        self.wait_async = self._waiters.wait_async

    def put(self, number: int, outcome: Outcome) -> None:
        """Add the outcome of request ``number``; from any thread."""
        with self._waiters.lock:
            released = self._reorder.accept(number, outcome)
            self._items.extend(released)
        if released:
            self._waiters.wake(len(released))

    def fail(self, error: BaseException) -> None:
        """Let every wait end with ``error`` once the items are gone."""
        self._broken = self._broken or error
        self._waiters.wake()

    def finish(self) -> None:
        """Let every wait end: there will be no more items."""
        self._is_finished = True
        self._waiters.wake()

    def _is_settled(self) -> bool:
        return bool(self._items) or self._is_finished or self._broken is not None

    def pop_nowait(self) -> tuple[int, Outcome] | None:
        """Take the next item, or None if there is none yet.

        Raises:
            BaseException: What ``fail`` was given, when nothing is left.
        """
        try:
            return self._items.popleft()
        except IndexError:
            error = self._broken
        if error is not None:
            # Raised once: an error that is kept keeps the frames of its traceback.
            self._broken = LoaderClosedError("the iterator has failed before")
            try:
                raise error
            finally:
                del error
        return None

    def __len__(self) -> int:
        return len(self._items)

    def held_back(self) -> int:
        """Return how many outcomes wait for an earlier one."""
        return self._reorder.held_back()


def call_threadsafe(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> bool:
    """Call on ``loop`` from anywhere; tell whether the loop was still open."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
