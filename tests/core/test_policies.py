"""What cannot be kept is refused; what fails in a batch is found sample by sample."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from aioloader import SKIP, DataLoader, Failure, Skip
from aioloader.errors import FailureBudgetError
from core.kit import BY, WAYS, make, outcomes
from working import AsyncNumbers, Numbers, double, double_async, total_async

# -- on_error and __getitems__ ------------------------------------------------------


class Batches(Numbers):
    """Reads whole batches; some samples are bad, however they are read."""

    def __init__(self, n: int = 12, bad: tuple[int, ...] = (5, 6)) -> None:
        super().__init__(n)
        self.bad = bad
        self.calls: list[Any] = []

    def read(self, index: int) -> int:
        """Return a sample, or fail."""
        if index in self.bad:
            raise OSError(f"no sample {index}")
        return index

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return self.read(index)

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(list(indices))
        return [self.read(index) for index in indices]


class AsyncBatches(Batches):
    """The same, on a loop."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.calls.append(index)
        return self.read(index)

    async def __getitems__(self, indices: list[int]) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitems__(indices)


WITHOUT = [[0, 1, 2, 3], [4, 7], [8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Batches, AsyncBatches])
async def test_skipping_samples_of_whole_batches(kind: Any, way: str, by: str) -> None:
    """The batch that failed is read again, one by one."""
    dataset = kind()
    loader = make(way, dataset, on_error="skip", **BY[by])
    assert await outcomes(way, loader) == WITHOUT
    assert loader.stats().failures == 2
    assert [one.index for one in loader.skipped] == [5, 6]
    if by == "in process":
        assert [0, 1, 2, 3] in dataset.calls
        assert 0 not in dataset.calls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Batches, AsyncBatches])
@pytest.mark.parametrize("transform", [None, double, double_async])
async def test_replacing_samples_of_whole_batches(
    kind: Any, way: str, transform: Any
) -> None:
    """A callable is asked about each, with its place and its error."""
    asked: list[Failure] = []

    def replace(failure: Failure) -> Any:
        asked.append(failure)
        return 100 if failure.index == 5 else SKIP

    loader = make(way, kind(), on_error=replace, transform=transform)
    factor = 1 if transform is None else 2
    # What stands in for a read is transformed as a sample is.
    middle = [4 * factor, 100 * factor, 7 * factor]
    assert (await outcomes(way, loader))[1] == middle
    places = [(one.stage, one.batch, one.position, one.index) for one in asked]
    assert places == [("fetch", 1, 1, 5), ("fetch", 1, 2, 6)]
    assert all(isinstance(one.error, OSError) for one in asked)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Batches, AsyncBatches])
async def test_raising_for_whole_batches(kind: Any, way: str) -> None:
    """By default its error is the batch's, as in torch; nothing is read again."""
    dataset = kind()
    found = await outcomes(way, make(way, dataset))
    assert [found[0], found[2]] == [WITHOUT[0], WITHOUT[2]]
    assert isinstance(found[1], OSError)
    assert not any(isinstance(call, int) for call in dataset.calls)


@pytest.mark.parametrize("kind", [Batches, AsyncBatches])
async def test_the_budget_counts_samples_once(kind: Any) -> None:
    """That of a batch which is read twice, too."""
    loader = make("thread", kind(), on_error=Skip(at_most=2))
    assert await outcomes("thread", loader) == WITHOUT
    loader = make("thread", kind(), on_error=Skip(at_most=1))
    found = await outcomes("thread", loader)
    assert [isinstance(one, FailureBudgetError) for one in found] == [
        False,
        True,
        False,
    ]


class OnlyTogether(Batches):
    """The batch fails; each sample alone can be read."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 5 in indices:
            raise OSError("no such batch")
        return indices

    def read(self, index: int) -> int:
        return index


@pytest.mark.parametrize("way", WAYS)
async def test_a_batch_whose_samples_are_good(way: str) -> None:
    """Nothing is skipped."""
    loader = make(way, OnlyTogether(), on_error="skip")
    assert await outcomes(way, loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert loader.stats().failures == 0


# -- tensors as indices -------------------------------------------------------------


ORDER: Any = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])


class Tensors:
    """A sampler of index tensors, of no dimension."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(ORDER)


