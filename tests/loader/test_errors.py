"""Errors keep their type, say where, and do not end the iteration."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioloader import SKIP, DataLoader, Failure, Retry
from aioloader._pipeline.cpu import beside
from aioloader.errors import FailureBudgetError
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect

WAYS = ["for", "thread", "caller"]


class OddError(Exception):
    """Cannot be made from its args alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing(base: Any, *bad: int, error: Callable[[], BaseException]) -> Any:
    """Return a dataset of indices whose reads at ``bad`` raise."""

    class Sync(SyncMap):
        def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            if index in bad:
                raise error()
            return index

    class Async(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            await asyncio.sleep(0)
            if index in bad:
                raise error()
            return index

    return (Sync if base is SyncMap else Async)(12)


async def drain(way: str, loader: Any) -> list[Any]:
    """Return batches as lists and errors as they are, to the end of the epoch."""
    found: list[Any] = []
    if way == "for":
        iterator = iter(loader)

        def step() -> Any:
            return next(iterator, None)

        while True:
            try:
                batch = await beside(step)
            except Exception as error:  # noqa: BLE001  (what is looked at)
                batch = error
            if batch is None:
                return found
            found.append(batch if isinstance(batch, Exception) else batch.tolist())
    iterator = aiter(loader)
    while True:
        try:
            batch = await anext(iterator, None)
        except Exception as error:  # noqa: BLE001  (what is looked at)
            batch = error
        if batch is None:
            return found
        found.append(batch if isinstance(batch, Exception) else batch.tolist())


def make(way: str, dataset: Any, **options: Any) -> Any:
    """Return a loader of batches of four for one of the three ways."""
    loop: Any = "caller" if way == "caller" else "thread"
    return DataLoader(dataset, batch_size=4, loop=loop, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_the_type_is_kept_the_place_is_noted_and_it_goes_on(
    way: str, base: Any
) -> None:
    """One batch raises; those before and after it are delivered."""
    dataset = failing(base, 5, error=lambda: OddError(1, 2))
    found = await drain(way, make(way, dataset))
    assert [found[0], found[2]] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert type(found[1]) is OddError
    assert found[1].__notes__ == [
        "aioloader: in stage 'fetch' of epoch 0, batch 1, sample index 5"
    ]
    assert any(
        frame.name == "__getitem__"
        for frame in __import__("traceback").extract_tb(found[1].__traceback__)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap, SyncStream, AsyncStream])
@pytest.mark.parametrize("is_async", [False, True])
async def test_transform_and_collate_errors(
    way: str, base: Any, is_async: bool
) -> None:
    """Both stages say so."""

    def bad_transform(item: Any) -> Any:
        if item[1] == 6:
            raise OddError(3, 4)
        return item[1]

    def bad_collate(samples: list[Any]) -> Any:
        raise OddError(5, 6)

    options: dict[str, Any] = {"transform": bad_transform}
    if is_async:

        async def transform(item: Any) -> Any:
            return bad_transform(item)

        async def collate(samples: Any) -> Any:
            return bad_collate(samples)

        options = {"transform": transform}
    found = await drain(way, make(way, base(8), **options))
    assert found[0] == [0, 1, 2, 3]
    assert (
        "stage 'transform' of epoch 0, batch 1, sample index 6" in found[1].__notes__[0]
    )
    collate_fn = collate if is_async else bad_collate
    found = await drain(way, make(way, base(4), collate_fn=collate_fn))
    assert (
        "'collate' of epoch 0, batch 0, sample indices [0, 1, 2, 3]"
        in (found[0].__notes__[0])
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_stop_iteration_does_not_end_the_epoch_quietly(
    way: str, base: Any, error: Any
) -> None:
    """It becomes a RuntimeError that says so."""
    found = await drain(way, make(way, failing(base, 5, error=error)))
    assert len(found) == 3
    assert isinstance(found[1], RuntimeError)
    assert f"raised {error.__name__}" in str(found[1])


async def test_a_read_that_cancels_itself_is_an_error_of_that_read() -> None:
    """A CancelledError from the user's code is not taken for a cancellation."""
    dataset = failing(AsyncMap, 5, error=asyncio.CancelledError)
    for way in ("thread", "caller"):
        found = await drain(way, make(way, dataset))
        assert len(found) == 3
        assert "cancelled by the code that was awaited" in str(found[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_skip_makes_batches_smaller(way: str, base: Any) -> None:
    """Bad samples are left out and listed; a batch of none is not delivered."""
    dataset = failing(base, 1, 4, 5, 6, 7, error=lambda: OSError("bad"))
    loader = make(way, dataset, on_error="skip")
    assert await drain(way, loader) == [[0, 2, 3], [8, 9, 10, 11]]
    assert sorted(failure.index for failure in loader.skipped) == [1, 4, 5, 6, 7]
    assert loader.stats().failures == 5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_a_callable_replaces_or_skips_or_raises(way: str, base: Any) -> None:
    """Whatever it decides for each failure."""

    def decide(failure: Failure) -> Any:
        if failure.index == 1:
            return -1
        if failure.index == 2:
            return SKIP
        raise KeyError("no")

    dataset = failing(base, 1, 2, 9, error=lambda: OSError("bad"))
    found = await drain(way, make(way, dataset, on_error=decide))
    assert found[:2] == [[0, -1, 3], [4, 5, 6, 7]]
    assert isinstance(found[2], KeyError)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_the_budget_ends_it(way: str, base: Any) -> None:
    """The third failure of two allowed raises, with the numbers."""
    dataset = failing(base, *range(12), error=lambda: OSError("bad"))
    loader = make(way, dataset, on_error="skip", max_failures=2, prefetch_factor=1)
    found = await drain(way, loader)
    assert isinstance(found[0], FailureBudgetError)
    assert found[0].failures == 3
    assert isinstance(found[0].__cause__, OSError)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_reads_are_retried(way: str, base: Any) -> None:
    """A read that fails twice is delivered at the third attempt."""
    attempts: dict[int, int] = {}

    def flaky(index: int) -> Any:
        attempts[index] = attempts.get(index, 0) + 1
        if index == 5 and attempts[index] < 3:
            raise ConnectionResetError
        return index

    class Sync(SyncMap):
        def __getitem__(self, index: int) -> Any:
            return flaky(index)

    class Async(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            return flaky(index)

    retry = Retry(max_attempts=3, base_delay=0.0)
    loader = make(way, (Sync if base is SyncMap else Async)(8), retry=retry)
    assert await drain(way, loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert attempts[5] == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_retries_end(way: str, base: Any) -> None:
    """The last attempt's error is the read's own; final ones are not retried."""
    retry = Retry(max_attempts=4, base_delay=0.0)
    for error, asked in ((OSError, 4), (FileNotFoundError, 1), (ValueError, 1)):
        dataset = failing(base, 0, error=error)
        found = await drain(way, make(way, dataset, retry=retry))
        assert type(found[0]) is error
        assert dataset.asked.count(0) == asked


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_batch_reads_are_retried_and_checked(way: str, is_async: bool) -> None:
    """``__getitems__`` is retried as a whole; a wrong count is an error."""
    calls: list[list[int]] = []

    def read(indices: list[int]) -> list[int]:
        calls.append(indices)
        if len(calls) == 1:
            raise TimeoutError
        return indices[:3] if indices[0] == 4 else indices

    class Sync(SyncMap):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return read(indices)

    class Async(AsyncMap):
        async def __getitems__(self, indices: list[int]) -> list[int]:
            return read(indices)

    dataset: Any = Async(8) if is_async else Sync(8)
    found = await drain(way, make(way, dataset, retry=Retry(base_delay=0.0)))
    assert found[0] == [0, 1, 2, 3]
    assert "__getitems__ returned 3 samples for 4 indices" in str(found[1])
    assert "sample indices [4, 5, 6, 7]" in found[1].__notes__[0]


@pytest.mark.parametrize("way", WAYS)
async def test_sampler_errors_come_in_their_turn(way: str) -> None:
    """After the batches the sampler gave before."""

    class Sampler:
        def __iter__(self) -> Any:
            yield [0, 1]
            raise OddError(7, 8)

    for dataset in (SyncMap(4), AsyncMap(4)):
        loop: Any = "caller" if way == "caller" else "thread"
        loader = DataLoader(
            dataset,
            batch_sampler=Sampler(),
            loop=loop,
            transform=lambda pair: pair[1],
        )
        found = await drain(way, loader)
        assert found[0] == [0, 1]
        assert type(found[1]) is OddError
        assert len(found) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_generator_that_raises_is_never_skipped(
    way: str, is_async: bool
) -> None:
    """It is finished: to skip would lose the rest of the stream without a word."""

    def stream() -> Any:
        yield from range(6)
        raise OSError("cut")

    class Stream:
        async def __aiter__(self) -> Any:
            for item in stream():
                yield item

    dataset: Any = Stream() if is_async else stream()
    found = await drain(way, make(way, dataset, on_error="skip"))
    assert found[0] == [0, 1, 2, 3]
    assert isinstance(found[1], OSError)
    assert len(found) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_iterator_that_can_go_on_is_skipped(way: str, is_async: bool) -> None:
    """An iterator class may raise for one sample and give the next."""

    class Rows:
        def __init__(self) -> None:
            self.row = -1

        def step(self, stop: type[Exception]) -> int:
            self.row += 1
            if self.row == 2:
                raise OSError("bad row")
            if self.row == 8:
                raise stop
            return self.row

    class Sync(Rows):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return self.step(StopIteration)

    class Async(Rows):
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            return self.step(StopAsyncIteration)

    dataset: Any = Async() if is_async else Sync()
    loader = make(way, dataset, on_error="skip")
    assert await drain(way, loader) == [[0, 1, 3], [4, 5, 6, 7]]
    assert [failure.index for failure in loader.skipped] == [2]


@pytest.mark.parametrize("way", WAYS)
async def test_a_plain_function_that_returns_a_coroutine(way: str) -> None:
    """A clear word, and no coroutine left unawaited."""

    async def read(index: int) -> int:
        return index

    class Lying(SyncMap):
        def __getitem__(self, index: int) -> Any:
            return read(index)

    found = await drain(way, make(way, Lying(4)))
    assert "declare it (or its wrapper) `async def`" in str(found[0])
    found = await drain(way, make(way, [1, 2], transform=lambda item: read(int(item))))
    assert "the transform is a plain function but returned a coroutine" in str(found[0])


async def test_the_consumers_own_error_comes_out_as_it_is() -> None:
    """No ExceptionGroup around it."""
    for loop in ("thread", "caller"):
        with pytest.raises(OddError):
            async for _ in DataLoader(AsyncMap(), loop=loop):
                raise OddError(1, 1)


async def test_the_error_of_one_loader_leaves_others_alone() -> None:
    """Two at once on the caller's loop."""
    bad = make("caller", failing(AsyncMap, 0, error=lambda: OddError(1, 2)))
    good = make("caller", failing(AsyncMap, error=lambda: OddError(1, 2)))
    found = await asyncio.gather(drain("caller", bad), collect(good))
    assert type(found[0][0]) is OddError
    assert len(found[1]) == 3
