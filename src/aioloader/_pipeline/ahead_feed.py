"""The feed that reads ahead, by keeping batches in flight in a pipeline."""

import asyncio
import contextlib
import sys
import threading
import time
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Final, NoReturn

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread, stack_of
from aioloader._base.retry import last_error
from aioloader._base.warnings import warn
from aioloader._order.epoch import Epoch
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask, Window
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.plain import INTERRUPTS, NOTHING, YIELD_AFTER, Feed
from aioloader._pipeline.runner import GRACE, wait_released, wait_released_async
from aioloader.errors import BatchTimeoutError, LoaderClosedError
from aioloader.protocols import Kind


def refuse_blocking() -> NoReturn:
    """Raise ``RuntimeError`` for a plain ``for`` on the loop that makes its batches."""
    raise RuntimeError(
        "loop='caller' hosts coroutines on the loop that iterates, and a plain `for` "
        "would block it: use `async for`, or loop='thread'"
    )


class AheadFeed(Feed):
    """A feed that keeps a window of batches in flight, in a pipeline that it owns.

    The sampler advances only in the consumer's steps. If workers read, a user's sampler
    stays in the window and draws random numbers in the same steps as in torch. For an
    async consumer, a thread fills the first window if that may take long.

    If the next batch takes longer than ``timeout`` seconds, ``BatchTimeoutError`` is
    raised. If ``restarts``, the batch's worker is first replaced, once per batch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        epoch: Epoch,
        window: Window,
        *,
        timeout: float | None = None,
        restarts: bool = False,
    ) -> None:
        super().__init__(epoch)
        self.pipeline: Final = pipeline
        self._results: Final = pipeline.stage or pipeline.ready
        self._asked = 0.0  # when the consumer's step began
        self._tuner = pipeline.tuner
        self._window = window if self._tuner is None else self._tuner.begin(window)
        self._timeout = timeout
        self._restarts = restarts
        self._restarted: BatchTask | None = None
        self._has_started = self._reads_ahead = False
        # The sample counts of batches requested but not yet delivered, by batch number.
        self._in_flight: dict[int, int] = {}
        self._samples = 0  # the sum of these counts
        self._low = sys.maxsize  # with fewer batches in flight, more are requested
        self._is_exhausted = False  # there is nothing more to request
        self._is_aborted = False  # ends early: an interrupt, or the sampler failed
        self._repeats = False  # the requests repeat samples of a stream's beginning

    # -- next, for threads and for tasks ------------------------------------------

    def poll(self) -> Any:
        self._asked = perf_counter()
        if not self._has_started or self._asked - self._yielded > YIELD_AFTER:
            return NOTHING
        self._read_ahead()
        return self._take()

    def next(self) -> Any:
        self._asked = perf_counter()
        if self._has_started or self.is_finished:
            self._read_ahead()
        else:
            self.open()
            self._has_started = True
        while (batch := self._take()) is NOTHING:
            if self.is_finished:
                self._finish()
                self.close()
                self.epoch.check_failures()
                raise StopIteration
            if self.pipeline.runner.is_on_loop():
                refuse_blocking()
            began = perf_counter()
            came = self._results.wait(self._limit())
            waited = perf_counter() - began
            self.counters.waited += waited
            if not came:
                self._time_out(waited)
        return batch

    async def next_async(self) -> Any:
        self._asked = perf_counter()
        if self._asked - self._yielded > YIELD_AFTER:
            self._yielded = self._asked
            await asyncio.sleep(0)  # before a batch is taken: a cancel would lose it
        if self._has_started or self.is_finished:
            self._read_ahead()
        else:
            if self.pipeline.pool is None and not self.epoch.draws_slowly(self._next):
                self.open()
            else:  # in the thread: this waits for workers, or draws a long permutation
                cpu = self.pipeline.runner.cpu
                begin = partial(self.pipeline.context.copy().run, self.open)
                # If the thread has ended, the pipeline has failed or was closed.
                with contextlib.suppress(LoaderClosedError):
                    await in_thread(begin, executor=cpu, abandon_on_cancel=True)
            self._has_started = True
        while (batch := self._take()) is NOTHING:
            if self.is_finished:
                self._finish()
                await self.aclose()
                self.epoch.check_failures()
                raise StopAsyncIteration
            self.pipeline.runner.check_loop()
            began = perf_counter()
            came = await self._results.wait_async(self._limit())
            self._yielded = perf_counter()
            waited = self._yielded - began
            self.counters.waited += waited
            if not came:
                await in_thread(self._time_out, waited, executor=CpuThread.once())
        return batch

    def _limit(self) -> float | None:
        """Return this wait's timeout in seconds, or None if there is no limit."""
        return None if self._timeout is None else float(self._timeout)

    # -- requests -----------------------------------------------------------------

    def open(self, *, requests: bool = True) -> None:
        """Start the workers; if ``requests``, fill the window. Idempotent."""
        with self._lock:
            self.pipeline.open()
            if requests:
                self._fill()

    def _read_ahead(self) -> None:
        """End the first batch's head start; fill a window that is lazy or empty."""
        if not self._reads_ahead:
            self._reads_ahead = True
            self.pipeline.read_ahead()
        # Other windows were filled when the latest batch was delivered.
        if self._window.is_lazy or not self._in_flight:
            self._fill()

    def _fill(self, most: int = sys.maxsize) -> None:
        """Request up to ``most`` batches, until the window is full.

        Fast batches are requested in runs, each when the previous run is nearly used
        up. With one request at a time, the thread that makes the batches would contend
        with the consumer for the GIL.
        """
        with self._lock:
            run: list[BatchTask] = []
            try:
                while len(run) < most and (room := self._room()):
                    if not self._request(min(room, most - len(run)), run):
                        break
                if run:
                    self.pipeline.submit(run)
            except BaseException:  # Ctrl-C: these batches may never come
                self._abort()
                raise

    def _room(self) -> int:
        """Return how many more batches to request; set the refill level ``_low``."""
        if self._is_exhausted:
            return 0
        window, turns, in_flight = self._window, self._turns, len(self._in_flight)
        limit, one_by_one = window.batches, turns is not None
        if window.samples:  # assuming batches as large as those in flight
            held, ahead = self._samples, window.samples * in_flight
            limit += -(-ahead // held) if held else window.samples
            one_by_one |= not held or self.epoch.order.size is None
        run_size = self.pipeline.run_size if window.runs else 0
        has_pool = self.pipeline.pool is not None  # workers must not run out of tasks
        self._low = limit + has_pool * run_size // 2 if run_size else sys.maxsize
        limit = min(limit + run_size, window.most)
        if turns is not None and not turns.may_issue(limit):
            return 0
        room = max(0, limit - in_flight)
        return min(room, 1) if one_by_one else room

    def _request(self, count: int, run: list[BatchTask]) -> bool:
        """Add up to ``count`` tasks to ``run``; return False if fewer were drawn."""
        began, stop = perf_counter(), len(run) + count
        try:
            for request in islice(self._requests, count):
                size = len(request.indices) if self._window.samples else 0
                self._in_flight[request.number] = size
                self._samples += size
                self._next = request.number + 1
                task = self.pipeline.maker.task(request)
                task.again = self._repeats
                run.append(task)
        except (KeyboardInterrupt, SystemExit):  # the order cannot be continued
            raise
        except BaseException as error:  # delivered after earlier batches
            self._is_aborted = True
            self._in_flight[self._next] = 0
            self.pipeline.ready.put(self._next, BatchResult(error=error))
        seconds = perf_counter() - began
        self._drawn += seconds
        self.counters.drawn += seconds
        self.counters.waited += seconds
        self._is_exhausted = len(run) < stop
        return not self._is_exhausted

    # -- results ------------------------------------------------------------------

    def _take(self) -> Any:
        """Return the next batch, or ``NOTHING`` if none is ready; raise its error."""
        if self.pipeline.runner.is_foreign():
            raise RuntimeError(
                "an iterator does not survive a fork; make a new one in the child"
            )
        with self._lock:
            while not self.is_finished:
                item, is_lost = self._pop(), True
                try:
                    if item is not None:
                        self._account(*item)
                    if self._is_exhausted and not self._in_flight:
                        self._end()
                    if item is None:
                        break
                    # Last, after user code such as the sampler: an interrupt after this
                    # would lose the batch.
                    number, result = item
                    is_lost = result.error is None
                    if self._accept(number, result, self._asked, perf_counter()):
                        return result.batch
                except BaseException:
                    if is_lost:
                        self._abort()
                    raise
            return NOTHING

    def _pop(self) -> tuple[int, BatchResult] | None:
        """Return the next number and result; None if none is ready or after the end."""
        try:
            item: tuple[int, BatchResult] | None = self._results.pop_nowait()
        except BaseException as error:
            if self.is_finished and isinstance(error, LoaderClosedError):
                return None
            self.dismiss()
            self._was_interrupted = isinstance(error, INTERRUPTS)
            _stop_at_exit(error)
            raise
        return item

    def _abort(self) -> None:
        """End early, because a request or result was lost; later steps raise."""
        self._is_exhausted = self._is_aborted = True
        self.dismiss()
        self._was_interrupted = True

    def _account(self, number: int, result: BatchResult) -> None:
        """Remove ``number`` from ``_in_flight``, and request batches if needed."""
        self._samples -= self._in_flight.pop(number)
        if self._tuner is not None:
            waited = self.counters.waited - self.counters.drawn
            self._window = self._tuner.note_batch(result.batch, self._window, waited)
        if result.attempted or result.failures:
            self.pipeline.count(result)
        if self._turns is not None:
            self._turns.take(number, has_ended=result.has_ended)
        self._is_exhausted = self._is_exhausted or result.is_end
        # Without a batch, the consumer of a lazy window still waits.
        is_nothing = result.is_empty or number in self._dropped
        is_low = len(self._in_flight) < self._low
        if is_low and (is_nothing or not self._window.is_lazy):
            self._fill()
        self.counters.in_flight = len(self._in_flight)

    def _end(self) -> None:
        """Finish after the last result, if the feed was aborted or may end."""
        if self._is_aborted or self._may_end():
            self.is_finished = True
            self._results.finish()  # other consumers may be waiting

    def _may_end(self) -> bool:
        return True

    # -- the end ------------------------------------------------------------------

    def _finish(self) -> None:
        """Mark the epoch as over if all of it was delivered; raise if interrupted."""
        self._check()
        if self._is_exhausted and not (self._in_flight or self._is_aborted):
            self._progress.is_over = True

    def dismiss(self) -> None:
        self.is_finished, self._was_interrupted = True, False
        self.counters.in_flight = 0
        self.pipeline.dismiss()

    def close(self) -> None:
        self.dismiss()
        pipeline = self.pipeline
        try:
            wait_released(pipeline.runner, pipeline.ended, pipeline)
        finally:
            if pipeline.ended.is_set():
                pipeline.drop_pool()

    async def aclose(self) -> None:
        self.dismiss()
        pipeline = self.pipeline
        try:
            await wait_released_async(pipeline.runner, pipeline.ended, pipeline)
        finally:
            if pipeline.ended.is_set():
                pipeline.drop_pool()

    def abandon(self) -> None:
        """End the pipeline in the background; at Python's exit, wait for its end."""
        pipeline = self.pipeline
        runner = pipeline.runner
        if threading.main_thread().is_alive():
            pipeline.abandon()
            return
        if pipeline.ended.is_set() or runner.is_foreign():  # a child has no threads
            return
        pipeline.dismiss()
        # The interpreter is exiting. The threads must end first, or requests in flight
        # would run in a half-finalized process.
        if not hasattr(sys, "last_value"):  # an uncaught error may hold the iterator
            warn(
                "a DataLoader was left open until the interpreter's exit; close its "
                "iterator, or iterate inside `with loader:` or `async with loader:`",
                ResourceWarning,
            )
        pipeline.ended.wait(GRACE)
        if runner.is_released() and runner.closed.wait(GRACE):
            runner.join()
        if pipeline.stage is not None:
            pipeline.stage.join()
        if pipeline.pool is not None and not pipeline.pool.has_result_reader:
            pipeline.join()  # threads of this process

    # -- timeouts -----------------------------------------------------------------

    def _time_out(self, waited: float) -> None:
        """Replace the worker that delays the batch, or raise ``BatchTimeoutError``."""
        pipeline, pool = self.pipeline, self.pipeline.pool
        number = next(iter(self._in_flight), self._next)
        # If batches come unordered, the oldest task counts as the awaited one.
        task = min(
            (task for task, _ in list(pipeline.under_way.values())),
            key=lambda task: (task.number < number, task.number),
            default=None,
        )
        if self._restarts and pool and task and task is not self._restarted:
            self._restarted = task
            if pool.restart(task):
                return
        assert self._timeout is not None
        progress = ["is not under way"]
        if task is not None:
            number, progress = task.number, _progress(pipeline, task)
        text = f"DataLoader timed out after {self._timeout} seconds: batch {number}"
        queues = (
            f"queues: {len(pipeline.under_way)} batches under way, "
            f"{len(pipeline.ready)} ready, {pipeline.ready.count_early()} waiting for "
            f"an earlier one; waited {waited:.2f} s"
        )
        lines = [f"{text} {progress[0]}", queues, *progress[1:], last_error()]
        raise BatchTimeoutError(
            "\n".join(filter(None, lines)), timeout=self._timeout, batch=number
        )


def _stop_at_exit(error: BaseException) -> None:
    """Block a daemon thread at Python's exit on a ``LoaderClosedError``."""
    is_late = threading.current_thread().daemon and isinstance(error, LoaderClosedError)
    if is_late and not threading.main_thread().is_alive():
        threading.Event().wait()


def _progress(pipeline: Pipeline, task: BatchTask) -> list[str]:
    """Return lines on the stage of a batch, with the stack of the code that makes it.

    A worker process may need a second to send its stack.
    """
    maker, stage, now = pipeline.maker, task.stage, time.monotonic()
    if pipeline.pool is not None and stage == "pool":
        return [pipeline.pool.explain(task)]
    since = pipeline.under_way.get(id(task), (task, now))[1]
    lines = [f"has been in stage {stage!r} for {now - since:.2f} s"]
    if stage == "fetch":
        pairs = zip(task.indices, task.samples, strict=False)
        missing = [index for index, sample in pairs if sample is MISSING]
        missing += task.indices[len(task.samples) :]
        if missing:
            lines[0] += f", {len(missing)} samples missing, first index {missing[0]!r}"
    is_on_loop = {
        "fetch": maker.reads_async or maker.kind is Kind.ASYNC_ITERABLE,
        "transform": maker.transforms_async,
        "collate": maker.collates_async,
    }
    stack = stack_of(pipeline.runner.cpu.ident())
    if stack and not is_on_loop.get(stage):
        lines.append(f"the loader's thread is at:\n{stack}")
    return lines
