"""Batches within a budget of tokens, and their padding."""

import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from aioloader import (
    DataLoader,
    ShuffledIndices,
    TokenBudgetBatchSampler,
    merge_states,
    pad_collate,
)
from aioloader.errors import StateMismatchError
from resuming import assert_resumes_exactly
from working import Numbers

LENGTHS = [1 + (7 * at) % 13 for at in range(39)]


def sampler_of(**options: Any) -> TokenBudgetBatchSampler:
    given: dict[str, Any] = {"max_tokens": 20, "window": 8, "seed": 3, **options}
    return TokenBudgetBatchSampler(LENGTHS, **given)


def loader_of(sampler: Any = None, **options: Any) -> "DataLoader[Any]":
    sampler = sampler_of() if sampler is None else sampler
    asked: Any = {"collate_fn": list, "batch_sampler": sampler, **options}
    count = len(getattr(sampler, "lengths", LENGTHS))
    return DataLoader(Numbers(count), **asked)


def later(value: Any) -> Any:
    return json.loads(json.dumps(value))


# -- the batches ----------------------------------------------------------------------


def cut(lengths: list[int], window: list[int], budget: int) -> list[list[int]]:
    """Return the batches of a window, as the documentation says it."""
    batches: list[list[int]] = []
    for index in sorted(window, key=lambda one: lengths[one]):
        wider = [*batches[-1], index] if batches else []
        if wider and len(wider) * max(lengths[one] for one in wider) <= budget:
            batches[-1] = wider
        else:
            batches.append([index])
    return batches


