"""Helpers of the core tests: ways to iterate, bounded waits, counts of threads.

Nothing here looks inside a loader.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar

import pytest

from aioloader import DataLoader
from aioloader.errors import BatchTimeoutError
from aioloader.testing import Resources
from beside import beside
from samples import AsyncMap

T = TypeVar("T")

# After how many seconds a test takes a wait for endless.
PATIENCE = 20.0
WAYS = ["for", "thread", "caller"]
INLINE = "inline"  # ``for`` without a timeout: plain code runs in the consumer's thread
ASYNC_WAYS = WAYS[1:]
IN_PROCESS: dict[str, Any] = {}
THREADS: dict[str, Any] = {"num_workers": 2, "workers": "thread"}
PROCESSES: dict[str, Any] = {"num_workers": 2}
BY = {"in process": IN_PROCESS, "threads": THREADS, "processes": PROCESSES}


def make(way: str, dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader for one of the ways."""
    loop: Any = "caller" if way == "caller" else "thread"
    return DataLoader(dataset, **{"batch_size": 4, "loop": loop, **options})


async def bounded(awaitable: Awaitable[T]) -> T:
    """Await, but fail after ``PATIENCE`` seconds."""
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def step(way: str, iterator: Any) -> Any:
    """Return the next batch, None at the end."""
    if way in {"for", INLINE}:
        return await beside(lambda: next(iterator, None))
    return await bounded(anext(iterator, None))


async def outcomes(way: str, loader: DataLoader[Any]) -> list[Any]:
    """Return batches as lists and errors as they are, until the end or a hang."""
    if way != INLINE:
        loader.timeout = PATIENCE
    iterator = iter(loader) if way in {"for", INLINE} else aiter(loader)
    results: list[Any] = []
    try:
        while (result := await caught(way, iterator)) is not None:
            results.append(result)
            if isinstance(result, BatchTimeoutError):
                break
    finally:
        await iterator.aclose()
    return results


async def caught(way: str, iterator: Any) -> Any:
    """Return the next batch as a list, or its error, or None."""
    task = asyncio.current_task()
    assert task is not None
    try:
        batch = await step(way, iterator)
    except BaseException as error:
        if isinstance(error, TimeoutError) or task.cancelling():
            raise
        return error
    return batch.tolist() if hasattr(batch, "tolist") else batch


async def quiet() -> None:
    """Let everything that can run on this loop run."""
    for _ in range(300):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def released() -> AsyncIterator[None]:
    """Fail unless the tasks, threads and processes that the block started end."""
    before, tasks = Resources.now(), asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - tasks
    if left:
        await asyncio.wait(left, timeout=PATIENCE)
    assert not asyncio.all_tasks() - tasks
    before.assert_unchanged()


@contextlib.contextmanager
def counted_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the name of each thread that is started in the block.

    The watchdog of blocked loops does not count: a busy machine starts it at any time.
    """
    started: list[str] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        if thread.name != "aioloader-watch":
            started.append(thread.name)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", noting)
        yield started


class Gated(AsyncMap):
    """Samples wait until the gate is open; ``begun`` counts those that started."""

    def __init__(self, n: int, *, free: int = 0) -> None:
        super().__init__(n)
        self.free = free
        self.begun = 0
        self.gate = asyncio.Event()
        self.came = asyncio.Event()

    async def __getitem__(self, index: int) -> Any:
        self.begun += 1
        self.came.set()
        if index >= self.free:
            await self.gate.wait()
        return index

    async def until(self, number: int) -> None:
        """Wait until ``number`` samples have started."""
        while self.begun < number:
            self.came.clear()
            await bounded(self.came.wait())
