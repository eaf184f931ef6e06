"""Streams whose reader is cancelled at each of their awaits, in whichever task."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import TarDataset
from datasets.shards import (
    NAMES,
    Make,
    json_lines,
    name_of,
    parquet,
    postgresql,
    sqlite,
)
from datasets.test_places import QUICK, shards
from object_server import Faults, ObjectServer

# For all: a server is no leak of the test that is its first.
pytestmark = [pytest.mark.usefixtures("server"), pytest.mark.slow]


class Watched(Coroutine[Any, Any, Any]):
    def __init__(self, inner: Coroutine[Any, Any, Any], tell: Callable[[], None]):
        self._inner = inner
        self._tell = tell

    def send(self, value: Any) -> Any:
        yielded = self._inner.send(value)
        self._tell()
        return yielded

    def throw(self, *error: Any) -> Any:
        yielded = self._inner.throw(*error)
        self._tell()
        return yielded

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        raise NotImplementedError("it is for a task")


class Cancelling:
    """Cancel a task at the ``at``-th suspension of it, or of a task begun meanwhile."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self._task: asyncio.Task[None] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make)
        try:
            self._task = asyncio.create_task(coroutine)
            await asyncio.wait([self._task])
        finally:
            loop.set_task_factory(None)
        if not self._task.cancelled():
            self._task.result()
        return self._task.cancelled()

    def _make(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(Watched(coroutine, self._count), loop=loop, **options)

    def _count(self) -> None:
        assert self._task is not None
        if self.seen == self.at:
            self._task.cancel()
        self.seen += 1


class Reader:
    """One iteration.

    Attributes:
        found: The names of all samples that came.
        state: Where the next one is.
    """

    def __init__(self, stream: Any) -> None:
        self.iterator = aiter(stream)
        self.found: list[str] = []
        self.state: Any = self.iterator.state_dict()

    async def read(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            while len(block := await self.iterator.pull(64)):
                for one in block:
                    self.found += one if isinstance(one, list) else [name_of(one)]
                self.state = self.iterator.state_dict()


async def check(make: Callable[[], Any], every: int = 1) -> None:
    whole = await rest_of(make(), None)
    assert sorted(whole) == sorted(NAMES)
    rests: dict[str, list[str]] = {}
    for at in range(0, 1000, every):
        tasks = asyncio.all_tasks()
        reader, cancelling = Reader(make()), Cancelling(at)
        was_cancelled = await cancelling.run(reader.read())
        await reader.iterator.aclose()
        assert asyncio.all_tasks() <= tasks
        state = json.dumps(reader.state)
        if state not in rests:
            rests[state] = await rest_of(make(), json.loads(state))
        assert reader.found + rests[state] == whole, at
        if not was_cancelled and cancelling.seen <= at:
            return
    raise AssertionError("never ran to the end")


async def rest_of(stream: Any, state: Any) -> list[str]:
    if state is not None:
        stream.load_state_dict(state)
    async with aiter(stream) as iterator:
        reader = Reader(stream)
        reader.iterator = iterator
        await reader.read()
    return reader.found


async def later(sample: Any) -> str:
    await asyncio.sleep(0)
    return name_of(sample)


def bare(stream: Any) -> Any:
    return stream


def with_steps(stream: Any) -> Any:
    return stream.map(later, concurrency=30).shuffle(30).batch(20)


def with_readers(stream: Any) -> Any:
    return stream.shuffle(9).readers(3)


STEPS = pytest.mark.parametrize("steps", [bare, with_steps, with_readers])


@STEPS
@pytest.mark.parametrize("make", [json_lines, parquet, sqlite])
async def test_of_files(
    make: Make, steps: Callable[[Any], Any], tmp_path: Path
) -> None:
    stream = make(tmp_path, interleave=3)
    # A range of rows opens a file anew: not at each await.
    await check(lambda: steps(stream), every=3 if make is sqlite else 1)


@STEPS
async def test_of_a_database(steps: Callable[[Any], Any], tmp_path: Path) -> None:
    """The connections of a server; not at each await, for they take long to open."""
    stream = postgresql(tmp_path, interleave=3, partitions=3)
    await check(lambda: steps(stream), every=11)


@STEPS
async def test_of_a_store(steps: Callable[[Any], Any], tmp_path: Path) -> None:
    faults = Faults(errors=0.05, resets=0.05, truncated=0.05)
    with ObjectServer(shards(tmp_path), faults=faults) as served:
        stream: Any = TarDataset(
            "{0..7}.tar",
            store=served.url,
            requests=QUICK,
            store_options={"retry_config": {"max_retries": 0}},
            interleave=3,
        )
        await check(lambda: steps(stream))


@STEPS
@pytest.mark.parametrize("turns", [0, 1, 3, 10])
async def test_going_on_after_a_cancelled_step(
    turns: int, steps: Callable[[Any], Any], tmp_path: Path
) -> None:
    stream = json_lines(tmp_path, interleave=3)
    whole = await rest_of(steps(stream), None)
    found: list[str] = []
    states: dict[int, Any] = {}
    async with aiter(steps(stream)) as iterator:
        while True:
            step = asyncio.ensure_future(anext(iterator))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            try:
                one = await step
            except StopAsyncIteration:
                break
            except asyncio.CancelledError:
                states[len(found)] = iterator.state_dict()
                one = await anext(iterator, None)
                if one is None:
                    break
            found += one if isinstance(one, list) else [name_of(one)]
    assert found == whole
    for count in list(states)[:: max(1, len(states) // 5)]:
        assert await rest_of(steps(stream), states[count]) == whole[count:]
