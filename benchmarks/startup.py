"""Start-up: how long does an epoch keep one waiting for its first batch?

From ``iter()`` to the first batch, two workers that do not persist, a trivial dataset
of small tensors; torch is imported before. The first epoch of a process, which pays for
what is kept afterwards, and the median of those that follow on the same loader.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from harness import Contender, Figures, Metric, Options, Question, Target, main
from layouts import PairRows
from worker_feeds import WORKERS

# batches of an epoch, of 64 samples; only the first one is timed
BATCHES = 8
BATCH = 64
SECONDS = 3.0
Make = Callable[[Any], Iterable[object]]


def torch_loader(
    dataset: Any, *, start: str, preload: tuple[str, ...] = ()
) -> Iterable[object]:
    """Build torch's loader; ``preload`` names what its fork server imports once.

    Before Python 3.13 that server does not know this script's folder otherwise.
    """
    if preload:
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        multiprocessing.set_forkserver_preload(list(preload))
    return DataLoader(
        dataset, BATCH, num_workers=WORKERS, multiprocessing_context=start
    )


def ours(dataset: Any, *, warm: bool = False, **settings: Any) -> Iterable[object]:
    """Build our loader; ``warm`` waits for the template, as a program's start may."""
    import aioloader  # noqa: PLC0415

    if warm:
        aioloader.warm_up()
    loader: Iterable[object] = aioloader.DataLoader(
        dataset, BATCH, num_workers=WORKERS, **settings
    )
    return loader


def first_batch(loader: Iterable[object]) -> float:
    """Time one epoch's first batch, in ms; then let the epoch end."""
    gc.collect()
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    waited = time.perf_counter() - start
    for _ in batches:
        pass
    return waited * 1e3


def run(make: Make, options: Options) -> Figures:
    loader = make(PairRows(BATCHES * BATCH))
    start = time.perf_counter()
    first = first_batch(loader)
    later = [first_batch(loader)]
    enough = SECONDS / (10 if options.quick else 1)
    while time.perf_counter() < start + enough and len(later) < 30:
        later.append(first_batch(loader))
    return {"first": first, "later": statistics.median(later)}


# the fork server imports these once; the last ones are this script's own
PRELOAD = ("torch", "torch.utils.data", "harness", "samples", "workers", "settled")
RIVALS = {
    "torch fork": partial(torch_loader, start="fork"),
    "torch spawn": partial(torch_loader, start="spawn"),
    "torch forkserver": partial(torch_loader, start="forkserver"),
    "torch forkserver preloaded": partial(
        torch_loader, start="forkserver", preload=PRELOAD
    ),
}
OURS = {
    "aioloader": partial(ours, warm=True),
    "aioloader fork": partial(ours, multiprocessing_context="fork"),
}
EXTRA = {
    "aioloader cold": ours,
    "torch forkserver torch only": partial(
        torch_loader, start="forkserver", preload=("torch",)
    ),
}


def targets() -> list[Target]:
    """Promise the same of both epochs, but for the preload, which is paid once."""
    promised = [
        Target("aioloader", [rival], ratio, metric)
        for metric in (0, 1)
        for rival, ratio in (("torch fork", 1), ("torch spawn", 15))
    ]
    return [*promised, Target("aioloader", ["torch forkserver preloaded"], 10)]


QUESTION = Question(
    name="startup",
    text="How long until the first batch of an epoch? Two workers, a trivial dataset",
    contenders={
        name: Contender(partial(run, make), against="torch fork", extra=name in EXTRA)
        for name, make in (OURS | RIVALS | EXTRA).items()
    },
    metrics=[
        Metric("first", "first epoch ms", ",.1f", higher=False),
        Metric("later", "later epochs ms", ",.1f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=targets(),
    rounds=5,
)

if __name__ == "__main__":
    main(QUESTION)
