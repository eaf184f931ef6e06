"""Crossover: above which sample size, cost and latency is which loader faster?

Samples per second at some points of three axes, the consumer with one torch thread. The
points where two curves meet are computed by ``results_page.py``. Bytes: samples in
memory, batches of 64, every byte read by the consumer. Cost: CPU time per sample in the
thread that reads it, batches of 16. Latency: each sample is waited for, batches of 16,
256 at a time; torch waits in 8 or 32 workers, or gathers a batch in each of 8.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import uvloop
from torch.utils.data import DataLoader

from harness import Question
from layouts import Case, Ready, fill_images
from points import (
    ENDLESS,
    Awaited,
    Costly,
    Dataset,
    Gathered,
    Slept,
    contenders,
    main_of,
    metrics,
)
from skew import SpdlPool, Window
from spdl_feeds import iterate, no_hooks, spdl_subprocesses
from worker_feeds import aioloader_batches, torch_batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BYTES = (64, 1_024, 16_384, 131_072, 1_048_576)
COSTS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
LATENCIES = (0.0, 1e-4, 1e-3, 1e-2, 5e-2)
BATCH = 16
FLIGHTS = 256
WORKERS = 2


class Rows(Ready):
    """Rows of one tensor in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.distinct = max(64, min(4_096, (64 << 20) // size))
        self._size = size

    def _make(self, generator: torch.Generator) -> torch.Tensor:
        shape = (self.distinct, self._size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def case_of(size: float) -> Case:
    layout = [((64, int(size)), torch.uint8)]
    return Case("bytes", partial(Rows, int(size)), 64, layout, fill_images)


def read_all(batch: Any) -> int:
    """Add up a batch in words of eight bytes."""
    rows = batch if isinstance(batch, torch.Tensor) else batch[0]
    return int(rows.view(torch.int64).sum())


class First:
    """The tensor alone of SPDL's batches of one."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        """Begin."""
        return (b if isinstance(b, torch.Tensor) else b[0] for b in self._batches)


BY_BYTES = {
    "aioloader 2 workers": lambda n: aioloader_batches(case_of(n)),
    "aioloader 2 threads": lambda n: aioloader_batches(case_of(n), workers="thread"),
    "aioloader no workers": lambda n: aioloader_batches(
        case_of(n), num_workers=0, persistent_workers=False
    ),
    "torch 2 workers": lambda n: torch_batches(case_of(n)),
    "torch no workers": lambda n: torch_batches(case_of(n), workers=0),
    "SPDL pool recycled": lambda n: First(spdl_subprocesses(case_of(n), recycled=True)),
    "SPDL pickled arrays": lambda n: First(
        spdl_subprocesses(case_of(n), arena="", slots=16, arrays=True)
    ),
}


def ours(dataset: Any, **settings: Any) -> Any:
    import aioloader  # noqa: PLC0415

    return aioloader.DataLoader(dataset, BATCH, **settings)


def torchs(dataset: Dataset[int], workers: int) -> Any:
    return DataLoader(dataset, BATCH, num_workers=workers)


class SpdlWorkers:
    """SPDL's process pool behind an ordered stage, eight batches ahead of each."""

    def __init__(
        self, seconds: float, workers: int = WORKERS, kind: type[Costly] = Costly
    ) -> None:
        dataset: Any = kind(seconds)
        window = Window(0, ENDLESS)
        self._pool = SpdlPool(dataset, window, ahead=8, workers=workers)
        self.close = self._pool.close

    def __iter__(self) -> Any:
        """Begin."""
        return iter(self._pool)


class SpdlAwaits:
    """SPDL's pipeline of coroutines, with all optional features off."""

    def __init__(self, seconds: float, concurrency: int = FLIGHTS) -> None:
        self._dataset, self._concurrency = Awaited(seconds), concurrency

    def __iter__(self) -> Any:
        """Begin."""
        from spdl.pipeline import AsyncQueue, PipelineBuilder  # noqa: PLC0415

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

        async def source() -> AsyncIterator[int]:
            for index in range(ENDLESS):
                yield index

        builder: Any = PipelineBuilder().add_source(source())
        builder.pipe(
            self._dataset.__getitem__,
            concurrency=self._concurrency,
            output_order="input",
        )
        builder.aggregate(BATCH).pipe(torch.tensor).add_sink(4)
        return iterate(
            builder.build(
                num_threads=1,
                task_hook_factory=no_hooks,
                queue_class=AsyncQueue,
                use_thread_output_queue=True,
            )
        )


BY_COST = {
    "aioloader 2 workers": lambda s: ours(Costly(s), num_workers=WORKERS),
    "aioloader no workers": lambda s: ours(Costly(s)),
    "torch 2 workers": lambda s: torchs(Costly(s), WORKERS),
    "torch no workers": lambda s: torchs(Costly(s), 0),
    "SPDL pool": SpdlWorkers,
}
BY_LATENCY = {
    "aioloader": lambda s: ours(Awaited(s), concurrency=FLIGHTS),
    "torch 8 workers": lambda s: torchs(Slept(s), 8),
    "torch 32 workers": lambda s: torchs(Slept(s), 32),
    "torch gather 8 workers": lambda s: torchs(Gathered(s), 8),
    "torch no workers": lambda s: torchs(Slept(s), 0),
    "SPDL": SpdlAwaits,
}

QUESTIONS = [
    Question(
        name="crossover_bytes",
        text="From which sample size on is a loader the faster? Samples/s by bytes",
        contenders=contenders("bytes", BY_BYTES, BYTES, read=read_all),
        metrics=metrics(BYTES),
        axis="bytes per sample",
        rounds=3,
    ),
    Question(
        name="crossover_cost",
        text="From which cost of a sample on? Samples/s by CPU seconds of a sample",
        contenders=contenders("cost", BY_COST, COSTS),
        metrics=metrics(COSTS),
        axis="CPU seconds per sample",
        rounds=3,
    ),
    Question(
        name="crossover_latency",
        text="From which latency of a sample on? Samples/s by seconds waited for each",
        contenders=contenders("latency", BY_LATENCY, LATENCIES),
        metrics=metrics(LATENCIES),
        axis="seconds of latency per sample",
        rounds=3,
    ),
]

if __name__ == "__main__":
    main_of(QUESTIONS)
