"""What streams do ahead of their consumer, beside the loop, and without tasks."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from aioloader._order.permutation import ShuffledIndices
from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.datasets._streams import steps
from aioloader.datasets.sharded import ShardedStream
from datasets.shards import read
from datasets.test_interleave import Memory


def numbers(count: int = 40) -> Any:
    return from_iterable(range(count))


async def test_an_async_map_refills_as_calls_end() -> None:
    """Not only when a pull comes; and no further than twice its concurrency."""
    started: list[int] = []
    reached = {count: asyncio.Event() for count in (4, 8)}
    release = asyncio.Event()

    async def call(number: int) -> int:
        started.append(number)
        for count, event in reached.items():
            if len(started) == count:
                event.set()
        if number:
            await release.wait()
        return number

    iterator = aiter(numbers(100).map(call, concurrency=4))
    assert await iterator.pull(1) == [0]
    await asyncio.wait_for(reached[4].wait(), 10)
    release.set()
    await asyncio.wait_for(reached[8].wait(), 10)  # nobody pulls
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(started) <= 1 + 2 * 4
    await iterator.aclose()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    found: dict[int, int] = {}
    take = ShuffledIndices.take

    def counted(order: ShuffledIndices, start: int, stop: int) -> Any:
        thread = threading.get_ident()
        found[thread] = found.get(thread, 0) + stop - start
        return take(order, start, stop)

    monkeypatch.setattr(ShuffledIndices, "take", counted)
    return found


async def test_long_orders_are_made_beside_the_loop(looked_up: dict[int, int]) -> None:
    here = threading.get_ident()
    made = Memory(list)
    made.made = [[shard] for shard in range(5000)]
    shards: ShardedStream[int] = ShardedStream(made, shuffle=True)
    assert len((await read(shards, 3))[0]) == 3
    assert sum(looked_up.values()) == 5000
    window = numbers(5000).shuffle(5000)
    assert sorted((await read(window))[0]) == [*range(5000)]
    assert sum(looked_up.values()) == 10000
    assert here not in looked_up
    await read(numbers(100).shuffle(50))  # a short one is not worth a thread
    assert looked_up[here] == 100


async def test_a_window_is_freed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pauses, and beside the loop: the loop would wait for all of it."""
    threads: list[int] = []
    monkeypatch.setattr(steps, "pause", lambda: threads.append(threading.get_ident()))
    count = 5 * (1 << 13)
    found, _ = await read(numbers(count).shuffle(count))
    assert sorted(found) == [*range(count)]
    assert len(threads) >= 4
    assert threading.get_ident() not in threads


class Counting:
    def __init__(self) -> None:
        self.tasks = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()

        def make(loop: Any, job: Any, **options: Any) -> Any:
            self.tasks += 1
            return asyncio.Task(job, loop=loop, **options)

        loop.set_task_factory(make)
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.get_running_loop().set_task_factory(None)


async def test_no_task_for_each_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(3000)))
    stream = TextDataset(str(tmp_path / "a.txt"))
    for made in (stream, stream.mix(stream.take(500)), stream.readers(1)):
        with Counting() as counting:
            assert len((await read(made))[0]) >= 3000
        assert counting.tasks < 300


async def test_no_sample_waits_for_another_one() -> None:
    more = asyncio.Event()

    async def live() -> AsyncIterator[int]:
        for number in range(20):
            yield number
        await more.wait()
        yield 20

    iterator = aiter(from_async_iterable(live))
    for number in range(20):
        assert await asyncio.wait_for(anext(iterator), 10) == number
    more.set()
    assert await anext(iterator) == 20
    await iterator.aclose()
