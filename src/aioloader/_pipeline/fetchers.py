"""Fetchers, which are long-lived tasks that read samples on an event loop.

Samples of several batches may be in flight. An idle fetcher takes the next unread
sample, earlier batches first. A task per sample would cost ten times as much.
"""

import asyncio
import contextvars
import itertools
import time
from bisect import insort
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from aioloader._base.raising import ends_task
from aioloader._base.waiting import resolve
from aioloader._pipeline.batch_task import BatchTask

# One in this many samples of a batch is timed.
_TIMED_EVERY = 8
# Jobs that start while at most one in ``_FEW`` fetchers is busy are timed, too, up to
# ``_MAX_ALONE`` of them.
_FEW, _MAX_ALONE = 8, 64
RESERVE = 64  # idle fetchers to keep, since others would soon be started instead
FetchJob: TypeAlias = Callable[[BatchTask, int], Awaitable[Any]]
# Maps a job's start time, and whether all fetchers are busy, to the new pool size.
Tune: TypeAlias = Callable[[float, bool], int]


@dataclass(eq=False, repr=False)
class FetchJobs:
    """The jobs of one batch: one job per sample, or one job for the whole batch."""

    task: BatchTask
    job: FetchJob
    count: int
    ended: asyncio.Future[None]  # resolved when all have ended, or one has failed
    left: int  # how many have not ended; never 0 once one has failed
    taken: int = 0  # how many have started
    error: BaseException | None = None
    began: float = 0.0  # when the first one started
    busy: float = 0.0  # estimated seconds of all jobs together
    result: Any = None  # of the job that ended last


class FetcherPool:
    """A pool of tasks that run up to ``size`` jobs at a time on the running loop.

    Fetchers start on demand. After each job, ``tune`` returns the new ``size``.
    """

    def __init__(self, size: int, tune: Tune | None = None) -> None:
        self.reserve = RESERVE  # how many idle fetchers are kept; surplus ones end
        self._loop = asyncio.get_running_loop()
        # Copied here: a batch may be submitted in another library's context.
        self._context = contextvars.copy_context()
        self._size = size
        self._tune = tune
        self.alone: list[float] = []  # seconds of jobs that started while few ran
        self._few = max(1, size // _FEW)  # jobs that are few; 0: enough were timed
        self._running = 0
        self._turns = itertools.count(1)  # of batches, in order of their first jobs
        self._queue: list[tuple[int, FetchJobs]] = []  # sorted
        self._idle: list[asyncio.Future[None]] = []
        self._fetchers = 0
        # Some have ended: a callback that drops each would cost a step of the loop.
        self._tasks: set[asyncio.Task[None]] = set()
        self._max_tasks = RESERVE  # above it, ended tasks are dropped
        self._is_closed = False

    async def run(self, task: BatchTask, job: FetchJob, count: int) -> FetchJobs:
        """Run ``job`` for the first ``count`` positions of ``task``.

        Raise the first error; jobs of ``task`` still in the queue are then dropped.
        """
        jobs = FetchJobs(task, job, count, self._loop.create_future(), count)
        if count:
            task.turn = task.turn or next(self._turns)
            insort(self._queue, (task.turn, jobs))
            self._wake(count)
            await jobs.ended
        error, jobs.error = jobs.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame
        return jobs

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ``aclose`` cancels together with the fetchers."""
        if self._is_closed:
            work.close()
            return
        if len(self._tasks) >= self._max_tasks:
            self._tasks = {task for task in self._tasks if not task.done()}
            self._max_tasks = 2 * len(self._tasks) + RESERVE
        context = self._context.copy()
        self._tasks.add(self._loop.create_task(work, name=name, context=context))

    async def aclose(self) -> None:
        """Cancel all tasks, each once, and wait until they have ended."""
        self._is_closed = True
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            if not task.cancelling():  # else the end of the caller's loop has
                task.cancel()
        if tasks:
            asyncio.get_running_loop()  # raises if this is collected after its loop
            await asyncio.sleep(0)  # idle fetchers end; a wait for each costs more
            tasks = [task for task in tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()  # cancelled ones refer to this pool
        self._queue.clear()

    def _wake(self, jobs: int) -> None:
        """Wake or start one fetcher per job, up to ``size`` fetchers."""
        while jobs and self._idle:
            waiting = self._idle.pop()
            if not waiting.done():
                waiting.set_result(None)
                jobs -= 1
        while jobs and self._fetchers < self._size:
            self._fetchers += 1
            jobs -= 1
            self.spawn(self._run(), "aioloader fetcher")

    async def _run(self) -> None:
        """Run jobs as one fetcher; a job's error ends its batch, not the fetcher."""
        queue, tune = self._queue, self._tune
        # User code may have swallowed the cancellation, which comes only once.
        while not self._is_closed and self._fetchers <= self._size:
            if not (queue or await self._idle_until_woken()):
                break
            if not queue:  # another fetcher was faster
                continue
            jobs = queue[0][1]
            position = jobs.taken
            jobs.taken += 1
            if jobs.taken == jobs.count:
                del queue[0]
            self._running += 1
            is_alone = self._running <= self._few
            is_timed = is_alone or not position % _TIMED_EVERY
            began = time.perf_counter() if is_timed or tune else 0.0
            jobs.began = jobs.began or began
            try:
                jobs.result = await jobs.job(jobs.task, position)
            except BaseException as error:  # raised by ``run``
                self._running -= 1
                self._fail(jobs, error)
            else:
                self._running -= 1
                jobs.left -= 1
                if is_timed:
                    seconds = time.perf_counter() - began
                    self._record(jobs, position, seconds, is_alone=is_alone)
                if not jobs.left:
                    resolve(jobs.ended)
            if tune is not None:
                self._resize(tune(began, bool(queue) and self._fetchers >= self._size))
        self._fetchers -= 1

    def _record(
        self, jobs: FetchJobs, position: int, seconds: float, *, is_alone: bool
    ) -> None:
        """Record a job's seconds; assume the same for each untimed job after it."""
        if not position % _TIMED_EVERY:
            jobs.busy += seconds * min(_TIMED_EVERY, jobs.count - position)
        if is_alone:
            self.alone.append(seconds)
            if len(self.alone) == _MAX_ALONE:
                self._few = 0

    async def _idle_until_woken(self) -> bool:
        """Wait to be woken; return False immediately if enough fetchers are idle."""
        if len(self._idle) >= self.reserve:
            return False
        waiting = self._loop.create_future()
        self._idle.append(waiting)
        await waiting
        return True

    def _fail(self, jobs: FetchJobs, error: BaseException) -> None:
        """End a batch's jobs with their first error; re-raise a cancellation."""
        if ends_task(error):
            raise error
        if not jobs.ended.done():
            jobs.error = error
            jobs.ended.set_result(None)
            self._queue[:] = [entry for entry in self._queue if entry[1] is not jobs]

    def _resize(self, size: int) -> None:
        if size != self._size:
            self._size = size
            self._wake(sum(jobs.count - jobs.taken for _, jobs in self._queue))