@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.integers(30, 90),
    st.integers(1, 25),
    st.integers(-3, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_lengths(
    lengths: list[int], budget: int, window: int, seed: int, epoch: int, shuffle: bool
) -> None:
    """They are those of the documentation, in another order; their number is known."""
    order = TokenBudgetBatchSampler(lengths, budget, window, shuffle, seed)
    order.set_epoch(epoch)
    found = list(order)
    assert len(order) == len(found)
    assert list(order) == found
    samples = list(itertools.chain(*found))
    assert sorted(samples) == [*range(len(lengths))]
    at = 0
    for start in range(0, len(lengths), window):
        mine = samples[start : start + window]
        if not shuffle:
            assert sorted(mine) == [*range(start, start + len(mine))]
        expected = cut(lengths, sorted(mine), budget)
        got = found[at : at + len(expected)]
        sizes = [[lengths[one] for one in batch] for batch in got]
        wanted = [[lengths[one] for one in batch] for batch in expected]
        assert (sorted(sizes) if shuffle else sizes) == (
            sorted(wanted) if shuffle else wanted
        )
        assert shuffle or got == expected
        at += len(expected)


def test_the_order() -> None:
    """It follows from seed and epoch; windows are those of a shuffled order."""
    first, batches = sampler_of(), list(sampler_of())
    assert batches == list(iter(iter(pickle.loads(pickle.dumps(first)))))
    assert batches != list(sampler_of(seed=4))
    first.set_epoch(1)
    assert batches != list(first)
    assert list(first) == list(first)
    windows = itertools.chain(*batches)
    assert sorted(itertools.islice(windows, 8)) != [*range(8)]
    lengths = [LENGTHS[batch[-1]] for batch in batches]
    assert lengths[:6] != sorted(lengths[:6])
    again = sampler_of(shuffle=False)
    batches = list(again)
    again.set_epoch(1)
    assert list(again) == batches


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "array": np.array,
    "tensor": torch.tensor,
    "small array": lambda values: np.array(values, np.uint8),
    "small tensor": lambda values: torch.tensor(values, dtype=torch.int32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lengths(kind: str) -> None:
    order = TokenBudgetBatchSampler(KINDS[kind](LENGTHS), 20, 8, seed=3)
    assert list(order) == list(sampler_of())
    assert order.described() == sampler_of().described()
    assert {type(one) for batch in order for one in batch} == {int}


def test_an_array_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an iterator computes no more than the windows that it needs."""
    lengths, taken = np.ones(10**6, np.int32), list[int]()
    take = ShuffledIndices.take

    def counted(order: ShuffledIndices, start: int, stop: int) -> Any:
        taken.append(stop - start)
        return take(order, start, stop)

    monkeypatch.setattr(ShuffledIndices, "take", counted)
    order = TokenBudgetBatchSampler(lengths, 100, window=1000)
    assert np.shares_memory(order.lengths, lengths)
    iterator = iter(order)
    iterator.load_state_dict({"epoch": 2, "window": 500, "taken": 3})
    assert len(next(iterator)) == 100
    assert taken == [1000, 10]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1, 2], 0), "max_tokens must be at least 1, got 0"),
        (([1, 2], 9, 0), "window must be at least 1, got 0"),
        (([3, 9, 12, 4], 9), "sample at index 2 has 12 tokens, more than max_tokens=9"),
        (([3, 0], 9), "lengths must be at least 1, got 0 at index 1"),
        (([3, -1], 9), "lengths must be at least 1, got -1 at index 1"),
        (([3.0, 1], 9), "lengths must be integers, got values of type float64"),
        (([True], 9), "lengths must be integers, got values of type bool"),
        ((["a"], 9), "lengths must be integers, got values of type <U1"),
        (([[1]], 9), r"one dimension, got an array of shape \(1, 1\)"),
        (([[1], [1, 2]], 9), "lengths must have one dimension: "),
    ],
)
def test_bad_arguments(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(*given)


@pytest.mark.parametrize("lengths", [[], (), np.empty(0, np.int32), torch.empty(0)])
def test_no_lengths(lengths: Any) -> None:
    order = TokenBudgetBatchSampler(lengths, 5)
    assert (len(order), list(order)) == (0, [])
    assert list(loader_of(order)) == []


@pytest.mark.parametrize("count", [38, 40])
def test_another_datasets_lengths(count: int) -> None:
    """They are refused by the constructor, also where another sampler wraps them."""
    words = f"TokenBudgetBatchSampler has .* 39 samples, but the dataset has {count}:"

    class Wrapped:
        def __init__(self) -> None:
            self.batch_sampler = sampler_of()

        def __iter__(self) -> Any:
            return iter(self.batch_sampler)

    class NoLength(Dataset[int]):
        pass

    for sampler in (sampler_of(), Wrapped()):
        with pytest.raises(ValueError, match=words):
            DataLoader(Numbers(count), batch_sampler=sampler)
        DataLoader(Subset(Numbers(count), [0] * 39), batch_sampler=sampler)
        DataLoader(NoLength(), batch_sampler=sampler)


# -- in a loader ----------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"prefetch_factor": 3},
    "threads": {"num_workers": 2, "workers": "thread"},
    "first of two": {"rank": 0, "world_size": 2},
    "last of three, padded": {"rank": 2, "world_size": 3, "tail": "pad"},
    "last of three, dropped": {"rank": 2, "world_size": 3, "tail": "drop"},
    "second of three, uneven": {"rank": 1, "world_size": 3, "tail": "uneven"},
    "not shuffled": {"batch_sampler": sampler_of(shuffle=False)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*OPTIONS, pytest.param("processes", marks=pytest.mark.fuzz)]
)
def test_resume_at_every_batch(name: str) -> None:
    options = OPTIONS.get(name, {"num_workers": 2, "rank": 1, "world_size": 3})
    assert_resumes_exactly(lambda: loader_of(**options))


@pytest.mark.parametrize("tail", ["wrap", "pad", "drop", "uneven"])
def test_ranks(tail: Any) -> None:
    """They take batches in turns, and have as many, but for uneven ones."""
    whole = list(sampler_of())
    assert len(whole) % 4 == 1
    loaders = [loader_of(rank=rank, world_size=4, tail=tail) for rank in range(4)]
    found = [list(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(one) for one in found]
    masks = [[mask.all() for _, mask in one] for one in found] if tail == "pad" else []
    if tail == "pad":
        found = [[batch for batch, _ in one] for one in found]
    full = len(whole) // 4
    for rank, batches in enumerate(found):
        assert batches[:full] == whole[rank : 4 * full : 4]
    last = [batches[full:] for batches in found]
    if tail in {"wrap", "pad"}:
        assert last == [[whole[-1]], [whole[0]], [whole[1]], [whole[2]]]
    else:
        assert last == [[whole[-1]] if tail == "uneven" else [], [], [], []]
    assert [one[full:] for one in masks] in ([], [[True], [False], [False], [False]])


def test_states() -> None:
    """They hold no indices, and ranks' are one; resuming makes what is needed."""
    states = []
    for rank in range(2):
        torch.manual_seed(3)
        loader = loader_of(rank=rank, world_size=2)
        iterator = iter(loader)
        rest = list(itertools.islice(iterator, 7))
        states.append(later(loader.state_dict()))
        rest = list(iterator)
    assert states[0] == states[1] == later(merge_states(states))
    at = {"epoch": 0, "window": 2, "taken": 5}
    assert states[0]["states"][0] == {"0": {"first": 24, "iterator": at}}
    made = list[int]()

    class Counted(TokenBudgetBatchSampler):
        def batches_of(self, number: int) -> Any:
            made.append(number)
            return super().batches_of(number)

    order = Counted(LENGTHS, 20, 8, seed=3)
    order.described = sampler_of().described  # type: ignore[method-assign]
    resumed = loader_of(order, rank=1, world_size=2)
    resumed.load_state_dict(states[0])
    assert list(resumed) == rest
    assert made == [0, 2, 3, 4]  # the first for a tail that is to be filled


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampler_of(max_tokens=21), "max_tokens=20 .* max_tokens=21"),
        (sampler_of(window=9), "window=8 .* window=9"),
        (sampler_of(seed=5), "seed 3 of the sampler, .* seed 5"),
        (sampler_of(shuffle=False), "seed 3 of the sampler, .* seed None"),
        (TokenBudgetBatchSampler(LENGTHS[::-1], 20, 8, seed=3), "checksum"),
        (TokenBudgetBatchSampler(LENGTHS[1:], 20, 8, seed=3), "for 39 samples, .* 38"),
        ([[1, 2]], "the sampler 'TokenBudgetBatchSampler'"),
    ],
)
@pytest.mark.parametrize("k", [0, 3])
def test_states_of_others(other: Any, message: str, k: int) -> None:
    loader = loader_of()
    list(itertools.islice(loader, k))
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match=message):
        loader_of(other).load_state_dict(state)


