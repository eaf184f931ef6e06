"""The published laws: they pass for exact loaders, and name the first difference."""

import itertools
import os
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader, testing
from aioloader.datasets import from_iterable
from loader.states import left_at
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import SyncMap
from working import Drawing, Numbers


class Forgetful(DataLoader[Any]):
    """Saves the state of batch 2 after batch 3."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        if state["done"] != 3:
            return state
        return left_at(DataLoader(self.dataset, 2, in_order=self.in_order), 2)


def test_a_wrong_position_is_found() -> None:
    """The failure names k, the batch that differs, and both batches."""
    message = re.escape(
        "resumed after 3 batches: batch 3 differs: "
        "expected tensor([6, 7]), found tensor([4, 5])"
    )
    with pytest.raises(AssertionError, match=message):
        assert_resumes_exactly(lambda: Forgetful(Numbers(10), 2), stops=[3, 4])


async def test_the_async_law_finds_a_wrong_position() -> None:
    """The law checks only the given stops."""
    with pytest.raises(AssertionError, match="again after 1 more: batch 3 differs"):
        await assert_resumes_exactly_async(lambda: Forgetful(Numbers(8), 2), stops=[2])
    await assert_resumes_exactly_async(lambda: Forgetful(Numbers(8), 2), stops=[0, 4])


def test_a_missing_batch_is_found_in_any_order() -> None:
    """Batches out of order are compared as a set."""
    with pytest.raises(
        AssertionError, match=r"3 batches, in any order: batch 3 differs: expected no"
    ):
        assert_resumes_exactly(
            lambda: Forgetful(Numbers(8), 2, in_order=False), stops=[3]
        )


def test_unseeded_random_transforms_are_found() -> None:
    """Without ``rng=``, random transforms do not resume."""
    with pytest.raises(AssertionError, match=r"before iter\(\): batch 0 differs"):
        assert_resumes_exactly(lambda: DataLoader(Drawing(6), 2))
    assert_resumes_exactly(lambda: DataLoader(Drawing(6), 2, rng="batch"))


class Unplaced(DataLoader[Any]):
    """Does not restore the position of torch's generator."""

    def load_state_dict(self, state: Any, **options: Any) -> None:
        position = torch.get_rng_state()
        super().load_state_dict(state, **options)
        torch.set_rng_state(position)


def test_an_unrestored_generator_is_found() -> None:
    """The order of the next epoch would depend on the process."""
    with pytest.raises(AssertionError, match="the next epoch: batch 0 differs"):
        assert_resumes_exactly(lambda: Unplaced(Numbers(6), 2, shuffle=True), stops=[1])


class OfProcess(Numbers):
    """Its samples differ in each process."""

    def __getitem__(self, index: int) -> Any:
        return index + os.getpid()


@pytest.mark.slow
async def test_a_difference_in_a_new_process_is_found() -> None:
    """The law also resumes in a new process."""
    await testing.assert_resumes_exactly_async(
        lambda: DataLoader(Numbers(6), 2, shuffle=True)
    )
    with pytest.raises(
        AssertionError, match=r"(?s)new process: .* resumed before iter\(\): b"
    ):
        testing.assert_resumes_exactly(lambda: DataLoader(OfProcess(6), 2))


def test_a_function_that_cannot_be_pickled_warns() -> None:
    """The warning says that no new process was checked, and how to silence it."""
    lock = threading.Lock()

    def make() -> DataLoader[Any]:
        with lock:
            return DataLoader(Numbers(6), 2)

    with pytest.warns(UserWarning, match="or new_process=False"):
        testing.assert_resumes_exactly(make)


def test_the_law_restores_the_default_generator() -> None:
    """Later random numbers do not depend on the law."""
    before = torch.get_rng_state()
    assert_resumes_exactly(lambda: DataLoader(Numbers(6), 2, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
def test_a_limit_bounds_endless_streams() -> None:
    """The law checks ``limit`` batches."""
    stream = from_iterable(itertools.count)
    assert_resumes_exactly(lambda: DataLoader(stream, 2), limit=5)


def check_resumed(first: Any, resumed: Any) -> None:
    """Check the law for a loader whose only batch is another value from then on."""
    values = itertools.chain([first], itertools.repeat(resumed))
    assert_resumes_exactly(lambda: DataLoader([0], collate_fn=lambda _: next(values)))


def test_batches_are_compared_bit_by_bit() -> None:
    """Bits, dtypes, shapes and types count; identity does not."""
    nan = torch.tensor([1.0, float("nan")])
    value = {"a": [nan, np.arange(3)], "b": (1.5, "x", {2, 3}, None)}
    same = {"a": [nan.clone(), np.arange(3)], "b": (1.5, "x", {3, 2}, None)}
    check_resumed(value, same)
    for first, resumed in [
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.zeros(2, np.float32)),
        ([1], (1,)),
        (1, True),
        (SyncMap(3), SyncMap(4)),
    ]:
        with pytest.raises(AssertionError, match="batch 0 differs"):
            check_resumed(first, resumed)
    check_resumed(SyncMap(3), SyncMap(3))
    check_resumed(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
