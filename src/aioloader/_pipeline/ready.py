"""The queue of results between a pipeline and its consumer.

Threads and loops of the pipeline put results. The consumer is any thread, or a task on
any event loop; a cancelled wait loses nothing. Worker processes' results need no extra
thread. A waiting thread polls the workers' sockets, or a waiting task's loop watches
them, and the consumer reads the results that arrive.
"""

import asyncio
import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from aioloader._base.forks import fork_safe
from aioloader._base.waiting import LOOK_UP, Waiters
from aioloader._pipeline.batch_task import BatchResult
from aioloader.errors import LoaderClosedError

_NAP = 0.004  # seconds


class ResultReader:
    """Workers whose results the consumer reads while it waits."""

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that are readable when results have arrived."""
        return ()

    def collect(self) -> None:
        """Deliver the results that have arrived."""


class ReadyQueue(Waiters):
    """One iteration's results, in the order of their numbers or as they complete."""

    def __init__(
        self, *, in_order: bool, start: int = 0, without: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self.result_reader: ResultReader | None = None
        self._in_order = in_order
        self._next = start
        self._without = without  # numbers that are never put
        self._early: dict[int, BatchResult] = {}  # waiting for an earlier number
        self._items: deque[tuple[int, BatchResult]] = deque()
        self._error: BaseException | None = None
        self._is_over = False  # every wait ends
        self._is_closed = False
        # Whether results come quickly, several in a run. A wake-up for each costs
        # more than making it, so a consumer naps until the run is announced, or briefly
        # if the next result of the run takes long.
        self.is_quick = False
        self._is_napping = False

    def _is_true(self) -> bool:
        return bool(self._items) or self._is_over

    def put(self, number: int, result: BatchResult, *, wakes: bool = True) -> None:
        """Add the result of request ``number``, from any thread.

        Without ``wakes``, a napping consumer is not woken, and the caller must call
        ``announce`` after the last result of a run.
        """
        with self.lock:
            if self._is_closed:
                return
            if not self._in_order:
                self._items.append((number, result))
            else:
                self._early[number] = result
                while self._next in self._early or self._next in self._without:
                    if self._next not in self._without:
                        self._items.append((self._next, self._early.pop(self._next)))
                    self._next += 1
        if wakes or not self._is_napping:
            self.announce()

    def announce(self) -> None:
        """Wake as many waiting consumers as there are items."""
        if self._items and self._wakes:
            self.wake(len(self._items))

    def fail(self, error: BaseException) -> None:
        """End every wait; ``error`` is raised once the items are taken."""
        self._error = self._error or error
        self.finish()

    def finish(self) -> None:
        """End every wait, because there will be no more items."""
        self._is_over = True
        self.wake()

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Return the next item, or None; without items, raise the error of ``fail``."""
        if self.result_reader is not None and not self._items:
            self.collect()
        try:
            return self._items.popleft()
        except IndexError:
            if self._error is not None:
                self._raise_error()
        return None

    def _raise_error(self) -> None:
        """Raise ``fail``'s error once; from then on, a ``LoaderClosedError``."""
        error = self._error
        if error is not None:
            text = "the iterator has failed before; make a new one"
            self._error = LoaderClosedError(text)
            try:
                raise error
            finally:
                del error

    def close(self) -> None:
        """Drop present and later results, which may hold workers' memory."""
        with self.lock:
            self._is_closed = True
            self._items.clear()
            self._early.clear()

    def join(self) -> bool:
        """Wait, with a timeout, for the queue's threads; return whether they ended."""
        return True

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""
        return True

    def __len__(self) -> int:
        return len(self._items)

    def count_early(self) -> int:
        """Return how many results wait for a result with an earlier number."""
        return len(self._early)

    # Callers use these, not the result reader itself: frames of a traceback may hold
    # the queue, but must not hold the workers.

    def descriptors(self) -> Sequence[int]:
        """Return the result reader's descriptors, if there is one."""
        result_reader = self.result_reader
        return () if result_reader is None else result_reader.descriptors()

    def collect(self) -> None:
        """Have the result reader, if any, deliver the results that have arrived."""
        result_reader = self.result_reader
        if result_reader is not None:
            result_reader.collect()

    def wait(self, timeout: float | None = None) -> bool:
        if self.result_reader is None:
            return self._nap(timeout) or super().wait(timeout)
        with contextlib.closing(_Bell()) as bell:
            if not self._enter(bell.ring):
                return True
            try:
                is_true = self._poll_until(bell.fileno, timeout)
            except BaseException:
                self._leave(bell.ring)
                raise
            return not self._leave(bell.ring) or is_true

    def _poll_until(self, bell: int, timeout: float | None) -> bool:
        """Poll until results come or the bell rings; return False after a timeout."""
        left = math.inf if timeout is None else max(0.0, timeout)
        until = time.monotonic() + left
        while True:
            poll = select.poll()
            for descriptor in (bell, *self.descriptors()):
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(min(left, LOOK_UP) * 1000)
            self.collect()
            if self._is_true() or any(descriptor == bell for descriptor, _ in ready):
                return True
            left = max(0.0, until - time.monotonic())
            if not ready and not left:
                return False

    def wait_async(self, timeout: float | None = None) -> Coroutine[Any, Any, bool]:
        if self.result_reader is not None:
            return self._watch(timeout)
        may_nap = self._may_nap(timeout)
        return self._nap_async(timeout) if may_nap else super().wait_async(timeout)

    def _nap(self, timeout: float | None) -> bool:
        if not self._may_nap(timeout):
            return False
        self._is_napping = True
        try:
            return super().wait(_NAP)
        finally:
            self._is_napping = False

    def _may_nap(self, timeout: float | None) -> bool:
        return self.is_quick and (timeout is None or timeout > _NAP)

    async def _nap_async(self, timeout: float | None) -> bool:
        self._is_napping = True
        try:
            if await super().wait_async(_NAP):
                return True
        finally:
            self._is_napping = False
        return await super().wait_async(timeout)

    async def _watch(self, timeout: float | None) -> bool:
        """Wait while the loop watches the result reader's descriptors."""
        with _Watch(asyncio.get_running_loop(), self):
            return await super().wait_async(timeout)


class _Watch:
    """A context manager in which a loop watches a result reader's descriptors."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: ReadyQueue) -> None:
        self._loop = loop
        self._queue = queue
        self._watched: Sequence[int] = ()
        self._copies: list[int] = []

    def __enter__(self) -> None:
        self._watched = self._queue.descriptors()
        # Duplicates: if the originals are closed meanwhile, their numbers may be reused
        # while the loop still watches them.
        for descriptor in self._watched:
            with contextlib.suppress(OSError):  # just closed: nothing more comes
                self._copies.append(os.dup(descriptor))
        for copy in self._copies:
            self._loop.add_reader(copy, self._collect)

    def __exit__(self, *_exc: object) -> None:
        for copy in self._copies:
            self._loop.remove_reader(copy)
            os.close(copy)
        self._copies = []

    def _collect(self) -> None:
        self._queue.collect()
        if self._copies and self._queue.descriptors() != self._watched:
            self.__exit__()  # for example, a worker was replaced
            self.__enter__()


class _Bell:
    """A descriptor that wakes a thread from ``poll``."""

    def __init__(self) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it too

    def ring(self) -> None:
        """Wake the thread; do nothing once the bell is closed."""
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.fileno, 1)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            os.close(self.fileno)
