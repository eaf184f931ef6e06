"""A loader's state under samplers of every kind: the order of the rest is the same."""

import asyncio
import json
import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from aioloader import DataLoader, ShuffledIndices
from aioloader._loader.state import unsealed
from aioloader.datasets import TextDataset, from_iterable
from loader.states import REPEATED, begun, left_at, listed, loaded, seeded
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncStream, SyncMap, SyncStream
from stateful import Batches, Cursor, Cursors, Streamed
from stateful import Kept as Remembered
from working import Drawing, Numbers, draw

N = 11
DATA: Any = range(N)


class Own(BatchSampler):
    """A subclass: it may do anything."""


class Fixed(Sampler[int]):
    """Has no state."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0, 5, 4, 7])

    def __len__(self) -> int:
        return 7


class Kept(Sampler[int]):
    """Has a state, and goes on from it: a dict that it changes later."""

    def __init__(self) -> None:
        self.state = {"place": 0}
        self.given: list[int] = []

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        while self.state["place"] < N:
            self.state["place"] += 1
            self.given.append(self.state["place"] - 1)
            yield 3 * self.state["place"] % N
        self.state["place"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class KeptByIterator(Sampler[int]):
    """Its iterators have states."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return Cursor(range(N))


class Moving(Fixed):
    """Has another order each epoch, which is set."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(one + self.epoch) % N for one in range(7)])


class Shuffles(Sampler[int]):
    """Counts its epochs itself, and shuffles by them."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(N), N))


class Wrapping(Shuffles):
    """A batch sampler around such a sampler, which has the epoch."""

    def __init__(self) -> None:
        self.sampler = Shuffles()

    def __iter__(self) -> Iterator[Any]:
        indices = list(self.sampler)
        return iter([indices[:4], indices[4:8], indices[8:]])

    epoch = set_epoch = None  # type: ignore[assignment]


