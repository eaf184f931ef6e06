"""How long each stage of recorded batches takes, without waits for the GIL."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from aioloader._base.records import BatchRecord, Copy, RecordedSettings
from aioloader._observe.stages import (
    Floats,
    copy_seconds,
    hand_over,
    is_made,
    seen_transports,
    transports,
    until_copied,
)

# Costs are computed from at most this many of the latest batches.
_MAX_BATCHES = 256
# A worker is slow if it takes more than this many times the median worker's time.
_SLOW = 2.0
# Steps may wait for the GIL if batches of this process arrive this many seconds late.
_LATE = 1e-3
# They also may if more than this share, and this many times chance, end just after
_LATE_SHARE, _TIMES_CHANCE = 0.2, 4
# a batch was made: within this many seconds, when its thread releases the GIL.
_JUST_AFTER = 3e-4
# To tell whether reads queue, this many must have started while few others ran, and
# this share of the readers must be busy.
_ENOUGH_ALONE, _CROWDED = 6, 0.75
# Share of uneven steps that did not wait; longest wait, in switch intervals.
_QUICKEST, _MAX_TURNS = 0.05, 3


@dataclass(frozen=True)
class Costs:
    """Durations of batches, as arrays with one entry per batch, and derived numbers."""

    read: Floats  # reading its samples one after another
    transform: Floats  # transforming its samples by plain code
    collate: Floats  # collating them
    # From the end of collating until the consumer or the device stage can take it.
    transport: Floats
    step: Floats  # the consumer's step: from taking a batch to requesting the next
    sampler: Floats  # drawing indices, in the consumer's thread
    copy: Floats  # moving the batch to the device
    slowest: Floats  # the longest of the batch's reads
    awaited: Floats  # transforming its samples by coroutines one after another
    reads: Floats  # how many of the batch's reads may run concurrently
    samples: Floats  # how many samples the batch has
    read_cpu: float = 0.0  # share of ``read`` that is processor time
    make_cpu: float = 1.0  # the same for ``transform`` and ``collate``
    # Whether processor time was measured; if not, plain code is assumed to compute all
    # the time.
    is_measured: bool = False
    delay: float = 0.0  # share of plain code's runnable time without a processor
    locked: float = 0.0  # mean seconds that a step waits for the GIL, not in ``step``
    held: float = 0.0  # the same for a stream's reads, not in ``read``
    nbytes: float = 0.0  # mean bytes copied to the device
    slow: tuple[float, ...] = ()  # each worker's time as a multiple of the median's
    # How many reads the client or the store serves at a time, and the seconds per read
    # at that limit; zeros if there is no sign of a limit.
    served: float = 0.0
    least: float = 0.0

    @property
    def make(self) -> Floats:
        """Seconds that plain code needs to transform and collate each batch."""
        return self.transform + self.collate

    @property
    def cpu(self) -> float:
        """Mean seconds of processor time that plain code needs for a batch."""
        read, make = self.read.mean(), self.make.mean()
        return float(read * self.read_cpu + make * self.make_cpu)

    def scaled(self, stage: str, factor: float) -> "Costs":
        """Return the costs with the seconds of ``stage`` multiplied by ``factor``."""
        fields = {
            "read": ("read", "slowest", "least"),
            "transform": ("transform", "awaited"),
            "device": ("copy",),
            "consumer": ("step",),
        }
        names = fields.get(stage, (stage,))
        scaled = {name: getattr(self, name) * factor for name in names}
        costs = replace(self, **scaled)
        # Threads that compute less hold the GIL for less time.
        kept = costs.cpu / max(1e-9, self.cpu)
        return replace(costs, locked=self.locked * kept, held=self.held * kept)


def costs_of(
    records: Sequence[BatchRecord],
    setting: RecordedSettings,
    copies: Sequence[Copy] = (),
    alone: Sequence[float] = (),
) -> Costs | None:
    """Return the costs of the latest batches; None if fewer than two have stage times.

    ``alone``: the seconds of reads that started while few others ran.

    Some costs are estimates: waits for the GIL, and the transport of batches that the
    consumer did not wait for (``transports``). Processor time is measured for a few
    batches only.
    """
    records = list(filter(is_made, records))
    if len(records) < 2:
        return None
    each = (records[-1].taken - records[0].taken) / (len(records) - 1)
    waits, slow = lock_waits(records, setting), slow_workers(records, setting)
    asked = np.array([record.asked for record in records])
    step = asked[1:] - [record.taken for record in records[:-1]] - waits
    # Batches are requested in the order of their numbers, even if delivered in another.
    order = np.argsort([record.number for record in records])[:-1][-_MAX_BATCHES:]
    moved, _ = transports(*until_copied(records, setting, copies))
    copy, nbytes = _copied(records, setting, copies, moved)
    if waits.any() or (setting.on_device and not copies):  # the GIL delays batches too
        moved = moved * 0
    made = np.array([record.made for record in records])[order]
    began, read, started, transformed, collated, busy, *_ = made.T
    awaited = np.zeros(len(order))
    if setting.transforms_async:
        awaited, busy, started = busy, awaited, transformed
    factors = (
        slow[record.worker] if record.worker < len(slow) else 1.0 for record in records
    )
    factor = np.array([*factors])[order]
    wall, transform = read - began, (transformed - started) / factor
    collate, coupled = (collated - transformed) / factor, setting.is_coupled
    if coupled:
        wall /= factor
    total = np.where((busy > 0) & (not coupled), busy, wall)
    samples = np.maximum(1, [record.samples for record in records])[order]
    reads = np.where((busy > 0) | coupled, samples, 1)
    even = slowest = total / reads
    if not coupled:
        # Reading that took longer than even shares was delayed by the slowest sample if
        # readers were idle, but by other batches if they were busy.
        spare = 1 - total.mean() / max(each * setting.reading_lanes, 1e-9)
        turns = np.ceil(reads / max(1, setting.concurrency))
        beyond = (wall - turns * even).clip(0) * max(0.0, spare)
        slowest = np.minimum(total, even + beyond)
    share, delay = measured_cpu(records, setting)
    costs = Costs(
        *(total, transform, collate, moved[order]),
        *(step[-_MAX_BATCHES:] + hand_over(records, setting), _draws(records, setting)),
        *(copy[order], slowest, awaited, reads, samples),
        is_measured=share > 0,
        delay=delay,
        locked=float(waits[-_MAX_BATCHES:].mean()),
        nbytes=nbytes,
        slow=slow,
    )
    if share > 0:  # attributed to making first, then to reading
        make, reading = costs.make.mean(), total.mean() if coupled else 0.0
        cpu = share * (make + reading)
        costs = replace(
            costs,
            read_cpu=max(0.0, cpu - make) / reading if reading else 0.0,
            make_cpu=min(1.0, cpu / make) if make else 0.0,
        )
    costs = _limited(_read_unlocked(costs, setting, each), setting, each, alone)
    takes_turns = setting.is_shared and setting.processors < setting.making_lanes
    return _unlocked(costs, setting, each) if takes_turns else costs


def _draws(records: Sequence[BatchRecord], setting: RecordedSettings) -> Floats:
    """Return the mean seconds of drawing a batch's indices, repeated for each batch.

    While the consumer waits for the first batch, a whole window of indices is drawn.
    """
    drawn = np.array([record.drawn for record in records])
    requests = len(records)
    if records[0].number:
        drawn, requests = drawn[1:], requests - 1
    elif setting.length and setting.window:
        requests = min(setting.length, requests + setting.window)
    return np.full(min(_MAX_BATCHES, len(records) - 1), drawn.sum() / requests)


def lock_waits(records: Sequence[BatchRecord], setting: RecordedSettings) -> Floats:
    """Estimate how long each step, except the last, waited for the GIL, in seconds.

    A thread that computes in Python keeps the GIL for the switch interval. A consumer
    that slept or waited for its accelerator resumes late if the loader's threads
    compute. So its step looks longer than it is.

    The waits are 0 unless batches that the consumer waited for came late, or many steps
    ended just after a batch was made. If many steps take equally long, each waited as
    long as batches were being made in its last switch interval, or half as long if a
    batch was made just before the step ended. Otherwise, if a batch was being made in
    that interval, the step's time beyond the quickest steps was spent waiting.
    """
    none = np.zeros(max(0, len(records) - 1))
    if not (setting.is_shared and len(none)) or setting.on_device:
        return none
    taken = np.array([record.taken for record in records])
    asked = np.array([record.asked for record in records[1:]])
    made = np.array([record.made for record in records])
    begins, ends, cpu = made[:, setting.making_starts], made[:, 4], made[:, 6]
    steps, seconds = asked - taken[:-1], max(taken[-1] - taken[0], 1e-9)
    turn = sys.getswitchinterval()
    # Seconds of making within the last switch interval of each step.
    begun = np.maximum(taken[:-1], asked - turn)
    within = np.minimum(ends, asked[:, None]) - np.maximum(begins, begun[:, None])
    waits: Floats = np.minimum(asked - begun, within.clip(0).sum(1))
    since = asked[:, None] - ends
    is_released = ((since > 0) & (since < _JUST_AFTER)).any(1)
    is_even = (abs(steps - np.median(steps)) < turn / 10).sum() > len(steps) / 3
    if is_even:
        waits[is_released] /= 2
    else:
        beyond = steps - np.quantile(steps, _QUICKEST)
        waits = np.where(waits > 0, beyond.clip(0, _MAX_TURNS * turn), 0.0)
    late = seen_transports(records, setting).values()
    is_late = bool(late) and np.median([*late]) >= _LATE
    by_chance = _TIMES_CHANCE * len(records) * _JUST_AFTER / seconds
    if not is_late and is_released.mean() <= max(_LATE_SHARE, by_chance):
        return none
    # A step that computes is not waiting, so limit the waits to its idle time.
    making = np.median(cpu[cpu > 0]) * len(steps) if cpu.any() else 0.0
    idle = max(0.0, steps.sum() - max(0.0, setting.used * seconds - making))
    waits *= min(1.0, idle / max(waits.sum(), 1e-9))
    return waits


def _unlocked(costs: Costs, setting: RecordedSettings, each: float) -> Costs:
    """Return the costs without the time that threads wait for the GIL.

    The wait is estimated from the GIL's utilisation: at full use, all time beyond
    processor time is waiting. The 8th power approximates a closed queueing network, in
    which waits are short at half use.
    """
    names = ["transform", "collate"]
    if setting.is_coupled:
        names += ["read", "slowest"]
    making = float(sum(getattr(costs, name).mean() for name in names[:3]))
    waiting = (making - costs.cpu) * min(1.0, costs.cpu / max(each, 1e-9)) ** 8
    kept = max(1e-9, 1 - waiting / max(making, 1e-9))
    changed = {name: getattr(costs, name) * kept for name in names}
    shares = {name: getattr(costs, name) / kept for name in ("read_cpu", "make_cpu")}
    return replace(costs, **changed, **shares)


def _read_unlocked(costs: Costs, setting: RecordedSettings, each: float) -> Costs:
    """Return the costs without the time that the event loop waits for the GIL.

    If the thread that makes batches always holds the GIL, only the quickest reads did
    not wait. If that thread sometimes holds it, each sample of a stream may wait for
    the switch interval, because a stream reads one sample after another.
    """
    if setting.place != "loop" or not costs.is_measured:
        return costs
    making = float(costs.make.mean()) * costs.make_cpu
    used = min(1.0, making / max(each, 1e-9)) ** 8
    waits = used * (costs.read - np.quantile(costs.read, _QUICKEST)).clip(0)
    if setting.is_stream:
        most = np.minimum(making, costs.samples * sys.getswitchinterval())
        waits = np.maximum(waits, np.minimum(most, costs.read - costs.read.min()))
    read, held = costs.read - waits, float(waits.mean()) * setting.is_stream
    return replace(costs, read=read, slowest=np.minimum(costs.slowest, read), held=held)


def _limited(
    costs: Costs, setting: RecordedSettings, each: float, alone: Sequence[float]
) -> Costs:
    """Return the costs with the limit on concurrent reads that records show, if any.

    If reads queue at such a limit, most reads that started while few others ran took
    less than half of the mean time. The number of reads served at a time is the rate of
    all reads, times the mean seconds of reads that did not queue (Little's law).
    """
    is_read_here = setting.reads_async and not setting.reads_in_workers
    if not is_read_here or setting.is_stream or setting.transforms_async:
        return costs
    reads, few = float(costs.reads.mean()), max(1, setting.concurrency // 8)
    is_known = costs.read.mean() >= _CROWDED * setting.concurrency * each
    if len(alone) < _ENOUGH_ALONE or not is_known:
        return costs
    if 2 * np.quantile(alone, 0.9) > costs.read.mean() / reads:
        return costs
    served, least = float(np.mean(alone)) * reads / each, each / reads
    if served < few:  # all but the first of these reads queued
        served = max(1.0, min(alone) / least)
    return replace(costs, served=served, least=least)


def _copied(
    records: Sequence[BatchRecord],
    setting: RecordedSettings,
    copies: Sequence[Copy],
    moved: Floats,
) -> tuple[Floats, float]:
    """Return each batch's seconds of copying to the device, and mean bytes copied."""
    if not setting.on_device:
        return np.zeros(len(records)), 0.0
    if not copies:
        return moved, 0.0
    seconds = copy_seconds(copies)
    usual = median(seconds.values())
    each = [seconds.get(record.number, usual) for record in records]
    return np.array(each), float(np.mean([copy.nbytes for copy in copies]))


def slow_workers(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> tuple[float, ...]:
    """Return each worker's time per batch as a multiple of the median worker's.

    Factors up to 2 may be chance and become 1. Return () for fewer than three workers.
    """
    seconds: dict[int, list[float]] = {}
    for record in records if setting.place == "workers" else ():
        seconds.setdefault(record.worker, []).append(plain_seconds(record, setting))
    medians = {worker: median(each) for worker, each in seconds.items()}
    usual = median(medians.values()) if len(medians) > 2 else 0.0
    if not usual:
        return ()
    count = max(medians) + 1
    factors = (medians.get(worker, usual) / usual for worker in range(count))
    return tuple(factor if factor > _SLOW else 1.0 for factor in factors)


def plain_seconds(record: BatchRecord, setting: RecordedSettings) -> float:
    """Return the seconds that plain code took to make a batch."""
    return record.made[4] - record.made[setting.making_starts]


def measured_cpu(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> tuple[float, float]:
    """Return two shares of plain code's time: computing, and lacking a processor.

    The first is a share of all its seconds. The second is a share of the seconds in
    which it computed or was ready to. Both come from medians over batches, because the
    first batch may wait for imports, page faults or a disk. Both are 0 if unmeasured.
    """
    shares, delays = [], []
    for record in records:
        took, (cpu, delayed) = plain_seconds(record, setting), record.made[6:]
        if cpu and took:
            shares.append(min(1.0, cpu / took))
            delays.append(min(1.0, delayed / took))
    if not shares:
        return 0.0, 0.0
    share = median(shares)
    delay = max(0.0, min(1 - share, median(delays)))
    return share, delay / (share + delay)


def start_seconds(records: Sequence[BatchRecord], setting: RecordedSettings) -> float:
    """Return the seconds that an epoch waited for its worker processes to start.

    Return 0 without worker processes, if they are kept, or without batch 0's times.
    """
    starts = setting.worker_kind == "process" and not setting.is_persistent
    first = records[0]
    if not starts or first.number or not is_made(first):
        return 0.0
    return max(0.0, first.made[setting.making_starts] - first.asked - first.drawn)
