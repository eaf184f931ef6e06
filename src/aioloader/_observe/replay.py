"""Simulate a loader with the recorded batches under another setting.

The recorded batches are replayed with their recorded durations, again and again from
first to last. Assumptions:

- A store is as fast when more samples are read at a time, and a batch takes as long in
  a worker as in the consumer's process. Its transport from a worker is as recorded; for
  batches made without workers, ``changes`` adds that of a small batch.
- Processor time is shared by as many lanes as there are cores; worker threads share
  one, because of the GIL. If records show that the consumer waits for the GIL
  (``lock``), it does so whenever threads make batches, after each step and each wait.
  The consumer's own processor time is not known, and not modelled.
- If coroutines read, all samples of a batch but one take equally long. Readers in
  several workers are one pool. If coroutines transform, all samples take equally long.
- Transport is a delay; the part before a worker starts its next batch keeps that worker
  busy. Batches are copied to a device one after another.
- A batch is requested when another is delivered; with a window of 0, on demand.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import NamedTuple

from aioloader._observe.batches import Batch
from aioloader._observe.lock import is_shared, processors
from aioloader._observe.records import Setting
from aioloader._observe.simulation import Process, Simulation
from aioloader._observe.stages import (
    is_coupled,
    making_lanes,
    reading_lanes,
    transforming_lanes,
)

# Limit on warm-up batches, before the clock counts.
_MOST = 256
# Samples of one batch that are simulated one by one; more are grouped.
_SAMPLES = 16


class Replayed(NamedTuple):
    """The consumer's figures once the pipeline is full.

    Attributes:
        seconds: Seconds per batch.
        step: Seconds per batch that the consumer itself needs.
    """

    seconds: float
    step: float

    @property
    def waited(self) -> float:
        """Seconds per batch that the consumer waits."""
        return max(0.0, self.seconds - self.step)

    @property
    def wait_share(self) -> float:
        """Share of the time that the consumer waits, from 0 to 1."""
        return self.waited / self.seconds if self.seconds else 0.0


def window_of(setting: Setting, batches: Sequence[Batch]) -> int:
    """Return how many batches may be requested and not delivered."""
    if setting.window is not None:
        return max(1, setting.window)
    sizes = (max(one.reads, one.samples) for one in batches)
    size = setting.batch_size or mean(sizes)
    readers = max(1, setting.workers)
    samples = setting.concurrency * readers
    return math.ceil(samples / max(1, size)) + 3 * readers + setting.on_device


def replay(
    batches: Sequence[Batch], setting: Setting, slow: Sequence[float] = ()
) -> Replayed:
    """Replay the batches under a setting; return the consumer's figures.

    Args:
        batches: The durations of batches.
        setting: The loader's setting.
        slow: How many times longer each worker takes; 1 for workers not listed.

    Raises:
        ValueError: If there are no batches.
    """
    if not batches:
        raise ValueError("there are no batches to replay")
    step = mean(one.step for one in batches)
    if setting.place == "inline":
        making = mean(one.read + one.make + one.transport for one in batches)
        return Replayed(step + making, step)
    window = window_of(setting, batches)
    lanes = making_lanes(setting)
    passes = math.ceil(32 / len(batches))
    ahead = min(_MOST, 2 * window + lanes + 16)
    pipeline = _Pipeline(batches, setting, window, slow)
    taken = pipeline.run(ahead + passes * len(batches) + 1)
    return Replayed((taken[-1] - taken[ahead]) / (len(taken) - 1 - ahead), step)


def replay_again(
    batches: Sequence[Batch],
    setting: Setting,
    slow: Sequence[float],
    first: int,
) -> float:
    """Return the pace of an epoch that is replayed from its start.

    Batches may come in bursts for long after the start, if many are requested ahead.

    Args:
        batches: The durations of all of its batches.
        setting: The loader's setting.
        slow: How many times longer each worker takes.
        first: The batches before this one do not count.
    """
    if setting.place == "inline":
        return replay(batches, setting, slow).seconds
    pipeline = _Pipeline(batches, setting, window_of(setting, batches), slow)
    return pace(pipeline.run(len(batches) + 1)[first:])


def pace(taken: Sequence[float]) -> float:
    """Return the seconds per batch, also if batches come in bursts.

    It is the time between the middles of both halves.
    """
    half = len(taken) // 2
    if not half:
        return 0.0
    return (mean(taken[-half:]) - mean(taken[:half])) / (len(taken) - half)


class _Pipeline:
    """The pipeline as processes of a simulation."""

    def __init__(
        self,
        batches: Sequence[Batch],
        setting: Setting,
        window: int,
        slow: Sequence[float],
    ) -> None:
        self._batches, self._setting, self._window = batches, setting, window
        self._is_lazy = setting.window == 0
        clock = self._clock = Simulation()
        self._processors = clock.lanes(processors(setting))
        self._locks = is_shared(setting) and any(one.locked for one in batches)
        self._lock = clock.lanes(1)  # the GIL
        self._makers = clock.lanes(making_lanes(setting))
        factors = [*slow, *(1.0,) * making_lanes(setting)][: making_lanes(setting)]
        self._free = deque(factors)  # slowness of idle makers
        reads = median(one.reads for one in batches)
        self._readers = _Coroutines(clock, reading_lanes(setting), int(reads))
        samples = median(one.samples for one in batches)
        transforming = transforming_lanes(setting)
        self._transformers = _Coroutines(clock, transforming, int(samples))
        self._made: dict[int, Batch] = {}
        self._delivered = 0
        self._there = clock.lanes(0)  # batches that the consumer can take
        self._ready: deque[Batch] = deque()  # batches that can be moved to the device
        self._to_move = clock.lanes(0)
        self._room = clock.lanes(setting.on_device)
        self._taken: list[float] = []

    def run(self, batches: int) -> list[float]:
        """Return when the consumer took each of the batches."""
        if not self._is_lazy:
            for number in range(self._window):
                self._clock.start(self._make(number))
        if self._setting.on_device:
            self._clock.start(self._move())
        self._clock.run(self._consume(batches))
        return self._taken

    def _at(self, number: int) -> Batch:
        return self._batches[number % len(self._batches)]

    def _consume(self, batches: int) -> Process:
        for number in range(batches):
            if self._is_lazy:
                self._clock.start(self._make(number))
            asked = self._clock.now
            yield self._there
            if self._clock.now > asked:
                yield from self._get_lock()
            self._taken.append(self._clock.now)
            self._room.release()
            if not self._is_lazy:
                self._clock.start(self._make(number + self._window))
            yield self._at(number).step
            yield from self._get_lock()

    def _get_lock(self) -> Process:
        if self._locks:
            yield self._lock
            self._lock.release()

    def _make(self, number: int) -> Process:
        one = self._at(number)
        seconds, cpu = one.make, one.make * one.make_cpu
        if is_coupled(self._setting):
            seconds, cpu = one.read + one.make, one.cpu
        else:
            yield from self._readers.work(one.reads, one.read, one.slowest)
            if one.awaited:
                yield from self._transformers.work(one.samples, one.awaited)
        yield self._makers
        factor = self._free.popleft()
        yield from self._compute(cpu * factor)
        yield max(0.0, seconds - cpu) * factor
        delay = one.transport
        if self._setting.place == "workers":
            yield one.sending
            delay = max(0.0, delay - one.sending)
        self._free.append(factor)
        self._makers.release()
        yield delay
        self._deliver(number, one)

    def _compute(self, seconds: float) -> Process:
        """Use a processor; worker threads take turns at the GIL."""
        turn = sys.getswitchinterval() if self._locks else seconds
        lanes = self._lock if self._locks else self._processors
        while seconds > 0:
            yield lanes
            yield min(turn, seconds)
            lanes.release()
            seconds -= turn

    def _deliver(self, number: int, one: Batch) -> None:
        """Pass a batch on, in order, to the device or to the consumer."""
        if not self._setting.in_order:
            self._hand_on(one)
            return
        self._made[number] = one
        while self._delivered in self._made:
            self._hand_on(self._made.pop(self._delivered))
            self._delivered += 1

    def _hand_on(self, one: Batch) -> None:
        if self._setting.on_device:
            self._ready.append(one)
            self._to_move.release()
        else:
            self._there.release()

    def _move(self) -> Process:
        while True:
            yield self._to_move
            yield self._room
            yield self._ready.popleft().copy
            self._there.release()


class _Coroutines:
    """Lanes of coroutines that read or transform one sample each.

    Args:
        clock: The simulation.
        lanes: How many samples at a time.
        samples: How many a batch usually has.
    """

    def __init__(self, clock: Simulation, lanes: int, samples: int) -> None:
        groups = range(max(1, min(samples // _SAMPLES, lanes)), 0, -1)
        self._group = next(size for size in groups if lanes % size == 0)
        self._lanes = clock.lanes(lanes // self._group)
        self._clock = clock

    def work(self, samples: int, seconds: float, slowest: float = 0.0) -> Process:
        """Do the samples of a batch as lanes become free.

        Args:
            samples: Their number.
            seconds: Seconds that they take, one after another.
            slowest: Seconds of the longest.
        """
        done = self._clock.lanes(0)
        parts = math.ceil(samples / self._group)
        each = seconds / self._group
        longest = min(each, max(slowest, each / parts))
        others = (each - longest) / (parts - 1) if parts > 1 else 0.0
        for part in (longest, *(others,) * (parts - 1)):
            self._clock.start(self._do(part, done.release))
        for _ in range(parts):
            yield done

    def _do(self, seconds: float, done: Callable[[], None]) -> Process:
        yield self._lanes
        yield seconds
        self._lanes.release()
        done()
