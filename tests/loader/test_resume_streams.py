"""A loader's state over iterables: their own state if they have one, else a count."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
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
from torch.utils.data import ChainDataset, Dataset

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from loader.states import REPEATED, left_at, loaded
from loader.test_resume_order import Fixed
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncStream, SyncStream
from stateful import Cursor, Cursors, Kept, Streamed
from working import draw, draw_own


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
    "dataset": Kept,
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
@pytest.mark.parametrize("name", STATEFUL)
@settings(max_examples=settings().max_examples // 8)
@EVERY_LOADING
def test_states(name: str, n: int, size: Any, drop_last: bool, factor: Any) -> None:
    """Torchdata's protocol, quietly; the loaded state applies once."""
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
@pytest.mark.parametrize("name", STATEFUL)
async def test_states_for_tasks(name: str) -> None:
    """By ``async for``, which reads ahead."""
    await assert_resumes_exactly_async(lambda: DataLoader(STATEFUL[name](11), 2))


@pytest.mark.slow
def test_states_of_a_worker() -> None:
    """The epoch is set on the dataset before it is sent there."""
    assert_resumes_exactly(lambda: DataLoader(OnDataset(11), 4, num_workers=1))


def test_what_a_state_saves() -> None:
    """Nothing that was delivered is read again."""
    loader: Any = DataLoader(Noting(), 2)
    state = left_at(loader, 3)
    dataset = Noting()
    resumed = loaded(DataLoader(dataset, 2), state)
    assert next(iter(resumed)).tolist() == [6, 7]
    assert dataset.read == [6, 7]


@REPEATED
@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_draws_of_a_transform(rng: Any) -> None:
    """Random transforms are what they would have been."""
    assert_resumes_exactly(
        lambda: DataLoader(SyncStream(9), 2, transform=draw, rng=rng)
    )


@pytest.mark.slow
@REPEATED
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
    load(
        {"model": other.state_dict(), "loader": again},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
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
