"""CPU: how much of two cores is left for decoding pictures?

JPEGs of 500 x 375, decoded, randomly cropped, resized to 224 and stacked, 64 per batch,
with Pillow and with OpenCV. The limit is two processes that do just that and transfer
nothing. Steady state, in pictures/s.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from harness import Contender, Figures, Metric, Options, Question, Target, main
from pictures import BATCH, jpegs, picture_case
from spdl_feeds import spdl_samples, spdl_subprocesses, spdl_threads
from worker_feeds import WORKERS, aioloader_batches, steady, torch_batches

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from layouts import Case

Make = Callable[[Any], Iterable[Any]]
SECONDS = 5.0
WARM = 12
TORCH = ("torch", "torch file_system")


def decode_alone(case: Case, seconds: float, reply: Connection) -> None:
    """Decode and stack for some seconds; send batches per second."""
    torch.set_num_threads(1)
    # once such a block is freed, glibc keeps freed memory: no page faults per picture
    bytearray(24 << 20)
    dataset, stacked = case.dataset(), case.empty()
    start, batches = 0.0, -2
    while batches < 1 or time.perf_counter() < start + seconds:
        case.fill([dataset[index] for index in range(BATCH)], stacked)
        batches += 1
        if not batches:
            start = time.perf_counter()
    reply.send(batches / (time.perf_counter() - start))


def limit(case: Case, seconds: float) -> Figures:
    """Let two processes decode in parallel, with no consumer."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    crew = [
        context.Process(target=decode_alone, args=(case, seconds, send))
        for _ in range(WORKERS)
    ]
    for process in crew:
        process.start()
    rate = sum(receive.recv() for _ in crew)
    for process in crew:
        process.join()
    return {"rate": rate, "consumer_ms": 0.0}


def run(make: Make | None, decoder: str, options: Options) -> Figures:
    jpegs()
    case = picture_case(decoder)
    seconds = SECONDS / (10 if options.quick else 1)
    if make is None:
        figures = limit(case, seconds)
    else:
        figures = steady(make(case), seconds, warm=WARM)
    return figures | {"pictures": figures["rate"] * BATCH}


def contenders(decoder: str) -> dict[str, Contender]:
    shared = partial(torch_batches, sharing="file_system")
    shown: dict[str, Make | None] = {
        "limit": None,
        "aioloader": aioloader_batches,
        "aioloader threads": partial(aioloader_batches, workers="thread"),
        "torch": torch_batches,
        "torch file_system": shared,
        "SPDL threads": spdl_threads,
        "SPDL threads samples": spdl_samples,
        "SPDL pool": partial(spdl_subprocesses, recycled=True),
    }
    extra: dict[str, Make] = {
        **{f"torch ahead {n}": partial(torch_batches, ahead=n) for n in (4, 8)},
        **{f"torch file_system ahead {n}": partial(shared, ahead=n) for n in (4, 8)},
        "SPDL threads 3": partial(spdl_threads, concurrency=3),
        "SPDL threads samples 4": partial(spdl_samples, concurrency=4),
        "aioloader ahead 4": partial(aioloader_batches, prefetch_factor=4),
    }
    return {
        f"{decoder}: {name}": Contender(
            partial(run, make, decoder),
            against=f"{decoder}: limit",
            extra=name in extra,
        )
        for name, make in (shown | extra).items()
    }


QUESTION = Question(
    name="cpu",
    text="How much of two cores is left for decoding? JPEG, crop, resize to 224",
    contenders=contenders("Pillow") | contenders("OpenCV"),
    metrics=[
        Metric("pictures", "pictures/s"),
        Metric("consumer_ms", "consumer CPU ms/batch", ",.2f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=[
        Target("Pillow: aioloader", ["Pillow: limit"], 0.95),
        Target("OpenCV: aioloader", ["OpenCV: limit"], 0.9),
        Target("OpenCV: aioloader threads", [f"OpenCV: {one}" for one in TORCH], 1.3),
    ],
    rounds=5,
)

if __name__ == "__main__":
    main(QUESTION)
