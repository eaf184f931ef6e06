"""A fixed crew of fetchers that pulls samples from one ordered stream of requests.

Samples of several batches are in flight at once: a fetcher that is done takes the next
sample, of whatever batch. A task per sample would cost ten times as much as a pull.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aioloader._order.failures import SKIP
from aioloader._pipeline.awaiting import is_being_cancelled, resolved
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.work import MISSING, Outcome, Work
from aioloader.protocols import is_async_function

Job: TypeAlias = Callable[[Work, int], Awaitable[None]]
Done: TypeAlias = Callable[[Work], None]


class Crew:
    """Await samples, at most ``size`` at a time; lives on one event loop.

    Args:
        group: The task group that owns the fetchers.
        size: How many fetchers; they are started as there is work.
        recipe: The user's functions.
        done: Called with a work whose step is done, or that has an outcome.
    """

    def __init__(
        self, group: asyncio.TaskGroup, size: int, recipe: Recipe, done: Done
    ) -> None:
        self._group = group
        self._size = size
        self._recipe = recipe
        self._done = done
        self._queue: deque[tuple[Work, Job, int]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._started = 0

    # -- what is asked of it, on its loop -----------------------------------------

    def fetch(self, work: Work) -> None:
        """Read the samples of ``work``; one by one, an async transform follows each."""
        recipe = self._recipe
        recipe.policy.begin(len(work.indices))
        work.samples = [MISSING] * len(work.indices)
        if recipe.get_batch is not None:
            self._submit(work, self._fetch_batch, 1)
        elif is_async_function(recipe.get):
            self._submit(work, self._fetch_sample, len(work.indices))
        else:
            self._submit(work, self._fetch_wrapped, len(work.indices))

    def transform(self, work: Work) -> None:
        """Transform the samples of ``work``."""
        self._submit(work, self._transform_sample, len(work.samples))

    def collate(self, work: Work) -> None:
        """Collate ``work``."""
        self._submit(work, self._collate_batch, 1)

    # -- the crew -----------------------------------------------------------------

    def _submit(self, work: Work, job: Job, jobs: int) -> None:
        work.cursor, work.pending = 0, jobs
        if not jobs:
            self._done(work)
            return
        self._queue.append((work, job, jobs))
        while jobs and self._idle:
            waiting = self._idle.pop()
            if not waiting.done():
                waiting.set_result(None)
                jobs -= 1
        while jobs and self._started < self._size:
            self._hire()
            jobs -= 1

    def _hire(self) -> None:
        self._started += 1
        fetcher = self._pull()
        try:
            self._group.create_task(fetcher, name="aioloader fetcher")
        except RuntimeError:  # the group is being cancelled: there is no more work
            fetcher.close()

    async def _pull(self) -> None:
        loop = asyncio.get_running_loop()
        task, queue = asyncio.current_task(), self._queue
        # User code may have swallowed the cancellation, which comes but once.
        while task is not None and not task.cancelling():
            if not queue:
                waiting = loop.create_future()
                self._idle.append(waiting)
                await waiting
                continue
            work, job, jobs = queue[0]
            position = work.cursor
            work.cursor += 1
            if work.outcome or work.cursor == jobs:
                queue.popleft()
            if not work.outcome:
                await self._guarded(work, position, job)

    async def _guarded(self, work: Work, position: int, job: Job) -> None:
        """Do one job; its error ends the work, not the crew."""
        try:
            await job(work, position)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            # Not ours: something that the user's code awaited was cancelled.
            stand_in = RuntimeError("cancelled by the code that was awaited")
            stand_in.__cause__ = error
            stand_in.add_note(f"aioloader: {self._recipe.place('fetch', work)}")
            self._fail(work, stand_in)
        except GeneratorExit:
            raise
        except BaseException as error:  # handed to the consumer
            self._fail(work, error)
        else:
            work.pending -= 1  # never 0 again once a sample failed
            if not work.pending:
                self._done(work)

    def _fail(self, work: Work, error: BaseException) -> None:
        if not work.outcome:
            work.outcome = Outcome(error=error)
            self._done(work)

    # -- the jobs -----------------------------------------------------------------

    def _be_at(self, work: Work, position: int, stage: int) -> None:
        """Have this task draw from the generators of what it is about to await."""
        if work.key is not None and self._recipe.at is not None:
            self._recipe.at(work, position, stage)

    async def _fetch_sample(self, work: Work, position: int) -> None:
        self._be_at(work, position, 0)
        try:
            sample = await self._recipe.get(work.indices[position])
        except Exception as error:  # retried, or the policy decides
            sample = await self._reread(work, position, error)
        await self._arrived(work, position, sample)

    async def _fetch_wrapped(self, work: Work, position: int) -> None:
        """Fetch through a plain wrapper, whose results hold the awaitables."""
        self._be_at(work, position, 0)
        try:
            sample = await resolved(self._recipe.get(work.indices[position]))
        except Exception as error:  # retried, or the policy decides
            sample = await self._reread(work, position, error)
        await self._arrived(work, position, sample)

    async def _arrived(self, work: Work, position: int, sample: Any) -> None:
        work.samples[position] = sample
        if self._recipe.transforms_async:
            await self._transform_sample(work, position)

    async def _reread(self, work: Work, position: int, error: Exception) -> Any:
        recipe = self._recipe
        for delay in recipe.delays(error):
            await asyncio.sleep(delay)
            self._be_at(work, position, 0)
            try:
                return await resolved(recipe.get(work.indices[position]))
            except Exception as again:  # counted, then resolved
                error = again
                if not recipe.may_retry(error):
                    break
        return recipe.resolve("fetch", work, position, error)

    async def _fetch_batch(self, work: Work, _position: int) -> None:
        work.samples = await self._read_batch(work)

    async def _read_batch(self, work: Work) -> Any:
        recipe = self._recipe
        delays = None
        while True:
            self._be_at(work, -1, 0)
            try:
                samples = await resolved(recipe.get_batch(work.indices))  # type: ignore[misc]
                return recipe.checked(work, samples)
            except Exception as error:
                delays = delays or recipe.delays(error)
                delay = next(delays, None) if recipe.may_retry(error) else None
                if delay is None:
                    raise recipe.batch_error(work, error)  # noqa: B904  (keeps its cause)
                await asyncio.sleep(delay)

    async def _transform_sample(self, work: Work, position: int) -> None:
        sample = work.samples[position]
        if sample is SKIP:
            return
        self._be_at(work, position, 1)
        try:
            sample = await self._recipe.transform(sample)  # type: ignore[misc]
        except Exception as error:  # the policy decides
            sample = self._recipe.resolve("transform", work, position, error)
        work.samples[position] = sample

    async def _collate_batch(self, work: Work, _position: int) -> None:
        recipe = self._recipe
        samples = recipe.kept(work)
        if recipe.is_void(samples):
            work.outcome = Outcome(is_empty=True)
            return
        self._be_at(work, -1, 2)
        try:
            batch = await recipe.collate_fn(samples if recipe.batched else samples[0])
        except Exception as error:
            raise recipe.collate_error(work, error)  # noqa: B904  (it keeps its cause)
        work.outcome = recipe.made(work, batch)
