"""What holds for every stream, whatever its shards are made of."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import TarDataset
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.shards import (
    EVERY,
    FILES_OF_TABLES,
    MORE_TABLES,
    NAMES,
    SHARDED,
    Make,
    json_lines,
    name_of,
    names,
    parquet,
    postgresql,
    read,
    source_state,
    sqlite,
    text,
)
from datasets.test_places import QUICK, shards
from object_server import Faults, ObjectServer

# For all tests, so that none seems to leak the server.
pytestmark = pytest.mark.usefixtures("server")
MAKES = pytest.mark.parametrize(
    "make", [*EVERY, *MORE_TABLES], ids=lambda make: make.__name__
)
FILES = pytest.mark.parametrize(
    "make",
    [*SHARDED, *FILES_OF_TABLES, *MORE_TABLES],
    ids=lambda make: make.__name__,
)
SHARDS = pytest.mark.parametrize("make", SHARDED, ids=lambda make: make.__name__)


@pytest.mark.slow
@MAKES
async def test_samples_come_once_and_in_order(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path)
    for _ in range(2):
        assert await names(stream) == NAMES


@pytest.mark.slow
@MAKES
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_workers_read_all_samples_once(
    make: Make, num_workers: int, tmp_path: Path
) -> None:
    stream = make(tmp_path, interleave=3)
    for fetch in ("loader", "workers"):
        loader: Any = DataLoader(
            stream, 4, num_workers=num_workers, fetch=fetch, collate_fn=list
        )
        batches: Any = await beside(partial(list, loader))
        delivered = [name_of(sample) for batch in batches for sample in batch]
        assert sorted(delivered) == sorted(NAMES)


@pytest.mark.slow
@FILES
async def test_the_order_is_a_function_of_seed_and_epoch(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    stream = make(tmp_path, shuffle=True, seed=1, interleave=3)
    again = make(tmp_path / "again", shuffle=True, seed=1, interleave=3)
    reseeded = make(tmp_path, shuffle=True, seed=2, interleave=3)
    first, second = await names(stream), await names(stream)
    assert [await names(again), await names(again)] == [first, second]
    assert len({tuple(first), tuple(second), tuple(await names(reseeded))}) == 3
    stream.set_epoch(0)
    assert await names(stream) == await names(stream) == first


@pytest.mark.slow
@MAKES
async def test_unordered_streams_lose_nothing(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path, interleave=5, deterministic=False)
    assert sorted(await names(stream)) == sorted(NAMES)
    head, state = await read(stream, 20)
    stream.load_state_dict(state)
    delivered = [*map(name_of, head), *(await names(stream))]
    assert sorted(delivered) == sorted(NAMES)


@pytest.mark.slow
@MAKES
@pytest.mark.parametrize("count", [0, 1, 7])
async def test_a_closed_iteration_has_ended(
    make: Make, count: int, tmp_path: Path
) -> None:
    iterator = aiter(make(tmp_path, interleave=2))
    for _ in range(count):
        await anext(iterator)
    for _ in range(2):
        await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


@pytest.mark.slow
@SHARDS
async def test_too_few_shards_are_refused(make: Make, tmp_path: Path) -> None:
    parts = [make(tmp_path).shard(rank, 11) for rank in range(11)]
    if make in {text, json_lines}:
        assert [name for part in parts for name in await names(part)] == NAMES
        return
    with pytest.raises(ValueError, match=r"8 shards .*11 readers.*use fewer"):
        await names(parts[0])


@FILES
async def test_a_state_of_other_shards_is_refused(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path)
    _, state = await read(stream, 3)
    known = source_state(state)["shards"]
    count = known["count"]
    for changed, words in (
        ({"count": count + 1}, f"saved with {count + 1} shards, but .* has {count};"),
        ({"names": "0"}, f"saved with {count} shards, but .* has others, of "),
    ):
        source_state(state)["shards"] = {**known, **changed}
        stream.load_position(state)
        with pytest.raises(StateMismatchError, match=words) as caught:
            await names(stream)
        assert caught.value.expected == {**known, **changed}
        assert caught.value.found == known


@pytest.mark.parametrize(
    ("a", "b", "are_same"),
    [
        (["a/1.tar", "a/10.tar"], ["s3://b/1.tar", "s3://b/10.tar"], True),
        (["1", "2"], ["https://h/x/1?sig=a", "https://h/x/2?sig=b"], True),
        (["1 a"], ["http://me:secret@h/1%20a"], True),
        (["file:///x/1%20a", "file:///x/b"], ["1 a", "b"], True),
        (["x/1", "x/1"], ["1", "1"], True),
        (["x/1", "x/1"], ["x/1"], False),
        (["x/1", "x/2"], ["x/2", "x/1"], False),
        (["x/1", "y/1"], ["x/1", "x/1"], False),
        (["x/1", "x/2"], ["x/1", "x/3"], False),
        (["12", "3"], ["1", "23"], False),
        (["http://me:a@g/1", "http://h/1"], ["http://g/1", "http://me:b@h/1"], True),
        (["\udcff", "a"], ["x/\udcff", "x/a"], True),
    ],
)
def test_summaries_ignore_folders(a: list[str], b: list[str], are_same: bool) -> None:
    summary = TarDataset("x").made_by.summary
    assert (summary(a) == summary(b)) == are_same
    assert summary(a)["count"] == len(a)


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
    """Cancel a task at suspension ``number`` of it or of a task begun meanwhile."""

    def __init__(self, number: int) -> None:
        self.number = number
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
        if self.seen == self.number:
            self._task.cancel()
        self.seen += 1


class Reader:
    """One iteration.

    Attributes:
        found: The names of all samples that were delivered.
        state: The position of the next one.
    """

    def __init__(self, stream: Any) -> None:
        self.iterator = aiter(stream)
        self.found: list[str] = []
        self.state: Any = self.iterator.state_dict()

    async def read(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            while len(block := await self.iterator.pull(64)):
                for x in block:
                    self.found += x if isinstance(x, list) else [name_of(x)]
                self.state = self.iterator.state_dict()


async def check_cancelling(make: Callable[[], Any], every: int = 1) -> None:
    whole = await rest_of(make(), None)
    assert sorted(whole) == sorted(NAMES)
    rests: dict[str, list[str]] = {}
    for count in range(0, 1000, every):
        tasks = asyncio.all_tasks()
        reader, cancelling = Reader(make()), Cancelling(count)
        was_cancelled = await cancelling.run(reader.read())
        await reader.iterator.aclose()
        assert asyncio.all_tasks() <= tasks
        state = json.dumps(reader.state)
        if state not in rests:
            rests[state] = await rest_of(make(), json.loads(state))
        assert reader.found + rests[state] == whole, count
        if not was_cancelled and cancelling.seen <= count:
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


@pytest.mark.slow
@STEPS
@pytest.mark.parametrize("make", [json_lines, parquet, sqlite])
async def test_cancelled_reads_of_files_lose_nothing(
    make: Make, steps: Any, tmp_path: Path
) -> None:
    stream = make(tmp_path, interleave=3)
    # Not at each await of SQLite, where each range opens the file again.
    await check_cancelling(lambda: steps(stream), every=3 if make is sqlite else 1)


@pytest.mark.slow
@STEPS
async def test_cancelled_reads_of_a_database_lose_nothing(
    steps: Any, tmp_path: Path
) -> None:
    """Not cancelled at each await, because connections take long to open."""
    stream = postgresql(tmp_path, interleave=3, partitions=3)
    await check_cancelling(lambda: steps(stream), every=11)


@pytest.mark.slow
@STEPS
async def test_cancelled_reads_of_a_store_lose_nothing(
    steps: Any, tmp_path: Path
) -> None:
    faults = Faults(errors=0.05, resets=0.05, truncated=0.05)
    with ObjectServer(shards(tmp_path), faults=faults) as served:
        options: Any = {"store_options": {"retry_config": {"max_retries": 0}}}
        options |= {"store": served.url, "requests": QUICK, "interleave": 3}
        stream: Any = TarDataset("{0..7}.tar", **options)
        await check_cancelling(lambda: steps(stream))


@pytest.mark.slow
@STEPS
@pytest.mark.parametrize("turns", [0, 1, 3, 10])
async def test_a_cancelled_step_loses_nothing(
    turns: int, steps: Callable[[Any], Any], tmp_path: Path
) -> None:
    stream = json_lines(tmp_path, interleave=3)
    whole = await rest_of(steps(stream), None)
    delivered: list[str] = []
    states: dict[int, Any] = {}
    async with aiter(steps(stream)) as iterator:
        while True:
            step = asyncio.ensure_future(anext(iterator))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            try:
                sample = await step
            except StopAsyncIteration:
                break
            except asyncio.CancelledError:
                states[len(delivered)] = iterator.state_dict()
                sample = await anext(iterator, None)
                if sample is None:
                    break
            delivered += sample if isinstance(sample, list) else [name_of(sample)]
    assert delivered == whole
    for count in list(states)[:: max(1, len(states) // 5)]:
        assert await rest_of(steps(stream), states[count]) == whole[count:]
