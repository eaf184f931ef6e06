"""Resuming with samplers and iterables of every kind."""

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
    """A subclass, which might do anything."""


class Fixed(Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0, 5, 4, 7])

    def __len__(self) -> int:
        return 7


class Kept(Sampler[int]):
    """Resumes from its state, a dict that it changes later."""

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
    """Has a different order in each epoch, by ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % N for index in range(7)])


class Shuffles(Sampler[int]):
    """Counts its epochs itself, and shuffles by their number."""

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
    """A batch sampler around such a sampler."""

    def __init__(self) -> None:
        self.sampler = Shuffles()

    def __iter__(self) -> Iterator[Any]:
        indices = list(self.sampler)
        return iter([indices[:4], indices[4:8], indices[8:]])

    epoch = set_epoch = None  # type: ignore[assignment]


def sampled(make: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes a loader with such a sampler."""
    arguments: Any = {"batch_size": 3, "rng": "batch", **options}
    return lambda: DataLoader(Drawing(N), sampler=make(), **arguments)


def batched(make: Callable[[], Any]) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes a loader with such a batch sampler."""
    return lambda: DataLoader(Drawing(N), batch_sampler=make(), rng="sample")


# ``test_resume_draws`` has more.
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
def test_samplers_resume_after_any_batch(name: str) -> None:
    """Without a warning, also when resumed twice in a row, and in the next epoch."""
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
def test_stateless_samplers_resume(make: Callable[[], DataLoader[Any]]) -> None:
    """Samplers with the same order in each epoch are iterated again."""
    assert_resumes_exactly(make)


def test_a_sampler_with_a_state_is_not_repeated() -> None:
    """The sampler resumes after the last delivered batch; it was read further."""
    loader: Any = DataLoader(Numbers(N), 2, sampler=Kept(), prefetch_factor=4)
    iterator, state = begun(loader)
    assert state["states"][0]["0"]["sampler"] == {"place": 2}
    rest = listed(iterator)
    sampler = Kept()
    resumed = loaded(DataLoader(Numbers(N), 2, sampler=sampler), state)
    assert listed(resumed) == rest
    assert sampler.given == list(range(2, N))


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_reads_only_the_rest(shuffle: bool) -> None:
    """Of a billion samples; the state stays small."""
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
def test_states_are_of_bounded_size(options: dict[str, Any], generators: int) -> None:
    """Half a kilobyte, plus 3.4 for each generator."""
    loader = DataLoader(range(10**6), 10, **options)
    _, state = begun(loader)
    assert len(json.dumps(state)) < 600 + 3_500 * generators
    loader.close()


def test_a_state_has_a_hundred_bytes_per_open_shard(tmp_path: Path) -> None:
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


# -- iterables, with and without a state -----------------------------------------------


class OnBoth(Cursors):
    """The dataset has a state, and so has its iterator."""

    part = 3

    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part = state["part"]


class OnItself(Cursor):
    """Dataset and iterator in one; starts again once it is exhausted."""

    def __iter__(self) -> "OnItself":
        if self.place == len(self.numbers):
            self.place = 0
        return self


class OnAsync(Remembered):
    """An async dataset with a state."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in Remembered.__iter__(self):
            await asyncio.sleep(0)
            yield number


class StreamedAsync(Streamed):
    """Async; a loaded state remains the start of its epoch."""

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
# Only its iterators have a state, so the dataset might count epochs.
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
def test_stateful_iterables_resume(
    name: str, n: int, size: Any, drop_last: bool, factor: Any
) -> None:
    """By torchdata's protocol; a loaded state applies once."""
    check(STATEFUL[name], n, size, {"drop_last": drop_last, "prefetch_factor": factor})


@pytest.mark.slow
@REPEATED
@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=settings().max_examples // 8)
@EVERY_LOADING
def test_stateless_iterables_are_read_again(
    name: str, n: int, size: Any, drop_last: bool, factor: Any
) -> None:
    """Samples that were delivered are dropped."""
    check(PLAIN[name], n, size, {"drop_last": drop_last, "prefetch_factor": factor})


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("name", STATEFUL)
async def test_stateful_iterables_resume_by_async_for(name: str) -> None:
    """Samples are prefetched meanwhile."""
    await assert_resumes_exactly_async(lambda: DataLoader(STATEFUL[name](11), 2))


@pytest.mark.slow
def test_a_stateful_iterable_resumes_in_a_worker() -> None:
    """The epoch is set on the dataset before it is sent to the worker."""
    assert_resumes_exactly(lambda: DataLoader(OnDataset(11), 4, num_workers=1))


@REPEATED
@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_random_transforms_resume_exactly(rng: Any) -> None:
    """For ``rng="batch"`` and ``rng="sample"``."""
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
def test_reading_again_warns_once(make: Callable[[], Any], words: str) -> None:
    """The warning has the number of samples read again, or of batches dropped."""
    resumed = loaded(make(), left_at(make(), 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(resumed)) == 1
        list(resumed)
    (warning,) = caught
    assert "has no state_dict(): " in str(warning.message)
    assert words in str(warning.message)


# -- torch.distributed.checkpoint, which restores known keys only ----------------------

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (unavailable|disabled)"
)


class Counting(Dataset[int]):
    """Its state gets a new key, and a tensor, with each sample."""

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
    """Return a loader that shuffles by a generator."""
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(23), 3, shuffle=True, generator=generator)


def streamed() -> Any:
    """Return a loader of a shuffled stream."""
    return DataLoader(from_iterable(range(23)).shuffle(9), 3)


def counted() -> Any:
    """Return a loader of a dataset with a state, read in workers."""
    return DataLoader(Counting(), 3, num_workers=2)


def fresh() -> Any:
    """Return a loader that shuffles by the default generator."""
    return DataLoader(range(23), 3, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 4, 8, 9])
@pytest.mark.parametrize("make", [shuffled, streamed, counted, fresh])
def test_checkpoints_restore_loaders(make: Any, taken: int, tmp_path: Path) -> None:
    """Loader and model are passed as they are."""
    loader, model = make(), nn.Linear(1, 1)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator, None)
    saved = {"model": model.state_dict(), "loader": loader}
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    rest = [batch.tolist() for batch in (iterator if taken < 9 else loader)]
    resumed, restored_model = make(), nn.Linear(1, 1)
    restored = {"model": restored_model.state_dict(), "loader": resumed}
    load(restored, checkpoint_id=tmp_path, no_dist=True)
    is_drawn = make is fresh and taken in {0, 9}
    batches = [batch.tolist() for batch in resumed]
    assert is_drawn or batches == rest
    assert torch.equal(restored_model.weight, model.weight)


@pytest.mark.parametrize("make", [shuffled, streamed, counted])
def test_the_keys_of_a_state_never_change(make: Any) -> None:
    """From before the first batch until after the last one."""
    loader = make()
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    states.append(loader.state_dict())
    all_keys = [flatten_state_dict(state)[0].keys() for state in states]
    assert len(all_keys) == 10
    assert all(keys == all_keys[0] for keys in all_keys)
