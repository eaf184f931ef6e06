"""Plants: is the verdict right about bottlenecks that were planted on purpose?

For each: a real loader and a training step run, ``loader.report()`` is called, and the
change that it advises is made. The second run gives the gain, to compare with the first
one's prediction. Each run is a separate process.

``--follow`` does what the report says, and asks again, until it advises nothing; the
end must be within 15 % of the best of some other settings.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aioloader import DataLoader, Device
from environment import describe
from harness import RESULTS, Options, render, run_fresh, show
from meter import uncharged
from plant_data import (
    Awaited,
    Compute,
    Drawn,
    FileServer,
    Pinned,
    Plain,
    Pooled,
    Threaded,
    as_numbers,
    keep_busy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioloader._observe.verdict import Report

BATCHES = 160
WARM = 32  # batches before the clock starts: workers start, windows fill
LONG = 4  # times as many batches in an epoch that a start of workers is worth
TAIL = 16  # batches after it stops: a slow worker's last one comes late
NO_GAIN = 5.0  # percent: less is none
# Cores that other processes may use during a run; else it is made again, some times.
QUIET, TRIES = 0.5, 5
CORES = 2  # that a plant may use
MOST_CHANGES, NEAR = 5, 0.15  # how often advice is followed; how near it must lead
Settings = dict[str, Any]


@dataclass(frozen=True)
class Plant:
    """A loader with one bottleneck.

    Attributes:
        make: Makes the dataset.
        settings: Arguments of the loader.
        step: Seconds that the training step takes; it waits, as for an accelerator.
        stage: The stage that the verdict must name; or several, by comma.
        advice: The arguments of which one must be advised; none: no advice.
        cured: Makes the dataset if the advice is to change it.
        tries: Without an advice: a change that must gain nothing.
        value: The value that must be advised, if only one is right.
        busy: Seconds for which the step also keeps two cores busy, before it waits.
        epochs: How many short epochs are iterated; the first one is not measured.
        is_whole: Whether all of the run is measured, from its first start.
    """

    make: Callable[[ExitStack], Any]
    settings: Settings
    step: float
    stage: str
    advice: tuple[str, ...]
    cured: Callable[[ExitStack], Any] | None = None
    tries: Settings = field(default_factory=dict)
    value: Any = None
    busy: float = 0.0
    epochs: int = 1
    is_whole: bool = False

    def take_step(self) -> None:
        """Compute, and wait."""
        if self.busy:
            keep_busy(self.busy)
        if self.step:
            time.sleep(self.step)


def plain(batch_size: int, **taking: Any) -> Callable[[ExitStack], Any]:
    return lambda _: Plain(BATCHES * batch_size, **taking)


def awaited(batch_size: int, *taking: float, **also: Any) -> Callable[[ExitStack], Any]:
    return lambda _: Awaited(BATCHES * batch_size, *taking, **also)


def pooled(batch_size: int, *taking: float, **also: Any) -> Callable[[ExitStack], Any]:
    return lambda _: Pooled(BATCHES * batch_size, *taking, **also)


def files(stack: ExitStack) -> Any:
    return stack.enter_context(FileServer(BATCHES * 32, 0.5)).files()


def shards(stack: ExitStack) -> Any:
    return stack.enter_context(FileServer(BATCHES * 32, 0.5)).shards()


PLANTS = {
    "slow store": Plant(
        plain(8, pause=0.004),
        {"batch_size": 8},
        0.010,
        "read",
        ("num_workers", "dataset"),
        cured=awaited(8, 0.004),
    ),
    "latency-bound store": Plant(
        awaited(16, 0.030),
        {"batch_size": 16, "concurrency": 16},
        0.006,
        "read",
        ("concurrency",),
    ),
    "slow transform": Plant(
        plain(8),
        {"batch_size": 8, "transform": Compute(0.0025)},
        0.014,
        "transform",
        ("num_workers",),
    ),
    "slow collate": Plant(
        awaited(8 * LONG, 0.004),
        {"batch_size": 8, "collate_fn": Compute(0.020)},
        0.013,
        "collate",
        ("num_workers",),
    ),
    "GIL-bound transform": Plant(
        plain(8),
        {
            "batch_size": 8,
            "transform": Compute(0.00125),
            "num_workers": 2,
            "workers": "thread",
        },
        0.007,
        "transform",
        ("workers",),
        value="process",
    ),
    "hogged loop": Plant(
        awaited(8, 0.010, 0.002),
        {"batch_size": 8},
        0.008,
        "loop",
        ("parse_headers",),
        cured=awaited(8, 0.010, 0.002, freed=True),
        value="asyncio.to_thread",
    ),
    "slow consumer": Plant(
        plain(8, pause=0.0008),
        {"batch_size": 8},
        0.020,
        "consumer",
        ("prefetch_factor",),
    ),
    "slow copy": Plant(
        lambda _: Pinned(BATCHES),
        {"batch_size": None, "device": "cuda"},
        0.001,
        "transport",
        (),
        tries={"device": Device("cuda", ahead=4)},
    ),
    "tiny prefetch": Plant(
        awaited(8, 0.020),
        {"batch_size": 8, "prefetch_factor": 1},
        0.008,
        "read",
        ("prefetch_factor",),
    ),
    "one slow worker": Plant(
        plain(4, pause=0.001, slow=60),
        {"batch_size": 4, "num_workers": 4},
        0.0025,
        "read",
        ("in_order",),
        value=False,
    ),
    "many small files": Plant(
        files,
        {"batch_size": 32, "concurrency": 1024, "collate_fn": as_numbers},
        0.004,
        "read",
        ("dataset",),
        cured=shards,
        value="shards",
    ),
    "training-bound": Plant(
        plain(8, cpu=0.001),
        {"batch_size": 8, "num_workers": 2},
        0.015,
        "nothing,consumer",
        (),
        tries={"prefetch_factor": 8},
    ),
    "computing behind async reads": Plant(
        awaited(8 * LONG, 0.010),
        {"batch_size": 8, "transform": Compute(0.0015)},
        0.006,
        "transform",
        ("num_workers",),
    ),
    "hardly any waits": Plant(
        plain(8, pause=0.001, late=0.07),
        {"batch_size": 8, "num_workers": 2},
        0.015,
        "nothing,read,consumer",
        (),
        tries={"num_workers": 4},
    ),
    "short epochs": Plant(
        lambda _: Awaited(16 * 8, 0.002),
        {"batch_size": 8, "transform": Compute(0.001)},
        0.004,
        "transform,nothing",
        (),
        tries={"num_workers": 2},
        epochs=8,
    ),
    "busy cores": Plant(
        plain(8),
        {"batch_size": 8, "num_workers": 2, "transform": Compute(0.005)},
        0.0,
        "transform",
        (),
        tries={"num_workers": 4},
        busy=0.010,
    ),
    "samples at hand": Plant(
        lambda _: list(range(20_000)),
        {"batch_size": 32},
        0.0,
        "read,collate",
        (),
        tries={"num_workers": 2},
    ),
    "nothing to gain": Plant(
        plain(8),
        {"batch_size": 8, "num_workers": 2, "transform": Compute(0.0025)},
        0.002,
        "transform",
        (),
        tries={"num_workers": 4},
    ),
    "reads in threads": Plant(
        lambda _: Threaded(BATCHES * 8, 0.020),
        {"batch_size": 8, "concurrency": 16},
        0.004,
        "read",
        ("concurrency",),
    ),
    "a client's pool": Plant(
        pooled(8, 0.010, size=8),
        {"batch_size": 8},
        0.004,
        "read",
        (),
        cured=pooled(8, 0.010, size=64),
    ),
    "slow sampler": Plant(
        plain(8),
        {"batch_sampler": Drawn(BATCHES, 8, 0.012)},
        0.004,
        "sampler",
        (),
        tries={"num_workers": 2},
    ),
    "a few batches": Plant(
        lambda _: Awaited(8 * 64, 0.002),
        {"batch_size": 64, "transform": Compute(0.001), "concurrency": 256},
        0.0,
        "transform",
        (),
        tries={"num_workers": 2},
        is_whole=True,
    ),
    "one short epoch": Plant(
        lambda _: Awaited(32 * 16, 0.002),
        {"batch_size": 16, "transform": Compute(0.001)},
        0.002,
        "transform",
        (),
        tries={"num_workers": 2},
        is_whole=True,
    ),
}


def run(plant: Plant, make: Callable[[ExitStack], Any], settings: Settings) -> Any:
    """Return seconds per batch, the report, and CPU seconds of uncharged workers."""
    workers = 0.0
    with ExitStack() as stack:
        loader = DataLoader(make(stack), **settings)
        stack.enter_context(loader)
        loader.report()  # from now on it looks for what blocks the loop
        gc.collect()
        began, times = time.perf_counter(), []
        for epoch in range(plant.epochs):
            if epoch == 1:
                began, times = time.perf_counter(), []
            for _ in islice(loader, BATCHES):
                times.append(time.perf_counter())
                if "device" in settings:  # the batch must be there, as for any step
                    torch.cuda.synchronize()
                plant.take_step()
                if len(times) in {BATCHES // 2, BATCHES}:  # near the end of all
                    workers = uncharged()
        if plant.epochs > 1 or plant.is_whole:
            return (time.perf_counter() - began) / len(times), loader.report(), workers
        times = times[WARM:-TAIL]
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return pace, loader.report(), workers


def is_one_of(named: str, arguments: tuple[str, ...]) -> bool:
    """Return whether an advice is among those; a coroutine's includes its place."""
    return named in arguments or any(
        one in named.split(" (", maxsplit=1)[0] for one in arguments
    )


