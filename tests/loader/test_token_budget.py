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

LENGTHS = [1 + (7 * index) % 13 for index in range(39)]


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
    """Return the batches of a window, as documented."""
    batches: list[list[int]] = []
    for index in sorted(window, key=lambda i: lengths[i]):
        wider = [*batches[-1], index] if batches else []
        if wider and len(wider) * max(lengths[i] for i in wider) <= budget:
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
def test_batches_of_any_lengths_are_as_documented(
    lengths: list[int], budget: int, window: int, seed: int, epoch: int, shuffle: bool
) -> None:
    """``len`` is the number of batches."""
    order = TokenBudgetBatchSampler(lengths, budget, window, shuffle, seed)
    order.set_epoch(epoch)
    batches = list(order)
    assert len(order) == len(batches)
    assert list(order) == batches
    samples = list(itertools.chain(*batches))
    assert sorted(samples) == [*range(len(lengths))]
    position = 0
    for start in range(0, len(lengths), window):
        mine = samples[start : start + window]
        if not shuffle:
            assert sorted(mine) == [*range(start, start + len(mine))]
        expected = cut(lengths, sorted(mine), budget)
        got = batches[position : position + len(expected)]
        sizes = [[lengths[index] for index in batch] for batch in got]
        wanted = [[lengths[index] for index in batch] for batch in expected]
        assert (sorted(sizes) if shuffle else sizes) == (
            sorted(wanted) if shuffle else wanted
        )
        assert shuffle or got == expected
        position += len(expected)


def test_the_order_follows_from_seed_and_epoch() -> None:
    """Windows are cut from a shuffled order."""
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
def test_lengths_may_be_any_sequence(kind: str) -> None:
    order = TokenBudgetBatchSampler(KINDS[kind](LENGTHS), 20, 8, seed=3)
    assert list(order) == list(sampler_of())
    assert order.described() == sampler_of().described()
    assert {type(index) for batch in order for index in batch} == {int}


def test_an_array_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator computes only the windows that it needs."""
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
def test_wrong_arguments_raise_value_error(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(*given)


@pytest.mark.parametrize("lengths", [[], (), np.empty(0, np.int32), torch.empty(0)])
def test_no_lengths_give_no_batches(lengths: Any) -> None:
    order = TokenBudgetBatchSampler(lengths, 5)
    assert (len(order), list(order)) == (0, [])
    assert list(loader_of(order)) == []


@pytest.mark.parametrize("count", [38, 40])
def test_lengths_of_another_dataset_are_refused(count: int) -> None:
    """By the constructor, also if another sampler wraps the budget."""
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
def test_a_token_budget_resumes_after_any_batch(name: str) -> None:
    options = OPTIONS.get(name, {"num_workers": 2, "rank": 1, "world_size": 3})
    assert_resumes_exactly(lambda: loader_of(**options))


@pytest.mark.parametrize("tail", ["wrap", "pad", "drop", "uneven"])
def test_ranks_take_batches_in_turn(tail: Any) -> None:
    """Ranks have equally many batches, except with ``tail="uneven"``."""
    whole = list(sampler_of())
    assert len(whole) % 4 == 1
    loaders = [loader_of(rank=rank, world_size=4, tail=tail) for rank in range(4)]
    shares = [list(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(share) for share in shares]
    masks = [[mask.all() for _, mask in s] for s in shares] if tail == "pad" else []
    if tail == "pad":
        shares = [[batch for batch, _ in share] for share in shares]
    full = len(whole) // 4
    for rank, batches in enumerate(shares):
        assert batches[:full] == whole[rank : 4 * full : 4]
    last = [batches[full:] for batches in shares]
    if tail in {"wrap", "pad"}:
        assert last == [[whole[-1]], [whole[0]], [whole[1]], [whole[2]]]
    else:
        assert last == [[whole[-1]] if tail == "uneven" else [], [], [], []]
    assert [m[full:] for m in masks] in ([], [[True], [False], [False], [False]])


def test_a_state_of_a_budget_holds_no_indices() -> None:
    """Ranks save the same state; resuming computes only the windows that it needs."""
    states = []
    for rank in range(2):
        torch.manual_seed(3)
        loader = loader_of(rank=rank, world_size=2)
        iterator = iter(loader)
        rest = list(itertools.islice(iterator, 7))
        states.append(later(loader.state_dict()))
        rest = list(iterator)
    assert states[0] == states[1] == later(merge_states(states))
    position = {"epoch": 0, "window": 2, "taken": 5}
    assert states[0]["states"][0] == {"0": {"first": 24, "iterator": position}}
    windows = list[int]()

    class Counted(TokenBudgetBatchSampler):
        def batches_of(self, number: int) -> Any:
            windows.append(number)
            return super().batches_of(number)

    order = Counted(LENGTHS, 20, 8, seed=3)
    order.described = sampler_of().described  # type: ignore[method-assign]
    resumed = loader_of(order, rank=1, world_size=2)
    resumed.load_state_dict(states[0])
    assert list(resumed) == rest
    assert windows == [0, 2, 3, 4]  # the first one fills the last batch


@pytest.mark.parametrize(
    ("sampler", "message"),
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
def test_states_of_other_orders_are_refused(sampler: Any, message: str, k: int) -> None:
    loader = loader_of()
    list(itertools.islice(loader, k))
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match=message):
        loader_of(sampler).load_state_dict(state)


# -- padding --------------------------------------------------------------------------


def test_pad_collate_pads_each_kind_of_entry() -> None:
    """Each with its value and dtype; other entries are collated as in torch."""
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
    assert {name: getattr(entry, "dtype", entry) for name, entry in batch.items()} == {
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
def test_samples_that_cannot_be_padded_raise(
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
def test_padded_batches_keep_the_budget(num_workers: int) -> None:
    """In workers, too, where batches are padded in shared memory."""
    order, most = sampler_of(max_tokens=600, window=39), 600
    loader: Any = DataLoader(
        Tokens(len(LENGTHS)),
        batch_sampler=order,
        collate_fn=pad_collate(pad=-1),
        num_workers=num_workers,
    )
    batches = [batch["input_ids"] for batch in loader]
    assert max(batch.numel() for batch in batches) <= most
    assert [batch[:, 0].tolist() for batch in batches] == list(
        sampler_of(max_tokens=600, window=39)
    )
