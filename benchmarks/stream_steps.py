"""Steps of streams: what do a mix and ``async for`` cost, and what blocks a loop?

Lines of text and numbers, in pulls of 64, by CPU time per sample and the ratio of a mix
of two streams to one; single samples by ``async for``; and the longest time for which a
loop is blocked by the start of a shuffled stream of many shards, or of a window of as
many samples. Ratios are taken in one process, in turn, and their median is shown.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioloader.datasets import (
    ShardFormat,
    ShardReader,
    TextDataset,
    from_async_iterable,
    from_iterable,
)
from aioloader.datasets.sharded import ShardedStream
from harness import Metric, Question, main_in_one_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from harness import Rounds

SAMPLES, SHARDS, BATCH, MANY = 80_000, 8, 64, 1_000_000


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


class OneSample(ShardReader):
    """A shard of one sample, and its reader."""

    def __init__(self) -> None:
        self.left = ["sample"]

    async def pull(self, _limit: int) -> list[str]:
        """Return it, once."""
        found, self.left = self.left, []
        return found

    def position(self) -> dict[str, Any]:
        """Return nothing: there is no resuming."""
        return {}

    def is_draining(self) -> bool:
        """Return True: there is no more."""
        return True


class ManyShards(ShardFormat):
    """A format of many shards, none of which is read."""

    async def shards(self, _stack: Any, _known: Any = None, /) -> range:
        """Return their numbers."""
        return range(MANY)

    def summary(self, shards: Any) -> dict[str, Any]:
        """Return how many there are."""
        return {"count": len(shards)}

    def open(self, _shard: Any, _position: Any, _budget: int) -> Any:
        """Return a reader."""
        return OneSample()


async def held_up(stream: Any) -> tuple[float, float]:
    """Return the longest time, in ms, that a loop was blocked before the first batch.

    And the time of that batch. Freeing a million samples is not counted.
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


async def steps(folder: Path, rounds: int) -> Rounds:
    """Measure each kind of stream."""

    def lines(**options: Any) -> Any:
        return TextDataset(str(folder / "*.txt"), **options)

    kinds: dict[str, Callable[[], Any]] = {
        "numbers": lambda: from_iterable(range(SAMPLES)),
        "lines": lines,
        "lines, interleave=8": lambda: lines(interleave=8),
    }
    found: Rounds = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, make in kinds.items():
            alone, mixed = await pulled(make()), await pulled(make().mix(make()))
            figures = {"alone": alone, "mixed": mixed, "ratio": mixed / alone}
            found[name].append(figures | {"single": await single(make())})
    return found


async def waiting() -> AsyncIterator[int]:
    """Yield a sample after a while: shows the delays of the machine itself."""
    await asyncio.sleep(0.5)
    yield 0


async def blocking(rounds: int) -> Rounds:
    """Measure for how long a loop is blocked."""
    jobs: dict[str, Callable[[], Any]] = {
        "nothing, half a second": lambda: from_async_iterable(waiting),
        f"shuffle {MANY:,} shards": lambda: ShardedStream(ManyShards(), shuffle=True),
        f".shuffle({MANY:,})": lambda: from_iterable(range(MANY)).shuffle(MANY),
    }
    found: Rounds = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, make in jobs.items():
            worst, took = await held_up(make())
            found[name].append({"held_ms": worst, "took_ms": took})
    return found


def measure_steps(rounds: int) -> Rounds:
    """Write lines of text, and measure."""
    with tempfile.TemporaryDirectory() as name:
        for shard in range(SHARDS):
            text = "".join(f"line {k} of {shard}\n" for k in range(SAMPLES // SHARDS))
            (Path(name) / f"{shard}.txt").write_text(text)
        return asyncio.run(steps(Path(name), rounds))


def measure_blocking(rounds: int) -> Rounds:
    return asyncio.run(blocking(min(rounds, 3)))


QUESTIONS: dict[Question, Callable[[int], Rounds]] = {
    Question(
        name="stream_steps",
        text="What do a mix of two streams and single samples cost? CPU per sample",
        contenders={},
        metrics=[
            Metric("alone", "us alone", ",.2f", higher=False),
            Metric("mixed", "us mixed", ",.2f", higher=False),
            Metric("ratio", "mixed to alone", ",.2f", higher=False),
            Metric("single", "us by async for", ",.2f", higher=False),
        ],
    ): measure_steps,
    Question(
        name="stream_blocking",
        text="For how long does the beginning of a large shuffle hold up its loop?",
        contenders={},
        metrics=[
            Metric("held_ms", "held up ms", ",.1f", higher=False),
            Metric("took_ms", "first batch ms", ",.0f", higher=False),
        ],
    ): measure_blocking,
}

if __name__ == "__main__":
    main_in_one_process(QUESTIONS)