def changed(plant: Plant, report: Report, make: Any, settings: Settings) -> Any:
    """Return the advised dataset and arguments; None if they are not ours."""
    advice = report.advice
    if advice is None:  # a client's limit is no argument
        is_limited = plant.cured and make is plant.make and "at a time" in report.limit
        return (plant.cured, settings) if is_limited else None
    if advice.argument == "Device.ahead":
        device = settings["device"]
        name = device if isinstance(device, str) else "cuda"
        ahead = Device(name, ahead=int(str(advice.new)))
        return make, settings | {"device": ahead}
    known = DataLoader.__init__.__annotations__
    if advice.argument != "dataset" and advice.argument in known:
        return make, settings | {advice.argument: advice.new}
    if plant.cured is None:
        return None
    if "async" in str(advice.new):
        settings = settings | {"num_workers": 0, "concurrency": 64}
    return plant.cured, settings


def others(plant: Plant) -> list[tuple[Any, Settings]]:
    """Return other settings, of which the best is what the advice may lead to."""
    given = plant.settings
    tried: list[Settings] = [
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 8},
        {"prefetch_factor": 8},
        {"concurrency": 256},
    ]
    if "num_workers" in given:
        tried += [{"in_order": False}, {"workers": "process", "in_order": False}]
    found = [(plant.make, given | one) for one in tried]
    if plant.cured is not None:
        cured = given | ({"concurrency": 64} if "dataset" in plant.advice else {})
        found += [(plant.cured, cured), (plant.cured, cured | {"num_workers": 2})]
    if plant.stage == "read" and not plant.advice:  # each worker would have a pool
        found = [one for one in found if "num_workers" not in one[1]]
    return found


