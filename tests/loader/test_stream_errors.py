"""Errors of iterables that would end a loop or a task quietly, were they not caught."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.testing import no_leaks
from failing import WAYS, drain, make

CONTROL = [asyncio.CancelledError, StopIteration, StopAsyncIteration]


class Rows:
    """Ten numbers, of which one raises instead."""

    def __init__(self, error: type[BaseException], at: int = 5) -> None:
        self.error, self.at = error, at
        self.row = -1

    def step(self, stop: type[BaseException]) -> int:
        self.row += 1
        if self.row == self.at:
            raise self.error
        if self.row == 10:
            raise stop
        return self.row


class Plain(Rows):
    """A plain iterator, and so an iterable."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return self.step(StopIteration)


class Async(Rows):
    """An async iterator."""

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        return self.step(StopAsyncIteration)


class Refusing:
    """Raises when it is iterated."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error


class PlainRefusing(Refusing):
    """By ``iter``."""

    def __iter__(self) -> Any:
        raise self.error


class AsyncRefusing(Refusing):
    """By ``aiter``."""

    def __aiter__(self) -> Any:
        raise self.error


def cause_of(found: list[Any]) -> BaseException:
    """Return what caused the one error among ``found``, which names its place."""
    (error,) = [one for one in found if isinstance(one, Exception)]
    assert type(error) is RuntimeError
    assert any("in stage 'fetch' of epoch 0, batch" in n for n in error.__notes__)
    assert error.__cause__ is not None
    return error.__cause__


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.parametrize("dataset", [PlainRefusing, AsyncRefusing])
async def test_an_iterable_that_cannot_be_opened(
    way: str, dataset: Any, error: type[BaseException]
) -> None:
    """It is no empty one, and not skipped."""
    with no_leaks():
        loader = make(way, dataset(error), on_error="skip")
        found = await asyncio.wait_for(drain(way, loader), 20)
    assert type(cause_of(found)) is error
    assert len(found) == 1


class Unsaved(Plain):
    """Its state cannot be had."""

    def state_dict(self) -> Any:
        raise self.error

    def load_state_dict(self, state: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", CONTROL)
async def test_a_state_that_cannot_be_had(error: type[BaseException]) -> None:
    """It is no end either."""
    iterator = iter(DataLoader(WithUnsaved(error), batch_size=4))
    with pytest.raises(RuntimeError, match=error.__name__):
        next(iterator)
    iterator.close()


class WithUnsaved:
    """Its iterator's state cannot be had."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __iter__(self) -> Any:
        return Unsaved(self.error, at=99)


# -- streams of ours -------------------------------------------------------------------

STEPS: dict[str, Callable[[Any], Any]] = {
    "iterable": lambda error: from_iterable(lambda: Plain(error)),
    "async iterable": lambda error: from_async_iterable(lambda: Async(error)),
    "map": lambda error: from_iterable(range(10)).map(raising(error)),
    "async map": lambda error: from_iterable(range(10)).map(raising_later(error)),
    "filter": lambda error: from_iterable(range(10)).filter(raising(error)),
    "async filter": lambda error: from_iterable(range(10)).filter(raising_later(error)),
}


def raising(error: type[BaseException]) -> Callable[[int], int]:
    """Return a function that raises for 5."""

    def function(number: int) -> int:
        if number == 5:
            raise error
        return number + 100

    return function


