"""The published laws: they hold for what is right, and say what is wrong."""

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from aioloader import DataLoader, testing
from aioloader._loader.state import unsealed
from aioloader.datasets import from_iterable
from aioloader.testing._frozen import frozen
from laws.dataset_law import check_dataset
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream
from working import Drawing, Numbers, Sharded


class Forgetful(DataLoader[Any]):
    """Saves a wrong position once it has come to batch 3."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        if state["done"] != 3:
            return state
        return replace(unsealed(state), done=2).sealed()


def test_a_wrong_position_is_named() -> None:
    """The failure tells k, the batch that differs, and both batches."""
    what = re.escape(
        "resumed after 3 batches: batch 3 differs: "
        "expected tensor([6, 7]), found tensor([4, 5])"
    )
    with pytest.raises(AssertionError, match=what):
        assert_resumes_exactly(lambda: Forgetful(Numbers(10), 2), stops=[3, 4])


async def test_a_wrong_position_is_named_to_tasks() -> None:
    """The async twin finds the same; what is not stopped at is not found."""
    with pytest.raises(AssertionError, match="again after 1 more: batch 3 differs"):
        await assert_resumes_exactly_async(lambda: Forgetful(Numbers(8), 2), stops=[2])
    await assert_resumes_exactly_async(lambda: Forgetful(Numbers(8), 2), stops=[0, 4])


def test_a_set_that_differs_is_named() -> None:
    """Out of order, batches are counted."""
    with pytest.raises(
        AssertionError, match=r"3 batches, in any order: batch 3 differs: expected no"
    ):
        assert_resumes_exactly(
            lambda: Forgetful(Numbers(8), 2, in_order=False), stops=[3]
        )


def test_draws_from_the_users_generators_are_found() -> None:
    """Without keys a random transform goes on with whatever comes."""
    with pytest.raises(AssertionError, match=r"before iter\(\): batch 0 differs"):
        assert_resumes_exactly(lambda: DataLoader(Drawing(6), 2))
    assert_resumes_exactly(lambda: DataLoader(Drawing(6), 2, rng="batch"))


class Unplaced(DataLoader[Any]):
    """Saves no position of the generator."""

    def state_dict(self) -> Any:
        return replace(unsealed(super().state_dict()), generators={}).sealed()


def test_orders_that_restart_are_found() -> None:
    """What comes before a load is not repeated after it."""
    with pytest.raises(AssertionError, match="the next epoch: batch 0 differs"):
        assert_resumes_exactly(lambda: Unplaced(Numbers(6), 2, shuffle=True), stops=[1])


class OfProcess(Numbers):
    """Its samples are other ones in each process."""

    def __getitem__(self, index: int) -> Any:
        return index + os.getpid()


@pytest.mark.slow
async def test_a_new_process() -> None:
    """What this process has, and another one has not, is found."""
    await testing.assert_resumes_exactly_async(
        lambda: DataLoader(Numbers(6), 2, shuffle=True)
    )
    with pytest.raises(
        AssertionError, match=r"(?s)new process: .* resumed before iter\(\): b"
    ):
        testing.assert_resumes_exactly(lambda: DataLoader(OfProcess(6), 2))


def test_a_function_that_cannot_be_sent() -> None:
    """A warning says that nothing was checked elsewhere, and how to say so."""
    lock = threading.Lock()

    def make() -> DataLoader[Any]:
        with lock:
            return DataLoader(Numbers(6), 2)

    with pytest.warns(UserWarning, match="or new_process=False"):
        testing.assert_resumes_exactly(make)


def test_the_default_generator_is_put_back() -> None:
    """The law leaves no trace in the draws behind it."""
    before = torch.get_rng_state()
    assert_resumes_exactly(lambda: DataLoader(Numbers(6), 2, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
def test_endless_streams() -> None:
    """A limit says how much is looked at."""
    stream = from_iterable(itertools.count)
    assert_resumes_exactly(lambda: DataLoader(stream, 2), limit=5)


# -- datasets ---------------------------------------------------------------------


class Once:
    """An iterator: over after one epoch."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class Counting:
    """Has a state that tells nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Batches(Numbers):
    """Reads batches in another order."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[::-1]


class Unequal(Numbers):
    """Gives something else each time."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return {"calls": self.calls}


class Wrong(SyncStream):
    """Has more samples than it says."""

    def __len__(self) -> int:
        return self.n - 1


GOOD: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(9)),
    "map": SyncMap,
    "empty": lambda: SyncMap(0),
    "random": Drawing,
    "async map": AsyncMap,
    "tensors": lambda: TensorDataset(torch.arange(5)),
    "iterable": SyncStream,
    "longer": lambda: SyncStream(40),
    "sharded": lambda: Sharded(7),
    "async iterable": AsyncStream,
    "stream": lambda: from_iterable(range(50)).shuffle(7),
    "endless": lambda: from_iterable(itertools.count),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_good_datasets(name: str) -> None:
    """They pass, whatever their kind and colour."""
    check_dataset(GOOD[name]())


class NoLength:
    """Map-style, without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class Holding(IterableDataset[int]):
    """Holds a generator."""

    def __init__(self) -> None:
        self.numbers = (one for one in range(3))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no length": (NoLength, "NoLength has no length"),
    "iterator": (lambda: Once(5), "gave 5 samples in one epoch and 0 in the next"),
    "unequal": (lambda: Unequal(3), r"read again, in batches, gave another Unequal\[0"),
    "batches": (lambda: Batches(3), r"Batches read again, in batches, gave another"),
    "generator": (Holding, "Holding cannot be sent to a worker process"),
    "length": (Wrong, r"len\(Wrong\) is 19, but it gave 20 samples"),
    "state": (Counting, "resumed after 1 batch: batch 1 differs: expected 1, found 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_datasets(name: str) -> None:
    """They fail, and the failure says what is wrong."""
    make, what = BAD[name]
    with pytest.raises(AssertionError, match=what):
        check_dataset(make())


# -- equal in every bit -----------------------------------------------------------


def test_frozen() -> None:
    """Bits, dtypes, shapes and types count; identity does not."""
    nan = torch.tensor([1.0, float("nan")])
    value = {"a": [nan, np.arange(3)], "b": (1.5, "x", {2, 3}, None)}
    same = {"a": [nan.clone(), np.arange(3)], "b": (1.5, "x", {3, 2}, None)}
    assert frozen(value) == frozen(same)
    for one, other in [
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.zeros(2, np.float32)),
        ([1], (1,)),
        (1, True),
        (SyncMap(3), SyncMap(4)),
    ]:
        assert frozen(one) != frozen(other)
    assert frozen(SyncMap(3)) == frozen(SyncMap(3))
    assert frozen(torch.eye(2).to_sparse()) == frozen(torch.eye(2).to_sparse())
