"""Failed samples: skipped, replaced, retried, within a budget."""

from typing import Any

import pytest

from aioloader import SKIP, Failure, Retry, Skip
from aioloader.datasets import from_iterable
from aioloader.errors import FailureBudgetError
from failing import WAYS, drain, failing, make
from samples import AsyncMap, SyncMap


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
async def test_a_rank_has_no_batch_less_than_others(way: str) -> None:
    """They would wait for it: an error, unless the samples are replaced."""
    bad = {1, 5, 9, 13}  # the first batch of rank 1

    def refuse(number: int) -> int:
        if number in bad:
            raise OSError("bad")
        return number

    stream = from_iterable(range(24)).epoch_length(24)
    options: dict[str, Any] = {"transform": refuse, "rank": 1, "world_size": 4}
    loader = make(way, stream, on_error="skip", **options)
    found = await drain(way, loader)
    assert isinstance(found[0], FailureBudgetError)
    assert "4 samples of batch 0 of epoch 0 failed" in str(found[0])
    assert "other ranks" in str(found[0])
    loader = make(way, stream, on_error=lambda _failure: -1, **options)
    assert (await drain(way, loader))[0] == [-1] * 4


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
    loader = make(way, dataset, on_error=Skip(at_most=2), prefetch_factor=1)
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
    options: Any = {"retry": Retry(base_delay=0.0), "transform": int}
    found = await drain(way, make(way, dataset, **options))
    assert found[0] == [0, 1, 2, 3]
    assert "__getitems__ returned 3 samples for 4 indices" in str(found[1])
    assert "sample indices [4, 5, 6, 7]" in found[1].__notes__[0]


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


async def test_skipped_failures_hold_no_frames() -> None:
    """What a traceback refers to would be kept as long as the list."""
    loader = make("thread", failing(AsyncMap, 1, error=OSError), on_error="skip")
    await drain("thread", loader)
    assert [failure.error.__traceback__ for failure in loader.skipped] == [None]
