"""A loader's state over iterables: their own state if they have one, else a count."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, IterableDataset

from aioloader import DataLoader
from aioloader.datasets import JSONLinesDataset, from_iterable
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncStream, SyncStream
from working import draw, draw_own

READ_AGAIN = "ignore:.* has no state_dict:UserWarning"


class Cursor:
    """An iterator with a state; counts what is read."""

    def __init__(self, n: int, read: list[int]) -> None:
        self.n = n
        self.read = read
        self.place = 0

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> int:
        if self.place == self.n:
            raise StopIteration
        self.read.append(self.place)
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class OnIterator(IterableDataset[int]):
    """The iterator has the state."""

    def __init__(self, n: int = 11) -> None:
        self.n = n
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return Cursor(self.n, self.read)


class OnDataset(IterableDataset[int]):
    """The dataset has the state: a generator goes on from it."""

    def __init__(self, n: int = 11) -> None:
        self.n = n
        self.read: list[int] = []
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.n:
            self.read.append(self.place)
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class OnBoth(OnIterator):
    """The dataset knows which part, its iterator the place in it."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        return Cursor(self.n + self.epochs, self.read)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class OnItself(Cursor):
    """Dataset and iterator in one, which begins anew when it is iterated."""

    def __init__(self, n: int = 11) -> None:
        super().__init__(n, [])

    def __iter__(self) -> "OnItself":
        if self.place == self.n:
            self.place = 0
        return self


class OnAsync(OnDataset):
    """The same for a loop."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.place < self.n:
            self.read.append(self.place)
            self.place += 1
            await asyncio.sleep(0)
            yield self.place - 1
        self.place = 0


STATEFUL: dict[str, Callable[[], Any]] = {
    "iterator": OnIterator,
    "dataset": OnDataset,
    "both": OnBoth,
    "itself": OnItself,
    "async": OnAsync,
}
OPTIONS: list[dict[str, Any]] = [
    {"batch_size": 3},
    {"batch_size": 3, "drop_last": True},
    {"batch_size": None},
    {"batch_size": 2, "prefetch_factor": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_states(name: str, options: dict[str, Any]) -> None:
    """Torchdata's protocol, quietly."""
    assert_resumes_exactly(lambda: DataLoader(STATEFUL[name](), **options))


@pytest.mark.parametrize("name", STATEFUL)
async def test_states_for_tasks(name: str) -> None:
    """By ``async for``, which reads ahead."""
    await assert_resumes_exactly_async(lambda: DataLoader(STATEFUL[name](), 2))


@pytest.mark.parametrize("name", ["iterator", "dataset"])
def test_what_a_state_saves(name: str) -> None:
    """Nothing that was delivered is read again."""
    loader: Any = DataLoader(STATEFUL[name](), 2)
    iterator = iter(loader)
    delivered = [next(iterator).tolist() for _ in range(3)]
    assert delivered[-1] == [4, 5]
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    dataset = STATEFUL[name]()
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


# -- our streams ------------------------------------------------------------------


@pytest.fixture
def streams(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    """Return what makes streams, over three shards of lines."""
    for shard in range(3):
        lines = (json.dumps([shard, place]) for place in range(3 + shard))
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    return {
        "lines": lambda: JSONLinesDataset("*.jsonl", store=tmp_path, shuffle=True),
        "shuffled lines": lambda: JSONLinesDataset(
            "*.jsonl", store=tmp_path, shuffle=True
        ).shuffle(4),
        "numbers": lambda: from_iterable(range(11)).shuffle(3),
        "mapped": lambda: from_iterable(range(11)).map(str).shuffle(5).take(9),
    }


@pytest.mark.parametrize("name", ["lines", "shuffled lines", "numbers", "mapped"])
def test_streams(name: str, streams: Any) -> None:
    """Shuffle buffers and all, quietly; the epoch that follows has another order."""
    assert_resumes_exactly(lambda: DataLoader(streams[name](), 2))
    loader: Any = DataLoader(streams[name](), 2)
    assert repr(list(loader)) != repr(list(loader))


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_streams_for_tasks(loop: Any, streams: Any) -> None:
    """On both loops."""
    for name in ("shuffled lines", "numbers"):
        await assert_resumes_exactly_async(
            lambda name=name: DataLoader(  # type: ignore[misc]
                streams[name](), 2, loop=loop, prefetch_factor=4
            )
        )


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
        "iterator": lambda: OnIterator(n),
        "dataset": lambda: OnDataset(n),
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