def raising_later(error: type[BaseException]) -> Callable[[int], Any]:
    """Return a coroutine function that raises for 5."""

    async def function(number: int) -> int:
        await asyncio.sleep(0)
        return raising(error)(number)

    return function


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS)
async def test_streams(way: str, name: str) -> None:
    """An error of that sample, in each of their steps."""

    def stream() -> Any:
        return STEPS[name](asyncio.CancelledError)

    for made in (stream(), stream().shuffle(20), stream().readers(2)):
        loader = make(way, made, on_error="skip")
        found = await asyncio.wait_for(drain(way, loader), 20)
        samples = sorted(number % 100 for batch in found for number in batch)
        assert samples == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        (failure,) = loader.skipped
        assert type(failure.error) is RuntimeError
        assert type(failure.error.__cause__) is asyncio.CancelledError


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_that_cannot_be_opened(
    way: str, policy: Any, tmp_path: Any
) -> None:
    """An error under every policy, and not one sample after the other."""
    dataset = TextDataset("*.txt", store=tmp_path)
    found = await asyncio.wait_for(drain(way, make(way, dataset, on_error=policy)), 20)
    (error,) = found
    assert "no shard matches" in str(error)
    assert "in stage 'fetch' of epoch 0, batch 0" in error.__notes__[-1]


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
def test_a_stream_that_cannot_be_opened_again() -> None:
    """A resumed epoch does not end early and quietly."""
    calls: list[None] = []

    def source() -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise OSError("gone")
        return iter(range(10))

    loader: Any = DataLoader(from_iterable(source), 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    resumed: Any = DataLoader(from_iterable(source), 2)
    resumed.load_state_dict(state)
    with pytest.raises(OSError, match="gone"):
        list(resumed)


class FailsLater:
    """A generator that fails at its third sample when it is read again."""

    def __init__(self) -> None:
        self.times = 0

    def samples(self) -> Any:
        self.times += 1
        for number in range(10):
            if number == 2 and self.times == 2:
                raise OSError("connection lost")
            yield number

    def __iter__(self) -> Any:
        return self.samples()


class FailsLaterAsync(FailsLater):
    """The same for a loop."""

    async def __aiter__(self) -> Any:
        for number in self.samples():
            yield number


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("kind", [FailsLater, FailsLaterAsync])
def test_a_generator_that_fails_while_it_is_read_again(kind: Any, policy: Any) -> None:
    """A resumed epoch does not end early and quietly."""
    dataset = kind()
    loader: Any = DataLoader(dataset, 2, on_error=policy)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = loader.state_dict()
    iterator.close()
    resumed: Any = DataLoader(dataset, 2, on_error=policy)
    resumed.load_state_dict(state)
    with pytest.raises(OSError, match="connection lost") as caught:
        list(resumed)
    assert "in stage 'fetch' of epoch 0, batch 2" in caught.value.__notes__[-1]


# -- several ranks ---------------------------------------------------------------------


class Few(Plain):
    """Some numbers; those at ``bad`` raise."""

    def __init__(self, n: int, *bad: int) -> None:
        super().__init__(OSError)
        self.n, self.bad = n, bad

    def step(self, stop: type[BaseException]) -> int:
        self.row += 1
        if self.row == self.n:
            raise stop
        if self.row in self.bad:
            raise OSError("bad row")
        return self.row


class AsyncFew(Few):
    """The same for a loop."""

    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        return self.step(StopAsyncIteration)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Few, AsyncFew])
async def test_a_skipped_sample_pads_no_tail(way: str, dataset: Any) -> None:
    """A rank pads with its latest sample that was read, or else another rank's."""

    async def found(n: int, bad: int, rank: int, world_size: int) -> list[Any]:
        loop: Any = "caller" if way == "caller" else "thread"
        loader: Any = DataLoader(
            dataset(n, bad),
            1,
            rank=rank,
            world_size=world_size,
            on_error="skip",
            loop=loop,
        )
        return await drain(way, loader)

    assert await found(5, 3, rank=1, world_size=2) == [[1], [1]]
    assert await found(2, 1, rank=2, world_size=3) == [[0]]


@pytest.mark.parametrize("dataset", [Few, AsyncFew])
def test_ranks_count_alike_after_an_error(dataset: Any) -> None:
    """One that raised reads on to where the others are, and no further."""
    read = set()
    for rank in range(2):
        loader: Any = DataLoader(dataset(12, 1), 2, rank=rank, world_size=2)
        iterator = iter(loader)
        if rank == 1:
            with pytest.raises(OSError, match="bad row"):
                next(iterator)
        else:
            assert next(iterator).tolist() == [0, 2]
        assert next(iterator).tolist() == [4 + rank, 6 + rank]
        read.add(repr(loader.state_dict()["states"]))
        iterator.close()
    assert len(read) == 1
