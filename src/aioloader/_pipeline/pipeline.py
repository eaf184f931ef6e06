"""The pipeline of one iteration, which makes requested batches on a runner.

Coroutines are awaited on the runner's loop, and plain code runs in its thread. Worker
pools make whole batches, or transform and collate samples that were read here.
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
from aioloader._base.raising import ends_task, iterator_closed
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
from aioloader._pipeline.runner import Runner, loop_ended
from aioloader._pipeline.stream import StreamBatcher
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

if TYPE_CHECKING:
    import contextvars

    from aioloader._pipeline.tuner import Tuner

# Batches made within this many seconds form a run and are delivered together. A run has
# at most ``_MAX_PER_RUN``, or fewer while only an earlier epoch's pace is known.
RUN_SECONDS = 0.002
_MAX_PER_RUN, _MAX_FIRST_RUN = 256, 16
# How long coroutines read only the first batch, unless the consumer requests more:
# seconds, then turns of the loop, which are long when it is busy. An iteration may end
# with its first batch, as in a server that makes one loader per request.
_HEAD_START = 0.001
_HEAD_START_TURNS = 8
# After how many seconds the loop's lag is measured: shorter iterations show none.
_WATCH_AFTER = 0.02


class Pool(abc.ABC):
    """Workers that make batches from indices, or from samples read by the pipeline."""

    reads: bool  # whether workers read the samples, too
    has_result_reader: bool = False  # whether it is a ``ResultReader``
    has_copies: bool = False  # whether each worker has a copy of a stateful dataset

    def open(self, pipeline: "Pipeline") -> None:  # noqa: B027  (a default)
        """Start workers; an error fails ``pipeline``. May take long. Idempotent."""

    @abc.abstractmethod
    def submit(self, pipeline: "Pipeline", task: BatchTask) -> None:
        """Take a task; pass its result to ``pipeline.deliver`` or ``receive``."""

    @abc.abstractmethod
    def forget(self, pipeline: "Pipeline") -> None:
        """Drop the requests of ``pipeline``, which is ending. Idempotent."""

    @abc.abstractmethod
    def explain(self, task: BatchTask) -> str:
        """Describe the worker that has ``task``, with its stack; may be slow."""

    def restart(self, task: BatchTask) -> bool:  # noqa: ARG002  (a default)
        """Replace the worker that has ``task``; return whether it was replaced."""
        return False

    def join(self) -> bool:
        """Wait, with a timeout, for the workers to end; return whether they have."""
        return True


@dataclass(eq=False, repr=False)
class Pipeline:
    """The stages that make one iteration's batches, on their runner.

    The pipeline holds no reference to the iterator that feeds it. A dropped iterator is
    therefore collected, and its finalizer dismisses the pipeline.
    """

    maker: BatchMaker
    runner: Runner  # the pipeline owns one lease on it from the start
    _: KW_ONLY
    # The consumer's results; in a worker, ``sink`` gets them.
    ready: ReadyQueue = field(default_factory=partial(ReadyQueue, in_order=False))
    start: EpochPosition = BEGINNING  # where the epoch starts, or is resumed
    pool: Pool | None = None
    sink: Callable[[BatchTask, BatchResult], None] | None = None
    head_start: bool = False  # whether the first batch is read before the others
    tuner: "Tuner | None" = None
    pace: Pace = field(default_factory=Pace)  # of batches in earlier epochs
    # Records the time to list shards, and the loop's lag.
    counters: Counters | None = None

    def __post_init__(self) -> None:
        maker, runner, pool = self.maker, self.runner, self.pool
        if runner.loop is not None:
            maker.side_loop = SideLoop(runner.loop)
        # A worker's pipelines share the maker, whose side loop the next one replaces.
        self._side_loop: SideLoop = maker.side_loop
        self.stage: Any = None  # moves batches to the device: a ``Staged``
        # Requested batches without a result, with their request times, by task id.
        self.under_way: dict[int, tuple[BatchTask, float]] = {}
        self.ended: Latch = Latch()
        self.exit_error: BaseException | None = None
        self.reads_here: bool = maker.reads and not (pool is not None and pool.reads)
        has_copies = pool is not None and pool.has_copies
        self._keeps_state = maker.keeps_state and not has_copies
        if self.tuner is not None:
            self.tuner.ready = self.ready
        # How many batches are a run; 0 if making them is slow.
        self.run_size, self._max_per_run = 0, _MAX_FIRST_RUN
        if self.pace.seconds:
            self.note_pace(0.0, 0)
        self.is_closing: bool = False
        self._is_dismissed = self._is_abandoned = False
        self._no_more_pauses = Latch()
        self._closing = asyncio.Event()
        self._fetchers: FetcherPool | None = None
        # Batches posted to the loop; whether a call that starts them is scheduled.
        self._arriving: deque[BatchTask] = deque()
        self._is_called = False
        # Batches posted to the thread; whether a job that makes them is scheduled.
        self._to_make: deque[BatchTask] = deque()
        self._is_posted = False
        self._has_head_start = self.head_start and self.reads_here and maker.reads_async
        self._timer: asyncio.Handle | None = None  # of the head start
        self._to_pull: deque[BatchTask] = deque()  # to read from an async stream
        self._has_pulls: asyncio.Event = asyncio.Event()
        self._will_announce = False
        self._stream: StreamBatcher | None = None
        self._async_stream: StreamBatcher | None = None
        # Plain code sees the context variables of its consumer.
        self.context: contextvars.Context = context_elsewhere()
        self.context.run(UNDER_WAY.set, maker)
        resume = self.start.states.get(0)
        if maker.kind is Kind.ITERABLE:
            self._stream = StreamBatcher(maker, resume=resume, keys=maker.reader_keys())
        elif maker.kind is Kind.ASYNC_ITERABLE and self.reads_here:
            self._async_stream = StreamBatcher(maker, resume=resume)
        runner.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def open(self) -> None:
        """Start the workers, if there are any; may take long. Idempotent."""
        pool = self.pool  # another thread may close this, and drop it
        if pool is not None:
            pool.open(self)

    def submit(self, tasks: Sequence[BatchTask]) -> None:
        """Start to make a run of batches; results go to ``ready`` or ``sink``."""
        now = time.monotonic()
        for task in tasks:
            self.under_way[id(task)] = (task, now)
        if self.is_closing:
            return  # the consumer no longer waits
        pool = self.pool
        if pool is not None and pool.reads:
            for task in tasks:
                self._submit_to_pool(pool, task)
        elif self.maker.is_plain:
            self._post(*tasks)
        else:
            self._arriving.extend(tasks)
            if self._fetchers is not None and running_loop() is self.runner.loop:
                self._start_arrived()
            elif not self._is_called:  # one call serves all tasks until it runs
                self._is_called = True
                assert self.runner.loop is not None
                if not call_threadsafe(self.runner.loop, self._start_arrived):
                    text = "the event loop of the loader is closed; iterate again"
                    self.fail(LoaderClosedError(text))

    def read_ahead(self) -> None:
        """End the first batch's head start, as the consumer requests the second."""
        if self._timer is not None and self.runner.loop is not None:
            call_threadsafe(self.runner.loop, self._end_head_start)

    def dismiss(self) -> None:
        """Start to end the pipeline; safe in finalizers. ``ended`` is set when done."""
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
        """Start to end the pipeline, and drop the workers without waiting for them.

        Frames of a traceback may hold this pipeline, but must not hold its workers.
        """
        self._is_abandoned = True
        self.dismiss()

    # -- for the runner -------------------------------------------------------------

    async def main(self) -> None:
        """Run the fetchers, and an async stream's reader, until dismissed."""
        counters, loop = self.counters, asyncio.get_running_loop()
        COUNTERS.set(counters)  # fetchers copy this context
        try:
            tune = None if self.tuner is None else self._tune(self.tuner)
            fetchers = FetcherPool(self.maker.concurrency, tune)
            with contextlib.ExitStack() as watching:
                if counters is not None:
                    counters.alone = fetchers.alone
                    args = time.monotonic(), watching
                    timer = loop.call_later(_WATCH_AFTER, self._watch_loop, *args)
                    watching.callback(timer.cancel)
                try:
                    self._fetchers = fetchers
                    if self._async_stream is not None:
                        reader = self._read_stream(self._async_stream, fetchers)
                        fetchers.spawn(reader, "aioloader stream")
                    if self._has_head_start:
                        fetchers.reserve = 0
                    self._start_arrived()
                    await self._closing.wait()
                finally:
                    self._fetchers = None
                    self._end_head_start()
                    self._arriving.clear()
                    await fetchers.aclose()
        except BaseException as error:  # raised by the iterator's close or next step
            self._report(error)
        finally:
            # The loop may have ended before the iterator.
            self.release_workers(iterator_closed())
            if self._stream is not None:
                self.runner.cpu.post(self._close_stream)

    def most_concurrency(self) -> int:
        """Return the maximum number of samples read at a time, even after tuning."""
        tuned = None if self.tuner is None else self.tuner.concurrency
        return self.maker.concurrency if tuned is None else tuned.most

    def _tune(self, tuner: "Tuner") -> Tune | None:
        """Return the fetchers' ``tune`` callback; None for a fixed ``concurrency``."""
        if tuner.concurrency is None:
            return None
        note_read, maker = tuner.note_read, self.maker
        return lambda began, is_busy: note_read(
            began, failures=maker.failed_reads, is_busy=is_busy
        )

    def _watch_loop(self, since: float, watching: contextlib.ExitStack) -> None:
        """Measure the loop's lag from ``since`` until ``watching`` is closed."""
        from aioloader._pipeline.loop_watch import watch_of

        assert self.counters is not None
        loop = asyncio.get_running_loop()
        watch = watch_of(loop, is_callers=self.runner.is_callers)
        self.counters.lag = partial(watch.lag, watch.counts)
        watching.enter_context(watch.reading(since, self.counters))

    def _report(self, error: BaseException) -> None:
        """Pass ``error`` to the consumer's next step, or to its close if closing."""
        if ends_task(error):
            raise error
        if self.is_closing:
            self.exit_error = error
        else:
            self.fail(error)

    def end(self) -> None:
        """Release workers; end ``main``, or close the stream if there is no loop."""
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
            self.fail(iterator_closed())

    def release_workers(self, error: LoaderClosedError | None = None) -> None:
        """Release the workers and end every wait; ``main`` has ended or cannot run."""
        self.is_closing = True
        self._release_pool()
        self._side_loop.close()
        self.fail(error or loop_ended())

    def _release_pool(self) -> None:
        self._no_more_pauses.set()
        pool = self.pool
        if pool is not None:
            pool.forget(self)
        if self._is_abandoned:
            self.drop_pool()

    def drop_pool(self) -> None:
        """Drop the reference to workers that have ended or will not be joined."""
        self.pool = None
        self.ready.result_reader = None

    def join(self) -> bool:
        """Wait for queue, stage and workers; return False if a wait timed out."""
        parts = self.ready, self.stage, self.pool
        return False not in [part.join() for part in parts if part is not None]

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""
        return not (self.stage or self.pool) and self.ready.joins_at_once()

    def fail(self, error: BaseException) -> None:
        """End every wait with ``error``; ``sink`` gets it for each unfinished batch."""
        self.ready.fail(error)
        if self.sink is not None:
            for task, _ in list(self.under_way.values()):
                self.deliver(task, BatchResult(error=error))
        self.under_way.clear()

    # -- in the runner's thread, and in workers -----------------------------------

    def make(self, task: BatchTask) -> BatchResult:
        """Make a batch in a pool's thread; read samples unless ``reads_here``."""
        return self.maker.make(task, None if self.reads_here else self._read)

    def _read(self, task: BatchTask) -> None:
        if self._stream is not None:
            self._stream.pull(task)
        else:
            self.maker.read(task, self.pause)

    def _post(self, *tasks: BatchTask) -> None:
        """Post batches to the runner's thread, which makes them."""
        self._to_make.extend(tasks)
        if not self._is_posted:  # one job serves all batches until it runs
            self._is_posted = True
            self.runner.cpu.post(partial(self.context.run, self._make_run))

    def _make_run(self) -> None:
        """Make and announce one run of batches; post the others for another run."""
        self._is_posted = False
        began, seconds, count = time.perf_counter(), 0.0, 0
        try:
            while seconds < RUN_SECONDS and self._may_make():
                self._make_batch(self._to_make.popleft())
                seconds, count = time.perf_counter() - began, count + 1
        finally:
            if self._may_make():
                self._post()
            if self.reads_here and self.maker.is_plain:
                self.note_pace(seconds, count)
            self.ready.announce()

    def _may_make(self) -> bool:
        # If its lifespan could not be entered, only the runner is closing.
        is_closing = self.is_closing or self.runner.is_closing
        return bool(self._to_make) and not is_closing

    def _make_batch(self, task: BatchTask) -> None:
        """Read a batch unless the loop did; then make it, or pass it to the pool."""
        maker, pool = self.maker, self.pool
        read = self._read if self.reads_here and maker.is_plain else None
        if pool is None:
            result: BatchResult | None = maker.make(task, read)
        else:
            result = maker.fetch(task, self._read)
        if result is not None:
            self.deliver(task, result, wakes=False)
        elif pool is not None:
            self._submit_to_pool(pool, task)

    def note_pace(self, seconds: float, count: int) -> None:
        """Adapt the run size after ``count`` batches were made in ``seconds``."""
        if count:
            before, now = self.pace.seconds, seconds / count
            is_less = now < before or not before  # a busy machine delays some
            self.pace.seconds = now if is_less else before + (now - before) / 8
            self._max_per_run = _MAX_PER_RUN
        seconds = self.pace.seconds
        self.ready.is_quick = 0 < seconds < RUN_SECONDS
        is_quick, most = self.ready.is_quick, self._max_per_run
        self.run_size = min(most, int(RUN_SECONDS / seconds)) if is_quick else 0

    async def _call(self, job: Callable[[], Any]) -> Any:
        """Run a batch's plain ``job`` in the runner's thread; return its result."""

        def work() -> Any:
            if self.is_closing:
                raise iterator_closed()
            return self.context.run(job)

        return await in_thread(work, executor=self.runner.cpu, abandon_on_cancel=True)

    def pause(self, seconds: float) -> None:
        """Sleep in a thread between read attempts; raise once the pipeline closes."""
        if self._no_more_pauses.wait(seconds):
            raise iterator_closed()

    def _close_stream(self) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except BaseException as error:  # raised where it is closed
            self.runner.exit_error = error

    # -- on the loop --------------------------------------------------------------

    def _start_arrived(self) -> None:
        """Start posted batches, but only the first batch during its head start."""
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
                later = partial(asyncio.get_running_loop().call_later, _HEAD_START)
                self._timer = later(self._end_head_start, _HEAD_START_TURNS)

    def _end_head_start(self, turns: int = 0) -> None:
        """Start the other posted batches, after ``turns`` turns of the loop."""
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
        self._start_arrived()

    async def _amake(self, task: BatchTask, fetchers: FetcherPool) -> None:
        read = self._read if self.reads_here and self._async_stream is None else None
        result = await self.maker.amake(task, fetchers, self._call, read)
        self._finish_batch(task, result)

    def _finish_batch(
        self, task: BatchTask, result: BatchResult | None, *, wakes: bool = True
    ) -> None:
        """Deliver ``result``; if it is None, a pool or plain code makes the batch."""
        if result is not None:
            self.deliver(task, result, wakes=wakes)
        elif self.is_closing:
            pass
        elif (pool := self.pool) is not None:
            self._submit_to_pool(pool, task)
        elif self.maker.is_quick(task):
            if torch.is_inference_mode_enabled():  # by a task of the caller's loop
                with torch.inference_mode(mode=False):
                    result = self.maker.make(task, seeded=False)
            else:
                result = self.maker.make(task, seeded=False)
            self.deliver(task, result, wakes=wakes)
        else:
            self._post(task)

    async def _read_stream(self, stream: StreamBatcher, fetchers: FetcherPool) -> None:
        """Open a stream, read it for each request in turn, and close it."""
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
                while reader.cancelling():  # so that the stream may await as it closes
                    reader.uncancel()
        except BaseException as error:  # of closing the stream
            self._report(error)
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
        """Read all requested batches from a stream; announce each run of them."""
        began, count, taken = time.perf_counter(), 0, deque[BatchTask]()
        while (taken or self._to_pull) and not reader.cancelling():
            taken = taken or stream.take(self._to_pull)
            if taken:
                task = taken.popleft()
            else:
                task = self._to_pull.popleft()
                await self._pull(stream, task, len(self._to_pull))
            if is_plain or task.result is not None:
                self._finish_batch(task, task.result, wakes=False)
            else:
                fetchers.spawn(self._amake(task, fetchers), "aioloader batch")
            now, count = time.perf_counter(), count + 1
            if now - began > RUN_SECONDS:
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
        if not self._will_announce:  # as soon as this task waits
            self._will_announce = True
            asyncio.get_running_loop().call_soon(self._announce)
        try:
            await stream.pull_async(task, waiting)
        except BaseException as error:  # handed to the consumer
            if ends_task(error):
                raise
            task.result = BatchResult(error=error)

    # -- results ------------------------------------------------------------------

    def _submit_to_pool(self, pool: Pool, task: BatchTask) -> None:
        task.stage = "pool"
        try:
            pool.submit(self, task)
        except Exception as error:  # handed to the consumer
            # Its traceback would hold the consumer's frames and thus the iterator.
            self.deliver(task, BatchResult(error=error.with_traceback(None)))

    def deliver(
        self, task: BatchTask, result: BatchResult, *, wakes: bool = True
    ) -> None:
        """Deliver a task's result, from any thread; ``wakes`` is for ``ready.put``."""
        if self.under_way.pop(id(task), None) is not None:
            if result.state is None:
                result.state = task.state
            if result.made is NOT_MADE:
                result.made = task.made()
            result.size = len(task.indices) - task.missing
            if self._keeps_state:
                result = self.maker.add_state(task, result)
            if self.sink is None:
                self.ready.put(task.number, result, wakes=wakes)
            else:
                self.sink(task, result)

    def receive(
        self, task: BatchTask, result: BatchResult, failures: Sequence[Failure] = ()
    ) -> None:
        """Deliver a pool's result of ``task``, with the failures of its samples."""
        is_counted = self.reads_here or result.is_end
        result.attempted = 0 if is_counted else result.attempted + len(task.indices)
        result.failures = failures
        if result.retries:
            self.maker.policy.count_retries(result.retries)
        self.deliver(task, result)

    def count(self, result: BatchResult) -> None:
        """Add a delivered result's attempts and failures to the policy's counts."""
        policy = self.maker.policy
        policy.begin(result.attempted)
        try:
            for failure in result.failures:
                policy.count_in(failure)
        except Exception as error:  # the budget is spent
            result.error = error
