"""Heartbeat: does ``async for`` give its loop to other tasks between blocking steps?

A consumer's step blocks its loop for 4 ms for each batch; all batches are ready, or
nearly so. Another task sleeps for 1 ms at a time: the figure is how late it wakes. The
same step in a bare loop, which sleeps for 0 s after each, is measured right before, in
the same process; ``above`` is the difference of the two 99th percentiles.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import torch
import uvloop
from torch.utils.data import Dataset, TensorDataset

from harness import Contender, Figures, Limit, Metric, Options, Question, main

STEP = 0.004
BEAT = 0.001
BATCHES = 400
BATCH = 16
Make = Callable[[int], AsyncIterable[object]]


class Plain(Dataset[torch.Tensor]):
    """Rows in memory."""

    def __init__(self, n: int) -> None:
        self.rows = torch.zeros(n, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Coroutines(Plain):
    """The same, read by coroutines."""

    async def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.rows[index]


def tensors(n: int) -> TensorDataset:
    return TensorDataset(torch.zeros(n, 16))


def block(seconds: float) -> None:
    """Block like a training step: by computing."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def bare(n: int) -> AsyncIterator[int]:
    for number in range(n // BATCH):
        await asyncio.sleep(0)
        yield number


async def beat(lateness: list[float]) -> None:
    while True:
        due = time.perf_counter() + BEAT
        await asyncio.sleep(BEAT)
        lateness.append((time.perf_counter() - due) * 1e3)


async def lateness_beside(batches: AsyncIterable[object]) -> list[float]:
    """Iterate, and return how late each beat was, in ms."""
    lateness: list[float] = []
    beating = asyncio.create_task(beat(lateness))
    async for _ in batches:
        block(STEP)
    await asyncio.sleep(2 * BEAT)  # the last one tells of the whole silence
    beating.cancel()
    await asyncio.wait([beating])
    return lateness


def p99(lateness: list[float]) -> float:
    return statistics.quantiles(lateness, n=100, method="inclusive")[98]


async def measure(make: Make, options: Options) -> Figures:
    samples = BATCH * (BATCHES // 8 if options.quick else BATCHES)
    async for _ in make(4 * BATCH):  # imports, first threads
        pass
    reference = p99(await lateness_beside(bare(samples)))
    start = time.perf_counter()
    found = await lateness_beside(make(samples))
    wall = time.perf_counter() - start
    return {
        "above": p99(found) - reference,
        "p99": p99(found),
        "max": max(found),
        "beats": len(found),
        "step_share": 100 * STEP * samples / BATCH / wall,
    }


def contender(make: Make) -> Contender:
    def run(options: Options) -> Figures:
        return uvloop.run(measure(make, options))

    return Contender(run, against="bare")


def ours(dataset: Callable[[int], Any], **settings: Any) -> Contender:
    def make(n: int) -> AsyncIterable[object]:
        import aioloader  # noqa: PLC0415

        loader: AsyncIterable[object] = aioloader.DataLoader(
            dataset(n), BATCH, shuffle=True, **settings
        )
        return loader

    return contender(make)


OURS = {
    "tensors": ours(tensors),
    "sync map": ours(Plain, prefetch_factor=8),
    "async map": ours(Coroutines, prefetch_factor=8),
    "async map, caller": ours(Coroutines, prefetch_factor=8, loop="caller"),
    "2 workers": ours(Plain, num_workers=2),
    "2 worker threads": ours(Plain, num_workers=2, workers="thread"),
}

QUESTION = Question(
    name="heartbeat",
    text="Steps of 4 ms block a loop; how late is a heartbeat of 1 ms beside them?",
    contenders={"bare": contender(bare)} | OURS,
    metrics=[
        Metric("p99", "p99 ms", ".2f", higher=False),
        Metric("above", "above bare ms", ".2f", higher=False),
        Metric("max", "max ms", ".1f", higher=False),
        Metric("beats", "beats"),
        Metric("step_share", "steps %", ".1f"),
    ],
    limits=[Limit(name, "above", 5) for name in OURS],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
