"""One iteration on its runner: takes requests, makes batches, closes.

Coroutines are awaited on the runner's loop; plain code runs in the runner's thread;
worker pools make whole batches, or transform and collate samples that were read here.
"""

import abc
import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aioloader._base.cancellation import in_thread
from aioloader._base.failures import Failure
from aioloader._base.raising import ends_task
from aioloader._base.records import COUNTERS, NOT_MADE, Counters, Pace
from aioloader._base.waiting import (
    Latch,
    call_threadsafe,
    context_elsewhere,
    running_loop,
)
from aioloader._order.epoch import BEGINNING, UNDER_WAY, EpochPosition
from aioloader._pipeline.awaiting import SideLoop
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.fetchers import RESERVE, FetcherPool, Tune
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.runner import Runner
from aioloader._pipeline.stream import StreamBatcher
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

if TYPE_CHECKING:
    import contextvars

    from aioloader._pipeline.tuner import Tuner

# Batches made within this many seconds are delivered together; at most so many of
# them, and of the first ones, whose pace is that of an earlier epoch.
HOP = 0.002
_MOST_PER_RUN, _FIRST_RUN = 256, 16
# How long coroutines read only the first batch, unless the consumer asks for more:
# seconds, then turns of the loop, which are long when it is busy. An iteration may end
# with its first batch, as in a server that makes one loader per request.
_HEAD_START = 0.001
_TURNS = 8
# After how many seconds the loop's lag is measured: shorter iterations show none.
_UNWATCHED = 0.02
_CLOSED = "the iterator was closed; make a new one"
_LOOP_ENDED = "the event loop of the loader has ended; iterate again"


class Pool(abc.ABC):
    """Workers that make batches, or transform and collate samples read here."""

    reads: bool  # whether workers read the samples too
    pumps: bool = False  # whether the consumer itself collects results while it waits
    has_copies: bool = False  # whether workers have datasets with states of their own

    def open(self, pipeline: "Pipeline") -> None:  # noqa: B027  (a default)
        """Start for ``pipeline``, or fail it; may take long. Idempotent."""

    @abc.abstractmethod
    def submit(self, pipeline: "Pipeline", task: BatchTask) -> None:
        """Take a task; calls ``pipeline.deliver`` with its result."""

    @abc.abstractmethod
    def forget(self, pipeline: "Pipeline") -> None:
        """Drop the requests of ``pipeline``, which has ended. Idempotent."""

    @abc.abstractmethod
    def explain(self, task: BatchTask) -> str:
        """Describe the worker that has ``task``, and its stack; may take a second."""

    def restart(self, task: BatchTask) -> bool:  # noqa: ARG002  (a default)
        """Replace the worker that has ``task``; return whether it was replaced."""
        return False

    def join(self) -> bool:
        """Wait, bounded, for the workers to end; return whether they have."""
        return True


