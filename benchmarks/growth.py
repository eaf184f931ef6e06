"""Growth: how much do more workers, and more samples in flight, gain?

Samples per second, batches of 16, the consumer with one torch thread. Workers: samples
that take 1 ms of CPU, or 5 ms of waiting in a thread. Concurrency: samples that a
coroutine waits 30 ms for; the limit is as many coroutines that only wait, and with n in
flight nothing exceeds n / 30 ms. Growth in samples, 1e3 to 1e9, is measured by
``shuffle.py``. On two cores CPU-bound samples cannot gain from a third worker.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import uvloop

from crossover import BATCH, SpdlAwaits, SpdlWorkers, ours, torchs
from harness import Question
from points import Awaited, Costly, Slept, contenders, main_of, metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CPU, WAIT, LATENCY = 0.001, 0.005, 0.03
WORKERS = (1, 2, 3, 4)
WAITERS = (1, 2, 4, 8, 16, 32)
FLIGHTS = (1, 4, 16, 64, 256, 1_024)


class Bare:
    """Coroutines that wait, and a list of their results for each batch."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def __iter__(self) -> Any:
        """Start: one batch at a time, on a loop without other work."""
        loop = uvloop.new_event_loop()
        batches = self._batches()
        try:
            while True:
                yield loop.run_until_complete(anext(batches))
        finally:
            loop.run_until_complete(batches.aclose())
            loop.close()

    async def _batches(self) -> AsyncIterator[list[int]]:
        dataset, numbers = Awaited(LATENCY), itertools.count()
        done: asyncio.Queue[int] = asyncio.Queue()

        async def member() -> None:
            for number in numbers:
                done.put_nowait(await dataset[number])

        crew = [asyncio.create_task(member()) for _ in range(self._concurrency)]
        try:
            while True:
                yield [await done.get() for _ in range(BATCH)]
        finally:
            for task in crew:
                task.cancel()
            await asyncio.wait(crew)


BY_WORKERS = {
    "aioloader": lambda n: ours(Costly(CPU), num_workers=int(n)),
    "torch": lambda n: torchs(Costly(CPU), int(n)),
    "SPDL pool": lambda n: SpdlWorkers(CPU, int(n)),
}
BY_WAITERS = {
    "aioloader": lambda n: ours(Slept(WAIT), num_workers=int(n)),
    "aioloader threads": lambda n: ours(
        Slept(WAIT), num_workers=int(n), workers="thread"
    ),
    "torch": lambda n: torchs(Slept(WAIT), int(n)),
    "SPDL pool": lambda n: SpdlWorkers(WAIT, int(n), Slept),
}
BY_FLIGHTS = {
    "bare": lambda n: Bare(int(n)),
    "aioloader": lambda n: ours(Awaited(LATENCY), concurrency=int(n)),
    "SPDL": lambda n: SpdlAwaits(LATENCY, int(n)),
}

QUESTIONS = [
    Question(
        name="growth_workers",
        text="What do more workers bring to samples of 1 ms of CPU? Samples/s",
        contenders=contenders("CPU", BY_WORKERS, WORKERS),
        metrics=metrics(WORKERS),
        axis="workers",
        rounds=3,
    ),
    Question(
        name="growth_waiters",
        text="What do more workers bring to samples that are waited for, 5 ms each?",
        contenders=contenders("waiting", BY_WAITERS, WAITERS),
        metrics=metrics(WAITERS),
        axis="workers",
        rounds=3,
    ),
    Question(
        name="growth_concurrency",
        text="What do more samples in flight bring, of 30 ms each? Samples/s",
        contenders=contenders("in flight", BY_FLIGHTS, FLIGHTS, seconds=1.0),
        metrics=metrics(FLIGHTS),
        axis="samples in flight",
        rounds=3,
    ),
]

if __name__ == "__main__":
    main_of(QUESTIONS)
