"""Several ranks that read in one process, and streams for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from aioloader import DataLoader
from aioloader._base.blocks import FailedSample
from aioloader._order.stream_states import merged, opened, sealed
from aioloader.datasets import TextDataset, from_iterable
from datasets.shards import name_of, parquet, write_lines

# The lengths of thirteen shards, two of which are empty.
LENGTHS = (7, 3, 11, 0, 5, 9, 2, 8, 1, 12, 0, 6, 9)


def merge_states(states: list[Any]) -> Any:
    """Return one state for all ranks of a stream that is read without a loader."""
    return sealed(merged([*map(opened, states)]))


class Ranks:
    """The iterations of all ranks.

    Args:
        stream: The stream that they share.
        ranks: How many there are.
        state: The state of all ranks to resume from.
    """

    def __init__(self, stream: Any, ranks: int, state: Any = None) -> None:
        self.iterators: list[Any] = []
        for rank in range(ranks):
            part = stream.shard(rank, ranks)
            part.set_epoch(2)
            if state is not None:
                part.load_state_dict(json.loads(json.dumps(state)))
            self.iterators.append(aiter(part))
        self.are_over = [False] * ranks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for iterator in self.iterators:
            await iterator.aclose()

    async def batch(self, size: int) -> list[list[str]]:
        assert size % len(self.iterators) == 0
        limit = size // len(self.iterators)
        return [
            [] if self.are_over[rank] else await self._read(rank, limit)
            for rank in range(len(self.iterators))
        ]

    async def batches(self, size: int, count: int = 10**9) -> list[list[str]]:
        """Return the next global batches, sorted; without empty ones at the end."""
        parts: list[list[str]] = []
        while len(parts) < count and not all(self.are_over):
            batch = await self.batch(size)
            parts.append(sorted(name for part in batch for name in part))
        return parts if not all(self.are_over) else trimmed(parts)

    async def _read(self, rank: int, limit: int) -> list[str]:
        iterator, samples = self.iterators[rank], list[Any]()
        while len(samples) < limit:
            try:
                block = await iterator.pull(limit - len(samples))
            except StopAsyncIteration:
                assert not iterator.fills
                self.are_over[rank] = True
                break
            samples += block
            if not iterator.fills:
                break
            self.are_over[rank] = not len(block)
            if not len(block):
                break
        return [
            str(x.error) if type(x) is FailedSample else name_of(x) for x in samples
        ]

    def states(self) -> list[Any]:
        states = [json.dumps(iterator.state_dict()) for iterator in self.iterators]
        return [json.loads(state) for state in states]

    def state(self) -> Any:
        return json.loads(json.dumps(merge_states(self.states())))


def of_ranks(stream: Any, ranks: int, *size: Any, **options: Any) -> list[Any]:
    """Return the loaders of all ranks."""
    options = {"world_size": ranks, **options}
    return [DataLoader(stream, *size, rank=rank, **options) for rank in range(ranks)]


def trimmed(batches: list[list[str]]) -> list[list[str]]:
    while batches and not batches[-1]:
        batches = batches[:-1]
    return batches


def lines(folder: Path, **options: Any) -> Any:
    write_lines(folder, LENGTHS)
    return TextDataset("*.txt", store=folder, **options)


def numbers(count: int = 61) -> Any:
    return from_iterable(range(count))


async def squared(number: int) -> int:
    return number**2


def refused(number: int) -> int:
    if number % 9 == 4:
        raise ValueError(f"no {number}")
    return number


def is_kept(number: int) -> bool:
    """Filter; of many readers, some have no sample left."""
    return number % 3 != 0 and number < 70


STREAMS: dict[str, Callable[[Path], Any]] = {
    "lines": lambda folder: lines(folder, shuffle=True, interleave=3).shuffle(4),
    "lanes": lambda folder: lines(folder, shuffle=True, interleave=13),
    "columns": lambda folder: parquet(folder, shuffle=True, interleave=2),
    "columns, shuffled": lambda folder: parquet(folder, shuffle=True).shuffle(3),
    "numbers": lambda _: numbers(),
    "numbers, shuffled": lambda _: numbers().shuffle(3),
    "async map": lambda _: numbers().map(squared, concurrency=3),
    "errors": lambda _: numbers().map(refused),
    "filter": lambda _: numbers(90).filter(is_kept).shuffle(2),
    "take": lambda folder: lines(folder).skip(1).take(5),
    "mix": lambda folder: lines(folder).mix(numbers(40), weights=[2, 1]).shuffle(2),
}
