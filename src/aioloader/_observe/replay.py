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
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from aioloader._observe.lock import is_shared, lock_waits
from aioloader._observe.records import Copy, Record, Setting
from aioloader._observe.simulation import Process, Simulation
from aioloader._observe.stages import (
    copy_seconds,
    hand_over,
    is_coupled,
    is_made,
    making_lanes,
    on_one_clock,
    reading_lanes,
    transports,
    until_copied,
)

# The latest batches that are replayed, and the most that pass before the clock counts.
_MOST = 256
# A worker is slow if it takes so many times as long as others.
_SLOW = 2.0
# Reads of one batch that are simulated one by one; more of them in groups.
_READS = 16


class Batch(NamedTuple):
    """What one batch takes; in seconds, if nothing else is going on, in a usual worker.

    Attributes:
        read: Reading its samples, one after the other.
        transform: Transforming them.
        collate: Collating.
        transport: From collated until the consumer, or the device stage, can take it.
        step: From when the consumer has taken it until it asks for the next.
        reads: How many reads there are that may go on at the same time.
        slowest: The longest of these.
        sending: The part of ``transport`` in which its worker does nothing else.
        copy: Moving it to the device.
        nbytes: How much is copied there.
        read_cpu: Share of ``read`` that is processor time.
        make_cpu: The same of ``transform`` and ``collate``.
        locked: How long the consumer waited for the interpreter's lock, beside
            ``step``.
    """

    read: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transport: float = 0.0
    step: float = 0.0
    reads: int = 1
    slowest: float = 0.0
    sending: float = 0.0
    copy: float = 0.0
    nbytes: int = 0
    read_cpu: float = 0.0
    make_cpu: float = 1.0
    locked: float = 0.0

    @property
    def make(self) -> float:
        """Seconds to transform and collate it."""
        return self.transform + self.collate

    @property
    def cpu(self) -> float:
        """Seconds of processor time to make it."""
        return self.read * self.read_cpu + self.make * self.make_cpu


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


def scaled(batches: Sequence[Batch], stage: str, factor: float) -> list[Batch]:
    """Return the batches with one stage's seconds multiplied.

    Args:
        batches: Those that were recorded.
        stage: ``"read"``, ``"transform"``, ``"collate"``, ``"transport"``, ``"device"``
            or ``"consumer"``.
        factor: Below 1 it gets faster.
    """
    fields: dict[str, tuple[str, ...]] = {
        "read": ("read", "slowest"),
        "transport": ("transport", "sending"),
        "device": ("copy",),
        "consumer": ("step",),
    }
    names = fields.get(stage, (stage,))
    return [
        one._replace(**{name: getattr(one, name) * factor for name in names})
        for one in batches
    ]


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


def batches_of(
    records: Sequence[Record], setting: Setting, copies: Sequence[Copy] = ()
) -> list[Batch]:
    """Return what the latest recorded batches took, undisturbed by each other.

    What is estimated: the transport of batches that the consumer did not wait for
    (``transports``); processor time, which is measured for few batches; and how
    long lanes waited for a processor.

    Args:
        records: In the order in which they were taken.
        setting: What they were made with.
        copies: What is known of copies to the device; else their way there counts.
    """
    records = [one for one in on_one_clock(records) if is_made(one)]
    if len(records) < 2:
        return []
    moved = [way.seconds for way in transports(*until_copied(records, setting, copies))]
    copied, sizes = _copied(records, moved, setting, copies)
    sending = _sending_share(records, moved, setting)
    share = _cpu_share(records)
    slow = slow_workers(records, setting)
    least = hand_over(records, setting)
    batches = []
    waits = lock_waits(records, setting)
    if any(waits):  # the same lock delays batches
        moved = [0.0] * len(moved)
    steps = [later.asked - one.taken + least for one, later in pairwise(records)]
    # Requests go out by number, whatever the order of delivery.
    by_number = sorted(
        zip(records, moved, copied, strict=True), key=lambda each: each[0].number
    )
    for (one, transport, copy), step, wait in zip(
        by_number, steps, waits, strict=False
    ):
        began, read, started, transformed, collated, busy, _ = one.made
        factor = slow[one.lane] if one.lane < len(slow) else 1.0
        wall = (read - began) / (factor if is_coupled(setting) else 1.0)
        making = (collated - started) / factor
        total = busy if busy and not is_coupled(setting) else wall
        is_each = bool(busy) or is_coupled(setting)
        cpu = making if share is None else share * (wall + making)
        batches.append(
            Batch(
                read=total,
                transform=(transformed - started) / factor,
                collate=(collated - transformed) / factor,
                transport=0.0 if setting.on_device and not copies else transport,
                copy=copy,
                nbytes=sizes.get(one.number, 0),
                step=step - wait,
                reads=max(1, one.samples) if is_each else 1,
                slowest=wall,
                sending=transport * sending,
                read_cpu=min(1.0, max(0.0, cpu - making) / wall) if wall else 0.0,
                make_cpu=min(1.0, cpu / making) if making else 0.0,
                locked=wait,
            )
        )
    seconds = records[-1].taken - records[0].taken
    return _undisturbed(batches[-_MOST:], setting, seconds / len(batches))