def sampled(make: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader with such a sampler."""
    arguments: Any = {"batch_size": 3, "rng": "batch", **options}
    return lambda: DataLoader(Drawing(N), sampler=make(), **arguments)


def batched(make: Callable[[], Any]) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader with such a batch sampler."""
    return lambda: DataLoader(Drawing(N), batch_sampler=make(), rng="sample")


# Others are in ``test_resume_draws``.
SAMPLERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "two generators": lambda: DataLoader(
        Drawing(N),
        2,
        sampler=RandomSampler(DATA, generator=seeded()),
        generator=seeded(3),
        rng="batch",
    ),
    "replacement, generator": sampled(
        lambda: RandomSampler(
            DATA, replacement=True, num_samples=17, generator=seeded()
        )
    ),
    "longer": sampled(lambda: RandomSampler(DATA, num_samples=25)),
    "shorter": sampled(
        lambda: RandomSampler(DATA, num_samples=7, generator=seeded()), drop_last=True
    ),
    "weighted, generator": sampled(
        lambda: WeightedRandomSampler([0.1] * N, 13, generator=seeded())
    ),
    "distributed": sampled(lambda: DistributedSampler(DATA, 3, 1), batch_size=2),
    "state": sampled(Kept),
    "state, ahead": lambda: DataLoader(
        Numbers(N), 2, sampler=Kept(), prefetch_factor=3
    ),
    "state, short": sampled(Kept, drop_last=True, batch_size=4),
    "iterator with a state": sampled(KeptByIterator),
    "batches of a state": batched(lambda: BatchSampler(Kept(), 3, drop_last=False)),
    "state of batches": batched(Batches),
    "batches": batched(lambda: BatchSampler(RandomSampler(DATA), 3, drop_last=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_k(name: str) -> None:
    """Quietly: twice in a row, and the epoch that follows."""
    assert_resumes_exactly(SAMPLERS[name])


@pytest.mark.slow
@REPEATED
@pytest.mark.parametrize(
    "make",
    [
        sampled(Fixed),
        sampled(lambda: [5, 3, 3, 9]),
        batched(lambda: [[1, 2], [3], [5, 4, 6]]),
        batched(lambda: Own(SequentialSampler(DATA), 3, drop_last=False)),
        sampled(Moving),
        sampled(Shuffles),
        batched(Wrapping),
    ],
    ids=["fixed", "list", "lists", "own batches", "moving", "counting", "wrapping"],
)
def test_every_k_without_a_state(make: Callable[[], DataLoader[Any]]) -> None:
    """Samplers that give the same order each time are iterated again."""
    assert_resumes_exactly(make)


def test_a_sampler_with_a_state_is_not_iterated_anew() -> None:
    """It goes on behind what was delivered, though more had been asked of it."""
    loader: Any = DataLoader(Numbers(N), 2, sampler=Kept(), prefetch_factor=4)
    iterator, state = begun(loader)
    assert state["states"][0]["0"]["sampler"] == {"place": 2}
    rest = listed(iterator)
    sampler = Kept()
    resumed = loaded(DataLoader(Numbers(N), 2, sampler=sampler), state)
    assert listed(resumed) == rest
    assert sampler.given == list(range(2, N))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_billion(shuffle: bool) -> None:
    """The middle is found at once; only the rest is read; the state stays small."""
    n, half = 10**9, 10**8 // 2

    def loader_of(dataset: Any) -> Any:
        sampler = ShuffledIndices(n, 5) if shuffle else None
        return DataLoader(dataset, 10, sampler=sampler)

    loader = loader_of(SyncMap(n))
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 4096
    dataset = SyncMap(n)
    resumed = loader_of(dataset)
    resumed.load_state_dict(replace(unsealed(state), done=half).sealed())
    iterator = iter(resumed)
    next(iterator)
    expected = ShuffledIndices(n, 5).take(n // 2, n // 2 + 10).tolist()
    assert dataset.asked == (expected if shuffle else list(range(n // 2, n // 2 + 10)))
    assert len(json.dumps(resumed.state_dict())) < 4096
    assert resumed.state_dict()["done"] == half + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "generators"),
    [
        ({}, 1),
        ({"shuffle": True}, 1),
        ({"shuffle": True, "num_workers": 2}, 1),
        ({"sampler": ShuffledIndices(10**6, 0)}, 1),
        ({"shuffle": True, "generator": torch.Generator()}, 2),
        ({"sampler": WeightedRandomSampler([1.0] * 10**6, 100)}, 2),
    ],
)
def test_a_state_has_some_kilobytes(options: dict[str, Any], generators: int) -> None:
    """Half a kilobyte, and 3.4 for each generator, whatever the dataset's length."""
    loader = DataLoader(range(10**6), 10, **options)
    _, state = begun(loader)
    assert len(json.dumps(state)) < 600 + 3_500 * generators
    loader.close()


def test_a_state_has_a_hundred_bytes_for_each_open_shard(tmp_path: Path) -> None:
    for shard in range(32):
        (tmp_path / f"{shard:02}.txt").write_text("a\nb\nc\n")
    sizes = {}
    for lanes in (1, 32):
        loader = DataLoader(TextDataset(f"{tmp_path}/*.txt", interleave=lanes), 32)
        next(iter(loader))
        sizes[lanes] = len(json.dumps(loader.state_dict()))
        loader.close()
    assert sizes[1] < 4_600
    assert sizes[32] - sizes[1] < 31 * 130


# -- iterables: their own state if they have one, else a count -------------------------


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


class OnAsync(Remembered):
    """The dataset has a state, for a loop."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in Remembered.__iter__(self):
            await asyncio.sleep(0)
            yield number


class StreamedAsync(Streamed):
    """It keeps a loaded state as the start of its epoch, for a loop."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for sample in Streamed.__iter__(self):
            yield sample


class OnDataset(Cursors):
    """The iterator has a state, and the dataset counts the epochs."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return Cursor(range(100 * self.epoch, 100 * self.epoch + self.n))


class Again:
    """Iterable, and nothing else."""

    def __init__(self, n: int) -> None:
        self.items = [*range(n)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


STATEFUL: dict[str, Callable[[int], Any]] = {
    "iterator": Cursors,
    "dataset": Remembered,
    "both": OnBoth,
    "itself": lambda n: OnItself(range(n)),
    "async": OnAsync,
    "streamed": Streamed,
    "streamed, async": StreamedAsync,
    "epochs on the dataset": OnDataset,
    "stream": lambda n: from_iterable(range(n)).shuffle(4),
}
PLAIN: dict[str, Callable[[int], Any]] = {
    "sync": SyncStream,
    "async": AsyncStream,
    "chain": lambda n: ChainDataset([SyncStream(3), AsyncStream(n)]),  # type: ignore[list-item]
    "list iterator": Again,
}
# Only its iterators have a state: it may count epochs.
COUNTS = pytest.mark.filterwarnings("ignore:Cursors has no state_dict:UserWarning")
EVERY_LOADING = given(
    n=st.integers(0, 12),
    size=st.sampled_from([3, None, 1, 2, 5]),
    drop_last=st.booleans(),
    factor=st.sampled_from([None, 2, 4]),
)


def check(make: Callable[[int], Any], n: int, size: Any, options: Any) -> None:
    """Check the law for every k."""
    options["drop_last"] = options["drop_last"] and size is not None
    assert_resumes_exactly(lambda: DataLoader(make(n), size, **options))


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("name", STATEFUL)
@settings(max_examples=settings().max_examples // 8)
@EVERY_LOADING
def test_states(name: str, n: int, size: Any, drop_last: bool, factor: Any) -> None:
    """Torchdata's protocol; the loaded state applies once."""
    check(STATEFUL[name], n, size, {"drop_last": drop_last, "prefetch_factor": factor})


@pytest.mark.slow
@REPEATED
@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=settings().max_examples // 8)
@EVERY_LOADING
def test_reading_again(
    name: str, n: int, size: Any, drop_last: bool, factor: Any
) -> None:
    """Without a state, what was delivered is read again and dropped."""
    check(PLAIN[name], n, size, {"drop_last": drop_last, "prefetch_factor": factor})


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("name", STATEFUL)
async def test_states_for_tasks(name: str) -> None:
    """By ``async for``, which reads ahead."""
    await assert_resumes_exactly_async(lambda: DataLoader(STATEFUL[name](11), 2))


@pytest.mark.slow
def test_states_of_a_worker() -> None:
    """The epoch is set on the dataset before it is sent there."""
    assert_resumes_exactly(lambda: DataLoader(OnDataset(11), 4, num_workers=1))


@REPEATED
@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_draws_of_a_transform(rng: Any) -> None:
    """Random transforms are what they would have been."""
    assert_resumes_exactly(
        lambda: DataLoader(SyncStream(9), 2, transform=draw, rng=rng)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(SyncStream(10), 5), "its first 5 samples are read"),
        (lambda: DataLoader(AsyncStream(10), 5), "its first 5 samples are read"),
        (
            lambda: DataLoader(range(10), 5, sampler=Fixed()),
            "Fixed has no state_dict(): it is iterated again and its first 1 batches",
        ),
    ],
    ids=["sync", "async", "sampler"],
)
def test_one_warning(make: Callable[[], Any], words: str) -> None:
    """It tells how many samples are read again, or how many batches are dropped."""
    resumed = loaded(make(), left_at(make(), 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(resumed)) == 1
        list(resumed)
    (warning,) = caught
    assert "has no state_dict(): " in str(warning.message)
    assert words in str(warning.message)


# -- in torch.distributed.checkpoint, which restores known keys only -------------------

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (unavailable|disabled)"
)


class Counting(Dataset[int]):
    """Its state has other keys with each sample, and a tensor."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.read[str(index)] = torch.tensor(index)
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def shuffled() -> Any:
    """Return a loader that draws from a generator."""
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(23), 3, shuffle=True, generator=generator)


def streamed() -> Any:
    """Return a loader of a stream that is shuffled."""
    return DataLoader(from_iterable(range(23)).shuffle(9), 3)


def counted() -> Any:
    """Return a loader of a dataset with a state, read in workers."""
    return DataLoader(Counting(), 3, num_workers=2)


def fresh() -> Any:
    """Return a loader whose order is drawn from no generator of ours."""
    return DataLoader(range(23), 3, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 4, 8, 9])
@pytest.mark.parametrize("make", [shuffled, streamed, counted, fresh])
def test_a_checkpoint(make: Any, taken: int, tmp_path: Path) -> None:
    """The loader is given as it is; the rest is the same, and so is the model."""
    loader, model = make(), nn.Linear(1, 1)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator, None)
    saved = {"model": model.state_dict(), "loader": loader}
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    rest = [batch.tolist() for batch in (iterator if taken < 9 else loader)]
    again, other = make(), nn.Linear(1, 1)
    restored = {"model": other.state_dict(), "loader": again}
    load(restored, checkpoint_id=tmp_path, no_dist=True)
    is_drawn = make is fresh and taken in {0, 9}
    found = [batch.tolist() for batch in again]
    assert is_drawn or found == rest
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("make", [shuffled, streamed, counted])
def test_keys(make: Any) -> None:
    """They are the same at every moment."""
    loader = make()
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    states.append(loader.state_dict())
    found = [flatten_state_dict(state)[0].keys() for state in states]
    assert len(found) == 10
    assert all(keys == found[0] for keys in found)
