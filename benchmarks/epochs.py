"""Epochs: what does it cost to start and end an epoch?

Ten batches of one int each, so that starting and ending is most of it: whole epochs in
a row, the median one. In process with ``for``, compared with torch's loader; and with
``async for``, with the loader kept open between epochs, or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import uvloop
from torch.utils.data import DataLoader, Dataset

from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = 10
EPOCHS = 400


class Numbers(Dataset[int]):
    """Samples that are their indices."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return index


class AsyncNumbers:
    """The same, read by coroutines."""

    def __len__(self) -> int:
        return BATCHES

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return index


@contextlib.contextmanager
def thread_starts() -> Iterator[list[str]]:
    """Record the names of threads as they start."""
    names: list[str] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    thread: Any = threading.Thread
    thread.start = noting
    yield names
    thread.start = start


def figures(seconds: list[float], cpu: float, started: int) -> Figures:
    return {
        "us": statistics.median(seconds) * 1e6,
        "cpu_us": cpu / len(seconds) * 1e6,
        "threads": started / len(seconds),
    }


def repeated(loader: Any, options: Options) -> Figures:
    """Iterate with ``for``, repeatedly."""
    seconds = []
    for _ in range(20):
        list(loader)
    gc.collect()
    cpu = time.process_time()
    with thread_starts() as started:
        for _ in range(EPOCHS // 10 if options.quick else EPOCHS):
            start = time.perf_counter()
            for _ in loader:
                pass
            seconds.append(time.perf_counter() - start)
    return figures(seconds, time.process_time() - cpu, len(started))


async def repeated_async(loader: Any, options: Options, *, kept: bool) -> Figures:
    """Iterate with ``async for``, repeatedly."""
    seconds = []
    async with loader if kept else contextlib.nullcontext():
        for _ in range(20):
            async for _ in loader:
                pass
        gc.collect()
        cpu = time.process_time()
        with thread_starts() as started:
            for _ in range(EPOCHS // 10 if options.quick else EPOCHS):
                start = time.perf_counter()
                async for _ in loader:
                    pass
                seconds.append(time.perf_counter() - start)
        return figures(seconds, time.process_time() - cpu, len(started))


def plain(make: Any, *, kept: bool = False) -> Contender:
    def run(options: Options) -> Figures:
        loader = make()
        with loader if kept else contextlib.nullcontext():
            return repeated(loader, options)

    return Contender(run, against="torch for")


def asynchronous(make: Any, *, kept: bool) -> Contender:
    def run(options: Options) -> Figures:
        return uvloop.run(repeated_async(make(), options, kept=kept))

    return Contender(run, against="torch for")


def ours(dataset: Any, **settings: Any) -> Any:
    def make() -> Any:
        import aioloader  # noqa: PLC0415

        return aioloader.DataLoader(dataset(), batch_size=None, **settings)

    return make


def torch_loader() -> Any:
    return DataLoader(Numbers(), batch_size=None)


def contenders() -> dict[str, Contender]:
    found = {
        "torch for": plain(torch_loader),
        "for": plain(ours(Numbers)),
        "async map, for, kept": plain(ours(AsyncNumbers), kept=True),
        "async map, for": plain(ours(AsyncNumbers)),
    }
    cases: dict[str, Any] = {
        "sync map": ours(Numbers),
        "async map": ours(AsyncNumbers),
        "async map, caller": ours(AsyncNumbers, loop="caller"),
    }
    for name, make in cases.items():
        found[f"{name}, kept"] = asynchronous(make, kept=True)
        found[name] = asynchronous(make, kept=False)
    return found


CONTENDERS = contenders()
KEPT = [name for name in CONTENDERS if name.endswith("kept")]

QUESTION = Question(
    name="epochs",
    text="What does an epoch of ten batches of one int cost?",
    contenders=CONTENDERS,
    metrics=[
        Metric("us", "us/epoch", ",.0f", higher=False),
        Metric("cpu_us", "CPU us/epoch", ",.0f", higher=False),
        Metric("threads", "threads started", ".1f", higher=False),
    ],
    targets=[Target("for", ["torch for"], 1 / 3)],
    limits=[
        *(Limit(name, "us", 600) for name in KEPT),
        *(Limit(name, "threads", 0) for name in KEPT),
    ],
    rounds=5,
)

if __name__ == "__main__":
    main(QUESTION)
