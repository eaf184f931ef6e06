"""Kinds and colours."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.utils.data import ConcatDataset, StackDataset, Subset

from aioloader import DataLoader
from aioloader.protocols import OwnStream, batch_getter, reads_async
from samples import AsyncBatchMap, AsyncMap, SyncMap


class AnyName(dict[int, int]):
    """Answers any attribute, with None if it has no such key."""

    __getattr__ = dict.get


@pytest.mark.parametrize("spec", [None, SyncMap])
def test_objects_that_answer_any_name_are_read(spec: Any) -> None:
    """By index, as torch reads them."""
    mock = MagicMock(spec=spec)
    mock.__len__.return_value = 4
    mock.__getitem__.side_effect = range(4, 8).__getitem__
    for dataset in (AnyName(enumerate(range(4, 8))), mock):
        loader: Any = DataLoader(dataset, 2)
        assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]


class Holder(SyncMap):
    """A user's wrapper, with its own name for the inner dataset."""

    inner = AsyncMap()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: Subset(inner, [1, 0]),
        lambda inner: ConcatDataset([SyncMap(), inner]),
        lambda inner: StackDataset(inner, inner),
        lambda inner: StackDataset(a=inner),
        lambda inner: Subset(ConcatDataset([inner, inner]), [0]),
    ],
    ids=["subset", "concat", "stack", "stack by name", "nested"],
)
def test_wrappers_take_the_colour_of_what_they_hold(wrap: Any) -> None:
    """Around async datasets torch's return awaitables."""
    assert reads_async(wrap(AsyncMap()))
    assert not reads_async(wrap(SyncMap()))


def test_a_users_wrapper_is_plain_code() -> None:
    """It may block, or run a loop: what it holds says nothing of that."""
    assert not reads_async(Holder())


class Batched(SyncMap):
    """Defines both methods."""

    def __getitem__(self, index: int) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


class OnlyItem(Batched):
    """Overrides one of them: the other must not answer for it (R42)."""

    def __getitem__(self, index: int) -> Any:
        return -index


class OnlyItems(SyncMap):
    """Defines the batch method below the class of the other."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


@pytest.mark.parametrize(
    ("dataset", "used"),
    [
        (Batched(), True),
        (OnlyItem(), False),
        (OnlyItems(), True),
        (SyncMap(), False),
        (AsyncBatchMap(), True),
        (Subset(Batched(), [0]), True),
        (Subset(OnlyItem(), [0]), False),
        (Subset(AsyncBatchMap(), [0]), True),
        (Subset(AsyncMap(), [0]), False),
        (StackDataset(SyncMap()), True),
        (StackDataset(AsyncBatchMap()), False),
    ],
)
def test_batch_method_counts_where_it_may(dataset: Any, used: bool) -> None:
    """``__getitems__`` answers only at or below the class of ``__getitem__``."""
    assert (batch_getter(dataset) is not None) is used


def test_a_loader_asks_a_stream_for_little() -> None:
    """A bound that only goes down."""
    assert len(OwnStream.__abstractmethods__) <= 5
