"""Subclasses written for torch's loader may use names that are arguments of ours."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader


def tenfold(sample: Any) -> Any:
    return 10 * sample


def before(cls: Any) -> Any:
    """Return a loader that keeps its own ``transform``, and applies it to batches.

    As torch_geometric's ``NodeLoader`` does.
    """

    class NodeLoader(cls):  # type: ignore[misc]
        def __init__(self, size: int, transform: Any = None, **kwargs: Any) -> None:
            self.transform = transform
            super().__init__(range(size), collate_fn=self.collate, **kwargs)

        def collate(self, samples: list[int]) -> Any:
            batch = torch.tensor(samples)
            return batch if self.transform is None else self.transform(batch)

    return NodeLoader(4, transform=tenfold, batch_size=2)


def after(cls: Any) -> Any:
    """Return a loader that keeps its parts once it is made."""

    class Loader(cls):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(range(4), batch_size=2)
            self.transform = tenfold
            self.device = "cpu"
            self.rank, self.world_size = 1, 2
            self.retry = self.loop = self.fetch = self.rng = "mine"

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield self.transform(batch).to(self.device) + self.rank

    return Loader()


def properties(cls: Any) -> Any:
    """Return a loader with properties, a method, and an attribute of its class."""

    class Loader(cls):  # type: ignore[misc]
        tail = "a tail"

        @property
        def device(self) -> str:
            return self._device

        @property
        def world_size(self) -> int:
            return 2

        def transform(self, batch: Any) -> Any:
            return 10 * batch

        def __init__(self) -> None:
            super().__init__(range(4), batch_size=2)
            self._device = "cpu"

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield self.transform(batch).to(self.device) + self.world_size

    return Loader()


@pytest.mark.parametrize("make", [before, after, properties])
def test_their_names_are_their_own(make: Any) -> None:
    """What the subclass does with them is what torch's loader does."""

    def batches(cls: Any) -> list[Any]:
        loader = make(cls)
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert batches(DataLoader) == batches(TorchLoader)


class Plain(DataLoader[Any]):
    """A subclass that adds nothing."""


class Mapped(DataLoader[Any]):
    """A subclass that passes on an argument of ours, and keeps it."""

    def __init__(self, dataset: Any, transform: Any, **kwargs: Any) -> None:
        super().__init__(dataset, transform=transform, **kwargs)
        self.transform = transform


def test_what_reaches_the_constructor_counts() -> None:
    """It is an attribute too, for frameworks that make a loader again from these."""
    loader = Plain(range(4), batch_size=2, transform=tenfold, concurrency=3)
    assert vars(loader)["concurrency"] == 3
    again = pickle.loads(pickle.dumps(loader))
    for one in (loader, again, Mapped(range(4), tenfold, batch_size=2)):
        assert [batch.tolist() for batch in one] == [[0, 10], [20, 30]]


def test_numbers_that_the_loader_chooses() -> None:
    """Of a subclass, too."""
    loader = Plain(range(4), batch_size=2, prefetch_factor="auto", concurrency="auto")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert int(loader.concurrency) == 32


def test_of_the_class_itself_attributes_count() -> None:
    """From the next iteration on, as torch's."""
    loader: DataLoader[Any] = DataLoader(range(4), batch_size=2)
    loader.transform = tenfold
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]
