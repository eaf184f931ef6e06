"""How the loader reads a dataset: by coroutines or not, by sample or by batch."""

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
def test_datasets_that_answer_any_attribute_are_read(spec: Any) -> None:
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
def test_torchs_wrappers_of_async_datasets_are_async(wrap: Any) -> None:
    """Their items are awaitables."""
    assert reads_async(wrap(AsyncMap()))
    assert not reads_async(wrap(SyncMap()))


def test_a_users_wrapper_of_an_async_dataset_is_not_async() -> None:
    """It may block or run a loop, whatever dataset it holds."""
    assert not reads_async(Holder())


class Batched(SyncMap):
    def __getitem__(self, index: int) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


class OnlyItem(Batched):
    """Overrides ``__getitem__``: the inherited batch method must not answer for it."""

    def __getitem__(self, index: int) -> Any:
        return -index


class OnlyItems(SyncMap):
    """Defines the batch method in a class below that of ``__getitem__``."""

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
def test_getitems_is_used_unless_getitem_overrides_it(dataset: Any, used: bool) -> None:
    """``__getitems__`` answers only at or below the class of ``__getitem__``."""
    assert (batch_getter(dataset) is not None) is used


def test_streams_need_at_most_five_methods() -> None:
    """A bound that only goes down."""
    assert len(OwnStream.__abstractmethods__) <= 5
