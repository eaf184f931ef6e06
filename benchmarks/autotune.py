"""Autotune: how near does "auto" come to the best of a sweep by hand?

Four workloads, each with a few settings by hand and with "auto", in turns in one
process: the rate after the first 30 batches, and of those 30. Each loader is a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aioloader import DataLoader
from environment import describe
from harness import RESULTS, show

if TYPE_CHECKING:
    from collections.abc import Callable

LEARNING = 30  # batches
Settings = dict[str, Any]


def compute(seconds: float) -> None:
    """Use a core for a while."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Store:
    """Samples that come 30 ms after they were asked for, from so many at a time."""

    def __init__(self, length: int, served: int, floats: int = 1) -> None:
        self.length = length
        self.served = served
        self.floats = floats
        self.places: asyncio.Semaphore | None = None

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> torch.Tensor:
        if self.places is None:
            self.places = asyncio.Semaphore(self.served)
        async with self.places:
            await asyncio.sleep(0.03)
        return torch.full((self.floats,), float(index))


class Heavy:
    """Plain samples that take a millisecond of a core."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(0.001)
        return torch.tensor(index)


def transformed(sample: torch.Tensor) -> torch.Tensor:
    """Take a fifth of a millisecond in the thread."""
    compute(0.0002)
    return sample


@dataclass(frozen=True)
class Workload:
    """What is loaded, and how it is tried.

    Attributes:
        dataset: Makes the dataset for a number of samples.
        batch_size: Samples of a batch.
        batches: How many batches are read after the first 30.
        common: Arguments of all settings.
        by_hand: The sweep.
        auto: What the loader is to choose.
    """

    dataset: Callable[[int], Any]
    batch_size: int
    batches: int
    common: Settings
    by_hand: list[Settings]
    auto: Settings


def each(name: str, *values: int) -> list[Settings]:
    """Return a setting for each value of an argument."""
    return [{name: value} for value in values]


MEGABYTE = 1 << 20
WORKLOADS = {
    "latency": Workload(
        lambda n: Store(n, 200),
        32,
        120,
        {},
        each("concurrency", 32, 64, 128, 256, 512),
        {"concurrency": "auto"},
    ),
    "cpu": Workload(
        Heavy, 32, 60, {}, each("num_workers", 1, 2), {"num_workers": "auto"}
    ),
    "mixed": Workload(
        lambda n: Store(n, 100),
        32,
        90,
        {"transform": transformed},
        each("concurrency", 32, 64, 128, 256),
        {"concurrency": "auto"},
    ),
    # A sample is 1 MB, and 64 MB may be held: eight batches.
    "memory": Workload(
        lambda n: Store(n, 1000, MEGABYTE // 4),
        8,
        60,
        {},
        each("prefetch_factor", 1, 2, 4, 8),
        {
            "concurrency": "auto",
            "prefetch_factor": "auto",
            "prefetch_bytes": 64 * MEGABYTE,
        },
    ),
}


def rates(workload: Workload, settings: Settings) -> tuple[float, float, int]:
    """Return samples/s of the first 30 batches and after, and batches held at most."""
    size = workload.batch_size
    dataset = workload.dataset((LEARNING + workload.batches) * size)
    times, held = [time.perf_counter()], 0
    with DataLoader(dataset, size, **workload.common, **settings) as loader:
        for _ in loader:
            times.append(time.perf_counter())
            held = max(held, loader.stats().in_flight)
    first = LEARNING * size / (times[LEARNING] - times[0])
    rest = workload.batches * size / (times[-1] - times[LEARNING])
    return first, rest, held


def measure(names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Run all settings of the workloads in turns; print a table."""
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':<34}{'first 30':>10}{'after':>10}{'held':>6}{'of best':>9}")
    for name in names:
        workload = WORKLOADS[name]
        runs: dict[str, list[tuple[float, float, int]]] = {}
        for number in range(rounds):
            for settings in [*workload.by_hand, workload.auto]:
                words = ", ".join(f"{key}={value}" for key, value in settings.items())
                words = "auto" if settings is workload.auto else words
                show(f"round {number + 1}: {name} {words}")
                runs.setdefault(words, []).append(rates(workload, settings))
        show("")
        medians = {
            words: [statistics.median(column) for column in zip(*seen, strict=True)]
            for words, seen in runs.items()
        }
        best = max(after for words, (_, after, _) in medians.items() if words != "auto")
        for words, (first, after, held) in medians.items():
            line = f"{name + ' ' + words:<34}{first:>10,.0f}{after:>10,.0f}{held:>6.0f}"
            print(f"{line}{after / best:>9.2f}")
        found[name] = {"best": best, "medians": medians, "rounds": runs}
    return found


def main() -> None:
    """Measure, and keep the figures of a run that was asked to be long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads")
    parser.add_argument("--rounds", type=int, help="default 1; 3 or more are kept")
    parser.add_argument("--quick", action="store_true", help="one round, the default")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--log", action="store_true", help="print what is decided")
    args = parser.parse_args()
    if args.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    started = time.perf_counter()
    rounds = args.rounds or 1
    found = measure(args.only.split(","), rounds)
    short = [
        name
        for name, one in found.items()
        if one["medians"]["auto"][1] < 0.9 * one["best"]
    ]
    print("MISSED: " + ", ".join(short) if short else "met: 0.9 of the best everywhere")
    seconds = time.perf_counter() - started
    if rounds >= 3 and len(found) == len(WORKLOADS):
        kept = {"environment": describe(), "seconds": seconds, "workloads": found}
        (RESULTS / "autotune.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
