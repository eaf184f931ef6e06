"""A user's object may have methods that are named like the loader's own.

It is the user's: no loader enters or exits it, or its iterators.
"""

import contextlib
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from failing import WAYS, drain, make
from resuming import assert_resumes_exactly

READ_AGAIN = "ignore:.* has no state_dict:UserWarning"


class Named:
    """What the loader must never look at."""

    fills = False
    ranks = (5, 9)
    num_readers = 7

    def begin_epoch(self, *_args: Any) -> Any:
        raise AssertionError("it means something else")

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Mean what it says."""
        self.epoch = epoch

    pull = shard = readers = lifespan = open = begin_epoch
    # As ``h5py.File`` and Hugging Face's ``Dataset`` have them.
    __enter__ = __exit__ = __aenter__ = __aexit__ = begin_epoch


class Row(Named):
    """An iterator of either colour."""

    def __init__(self, n: int) -> None:
        self.left = iter(range(n))

    def __iter__(self) -> "Row":
        return self

    def __next__(self) -> int:
        return next(self.left)


class AsyncRow(Named):
    """The same for a loop."""

    def __init__(self, n: int) -> None:
        self.left = iter(range(n))

    def __aiter__(self) -> "AsyncRow":
        return self

    async def __anext__(self) -> int:
        for number in self.left:
            return number
        raise StopAsyncIteration


class Plain(Named):
    """A plain iterable."""

    def __iter__(self) -> Row:
        return Row(10)


class Async(Named):
    """An async iterable."""

    def __aiter__(self) -> AsyncRow:
        return AsyncRow(10)


class Map(Named):
    """Map-style."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
KINDS = pytest.mark.parametrize("kind", [Plain, Async, Map])


@KINDS
@pytest.mark.parametrize("way", WAYS)
async def test_batches(way: str, kind: Any) -> None:
    """They are read one sample after the other, and dealt as any other dataset's."""
    assert await drain(way, make(way, kind())) == BATCHES
    loader = make(way, kind(), rank=1, world_size=2, tail="uneven")
    assert await drain(way, loader) == [[1, 3, 5, 7], [9]]
    loader.set_epoch(3)  # it is called: no epoch is announced in another way
    assert loader.dataset.epoch == 3


PROCESSES = partial(ProcessPoolExecutor, mp_context=get_context("fork"))
PLACES: dict[str, dict[str, Any]] = {
    "deadline": {"timeout": 60},
    "process": {"num_workers": 1, "fetch": "workers"},
    "loader reads": {"num_workers": 1, "fetch": "loader"},
    "threads": {"num_workers": 2, "workers": "thread"},
    "executor": {"num_workers": 1, "workers": ThreadPoolExecutor},
    "executor of processes": {"num_workers": 1, "workers": PROCESSES},
}


@KINDS
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
async def test_batches_of_workers(place: str, way: str, kind: Any) -> None:
    """Wherever they are read, in any epoch; also where the loader is entered."""
    options = PLACES[place]
    with contextlib.ExitStack() as stack:
        if callable(options.get("workers")):
            options = {**options, "workers": stack.enter_context(options["workers"](1))}
        loader = make(way, kind(), **options)
        assert await drain(way, loader) == BATCHES
        async with loader:
            assert await drain(way, loader) == BATCHES


class Stateful(Async):
    """The dataset has a state; its iterator has one that is for nobody else."""

    def __init__(self) -> None:
        self.row = AsyncRow(10)
        self.place = 0

    async def __aiter__(self) -> Any:
        while self.place < 10:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Private(AsyncRow):
    """An iterator with a state of another kind."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(0)
        self.dataset = dataset

    async def __anext__(self) -> int:
        if self.dataset.place == 10:
            self.dataset.place = 0
            raise StopAsyncIteration
        self.dataset.place += 1
        return int(self.dataset.place - 1)

    def state_dict(self) -> dict[str, str]:
        return {"not": "for the dataset"}


class WithPrivate(Stateful):
    """Its iterator's ``state_dict`` is its own business."""

    def __aiter__(self) -> Any:
        return Private(self)


@pytest.mark.parametrize("kind", [Stateful, WithPrivate])
def test_states(kind: Any) -> None:
    """Only the dataset's own state is loaded into the dataset."""
    assert_resumes_exactly(lambda: DataLoader(kind(), 3))


class Wrapper:
    """A user's dataset around one of aioloader's streams."""

    def __init__(self) -> None:
        self.stream = from_iterable(range(10))

    def __aiter__(self) -> Any:
        return aiter(self.stream)


@pytest.mark.parametrize("way", WAYS)
async def test_ranks_of_a_wrapped_stream(way: str) -> None:
    """The stream does not know of them, so the loader shares it out."""
    loader = make(way, Wrapper(), rank=1, world_size=2, tail="uneven")
    assert await drain(way, loader) == [[1, 3, 5, 7], [9]]


class Buckets(Sampler[list[int]]):
    """Its ``state_dict`` must be told how far it was read."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3, 4]])

    def state_dict(self, num_steps: int) -> dict[str, int]:
        return {"last": num_steps}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it means something else")


class ModuleRows(torch.nn.Module):
    """A dataset that is a module; its state is all its data."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.arange(5)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return 2 * self.rows[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is not a position")

    state_dict.__signature__ = inspect.signature(torch.nn.Module.state_dict)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_another_meaning(num_workers: int) -> None:
    """They are neither called nor saved."""
    with DataLoader(
        ModuleRows(), batch_sampler=Buckets(), num_workers=num_workers
    ) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 2]
        state = json.loads(json.dumps(loader.state_dict()))
        assert [batch.tolist() for batch in batches] == [[4], [6, 8]]
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="Buckets has no state_dict"):
            assert [batch.tolist() for batch in loader] == [[4], [6, 8]]


@pytest.mark.filterwarnings(READ_AGAIN, "ignore:Wrapper.stream._epoch had changed")
@pytest.mark.parametrize("kind", [Plain, Async, Map, Wrapper])
def test_resuming(kind: Any) -> None:
    """By counting, for there is no state.

    A wrapped stream's epoch, which a shuffle depends on, is no part of it.
    """
    assert_resumes_exactly(lambda: DataLoader(kind(), 3))
