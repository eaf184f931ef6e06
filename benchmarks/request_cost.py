"""Requests: what does a loader cost that is used for one batch?

A service makes a loader for a request, takes its first batch of 16 from an async
dataset, and closes it: CPU time per request, one after the other. Then 200 such loaders
are open at once, each at its first batch: the threads and the memory that they take. By
hand, a request is one ``gather`` and one ``default_collate``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch.utils.data import default_collate

from harness import Contender, Figures, Limit, Metric, Options, Question, main

BATCH = 16
REQUESTS = 400
CROWD = 200
PAGE = os.sysconf("SC_PAGE_SIZE")
# Takes one batch, and waits until all others have theirs before it closes.
Request = Callable[["Gathering"], Coroutine[Any, Any, None]]


class Rows:
    """Rows of features, read by a coroutine that yields to the loop once."""

    def __init__(self) -> None:
        self.rows = torch.zeros(64, 16)

    def __len__(self) -> int:
        return len(self.rows)

    async def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        await asyncio.sleep(0)
        return self.rows[index], index


class Gathering:
    """Holds requests until all have arrived; records the resources they hold then."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.all = asyncio.Event()
        self.threads = threading.active_count()
        gc.collect()
        self.resident = resident()

    async def arrive(self) -> None:
        """Wait for the others."""
        self.number -= 1
        if not self.number:
            self.threads = threading.active_count() - self.threads
            self.resident = resident() - self.resident
            self.all.set()
        await self.all.wait()


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def unchanged(sample: object) -> object:
    return sample


def collate(samples: Any) -> Any:
    return default_collate(samples)


def by_hand(dataset: Rows) -> Request:
    async def request(gathering: Gathering) -> None:
        samples = await asyncio.gather(*(dataset[index] for index in range(BATCH)))
        batch = default_collate(samples)
        await gathering.arrive()
        del batch

    return request


def with_loader(**settings: Any) -> Callable[[Rows], Request]:
    def make(dataset: Rows) -> Request:
        import aioloader  # noqa: PLC0415

        async def request(gathering: Gathering) -> None:
            async with aioloader.DataLoader(dataset, BATCH, **settings) as loader:
                batch = await anext(aiter(loader))
                await gathering.arrive()
                del batch

        return request

    return make


async def measure(request: Request, options: Options) -> Figures:
    number = REQUESTS // 10 if options.quick else REQUESTS
    for _ in range(20):  # imports, caches
        await request(Gathering(1))
    alone = Gathering(1)
    alone.all.set()
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(number):
        await request(alone)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    crowd = Gathering(CROWD)
    peak, began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(request(crowd) for _ in range(CROWD)))
    return {
        "us": cpu / number * 1e6,
        "wall_us": wall / number * 1e6,
        "threads": crowd.threads,
        "kb": crowd.resident / CROWD / 1e3,
        "crowd_us": (time.process_time() - began) / CROWD * 1e6,
        "crowd_ms": (time.perf_counter() - peak) * 1e3,
    }


def contender(make: Callable[[Rows], Request]) -> Contender:
    def run(options: Options) -> Figures:
        return uvloop.run(measure(make(Rows()), options))

    return Contender(run, against="by hand")


def own() -> dict[str, Contender]:
    plain: dict[str, Any] = {"transform": unchanged, "collate_fn": collate}
    cases: dict[str, dict[str, Any]] = {
        "caller": {"loop": "caller"},
        "caller, plain functions": {"loop": "caller", **plain},
        "private": {},
        "private, plain functions": plain,
    }
    return {
        f"aioloader {name}": contender(with_loader(**settings))
        for name, settings in cases.items()
    }


QUESTION = Question(
    name="requests",
    text="A loader for each request: made, one batch of 16 taken, closed.",
    contenders={"by hand": contender(by_hand)} | own(),
    metrics=[
        Metric("us", "CPU us/request", higher=False),
        Metric("wall_us", "us/request", higher=False),
        Metric("threads", "threads of 200", higher=False),
        Metric("kb", "KB each", ",.1f", higher=False),
        Metric("crowd_us", "CPU us each", higher=False),
        Metric("crowd_ms", "ms for 200", ",.1f", higher=False),
    ],
    limits=[
        Limit("aioloader caller", "us", 500),
        Limit("aioloader private", "us", 1_200),
        Limit("aioloader caller", "threads", 0),
        Limit("aioloader caller, plain functions", "threads", 10),
        Limit("aioloader caller", "kb", 200),
        Limit("aioloader caller, plain functions", "kb", 200),
    ],
    rounds=5,
)

if __name__ == "__main__":
    main(QUESTION)
