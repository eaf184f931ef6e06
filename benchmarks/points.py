"""Common to crossover.py and growth.py: a contender's rate at points of an axis.

A contender runs in one process and visits all points in turn, with a new loader for
each, so that a curve costs one start. ``batches`` are endless, as the datasets are.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from harness import Contender, Figures, Metric, Options, main

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness import Question

# torch and we advise against more workers than cores; many here only wait
warnings.filterwarnings("ignore", message="This DataLoader will create")

ENDLESS = 1 << 30
MAX_RATIO = 4
# a point of the axis to its batches
Make = Callable[[float], Any]


def compute(seconds: float) -> None:
    """Use a core for a while, in this thread's time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Costly(Dataset[int]):
    """Samples that take CPU time of the thread that reads them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            compute(self.seconds)
        return index


class Slept(Costly):
    """Samples for which a thread waits."""

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Awaited(Costly):
    """Samples for which a coroutine waits."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return index


class Gathered(Costly):
    """A batch at once, on a loop in the worker: torch's best recipe."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        async def one(index: int) -> int:
            if self.seconds:
                await asyncio.sleep(self.seconds)
            return index

        async def every() -> list[int]:
            return await asyncio.gather(*map(one, indices))

        return asyncio.run(every())


class Clock:
    """Counts samples from the end of the warm-up until the time is over."""

    def __init__(self, seconds: float, warm: int) -> None:
        self.seconds, self.warm = seconds, warm
        self.began = self.samples = self.number = 0.0
        self.rate = 0.0

    def is_over(self, size: int) -> bool:
        """Count a batch; at least four batches follow the warm-up."""
        self.number += 1
        now = time.perf_counter()
        if self.number <= self.warm:
            self.began = now
            return False
        self.samples += size
        self.rate = self.samples / (now - self.began)
        late = now - self.began
        beyond = self.number - self.warm >= 4 or late > MAX_RATIO * self.seconds
        return beyond and late > self.seconds


def drain(batches: Iterable[Any], clock: Clock, read: Callable[[Any], Any]) -> None:
    iterator = iter(batches)
    for batch in iterator:
        read(batch)
        if clock.is_over(len(batch)):
            return


async def adrain(batches: AsyncIterable[Any], clock: Clock) -> None:
    async for batch in batches:
        if clock.is_over(len(batch)):
            return


def run(
    make: Make,
    points: Sequence[float],
    read: Callable[[Any], Any],
    seconds: float,
    options: Options,
) -> Figures:
    """Return samples per second at each point, by its key."""
    torch.set_num_threads(1)
    found = {}
    for point in points:
        clock = Clock(seconds / (5 if options.quick else 1), warm=6)
        batches = make(point)
        gc.collect()
        if isinstance(batches, AsyncIterable) and not isinstance(batches, Iterable):
            asyncio.run(adrain(batches, clock))
        else:
            drain(batches, clock, read)
        getattr(batches, "close", int)()
        del batches
        for thread in threading.enumerate():  # one may be in the midst of a batch
            if thread is not threading.current_thread():
                thread.join(timeout=5)
        found[key(point)] = clock.rate
    return found


def key(point: float) -> str:
    return f"{point:.10g}"


def metrics(points: Sequence[float]) -> list[Metric]:
    """Make a column for each point."""
    return [Metric(key(point), key(point)) for point in points]


def contenders(
    case: str,
    makes: Mapping[str, Make],
    points: Sequence[float],
    *,
    read: Callable[[Any], Any] = len,
    seconds: float = 0.7,
) -> dict[str, Contender]:
    """Make a contender of each way to load; ratios are to torch's first one."""
    rival = next(name for name in makes if not name.startswith("aioloader"))
    return {
        f"{case}: {name}": Contender(
            partial(run, make, points, read, seconds), against=f"{case}: {rival}"
        )
        for name, make in makes.items()
    }


def main_of(questions: Sequence[Question]) -> None:
    """Answer all questions, or run a contender of one of them."""
    for question in questions:
        if "--contender" not in sys.argv or set(sys.argv) & set(question.contenders):
            main(question)
