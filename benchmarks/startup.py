"""Start-up: how long does one wait for workers?

Two workers that do not persist, against torch's loader as everyone writes it:

- ``first batch``: from making a loader to its first batch, in a fresh process;
- ``second epoch``: all of it, 512 small samples, on the same loader;
- ``three epochs`` of a script that imports PIL, scipy and scikit-learn at its top, its
  dataset in ``__main__`` (``startup_script.py``), and the ``whole script``, imports and
  all;
- ``four ranks``: the first batch of the last of four processes started together.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from harness import Contender, Figures, Metric, Options, Question, Target, main
from worker_feeds import WORKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATCHES = 8
BATCH = 64
RANKS = 4
EPOCHS = 9
SCRIPT = Path(__file__).with_name("startup_script.py")
MODULES = {"aioloader": "aioloader", "torch": "torch.utils.data"}


class Small(Dataset[torch.Tensor]):
    """Rows that cost nothing to make."""

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index)


def make(name: str) -> Iterable[object]:
    """Make a loader: ``"torch"``, or ``"aioloader forkserver"`` with a start method."""
    kind, *start = name.split()
    loader: Iterable[object] = importlib.import_module(MODULES[kind]).DataLoader(
        Small(),
        BATCH,
        num_workers=WORKERS,
        multiprocessing_context=start[0] if start else None,
    )
    return loader


def first_batch(name: str, _: Options) -> Figures:
    """Time the first batch of a process."""
    importing = make(name)  # not a part of what is asked
    del importing
    gc.collect()
    start = time.perf_counter()
    batches = iter(make(name))
    next(batches)
    return {"ms": (time.perf_counter() - start) * 1e3}


def second_epoch(name: str, options: Options) -> Figures:
    """Time the epochs that follow the first one; the median."""
    loader = make(name)
    for _ in loader:
        pass
    seconds = []
    for _ in range(3 if options.quick else EPOCHS):
        gc.collect()
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        seconds.append(time.perf_counter() - start)
        if count != BATCHES:
            raise RuntimeError(f"{count} batches, {BATCHES} expected")
    return {"ms": sorted(seconds)[len(seconds) // 2] * 1e3}


def script(name: str, _: Options, *, whole: bool) -> Figures:
    """Run the script in a fresh interpreter."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), MODULES[name]],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    took = (time.perf_counter() - start) * 1e3
    return {"ms": took if whole else float(done.stdout.splitlines()[-1])}


def four_ranks(name: str, _: Options) -> Figures:
    """Start four processes; when all have imported, let them continue together."""
    command = [sys.executable, __file__, "--rank", name]
    ranks = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(RANKS)
    ]
    ends = [(rank.stdin, rank.stdout) for rank in ranks]
    for _, output in ends:
        if output is None or output.readline() != "ready\n":
            raise RuntimeError("a rank did not start")
    for given, _ in ends:
        if given is not None:
            given.write("go\n")
            given.flush()
    took = [float(output.readline()) for _, output in ends if output is not None]
    for rank in ranks:
        rank.communicate()
    return {"ms": max(took)}


def be_rank(name: str) -> None:
    """Run one of the four: print when ready, and then the time of the first batch."""
    importing = make(name)
    del importing
    gc.collect()
    print("ready", flush=True)
    sys.stdin.readline()
    print(first_batch(name, Options())["ms"], flush=True)


CASES: dict[str, Callable[..., Figures]] = {
    "first batch": first_batch,
    "second epoch": second_epoch,
    "three epochs": partial(script, whole=False),
    "whole script": partial(script, whole=True),
    "four ranks": four_ranks,
}
LOADERS = ("aioloader", "torch")
STARTS = ("forkserver", "spawn")


def contenders() -> dict[str, Contender]:
    """Pair every case with both loaders, and the first ones with start methods."""
    found: dict[str, Contender] = {}
    for case, run in CASES.items():
        names = [*LOADERS]
        if case in {"first batch", "second epoch"}:
            names += [f"{one} {start}" for start in STARTS for one in LOADERS]
        for name in names:
            found[f"{case}: {name}"] = Contender(
                partial(run, name),
                against=f"{case}: torch",
                max_rounds=100 if name in LOADERS else 3,
            )
    return found


QUESTION = Question(
    name="startup",
    text="How long do workers keep one waiting? Two workers that do not persist",
    contenders=contenders(),
    metrics=[Metric("ms", "ms", ",.1f", higher=False)],
    targets=[
        Target(f"{case}: aioloader", [f"{case}: torch"], round(1 / 1.1, 3))
        for case in CASES
    ],
    rounds=9,
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2])
    else:
        main(QUESTION)