def followed(name: str, *, says: bool) -> Settings:
    """Do what the report says until it says nothing more; compare with the best."""
    plant, trail = PLANTS[name], list[str]()
    start = now = plant.make, plant.settings
    for _ in range(MOST_CHANGES + 1):
        seconds, report, _ = run(plant, *now)
        if says:
            print(report, file=sys.stderr)
        change = changed(plant, report, *now)
        if change is None or len(trail) == MOST_CHANGES:
            break
        advice, now = report.advice, change
        trail.append(f"{advice.argument}={advice.new}" if advice else "the client")
    paces = [(run(plant, *one)[0], one) for one in (start, *others(plant))]
    best = min(paces, key=lambda pair: pair[0])[1]
    # The best of many was lucky: both once more, in turns.
    turns = [(run(plant, *now)[0], run(plant, *best)[0]) for _ in range(2)]
    ended, aimed = (min(each) for each in zip(*turns, strict=True))
    ended = min(ended, seconds)
    differs = {k: v for k, v in best[1].items() if plant.settings.get(k) != v}
    if best[0] is not plant.make:
        differs["dataset"] = "changed"
    return {
        "trail": trail or ["nothing"],
        "speedup": paces[0][0] / ended,
        "best": differs,
        "share": aimed / ended,
        "is_right": ended <= aimed * (1 + NEAR),
    }


def one_run(name: str, *, says: bool) -> Settings:
    """Plant a bottleneck, get the report, make the change, and compare."""
    plant = PLANTS[name]
    before, report, workers = run(plant, plant.make, plant.settings)
    advice = report.advice
    predicted = 0.0 if advice is None else advice.gain
    change = changed(plant, report, plant.make, plant.settings)
    if advice is None and plant.tries:  # that must gain nothing
        change = plant.make, plant.settings | plant.tries
    measured = None
    if change is not None:
        after, _, more = run(plant, *change)
        workers += more
        measured = 100 * (before / after - 1)
    if says:
        print(report, file=sys.stderr)
    named = "" if advice is None else advice.argument
    is_stage = report.stage in plant.stage.split(",")
    is_advised = is_one_of(named, plant.advice) if plant.advice else not named
    if advice is not None and plant.value is not None:
        is_advised = is_advised and advice.new == plant.value
    is_sign = measured is not None and (predicted >= NO_GAIN) == (measured >= NO_GAIN)
    return {
        "stage": report.stage,
        "advice": "none" if advice is None else f"{named}={advice.new}",
        "predicted": predicted,
        "measured": measured,
        "model_error": report.model_error,
        "uncharged": workers,
        "is_stage": is_stage,
        "is_advised": is_advised,
        "is_sign": is_sign,
        "is_right": is_stage and is_advised and is_sign,
    }


