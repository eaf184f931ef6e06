"""States that a review found wrong: moments, readers and samplers of every kind."""

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from aioloader import DataLoader, ShuffledIndices
from aioloader.errors import StateMismatchError


def saved(loader: Any) -> Any:
    """Return the state as a file brings it back."""
    return json.loads(json.dumps(loader.state_dict()))


def flat(batches: Any) -> list[int]:
    """Return the samples of batches of integers."""
    return [int(sample) for batch in batches for sample in batch]


def taken(loader: Any, count: int) -> tuple[list[int], Any, list[int]]:
    """Return the first batches, the state behind them, and the rest."""
    iterator = iter(loader)
    first = flat(next(iterator) for _ in range(count))
    state = saved(loader)
    return first, state, flat(iterator)


class Counting(IterableDataset[int]):
    """Its own iterator, with a state; counts its epochs."""

    def __init__(self) -> None:
        self.epoch, self.place, self.is_loaded = 0, 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.epoch, self.place = self.epoch + 1, 0
        self.is_loaded = False
        return self

    def __next__(self) -> int:
        if self.place >= 6:
            raise StopIteration
        self.place += 1
        return 100 * self.epoch + self.place

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.is_loaded = self.place < 6


class Live(Sampler[int]):
    """Returns its own dict as a state, and goes on changing it."""

    def __init__(self) -> None:
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < 12:
            self.state["at"] += 1
            yield self.state["at"] - 1
        self.state["at"] = 0

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class Drawing(Sampler[int]):
    """Draws its order in a plain ``__iter__``, as torch's loader lets it."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(9).tolist())

    def __len__(self) -> int:
        return 9


@pytest.mark.slow
def test_the_second_epoch_of_persistent_replicas() -> None:
    """Each reader has its own state, also in an epoch that was begun ahead."""
    options: Any = {"num_workers": 2, "persistent_workers": True}
    with DataLoader(Replica(), 2, **options) as loader:
        list(loader)
        _, state, rest = taken(loader, 3)
    assert sorted(state["states"][0]) == ["0", "1"]
    resumed = DataLoader(Replica(), 2, num_workers=2)
    resumed.load_state_dict(state)
    assert flat(resumed) == rest


class Replica(Counting):
    """One of several workers' streams."""

    def __next__(self) -> int:
        return super().__next__() + 1000 * torch.utils.data.get_worker_info().id  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"batch_size": None, "rank": 0, "world_size": 2}, {"batch_size": None}),
        (
            {"batch_sampler": BatchSampler(range(12), 4, drop_last=False)},
            {"batch_sampler": BatchSampler(range(12), 2, drop_last=False)},
        ),
        (
            {"batch_sampler": [[1], [2, 3], [4]], "rank": 0, "world_size": 2},
            {"batch_sampler": [[1], [2, 3], [4]]},
        ),
    ],
    ids=["samples", "batches of torch's", "batches of a user's"],
)
def test_other_units_are_refused(one: Any, other: Any) -> None:
    """A position counts global batches, whatever they are made by."""
    state = saved(DataLoader(list(range(12)), **one))
    with pytest.raises(StateMismatchError):
        DataLoader(list(range(12)), **other).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "generator", "lazy"])
async def test_a_state_during_the_first_step(kind: str) -> None:
    """Its seed and its epoch are those of the order that is about to be delivered."""

    def make(num_workers: int = 0) -> Any:
        options: Any = {"shuffle": True, "num_workers": num_workers}
        if kind == "generator":
            options["generator"] = torch.Generator().manual_seed(3)
        if kind == "lazy":
            options = {"sampler": ShuffledIndices(12), "num_workers": num_workers}
        return DataLoader(list(range(12)), 4, **options)

    loader = make(num_workers=1)
    async for _ in loader:
        pass
    iterator = aiter(loader)
    step = asyncio.ensure_future(anext(iterator))
    for _ in range(3):
        await asyncio.sleep(0)
    state = saved(loader)
    whole = flat([await step])
    assert saved(loader)["order"] == state["order"]
    whole += flat([batch async for batch in iterator])
    resumed = make()
    resumed.load_state_dict(state)
    assert flat(resumed) == whole


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}], ids=str)
def test_a_start_that_fails_loses_nothing(options: Any) -> None:
    """The loaded state, and the epoch, are there for another try."""

    class Shy(list[int]):
        is_ready = False

        def __enter__(self) -> None:
            if not self.is_ready:
                raise OSError("not yet")

        def __exit__(self, *_exc: object) -> None:
            pass

    loader = DataLoader(Shy(range(8)), 2, lifespan=lambda one: one, **options)
    _, state, rest = taken(DataLoader(list(range(8)), 2), 2)
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    Shy.is_ready = True
    assert flat(loader) == rest


