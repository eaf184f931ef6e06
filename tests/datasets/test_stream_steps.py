"""Steps of streams: map, filter, shuffle, take, skip and batch."""

import asyncio
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import from_async_iterable, from_iterable
from beside import beside
from datasets.shards import items, pulled, read


def numbers(n: int = 40) -> Any:
    return from_iterable(range(n))


def negative(number: int) -> int:
    """Change the sign; refuse one number."""
    if number == 13:
        raise ValueError("unlucky")
    return -number


async def negative_async(number: int) -> int:
    for _ in range(40 - number):
        await asyncio.sleep(0)
    return negative(number)


def is_even(number: int) -> bool:
    if number == 13:
        raise ValueError("unlucky")
    return number % 2 == 0


async def is_even_async(number: int) -> bool:
    await asyncio.sleep(0)
    return is_even(number)


async def test_take_and_skip_count_samples() -> None:
    assert await items(numbers().take(3)) == [0, 1, 2]
    assert await items(numbers().skip(37)) == [37, 38, 39]
    assert await items(numbers().skip(5).take(2).skip(1)) == [6]
    assert await items(numbers().take(99)) == list(range(40))
    assert await items(numbers().skip(99)) == await items(numbers().take(0)) == []


async def test_take_reads_no_further() -> None:
    made: list[int] = []

    async def count() -> Any:
        for number in itertools.count():
            made.append(number)
            yield number

    samples, _ = await pulled(from_async_iterable(count).take(3))
    assert samples == made == [0, 1, 2]


@pytest.mark.parametrize("function", [negative, negative_async])
@pytest.mark.parametrize("concurrency", [1, 7, 64])
async def test_map_keeps_the_order_of_samples(function: Any, concurrency: int) -> None:
    stream = numbers(13).map(function, concurrency=concurrency)
    assert await items(stream) == [-number for number in range(13)]


async def test_map_awaits_many_at_once() -> None:
    under_way = most = 0

    async def watch(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1
        return number

    assert await items(numbers().map(watch, concurrency=5)) == list(range(40))
    assert most == 5


@pytest.mark.parametrize("function", [is_even, is_even_async])
async def test_filter_keeps_matching_samples(function: Callable[[int], Any]) -> None:
    assert await items(numbers(12).filter(function)) == [0, 2, 4, 6, 8, 10]


FAILING: dict[str, Callable[[Any], Any]] = {
    "map": lambda s: s.map(negative),
    "async map": lambda s: s.map(negative_async),
    "filter": lambda s: s.filter(is_even),
    "async filter": lambda s: s.filter(is_even_async),
    "shuffle": lambda s: s.map(negative).shuffle(8),
    "batch": lambda s: s.map(negative).batch(4),
    "mix": lambda s: s.map(negative).mix(numbers(5)),
}


@pytest.mark.parametrize("step", FAILING)
async def test_a_failed_sample_fails_alone(step: str) -> None:
    samples, _ = await read(FAILING[step](numbers(20)), errors=ValueError)
    (error,) = (x for x in samples if isinstance(x, ValueError))
    assert str(error) == "unlucky"
    assert "of the stream" in error.__notes__[0]
    samples.remove(error)
    flat = [n for x in samples for n in (x if isinstance(x, list) else [x])]
    assert {abs(number) for number in flat} >= {12, 14} - {13}
    assert 13 not in {abs(number) for number in flat}


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["loader", "workers"])
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_on_error_skips_or_raises(num_workers: int, fetch: Any) -> None:
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["fetch"] = fetch
    stream = numbers(20).map(negative)
    loader: Any = DataLoader(stream, 5, on_error="skip", collate_fn=list, **options)
    batches = await beside(lambda: list(loader))
    assert [-n for batch in batches for n in batch] == [*range(13), *range(14, 20)]
    assert [repr(skip.error) for skip in loader.skipped] == ["ValueError('unlucky')"]
    iterator = iter(DataLoader(stream, 5, collate_fn=list, **options))
    batches = await beside(lambda: [next(iterator), next(iterator)])
    with pytest.raises(ValueError, match="unlucky"):
        await beside(lambda: next(iterator))
    batches += await beside(lambda: list(iterator))
    assert [-n for batch in batches for n in batch] == [*range(10), *range(14, 20)]


async def test_shuffle_permutes_windows() -> None:
    stream = numbers(100).shuffle(32, seed=3)
    first, second = await items(stream), await items(stream)
    assert first != second
    for order in (first, second):
        for start in range(0, 100, 32):
            window = order[start : start + 32]
            assert sorted(window) == list(range(start, min(start + 32, 100)))
            assert window != sorted(window)
    again = numbers(100).shuffle(32, seed=3)
    assert await items(again) == first
    assert await items(numbers(100).shuffle(32, seed=4)) != first


async def test_shuffle_holds_two_windows() -> None:
    read: list[int] = []
    ahead: list[int] = []

    def counted(number: int) -> int:
        read.append(number)
        return number

    async for _ in numbers(320).map(counted).shuffle(32):
        await asyncio.sleep(0)
        ahead.append(len(read) - len(ahead) - 1)
    assert max(ahead) < 64


async def test_batch_groups_samples_into_lists() -> None:
    assert await items(numbers(7).batch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert await items(numbers(7).batch(3, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]
    loader: Any = DataLoader(numbers(7).batch(3), batch_size=None)
    batches = await beside(lambda: [list(map(int, batch)) for batch in loader])
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_repr_and_pickle_keep_the_steps() -> None:
    stream = numbers().shuffle(10).map(abs).batch(2)
    assert repr(stream) == "stream of range.shuffle(10).map(...).batch(...)"
    assert repr(pickle.loads(pickle.dumps(stream))) == repr(stream)


async def test_generators_are_closed_with_their_stream() -> None:
    closed: list[str] = []

    def plain() -> Any:
        try:
            yield from range(9)
        finally:
            closed.append("plain")

    async def coloured() -> Any:
        try:
            for number in range(9):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.append("coloured")

    for stream in (from_iterable(plain), from_async_iterable(coloured)):
        assert (await read(stream, 2))[0] == [0, 1]
    assert closed == ["plain", "coloured"]


async def test_closing_waits_for_a_running_function() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(number: int) -> int:
        entered.set()
        leave.wait()
        return number

    iterator = aiter(numbers(3).map(slow))
    pull = asyncio.ensure_future(anext(iterator))
    await beside(entered.wait)
    pull.cancel()
    closing = asyncio.ensure_future(iterator.aclose())
    for _ in range(20):
        await asyncio.sleep(0)
    is_closed = closing.done()
    leave.set()
    await closing
    assert not is_closed
