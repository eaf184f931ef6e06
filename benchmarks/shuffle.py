"""Shuffle: what does it cost to start a shuffled epoch of many samples?

A dataset whose samples are their indices, in batches of 64; from ``iter()`` to the
first batch, the memory that the process has grown by then, and the time of each of 300
more batches. torch draws the whole permutation, at 8 bytes a sample, and makes a list
of it; ours is computed on lookup. torch's is not run at 1e9: its list alone would take
some 36 GB. How well streams are shuffled is measured by shuffle_quality.py.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main
from meter import peak_megabytes
from resume import BATCH, Numbers, ours, ours_with_torchs_sampler

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {f"1e{power}": 10**power for power in range(3, 10)}
# drawn whole, 1e9 indices would be a tensor of 8 GB and a list of some 36 GB
LARGEST_DRAWN = 10**8
STEPS = 300


def torchs(n: int) -> Any:
    """Make torch's loader."""
    return DataLoader(Numbers(n), BATCH, shuffle=True)


def run(make: Callable[[int], Any], n: int, options: Options) -> Figures:
    next(iter(make(10**4)))  # what is imported and cached once
    gc.collect()
    before = peak_megabytes()["rss_mb"]
    loader = make(max(1_000, n // 100) if options.quick else n)
    start = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - start
    grown = peak_megabytes()["rss_mb"] - before
    steps = min(STEPS, len(loader) - 1)
    start = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    later = (time.perf_counter() - start) / steps
    return {"ms": seconds * 1e3, "grown_mb": grown, "batch_us": later * 1e6}


def contenders() -> dict[str, Contender]:
    found = {}
    for size, n in SIZES.items():
        makes: dict[str, Any] = {"aioloader": ours}
        if n <= LARGEST_DRAWN:
            makes["aioloader, torch's sampler"] = ours_with_torchs_sampler
            makes["torch"] = torchs
        for name, make in makes.items():
            found[f"{size}: {name}"] = Contender(
                partial(run, make, n),
                against=f"{size}: torch",
                max_rounds=100 if n < LARGEST_DRAWN else 2,
            )
    return found


QUESTION = Question(
    name="shuffle",
    text="What does it cost to begin a shuffled epoch of many samples?",
    contenders=contenders(),
    metrics=[
        Metric("ms", "first batch ms", ",.1f", higher=False),
        Metric("grown_mb", "MB grown", ",.1f", higher=False),
        Metric("batch_us", "us per batch then", ",.0f", higher=False),
    ],
    targets=[
        Target(f"{size}: aioloader", [f"{size}: torch"], 1) for size in ("1e6", "1e8")
    ],
    limits=[
        Limit("1e9: aioloader", "ms", 100),
        Limit("1e9: aioloader", "grown_mb", 10),
    ],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