# -- padding --------------------------------------------------------------------------


def test_padding_entries() -> None:
    """Each kind with its value and dtype; what is no sequence, as torch does it."""
    samples = [
        {
            "input_ids": np.array([4, 5, 6], np.uint16),
            "labels": torch.tensor([5, 6, -100], dtype=torch.int32),
            "position_ids": [0, 1, 2],
            "loss_mask": [True, False, True],
            "weights": np.array([0.5, 1, 1], np.float32),
            "name": "a",
            "number": 3,
        },
        {
            "input_ids": np.array([7], np.uint16),
            "labels": torch.tensor([8], dtype=torch.int32),
            "position_ids": [0],
            "loss_mask": [True],
            "weights": np.array([0.25], np.float32),
            "name": "b",
            "number": 4,
        },
    ]
    batch = pad_collate(pad=1)(samples)
    assert {name: getattr(one, "dtype", one) for name, one in batch.items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "loss_mask": torch.bool,
        "weights": torch.float32,
        "attention_mask": torch.int64,
        "name": ["a", "b"],
        "number": torch.int64,
    }
    assert [batch[name][1].tolist() for name in list(samples[0])[:5]] == [
        [7, 1, 1],
        [8, -100, -100],
        [0, 0, 0],
        [True, False, False],
        [0.25, 0, 0],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    masked = {"input_ids": [1, 2], "attention_mask": [1, 0]}
    assert pad_collate()([masked])["attention_mask"].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([np.array([2**63], np.uint64)], ValueError, "above int64's limit"),
        (["text"], TypeError, "sample 0 .* 'input_ids' must be .* integers, got str"),
        ([[1], [1.5]], TypeError, "sample 1 .* integers, got float64"),
        ([[1], [True]], TypeError, "sample 1 .* integers, got bool"),
        ([[1], 5], TypeError, "sample 1 .* integers, got int"),
        ([[1], [[1]]], TypeError, r"sample 1 .* numbers, got .* shape \(1, 1\)"),
        ([[1], [2, [3]]], TypeError, "sample 1 .* numbers: setting"),
        ([["a"]], TypeError, "sample 0 .* numbers, got an array .* type <U1"),
        ([{"input_ids": [1], "x": ["a"]}], TypeError, "sample 0 .* 'x' must be a seq"),
        ([{"labels": [1]}], KeyError, r"sample 0 .* no 'input_ids', but \['labels'\]"),
        ([[1], {"input_ids": [1], "labels": [1]}], KeyError, "sample 1 .* 'labels'"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, "has 1 entries, .* has 2"),
    ],
)
def test_samples_that_cannot_be_padded(
    samples: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pad_collate()(samples)


def test_an_empty_sample_changes_no_dtype() -> None:
    mask, weights = np.array([True]), np.ones(1, np.float32)
    whole: Any = {"input_ids": [1], "mask": mask, "w": weights}
    empties: list[Any] = [[], np.zeros(0, int)]
    for empty in empties:
        batch = pad_collate()([whole, dict.fromkeys(whole, empty)])
        assert (batch["mask"].dtype, batch["w"].dtype) == (torch.bool, torch.float32)


class Tokens(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": np.full(LENGTHS[index], index)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_budget_and_padding(num_workers: int) -> None:
    """In workers too, where a batch is padded in memory that is shared."""
    order, most = sampler_of(max_tokens=600, window=39), 600
    loader: Any = DataLoader(
        Tokens(len(LENGTHS)),
        batch_sampler=order,
        collate_fn=pad_collate(pad=-1),
        num_workers=num_workers,
    )
    found = [batch["input_ids"] for batch in loader]
    assert max(one.numel() for one in found) <= most
    assert [one[:, 0].tolist() for one in found] == list(
        sampler_of(max_tokens=600, window=39)
    )
