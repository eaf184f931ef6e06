"""What the probes of the core share: ways to iterate, bounded waits, and counts.

Nothing here looks inside of a loader.
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

# How long a test waits before it calls a wait endless, in seconds.
PATIENCE = 20.0
WAYS = ["for", "thread", "caller"]
INLINE = "inline"  # by ``for``, without a timeout: where all is plain, in its thread
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
    """Await, but not for ever."""
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
    found: list[Any] = []
    try:
        while (one := await caught(way, iterator)) is not None:
            found.append(one)
            if isinstance(one, BatchTimeoutError):
                break
    finally:
        await iterator.aclose()
    return found


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
    """Fail unless the tasks, threads and processes that the block began end."""
    before, tasks = Resources.now(), asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - tasks
    if left:
        await asyncio.wait(left, timeout=PATIENCE)
    assert not asyncio.all_tasks() - tasks
    before.assert_unchanged()


@contextlib.contextmanager
def counted_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the name of each thread that is started in the block.

    Not of the one that looks for what holds a loop up: it comes and goes where one is
    held for long, as on a busy machine.
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
    """Samples wait until the gate is open; counts how many have begun."""

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
        """Wait until ``number`` samples have begun."""
        while self.begun < number:
            self.came.clear()
            await bounded(self.came.wait())
