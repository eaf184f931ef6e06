"""Datasets that record events, and lifespans for every place."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from samples import AsyncMap, AsyncStream, SyncMap, SyncStream

NOTE = "aioloader: in stage 'lifespan', {} it"


class Log:
    """Mixin for datasets: records events and the threads of the lifespan."""

    def __init__(self, n: int = 8) -> None:
        super().__init__(n)  # type: ignore[call-arg]
        self.events: list[str] = []
        self.where: list[str] = []

    def note(self, event: str) -> None:
        """Record an event; successive reads count as one."""
        if event != "read" or self.events[-1:] != ["read"]:
            self.events.append(event)
        if event != "read":
            self.where.append(threading.current_thread().name)

    def taken(self) -> tuple[list[str], set[str]]:
        """Return and clear the events and the lifespan's threads."""
        taken = self.events, set(self.where)
        self.events, self.where = [], []
        return taken


class SyncLog(Log, SyncMap):
    """Read by plain functions."""

    def __getitem__(self, index: int) -> Any:
        self.note("read")
        return super().__getitem__(index)


class AsyncLog(Log, AsyncMap):
    async def __getitem__(self, index: int) -> Any:
        self.note("read")
        return await super().__getitem__(index)


class SyncStreamLog(Log, SyncStream):
    """A plain generator, which is closed before the lifespan is left."""

    def __iter__(self) -> Iterator[Any]:
        try:
            for sample in super().__iter__():
                self.note("read")
                yield sample
        finally:
            self.note("closed")


class AsyncStreamLog(Log, AsyncStream):
    """An async generator, likewise."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for sample in super().__aiter__():
                self.note("read")
                yield sample
        finally:
            self.note("closed")


@contextlib.contextmanager
def plain(dataset: Any) -> Iterator[None]:
    """Record entry and exit; without ``finally``, as in many lifespans."""
    dataset.note("enter")
    yield
    dataset.note("leave")


@contextlib.asynccontextmanager
async def on_loop(dataset: Any) -> AsyncIterator[None]:
    """Record entry and exit, with suspensions."""
    await asyncio.sleep(0)
    dataset.note("enter")
    yield
    await asyncio.sleep(0)
    dataset.note("leave")


async def pass_on(sample: Any) -> Any:
    return sample


ONCE = ["enter", "read", "leave"]
CLOSED = ["enter", "read", "closed", "leave"]
# Dataset, lifespan, options, the thread that enters it, and the events.
PLACES: dict[str, tuple[Any, Any, dict[str, Any], str, list[str]]] = {
    "thread": (SyncLog, plain, {}, "aioloader-cpu", ONCE),
    "loop": (AsyncLog, on_loop, {}, "aioloader-loop", ONCE),
    "loop, plain": (AsyncLog, plain, {}, "aioloader-loop", ONCE),
    "caller": (AsyncLog, on_loop, {"loop": "caller"}, "MainThread", ONCE),
    "thread, loop": (SyncLog, plain, {"transform": pass_on}, "aioloader-cpu", ONCE),
    "for a transform": (
        *(SyncLog, on_loop),
        *({"transform": pass_on}, "aioloader-loop", ONCE),
    ),
    "iterable": (SyncStreamLog, plain, {}, "aioloader-cpu", CLOSED),
    "iterable, loop": (
        *(SyncStreamLog, plain),
        *({"collate_fn": pass_on}, "aioloader-cpu", CLOSED),
    ),
    "async iterable": (AsyncStreamLog, on_loop, {}, "aioloader-loop", CLOSED),
    "threads": (
        *(SyncLog, plain),
        *({"num_workers": 2, "workers": "thread"}, "aioloader-cpu", ONCE),
    ),
    "loader reads": (
        *(AsyncLog, on_loop),
        *({"num_workers": 1, "workers": "thread"}, "aioloader-loop", ONCE),
    ),
}


def refusing(step: str, *, is_async: bool) -> Any:
    """Return a lifespan that raises a new error on each entry, or on each exit."""

    @contextlib.contextmanager
    def lifespan(dataset: Any) -> Iterator[None]:
        dataset.note("enter")
        if step == "entering":
            raise ConnectionRefusedError(len(dataset.where))
        yield
        dataset.note("leave")
        raise ConnectionRefusedError(len(dataset.where))

    @contextlib.asynccontextmanager
    async def async_lifespan(dataset: Any) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        with lifespan(dataset):
            yield

    return async_lifespan if is_async else lifespan


def join() -> None:
    """Wait for the threads of loaders."""
    for thread in threading.enumerate():
        if thread.name.startswith("aioloader"):
            thread.join(10)
