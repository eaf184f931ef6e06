"""A loader's state over iterables: their own state if they have one, else a count."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ChainDataset

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncStream, SyncStream
from stateful import Cursor, Cursors, Kept
from working import draw, draw_own

READ_AGAIN = "ignore:.* has no state_dict:UserWarning"


class Noting(Kept):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__(11)
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.read.append(number)
            yield number


class OnBoth(Cursors):
    """The dataset has a state beside that of its iterator."""

    part = 3

    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part = state["part"]


class OnItself(Cursor):
    """Dataset and iterator in one, which begins anew when it is iterated."""

    def __iter__(self) -> "OnItself":
        if self.place == len(self.numbers):
            self.place = 0
        return self


class OnAsync(Kept):
    """The dataset has a state, for a loop."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in Kept.__iter__(self):
            await asyncio.sleep(0)
            yield number


STATEFUL: dict[str, Callable[[], Any]] = {
    "iterator": lambda: Cursors(11),
    "dataset": lambda: Kept(11),
    "both": lambda: OnBoth(11),
    "itself": lambda: OnItself(range(11)),
    "async": lambda: OnAsync(11),
}
OPTIONS: list[dict[str, Any]] = [
    {"batch_size": 3},
    {"batch_size": 3, "drop_last": True},
    {"batch_size": None},
    {"batch_size": 2, "prefetch_factor": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_states(name: str, options: dict[str, Any]) -> None:
    """Torchdata's protocol, quietly."""
    assert_resumes_exactly(lambda: DataLoader(STATEFUL[name](), **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
async def test_states_for_tasks(name: str) -> None:
    """By ``async for``, which reads ahead."""
    await assert_resumes_exactly_async(lambda: DataLoader(STATEFUL[name](), 2))


def test_what_a_state_saves() -> None:
    """Nothing that was delivered is read again."""
    loader: Any = DataLoader(Noting(), 2)
    iterator = iter(loader)
    delivered = [next(iterator).tolist() for _ in range(3)]
    assert delivered[-1] == [4, 5]
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    dataset = Noting()
    resumed: Any = DataLoader(dataset, 2)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == [6, 7]
    assert dataset.read == [6, 7]


# -- without a state --------------------------------------------------------------

PLAIN: dict[str, Callable[[], Any]] = {
    "sync": lambda: SyncStream(10),
    "async": lambda: AsyncStream(10),
    "chain": lambda: ChainDataset([SyncStream(3), AsyncStream(4)]),  # type: ignore[list-item]
    "list iterator": lambda: Again([5, 6, 7, 8]),
}


class Again:
    """Iterable, and nothing else."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.mark.slow
@pytest.mark.filterwarnings(READ_AGAIN)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_reading_again(name: str, options: dict[str, Any]) -> None:
    """What was delivered is read again and dropped."""
    assert_resumes_exactly(lambda: DataLoader(PLAIN[name](), **options))


@pytest.mark.filterwarnings(READ_AGAIN)
@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_draws_of_a_transform(rng: Any) -> None:
    """Random transforms are what they would have been."""
    assert_resumes_exactly(
        lambda: DataLoader(SyncStream(9), 2, transform=draw, rng=rng)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(READ_AGAIN)
@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_hosts(loop: Any) -> None:
    """An async iterable with thread workers, on both loops."""
    await assert_resumes_exactly_async(
        lambda: DataLoader(
            AsyncStream(9),
            2,
            transform=draw_own,
            num_workers=2,
            workers="thread",
            loop=loop,
        )
    )


@pytest.mark.parametrize("name", ["sync", "async"])
def test_one_warning(name: str) -> None:
    """It tells how many samples are read again."""
    loader: Any = DataLoader(PLAIN[name](), 3)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    resumed: Any = DataLoader(PLAIN[name](), 3)
    resumed.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(resumed)) == 2
        list(resumed)
    (warning,) = caught
    assert "has no state_dict(): its first 6 samples are read" in str(warning.message)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    n=st.integers(0, 20),
    size=st.one_of(st.none(), st.integers(1, 6)),
    kind=st.sampled_from(["iterator", "dataset", "stream", "plain"]),
    drop_last=st.booleans(),
    stops=st.sets(st.integers(0, 21), max_size=3),
)
@pytest.mark.filterwarnings(READ_AGAIN)
def test_any_k(
    n: int, size: int | None, kind: str, drop_last: bool, stops: set[int]
) -> None:
    """Whatever the sizes."""
    datasets: dict[str, Callable[[], Any]] = {
        "iterator": lambda: Cursors(n),
        "dataset": lambda: Kept(n),
        "stream": lambda: from_iterable(range(n)).shuffle(4),
        "plain": lambda: SyncStream(n),
    }
    assert_resumes_exactly(
        lambda: DataLoader(
            datasets[kind](),
            batch_size=size,
            drop_last=drop_last and size is not None,
        ),
        stops=stops,
    )
