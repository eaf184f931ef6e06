"""SPDL's ways through processes and threads, each at the best setting found.

Threads run whole batches into recycled memory, on uvloop, without hooks and statistics.
Subprocesses take turns, so batches come in order, each with a separate arena.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop
from torch.utils.data import default_collate

from worker_feeds import WORKERS, as_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from layouts import Case


class SpdlShare:
    """Every second batch, as one of SPDL's subprocesses makes it.

    Args:
        case: What to load.
        number: Which share: 0 or 1.
        recycled: Collate into one batch that is used again; SPDL copies it out at once.
        arrays: Give numpy arrays, which pickle faster than tensors do.
    """

    def __init__(
        self, case: Case, number: int, *, recycled: bool = False, arrays: bool = False
    ) -> None:
        self._case, self._number = case, number
        self._recycled, self._arrays = recycled, arrays

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        case, dataset = self._case, self._case.dataset()
        reused = case.empty()
        first = self._number * case.batch
        for at in itertools.count(first, WORKERS * case.batch):
            samples = [dataset[index] for index in range(at, at + case.batch)]
            if self._recycled:
                case.fill(samples, reused)
                yield reused
            else:
                yield case.arrays(samples) if self._arrays else default_collate(samples)

    def __call__(self) -> SpdlShare:
        """The function that SPDL calls in its subprocess."""
        return self


def spdl_subprocesses(
    case: Case, arena: str = "pool", *, slots: int = 8, **share: Any
) -> Iterator[Any]:
    """Alternate between two SPDL subprocesses, each sending through an arena.

    Args:
        case: What to load.
        arena: ``"pool"`` for segments without a copy out, ``"ring"``, or ``""``.
        slots: Batches an arena holds, and one less wait in the queue.
        **share: Settings of ``SpdlShare``.
    """
    from spdl.pipeline import (  # noqa: PLC0415
        SharedMemoryRingBuffer,
        SharedMemorySegmentPool,
        iterate_in_subprocess,
    )

    start_tracker_muted()
    size = sum(one.nbytes + 64 for one in case.empty())
    arenas = {
        "pool": lambda: SharedMemorySegmentPool(size, slots),
        "ring": lambda: SharedMemoryRingBuffer(size * slots),
        "": lambda: None,
    }
    feeds = [
        iter(
            iterate_in_subprocess(
                SpdlShare(case, number, **share),
                buffer_size=slots - 1,
                mp_context="fork",
                arena=arenas[arena](),
            )
        )
        for number in range(WORKERS)
    ]
    batches = (next(feed) for feed in itertools.cycle(feeds))
    return map(as_tensors, batches) if share.get("arrays") else batches


def start_tracker_muted() -> None:
    """Start the tracker of shared memory without an error stream.

    At its end SPDL deregisters each segment more than once, and the tracker of Python
    3.11 prints a traceback every time.
    """
    stream = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
    resource_tracker.ensure_running()
    os.dup2(stream, 2)
    os.close(stream)


def spdl_loader(case: Case, *, ahead: int = 2) -> Iterable[Any]:
    """Build SPDL's loader after torch's: a process pool that a pipeline feeds."""
    from spdl.dataloader import get_pytorch_dataloader  # noqa: PLC0415

    return get_pytorch_dataloader(
        case.dataset(),
        case.batch,
        num_workers=WORKERS,
        prefetch_factor=ahead,
        multiprocessing_context="fork",
        in_order=True,
    )


def spdl_pipeline(
    source: Iterable[Any],
    *stages: Callable[[Any], Any] | int,
    concurrency: int = WORKERS,
    executor: Executor | None = None,
) -> Any:
    """Build an SPDL pipeline of threads without the hooks and statistics it can omit.

    A stage that is an int aggregates so many items; functions run in threads, or in
    the executor.
    """
    from spdl.pipeline import AsyncQueue, PipelineBuilder  # noqa: PLC0415

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    builder: Any = PipelineBuilder().add_source(source)
    for stage in stages:
        if isinstance(stage, int):
            builder.aggregate(stage)
        else:
            builder.pipe(
                stage,
                concurrency=concurrency,
                output_order="input",
                executor=executor,
            )
    return builder.add_sink(2).build(
        num_threads=concurrency,
        task_hook_factory=no_hooks,
        queue_class=AsyncQueue,
        use_thread_output_queue=True,
    )


def no_hooks(_: object) -> list[Any]:
    return []


def iterate(pipeline: Any) -> Iterator[Any]:
    """Run a pipeline while it is iterated."""
    with pipeline.auto_stop():
        yield from pipeline


class Ring:
    """Collate into batches used in turn, more than a pipeline has under way."""

    def __init__(self, case: Case, size: int = 10) -> None:
        self._fill = case.fill
        self._ring = deque(case.empty() for _ in range(size))

    def __call__(self, samples: list[Any]) -> Sequence[torch.Tensor]:
        """Fill the batch that was used longest ago."""
        views = self._ring.popleft()
        self._ring.append(views)
        self._fill(samples, views)
        return views


def spdl_samples(case: Case, concurrency: int = WORKERS) -> Iterator[Any]:
    """Take batches of samples that SPDL's threads read one by one."""
    dataset = case.dataset()
    stages = dataset.__getitem__, case.batch, Ring(case)
    return iterate(spdl_pipeline(range(len(dataset)), *stages, concurrency=concurrency))


def spdl_threads(case: Case, concurrency: int = WORKERS) -> Iterator[Any]:
    """Take whole batches from SPDL's threads, collated into recycled memory."""
    dataset, ring = case.dataset(), Ring(case)
    dataset[0]

    def load(at: int) -> Sequence[torch.Tensor]:
        return ring([dataset[index] for index in range(at, at + case.batch)])

    offsets = range(0, len(dataset), case.batch)
    return iterate(spdl_pipeline(offsets, load, concurrency=concurrency))
