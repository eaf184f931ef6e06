"""One iteration while it is hosted: takes requests, routes tasks, closes.

A task goes from step to step. Each step has a colour, and so a place: the loop for
coroutines, the thread for plain code, or a pool that makes whole batches. Steps of one
place follow without a hop.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from aioloader._order.epoch import BEGINNING, Bookmark
from aioloader._order.failures import Failure
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.fetcher_pool import FetcherPool
from aioloader._pipeline.host import Host
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.roles import Pool, Stage
from aioloader._pipeline.stream import AsyncStream, SyncStream
from aioloader._pipeline.waiting import Latch, call_threadsafe
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

Place: TypeAlias = Literal["loop", "thread", "pool"]


class Step(NamedTuple):
    """One step of the route: its stage, where it runs, and what it does."""

    stage: str
    place: Place
    do: Callable[[BatchTask], None]


class _Closed(Exception):  # noqa: N818  (a signal within this file)
    """Ends the task group of ``main``."""


class Pipeline:
    """A hosted of a host: the stages of one iteration.

    It holds no reference to the iterator that feeds it, so that the iterator can be
    collected; the iterator's finalizer then dismisses the run.

    Args:
        maker: The user's functions.
        host: Where it runs; the run holds one lease from the start.
        concurrency: Samples in flight on the loop.
        in_order: Deliver batches by number, else as they complete.
        drop_last: Drop the short last batch of a stream.
        bookmark: Where the epoch is resumed.
        pool: What makes batches, or the rest of them after they were read here; None
            if all of that is done here.
        sink: Takes the results instead of ``ready``.
    """

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        maker: BatchMaker,
        host: Host,
        *,
        concurrency: int,
        in_order: bool,
        drop_last: bool,
        bookmark: Bookmark = BEGINNING,
        pool: Pool | None = None,
        sink: Callable[[BatchTask, BatchResult], None] | None = None,
    ) -> None:
        self.bookmark = bookmark
        # Of a stream, what was delivered before is made again, to get behind it.
        without = bookmark.beyond if maker.kind is Kind.MAP else frozenset[int]()
        self.ready = ReadyQueue(
            in_order=in_order,
            start=bookmark.done,
            without=without,
            pump=pool.pump if pool else None,
        )
        self.pool = pool
        self.stage: Stage | None = None
        # Workers that are processes have copies of the dataset, with states of theirs.
        is_here = pool is None or not pool.reads or pool.pump is None
        self._leaves = maker.keeps_state and is_here
        self._sink = sink or self._put
        self.ended = Latch()
        self.exit_error: BaseException | None = None
        self.host = host
        self.under_way: dict[int, tuple[BatchTask, float]] = {}
        self.maker = maker
        self._concurrency = concurrency
        self._is_closing = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = asyncio.Event()
        self._fetchers: FetcherPool | None = None
        self._loop_ident: int | None = None
        self._early: deque[BatchTask] = deque()
        self._to_pull: asyncio.Queue[BatchTask] = asyncio.Queue()
        self._stream: SyncStream | None = None
        self._async_stream: AsyncStream | None = None
        resume = bookmark.states.get(0)
        if maker.kind is Kind.ITERABLE:
            self._stream = SyncStream(
                maker, drop_last=drop_last, resume=resume, keys=maker.seeds()
            )
        elif maker.kind is Kind.ASYNC_ITERABLE:
            self._async_stream = AsyncStream(maker, drop_last=drop_last, resume=resume)
        self.route = tuple(self._plan())
        host.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def open(self) -> None:
        """Make ready for the first request; may take long."""
        if self.pool is not None:
            self.pool.open(self)

    def submit(self, task: BatchTask) -> None:
        """Take a request; its result will be put into ``ready``."""
        self.under_way[id(task)] = (task, time.monotonic())
        self._send(task, self._place_of(task))

    def dismiss(self) -> None:
        """Begin to end; from any thread, and from finalizers. ``ended`` tells when."""
        if not self._is_closing:
            self._is_closing = True
            self._bell.put(None)
            self.host.dismiss(self)
            if self.stage is not None:
                self.stage.stop()

    # -- for the host -------------------------------------------------------------

    async def main(self) -> None:
        """Host the fetchers and the reader of a stream, until dismissed."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._host(stack)
        except Exception as error:  # raised by the iterator's close, or by its next
            if self._is_closing:
                self.exit_error = error
            else:
                self.fail(_only(error))
        finally:
            self._is_closing = True
            if self._stream is not None:
                self.host.cpu.post(self._close_stream)
            self.fail(LoaderClosedError("the iterator was closed"))

    async def _host(self, stack: contextlib.AsyncExitStack) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._fetchers = FetcherPool(
                    group, self._concurrency, self.maker, self._stepped
                )
                self._loop_ident = threading.get_ident()
                if self._async_stream is not None:
                    reader = self._read(self._async_stream, stack)
                    group.create_task(reader, name="aioloader reader")
                while self._early:
                    self._advance(self._early.popleft(), "loop")
                await self._until_closed()
        except* _Closed:
            pass

    def end(self) -> None:
        """Let go, in the host's own thread; ``main`` ends if it was begun."""
        self._closing.set()
        if self.pool is not None:
            self.pool.forget(self)
        if self.host.loop is None:
            if self.host.lifespan and self.pool is not None and self.pool.reads:
                self.pool.join()  # before the lifespan is left
            self._close_stream()
            self.fail(LoaderClosedError("the iterator was closed"))

    def join(self) -> bool:
        """Wait, bounded, until the stage has ended and the pool let go of workers."""
        is_gone = self.stage is None or self.stage.join()
        return (self.pool is None or self.pool.join()) and is_gone

    def fail(self, error: BaseException) -> None:
        """Give up: every wait of the consumer ends with ``error``."""
        self.ready.fail(error)
        if self._sink != self._put:
            for task, _ in list(self.under_way.values()):
                self.deliver(task, BatchResult(error=error))

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise _Closed

    # -- the route ----------------------------------------------------------------

    def _plan(self) -> list[Step]:
        maker = self.maker
        if not maker.reads or (self.pool is not None and self.pool.reads):
            return [] if self.pool is not None else self._plan_rest(maker)
        return [*self._plan_fetch(maker), *self._plan_rest(maker)]

    def _plan_fetch(self, maker: BatchMaker) -> list[Step]:
        if self._async_stream is not None:
            return [Step("fetch", "loop", self._to_pull.put_nowait)]
        if self._stream is not None:
            return [Step("fetch", "thread", self._stream.pull)]
        if maker.reads_async:
            return [Step("fetch", "loop", lambda task: self._on_fetchers().fetch(task))]
        return [Step("fetch", "thread", partial(maker.read, pause=self._pause))]

    def _plan_rest(self, maker: BatchMaker) -> list[Step]:
        steps = []
        one_by_one = maker.reads_async and maker.get_batch is None
        if maker.transforms_async and not one_by_one:
            steps.append(
                Step(
                    "transform",
                    "loop",
                    lambda task: self._on_fetchers().transform(task),
                )
            )
        if self.pool is not None:
            return steps
        if not maker.collates_async:
            return [*steps, Step("collate", "thread", self._finish)]
        if maker.transform is not None and not maker.transforms_async:
            steps.append(Step("transform", "thread", maker.apply))
        collate = Step(
            "collate", "loop", lambda task: self._on_fetchers().collate(task)
        )
        return [*steps, collate]

    def _advance(self, task: BatchTask, here: Place) -> None:
        """Take ``task`` as far as it goes without leaving ``here``."""
        while not self._is_closing:
            if task.result is not None:
                self.deliver(task, task.result)
                return
            place = self._place_of(task)
            if place != here:
                self._send(task, place)
                return
            if here == "thread":
                with self.maker.around(task):
                    self._do_plain(task)
            elif self._do(task):
                return  # the fetchers or the reader has it, and will call _stepped

    def _place_of(self, task: BatchTask) -> Place:
        """Return where the next step of ``task`` is."""
        return self.route[task.step].place if task.step < len(self.route) else "pool"

    def _do_plain(self, task: BatchTask) -> None:
        """Do the steps that follow each other in the thread."""
        while task.result is None and self._place_of(task) == "thread":
            self._do(task)

    def _do(self, task: BatchTask) -> bool:
        """Do the next step; an error is its result. Tell whether there was none."""
        step = self.route[task.step]
        task.step += 1
        try:
            step.do(task)
        except BaseException as error:  # handed to the consumer
            task.result = BatchResult(error=error)
        return task.result is None

    def _stepped(self, task: BatchTask) -> None:
        self._advance(task, "loop")

    def _send(self, task: BatchTask, place: Place) -> None:
        if place == "pool":
            self._into_pool(task)
        elif place == "thread":
            self.host.post(partial(self._advance, task, "thread"))
        elif threading.get_ident() == self._loop_ident:
            self._advance(task, "loop")
        elif self.host.loop is not None and not call_threadsafe(
            self.host.loop, self._arrive, task
        ):
            self.fail(LoaderClosedError("the event loop of the loader is closed"))

    def _into_pool(self, task: BatchTask) -> None:
        assert self.pool is not None
        try:
            self.pool.submit(self, task)
        except Exception as error:  # handed to the consumer
            # Its traceback would hold the consumer's frames, and so the iterator.
            self.deliver(task, BatchResult(error=error.with_traceback(None)))

    def _arrive(self, task: BatchTask) -> None:
        if self._fetchers is None:
            self._early.append(task)
        else:
            self._advance(task, "loop")

    def deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Hand over what came of ``task``; from any thread."""
        if self.under_way.pop(id(task), None) is not None:
            if result.state is None:
                result.state = task.state
            if self._leaves:
                result = self.maker.leave(task, result)
            self._sink(task, result)

    def _put(self, task: BatchTask, result: BatchResult) -> None:
        self.ready.put(task.number, result)

    def receive(
        self, task: BatchTask, result: BatchResult, failures: Sequence[Failure] = ()
    ) -> None:
        """Take what came of ``task`` in the pool, and what failed on the way."""
        result.attempted = 0 if self.route else len(task.indices)
        result.failures = failures
        self.deliver(task, result)

    def count(self, result: BatchResult) -> None:
        """Count, in the order of delivery, what was tried and what failed elsewhere."""
        policy = self.maker.policy
        policy.begin(result.attempted)
        try:
            for failure in result.failures:
                policy.count_in(failure)
        except Exception as error:  # the budget is spent
            result.error = error

    # -- the steps that are not the maker's or the fetchers's -------------------------

    def _finish(self, task: BatchTask) -> None:
        task.result = self.maker.finish(task)
        task.samples = []

    def _on_fetchers(self) -> FetcherPool:
        if self._fetchers is None:
            raise LoaderClosedError("the iterator was closed")
        return self._fetchers

    async def _read(
        self, stream: AsyncStream, stack: contextlib.AsyncExitStack
    ) -> None:
        """Pull the stream for one request after the other."""
        reader = asyncio.current_task()
        # The user's iterator may have swallowed the cancellation, which comes but once.
        while reader is not None and not reader.cancelling():
            task = await self._to_pull.get()
            try:
                await stream.pull(task, stack)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # handed to the consumer
                task.result = BatchResult(error=error)
            self._stepped(task)

    def _pause(self, seconds: float) -> None:
        """Wait before another attempt, in the thread, unless the run is closing."""
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)
            raise LoaderClosedError("the iterator was closed")

    def _close_stream(self) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except BaseException as error:  # raised where it is closed
            self.host.exit_error = error


def _only(error: Exception) -> BaseException:
    """Return what a task group was left by, without the group if it is but one."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        only: BaseException = error.exceptions[0]
        return only
    return error
