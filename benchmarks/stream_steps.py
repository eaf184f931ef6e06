"""Steps of streams: what do a mix and ``async for`` cost, and what holds up a loop?

Lines of text and numbers, in pulls of 64, by CPU time per sample and the ratio of a mix
of two streams to one; single samples by ``async for``; and the longest time for which a
loop is held up by the beginning of a shuffled stream of many shards, or of a window of
as many samples. Ratios are taken in one process, in turn, and their median is shown.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.datasets.sharded import ShardedStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SAMPLES, SHARDS, BATCH, MANY, ROUNDS = 80_000, 8, 64, 1_000_000, 7


async def pulled(stream: Any) -> float:
    """Return the CPU time per sample in microseconds, in pulls of a batch."""
    iterator, count, began = aiter(stream), 0, time.process_time()
    while block := await iterator.pull(BATCH):
        count += len(block)
    took = time.process_time() - began
    await iterator.aclose()
    return took / count * 1e6


async def single(stream: Any) -> float:
    """Return the time per sample in microseconds, by ``async for``."""
    count, began = 0, time.process_time()
    async for _ in stream:
        count += 1
    return (time.process_time() - began) / count * 1e6


class OneSample:
    """A shard of one sample, and its reader."""

    def __init__(self) -> None:
        self.left = ["sample"]

    async def pull(self, _limit: int) -> list[str]:
        """Return it, once."""
        found, self.left = self.left, []
        return found

    def begin(self) -> None:
        """Do nothing."""

    def position(self) -> dict[str, Any]:
        """Return nothing: nothing is resumed."""
        return {}

    def is_draining(self) -> bool:
        """Say yes: there is no more."""
        return True

    async def aclose(self) -> None:
        """Do nothing."""


class ManyShards:
    """A format of many shards, of which nothing is read."""

    async def shards(self, _stack: Any, _known: Any = None, /) -> range:
        """Return their numbers."""
        return range(MANY)

    def summary(self, shards: Any) -> dict[str, Any]:
        """Return how many there are."""
        return {"count": len(shards)}

    def describe(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def open(self, _shard: Any, _position: Any, _budget: int) -> Any:
        """Return a reader."""
        return OneSample()


async def held_up(stream: Any) -> tuple[float, float]:
    """Return for how many ms a loop stood still at most until the first batch came.

    And how many that took. To free a million samples is not counted.
    """
    worst, is_over, pause = 0.0, False, 0.0005

    async def tick() -> None:
        nonlocal worst
        while not is_over:
            began = time.perf_counter()
            await asyncio.sleep(pause)
            worst = max(worst, time.perf_counter() - began - pause)

    ticking, began = asyncio.create_task(tick()), time.perf_counter()
    iterator = aiter(stream)
    await iterator.pull(BATCH)
    took, is_over = time.perf_counter() - began, True
    await ticking
    await iterator.aclose()
    return worst * 1e3, took * 1e3


async def steps(folder: Path) -> None:
    """Print a row for each kind of stream."""

    def lines(**options: Any) -> Any:
        return TextDataset(str(folder / "*.txt"), **options)

    kinds: dict[str, Callable[[], Any]] = {
        "numbers": lambda: from_iterable(range(SAMPLES)),
        "lines": lines,
        "lines, interleave=8": lambda: lines(interleave=8),
    }
    print(
        f"{'stream':24} {'us alone':>9} {'us mixed':>9} {'ratio':>6} {'async for':>10}"
    )
    for name, make in kinds.items():
        rounds = []
        for _ in range(ROUNDS):
            alone, mixed = await pulled(make()), await pulled(make().mix(make()))
            rounds.append((alone, mixed, mixed / alone, await single(make())))
        shown = [statistics.median(column) for column in zip(*rounds, strict=True)]
        alone, mixed, ratio, by_one = shown
        print(f"{name:24} {alone:9.2f} {mixed:9.2f} {ratio:6.2f} {by_one:10.2f}")


async def waiting() -> AsyncIterator[int]:
    """Yield a sample after a while: what the machine itself holds up."""
    await asyncio.sleep(0.5)
    yield 0


async def blocking() -> None:
    """Print for how long a loop is held up."""
    jobs: dict[str, Callable[[], Any]] = {
        "nothing, half a second": lambda: from_async_iterable(waiting),
        f"shuffle {MANY:,} shards": lambda: ShardedStream(ManyShards(), shuffle=True),
        f".shuffle({MANY:,})": lambda: from_iterable(range(MANY)).shuffle(MANY),
    }
    print(f"\n{'beginning':24} {'held up ms':>11} {'took ms':>9}")
    for name, make in jobs.items():
        rounds = [await held_up(make()) for _ in range(3)]
        worst, took = map(statistics.median, zip(*rounds, strict=True))
        print(f"{name:24} {worst:11.1f} {took:9.0f}")


def measure() -> None:
    """Print all rows."""
    with tempfile.TemporaryDirectory() as name:
        for shard in range(SHARDS):
            text = "".join(f"line {k} of {shard}\n" for k in range(SAMPLES // SHARDS))
            (Path(name) / f"{shard}.txt").write_text(text)
        asyncio.run(steps(Path(name)))
    asyncio.run(blocking())


if __name__ == "__main__":
    measure()
