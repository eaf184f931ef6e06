"""The published laws: they hold for what is right, and say what is wrong."""

import itertools
import os
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader, testing
from aioloader._loader.state import unsealed
from aioloader.datasets import from_iterable
from aioloader.testing._frozen import frozen
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import SyncMap
from working import Drawing, Numbers


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
