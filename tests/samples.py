"""Small datasets of every kind, for all tests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

Pair = tuple[torch.Tensor, int]


def sample(index: int) -> Pair:
    """Return sample ``index`` of every dataset here."""
    return torch.full((3,), float(index)), index


class SyncMap(Dataset[Pair]):
    """Plain ``__getitem__``; records the indices that were read."""

    def __init__(self, n: int = 20) -> None:
        self.n = n
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Pair:
        self.asked.append(index)
        return sample(index)


class AsyncMap(Dataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.n = n
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    async def __getitem__(self, index: int) -> Pair:
        self.asked.append(index)
        await asyncio.sleep(0)
        return sample(index)


class AsyncBatchMap(AsyncMap):
    """Coroutine ``__getitems__`` on the class of its ``__getitem__``."""

    async def __getitem__(self, index: int) -> Pair:
        raise AssertionError("the batch method should have been used")

    async def __getitems__(self, indices: list[int]) -> list[Pair]:
        await asyncio.sleep(0)
        return [sample(index) for index in indices]


class SyncStream(IterableDataset[Pair]):
    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Pair]:
        return map(sample, range(self.n))


class AsyncStream:
    """``__aiter__``, an async generator."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    async def __aiter__(self) -> AsyncIterator[Pair]:
        for index in range(self.n):
            await asyncio.sleep(0)
            yield sample(index)


def tensors(n: int = 20) -> TensorDataset:
    """Return the common samples as tensors."""
    index = torch.arange(n)
    return TensorDataset(index[:, None].float().expand(-1, 3).contiguous(), index)


def labels(batches: list[Any]) -> list[list[int]]:
    """Check the rows in ``batches``, and return the indices."""
    indices = []
    for rows, index in batches:
        assert torch.equal(rows, index[:, None].float().expand(-1, 3))
        indices.append(index.tolist())
    return indices


async def collect(loader: Any) -> list[Any]:
    return [batch async for batch in loader]
