"""Crowd: how do 200 concurrent requests, each with a loader, affect a service's others?

The service of ``service.py`` answers 50 requests/s while 200 others are running. Each
of these makes a loader over an async dataset whose samples come after 0.4 s, takes a
batch of 16, closes the loader, and repeats 0.1 s later: 400 requests/s in all. By hand,
a request gathers its samples and collates them itself. That is measured first, in the
same process; ``above`` is the difference of the two 99th percentiles. The times are
those that a client in another process sees.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import torch
import uvloop
from torch.utils.data import default_collate

from harness import Contender, Figures, Limit, Metric, Options, Question, main
from service import BATCH, no_loader, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from service import Load, Progress

CROWD = 200
LATENCY = 0.4
PAUSE = 0.1


class Remote:
    """Rows that arrive after 0.4 s."""

    def __init__(self) -> None:
        self.rows = torch.zeros(BATCH, 16)

    def __len__(self) -> int:
        return len(self.rows)

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(LATENCY)
        return self.rows[index]


async def by_hand(progress: Progress) -> None:
    """Answer a request without a loader."""
    dataset = Remote()
    default_collate(await asyncio.gather(*(dataset[index] for index in range(BATCH))))
    progress.batches += 1


def unchanged(sample: object) -> object:
    return sample


def with_loader(**settings: Any) -> Callable[[Progress], Coroutine[Any, Any, None]]:
    """Return a handler that answers a request with a loader."""

    async def request(progress: Progress) -> None:
        import aioloader  # noqa: PLC0415

        async with aioloader.DataLoader(Remote(), BATCH, **settings) as loader:
            async for _ in loader:
                progress.batches += 1

    return request


def crowd(request: Callable[[Progress], Coroutine[Any, Any, None]]) -> Load:
    """Return a handler that sends 200 requests, evenly spaced, repeatedly."""

    async def come_again(number: int, progress: Progress) -> None:
        await asyncio.sleep(number * (LATENCY + PAUSE) / CROWD)
        while True:
            await request(progress)
            await asyncio.sleep(PAUSE)

    async def load(progress: Progress) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CROWD):
                group.create_task(come_again(number, progress))

    return load


def beside(load: Load) -> Contender:
    """Return a contender that is measured after the requests by hand."""

    def run(options: Options) -> Figures:
        import aioloader  # noqa: F401, PLC0415  (before the clock starts)

        gc.collect()
        gc.freeze()
        reference = uvloop.run(observe(crowd(by_hand), options))
        figures = uvloop.run(observe(load, options))
        return figures | {"above": figures["p99"] - reference["p99"]}

    return Contender(run, against="by hand")


OURS: dict[str, dict[str, Any]] = {
    "aioloader caller": {"loop": "caller"},
    "aioloader caller, plain transform": {"loop": "caller", "transform": unchanged},
    "aioloader private": {},
}

LOADS = {name: crowd(with_loader(**settings)) for name, settings in OURS.items()}

QUESTION = Question(
    name="crowd",
    text="A service answers 50 requests/s beside 400/s that read, each by a loader.",
    contenders={
        name: beside(load)
        for name, load in (
            {"no loader": no_loader, "by hand": crowd(by_hand)} | LOADS
        ).items()
    },
    metrics=[
        Metric("p99", "p99 ms", ".1f", higher=False),
        Metric("above", "above by hand ms", ".1f", higher=False),
        Metric("p50", "p50 ms", ".2f", higher=False),
        Metric("max", "max ms", ".1f", higher=False),
        Metric("samples", "samples/s"),
        Metric("cpu", "cores used", ".2f", higher=False),
    ],
    limits=[Limit(name, "above", 5) for name in OURS if "caller" in name],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
