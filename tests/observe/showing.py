"""Doubles for tests of progress displays and metrics: a terminal, a clock, figures."""

import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aioloader._base.records import LoopLag, RecordedSettings
from aioloader._observe.stages import StageStats

WORKERS = RecordedSettings(
    "workers", workers=2, worker_kind="process", reads_in_workers=True
)
SETTINGS = [
    RecordedSettings("inline"),
    RecordedSettings("thread", window=2),
    RecordedSettings("loop", concurrency=64, window=None),
    WORKERS,
    RecordedSettings("workers", workers=2, worker_kind="thread", concurrency=64),
    RecordedSettings(
        "workers", workers=2, worker_kind="RayWorkers", reads_in_workers=True
    ),
]


class Terminal(io.StringIO):
    """A stream that is a terminal, and keeps its output."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return the lines that were shown, in order."""
        shown = self.getvalue().replace("\n", "\r").split("\r")
        return [line.rstrip() for line in shown if line.strip()]


class Clock:
    """A clock that only advances by assignment."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__


Stage: Any = partial(
    StageStats, busy=0.0, starved=0.0, blocked=0.0, p50=0.0, p95=0.0, p99=0.0
)


@dataclass
class Figures:
    """Like ``LoaderStats``, but mutable."""

    epoch: int = 0
    batches: int = 0
    waited: float = 0.0
    in_flight: int = 0
    failures: int = 0
    worker_deaths: int = 0
    worker_restarts: int = 0
    resumed_at: int = 0
    retries: int = 0
    batch_bytes: float = 0.0
    queued: float = 0.0
    loop_lag: LoopLag | None = None
    recent: int = 0
    seconds: float = 0.0
    samples: int = 0
    waits: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stages: tuple[StageStats, ...] = ()
    iteration: object = field(default_factory=object)


class Counting:
    """A loader of numbers: each takes a second, a quarter of which is waiting."""

    def __init__(self, clock: Clock, batches: int = 8, seconds: float = 1.0) -> None:
        self.clock = clock
        self.batches = batches
        self.seconds = seconds
        self.figures = Figures()
        self.looks = 0
        self.costs = 0.0

    def __len__(self) -> int:
        return self.batches + self.figures.resumed_at

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        for number in range(self.batches):
            yield self.made(number)

    async def __aiter__(self) -> AsyncIterator[Any]:
        self.begin()
        for number in range(self.batches):
            yield self.made(number)

    def begin(self) -> None:
        """Begin an epoch, or resume one."""
        before = self.figures
        self.figures = Figures(before.epoch + 1, resumed_at=before.resumed_at)

    def made(self, number: int) -> Any:
        """Return a batch of 5 samples and 1,000 bytes."""
        self.clock.now += self.seconds
        self.figures.batches += 1
        self.figures.recent = min(4, self.figures.batches)
        self.figures.batch_bytes = 1000.0
        self.figures.samples = 5 * self.figures.recent
        self.figures.waited += self.seconds / 4
        return {"number": number}

    def stats(self) -> Figures:
        """Return the figures; count the calls."""
        self.looks += 1
        self.clock.now += self.costs
        return self.figures
