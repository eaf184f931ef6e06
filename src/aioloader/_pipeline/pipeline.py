"""One iteration on its host: takes requests, makes batches, closes.

Coroutines are awaited on the host's loop; plain code runs in the host's thread; worker
pools make whole batches, or transform and collate samples that were read here.
"""

import asyncio
import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioloader._observe.records import LISTED, NOT_MADE, Listed
from aioloader._order.epoch import BEGINNING, Bookmark
from aioloader._order.failures import Failure
from aioloader._order.raising import ends_task
from aioloader._pipeline.awaiting import SideLoop
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.fetcher_pool import FetcherPool
from aioloader._pipeline.host import Host
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.roles import Pool, Stage
from aioloader._pipeline.stream import AsyncStream, SyncStream
from aioloader._pipeline.waiting import Latch, call_threadsafe, context_elsewhere
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

if TYPE_CHECKING:
    from aioloader._pipeline.tuner import Tuner

# Batches made within this many seconds are delivered together.
HOP = 0.002


class Pipeline:
    """The stages of one iteration, on their host.

    It holds no reference to the iterator that feeds it, so that the iterator can be
    collected; the iterator's finalizer then dismisses the pipeline.

    Args:
        maker: The user's functions.
        host: Where it runs; the pipeline owns one lease from the start.
        in_order: Deliver batches by number, or else as they complete.
        bookmark: Where the epoch is resumed.
        pool: The workers that make batches, or transform and collate what was read
            here; None if all of that is done here.
        sink: Takes the results instead of ``ready``.
        make_ready: Makes ``ready``.
        head_start: Whether the first batch is read a moment before the others.
        tuner: Changes the maker's ``concurrency`` if the loader chooses it.
    """

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        maker: BatchMaker,
        host: Host,
        *,
        in_order: bool,
        bookmark: Bookmark = BEGINNING,
        pool: Pool | None = None,
        sink: Callable[[BatchTask, BatchResult], None] | None = None,
        make_ready: Callable[..., ReadyQueue] = ReadyQueue,
        head_start: bool = False,
        tuner: "Tuner | None" = None,
    ) -> None:
        self.bookmark = bookmark
        # A stream makes batches again that were delivered beyond the position.
        without = bookmark.beyond if maker.kind is Kind.MAP else frozenset[int]()
        self.ready: ReadyQueue = make_ready(
            in_order=in_order,
            start=bookmark.done,
            without=without,
            pump=pool.pump if pool else None,
        )
        self.maker = maker
        self.host = host
        if host.loop is not None:
            maker.side_loop = SideLoop(host.loop)
        self.pool = pool
        self.stage: Stage | None = None
        self.under_way: dict[int, tuple[BatchTask, float]] = {}
        self.ended: Latch = Latch()
        self.exit_error: BaseException | None = None
        self.reads_here: bool = maker.reads and not (pool is not None and pool.reads)
        # Worker processes have copies of the dataset, with their own states.
        is_here = pool is None or not pool.reads or pool.pump is None
        self._keeps_state = maker.keeps_state and is_here
        self._sink = sink
        self._head_start = head_start
        self.tuner = tuner
        if tuner is not None:
            tuner.ready = self.ready
        self.listed: Listed = Listed()
        self.seconds_per_batch: float = 0.0  # of batches made in the thread
        self._is_closing = self._is_dismissed = self._is_abandoned = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = asyncio.Event()
        self._fetchers: FetcherPool | None = None
        # Steps to take on the loop, and whether a call for them is scheduled.
        self._arriving: deque[tuple[Callable[[BatchTask], None], BatchTask]] = deque()
        self._is_called = False
        self._to_pull: asyncio.Queue[BatchTask] = asyncio.Queue()
        self._stream: SyncStream | None = None
        self._async_stream: AsyncStream | None = None
        # Plain code sees the context variables of its consumer.
        self._context = context_elsewhere()
        resume = bookmark.states.get(0)
        if maker.kind is Kind.ITERABLE:
            self._stream = SyncStream(maker, resume=resume, keys=maker.seeds())
        elif maker.kind is Kind.ASYNC_ITERABLE:
            self._async_stream = AsyncStream(maker, resume=resume)
        host.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def open(self) -> None:
        """Prepare for the first request; may take long."""
        if self.pool is not None:
            self.pool.open(self)

    def submit(self, task: BatchTask) -> None:
        """Take a request; its result goes into ``ready``."""
        self.under_way[id(task)] = (task, time.monotonic())
        if self.reads_here and self._async_stream is not None:
            self._on_loop(self._to_pull.put_nowait, task)
        elif self.reads_here and self.maker.reads_async:
            self._on_loop(self._read_on_loop, task)
        elif self.reads_here:
            self._in_thread(self._read_here, task)
        elif self.pool is not None:
            self._into_pool(task)
        else:
            self._advance(task)

    def read_ahead(self) -> None:
        """Read past the first batch: the consumer has asked for more."""
        if self._head_start and self.reads_here and self.host.loop is not None:
            call_threadsafe(self.host.loop, self._read_ahead)

    def dismiss(self) -> None:
        """Start ending, from any thread or finalizer; sets ``ended`` when done."""
        if not self._is_dismissed:
            self._is_closing = True
            self._bell.put(None)  # ends pauses
            self.maker.close()
            self.ready.close()
            self.host.dismiss(self)
            if self.stage is not None:
                self.stage.stop()
            self._is_dismissed = True  # last: an interrupt may come before

    def abandon(self) -> None:
        """Start ending, and drop the workers: nobody will wait for them.

        Frames of a traceback may hold this pipeline for long, but must not hold its
        workers.
        """
        self._is_abandoned = True
        self.dismiss()

    def run_in_context(self, job: Callable[[], Any]) -> Any:
        """Run plain code with the consumer's context variables, in any thread."""
        return self._context.copy().run(job)

    # -- for the host -------------------------------------------------------------

    async def main(self) -> None:
        """Host the fetchers and the reader of a stream, until dismissed."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._host(stack)
        except BaseException as error:  # raised by the iterator's close or next step
            if ends_task(error):
                raise
            if self._is_closing:
                self.exit_error = error
            else:
                self.fail(error)
        finally:
            self._is_closing = True
            if self._stream is not None:
                self.host.cpu.post(self._close_stream)
            self._release_pool()  # its loop may have ended before its iterator
            self.maker.close()
            self.fail(LoaderClosedError("the iterator was closed"))

    async def _host(self, stack: contextlib.AsyncExitStack) -> None:
        LISTED.set(self.listed)  # the tasks of the fetchers have this context
        fetchers = FetcherPool(
            self.maker.concurrency,
            self.maker,
            self._next_step,
            head_start=self._head_start,
            tuner=self.tuner,
        )
        if self.host.watch is not None:
            stack.enter_context(self.host.watch.reading())
        try:
            self._fetchers = fetchers
            if self._async_stream is not None:
                fetchers.spawn(self._read_stream(self._async_stream, stack))
            self._arrive()
            await self._closing.wait()
        finally:
            self._fetchers = None
            self._arriving.clear()  # they refer to this pipeline
            await fetchers.aclose()

    def end(self) -> None:
        """Release everything this pipeline holds; runs on the host's thread.

        ``main`` ends if it was started.
        """
        self._closing.set()
        self._arriving.clear()
        pool = self.pool
        self._release_pool()
        if self.host.loop is None:
            if self.host.lifespan and pool is not None and pool.reads:
                try:
                    pool.join()  # before leaving the lifespan
                except BaseException as error:  # raised where it is closed
                    self.exit_error = error
            self._close_stream()
            self.fail(LoaderClosedError("the iterator was closed"))

    def release_workers(self) -> None:
        """Release what this pipeline holds elsewhere; its loop has stopped."""
        self._is_closing = True
        self._release_pool()
        self.maker.close()
        self.fail(LoaderClosedError("the event loop of the loader has ended"))

    def _release_pool(self) -> None:
        self._bell.put(None)
        if self.pool is not None:
            self.pool.forget(self)
        if self._is_abandoned:
            self.drop_pool()

    def drop_pool(self) -> None:
        """Drop the reference to workers that have ended or that nobody will join."""
        self.pool = None
        self.ready.drop_pump()

    def join(self) -> bool:
        """Wait, bounded, until the stage and the pool's workers have ended."""
        parts = self.ready, self.stage, self.pool
        return False not in [part.join() for part in parts if part is not None]

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""
        return not (self.stage or self.pool) and self.ready.joins_at_once()

    def is_dismissed(self) -> bool:
        """Tell whether it is ending or has ended."""
        return self._is_closing

    def fail(self, error: BaseException) -> None:
        """End every wait of the consumer with ``error``."""
        self.ready.fail(error)
        if self._sink is not None:
            for task, _ in list(self.under_way.values()):
                self.deliver(task, BatchResult(error=error))
        self.under_way.clear()

    # -- a batch: read, transform, collate ------------------------------------------

    def make(self, task: BatchTask) -> BatchResult:
        """Make the rest of a batch in this thread; return errors."""
        return self.maker.make(task, None if self.reads_here else self._read)

    def _read(self, task: BatchTask) -> None:
        if self._stream is not None:
            self._stream.pull(task)
        else:
            self.maker.read(task, self.pause)

    def _read_here(self, task: BatchTask) -> None:
        """Read a batch in the host's thread, and make it there if all is plain."""
        maker, began = self.maker, time.perf_counter()
        if maker.is_plain and self.pool is None:
            result = maker.make(task, self._read)
            self._time(began)
            self.deliver(task, result)
        else:
            maker.fetch(task, self._read)
            self._time(began)
            self._advance(task)

    def _time(self, began: float) -> None:
        """Note that a batch started at ``began`` has been read."""
        seconds = time.perf_counter() - began
        before = self.seconds_per_batch or seconds
        self.seconds_per_batch = before + (seconds - before) / 4

    def _read_on_loop(self, task: BatchTask) -> None:
        assert self._fetchers is not None
        self._fetchers.read(task)

    def _read_ahead(self) -> None:
        if self._fetchers is not None:
            self._fetchers.read_ahead()

    async def _read_stream(
        self, stream: AsyncStream, stack: contextlib.AsyncExitStack
    ) -> None:
        """Read the stream for one request after the other."""
        reader = asyncio.current_task()
        assert reader is not None
        try:
            # The user's iterator may have swallowed the cancellation, which comes only
            # once.
            while not reader.cancelling():
                task = await self._to_pull.get()
                began = time.perf_counter()
                try:
                    await stream.pull(task, stack)
                except BaseException as error:  # handed to the consumer
                    if ends_task(error):
                        raise
                    task.result = BatchResult(error=error)
                self._advance(task)
                self._time(began)
        finally:
            del reader  # its CancelledError refers to this frame

    def _advance(self, task: BatchTask) -> None:
        """Take the next step of a batch whose samples are there, from any thread."""
        if task.result is not None:
            self.deliver(task, task.result)
        elif self.maker.is_plain or self._is_on_loop():
            rest = self._next_step(task)
            if rest is not None and self._fetchers is not None:
                self._fetchers.spawn(rest)
        else:
            self._on_loop(self._advance, task)

    def _next_step(self, task: BatchTask) -> Coroutine[Any, Any, None] | None:
        """Transform and collate a batch in the place for its functions.

        Returns:
            The rest to await, if ``collate_fn`` is a coroutine function.
        """
        maker = self.maker
        if task.result is not None:
            self.deliver(task, task.result)
        elif self._is_closing:
            pass
        elif self._fetchers is not None and self._transforms_next(task):
            self._fetchers.transform(task)
        elif self.pool is not None:
            self._into_pool(task)
        elif maker.collates_async:
            return self._collate(task)
        elif self.host.loop is not None and maker.is_quick(task):
            self.deliver(task, maker.make(task, seeded=False))
        else:
            self._in_thread(self._finish_here, task)
        return None

    def _transforms_next(self, task: BatchTask) -> bool:
        """Tell whether the loop must still transform the samples of a batch.

        Samples read one by one were transformed by their fetchers.
        """
        maker = self.maker
        was_whole = not maker.reads_async or maker.get_batch is not None
        return maker.transforms_async and was_whole and task.stage == "fetch"

    async def _collate(self, task: BatchTask) -> None:
        """Await ``collate_fn``, after a plain transform in the thread."""
        maker = self.maker
        try:
            if maker.transform is not None and not maker.transforms_async:
                await self.host.cpu.call(partial(self._apply_here, task))
            result = await maker.collate_async(task)
        except BaseException as error:  # handed to the consumer
            if ends_task(error):
                raise
            result = BatchResult(error=error)
        self.deliver(task, result)

    def _apply_here(self, task: BatchTask) -> None:
        with self.maker.around(task):
            self._context.run(self.maker.apply, task)

    def _finish_here(self, task: BatchTask) -> None:
        """Transform and collate in the thread."""
        self.deliver(task, self.maker.make(task))

    # -- between thread, loop and pool ------------------------------------------------

    def _in_thread(self, step: Callable[[BatchTask], None], task: BatchTask) -> None:
        """Take a step of ``task`` in the thread, unless the pipeline is closing."""

        def job() -> None:
            if not self._is_closing:
                self._context.run(step, task)

        self.host.post(job)

    def _on_loop(self, step: Callable[[BatchTask], None], task: BatchTask) -> None:
        """Take a step of ``task`` on the loop, once the fetchers exist."""
        if self._is_on_loop():
            step(task)
        elif self.host.loop is not None:
            self._arriving.append((step, task))
            if not self._is_called:  # one call serves all steps until it runs
                self._is_called = True
                if not call_threadsafe(self.host.loop, self._arrive):
                    text = "the event loop of the loader is closed"
                    self.fail(LoaderClosedError(text))

    def _arrive(self) -> None:
        self._is_called = False
        while self._arriving and self._fetchers is not None and not self._is_closing:
            step, task = self._arriving.popleft()
            step(task)

    def _is_on_loop(self) -> bool:
        """Tell whether this is the host's loop and the fetchers exist."""
        return self._fetchers is not None and self.host.is_on_loop()

    def _into_pool(self, task: BatchTask) -> None:
        assert self.pool is not None
        task.stage = "pool"
        try:
            self.pool.submit(self, task)
        except Exception as error:  # handed to the consumer
            # Its traceback would hold the consumer's frames and thus the iterator.
            self.deliver(task, BatchResult(error=error.with_traceback(None)))

    def pause(self, seconds: float) -> None:
        """Sleep in a thread between attempts.

        Raises:
            LoaderClosedError: If the pipeline closes meanwhile.
        """
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)
            self._bell.put(None)  # for the next thread
            raise LoaderClosedError("the iterator was closed")

    def _close_stream(self) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except BaseException as error:  # raised where it is closed
            self.host.exit_error = error

    # -- results --------------------------------------------------------------------

    def deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Deliver the result of ``task``, from any thread."""
        if self.under_way.pop(id(task), None) is not None:
            if result.state is None:
                result.state = task.state
            if result.made is NOT_MADE:
                result.made = task.made()
            result.size = task.size
            if self._keeps_state:
                result = self.maker.leave(task, result)
            if self._sink is None:
                self._put(task, result)
            else:
                self._sink(task, result)

    def _put(self, task: BatchTask, result: BatchResult) -> None:
        self.ready.put(task.number, result, more=bool(self.under_way))

    def receive(
        self, task: BatchTask, result: BatchResult, failures: Sequence[Failure] = ()
    ) -> None:
        """Take the pool's result of ``task``, and its failures."""
        is_counted = self.reads_here or result.is_end
        result.attempted = 0 if is_counted else len(task.indices)
        result.failures = failures
        if result.retries:
            self.maker.policy.count_retries(result.retries)
        self.deliver(task, result)

    def count(self, result: BatchResult) -> None:
        """Count a worker's attempts and failures, in order of delivery."""
        policy = self.maker.policy
        policy.begin(result.attempted)
        try:
            for failure in result.failures:
                policy.count_in(failure)
        except Exception as error:  # the budget is spent
            result.error = error
