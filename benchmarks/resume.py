"""Resume: what does a state cost at each step, and how soon does training resume?

A dataset whose samples are their indices, shuffled, in batches of 64: all time is the
loader's own. ``state_dict()`` is called after every batch of 500. Then a new loader
loads the state of the middle of the epoch; the time runs from making it to its first
batch, and is also given as a multiple of a fresh epoch's. The middle is reached by
iterating, except for 1e9 samples, where the state of a new epoch is set forward: it
only has the number of delivered batches. torchdata's loader is not run there: its
sampler holds the whole permutation (8 GB), and replays it to the middle.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from aioloader._loader.state import unsealed
from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 64
STEPS = 500
TIMES = 5
SIZES = {"1e4": 10**4, "1e6": 10**6, "1e9": 10**9}


class Numbers(Dataset[int]):
    """Samples that are their indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def ours(n: int, **settings: Any) -> Any:
    """Make our loader over a keyed permutation."""
    import aioloader  # noqa: PLC0415

    order = aioloader.ShuffledIndices(n, seed=1)
    return aioloader.DataLoader(Numbers(n), BATCH, sampler=order, **settings)


def ours_with_torchs_sampler(n: int, **settings: Any) -> Any:
    """Make our loader over torch's permutation."""
    import aioloader  # noqa: PLC0415

    return aioloader.DataLoader(Numbers(n), BATCH, shuffle=True, **settings)


def torchdatas(n: int, **settings: Any) -> Any:
    """Make the rival."""
    # it uses features that the installed torch has deprecated
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import (  # noqa: PLC0415
        StatefulDataLoader,
    )

    return StatefulDataLoader(Numbers(n), BATCH, shuffle=True, **settings)


def cost_of_states(loader: Any, steps: int) -> tuple[float, int]:
    """Return the median microseconds of a ``state_dict``, and its bytes as JSON."""
    seconds = []
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
        start = time.perf_counter()
        state = loader.state_dict()
        seconds.append(time.perf_counter() - start)
    size = len(json.dumps(state, default=repr))
    return statistics.median(seconds) * 1e6, size


def state_of_middle(make: Callable[[int], Any], n: int) -> dict[str, Any]:
    """Return the state after half of the batches."""
    loader, half = make(n), n // BATCH // 2
    iterator = iter(loader)
    if n == SIZES["1e9"]:
        next(iterator)
        return replace(unsealed(loader.state_dict()), done=half).sealed()
    for _ in range(half):
        next(iterator)
    return dict(loader.state_dict())


def first_batch(make: Callable[[int], Any], n: int, state: Any) -> float:
    """Return the milliseconds from making a loader to its first batch."""
    start = time.perf_counter()
    loader = make(n)
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - start
    del iterator
    return seconds * 1e3


def run(make: Callable[..., Any], n: int, workers: int, options: Options) -> Figures:
    make = partial(make, num_workers=workers)
    steps = min(50 if options.quick else STEPS, n // BATCH - 1)
    cost, size = cost_of_states(make(n), steps)
    state = state_of_middle(make, n)
    pairs = [
        (first_batch(make, n, None), first_batch(make, n, state)) for _ in range(TIMES)
    ]
    return {
        "state_us": cost,
        "bytes": size,
        "fresh_ms": statistics.median(fresh for fresh, _ in pairs),
        "resume_ms": statistics.median(resumed for _, resumed in pairs),
        "times_fresh": statistics.median(resumed / fresh for fresh, resumed in pairs),
    }


def contenders() -> dict[str, Contender]:
    found = {}
    for size, n in SIZES.items():
        makes: dict[str, Any] = {"aioloader": ours}
        if size != "1e9":
            makes["aioloader, torch's sampler"] = ours_with_torchs_sampler
            makes["torchdata"] = torchdatas
        for name, make in makes.items():
            for workers in (0, 2):
                where = f", {workers} workers" if workers else ""
                found[f"{size}: {name}{where}"] = Contender(
                    partial(run, make, n, workers),
                    against=f"{size}: torchdata{where}",
                )
    return found


QUESTION = Question(
    name="resume",
    text="What does a state cost at each step, and how soon is training back?",
    contenders=contenders(),
    metrics=[
        Metric("resume_ms", "resume at the middle ms", ",.2f", higher=False),
        Metric("times_fresh", "times a fresh start", ",.2f", higher=False),
        Metric("fresh_ms", "fresh ms", ",.2f", higher=False),
        Metric("state_us", "state_dict us", ",.1f", higher=False),
        Metric("bytes", "state bytes", ",.0f", higher=False),
    ],
    targets=[
        Target(f"{size}: aioloader", [f"{size}: torchdata"], 1, metric)
        for size in ("1e4", "1e6")
        for metric in (0, 3)
    ],
    limits=[
        Limit("1e9: aioloader", "times_fresh", 3),
        *(
            Limit(f"{size}: aioloader{where}", "state_us", 20)
            for size in SIZES
            for where in ("", ", 2 workers")
        ),
    ],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
