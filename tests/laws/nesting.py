"""Nested streams, as lists of names; run as a program, it resumes them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from aioloader import DataLoader
from aioloader.datasets import from_async_iterable, from_iterable

# Names of the nested streams, the innermost last.
Nesting = list[str]


async def collected(stream: Any) -> list[Any]:
    return [sample async for sample in stream]


class Awaited:
    """A user's async iterable around a stream."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for sample in self.inner:
            yield sample


class Plain(IterableDataset[Any]):
    """A user's iterable that reads a stream by a loader."""

    def __init__(self, inner: Any) -> None:
        self.loader = DataLoader(inner, None)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Items:
    """A map-style dataset; each item reads the whole stream and picks one sample."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return asyncio.run(collected(self.inner))[index]


class AwaitedItems(Items):
    async def __getitem__(self, index: int) -> Any:
        return (await collected(self.inner))[index]


def generated(inner: Any) -> Any:
    async def samples() -> AsyncIterator[Any]:
        async for sample in inner:
            yield sample

    return from_async_iterable(samples)


def from_loader(inner: Any) -> Any:
    def samples() -> Iterator[Any]:
        yield from DataLoader(inner, None)

    return from_iterable(samples)


def mapped(inner: Any) -> Any:
    async def samples(_number: int) -> list[Any]:
        return await collected(inner)

    return from_iterable(range(2)).flat_map(samples)


def unrolled(inner: Any) -> Any:
    def samples(_number: int) -> Iterator[Any]:
        yield from asyncio.run(collected(inner))

    return from_iterable(range(2)).flat_map(samples)


INNER: dict[str, Any] = {
    "generator": generated,
    "loader": from_loader,
    "iterable": lambda inner: from_iterable(lambda: DataLoader(inner, None)),
    "async iterable": lambda inner: from_async_iterable(lambda: inner),
    "awaited": lambda inner: from_async_iterable(Awaited(inner)),
    "map": mapped,
    "flat_map": unrolled,
    "repeat": lambda inner: inner.repeat(2),
    "shuffle": lambda inner: inner.shuffle(5),
}
OUTER: dict[str, Any] = {
    "stream": lambda inner: inner,
    "awaited": Awaited,
    "plain": Plain,
    "items": Items,
    "awaited items": AwaitedItems,
}


def loader_of(nesting: Nesting, workers: int) -> Any:
    outer, *within = nesting
    stream: Any = from_iterable(range(7)).shuffle(7)
    for name in reversed(within):
        stream = INNER[name](stream)
    return DataLoader(OUTER[outer](stream), 2, num_workers=workers)


def listed(batches: Any, most: int) -> list[Any]:
    return [batch.tolist() for batch in islice(batches, most)]


def main() -> None:
    """Print, for each nesting, the rest of its epoch and the next one."""
    rests = []
    for nesting, workers, state in json.load(sys.stdin):
        loader = loader_of(nesting, workers)
        loader.load_state_dict(state)
        rests.append([listed(loader, 99), listed(loader, 99)])
        loader.close()
    json.dump(rests, sys.stdout)


if __name__ == "__main__":
    main()
