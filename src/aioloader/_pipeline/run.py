"""One iteration while it is hosted: takes requests, routes works, closes.

A work goes from step to step. Each step has a colour, and so a place: the loop for
coroutines, the thread for plain code. Steps of one place follow without a hop.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from aioloader._pipeline.crew import Crew
from aioloader._pipeline.home import Home
from aioloader._pipeline.ready import Latch, ReadyQueue, call_threadsafe
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.stream import AsyncStream, SyncStream
from aioloader._pipeline.work import Outcome, Work
from aioloader.errors import LoaderClosedError
from aioloader.protocols import Kind

Place: TypeAlias = Literal["loop", "thread"]


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
    """

    def __init__(
        self,
        recipe: Recipe,
        home: Home,
        *,
        concurrency: int,
        in_order: bool,
        drop_last: bool,
    ) -> None:
        self.ready = ReadyQueue(in_order=in_order)
        self.ended = Latch()
        self.exit_error: BaseException | None = None
        self.home = home
        self.under_way: dict[int, tuple[Work, float]] = {}
        self._recipe = recipe
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
        if recipe.kind is Kind.ITERABLE:
            self._stream = SyncStream(recipe, drop_last=drop_last)
        elif recipe.kind is Kind.ASYNC_ITERABLE:
            self._async_stream = AsyncStream(recipe, drop_last=drop_last)
        self.route = tuple(self._plan())
        home.admit(self)

    # -- for the consumer ---------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Take a request; its outcome will be put into ``ready``."""
        self.under_way[work.number] = (work, time.monotonic())
        self._send(work, self.route[0].place)

    def dismiss(self) -> None:
        """Begin to end; from any thread, and from finalizers. ``ended`` tells when."""
        if not self._is_closing:
            self._is_closing = True
            self._bell.put(None)
            self.home.dismiss(self)

    # -- for the home -------------------------------------------------------------

    async def main(self) -> None:
        """Host the crew and the reader of a stream, until dismissed."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._host(stack)
        except Exception as error:  # raised by the iterator's close
            self.exit_error = error
        finally:
            self._is_closing = True
            if self._stream is not None:
                self.home.cpu.post(self._close_stream)
            self.fail(LoaderClosedError("the iterator was closed"))

    async def _host(self, stack: contextlib.AsyncExitStack) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._crew = Crew(group, self._concurrency, self._recipe, self._stepped)
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
        if self.home.loop is None:
            self._close_stream()
            self.fail(LoaderClosedError("the iterator was closed"))

    def fail(self, error: BaseException) -> None:
        """Give up: every wait of the consumer ends with ``error``."""
        self.ready.fail(error)

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise _Closed

    # -- the route ----------------------------------------------------------------

    def _plan(self) -> list[Step]:
        recipe = self._recipe
        if self._async_stream is not None:
            steps = [Step("fetch", "loop", self._to_pull.put_nowait)]
        elif self._stream is not None:
            steps = [Step("fetch", "thread", self._stream.pull)]
        elif recipe.reads_async:
            steps = [Step("fetch", "loop", lambda work: self._on_crew().fetch(work))]
        else:
            steps = [Step("fetch", "thread", partial(recipe.read, pause=self._pause))]
        one_by_one = recipe.reads_async and recipe.get_batch is None
        if recipe.transforms_async and not one_by_one:
            steps.append(
                Step("transform", "loop", lambda work: self._on_crew().transform(work))
            )
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
                self._deliver(work, work.outcome)
                return
            step = self.route[work.step]
            if step.place != here:
                self._send(work, step.place)
                return
            work.step += 1
            try:
                step.do(work)
            except BaseException as error:  # handed to the consumer
                work.outcome = Outcome(error=error)
            else:
                if here == "loop":
                    return  # the crew or the reader has it, and will call _stepped

    def _stepped(self, work: Work) -> None:
        self._advance(work, "loop")

    def _send(self, work: Work, place: Place) -> None:
        if place == "thread":
            self.home.cpu.post(partial(self._advance, work, "thread"))
        elif threading.get_ident() == self._loop_ident:
            self._advance(work, "loop")
        elif self.home.loop is not None and not call_threadsafe(
            self.home.loop, self._arrive, work
        ):
            self.fail(LoaderClosedError("the event loop of the loader is closed"))

    def _arrive(self, work: Work) -> None:
        if self._crew is None:
            self._early.append(work)
        else:
            self._advance(work, "loop")

    def _deliver(self, work: Work, outcome: Outcome) -> None:
        self.under_way.pop(work.number, None)
        self.ready.put(work.number, outcome)

    # -- the steps that are not the recipe's or the crew's -------------------------

    def _finish(self, work: Work) -> None:
        work.outcome = self._recipe.finish(work)
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
