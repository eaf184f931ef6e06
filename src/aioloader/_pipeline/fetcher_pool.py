"""A fixed pool of fetchers: coroutines that take samples to read from one queue.

Samples of several batches are in flight at once: an idle fetcher takes the next sample,
whatever its batch. A task per sample would cost ten times as much.
"""

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader._order.failures import SKIP
from aioloader._order.raising import ends_task
from aioloader._pipeline.awaiting import resolved, user_error
from aioloader._pipeline.batch_maker import BatchMaker, Reading
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask
from aioloader.protocols import is_async_function

if TYPE_CHECKING:
    from aioloader._pipeline.tuner import Tuner

# One in this many samples of a batch is timed.
_TIMED_EVERY = 8
_RESERVE = 8  # idle fetchers that are kept
# How long later batches wait for the first one, unless the consumer asks for more:
# seconds, then turns of the loop, which are long when it is busy. An iteration may end
# with its first batch, as in a server that makes one loader per request.
_HEAD_START = 0.001
_TURNS = 8
Job: TypeAlias = Callable[[BatchTask, int], Awaitable[None]]
# Takes a batch whose samples are all there; returns the rest to await, if any.
Done: TypeAlias = Callable[[BatchTask], Coroutine[Any, Any, None] | None]


class FetcherPool:
    """Read and transform samples, at most ``size`` at a time, on one event loop.

    Args:
        size: How many fetchers read at a time; they start on demand, and all but a few
            end when idle.
        maker: The user's functions.
        done: Called with a batch whose samples are all there, or that has a result.
        head_start: Whether the first batch is read a moment before the others.
        tuner: Changes ``size`` if the loader chooses it.
    """

    def __init__(
        self,
        size: int,
        maker: BatchMaker,
        done: Done,
        *,
        head_start: bool,
        tuner: "Tuner | None" = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        # Not the context of the code that submits a batch, maybe another library's.
        self._context = contextvars.copy_context()
        self._size = size
        self._maker = maker
        self._done = done
        self._queue: deque[tuple[BatchTask, Job, int]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._fetching = 0  # fetchers that are not collating
        # Also some tasks that have ended: a done callback for each costs a loop step.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # Batches held until the head start of the first one is over.
        self._held: deque[BatchTask] | None = deque() if head_start else None
        self._timer: asyncio.Handle | None = None
        self._tuner = tuner if tuner and tuner.concurrency else None
        self._failed = 0  # reads, including those that are retried
        self._reading = Reading(self._get, self._get_batch, asyncio.sleep, self._error)
        self._is_wrapped = maker.reads_async and not is_async_function(maker.get)

    def read(self, task: BatchTask) -> None:
        """Read the samples of ``task``; the first batch has a head start."""
        if self._held is None:
            self._read(task)
        elif self._timer is None:
            self._timer = self._loop.call_later(_HEAD_START, self._wait, _TURNS)
            self._read(task)
        else:
            self._held.append(task)

    def read_ahead(self) -> None:
        """Read the batches after the first one too, from now on."""
        if self._held is not None and self._timer is not None:
            self._stop_timer()
            held, self._held = self._held, None
            for task in held:
                self._read(task)

    def _wait(self, turns: int) -> None:
        if turns:
            self._timer = self._loop.call_soon(self._wait, turns - 1)
        else:
            self.read_ahead()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None  # it refers to this pool
        if timer is not None:
            timer.cancel()

    def _read(self, task: BatchTask) -> None:
        """Queue a batch's reads; an async transform follows each single read."""
        maker = self._maker
        maker.policy.begin(len(task.indices))
        if maker.get_batch is not None:
            self._queue_jobs(task, self._fetch_batch, 1)
        else:
            self._read_samples(task)

    def transform(self, task: BatchTask) -> None:
        """Transform the samples of ``task`` before later batches are read."""
        task.stage = "transform"
        self._queue_jobs(task, self._transform_sample, len(task.samples), first=True)

    def spawn(self, rest: Coroutine[Any, Any, None]) -> None:
        """Await the rest of a batch that no fetcher holds."""
        self._start(rest, "aioloader collate")

    async def aclose(self) -> None:
        """Cancel the tasks and wait until they have ended."""
        self._is_closed = True
        self._stop_timer()
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()  # cancelled ones refer to this pool, as jobs do
        self._queue.clear()
        del self._done, self._reading

    # -- the fetchers ---------------------------------------------------------------

    def _read_samples(self, task: BatchTask, *, first: bool = False) -> None:
        task.samples = [MISSING] * len(task.indices)
        fetch = self._fetch_wrapped if self._is_wrapped else self._fetch_sample
        self._queue_jobs(task, fetch, len(task.indices), first=first)

    def _queue_jobs(
        self, task: BatchTask, job: Job, jobs: int, *, first: bool = False
    ) -> None:
        task.cursor, task.pending = 0, jobs
        if not jobs:
            self._finish(task)
            return
        place = len(self._queue)
        if first:  # before later batches, not before earlier ones
            numbers = (one.number for one, *_ in self._queue)
            later = (k for k, number in enumerate(numbers) if number > task.number)
            place = next(later, place)
        self._queue.insert(place, (task, job, jobs))
        self._rouse(jobs)

    def _rouse(self, jobs: int) -> None:
        """Wake or start a fetcher per job, within ``size``."""
        while jobs and self._idle:
            waiting = self._idle.pop()
            if not waiting.done():
                waiting.set_result(None)
                jobs -= 1
        while jobs and self._fetching < self._size:
            self._fetching += 1
            jobs -= 1
            self._start(self._run(), "aioloader fetcher")

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        if self._is_closed:
            coroutine.close()
            return
        tasks = self._tasks
        if len(tasks) > 2 * self._size:
            self._tasks = tasks = {task for task in tasks if not task.done()}
        context = self._context.copy()
        tasks.add(self._loop.create_task(coroutine, name=name, context=context))

    async def _run(self) -> None:
        """Do jobs until there are none.

        The error of a job ends its batch, not the fetcher.
        """
        # User code may have swallowed the cancellation, which comes only once.
        while not self._is_closed and self._fetching <= self._size:
            found = self._next()
            if found is None:
                if self._held is not None or len(self._idle) >= _RESERVE:
                    break
                waiting = self._loop.create_future()
                self._idle.append(waiting)
                await waiting
                continue
            task, job, jobs, position = found
            began = self._begin(task, position)
            try:
                await job(task, position)
            except BaseException as error:  # handed to the consumer
                if ends_task(error):
                    raise
                rest = self._failed_by(task, error)
            else:
                rest = self._did(task, position, jobs, began)
            if self._tuner is not None:
                self._tune(self._tuner, began)
            if rest is not None and not await self._give_way(rest):
                return
        self._fetching -= 1

    def _next(self) -> tuple[BatchTask, Job, int, int] | None:
        """Take the next job, how many its batch has, and its position; or None."""
        queue = self._queue
        while queue:
            task, job, jobs = queue[0]
            position = task.cursor
            task.cursor += 1
            if task.result or task.cursor == jobs:
                queue.popleft()
            if not task.result:
                return task, job, jobs, position
        return None

    def _begin(self, task: BatchTask, position: int) -> float:
        """Return the start time of a job, or 0 if it is not timed."""
        if position % _TIMED_EVERY and self._tuner is None:
            return 0.0
        began = time.perf_counter()
        if not position and task.stage == "fetch":
            task.began = began
        elif not position:
            task.started = began
        return began

    def _failed_by(
        self, task: BatchTask, error: BaseException
    ) -> Coroutine[Any, Any, None] | None:
        """End a batch with an error, unless another of its jobs has failed before."""
        if task.result:
            return None
        task.result = BatchResult(error=error)
        return self._done(task)

    def _did(
        self, task: BatchTask, position: int, jobs: int, began: float
    ) -> Coroutine[Any, Any, None] | None:
        """Count a finished job; after the last one return the rest to await."""
        task.pending -= 1  # never 0 again once a sample failed
        if began or not task.pending:
            now = time.perf_counter()
            is_read = task.stage == "fetch"
            if is_read:
                task.read = now
            is_single = not (is_read and self._maker.get_batch)
            if is_single and not position % _TIMED_EVERY:
                # It counts for the untimed jobs after it too.
                timed = min(_TIMED_EVERY, jobs - position)
                task.busy += (now - began) * timed
        return None if task.pending else self._done(task)

    def _tune(self, tuner: "Tuner", began: float) -> None:
        """Set the number of concurrent jobs to what the tuner returns."""
        is_busy = bool(self._queue) and self._fetching >= self._size
        size = tuner.note_read(began, failures=self._failed, is_busy=is_busy)
        if size != self._size:
            self._size = size
            self._rouse(sum(jobs - one.cursor for one, _, jobs in self._queue))

    async def _give_way(self, rest: Coroutine[Any, Any, None]) -> bool:
        """Await the rest of a batch while another reads. Tell whether to continue."""
        self._fetching -= 1
        self._rouse(len(self._queue))
        await rest
        if self._fetching >= self._size:
            return False
        self._fetching += 1
        return True

    def _finish(self, task: BatchTask) -> None:
        rest = self._done(task)
        if rest is not None:
            self.spawn(rest)

    # -- the jobs -------------------------------------------------------------------

    def _seed_for(self, task: BatchTask, position: int, stage: int) -> None:
        """Make this asyncio task draw from the generators of its sample or batch."""
        if task.key is not None and self._maker.at is not None:
            self._maker.at(task, position, stage)

    async def _fetch_sample(self, task: BatchTask, position: int) -> None:
        self._seed_for(task, position, 0)
        try:
            sample = await self._maker.get(task.indices[position])
        except BaseException as error:  # retried, or the policy decides
            sample = await self._maker.again(task, position, error, self._reading)
        task.samples[position] = sample
        if self._maker.transforms_async:
            await self._transform_sample(task, position)

    async def _fetch_wrapped(self, task: BatchTask, position: int) -> None:
        """Fetch through a plain wrapper, whose results contain awaitables."""
        self._seed_for(task, position, 0)
        try:
            sample = await resolved(self._maker.get(task.indices[position]))
        except BaseException as error:  # retried, or the policy decides
            sample = await self._maker.again(task, position, error, self._reading)
        task.samples[position] = sample
        if self._maker.transforms_async:
            await self._transform_sample(task, position)

    def _error(self, error: BaseException) -> BaseException:
        error = user_error(error, "the dataset")
        self._failed += 1
        return error

    def _get(self, task: BatchTask, position: int) -> Awaitable[Any]:
        self._seed_for(task, position, 0)
        return resolved(self._maker.get(task.indices[position]))

    def _get_batch(self, task: BatchTask) -> Awaitable[Any]:
        self._seed_for(task, -1, 0)
        return resolved(self._maker.get_batch(task.indices))  # type: ignore[misc]

    async def _fetch_batch(self, task: BatchTask, _position: int) -> None:
        """Read all of a batch with ``__getitems__``, or else each of its samples."""
        maker = self._maker
        if not await maker.whole(task, self._reading):
            task.stage = "transform" if maker.transforms_async else "fetch"
            self._read_samples(task, first=True)
            task.pending += 1  # this job

    async def _transform_sample(self, task: BatchTask, position: int) -> None:
        sample = task.samples[position]
        if sample is SKIP:
            return
        self._seed_for(task, position, 1)
        try:
            sample = await self._maker.transform(sample)  # type: ignore[misc]
        except BaseException as error:  # the policy decides
            error = user_error(error, "transform")
            sample = self._maker.resolve("transform", task, position, error)
        task.samples[position] = sample
