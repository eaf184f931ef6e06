"""One iteration while it is hosted: takes requests, routes works, closes.

A work goes from step to step. Each step has a colour, and so a place: the loop for
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

from aioloader._order.failures import Failure
from aioloader._order.progress import BEGINNING, Bookmark
from aioloader._pipeline.crew import Crew
from aioloader._pipeline.home import Home
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.roles import Pool, Stage
from aioloader._pipeline.stream import AsyncStream, SyncStream
from aioloader._pipeline.waiting import Latch, call_threadsafe
from aioloader._pipeline.work import Outcome, Work
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

Place: TypeAlias = Literal["loop", "thread", "pool"]


class Step(NamedTuple):
    """One step of the route: its stage, where it runs, and what it does."""

    stage: str
    place: Place
    do: Callable[[Work], None]


class _Closed(Exception):  # noqa: N818  (a signal within this file)
    """Ends the task group of ``main``."""


class Run:
    """A guest of a home: the stages of one iteration.

    It holds no reference to the iterator that feeds it, so that the iterator can be
    collected; the iterator's finalizer then dismisses the run.

    Args:
        recipe: The user's functions.
        home: Where it runs; the run holds one lease from the start.
        concurrency: Samples in flight on the loop.
        in_order: Deliver batches by number, else as they complete.
        drop_last: Drop the short last batch of a stream.
        bookmark: Where the epoch is resumed.
        pool: What makes batches, or the rest of them after they were read here; None
            if all of that is done here.
        sink: Takes the outcomes instead of ``ready``.
    """

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        recipe: Recipe,
        home: Home,
        *,
        concurrency: int,
        in_order: bool,
        drop_last: bool,
        bookmark: Bookmark = BEGINNING,
        pool: Pool | None = None,
        sink: Callable[[Work, Outcome], None] | None = None,
    ) -> None:
        self.bookmark = bookmark
        # Of a stream, what was delivered before is made again, to get behind it.
        without = bookmark.beyond if recipe.kind is Kind.MAP else frozenset[int]()
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
        self._leaves = recipe.keeps_state and is_here
        self._sink = sink or self._put
        self.ended = Latch()
        self.exit_error: BaseException | None = None
        self.home = home
        self.under_way: dict[int, tuple[Work, float]] = {}
        self.recipe = recipe
        self._concurrency = concurrency
        self._is_closing = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = asyncio.Event()
        self._crew: Crew | None = None
        self._loop_ident: int | None = None
        self._early: deque[Work] = deque()
        self._to_pull: asyncio.Queue[Work] = asyncio.Queue()
        self._stream: SyncStream | None = None
        self._async_stream: AsyncStream | None = None
        resume = bookmark.states.get(0)
        if recipe.kind is Kind.ITERABLE:
            self._stream = SyncStream(
                recipe, drop_last=drop_last, resume=resume, keys=recipe.seeds()
            )
        elif recipe.kind is Kind.ASYNC_ITERABLE:
            self._async_stream = AsyncStream(recipe, drop_last=drop_last, resume=resume)
        self.route = tuple(self._plan())
        home.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def open(self) -> None:
        """Make ready for the first request; may take long."""
        if self.pool is not None:
            self.pool.open(self)

    def submit(self, work: Work) -> None:
        """Take a request; its outcome will be put into ``ready``."""
        self.under_way[id(work)] = (work, time.monotonic())
        self._send(work, self._place_of(work))

    def dismiss(self) -> None:
        """Begin to end; from any thread, and from finalizers. ``ended`` tells when."""
        if not self._is_closing:
            self._is_closing = True
            self._bell.put(None)
            self.home.dismiss(self)
            if self.stage is not None:
                self.stage.stop()

    # -- for the home -------------------------------------------------------------

    async def main(self) -> None:
        """Host the crew and the reader of a stream, until dismissed."""
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
                self.home.cpu.post(self._close_stream)
            self.fail(LoaderClosedError("the iterator was closed"))

    async def _host(self, stack: contextlib.AsyncExitStack) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._crew = Crew(group, self._concurrency, self.recipe, self._stepped)
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
        """Let go, in the home's own thread; ``main`` ends if it was begun."""
        self._closing.set()
        if self.pool is not None:
            self.pool.forget(self)
        if self.home.loop is None:
            if self.home.lifespan and self.pool is not None and self.pool.reads:
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
            for work, _ in list(self.under_way.values()):
                self.deliver(work, Outcome(error=error))

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise _Closed

    # -- the route ----------------------------------------------------------------

    def _plan(self) -> list[Step]:
        recipe = self.recipe
        if not recipe.reads or (self.pool is not None and self.pool.reads):
            return [] if self.pool is not None else self._plan_rest(recipe)
        return [*self._plan_fetch(recipe), *self._plan_rest(recipe)]

    def _plan_fetch(self, recipe: Recipe) -> list[Step]:
        if self._async_stream is not None:
            return [Step("fetch", "loop", self._to_pull.put_nowait)]
        if self._stream is not None:
            return [Step("fetch", "thread", self._stream.pull)]
        if recipe.reads_async:
            return [Step("fetch", "loop", lambda work: self._on_crew().fetch(work))]
        return [Step("fetch", "thread", partial(recipe.read, pause=self._pause))]

    def _plan_rest(self, recipe: Recipe) -> list[Step]:
        steps = []
        one_by_one = recipe.reads_async and recipe.get_batch is None
        if recipe.transforms_async and not one_by_one:
            steps.append(
                Step("transform", "loop", lambda work: self._on_crew().transform(work))
            )
        if self.pool is not None:
            return steps
        if not recipe.collates_async:
            return [*steps, Step("collate", "thread", self._finish)]
        if recipe.transform is not None and not recipe.transforms_async:
            steps.append(Step("transform", "thread", recipe.apply))
        collate = Step("collate", "loop", lambda work: self._on_crew().collate(work))
        return [*steps, collate]

    def _advance(self, work: Work, here: Place) -> None:
        """Take ``work`` as far as it goes without leaving ``here``."""
        while not self._is_closing:
            if work.outcome is not None:
                self.deliver(work, work.outcome)
                return
            place = self._place_of(work)
            if place != here:
                self._send(work, place)
                return
            if here == "thread":
                with self.recipe.around(work):
                    self._do_plain(work)
            elif self._do(work):
                return  # the crew or the reader has it, and will call _stepped

    def _place_of(self, work: Work) -> Place:
        """Return where the next step of ``work`` is."""
        return self.route[work.step].place if work.step < len(self.route) else "pool"

    def _do_plain(self, work: Work) -> None:
        """Do the steps that follow each other in the thread."""
        while work.outcome is None and self._place_of(work) == "thread":
            self._do(work)

    def _do(self, work: Work) -> bool:
        """Do the next step; an error is its outcome. Tell whether there was none."""
        step = self.route[work.step]
        work.step += 1
        try:
            step.do(work)
        except BaseException as error:  # handed to the consumer
            work.outcome = Outcome(error=error)
        return work.outcome is None

    def _stepped(self, work: Work) -> None:
        self._advance(work, "loop")

    def _send(self, work: Work, place: Place) -> None:
        if place == "pool":
            self._into_pool(work)
        elif place == "thread":
            self.home.post(partial(self._advance, work, "thread"))
        elif threading.get_ident() == self._loop_ident:
            self._advance(work, "loop")
        elif self.home.loop is not None and not call_threadsafe(
            self.home.loop, self._arrive, work
        ):
            self.fail(LoaderClosedError("the event loop of the loader is closed"))

    def _into_pool(self, work: Work) -> None:
        assert self.pool is not None
        try:
            self.pool.submit(self, work)
        except Exception as error:  # handed to the consumer
            # Its traceback would hold the consumer's frames, and so the iterator.
            self.deliver(work, Outcome(error=error.with_traceback(None)))

    def _arrive(self, work: Work) -> None:
        if self._crew is None:
            self._early.append(work)
        else:
            self._advance(work, "loop")

    def deliver(self, work: Work, outcome: Outcome) -> None:
        """Hand over what came of ``work``; from any thread."""
        if self.under_way.pop(id(work), None) is not None:
            if outcome.state is None:
                outcome.state = work.state
            if self._leaves:
                outcome = self.recipe.leave(work, outcome)
            self._sink(work, outcome)

    def _put(self, work: Work, outcome: Outcome) -> None:
        self.ready.put(work.number, outcome)

    def receive(
        self, work: Work, outcome: Outcome, failures: Sequence[Failure] = ()
    ) -> None:
        """Take what came of ``work`` in the pool, and what failed on the way."""
        outcome.attempted = 0 if self.route else len(work.indices)
        outcome.failures = failures
        self.deliver(work, outcome)

    def count(self, outcome: Outcome) -> None:
        """Count, in the order of delivery, what was tried and what failed elsewhere."""
        policy = self.recipe.policy
        policy.begin(outcome.attempted)
        try:
            for failure in outcome.failures:
                policy.count_in(failure)
        except Exception as error:  # the budget is spent
            outcome.error = error

    # -- the steps that are not the recipe's or the crew's -------------------------

    def _finish(self, work: Work) -> None:
        work.outcome = self.recipe.finish(work)
        work.samples = []

    def _on_crew(self) -> Crew:
        if self._crew is None:
            raise LoaderClosedError("the iterator was closed")
        return self._crew

    async def _read(
        self, stream: AsyncStream, stack: contextlib.AsyncExitStack
    ) -> None:
        """Pull the stream for one request after the other."""
        task = asyncio.current_task()
        # The user's iterator may have swallowed the cancellation, which comes but once.
        while task is not None and not task.cancelling():
            work = await self._to_pull.get()
            try:
                await stream.pull(work, stack)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # handed to the consumer
                work.outcome = Outcome(error=error)
            self._stepped(work)

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
            self.home.exit_error = error


def _only(error: Exception) -> BaseException:
    """Return what a task group was left by, without the group if it is but one."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        only: BaseException = error.exceptions[0]
        return only
    return error
