"""The consumer's side of a hosted epoch: requests out, batches in, never a poll."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aioloader._observe.stats import Counters
from aioloader._order.epoch import Epoch
from aioloader._order.failures import noted
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.cpu import beside
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.release import wait_released, wait_released_async
from aioloader._pipeline.timeouts import awaited, describe_wait
from aioloader.errors import BatchTimeoutError, LoaderClosedError

_NOTHING: Final = object()


@dataclass(frozen=True)
class Window:
    """How many batches may be in flight.

    Attributes:
        size: Told the first index batch, returns their number.
        is_lazy: Whether a batch is only begun while its consumer waits for it.
    """

    size: Callable[[Any], int]
    is_lazy: bool = False


@dataclass(frozen=True)
class Patience:
    """How long a consumer waits.

    Attributes:
        timeout: Seconds to wait for a batch, or None.
        restarts: Whether a worker that holds up a batch is then replaced, once a batch.
    """

    timeout: float | None = None
    restarts: bool = False


class PipelineIterator:
    """Feed a run with requests, and take its results.

    The sampler is advanced here, while the consumer asks for a batch and never ahead
    of the window, so its random draws fall where torch's fall (the first, which may
    permute millions, beside an async consumer's loop). A request goes out when a batch
    is taken: the number of batches in flight never exceeds the window.

    Args:
        run: The pipeline; owned, and dismissed at the end.
        epoch: What is to be delivered; its requests are pulled as the window opens.
        window: How many batches may be in flight, and when.
        counters: Where batches and waits are counted.
        patience: How long to wait for a batch, and what happens then.
    """

    def __init__(
        self,
        run: Pipeline,
        epoch: Epoch,
        window: Window,
        counters: Counters,
        patience: Patience,
    ) -> None:
        self.run: Final = run
        self._ready: Final = run.stage or run.ready
        self.counters = counters
        self._requests = epoch.requests()
        self._progress = epoch.progress
        self._dropped = epoch.dropped()
        self._turns = epoch.turns
        self._numbers: deque[int] = deque()  # issued, and not yet taken
        self._next = epoch.bookmark.done
        self._is_cut = False
        self._window_for = window.size
        self._window = 0
        self._is_lazy = window.is_lazy
        self._timeout = patience.timeout
        self._restarts = patience.restarts
        self._restarted: BatchTask | None = None
        self._is_begun = False
        self._issued = 0
        self._taken = 0
        self._is_exhausted = False
        self._is_finished = False
        self._lock = threading.RLock()
        # Called for each batch that is taken when there is nothing more to request.
        self.when_exhausted: Callable[[], None] | None = None

    # -- next, for threads and for tasks ------------------------------------------

    def next(self) -> Any:
        """Return the next batch; block until it is there.

        Raises:
            StopIteration: At the end.
            BatchTimeoutError: If it did not come in time.
        """
        if not self._is_begun and not self._is_finished:
            self._begin()
        self._fill()
        while True:
            batch = self._take()
            if batch is not _NOTHING:
                return batch
            if self._is_finished:
                self._finish()
                self.close()
                raise StopIteration
            began = time.perf_counter()
            came = self._ready.wait(self._timeout)
            waited = self._count_wait(began)
            if not came:
                self._time_out(waited)

    async def next_async(self) -> Any:
        """Return the next batch; suspend until it is there.

        Raises:
            StopAsyncIteration: At the end.
            BatchTimeoutError: If it did not come in time.
        """
        if not self._is_begun and not self._is_finished:
            await beside(self._begin)  # a sampler may permute millions
        self._fill()
        while True:
            batch = self._take()
            if batch is not _NOTHING:
                return batch
            if self._is_finished:
                self._finish()
                await self.aclose()
                raise StopAsyncIteration
            began = time.perf_counter()
            came = await self._ready.wait_async(self._timeout)
            waited = self._count_wait(began)
            if not came and self.run.pool is not None:
                await beside(partial(self._time_out, waited))
            elif not came:
                self._time_out(waited)

    def is_finished(self) -> bool:
        """Tell whether there is no more to come."""
        return self._is_finished

    def open(self, *, fills: bool) -> None:
        """Start the workers, before anybody has asked for a batch.

        Args:
            fills: Whether to issue the first requests, which may draw a permutation.
        """
        self.run.open()
        if fills:
            self._fill()

    def issue(self) -> None:
        """Issue one request, before anybody has asked for a batch."""
        with self._lock:
            self.run.open()
            if self._may_issue(self._issued):
                self._issue()

    # -- the end ------------------------------------------------------------------

    def close(self) -> None:
        """End the run and wait for it, at most ``GRACE`` seconds."""
        self._is_finished = True
        self.run.dismiss()
        wait_released(self.run.host, self.run)

    async def aclose(self) -> None:
        """End the run and wait for it without blocking the loop."""
        self._is_finished = True
        self.run.dismiss()
        await wait_released_async(self.run.host, self.run)

    # -- requests out -------------------------------------------------------------

    def _begin(self) -> None:
        """Make the first requests, and wait for what is not the user's to start."""
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
            self.run.open()
            self._fill()
        if self.run.pool is not None:
            self.run.pool.wait_up()

    def _fill(self) -> None:
        """Issue requests until the window is full."""
        with self._lock:
            while self._may_issue(self._issued - self._taken):
                self._issue()

    def _may_issue(self, in_flight: int) -> bool:
        if self._is_exhausted or not self._window:
            return not self._is_exhausted
        is_free = self._turns is None or self._turns.may_issue(self._window)
        return is_free and in_flight < self._window

    def _issue(self) -> None:
        try:
            batch = next(self._requests)
            self._window = self._window or self._window_for(batch.indices)
        except StopIteration:
            self._is_exhausted = True
            return
        except Exception as error:  # delivered in its turn
            self._is_exhausted = self._is_cut = True
            self._note(self._next)
            where = f"in the sampler, at batch {self._next}"
            self.run.ready.put(self._next, BatchResult(error=noted(error, where)))
            return
        self._note(batch.number)
        self._next = batch.number + 1
        try:
            self.run.submit(self.run.maker.task(batch))
        except BaseException:  # Ctrl-C: nobody has this batch, and none may wait for it
            self.run.fail(LoaderClosedError("the loader was interrupted; begin anew"))
            raise

    def _note(self, number: int) -> None:
        self._issued += 1
        self._numbers.append(number)

    # -- results in --------------------------------------------------------------

    def _take(self) -> Any:
        """Return a batch that is ready, or ``_NOTHING``; raise what came instead."""
        if self.run.host.is_foreign():
            raise RuntimeError(
                "an iterator does not survive a fork; make a new one in the child"
            )
        with self._lock:
            while not self._is_finished:
                item = self._pop()
                if item is None:
                    self._is_finished = self._is_exhausted and (
                        self._taken == self._issued
                    )
                    break
                self._taken += 1
                result = self._noted(*item)
                if result.attempted or result.failures:
                    self.run.count(result)
                self._is_exhausted = self._is_exhausted or self._is_end(result)
                self._go_on()
                self.counters.in_flight = self._issued - self._taken
                if result.is_empty:
                    self._fill()  # its consumer goes on waiting
                self._is_finished = self._is_exhausted and self._taken == self._issued
                if self._is_finished:
                    self._ready.finish()  # others may wait for what will not come
                if result.error is not None:
                    self._raise(result)
                if not result.is_end and not result.is_empty:
                    self.counters.batches += 1
                    return result.batch
            return _NOTHING

    def _is_end(self, result: BatchResult) -> bool:
        return result.is_end or (self._turns is not None and self._turns.are_over())

    def _pop(self) -> tuple[int, BatchResult] | None:
        try:
            return self._ready.pop_nowait()
        except BaseException:
            self._is_finished = True
            self.run.dismiss()
            raise

    def _noted(self, number: int, result: BatchResult) -> BatchResult:
        """Note that an result was taken; return what its consumer is to see."""
        self._numbers.remove(number)
        if result.error is not None:
            self._progress.fail(number, result.state)
        elif result.is_end:
            self._progress.end(number, result.state)
        else:
            self._progress.take(number, result.state)
        if self._turns is not None:
            self._turns.take(number, has_ended=result.has_ended)
            if result.has_ended:
                self._progress.end_reader(number)
        if result.dataset is not None:
            self._progress.leave(*result.dataset)
        if number in self._dropped:
            return BatchResult(is_empty=True, is_end=result.is_end)
        return result

    def _finish(self) -> None:
        """Note that the epoch is over, unless it was only closed."""
        is_over = self._is_exhausted and self._taken == self._issued
        if is_over and not self._is_cut:
            self._progress.finish()

    def _go_on(self) -> None:
        """Put something else in flight, in place of what has been taken."""
        if not self._is_lazy:
            self._fill()
        if self._is_exhausted and self.when_exhausted is not None:
            self.when_exhausted()

    def _raise(self, result: BatchResult) -> None:
        error, result.error = result.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame: break the circle

    def _count_wait(self, began: float) -> float:
        seconds = time.perf_counter() - began
        self.counters.waited += seconds
        return seconds

    def _time_out(self, waited: float) -> None:
        """Restart who holds up the batch, if that is wanted and was not done before.

        Raises:
            BatchTimeoutError: Else.
        """
        number = self._numbers[0] if self._numbers else self._next
        task = awaited(self.run, number)
        is_new = task is not None and task is not self._restarted
        if self._restarts and is_new and self.run.pool is not None and task is not None:
            self._restarted = task
            if self.run.pool.restart(task):
                return
        assert self._timeout is not None
        raise BatchTimeoutError(
            describe_wait(self.run, number, self._timeout, waited),
            timeout=self._timeout,
            batch=number,
        )