@dataclass(eq=False, repr=False)
class Pipeline:
    """The stages of one iteration, on their runner.

    It holds no reference to the iterator that feeds it, so that the iterator can be
    collected; the iterator's finalizer then dismisses the pipeline.
    """

    maker: BatchMaker
    runner: Runner  # where it runs; the pipeline owns one lease from the start
    _: KW_ONLY
    # Where the consumer takes results from; in a worker, ``sink`` gets them.
    ready: ReadyQueue = field(default_factory=partial(ReadyQueue, in_order=False))
    bookmark: EpochPosition = BEGINNING  # where the epoch is resumed
    # The workers that make batches, or transform and collate what was read here; None
    # if all of that is done here.
    pool: Pool | None = None
    sink: Callable[[BatchTask, BatchResult], None] | None = None
    head_start: bool = False  # the first batch is read a moment before the others
    # Changes the maker's ``concurrency`` if the loader chooses it.
    tuner: "Tuner | None" = None
    pace: Pace = field(default_factory=Pace)  # how quickly batches were made before
    # Where the listing of shards and the loop's lag are noted, if at all.
    counters: Counters | None = None

    def __post_init__(self) -> None:
        maker, runner, pool, bookmark = (
            self.maker,
            self.runner,
            self.pool,
            self.bookmark,
        )
        if runner.loop is not None:
            maker.side_loop = SideLoop(runner.loop)
        # A worker's pipelines have one maker: the next one replaces its loop.
        self._side_loop: SideLoop = maker.side_loop
        self.stage: Any = None  # what then moves batches to the device: a ``Staged``
        self.under_way: dict[int, tuple[BatchTask, float]] = {}
        self.ended: Latch = Latch()
        self.exit_error: BaseException | None = None
        self.reads_here: bool = maker.reads and not (pool is not None and pool.reads)
        has_copies = pool is not None and pool.has_copies
        self._keeps_state = maker.keeps_state and not has_copies
        if self.tuner is not None:
            self.tuner.ready = self.ready
        # How many batches are made in one turn, if they come quickly.
        self.run_size, self._most_per_run = 0, _FIRST_RUN
        if self.pace.seconds:
            self.note_pace(0.0, 0)
        self.is_closing: bool = False
        self._is_dismissed = self._is_abandoned = False
        self._no_more_pauses = Latch()
        self._closing = asyncio.Event()
        self._fetchers: FetcherPool | None = None
        # On their way to the loop, and whether a call that takes them is scheduled.
        self._arriving: deque[BatchTask] = deque()
        self._is_called = False
        # On their way to the thread, and whether a job that makes them is posted.
        self._to_make: deque[BatchTask] = deque()
        self._is_posted = False
        self._has_head_start = self.head_start and self.reads_here and maker.reads_async
        self._timer: asyncio.Handle | None = None  # of the head start
        self._to_pull: deque[BatchTask] = deque()  # of an async stream
        self._has_pulls: asyncio.Event = asyncio.Event()
        self._will_announce = False
        self._stream: StreamBatcher | None = None
        self._async_stream: StreamBatcher | None = None
        # Plain code sees the context variables of its consumer.
        self.context: contextvars.Context = context_elsewhere()
        self.context.run(UNDER_WAY.set, maker)
        resume = bookmark.states.get(0)
        if maker.kind is Kind.ITERABLE:
            self._stream = StreamBatcher(maker, resume=resume, keys=maker.seeds())
        elif maker.kind is Kind.ASYNC_ITERABLE and self.reads_here:
            self._async_stream = StreamBatcher(maker, resume=resume)
        runner.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def open(self) -> None:
        """Prepare for the first request; may take long."""
        pool = self.pool  # another thread may close this, and drop it
        if pool is not None:
            pool.open(self)

    def submit(self, tasks: Sequence[BatchTask]) -> None:
        """Take a run of requests; their results go into ``ready``."""
        now = time.monotonic()
        for task in tasks:
            self.under_way[id(task)] = (task, now)
        if self.is_closing:
            return  # the consumer's wait has ended
        pool = self.pool
        if pool is not None and pool.reads:
            for task in tasks:
                self._into_pool(pool, task)
        elif self.maker.is_plain:
            self._in_thread(*tasks)
        else:
            self._arriving.extend(tasks)
            if self._fetchers is not None and running_loop() is self.runner.loop:
                self._arrive()
            elif not self._is_called:  # one call serves all tasks until it runs
                self._is_called = True
                assert self.runner.loop is not None
                if not call_threadsafe(self.runner.loop, self._arrive):
                    text = "the event loop of the loader is closed; iterate again"
                    self.fail(LoaderClosedError(text))

    def read_ahead(self) -> None:
        """Read past the first batch: the consumer has asked for more."""
        if self._timer is not None and self.runner.loop is not None:
            call_threadsafe(self.runner.loop, self._end_head_start)

    def dismiss(self) -> None:
        """Start ending, from any thread or finalizer; sets ``ended`` when done."""
        if not self._is_dismissed:
            self.is_closing = True
            self._no_more_pauses.set()
            self._side_loop.close()
            self.ready.close()
            self.runner.dismiss(self)
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

    # -- for the runner -------------------------------------------------------------

    async def main(self) -> None:
        """Host the fetchers and the reader of a stream, until dismissed."""
        counters, loop = self.counters, asyncio.get_running_loop()
        COUNTERS.set(counters)  # the tasks of the fetchers have this context
        try:
            tune = None if self.tuner is None else self._tune(self.tuner)
            fetchers = FetcherPool(self.maker.concurrency, tune)
            with contextlib.ExitStack() as watching:
                if counters is not None:
                    counters.alone = fetchers.alone
                    begun = time.monotonic(), watching
                    timer = loop.call_later(_UNWATCHED, self._watch, *begun)
                    watching.callback(timer.cancel)
                try:
                    self._fetchers = fetchers
                    if self._async_stream is not None:
                        reader = self._read_stream(self._async_stream, fetchers)
                        fetchers.spawn(reader, "aioloader stream")
                    if self._has_head_start:
                        fetchers.reserve = 0
                    self._arrive()
                    await self._closing.wait()
                finally:
                    self._fetchers = None
                    self._end_head_start()
                    self._arriving.clear()
                    await fetchers.aclose()
        except BaseException as error:  # raised by the iterator's close or next step
            self._break(error)
        finally:
            # Its loop may have ended before its iterator.
            self.release_workers(LoaderClosedError(_CLOSED))
            if self._stream is not None:
                self.runner.cpu.post(self._close_stream)

    def most_concurrency(self) -> int:
        """Return how many samples may be read at a time."""
        tuned = None if self.tuner is None else self.tuner.concurrency
        return self.maker.concurrency if tuned is None else tuned.most

    def _tune(self, tuner: "Tuner") -> Tune | None:
        """Return what chooses how many reads may be in flight, or None."""
        if tuner.concurrency is None:
            return None
        note_read, maker = tuner.note_read, self.maker
        return lambda began, is_busy: note_read(
            began, failures=maker.failed_reads, is_busy=is_busy
        )

    def _watch(self, since: float, watching: contextlib.ExitStack) -> None:
        """Measure the loop's lag since then."""
        from aioloader._pipeline.loop_watch import watch_of

        assert self.counters is not None
        loop = asyncio.get_running_loop()
        watch = watch_of(loop, is_callers=self.runner.is_callers)
        self.counters.lag = partial(watch.lag, watch.counts)
        watching.enter_context(watch.reading(since, self.counters))

    def _break(self, error: BaseException) -> None:
        """Hand an error to the consumer: of its close, or else of its next step."""
        if ends_task(error):
            raise error
        if self.is_closing:
            self.exit_error = error
        else:
            self.fail(error)

    def end(self) -> None:
        """Release everything this pipeline holds; runs on the runner's thread.

        ``main`` ends if it was started.
        """
        self._closing.set()
        self._arriving.clear()
        pool = self.pool
        self._release_pool()
        if self.runner.loop is None:
            if self.runner.lifespan and pool is not None and pool.reads:
                try:
                    pool.join()  # before leaving the lifespan
                except BaseException as error:  # raised where it is closed
                    self.exit_error = error
            self._close_stream()
            self.fail(LoaderClosedError(_CLOSED))

    def release_workers(self, error: LoaderClosedError | None = None) -> None:
        """Release what this pipeline holds elsewhere; its loop has stopped."""
        self.is_closing = True
        self._release_pool()
        self._side_loop.close()
        self.fail(error or LoaderClosedError(_LOOP_ENDED))

    def _release_pool(self) -> None:
        self._no_more_pauses.set()
        pool = self.pool
        if pool is not None:
            pool.forget(self)
        if self._is_abandoned:
            self.drop_pool()

    def drop_pool(self) -> None:
        """Drop the reference to workers that have ended or that nobody will join."""
        self.pool = None
        self.ready.result_reader = None

    def join(self) -> bool:
        """Wait, bounded, until the stage and the pool's workers have ended."""
        parts = self.ready, self.stage, self.pool
        return False not in [part.join() for part in parts if part is not None]

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""
        return not (self.stage or self.pool) and self.ready.joins_at_once()

    def fail(self, error: BaseException) -> None:
        """End every wait of the consumer with ``error``."""
        self.ready.fail(error)
        if self.sink is not None:
            for task, _ in list(self.under_way.values()):
                self.deliver(task, BatchResult(error=error))
        self.under_way.clear()

    # -- in the runner's thread, and in workers ---------------------------------------

    def make(self, task: BatchTask) -> BatchResult:
        """Make the rest of a batch in this thread; return errors."""
        return self.maker.make(task, None if self.reads_here else self._read)

    def _read(self, task: BatchTask) -> None:
        if self._stream is not None:
            self._stream.pull(task)
        else:
            self.maker.read(task, self.pause)

    def _in_thread(self, *tasks: BatchTask) -> None:
        """Continue batches in the thread."""
        self._to_make.extend(tasks)
        if not self._is_posted:  # one job serves all batches until it runs
            self._is_posted = True
            self.runner.cpu.post(partial(self.context.run, self._make_run))

    def _make_run(self) -> None:
        """Make a run of batches, and announce them; other loaders get turns."""
        self._is_posted = False
        began, seconds, count = time.perf_counter(), 0.0, 0
        try:
            while seconds < HOP and self._may_make():
                self._work(self._to_make.popleft())
                seconds, count = time.perf_counter() - began, count + 1
        finally:
            if self._may_make():
                self._in_thread()
            if self.reads_here and self.maker.is_plain:
                self.note_pace(seconds, count)
            self.ready.announce()

    def _may_make(self) -> bool:
        # The runner is closing too if its lifespan could not be entered.
        is_closing = self.is_closing or self.runner.is_closing
        return bool(self._to_make) and not is_closing

    def _work(self, task: BatchTask) -> None:
        """Read a batch, unless the loop did, and make it if no pool does."""
        maker, pool = self.maker, self.pool
        read = self._read if self.reads_here and maker.is_plain else None
        if pool is None:
            result: BatchResult | None = maker.make(task, read)
        else:
            result = maker.fetch(task, self._read)
        if result is not None:
            self.deliver(task, result, wakes=False)
        elif pool is not None:
            self._into_pool(pool, task)

    def note_pace(self, seconds: float, count: int) -> None:
        """Note how long so many batches took; the size of a run depends on it."""
        if count:
            before, now = self.pace.seconds, seconds / count
            is_less = now < before or not before  # a busy machine delays some
            self.pace.seconds = now if is_less else before + (now - before) / 8
            self._most_per_run = _MOST_PER_RUN
        seconds = self.pace.seconds
        self.ready.is_quick = 0 < seconds < HOP
        is_quick, most = self.ready.is_quick, self._most_per_run
        self.run_size = min(most, int(HOP / seconds)) if is_quick else 0

    async def _call(self, job: Callable[[], Any]) -> Any:
        """Run plain code of a batch in the thread; return what it returns."""

        def work() -> Any:
            if self.is_closing:
                raise LoaderClosedError(_CLOSED)
            return self.context.run(job)

        return await in_thread(work, executor=self.runner.cpu, abandon_on_cancel=True)

    def pause(self, seconds: float) -> None:
        """Sleep in a thread between attempts.

        Raises:
            LoaderClosedError: If the pipeline closes meanwhile.
        """
        if self._no_more_pauses.wait(seconds):
            raise LoaderClosedError(_CLOSED)

    def _close_stream(self) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except BaseException as error:  # raised where it is closed
            self.runner.exit_error = error

    # -- on the loop ------------------------------------------------------------------

    def _arrive(self) -> None:
        """Start what has arrived: only the first batch while it has a head start."""
        self._is_called = False
        while self._arriving and self._async_stream is not None:
            self._to_pull.append(self._arriving.popleft())
            self._has_pulls.set()
        while self._arriving and self._timer is None:
            if self._fetchers is None or self.is_closing:
                break
            task = self._arriving.popleft()
            self._fetchers.spawn(self._amake(task, self._fetchers), "aioloader batch")
            if self._has_head_start:
                later = asyncio.get_running_loop().call_later
                self._timer = later(_HEAD_START, self._end_head_start, _TURNS)

    def _end_head_start(self, turns: int = 0) -> None:
        """Start what else has arrived, after so many turns of the loop."""
        timer, self._timer = self._timer, None  # it refers to this pipeline
        if turns:
            soon = asyncio.get_running_loop().call_soon
            self._timer = soon(self._end_head_start, turns - 1)
            return
        if timer is not None:
            timer.cancel()
        self._has_head_start = False
        if self._fetchers is not None:
            self._fetchers.reserve = RESERVE
        self._arrive()

    async def _amake(self, task: BatchTask, fetchers: FetcherPool) -> None:
        read = self._read if self.reads_here and self._async_stream is None else None
        self._go_on(task, await self.maker.amake(task, fetchers, self._call, read))

    def _go_on(
        self, task: BatchTask, result: BatchResult | None, *, wakes: bool = True
    ) -> None:
        """Deliver a batch, or have the rest of it made in plain code."""
        if result is not None:
            self.deliver(task, result, wakes=wakes)
        elif self.is_closing:
            pass
        elif (pool := self.pool) is not None:
            self._into_pool(pool, task)
        elif self.maker.is_quick(task):
            if torch.is_inference_mode_enabled():  # a task of the caller's loop
                with torch.inference_mode(mode=False):
                    result = self.maker.make(task, seeded=False)
            else:
                result = self.maker.make(task, seeded=False)
            self.deliver(task, result, wakes=wakes)
        else:
            self._in_thread(task)

    async def _read_stream(self, stream: StreamBatcher, fetchers: FetcherPool) -> None:
        """Open a stream, read it for one request after the other, and close it."""
        reader = asyncio.current_task()
        assert reader is not None
        is_plain = not (self.maker.transforms_async or self.maker.collates_async)
        try:
            async with contextlib.aclosing(stream):
                with contextlib.suppress(asyncio.CancelledError):
                    # The user's iterator may have swallowed the cancellation, which
                    # comes only once.
                    while not reader.cancelling():
                        await self._has_pulls.wait()
                        await self._pull_run(
                            stream, fetchers, reader, is_plain=is_plain
                        )
                while reader.cancelling():  # it may await as it closes
                    reader.uncancel()
        except BaseException as error:  # of closing it
            self._break(error)
        finally:
            del reader  # its CancelledError refers to this frame

    async def _pull_run(
        self,
        stream: StreamBatcher,
        fetchers: FetcherPool,
        reader: "asyncio.Task[Any]",
        *,
        is_plain: bool,
    ) -> None:
        """Pull the batches that were requested; announce them when it waits."""
        began, count, taken = time.perf_counter(), 0, deque[BatchTask]()
        while (taken or self._to_pull) and not reader.cancelling():
            taken = taken or stream.take(self._to_pull)
            if taken:
                task = taken.popleft()
            else:
                task = self._to_pull.popleft()
                await self._pull(stream, task, len(self._to_pull))
            if is_plain or task.result is not None:
                self._go_on(task, task.result, wakes=False)
            else:
                fetchers.spawn(self._amake(task, fetchers), "aioloader batch")
            now, count = time.perf_counter(), count + 1
            if now - began > HOP:
                self.note_pace(now - began, count)
                self.ready.announce()
                await asyncio.sleep(0)
                began, count = time.perf_counter(), 0
        self._has_pulls.clear()
        self.note_pace(time.perf_counter() - began, count)
        self.ready.announce()

    def _announce(self) -> None:
        self._will_announce = False
        self.ready.announce()

    async def _pull(self, stream: StreamBatcher, task: BatchTask, waiting: int) -> None:
        if not self._will_announce:  # what is there, as soon as the reader waits
            self._will_announce = True
            asyncio.get_running_loop().call_soon(self._announce)
        try:
            await stream.pull_async(task, waiting)
        except BaseException as error:  # handed to the consumer
            if ends_task(error):
                raise
            task.result = BatchResult(error=error)

    # -- results --------------------------------------------------------------------

    def _into_pool(self, pool: Pool, task: BatchTask) -> None:
        task.stage = "pool"
        try:
            pool.submit(self, task)
        except Exception as error:  # handed to the consumer
            # Its traceback would hold the consumer's frames and thus the iterator.
            self.deliver(task, BatchResult(error=error.with_traceback(None)))

    def deliver(
        self, task: BatchTask, result: BatchResult, *, wakes: bool = True
    ) -> None:
        """Deliver the result of ``task``, from any thread; ``wakes`` as in ``put``."""
        if self.under_way.pop(id(task), None) is not None:
            if result.state is None:
                result.state = task.state
            if result.made is NOT_MADE:
                result.made = task.made()
            result.size = len(task.indices) - task.missing
            if self._keeps_state:
                result = self.maker.leave(task, result)
            if self.sink is None:
                self.ready.put(task.number, result, wakes=wakes)
            else:
                self.sink(task, result)

    def receive(
        self, task: BatchTask, result: BatchResult, failures: Sequence[Failure] = ()
    ) -> None:
        """Take the pool's result of ``task``, and its failures."""
        is_counted = self.reads_here or result.is_end
        result.attempted = 0 if is_counted else result.attempted + len(task.indices)
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
