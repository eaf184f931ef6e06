"""Autotune: how close does "auto" come to the best of a manual sweep?

Four workloads, each with a few manual settings and with "auto", in turns in one
process: the rate of the first 30 batches, and after them. Each run uses a new loader.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aioloader import DataLoader
from harness import Metric, Question, keep, medians, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Rounds

LEARNING = 30  # batches
Settings = dict[str, Any]


def compute(seconds: float) -> None:
    """Use a core for a while."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Store:
    """Samples that arrive after 30 ms, a limited number at a time."""

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
    """A workload and its settings.

    Attributes:
        dataset: Makes the dataset for a number of samples.
        batch_size: Samples of a batch.
        batches: How many batches are read after the first 30.
        common: Arguments of all settings.
        by_hand: The sweep.
        auto: The arguments that the loader chooses.
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


def measure(names: list[str], rounds: int) -> Rounds:
    """Run all settings of the workloads in turns."""
    found: Rounds = {}
    for name in names:
        workload = WORKLOADS[name]
        for number in range(rounds):
            for settings in [*workload.by_hand, workload.auto]:
                words = ", ".join(f"{key}={value}" for key, value in settings.items())
                words = "auto" if settings is workload.auto else f"by hand {words}"
                show(f"round {number + 1}: {name} {words}")
                first, after, held = rates(workload, settings)
                figures = {"after": after, "first": first, "held": float(held)}
                found.setdefault(f"{name}: {words}", []).append(figures)
    show("")
    return found


def shares(found: Rounds) -> dict[str, float]:
    """Return the rate of "auto" as a share of the best manual setting, by workload."""
    middles = {name: medians(figures)["after"] for name, figures in found.items()}
    best: dict[str, float] = {}
    for name, rate in middles.items():
        workload, _, words = name.partition(": ")
        if words != "auto":
            best[workload] = max(best.get(workload, 0.0), rate)
    return {name: middles[f"{name}: auto"] / rate for name, rate in best.items()}


def verdicts(found: Rounds) -> list[dict[str, object]]:
    return [
        {
            "text": f"{name}: auto has {share:.2f} of the best by hand, promised 0.9",
            "measured": share,
            "met": share >= 0.9,
        }
        for name, share in shares(found).items()
    ]


QUESTION = Question(
    name="autotune",
    text='How near does "auto" come to the best setting found by hand?',
    contenders={},
    metrics=[
        Metric("after", "samples/s after 30 batches"),
        Metric("first", "samples/s of the first 30"),
        Metric("held", "batches held", higher=False),
    ],
)


def main() -> None:
    """Measure, and store the figures of a long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads")
    parser.add_argument("--rounds", type=int, default=3, help="3 or more are kept")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--log", action="store_true", help="print what is decided")
    args = parser.parse_args()
    if args.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    started = time.perf_counter()
    names, rounds = args.only.split(","), 1 if args.quick else args.rounds
    found = measure(names, rounds)
    print(f"{QUESTION.text}\n\n{table(QUESTION, found)}")
    targets = verdicts(found)
    for one in targets:
        print(f"{'met' if one['met'] else 'MISSED'}: {one['text']}")
    if rounds >= 3 and len(names) == len(WORKLOADS):
        keep(QUESTION, found, time.perf_counter() - started, targets=targets)


if __name__ == "__main__":
    main()