class TensorBatches:
    """A batch sampler that gives tensors."""

    def __init__(self, as_numpy: bool = False) -> None:
        self.as_numpy = as_numpy

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        parts = ORDER.split(3)
        return iter([part.numpy() for part in parts] if self.as_numpy else parts)


class TensorList:
    """A batch sampler that gives lists of tensors."""

    def __iter__(self) -> Any:
        return iter([list(part) for part in ORDER.split(3)])


INDICES: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler of tensors": lambda: {"sampler": Tensors(), "batch_size": 3},
    "batch sampler over it": lambda: {
        "batch_sampler": BatchSampler(Tensors(), 3, True)
    },
    "batches that are tensors": lambda: {"batch_sampler": TensorBatches()},
    "batches that are arrays": lambda: {"batch_sampler": TensorBatches(as_numpy=True)},
    "batches of tensors": lambda: {"batch_sampler": TensorList()},
    "batches as samples": lambda: {"sampler": TensorBatches(), "batch_size": None},
    "lists as samples": lambda: {
        "sampler": BatchSampler(RandomSampler(range(10)), 3, False),
        "batch_size": None,
    },
    "negative ones": lambda: {"sampler": [torch.tensor(-1), 2], "batch_size": 2},
    "numpy's numbers": lambda: {"sampler": torch.arange(10).numpy(), "batch_size": 4},
    "an empty batch sampler": lambda: {"batch_sampler": []},
}


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", INDICES)
async def test_tensors_as_indices(case: str, way: str, by: str) -> None:
    """Of tensors in memory: whatever torch's loader takes, with the same batches."""
    data = TensorDataset(torch.arange(10) * 10, torch.rand(10, 2))
    torch.manual_seed(5)
    theirs: Any = [
        [one.tolist() for one in b] for b in TorchLoader(data, **INDICES[case]())
    ]
    torch.manual_seed(5)
    options: Any = {"batch_size": 1, **INDICES[case](), **BY[by]}
    found = await outcomes(way, make(way, data, **options))
    assert [[one.tolist() for one in batch] for batch in found] == theirs


# -- plain data sets that give coroutines -------------------------------------------


class Slotted:
    """Wraps an async dataset where nobody can see it."""

    __slots__ = ("_get", "_n")

    def __init__(self, inner: Any) -> None:
        self._n = len(inner)
        self._get: Any = lambda index: inner[index]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Any:
        return self._get(index)


class SlottedBatches(Slotted):
    """The same, by the batch."""

    __slots__ = ()

    def __getitems__(self, indices: list[int]) -> Any:
        async def read() -> list[Any]:
            return [await self._get(index) for index in indices]

        return read()


class Half(Slotted):
    """Gives a coroutine for some samples only: those that are not cached."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        return index if index % 3 == 0 else self._get(index)


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Slotted, SlottedBatches, Half])
async def test_a_plain_dataset_that_gives_coroutines(
    kind: Any, way: str, by: str
) -> None:
    """It is known by what it returns."""
    loader = make(way, kind(AsyncNumbers(12)), **BY[by])
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert await outcomes(way, loader) == expected
    assert await outcomes(way, loader) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Slotted, SlottedBatches])
async def test_its_samples_are_transformed_and_skipped(kind: Any, way: str) -> None:
    """What follows a read follows this one."""

    class Bad(AsyncNumbers):
        async def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("no sample")
            return await super().__getitem__(index)

    dataset = kind(Bad(12))
    loader: DataLoader[Any] = make(way, dataset, transform=double, on_error="skip")
    expected = [[0, 2, 4, 6], [8, 12, 14], [16, 18, 20, 22]]
    assert await outcomes(way, loader) == expected
    loader = make(way, kind(AsyncNumbers(12)), collate_fn=total_async)
    assert await outcomes(way, loader) == [6, 22, 38]
