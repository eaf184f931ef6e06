"""Shuffle: what does it cost to begin a shuffled epoch of many samples?

A dataset whose samples are their indices, in batches of 64; from ``iter()`` to the
first batch, and the memory that the process has grown by then. torch draws the whole
permutation, as 8 bytes a sample, and makes a list of it; ours is computed where it is
looked at. torch's is not run at 1e9: the list alone would take some 36 GB.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main
from meter import peak_megabytes
from resume import BATCH, Numbers, ours, ours_with_torchs_sampler
from shuffle_quality import measure

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"1e6": 10**6, "1e8": 10**8, "1e9": 10**9}


def torchs(n: int) -> Any:
    """Make torch's loader."""
    return DataLoader(Numbers(n), BATCH, shuffle=True)


def run(make: Callable[[int], Any], n: int, options: Options) -> Figures:
    next(iter(make(10**4)))  # what is imported and cached once
    gc.collect()
    before = peak_megabytes()["rss_mb"]
    loader = make(n // 100 if options.quick else n)
    start = time.perf_counter()
    next(iter(loader))
    seconds = time.perf_counter() - start
    return {"ms": seconds * 1e3, "grown_mb": peak_megabytes()["rss_mb"] - before}


def contenders() -> dict[str, Contender]:
    found = {}
    for size, n in SIZES.items():
        makes: dict[str, Any] = {"aioloader": ours}
        if size != "1e9":
            makes["aioloader, torch's sampler"] = ours_with_torchs_sampler
            makes["torch"] = torchs
        for name, make in makes.items():
            found[f"{size}: {name}"] = Contender(
                partial(run, make, n), against=f"{size}: torch"
            )
    return found


QUESTION = Question(
    name="shuffle",
    text="What does it cost to begin a shuffled epoch of many samples?",
    contenders=contenders(),
    metrics=[
        Metric("ms", "first batch ms", ",.1f", higher=False),
        Metric("grown_mb", "MB grown", ",.1f", higher=False),
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
    if "--contender" not in sys.argv:  # how good it is: of shards, beside others
        measure()
