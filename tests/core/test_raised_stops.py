"""CancelledError, StopIteration and StopAsyncIteration of user code are errors.

Each is one sample's, or one batch's: it ends no reader, no epoch and no consumer. They
are raised in ``faults/test_error_table``; here they are skipped, or come by a detour.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import pytest
from torch.utils.data import IterableDataset

from core.kit import BY, IN_PROCESS, WAYS, make, outcomes
from working import AsyncNumbers, Numbers

STOPS = [asyncio.CancelledError, StopIteration, StopAsyncIteration]
BAD = 5  # in the second of three batches of four
GOOD = [[0, 1, 2, 3], [8, 9, 10, 11]]
WITHOUT = [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


class Fails:
    """What the second batch's second sample meets."""

    n = 12

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return self.n

    def give(self, index: int) -> int:
        """Return the sample, or fail."""
        if index == BAD:
            raise self.error()
        return index


class SyncReads(Fails):
    """Fails as it reads."""

    def __getitem__(self, index: int) -> int:
        return self.give(index)


class AsyncReads(Fails):
    """Fails as it reads, on a loop."""

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return self.give(index)


class Awaits(AsyncReads):
    """Awaits a task that is cancelled: the commonest way to a CancelledError."""

    async def __getitem__(self, index: int) -> int:
        if index == BAD:
            task = asyncio.ensure_future(asyncio.sleep(0))
            task.cancel()
            await task
        return index


class Plain(AsyncReads):
    """Fails before there is anything to await."""

    def __getitem__(self, index: int) -> Any:
        self.give(index)
        return super().__getitem__(index)


class Steps(Fails, IterableDataset[int]):
    """A stream that can go on after an error."""

    def __iter__(self) -> Self:
        self.place = -1
        return self

    def __next__(self) -> int:
        self.place += 1
        if self.place == self.n:
            raise StopIteration
        return self.give(self.place)


class AsyncSteps(Fails):
    """The same, on a loop."""

    def __aiter__(self) -> Self:
        self.place = -1
        return self

    async def __anext__(self) -> int:
        self.place += 1
        if self.place == self.n:
            raise StopAsyncIteration
        return self.give(self.place)


class Generator(Fails, IterableDataset[int]):
    """A generator is at its end after an error."""

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            yield self.give(index)


class AsyncGenerator(Fails):
    """The same, on a loop."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self.n):
            yield self.give(index)


def split(found: list[Any]) -> tuple[list[Any], list[BaseException]]:
    """Return the batches, and the errors."""
    batches = [one for one in found if not isinstance(one, BaseException)]
    return batches, [one for one in found if isinstance(one, BaseException)]


def check(error: BaseException, kind: type[BaseException]) -> None:
    """See that it is an ordinary error that names what was raised."""
    assert isinstance(error, RuntimeError), repr(error)
    told = [repr(error), repr(error.__cause__), *getattr(error, "__notes__", ())]
    assert kind.__name__ in " ".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Awaits, Plain])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_read(stop: Any, dataset: Any, way: str) -> None:
    """Its batch fails; those before and after it come."""
    stop = asyncio.CancelledError if dataset is Awaits else stop
    batches, errors = split(await outcomes(way, make(way, dataset(stop))))
    assert batches == GOOD
    assert len(errors) == 1
    check(errors[0], stop)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [SyncReads, AsyncReads, Awaits, Plain])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_read_that_is_skipped(stop: Any, dataset: Any, way: str) -> None:
    """``on_error`` is asked about it as about any other error."""
    loader = make(way, dataset(stop), on_error="skip")
    assert await outcomes(way, loader) == WITHOUT
    assert loader.stats().failures == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["threads", "processes"])
@pytest.mark.parametrize("dataset", [SyncReads, AsyncReads, Awaits])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
async def test_a_read_in_workers(on_error: Any, dataset: Any, by: str) -> None:
    """The same, with the same words."""
    stop = asyncio.CancelledError
    loader = make("thread", dataset(stop), on_error=on_error, **BY[by])
    batches, errors = split(await outcomes("thread", loader))
    assert batches == (WITHOUT if on_error == "skip" else GOOD)
    for error in errors:
        check(error, stop)


def transforming(stop: Any, *, is_async: bool) -> Any:
    """Return a transform that fails."""
    give = Fails(stop).give

    async def give_async(index: int) -> int:
        await asyncio.sleep(0)
        return give(index)

    return give_async if is_async else give


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("base", [Numbers, AsyncNumbers])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_transform_that_is_skipped(
    stop: Any, base: Any, is_async: bool, way: str
) -> None:
    """The same, whatever reads the samples."""
    if way == "caller" and base is Numbers and not is_async:
        pytest.skip("no coroutine")
    transform = transforming(stop, is_async=is_async)
    loader = make(way, base(12), transform=transform, on_error="skip")
    assert await outcomes(way, loader) == WITHOUT


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("stream", [Steps, AsyncSteps])
async def test_a_stream_that_can_go_on(stream: Any, by: str, way: str) -> None:
    """It is asked for its next sample when one is cancelled."""
    if by != "in process" and (stream is Steps or way == "caller"):
        pytest.skip("each worker would read all")
    stop = asyncio.CancelledError
    batches, errors = split(await outcomes(way, make(way, stream(stop), **BY[by])))
    assert len(errors) == 1
    check(errors[0], stop)
    rest = [label for batch in batches for label in batch]
    assert [label for label in rest if label > 7] == [8, 9, 10, 11]
    loader = make(way, stream(stop), on_error="skip", **BY[by])
    rest = [label for batch in await outcomes(way, loader) for label in batch]
    assert rest == [label for label in range(12) if label != BAD]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [Generator, AsyncGenerator])
@pytest.mark.parametrize("stop", STOPS)
async def test_a_generator_is_never_skipped(stop: Any, stream: Any, way: str) -> None:
    """An error that ends it is raised, whatever the policy; never an early end."""
    loader = make(way, stream(stop), on_error="skip", **IN_PROCESS)
    batches, errors = split(await outcomes(way, loader))
    assert batches == GOOD[:1]
    assert len(errors) == 1
    check(errors[0], stop)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Generator, AsyncGenerator])
async def test_a_generator_in_processes(stream: Any) -> None:
    """The same where workers read the stream."""
    for stop in STOPS:
        loader = make("for", stream(stop), num_workers=1, fetch="workers")
        batches, errors = split(await outcomes("for", loader))
        assert (batches, len(errors)) == (GOOD[:1], 1)
        check(errors[0], stop)
