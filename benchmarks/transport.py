"""Transport: what does a batch cost on its way from a worker to the consumer?

Samples in memory: 38.5 MB of images per batch, with a consumer that reads nothing or
every byte; 64 pairs of a small tensor and an int; 64 dicts of 20 small tensors. Steady
state, two
workers: batches/s and the consumer's own CPU time.

``--start spawn`` (or ``forkserver``) compares the loaders under that start method, with
the first batch of a new loader, and a script of two epochs that start their workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bare import Collate, Copy, bare_batches
from harness import Contender, Figures, Metric, Options, Question, Target, main
from layouts import DICTS, IMAGES, MIDDLE, PAIRS, SMALL, Case
from spdl_feeds import spdl_loader, spdl_subprocesses, spdl_threads
from worker_feeds import aioloader_batches, steady, torch_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

Make = Callable[[Case], Iterable[Any]]
SECONDS = 3.0
RIVAL = "torch fork"
SHARED = f"{RIVAL} file_system"
STARTS = ("spawn", "forkserver")
EPOCH = 40  # batches of the script


def read_every_byte(batch: Any) -> int:
    """Add up a batch of images in words of eight bytes, at memory speed."""
    images = batch if isinstance(batch, torch.Tensor) else batch[0]
    return int(images.view(torch.int64).sum())


def limit(case: Case, *, work: type[Collate | Copy] = Collate) -> Iterator[Any]:
    return bare_batches(partial(work, case), case)


def makes() -> dict[str, Make]:
    """Return the contenders shown for every case."""
    return {
        "limit": limit,
        "aioloader": aioloader_batches,
        "aioloader threads": partial(aioloader_batches, workers="thread"),
        RIVAL: torch_batches,
        SHARED: partial(torch_batches, sharing="file_system"),
        "torch inline": partial(torch_batches, workers=0),
        "SPDL threads": spdl_threads,
    }


def special_makes(case: Case) -> tuple[dict[str, Make], dict[str, Make]]:
    """Return the best contenders for only big or only small batches."""
    ways: dict[str, Make] = {
        "SPDL pool recycled": partial(spdl_subprocesses, recycled=True),
        "SPDL pool": spdl_subprocesses,
        "SPDL ring recycled": partial(spdl_subprocesses, arena="ring", recycled=True),
        "SPDL no arena": partial(spdl_subprocesses, arena=""),
        "SPDL pickled arrays": partial(
            spdl_subprocesses, arena="", slots=16, arrays=True
        ),
        "SPDL loader": spdl_loader,
        "torch fork arrays": partial(torch_batches, ahead=8, arrays=True),
    }
    big = ["SPDL pool", "SPDL pool recycled"]
    best = big if case is IMAGES else ["SPDL pickled arrays", "torch fork arrays"]
    return {name: ways.pop(name) for name in best}, ways


def extras() -> dict[str, Make]:
    """Return the settings that were tried and are not the best."""
    return {
        "limit copy": partial(limit, work=Copy),
        **{f"{RIVAL} ahead {n}": partial(torch_batches, ahead=n) for n in (1, 4, 8)},
        **{f"torch {how}": partial(torch_batches, start=how) for how in STARTS},
        "torch fork arrays ahead 2": partial(torch_batches, arrays=True),
        "SPDL pool recycled 4": partial(spdl_subprocesses, recycled=True, slots=4),
        "SPDL pool recycled 16": partial(spdl_subprocesses, recycled=True, slots=16),
        "SPDL threads 3": partial(spdl_threads, concurrency=3),
        **{
            f"aioloader {how}": partial(aioloader_batches, multiprocessing_context=how)
            for how in ("fork", *STARTS)
        },
        "aioloader ahead 4": partial(aioloader_batches, prefetch_factor=4),
    }


def contenders(
    case: Case, label: str, read: Callable[[Any], object] | None = None
) -> dict[str, Contender]:
    best, lost = special_makes(case)

    def name_all(ways: Mapping[str, Make], *, extra: bool) -> dict[str, Contender]:
        return {
            f"{label}: {name}": Contender(
                partial(run, make, case, read), against=f"{label}: {RIVAL}", extra=extra
            )
            for name, make in ways.items()
        }

    shown = name_all(makes() | best, extra=False)
    return shown | name_all(lost | extras(), extra=True)


def run(
    make: Make, case: Case, read: Callable[[Any], object] | None, options: Options
) -> Figures:
    return steady(make(case), SECONDS / (6 if options.quick else 1), read=read)


def targets() -> list[Target]:
    """Run torch as an unchanged program can set it: without the ``arrays`` recipe."""

    def promise(case: str, ratio: float, metric: int = 0) -> Target:
        rivals = [f"{case}: {rival}" for rival in (RIVAL, SHARED)]
        return Target(f"{case}: aioloader", rivals, ratio, metric)

    return [
        promise("38 MB", 3),
        promise("38 MB", 8, metric=1),
        promise("38 MB read", 2),
        promise("pairs", 8),
        promise("dicts", 8),
        Target("38 MB: aioloader", ["38 MB: SPDL pool"], 3),
        Target("38 MB: aioloader", ["38 MB: SPDL pool recycled"], 3),
        Target("38 MB: aioloader threads", ["38 MB: SPDL threads"], 1),
    ]


def first(make: Make, case: Case, options: Options) -> Figures:  # noqa: ARG001
    began = time.perf_counter()
    next(iter(make(case)))
    return of_batches(1, time.perf_counter() - began)


def script(make: Make, case: Case, options: Options) -> Figures:  # noqa: ARG001
    began, count = time.perf_counter(), 0
    short = replace(case, dataset=partial(case.dataset, length=EPOCH * case.batch))
    batches = make(short)
    for _ in range(2):
        count += sum(1 for _ in batches)
    return of_batches(count, time.perf_counter() - began)


def of_batches(count: int, wall: float) -> Figures:
    used = time.process_time() / count * 1e3
    return {"rate": count / wall, "batch_ms": wall / count * 1e3, "consumer_ms": used}


def started(method: str) -> Question:
    """Return the question of a start method; names of contenders begin with it."""
    ways: dict[str, Make] = {
        "aioloader": partial(aioloader_batches, multiprocessing_context=method),
        "torch": partial(torch_batches, start=method),
    }
    anew: dict[str, Make] = {
        "aioloader": partial(ways["aioloader"], persistent_workers=False),
        "torch": partial(ways["torch"], persistent=False),
    }
    runs: dict[str, Callable[[str], Callable[[Options], Figures]]] = {
        **{
            case.name: lambda name, case=case: partial(run, ways[name], case, None)
            for case in (SMALL, MIDDLE, IMAGES)
        },
        "first batch": lambda name: partial(first, ways[name], MIDDLE),
        "script": lambda name: partial(script, anew[name], MIDDLE),
    }
    return Question(
        name=f"transport-{method}",
        text=f"What does a batch cost where workers are started by {method}?",
        contenders={
            f"{method} {what}: {name}": Contender(
                make(name), against=f"{method} {what}: torch"
            )
            for what, make in runs.items()
            for name in ways
        },
        metrics=QUESTION.metrics,
        targets=[
            Target(f"{method} {what}: aioloader", [f"{method} {what}: torch"], 1)
            for what in runs
        ],
        rounds=5,
    )


QUESTION = Question(
    name="transport",
    text="What does a batch cost between worker and consumer? Ready samples, 2 workers",
    contenders=contenders(IMAGES, "38 MB")
    | contenders(IMAGES, "38 MB read", read_every_byte)
    | contenders(PAIRS, "pairs")
    | contenders(DICTS, "dicts"),
    metrics=[
        Metric("rate", "batches/s", ",.1f"),
        Metric("consumer_ms", "consumer CPU ms/batch", ",.3f", higher=False),
        Metric("batch_ms", "ms/batch", ",.2f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=targets(),
    rounds=5,
)

if __name__ == "__main__":
    asked = QUESTION
    for method in STARTS:
        # The option, or a contender of its question.
        if method in sys.argv or any(one.startswith(f"{method} ") for one in sys.argv):
            asked = started(method)
    main(asked)