def _copied(
    records: Sequence[Record],
    moved: Sequence[float],
    setting: Setting,
    copies: Sequence[Copy],
) -> tuple[list[float], dict[int, int]]:
    """Return how long each batch's copy took, and how much was copied, by number."""
    if not setting.on_device:
        return [0.0] * len(records), {}
    if not copies:
        return list(moved), {}
    seconds = copy_seconds(copies)
    usual = median(seconds.values())
    sizes = {one.number: one.nbytes for one in copies}
    return [seconds.get(one.number, usual) for one in records], sizes


def slow_workers(records: Sequence[Record], setting: Setting) -> tuple[float, ...]:
    """Return how many times longer each worker takes than the median one.

    It is 1 for workers that take less than twice as long: chance, or other batches.
    """
    seconds: dict[int, list[float]] = {}
    for one in records if setting.place == "workers" else ():
        made = one.made
        read = made[1] - made[0] if is_coupled(setting) else 0.0
        if is_made(one):
            seconds.setdefault(one.lane, []).append(read + made[4] - made[2])
    medians = {lane: median(each) for lane, each in seconds.items()}
    usual = median(medians.values()) if len(medians) > 2 else 0.0
    if not usual:
        return ()
    factors = (medians.get(lane, usual) / usual for lane in range(max(medians) + 1))
    return tuple(one if one > _SLOW else 1.0 for one in factors)


def _sending_share(
    records: Sequence[Record], moved: Sequence[float], setting: Setting
) -> float:
    """Return the share of transport in which a worker does not make the next batch.

    Its lane is seen to be idle for that long at least, but may be idle for other
    reasons: so it is what few batches go below.
    """
    begins = 0 if is_coupled(setting) else 2
    shares: list[float] = []
    latest: dict[int, tuple[Record, float]] = {}
    pairs = zip(records, moved, strict=True)
    for one, transport in sorted(pairs, key=lambda pair: pair[0].made[begins]):
        before, took = latest.get(one.lane, (one, 0.0))
        if took:
            gap = one.made[begins] - before.made[4]
            shares.append(min(1.0, max(0.0, gap / took)))
        latest[one.lane] = one, transport
    return sorted(shares)[len(shares) // 10] if shares else 1.0


def _cpu_share(records: Sequence[Record]) -> float | None:
    """Return the share of the making that is processor time; None if not known.

    It is the median of those measured: a first batch may wait for a disk, as imports
    and page faults do, for longer than all others take.
    """
    measured = [one.made for one in records if one.made[6]]
    seconds = [made[4] - made[2] + made[1] - made[0] for made in measured]
    shares = [
        made[6] / took for made, took in zip(measured, seconds, strict=True) if took
    ]
    return min(1.0, median(shares)) if shares else None


def _undisturbed(batches: list[Batch], setting: Setting, seconds: float) -> list[Batch]:
    """Return the batches without the time that their lanes waited for each other.

    That is not seen, but follows from how busy processors and readers are. Where they
    are busy all the time, all that is not processor time is waiting. The 8th power
    fits closed queues: little is waited for processors that are half busy.

    Args:
        batches: With what they took.
        setting: What they were made with.
        seconds: Per batch.
    """
    if not seconds:
        return batches
    factor = 1.0
    if setting.place == "workers":
        processors = 1 if setting.worker_kind == "thread" else max(1, setting.cores)
        is_crowded = making_lanes(setting) > processors
        used = mean(one.cpu for one in batches) / (seconds * processors)
        factor = 1 - min(1.0, used) ** 8 if is_crowded else 1.0
    readers_used = mean(one.read for one in batches) / (
        seconds * reading_lanes(setting)
    )
    spare = max(0.0, 1 - readers_used)
    return [_alone(one, setting, factor, spare) for one in batches]


def _alone(one: Batch, setting: Setting, factor: float, spare: float) -> Batch:
    """Return a batch with less of the time that is not processor time.

    Args:
        one: The batch.
        setting: What it was made with.
        factor: What is left of that time.
        spare: How far readers are idle: what a batch's reading took beyond even shares
            is due to its slowest sample, else to other batches.
    """
    read, make = one.read, one.make
    read_cpu, make_cpu = read * one.read_cpu, make * one.make_cpu
    even = read / one.reads
    slowest = even
    if is_coupled(setting):
        read = read_cpu + (read - read_cpu) * factor
        slowest = read / one.reads
    else:
        turns = math.ceil(one.reads / max(1, setting.concurrency))
        slowest += max(0.0, one.slowest - turns * even) * spare
    new_make = make_cpu + (make - make_cpu) * factor
    ratio = new_make / make if make else 1.0
    return one._replace(
        read=read,
        transform=one.transform * ratio,
        collate=one.collate * ratio,
        slowest=min(read, slowest),
        read_cpu=read_cpu / read if read else 0.0,
        make_cpu=make_cpu / new_make if new_make else 0.0,
    )
