"""The consumer's side of a hosted epoch: requests out, batches in, never a poll."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from aioloader._observe.stats import Counters
from aioloader._order.failures import noted
from aioloader._pipeline.describe import describe_wait
from aioloader._pipeline.home import wait_released, wait_released_async
from aioloader._pipeline.ready import Latch
from aioloader._pipeline.run import Run
from aioloader._pipeline.work import Outcome, Work
from aioloader.errors import BatchTimeoutError

_NOTHING: Final = object()


class HostedSource:
    """Feed a run with requests, and take its outcomes.

    The sampler is advanced here, while the consumer asks for a batch and never ahead
    of the window, so its random draws fall where torch's fall (the first, which may
    permute millions, beside an async consumer's loop). A request goes out when a batch
    is taken: the number of batches in flight never exceeds the window.

    Args:
        run: The pipeline; owned, and dismissed at the end.
        requests: Index batches, pulled as the window opens.
        window: How many batches may be in flight, told the first index batch.
        counters: Where batches and waits are counted.
        timeout: Seconds to wait for a batch, or None.
    """

    def __init__(
        self,
        run: Run,
        requests: Iterator[Any],
        window: Callable[[Any], int],
        counters: Counters,
        timeout: float | None,
    ) -> None:
        self.run: Final = run
        self._counters = counters
        self._requests = requests
        self._window_for = window
        self._window = 0
        self._timeout = timeout
        self._issued = 0
        self._taken = 0
        self._is_exhausted = False
        self._is_finished = False
        self._lock = threading.RLock()

    # -- next, for threads and for tasks ------------------------------------------

    def next(self) -> Any:
        """Return the next batch; block until it is there.

        Raises:
            StopIteration: At the end.
            BatchTimeoutError: If it did not come in time.
        """
        self._fill()
        while True:
            batch = self._take()
            if batch is not _NOTHING:
                return batch
            if self._is_finished:
                self.close()
                raise StopIteration
            began = time.perf_counter()
            came = self.run.ready.wait(self._timeout)
            self._count_wait(began, came=came)

    async def next_async(self) -> Any:
        """Return the next batch; suspend until it is there.

        Raises:
            StopAsyncIteration: At the end.
            BatchTimeoutError: If it did not come in time.
        """
        if not self._window and not self._is_finished:
            await self._fill_in_thread()
        self._fill()
        while True:
            batch = self._take()
            if batch is not _NOTHING:
                return batch
            if self._is_finished:
                await self.aclose()
                raise StopAsyncIteration
            began = time.perf_counter()
            came = await self.run.ready.wait_async(self._timeout)
            self._count_wait(began, came=came)

    # -- the end ------------------------------------------------------------------

    def close(self) -> None:
        """End the run and wait for it, at most ``GRACE`` seconds."""
        self._is_finished = True
        self.run.dismiss()
        wait_released(self.run.home, self.run)

    async def aclose(self) -> None:
        """End the run and wait for it without blocking the loop."""
        self._is_finished = True
        self.run.dismiss()
        await wait_released_async(self.run.home, self.run)

    # -- requests out -------------------------------------------------------------

    def _fill(self) -> None:
        """Issue requests until the window is full."""
        with self._lock:
            while not self._is_exhausted and (
                self._issued - self._taken < self._window or not self._window
            ):
                self._issue()

    async def _fill_in_thread(self) -> None:
        """Make the first request beside the loop: a sampler may permute millions."""
        filled = Latch()
        errors: list[BaseException] = []

        def fill() -> None:
            try:
                self._fill()
            except BaseException as error:  # of the sampler; raised by who waits
                errors.append(error)
            finally:
                filled.set()

        if self.run.home.cpu.post(fill):
            await filled.wait_async()
        if errors:
            raise errors.pop()

    def _issue(self) -> None:
        number = self._issued
        try:
            indices = next(self._requests)
            self._window = self._window or self._window_for(indices)
        except StopIteration:
            self._is_exhausted = True
            return
        except Exception as error:  # delivered in its turn
            self._is_exhausted = True
            self._issued += 1
            where = f"in the sampler, at batch {number}"
            self.run.ready.put(number, Outcome(error=noted(error, where)))
            return
        self._issued += 1
        self.run.submit(Work(number, indices))

    # -- outcomes in --------------------------------------------------------------

    def _take(self) -> Any:
        """Return a batch that is ready, or ``_NOTHING``; raise what came instead."""
        if self.run.home.is_foreign():
            raise RuntimeError(
                "an iterator does not survive a fork; make a new one in the child"
            )
        with self._lock:
            while not self._is_finished:
                try:
                    item = self.run.ready.pop_nowait()
                except BaseException:
                    self._is_finished = True
                    self.run.dismiss()
                    raise
                if item is None:
                    self._is_finished = self._is_exhausted and (
                        self._taken == self._issued
                    )
                    break
                self._taken += 1
                outcome = item[1]
                self._is_exhausted = self._is_exhausted or outcome.is_end
                self._fill()
                self._counters.in_flight = self._issued - self._taken
                self._is_finished = self._is_exhausted and not self._counters.in_flight
                if self._is_finished:
                    self.run.ready.finish()  # others may wait for what will not come
                if outcome.error is not None:
                    self._raise(outcome)
                if not outcome.is_end and not outcome.is_empty:
                    self._counters.batches += 1
                    return outcome.batch
            return _NOTHING

    def _raise(self, outcome: Outcome) -> None:
        error, outcome.error = outcome.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame: break the circle

    def _count_wait(self, began: float, *, came: bool) -> None:
        seconds = time.perf_counter() - began
        self._counters.waited += seconds
        if not came and self._timeout is not None:
            raise BatchTimeoutError(
                describe_wait(self.run, self._taken, self._timeout, seconds),
                timeout=self._timeout,
                batch=self._taken,
            )
