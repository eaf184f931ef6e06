"""A fixed fetchers of fetchers that pulls samples from one ordered stream of requests.

Samples of several batches are in flight at once: a fetcher that is done takes the next
sample, of whatever batch. A task per sample would cost ten times as much as a pull.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aioloader._order.failures import SKIP
from aioloader._pipeline.awaiting import is_being_cancelled, resolved
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask
from aioloader.protocols import is_async_function

Job: TypeAlias = Callable[[BatchTask, int], Awaitable[None]]
Done: TypeAlias = Callable[[BatchTask], None]


class FetcherPool:
    """Await samples, at most ``size`` at a time; lives on one event loop.

    Args:
        group: The task group that owns the fetchers.
        size: How many fetchers; they are started as there is task.
        maker: The user's functions.
        done: Called with a task whose step is done, or that has an result.
    """

    def __init__(
        self, group: asyncio.TaskGroup, size: int, maker: BatchMaker, done: Done
    ) -> None:
        self._group = group
        self._size = size
        self._maker = maker
        self._done = done
        self._queue: deque[tuple[BatchTask, Job, int]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._started = 0

    # -- what is asked of it, on its loop -----------------------------------------

    def fetch(self, task: BatchTask) -> None:
        """Read the samples of ``task``; one by one, an async transform follows each."""
        maker = self._maker
        maker.policy.begin(len(task.indices))
        task.samples = [MISSING] * len(task.indices)
        if maker.get_batch is not None:
            self._submit(task, self._fetch_batch, 1)
        elif is_async_function(maker.get):
            self._submit(task, self._fetch_sample, len(task.indices))
        else:
            self._submit(task, self._fetch_wrapped, len(task.indices))

    def transform(self, task: BatchTask) -> None:
        """Transform the samples of ``task``."""
        self._submit(task, self._transform_sample, len(task.samples))

    def collate(self, task: BatchTask) -> None:
        """Collate ``task``."""
        self._submit(task, self._collate_batch, 1)

    # -- the fetchers -----------------------------------------------------------------

    def _submit(self, task: BatchTask, job: Job, jobs: int) -> None:
        task.cursor, task.pending = 0, jobs
        if not jobs:
            self._done(task)
            return
        self._queue.append((task, job, jobs))
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
        except RuntimeError:  # the group is being cancelled: there is no more task
            fetcher.close()

    async def _pull(self) -> None:
        loop = asyncio.get_running_loop()
        this, queue = asyncio.current_task(), self._queue
        # User code may have swallowed the cancellation, which comes but once.
        while this is not None and not this.cancelling():
            if not queue:
                waiting = loop.create_future()
                self._idle.append(waiting)
                await waiting
                continue
            task, job, jobs = queue[0]
            position = task.cursor
            task.cursor += 1
            if task.result or task.cursor == jobs:
                queue.popleft()
            if not task.result:
                await self._guarded(task, position, job)

    async def _guarded(self, task: BatchTask, position: int, job: Job) -> None:
        """Do one job; its error ends the task, not the fetchers."""
        try:
            await job(task, position)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            # Not ours: something that the user's code awaited was cancelled.
            stand_in = RuntimeError("cancelled by the code that was awaited")
            stand_in.__cause__ = error
            stand_in.add_note(f"aioloader: {self._maker.place('fetch', task)}")
            self._fail(task, stand_in)
        except GeneratorExit:
            raise
        except BaseException as error:  # handed to the consumer
            self._fail(task, error)
        else:
            task.pending -= 1  # never 0 again once a sample failed
            if not task.pending:
                self._done(task)

    def _fail(self, task: BatchTask, error: BaseException) -> None:
        if not task.result:
            task.result = BatchResult(error=error)
            self._done(task)

    # -- the jobs -----------------------------------------------------------------

    def _be_at(self, task: BatchTask, position: int, stage: int) -> None:
        """Have this task draw from the generators of what it is about to await."""
        if task.key is not None and self._maker.at is not None:
            self._maker.at(task, position, stage)

    async def _fetch_sample(self, task: BatchTask, position: int) -> None:
        self._be_at(task, position, 0)
        try:
            sample = await self._maker.get(task.indices[position])
        except Exception as error:  # retried, or the policy decides
            sample = await self._reread(task, position, error)
        await self._arrived(task, position, sample)

    async def _fetch_wrapped(self, task: BatchTask, position: int) -> None:
        """Fetch through a plain wrapper, whose results hold the awaitables."""
        self._be_at(task, position, 0)
        try:
            sample = await resolved(self._maker.get(task.indices[position]))
        except Exception as error:  # retried, or the policy decides
            sample = await self._reread(task, position, error)
        await self._arrived(task, position, sample)

    async def _arrived(self, task: BatchTask, position: int, sample: Any) -> None:
        task.samples[position] = sample
        if self._maker.transforms_async:
            await self._transform_sample(task, position)

    async def _reread(self, task: BatchTask, position: int, error: Exception) -> Any:
        maker = self._maker
        for delay in maker.delays(error):
            await asyncio.sleep(delay)
            self._be_at(task, position, 0)
            try:
                return await resolved(maker.get(task.indices[position]))
            except Exception as again:  # counted, then resolved
                error = again
                if not maker.may_retry(error):
                    break
        return maker.resolve("fetch", task, position, error)

    async def _fetch_batch(self, task: BatchTask, _position: int) -> None:
        task.samples = await self._read_batch(task)

    async def _read_batch(self, task: BatchTask) -> Any:
        maker = self._maker
        delays = None
        while True:
            self._be_at(task, -1, 0)
            try:
                samples = await resolved(maker.get_batch(task.indices))  # type: ignore[misc]
                return maker.checked(task, samples)
            except Exception as error:
                delays = delays or maker.delays(error)
                delay = next(delays, None) if maker.may_retry(error) else None
                if delay is None:
                    raise maker.batch_error(task, error)  # noqa: B904  (keeps its cause)
                await asyncio.sleep(delay)

    async def _transform_sample(self, task: BatchTask, position: int) -> None:
        sample = task.samples[position]
        if sample is SKIP:
            return
        self._be_at(task, position, 1)
        try:
            sample = await self._maker.transform(sample)  # type: ignore[misc]
        except Exception as error:  # the policy decides
            sample = self._maker.resolve("transform", task, position, error)
        task.samples[position] = sample

    async def _collate_batch(self, task: BatchTask, _position: int) -> None:
        maker = self._maker
        samples = maker.kept(task)
        if maker.is_void(samples):
            task.result = BatchResult(is_empty=True)
            return
        self._be_at(task, -1, 2)
        try:
            batch = await maker.collate_fn(samples if maker.batched else samples[0])
        except Exception as error:
            raise maker.collate_error(task, error)  # noqa: B904  (it keeps its cause)
        task.result = maker.made(task, batch)
