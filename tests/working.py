"""Datasets and functions that workers can import; some report where they ran."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import get_worker_info as torch_worker_info

from aioloader import DataLoader, get_worker_info
from samples import AsyncMap, Pair, sample


def share(n: int) -> range:
    """Return this worker's part of ``range(n)``, or all of it outside workers."""
    info = torch_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class Sharded(IterableDataset[Pair]):
    """Each worker reads every ``num_workers``-th sample."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Pair]:
        return map(sample, share(self.n))


class Uneven(IterableDataset[Pair]):
    """Each worker has its own number of samples."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Pair]:
        info = torch_worker_info()
        assert info is not None
        first = 100 * info.id
        return map(sample, range(first, first + self.lengths[info.id]))


class AsyncSharded:
    """Like ``Sharded``, for a loop."""

    def __init__(self, n: int) -> None:
        self.n = n

    async def __aiter__(self) -> AsyncIterator[Pair]:
        for index in share(self.n):
            await asyncio.sleep(0)
            yield sample(index)


class Drawing(Dataset[Any]):
    """Draws from all three global generators for each sample."""

    def __init__(self, n: int = 12) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, draw()


class Stream(IterableDataset[Any]):
    """Draws for each sample; each worker reads its share."""

    def __iter__(self) -> Iterator[Any]:
        return ((index, draw()) for index in share(12))


class Numbers(Drawing):
    """Samples are their indices."""

    def __getitem__(self, index: int) -> Any:
        return index


class AsyncNumbers(AsyncMap):
    """Samples are their indices, after a suspension."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return index


class AsyncDrawing(AsyncMap):
    """Draws from the worker's own generators, interleaved with other samples."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        first = draw_own()
        for _ in range(index % 3):
            await asyncio.sleep(0)
        return index, first, draw_own()


def draw(_sample: Any = None) -> torch.Tensor:
    """Return a number of each global generator."""
    numbers = [random.random(), np.random.random(), np.random.normal()]
    return torch.cat([torch.rand(1).double(), torch.tensor(numbers)])


def draw_own(_sample: Any = None) -> torch.Tensor:
    """Return a number of each of the worker's own generators."""
    info = get_worker_info()
    assert info is not None
    numbers = [info.rng.random.random(), info.rng.numpy.random()]
    mine = torch.rand(1, generator=info.rng.torch).double()
    return torch.cat([mine, torch.tensor(numbers).double()])


def pid(_sample: Any = None) -> int:
    return os.getpid()


def double(value: Any) -> Any:
    return 2 * value


async def double_async(value: Any) -> Any:
    """Return twice the value, after a suspension."""
    await asyncio.sleep(0)
    return 2 * value


def total(samples: list[Any]) -> Any:
    return sum(samples)


async def total_async(samples: list[Any]) -> Any:
    """Return the sum, after a suspension."""
    await asyncio.sleep(0)
    return sum(samples)


def first(samples: list[Any]) -> Any:
    """Deliver the first sample as it is."""
    return samples[0]


def asked(dataset: Any, question: Callable[[Any], Any], **options: Any) -> Any:
    """Return ``question(dataset)``, called in a worker."""
    loader: Any = DataLoader(
        Asked(dataset, question), num_workers=1, collate_fn=first, **options
    )
    (answer,) = loader
    return answer


class Asked:
    """A dataset whose only sample is ``question(dataset)``."""

    def __init__(self, dataset: Any, question: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.question = question

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.question(self.dataset)
