"""The consumer's side of a pipeline: requests out, batches in, never a poll."""

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable  # noqa: TC003  (an annotation of an attribute)
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

from aioloader._observe.records import Counters, RecordTuple, is_clocked
from aioloader._order.epoch import Epoch
from aioloader._order.forks import fork_safe
from aioloader._order.indices import IndexBatch
from aioloader._order.raising import raisable
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.cpu import in_new_thread
from aioloader._pipeline.host import wait_released, wait_released_async
from aioloader._pipeline.pipeline import HOP, Pipeline
from aioloader._pipeline.timeouts import awaited, describe_wait
from aioloader.errors import BatchTimeoutError, LoaderClosedError

_NOTHING: Final = object()
# Seconds after which a task that never waits gives the other tasks of its loop a turn.
_TURN = 0.001
_MOST_PER_HOP = 64
_NAP = 2 * HOP


def refuse_blocking() -> NoReturn:
    """Refuse a plain ``for`` in the thread of the loop that makes its batches.

    Raises:
        RuntimeError: It would wait forever.
    """
    raise RuntimeError(
        "loop='caller' hosts coroutines on the loop that iterates, and a plain `for` "
        "would block it: use `async for`, or loop='thread'"
    )


@dataclass(frozen=True)
class Window:
    """How many batches may be in flight.

    Attributes:
        batches: Their number; with ``samples``, the number on top of those being read.
        samples: How many samples to have in flight, whatever the batch sizes; 0: only
            batches count.
        is_lazy: Whether a batch only starts while its consumer waits for it.
        per_hop: Whether more may be in flight if they are made fast, so that a hop to
            their thread makes several.
        most: Upper limit on batches in flight.
    """

    batches: int
    samples: int = 0
    is_lazy: bool = False
    per_hop: bool = False
    most: int = sys.maxsize

    def in_all(self, in_flight: int, samples: int) -> int:
        """Return the limit on batches, given the sizes of those in flight."""
        size = samples / in_flight if samples else 1
        return min(self.most, self.batches + math.ceil(self.samples / size))

    def is_low(self, in_flight: int, samples: int) -> bool:
        """Tell whether it is time for more requests.

        The batches of a hop are requested together, when the previous ones are nearly
        used up. With one request at a time, the thread would contend for the GIL with
        a consumer that frees tensors, which releases the GIL.
        """
        return not self.per_hop or self.is_open(in_flight, samples, 0)

    def is_open(self, in_flight: int, samples: int, seconds: float) -> bool:
        """Tell whether another batch may be requested.

        Args:
            in_flight: Batches requested and not yet delivered.
            samples: Their samples.
            seconds: Time to make one of them; 0 if not known.
        """
        if in_flight >= self.most:
            return False
        batches = self.batches
        if self.per_hop and seconds:
            batches += min(_MOST_PER_HOP, int(HOP / seconds))
        if in_flight < batches:
            return True
        return (in_flight - batches) * samples < self.samples * in_flight


@dataclass(frozen=True)
class Patience:
    """How long a consumer waits.

    Attributes:
        timeout: Seconds to wait for a batch, or None.
        restarts: Whether a worker that delays a batch is then replaced, once per batch.
    """

    timeout: float | None = None
    restarts: bool = False


