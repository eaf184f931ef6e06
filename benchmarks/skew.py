"""Skew: what do a few expensive samples cost when batches come in order?

One sample in twenty takes ten times the CPU of the others, spread at random or all in
one stretch. An epoch of 200 batches of 16, two workers that are already running. The
figure is the efficiency: half of the work, measured inline, over the wall time.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from harness import Contender, Figures, Limit, Metric, Options, Question, main
from layouts import Window
from spdl_feeds import iterate, spdl_pipeline
from worker_feeds import WORKERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.sharedctypes import Synchronized

BATCH = 16
BATCHES = 200
WARM = 4 * BATCH
CHEAP, DEAR = 0.001, 0.01
KINDS = ("spread", "together")
AHEADS = (2, 4, 8, 16)
# makes a loader from a dataset and a window of its indices
Make = Callable[[Any, Window], Iterable[torch.Tensor]]


class Skewed(Dataset[int]):
    """Samples that cost CPU time of the thread that reads them; the first are cheap."""

    def __init__(self, kind: str, batches: int) -> None:
        samples = batches * BATCH
        self.dear = samples // 20
        if kind == "spread":
            dear = random.Random(0).sample(range(samples), self.dear)
        else:
            # not at a batch's edge
            dear = list(range(samples // 2 + 5, samples // 2 + 5 + self.dear))
        self.costs = [CHEAP] * (WARM + samples)
        for index in dear:
            self.costs[WARM + index] = DEAR

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + self.costs[index]
        while time.thread_time() < end:
            pass
        return index


def inline_seconds(dataset: Skewed) -> float:
    """Measure the CPU time of all samples but the first: of a few, then scaled up."""
    indices = {cost: dataset.costs.index(cost, WARM) for cost in (CHEAP, DEAR)}
    counts = {DEAR: dataset.dear, CHEAP: len(dataset) - WARM - dataset.dear}
    total = 0.0
    for cost, index in indices.items():
        repeats = round(0.1 / cost)
        start = time.process_time()
        for _ in range(repeats):
            dataset[index]
        total += (time.process_time() - start) / repeats * counts[cost]
    return total


def bare_worker(dataset: Skewed, window: Window, next_up: Synchronized[int]) -> None:
    while True:
        with next_up.get_lock():
            start = next_up.value
            next_up.value += BATCH
        if start >= window.stop:
            return
        for index in range(start, start + BATCH):
            dataset[index]


class Bare:
    """The limit: two processes that take the next batch when they are free.

    They are started at each ``iter`` and transfer nothing.
    """

    def __init__(self, dataset: Skewed, window: Window) -> None:
        self._dataset, self._window = dataset, window

    def __iter__(self) -> Iterator[torch.Tensor]:
        context = multiprocessing.get_context("fork")
        next_up = context.Value("l", self._window.start)
        work = self._dataset, self._window, next_up
        crew = [context.Process(target=bare_worker, args=work) for _ in range(WORKERS)]
        for process in crew:
            process.start()
        for process in crew:
            process.join()
        yield torch.arange(self._window.start, self._window.stop)


def torch_loader(
    dataset: Skewed, window: Window, *, ahead: int
) -> Iterable[torch.Tensor]:
    return DataLoader(
        dataset,
        BATCH,
        sampler=window,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=ahead,
        multiprocessing_context="fork",
    )


def ours(dataset: Skewed, window: Window, **settings: Any) -> Iterable[torch.Tensor]:
    import aioloader  # noqa: PLC0415

    loader: Iterable[torch.Tensor] = aioloader.DataLoader(
        dataset,
        BATCH,
        sampler=window,
        num_workers=WORKERS,
        persistent_workers=True,
        **settings,
    )
    return loader


class SpdlPool:
    """SPDL's ordered stage over a process pool: the free worker takes the next batch.

    ``ahead`` batches per worker are in progress, as many as the stage lets overtake.
    """

    def __init__(
        self, dataset: Skewed, window: Window, *, ahead: int, workers: int = WORKERS
    ) -> None:
        self._window, self._ahead, self._workers = window, ahead, workers
        self._executor = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("fork"),
            initializer=set_dataset,
            initargs=(dataset,),
        )

    def __iter__(self) -> Iterator[Any]:
        offsets = range(self._window.start, self._window.stop, BATCH)
        return iterate(
            spdl_pipeline(
                offsets,
                load_batch,
                concurrency=self._workers * self._ahead,
                executor=self._executor,
            )
        )

    def close(self) -> None:
        """End the pool's processes."""
        self._executor.shutdown()


_DATASET: list[Skewed] = []


def set_dataset(dataset: Skewed) -> None:
    _DATASET.append(dataset)


def load_batch(start: int) -> Any:
    dataset = _DATASET[0]
    return default_collate([dataset[i] for i in range(start, start + BATCH)]).numpy()


def run(make: Make, kind: str, options: Options) -> Figures:
    """Time one epoch, after a short one of cheap samples that starts the workers."""
    dataset = Skewed(kind, BATCHES // (5 if options.quick else 1))
    work = inline_seconds(dataset)
    window = Window(0, WARM)
    loader = make(dataset, window)
    for _ in loader:
        pass
    window.start, window.stop = WARM, len(dataset)
    gc.collect()
    start = time.perf_counter()
    seen = [index for batch in loader for index in batch.tolist()]
    wall = time.perf_counter() - start
    if close := getattr(loader, "close", None):
        close()
    if seen != list(window):
        raise RuntimeError("samples are missing or out of order")
    efficiency = work / WORKERS / wall
    return {
        "efficiency": efficiency,
        "lost": 1 - efficiency,
        "wall": wall,
        "work": work,
    }


def contenders(kind: str) -> dict[str, Contender]:
    makes: dict[str, Make] = {
        "limit": Bare,
        "aioloader": ours,
        **{f"torch ahead {n}": partial(torch_loader, ahead=n) for n in AHEADS},
        **{f"SPDL pool ahead {n}": partial(SpdlPool, ahead=n) for n in (2, 8)},
    }
    extra: dict[str, Make] = {
        f"aioloader ahead {n}": partial(ours, prefetch_factor=n) for n in (4, 8)
    }
    return {
        f"{kind}: {name}": Contender(
            partial(run, make, kind), against=f"{kind}: limit", extra=name in extra
        )
        for name, make in (makes | extra).items()
    }


QUESTION = Question(
    name="skew",
    text="What do dear samples cost? 5 % cost ten times as much; in order, 2 workers",
    contenders=contenders("spread") | contenders("together"),
    metrics=[
        Metric("efficiency", "efficiency", ".3f"),
        Metric("wall", "wall s", ".2f", higher=False),
        Metric("work", "work s", ".2f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    limits=[Limit(f"{kind}: aioloader", "lost", 0.1) for kind in KINDS],
    rounds=5,
)

if __name__ == "__main__":
    main(QUESTION)
