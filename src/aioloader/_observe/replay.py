"""What a loader does with the same batches under another setting, by simulation.

The recorded batches pass again, from the first to the last and from the first again,
each with its recorded durations. What is assumed:

- A store answers as fast when more samples are read at a time, and a batch takes as
  long in a worker as beside the consumer. Its way out of a worker is as recorded; made
  without workers, ``changes`` adds what a small batch takes.
- Processor time is shared by as many lanes as there are cores; threads that are workers
  share one, for the interpreter's lock. Where records show that the consumer waits for
  that lock (``lock``), it does so wherever threads make batches, after each step and
  each wait. Its own processor time is not known, and not modelled.
- Where coroutines read, the samples of a batch take equally long, but for one. Readers
  in several workers are one pool.
- Their transport is a delay; the part of it before a worker begins its next batch keeps
  that worker busy. They are copied to a device one after the other.
- A batch is requested when another is taken; with a window of 0, when it is asked for.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import NamedTuple

from aioloader._observe.batches import Batch
from aioloader._observe.lock import is_shared
from aioloader._observe.records import Setting
from aioloader._observe.simulation import Process, Simulation
from aioloader._observe.stages import (
    is_coupled,
    making_lanes,
    reading_lanes,
)

# The most batches that pass before the clock counts.
_MOST = 256
# Reads of one batch that are simulated one by one; more of them in groups.
_READS = 16


class Replayed(NamedTuple):
    """What the consumer sees once the pipeline is full.

    Attributes:
        seconds: Seconds per batch.
        step: Those that it needs itself.
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
    """Return how many batches may be requested and not taken."""
    if setting.window is not None:
        return max(1, setting.window)
    size = setting.batch_size or mean(one.reads for one in batches)
    readers = max(1, setting.workers)
    samples = setting.concurrency * readers
    return math.ceil(samples / max(1, size)) + 3 * readers + setting.on_device


def replay(
    batches: Sequence[Batch], setting: Setting, slow: Sequence[float] = ()
) -> Replayed:
    """Let the batches pass under a setting; return what the consumer sees.

    Args:
        batches: What they take.
        setting: The loader.
        slow: How many times longer each worker takes; others take as long as written.

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


class _Pipeline:
    """The way of batches, as processes of a simulation."""

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
        shares_one = setting.place == "workers" and setting.worker_kind == "thread"
        self._processors = clock.lanes(1 if shares_one else max(1, setting.cores))
        self._locks = is_shared(setting) and any(one.locked for one in batches)
        self._lock = clock.lanes(1)  # the interpreter's
        self._makers = clock.lanes(making_lanes(setting))
        factors = [*slow, *(1.0,) * making_lanes(setting)][: making_lanes(setting)]
        self._free = deque(factors)  # of makers that have nothing to do
        reading = reading_lanes(setting)
        most = int(median(one.reads for one in batches)) // _READS
        groups = range(max(1, min(most, reading)), 0, -1)
        self._group = next(size for size in groups if reading % size == 0)
        self._readers = clock.lanes(reading // self._group)
        self._made: dict[int, Batch] = {}
        self._delivered = 0
        self._there = clock.lanes(0)  # batches that the consumer can take
        self._ready: deque[Batch] = deque()  # those that can be moved to the device
        self._to_move = clock.lanes(0)
        self._room = clock.lanes(setting.on_device)
        self._taken: list[float] = []

    def run(self, batches: int) -> list[float]:
        """Return when the consumer took each of so many batches."""
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
            yield from self._read(one)
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
        """Use a processor; with the interpreter's lock, in turns with others."""
        turn = sys.getswitchinterval() if self._locks else seconds
        lanes = self._lock if self._locks else self._processors
        while seconds > 0:
            yield lanes
            yield min(turn, seconds)
            lanes.release()
            seconds -= turn

    def _read(self, one: Batch) -> Process:
        """Read the samples of a batch, as lanes get free."""
        there = self._clock.lanes(0)
        parts = math.ceil(one.reads / self._group)
        each = one.read / self._group
        longest = min(each, max(one.slowest, each / parts))
        others = (each - longest) / (parts - 1) if parts > 1 else 0.0
        for seconds in (longest, *(others,) * (parts - 1)):
            self._clock.start(self._read_one(seconds, there.release))
        for _ in range(parts):
            yield there

    def _read_one(self, seconds: float, done: Callable[[], None]) -> Process:
        yield self._readers
        yield seconds
        self._readers.release()
        done()

    def _deliver(self, number: int, one: Batch) -> None:
        """Let a batch go on, in its turn, to the device or to the consumer."""
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


# -- from records ---------------------------------------------------------------------
