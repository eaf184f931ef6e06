"""Device: how fast do batches reach the GPU, and how long does a training step wait?

Batches of 256 pictures, ``uint8[3, 224, 224]``, 38.5 MB, ready in the workers. First
bytes per second against a bare loop of pinned copies; then a training loop against the
same steps on a batch that stays on the device. Without CUDA it only prints that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from device_feeds import (
    aioloader_feed,
    bare_copies,
    picture_case,
    spdl_feed,
    torch_feed,
    torch_prefetched,
)
from device_step import Step
from harness import (
    Contender,
    Figures,
    Limit,
    Metric,
    Options,
    Question,
    Target,
    choose,
    main,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from layouts import Case

Feed = Callable[["Case", torch.device], Iterable[Any]]
CORES = len(os.sched_getaffinity(0))
MANY = max(2, min(8, CORES - 2))
SOME = max(2, min(4, CORES - 2))
SECONDS = 2.0
COUNT = 40  # steps that are timed
# Batches ready in slots before they are taken together, and how many of them may have
# been moved already.
READY, AHEAD = 32, 4
BURSTS = 5


class Clock:
    """Marks on the device's current stream; on the host's clock where that is the CPU.

    Args:
        device: The device to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Mark the current end of the stream's work."""
        if not self._is_cuda:
            return time.perf_counter()
        mark: Any = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, blocking=True
        )
        mark.record()
        return mark

    def wait(self, mark: Any) -> None:
        """Sleep until the device has reached a mark."""
        if self._is_cuda:
            mark.synchronize()

    def ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks, on the device."""
        if self._is_cuda:
            self.wait(end)
            return float(start.elapsed_time(end))
        return float(end - start) * 1e3


class Taker:
    """Takes batches, never more than two ahead of the device; records the cost.

    Attributes:
        starts: When each batch was on the device.
        ends: When its step ended.
        asked: Seconds that the host spent in ``next``.
    """

    def __init__(self, feed: Iterable[Any], clock: Clock) -> None:
        self._batches = iter(feed)
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.asked = 0.0
        self._cpu = time.process_time()

    def take(self, step: Callable[[Any], object] | None = None) -> None:
        """Take a batch, and do a step on it."""
        began = time.perf_counter()
        batch = next(self._batches)
        self.asked += time.perf_counter() - began
        self.starts.append(self._clock.mark())
        if step is not None:
            step(batch)
        self.ends.append(self._clock.mark())
        if len(self.ends) > 2:
            self._clock.wait(self.ends[-3])

    def figures(self) -> Figures:
        """Return milliseconds per batch: of wall, of waits on both sides, of CPU."""
        cpu, count = time.process_time() - self._cpu, len(self.ends) - 1
        wall = self._clock.ms(self.ends[0], self.ends[-1]) / count
        gaps = map(self._clock.ms, self.ends, self.starts[1:])
        return {
            "batch_ms": wall,
            "rate": 1e3 / wall,
            "exposed_ms": sum(gaps) / count,
            "next_ms": self.asked / (count + 1) * 1e3,
            "cpu_ms": cpu / (count + 1) * 1e3,
        }


def with_bytes(figures: Figures, case: Case) -> Figures:
    """Add the gigabytes per second."""
    nbytes = sum(view.nbytes for view in case.empty())
    return figures | {"gb": figures["rate"] * nbytes / 1e9}


def flow(feed: Feed, options: Options, case: Case, device: torch.device) -> Figures:
    """Take batches for some seconds and do nothing with them."""
    taker = Taker(feed(case, device), Clock(device))
    for _ in range(8 if options.quick else 40):
        taker.take()
    taker.forget()
    end = time.perf_counter() + SECONDS / (4 if options.quick else 1)
    while time.perf_counter() < end or len(taker.ends) < 3:
        taker.take()
    return with_bytes(taker.figures(), case)


def bursts(feed: Feed, options: Options, case: Case, device: torch.device) -> Figures:
    """Let slots fill up, and take them together: the transfer, without the workers."""
    taker = Taker(feed(case, device), Clock(device))
    found = []
    for number in range(2 if options.quick else BURSTS + 3):
        for _ in range(AHEAD):
            taker.take()
        taker.forget()
        for _ in range(READY - 2 * AHEAD):
            taker.take()
        found.append((number, taker.figures()))
        time.sleep(0.4)  # the workers go on until all is full
    kept = [figures for number, figures in found if number > 2 or options.quick]
    middle = {key: statistics.median(one[key] for one in kept) for key in kept[0]}
    return with_bytes(middle, case)


def train(feed: Feed, options: Options, case: Case, device: torch.device) -> Figures:
    """Do steps on the batches of a feed, between steps on one that stays."""
    step, clock = Step(device, int(options.url or 1)), Clock(device)
    count = 5 if options.quick else COUNT
    resident = [view.random_(0, 7).to(device) for view in case.empty()]
    alone = Taker(itertools.repeat(resident), clock)
    rests = [repeat(alone, step, count // 2)]
    found = repeat(Taker(feed(case, device), clock), step, count)
    rests.append(repeat(alone, step, count // 2))
    rest = {key: statistics.mean(one[key] for one in rests) for key in rests[0]}
    return with_bytes(found, case) | {
        "compute_ms": rest["batch_ms"],
        "over": found["batch_ms"] / rest["batch_ms"],
        "exposed": found["exposed_ms"] / found["batch_ms"],
        # the cost of the steps themselves is not the loader's; a clock tick is the
        # least
        "loader_cpu_ms": max(0.01, found["cpu_ms"] - rest["cpu_ms"]),
    }


def repeat(taker: Taker, step: Step, count: int) -> Figures:
    """Do steps, after some that warm up."""
    for _ in range(5):
        taker.take(step)
    taker.forget()
    for _ in range(count):
        taker.take(step)
    return taker.figures()


@contextlib.contextmanager
def sized_step() -> Iterator[str]:
    """Size the step once, in a separate process."""
    script = Path(__file__).parent / "device_step.py"
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    yield done.stdout.split()[-1]


def contender(
    measure: Callable[..., Figures], feed: Feed, against: str, **settings: Any
) -> Contender:
    def run(options: Options) -> Figures:
        torch.set_num_threads(1)
        device = torch.device("cuda", 0)
        return measure(feed, options, picture_case(), device)

    return Contender(run, against, **settings)


def ready(workers: int) -> Feed:
    """Give workers enough slots for ``READY`` batches."""
    ahead = -(-READY // workers)
    return partial(aioloader_feed, num_workers=workers, prefetch_factor=ahead)


def bytes_contenders() -> dict[str, Contender]:
    ways: dict[str, Feed] = {"bare": bare_copies}
    for count in sorted({2, MANY}):
        ways[f"aioloader {count}"] = partial(aioloader_feed, num_workers=count)
        # the workers' rate for a consumer in the host's memory
        ways[f"aioloader {count} host"] = partial(
            aioloader_feed, num_workers=count, moves=False
        )
    ways[f"torch {MANY}"] = partial(torch_feed, num_workers=MANY)
    shown = {
        name: contender(flow, feed, "bare", max_rounds=1 if "host" in name else 100)
        for name, feed in ways.items()
    }
    return shown | {"aioloader ready": contender(bursts, ready(MANY), "bare")}


def step_contenders() -> dict[str, Contender]:
    shown: dict[str, Feed] = {
        "aioloader": partial(aioloader_feed, num_workers=SOME),
        "torch": partial(torch_feed, num_workers=SOME),
        "torch prefetcher": partial(torch_prefetched, num_workers=SOME),
    }
    if find_spec("spdl") is not None:
        shown["SPDL"] = partial(spdl_feed, num_workers=SOME)
    extra: dict[str, Feed] = {
        "aioloader threads": partial(
            aioloader_feed, num_workers=SOME, workers="thread"
        ),
        "aioloader ahead 2": partial(aioloader_feed, num_workers=SOME, ahead=2),
        "torch ahead 4": partial(torch_feed, num_workers=SOME, ahead=4),
        "torch prefetcher ahead 4": partial(
            torch_prefetched, num_workers=SOME, ahead=4
        ),
        "SPDL pool": partial(spdl_feed, num_workers=SOME, processes=True),
    }
    return {
        name: contender(train, feed, "torch", extra=name in extra)
        for name, feed in (shown | extra).items()
    }


METRICS = [
    Metric("rate", "batches/s", ",.1f"),
    Metric("gb", "GB/s", ",.2f"),
    Metric("cpu_ms", "CPU ms/batch", ",.3f", higher=False),
    Metric("next_ms", "ms in next()", ",.3f", higher=False),
]

BYTES = Question(
    name="device",
    text="How many bytes get to the GPU? 38.5 MB batches, ready in the workers",
    contenders=bytes_contenders(),
    metrics=METRICS,
    targets=[Target("aioloader ready", ["bare"], 0.95)],
    rounds=3,
)

STEPS = Question(
    name="device-step",
    text="What does a training step wait for its batch? 38.5 MB, about 60 ms a step",
    contenders=step_contenders(),
    metrics=[
        Metric("batch_ms", "ms/step", ",.2f", higher=False),
        Metric("over", "x compute only", ",.4f", higher=False),
        Metric("exposed_ms", "exposed ms", ",.3f", higher=False),
        Metric("next_ms", "ms in next()", ",.3f", higher=False),
        Metric("loader_cpu_ms", "loader's CPU ms", ",.2f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=[
        Target("aioloader", ["torch", "torch prefetcher"], 5, metric=4),
    ],
    limits=[
        Limit("aioloader", "over", 1.02),
        Limit("aioloader", "exposed", 0.02),
    ],
    rounds=3,
    serve=sized_step,
)


def asked() -> list[Question]:
    """Return the questions selected on the command line."""
    questions = [BYTES, STEPS]
    args = parse(BYTES)
    if args.contender:
        return [one for one in questions if args.contender in one.contenders]
    return [one for one in questions if choose(one, args)]


if __name__ == "__main__":
    if torch.cuda.is_available():
        for question in asked():
            main(question)
    else:
        print(
            f"device.py needs a CUDA device, and torch {torch.__version__} sees none "
            "here: nothing was measured"
        )
