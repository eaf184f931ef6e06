"""The common part of the remote benchmarks: the objects, the clock and the check.

A feed yields the batches of an epoch over the first ``count`` objects. ``travel`` runs
three epochs: one object (the process is warm, one GET is done), a few hundred (time to
the first batch; connections open) and the measured one. Every epoch checks that each
object came exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import warnings
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meter import Meter
from server import HEADER_BYTES, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness import Figures

OBJECT_BYTES = 102_400
LATENCY = 0.03
BATCH = 64
Batches = Iterable[torch.Tensor] | AsyncIterable[torch.Tensor]
Feed = Callable[[int], Batches]
MakeFeed = Callable[[str], AbstractContextManager[Feed]]
# bodies are read-only buffers; nobody writes to the tensors over them
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True)
class Plan:
    """How many objects the opening and the measured epoch have, and the step."""

    opening: int
    measured: int
    step: float = 0.0


@dataclass
class Trip:
    """One epoch: seconds to the first batch, in all, and spent waiting for data."""

    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    wall: float = 0.0
    waited: float = 0.0
    keys: list[torch.Tensor] = field(default_factory=list)

    def arrived(self, batch: torch.Tensor, asked: float, step: float) -> float:
        """Record a batch and do the blocking step; return when it ends."""
        now = time.perf_counter()
        self.first = self.first or now - self.start
        self.waited += now - asked
        header = batch[:, :HEADER_BYTES].contiguous()
        self.keys.append(header.view(torch.int64).flatten())
        if step:
            time.sleep(step)
        return time.perf_counter()

    def finish(self, asked: float, count: int) -> None:
        """Stop the clock and check that each object came exactly once."""
        now = time.perf_counter()
        self.waited += now - asked
        self.wall = now - self.start
        check(torch.cat(self.keys).tolist(), count)


def check(keys: Sequence[int], count: int) -> None:
    if sorted(keys) != list(range(count)):
        raise RuntimeError(f"{len(set(keys))} objects seen, {count} expected")


def drain(batches: Iterable[torch.Tensor], count: int, step: float) -> Trip:
    trip = Trip()
    asked = trip.start
    for batch in batches:
        asked = trip.arrived(batch, asked, step)
    trip.finish(asked, count)
    return trip


async def adrain(batches: AsyncIterable[torch.Tensor], count: int, step: float) -> Trip:
    trip = Trip()
    asked = trip.start
    async for batch in batches:
        # the step blocks the loop: that is what is measured
        asked = trip.arrived(batch, asked, step)
    trip.finish(asked, count)
    return trip


def settle() -> None:
    """Collect garbage now: a full collection after imports pauses 100 ms at random."""
    gc.collect()


def epoch(feed: Feed, count: int, step: float = 0.0) -> Trip:
    """Run one epoch, under asyncio's own loop if the feed is asynchronous."""
    batches = feed(count)
    if isinstance(batches, AsyncIterable):
        return asyncio.run(adrain(batches, count, step))
    return drain(batches, count, step)


def travel(make: MakeFeed, plan: Plan, url: str) -> Figures:
    """Run a feed through its three epochs; return the figures of the last."""
    with make(url) as feed:
        epoch(feed, 1)
        settle()
        opening = epoch(feed, plan.opening)
        settle()
        with Meter() as meter:
            trip = epoch(feed, plan.measured, plan.step)
    return {
        **rates(plan.measured, meter, opening.first, trip.first),
        "wall": trip.wall,
        "waited": trip.waited / trip.wall,
        "objects": plan.measured / trip.wall,
    }


def rates(count: int, meter: Meter, opening: float, warm: float) -> Figures:
    """Return the figures common to both kinds of contender, including threads' CPU."""
    threads = {
        f"cpu:{name}": seconds / count * 1e6
        for name, seconds in meter.threads.items()
        if seconds / count > 1e-6
    }
    return {
        "objects": count / meter.wall,
        "first": opening / LATENCY,
        "first_warm": warm / LATENCY,
        "cpu": meter.cpu / count * 1e6,
        **threads,
    }


def stack(bodies: Sequence[Any], batch: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the bodies into the rows of ``batch``, by default a new uint8 tensor."""
    if batch is None:
        batch = torch.empty((len(bodies), OBJECT_BYTES), dtype=torch.uint8)
    rows = batch.numpy()
    for row, body in enumerate(bodies):
        rows[row] = np.frombuffer(body, dtype=np.uint8)
    return batch


@contextlib.contextmanager
def serve(objects: int) -> Iterator[str]:
    """Run the object server during the rounds."""
    with ServerProcess(objects, OBJECT_BYTES, LATENCY) as server:
        yield server.url
