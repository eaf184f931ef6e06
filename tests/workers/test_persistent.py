"""Persistent workers begin an epoch when it begins, as torch's do."""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from aioloader import DataLoader, ShuffledIndices
from beside import beside
from samples import AsyncMap, SyncMap, collect, labels
from working import Drawing

W: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}


class Told(SyncMap):
    """A dataset that logs the requested indices in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> Any:
        with self.path.open("ab", buffering=0) as file:
            file.write(bytes([index]))
        return super().__getitem__(index)


def test_no_sample_is_read_before_its_epoch_begins(tmp_path: Path) -> None:
    """``__getitem__`` is called once per sample."""
    told = Told(tmp_path / "asked")
    with DataLoader(told, **W) as loader:
        batches = labels(list(loader))
    assert batches == [[*range(first, first + 4)] for first in range(0, 20, 4)]
    assert sorted(told.path.read_bytes()) == [*range(20)]


RUNNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "here": (SyncMap, {}),
    "ahead": (SyncMap, {"prefetch_factor": 2}),
    "threads": (SyncMap, {"num_workers": 2, "workers": "thread"}),
    "processes": (SyncMap, {"num_workers": 2}),
    "persistent": (SyncMap, {"num_workers": 2, "persistent_workers": True}),
    "loop": (AsyncMap, {}),
    "caller's loop": (AsyncMap, {"loop": "caller"}),
    "loops of workers": (AsyncMap, {"num_workers": 1, "persistent_workers": True}),
}


@pytest.mark.parametrize("name", RUNNERS)
async def test_inference_mode_ends_with_its_block(name: str) -> None:
    """Later batches, of this epoch and others, are normal tensors."""
    kind, options = RUNNERS[name]
    async with DataLoader(kind(), 2, **options) as loader:
        with torch.inference_mode():
            assert len(await collect(loader)) == 10
        later = await collect(loader)
        iterator = aiter(loader)
        with torch.inference_mode():
            await anext(iterator)
            await anext(iterator)
        later += [batch async for batch in iterator]
        if "caller" not in name:
            later += await beside(partial(inferred_in_part, loader))
    assert not any(rows.is_inference() for rows, _ in later)


def inferred_in_part(loader: Any) -> list[Any]:
    """Return the batches of a plain loop after a first step in inference mode."""
    iterator = iter(loader)
    with torch.inference_mode():
        next(iterator)
    return list(iterator)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("has_generator", [False, True])
def test_orders_and_draws_are_those_of_torch(draws: bool, has_generator: bool) -> None:
    """Also if the user draws in between."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(5) if has_generator else None
        loader = cls(SyncMap(), shuffle=True, generator=generator, **W)
        outcomes: list[Any] = []
        for _ in range(4):
            if draws:
                torch.rand(3)
            outcomes.append(labels(list(loader)))
        outcomes.append(torch.rand(2).tolist())
        if cls is DataLoader:
            loader.close()
        return outcomes

    assert epochs(DataLoader) == epochs(TorchLoader)


def test_set_epoch_chooses_the_next_order() -> None:
    """The order is drawn when the epoch begins."""
    order = ShuffledIndices(20, seed=3)
    with DataLoader(SyncMap(), sampler=order, **W) as loader:
        before = [labels(list(loader)) for _ in range(3)]
        loader.set_epoch(1)
        assert labels(list(loader)) == before[1]
        assert labels(list(loader)) == before[2]


class Scaled(SyncMap):
    """Samples times a number that the main process sets, as in multi-scale training."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def __getitem__(self, index: int) -> Any:
        with self.scale.get_lock():
            return index * self.scale.value


class ByEpoch(IterableDataset[int]):
    """Samples that depend on the epoch's number, and on the number of iterations."""

    def __init__(self, epoch: Any) -> None:
        self.epoch = epoch
        self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        return iter([self.epoch.value, self.iterations])


# The heap that holds it outlives a test.
VALUE = multiprocessing.Value("i", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scaled, ByEpoch])
def test_shared_memory_set_between_epochs_counts(kind: Any) -> None:
    """From the first batch of the next epoch on."""

    def epochs(cls: Any) -> list[Any]:
        loader = cls(kind(VALUE), **W)
        outcomes = []
        for epoch in range(3):
            VALUE.value = epoch
            outcomes.append([batch.tolist() for batch in loader])
        loader._iterator = None  # ends the workers
        return outcomes

    assert epochs(DataLoader) == epochs(TorchLoader)


def set_batch_size(loader: Any) -> None:
    loader.batch_sampler.batch_size = 4


def set_drop_last(loader: Any) -> None:
    loader.batch_sampler.drop_last = True


def set_sampler(loader: Any) -> None:
    loader.batch_sampler.sampler = [7, 6, 5, 4]


def set_generator(loader: Any) -> None:
    loader.sampler.generator = torch.Generator().manual_seed(5)


def set_replacement(loader: Any) -> None:
    loader.sampler.replacement = True


def shrink(loader: Any) -> None:
    loader.dataset.pop()


NO_SHUFFLE = [set_batch_size, set_drop_last, set_sampler]


@pytest.mark.parametrize(
    "change", [*NO_SHUFFLE, set_generator, set_replacement, shrink]
)
def test_an_order_can_change_between_epochs(change: Callable[[Any], None]) -> None:
    """The next epoch has the new one."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(0)
        kept: Any = {"num_workers": 1, "persistent_workers": True}
        loader = cls([*range(8)], 3, change not in NO_SHUFFLE, **kept)
        batches = list(loader)
        change(loader)
        batches += [*loader, *loader, torch.rand(1)]
        loader._iterator = None  # ends the workers
        return [batch.tolist() for batch in batches]

    assert epochs(DataLoader) == epochs(TorchLoader)


def test_alternating_loaders_draw_as_torchs() -> None:
    """With ``rng="worker"``, from the workers' generators."""

    def drawn(make: Any) -> list[Any]:
        torch.manual_seed(0)
        loaders = [make(Drawing(12), **W) for _ in range(2)]
        return [[list(loader) for loader in loaders] for _ in range(3)]

    ours = drawn(partial(DataLoader, rng="worker"))
    torch.testing.assert_close(ours, drawn(TorchLoader), rtol=0, atol=0)