def test_samplers_with_a_state() -> None:
    """What they return is copied; and they learn how their epoch has ended."""
    options: Any = {"prefetch_factor": 3}
    loader = DataLoader(list(range(12)), 2, sampler=Live(), **options)
    first, state, rest = taken(loader, 2)
    assert first + rest == list(range(12))
    resumed = DataLoader(list(range(12)), 2, sampler=Live())
    resumed.load_state_dict(state)
    assert flat(resumed) == rest
    resumed.load_state_dict(saved(loader))
    assert flat(resumed) == list(range(12))


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}], ids=str)
def test_iterables_that_count_their_epochs(options: Any) -> None:
    """Behind an epoch they are told, and begin the next one."""
    loader = DataLoader(Counting(), 4, **options)
    list(loader)
    resumed = DataLoader(Counting(), 4, **options)
    resumed.load_state_dict(saved(loader))
    assert flat(resumed) == flat(loader) == [201, 202, 203, 204, 205, 206]


def test_a_pickled_loader_keeps_what_was_loaded() -> None:
    """It is a part of what the loader is about to do."""
    _, state, rest = taken(DataLoader(list(range(8)), 2), 1)
    loader = DataLoader(list(range(8)), 2)
    loader.load_state_dict(state)
    assert flat(pickle.loads(pickle.dumps(loader))) == rest


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_draws_of_a_plain_iter(kind: str, num_workers: int) -> None:
    """They come before the base seed, as torch's."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        options: Any = {"sampler": Drawing(), "batch_size": None}
        if kind == "batch_sampler":
            options = {"batch_sampler": Batches()}
        loader = cls(list(range(9)), num_workers=num_workers, **options)
        return [[torch.as_tensor(one).tolist() for one in loader] for _ in range(3)]

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


class Batches(Drawing):
    """Batches, drawn in the same way."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(9).reshape(3, 3).tolist())


def test_a_sampler_that_fails_ends_no_epoch() -> None:
    """What was not delivered is not over."""

    def failing() -> Iterator[int]:
        yield from range(4)
        raise ValueError("no more")

    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return failing()

    several: list[Any] = [{}, {"prefetch_factor": 2}]
    for options in several:
        loader: Any = DataLoader(list(range(8)), 2, sampler=Failing(), **options)
        iterator = iter(loader)
        with pytest.raises(ValueError, match="no more"):
            flat(next(iterator) for _ in range(9))
        assert next(iterator, None) is None
        assert (loader.state_dict()["epoch"], loader.state_dict()["done"]) == (0, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tail", ["wrap", "pad", "drop", "uneven"])
@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_lengths_of_iterables(n: int, tail: Any, ranks: int) -> None:
    """As many as are delivered; and alike on all ranks, if the tail says so."""

    class Sized(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(n))

        def __len__(self) -> int:
            return n

    found = []
    for rank in range(ranks):
        options: Any = {"rank": rank, "world_size": ranks, "tail": tail}
        loader = DataLoader(Sized(), 2, **options)
        found.append(len(list(loader)))
        assert len(loader) == found[-1]
    assert tail == "uneven" or len(set(found)) == 1


def test_an_iterator_that_is_false() -> None:
    """It has a length, which may be zero; it is opened once all the same."""

    class Falsy:
        def __init__(self) -> None:
            self.left = [3, 2, 1]

        def __iter__(self) -> Any:
            return self

        def __len__(self) -> int:
            return 0

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop()

    class Opens(IterableDataset[int]):
        def __iter__(self) -> Any:
            return Falsy()

    assert flat(DataLoader(Opens(), 2)) == [1, 2, 3]
    sampler: Any = Falsy()
    assert flat(DataLoader(list(range(4)), 2, sampler=sampler)) == [1, 2, 3]