def quiet_run(name: str, options: Options) -> Settings:
    """Run a plant in a process of its own, while the machine does little else."""
    tries = 1
    while (figures := run_fresh(Path(__file__), name, options))["others"] > QUIET:
        if tries == TRIES or "follow" in options.url:  # also with busy neighbours
            break
        tries += 1
    return {**figures, "tries": tries}


def usual(values: list[str]) -> str:
    """Return the most frequent one."""
    return statistics.mode(values)


def line(name: str, runs: list[Settings]) -> list[str]:
    """Return a row of the table."""
    compared = [one for one in runs if one["measured"] is not None]
    cells = [name, usual([one["stage"] for one in runs])]
    cells.append(usual([one["advice"] for one in runs]))
    cells.append(f"{statistics.median(one['predicted'] for one in runs):+.0f}")
    if compared:
        errors = [one["predicted"] - one["measured"] for one in compared]
        cells.append(f"{statistics.median(one['measured'] for one in compared):+.0f}")
        cells.append(f"{statistics.median(errors):+.0f}")
        cells.append(f"{max(map(abs, errors)):.0f}")
    else:
        cells += ["", "", ""]
    cells.append(f"{sum(one['is_right'] for one in runs)} of {len(runs)}")
    return cells


def row(name: str, runs: list[Settings]) -> list[str]:
    """Return a row of the table of ``--follow``: of the run in the middle."""
    runs = sorted(runs, key=lambda one: one["share"])
    middle = runs[len(runs) // 2]
    best = ", ".join(f"{key}={value}" for key, value in middle["best"].items())
    return [
        *(name, ", ".join(middle["trail"]), f"{middle['speedup']:.2f}"),
        *(best or "as given", f"{middle['share']:.2f}"),
        f"{sum(one['is_right'] for one in runs)} of {len(runs)}",
    ]


FOLLOW_HEAD = ["plant", "advice, followed", "times", "best setting", "of it", "right"]
HEAD = [
    "plant",
    "stage",
    "advice",
    "predicted %",
    "measured %",
    "error",
    "worst",
    "right",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", help="run this plant once; print its figures")
    parser.add_argument("--only", default="", help="plants, by comma")
    parser.add_argument("--runs", type=int, default=3, help="of each plant")
    parser.add_argument("--rounds", type=int, help="the same")
    parser.add_argument("--quick", action="store_true", help="one run")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--follow", action="store_true", help="advice, to its end")
    parser.add_argument("--log", action="store_true", help="print each report")
    return parser.parse_args()


def main() -> None:
    """Run all plants in turns; print the table, store the figures."""
    args = parse()
    if args.contender:
        if hasattr(os, "sched_setaffinity"):  # as many on any machine
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        follows = "follow" in args.url
        judge = followed if follows else one_run
        figures = judge(args.contender, says="log" in args.url)
        print(json.dumps(figures, default=str), flush=True)
        return
    names = args.only.split(",") if args.only else list(PLANTS)
    if not torch.cuda.is_available() and "slow copy" in names:
        names.remove("slow copy")
        print("left out: slow copy, which needs a GPU")
    rounds = 1 if args.quick else args.rounds or args.runs
    started = time.perf_counter()
    runs: dict[str, list[Any]] = {name: [] for name in names}
    head, cells = (FOLLOW_HEAD, row) if args.follow else (HEAD, line)
    options = Options(url="log " * args.log + "follow" * args.follow)
    for number in range(rounds):
        for name in names:
            show(f"run {number + 1}: {name}")
            runs[name].append(quiet_run(name, options))
            print(" | ".join(cells(name, runs[name][-1:])), file=sys.stderr)
    show("")
    print(render([head, *(cells(name, each) for name, each in runs.items())]))
    wrong = [
        name
        for name, each in runs.items()
        if sum(one["is_right"] for one in each) < 0.9 * rounds
    ]
    print("MISSED: " + ", ".join(wrong) if wrong else "met: 9 of 10 right everywhere")
    if not (args.quick or args.only or args.follow):
        seconds = time.perf_counter() - started
        kept = {"environment": describe(), "seconds": seconds, "plants": runs}
        (RESULTS / "plants.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