class PipelineIterator:
    """Feed a pipeline with requests and take its results.

    The sampler advances here, while the consumer asks for a batch and never beyond the
    window, so it draws when torch's would (the first draw, which may permute millions,
    runs off an async consumer's loop). A request goes out when a batch is delivered:
    the number of batches in flight never exceeds the window.

    Args:
        pipeline: Makes the batches; owned, and dismissed at the end.
        epoch: The epoch to deliver; its requests are drawn as the window opens.
        window: How many batches may be in flight, and when.
        patience: How long to wait for a batch, and what happens then.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        epoch: Epoch,
        window: Window,
        patience: Patience,
    ) -> None:
        self.pipeline: Final = pipeline
        self._ready: Final = pipeline.stage or pipeline.ready
        self.counters: Counters = epoch.counters
        self._records = epoch.counters.records
        self._asked = 0.0  # when the consumer asked for its batch
        self._requests = epoch.requests()
        self._epoch = epoch
        self._progress = epoch.progress
        self._dropped = epoch.dropped()
        self._turns = epoch.turns
        self._next = epoch.bookmark.done
        self._tuner = pipeline.tuner
        self._window = window if self._tuner is None else self._tuner.begin(window)
        self._timeout = patience.timeout
        self._restarts = patience.restarts
        self._restarted: BatchTask | None = None
        self._has_started = self._reads_ahead = False
        # Batches requested and not yet delivered: number to samples.
        self._in_flight: dict[int, int] = {}
        self._samples = 0
        self._is_exhausted = False  # there is nothing more to request
        self._is_cut = False  # cut short by an error of the sampler
        self._is_finished = False
        self._turn = 0.0  # when other tasks of the consumer's loop last had a turn
        self._lock = fork_safe(threading.RLock())
        # Called for each delivered batch when there is nothing more to request.
        self.when_exhausted: Callable[[], None] | None = None

    # -- next, for threads and for tasks ------------------------------------------

    def next(self) -> Any:
        """Return the next batch; block until it is there.

        Raises:
            StopIteration: At the end.
            BatchTimeoutError: If it is not there in time.
        """
        self._asked = time.perf_counter()
        if not self._has_started and not self._is_finished:
            self._begin()
        elif not self._reads_ahead:
            self._read_ahead()
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
            came = self._wait()
            waited = self._count_wait(began)
            if not came:
                self._time_out(waited)

    async def next_async(self) -> Any:
        """Return the next batch; suspend until it is there.

        Raises:
            StopAsyncIteration: At the end.
            BatchTimeoutError: If it is not there in time.
        """
        now = time.perf_counter()
        if now - self._turn > _TURN:  # not with a batch in hand: a cancel would lose it
            self._turn = now
            await asyncio.sleep(0)
        self._asked = now
        if not self._has_started and not self._is_finished:
            await self._begin_async()
        elif not self._reads_ahead:
            self._read_ahead()
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
            self.pipeline.host.check_loop()
            came = await self._wait_async()
            self._turn = time.perf_counter()
            waited = self._count_wait(began)
            if not came:
                await in_new_thread(partial(self._time_out, waited))

    def _wait(self) -> bool:
        """Block until there is a result; tell whether it came in time.

        Raises:
            RuntimeError: If this thread runs the loop that makes it.
        """
        if self.pipeline.host.is_on_loop():
            refuse_blocking()
        if self._naps():
            with self.pipeline.ready.napping() as ready:
                if ready.wait(_NAP) or len(ready):
                    return True
        return self._ready.wait(self._limit())

    async def _wait_async(self) -> bool:
        """Suspend until there is a result; tell whether it came in time."""
        if self._naps():
            with self.pipeline.ready.napping() as ready:
                if await ready.wait_async(_NAP) or len(ready):
                    return True
        return await self._ready.wait_async(self._limit())

    def _limit(self) -> float | None:
        """Return how long to wait now, in seconds; None: without a limit."""
        return None if self._timeout is None else float(self._timeout)

    def _naps(self) -> bool:
        """Tell whether to wait for the batches of a whole hop.

        Waking up for each would cost more than making it. No batch waits for longer
        than two hops.
        """
        is_quick = 0 < self.pipeline.seconds_per_batch < HOP
        return self._window.per_hop and is_quick and self.pipeline.stage is None

    def is_finished(self) -> bool:
        """Tell whether there are no more batches."""
        return self._is_finished

    def open(self, *, fills: bool) -> None:
        """Start the workers before the first batch is requested.

        Args:
            fills: Whether to issue the first requests, which may draw a permutation.
        """
        self.pipeline.open()
        if fills:
            self._fill()

    def issue(self) -> None:
        """Issue one request before the consumer asks for a batch."""
        with self._lock:
            self.pipeline.open()
            if not self._is_exhausted and self._may_issue(len(self._in_flight)):
                self._issue()

    # -- the end ------------------------------------------------------------------

    def dismiss(self) -> None:
        """Start ending; ``close`` and ``aclose`` wait for it."""
        self._is_finished = True
        self.counters.in_flight = 0
        self.pipeline.dismiss()

    def close(self) -> None:
        """End the pipeline and wait for it, at most ``GRACE`` seconds."""
        self.dismiss()
        pipeline = self.pipeline
        try:
            wait_released(pipeline.host, pipeline.ended, pipeline)
        finally:
            if pipeline.ended.is_set():
                pipeline.drop_pool()

    async def aclose(self) -> None:
        """End the pipeline and wait for it without blocking the loop."""
        self.dismiss()
        pipeline = self.pipeline
        try:
            await wait_released_async(pipeline.host, pipeline.ended, pipeline)
        finally:
            if pipeline.ended.is_set():
                pipeline.drop_pool()

    # -- requests out -------------------------------------------------------------

    def _begin(self) -> None:
        """Issue the first requests; wait for workers, which ``timeout`` excludes."""
        with self._lock:
            if self._has_started:
                return
            self._has_started = True
            self.pipeline.open()
            self._fill()
        if self.pipeline.pool is not None:
            self.pipeline.pool.wait_up()

    async def _begin_async(self) -> None:
        """Issue the first requests, in the thread if a long permutation is drawn."""
        if self.pipeline.pool is None and self._epoch.begins_quickly():
            self._begin()
        else:
            begin = partial(self.pipeline.run_in_context, self._begin)
            # If the thread has ended, the pipeline has failed or was closed.
            with contextlib.suppress(LoaderClosedError):
                await self.pipeline.host.cpu.call(begin)

    def _read_ahead(self) -> None:
        """Read past the first batch: the consumer has asked for more."""
        self._reads_ahead = True
        self.pipeline.read_ahead()

    def _fill(self) -> None:
        """Issue requests until the window is full."""
        with self._lock:
            if not self._window.is_low(len(self._in_flight), self._samples):
                return
            while not self._is_exhausted and self._may_issue(len(self._in_flight)):
                self._issue()

    def _may_issue(self, in_flight: int) -> bool:
        window = self._window
        if self._turns is not None:
            in_all = window.in_all(in_flight, self._samples)
            if not self._turns.may_issue(in_all):
                return False
        seconds = self.pipeline.seconds_per_batch
        return window.is_open(in_flight, self._samples, seconds)

    def _issue(self) -> None:
        try:
            batch = next(self._requests)
        except StopIteration:
            self._is_exhausted = True
            return
        except (KeyboardInterrupt, SystemExit):  # the order cannot be continued
            self._interrupt()
            raise
        except BaseException as error:  # delivered in order
            self._is_exhausted = self._is_cut = True
            self._in_flight[self._next] = 0
            self.pipeline.ready.put(self._next, BatchResult(error=error))
            return
        self._send(batch)

    def _send(self, batch: IndexBatch, *, again: bool = False) -> None:
        """Send one request out; ``again``: for samples of a stream's beginning."""
        size = len(batch.indices) if self._window.samples else 0
        self._in_flight[batch.number] = size
        self._samples += size
        self._next = batch.number + 1
        try:
            task = self.pipeline.maker.task(batch)
            task.again = again
            self.pipeline.submit(task)
        except BaseException:  # Ctrl-C: this batch will not come: let nobody wait
            self._interrupt()
            raise

    def _interrupt(self) -> None:
        self._is_exhausted = self._is_cut = True
        text = "the loader was interrupted; start a new iteration"
        self.pipeline.fail(LoaderClosedError(text))

    # -- results in -----------------------------------------------------------------

    def _take(self) -> Any:
        """Return a ready batch, or ``_NOTHING``; raise its error if it failed."""
        if self.pipeline.host.is_foreign():
            raise RuntimeError(
                "an iterator does not survive a fork; make a new one in the child"
            )
        with self._lock:
            while not self._is_finished:
                item = self._pop()
                if item is None:
                    self._is_finished = self._is_over()
                    break
                number, result = item
                self._account(number, result)
                self._is_finished = self._is_over()
                if self._is_finished:
                    self._ready.finish()  # other consumers may be waiting
                is_wanted = number not in self._dropped
                is_error = result.error is not None
                is_delivered = is_wanted and not (
                    is_error or result.is_empty or result.is_end
                )
                self.counters.batches += is_delivered
                if is_delivered:
                    self._records.append(self._record(number, result))
                    if is_clocked(number):
                        self.counters.weigh(result.batch)
                # Last: an interrupt after this would lose the batch, and user code,
                # such as the sampler, has run before.
                self._note(number, result)
                if is_error and is_wanted:
                    self._raise(result)
                if is_delivered:
                    return result.batch
            return _NOTHING

    def _is_over(self) -> bool:
        """Tell whether nothing is under way and nothing more will be requested."""
        return self._is_exhausted and not self._in_flight

    def _record(self, number: int, result: BatchResult) -> RecordTuple:
        taken = time.perf_counter()
        return number, self._asked, taken, result.lane, result.size, result.made

    def _pop(self) -> tuple[int, BatchResult] | None:
        try:
            return self._ready.pop_nowait()
        except BaseException:
            self.dismiss()
            raise

    def _account(self, number: int, result: BatchResult) -> None:
        """Count a delivered result and issue new requests in its place."""
        self._samples -= self._in_flight.pop(number)
        if self._tuner is not None:
            waited = self.counters.waited
            self._window = self._tuner.note_batch(result.batch, self._window, waited)
        if result.attempted or result.failures:
            self.pipeline.count(result)
        if self._turns is not None:
            self._turns.take(number, has_ended=result.has_ended)
        is_over = self._turns is not None and self._turns.are_over()
        self._is_exhausted = self._is_exhausted or result.is_end or is_over
        is_nothing = result.is_empty or number in self._dropped
        if is_nothing or not self._window.is_lazy:  # otherwise its consumer still waits
            self._fill()
        if self._is_exhausted and self.when_exhausted is not None:
            self.when_exhausted()
        self.counters.in_flight = len(self._in_flight)

    def _note(self, number: int, result: BatchResult) -> None:
        """Note that a result was delivered."""
        progress = self._progress
        if result.dataset is not None:
            progress.leave(*result.dataset)
        if result.error is not None:
            progress.fail(number, result.state)
        elif result.is_end:
            progress.end(number, result.state)
        else:
            progress.take(number, result.state)
        if self._turns is not None and result.has_ended:  # no batch came with it
            progress.end_reader(number)

    def _finish(self) -> None:
        """Note that the epoch is over, unless it was only closed."""
        if self._is_exhausted and not self._in_flight and not self._is_cut:
            self._progress.finish()

    def _raise(self, result: BatchResult) -> None:
        error, result.error = result.error, None
        try:
            if error is not None:
                raise raisable(error, "user code")
        finally:
            del error  # the traceback holds this frame: break the cycle

    def _count_wait(self, began: float) -> float:
        seconds = time.perf_counter() - began
        self.counters.waited += seconds
        return seconds

    def _time_out(self, waited: float) -> None:
        """Restart the worker that delays the batch, once, if ``on_timeout`` says so.

        Raises:
            BatchTimeoutError: Otherwise.
        """
        pipeline = self.pipeline
        number = next(iter(self._in_flight), self._next)
        task = awaited(pipeline, number)
        is_new = task is not None and task is not self._restarted
        if self._restarts and is_new and pipeline.pool is not None and task is not None:
            self._restarted = task
            if pipeline.pool.restart(task):
                return
        assert self._timeout is not None
        raise BatchTimeoutError(
            describe_wait(pipeline, number, self._timeout, waited),
            timeout=self._timeout,
            batch=number,
        )
