"""The durations of recorded batches, each in isolation, for a replay."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from aioloader._observe.lock import is_shared, lock_waits, processors
from aioloader._observe.records import Copy, Made, Record, Setting
from aioloader._observe.stages import (
    copy_seconds,
    hand_over,
    is_coupled,
    is_made,
    making_lanes,
    making_starts,
    on_one_clock,
    reading_lanes,
    transports,
    until_copied,
)

# The latest batches that are replayed.
_MOST = 256
# A worker is slow if it takes this many times as long as others.
_SLOW = 2.0


class Batch(NamedTuple):
    """The durations of one batch alone in a normal worker, in seconds.

    Attributes:
        read: Reading its samples, one after another.
        transform: Transforming them.
        collate: Collating.
        transport: From collated until the consumer, or the device stage, can take it.
        step: From when the consumer takes it until it asks for the next.
        reads: How many reads may run concurrently.
        slowest: The longest of these reads.
        sending: The part of ``transport`` in which its worker does nothing else.
        copy: Moving it to the device.
        nbytes: Bytes copied to the device.
        read_cpu: Share of ``read`` that is processor time.
        make_cpu: The same for ``transform`` and ``collate``.
        locked: How long the consumer waited for the GIL, in addition to ``step``.
        awaited: Transforming its samples by coroutines, one after another.
        samples: How many samples it has.
        is_measured: Whether processor time is known; if not, plain code is assumed to
            use nothing else.
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
    awaited: float = 0.0
    samples: int = 1
    is_measured: bool = False

    @property
    def make(self) -> float:
        """Seconds to transform and collate it."""
        return self.transform + self.collate

    @property
    def cpu(self) -> float:
        """Seconds of processor time to make it."""
        return self.read * self.read_cpu + self.make * self.make_cpu


def scaled(batches: Sequence[Batch], stage: str, factor: float) -> list[Batch]:
    """Return the batches with one stage's seconds multiplied.

    Args:
        batches: The recorded batches.
        stage: ``"read"``, ``"transform"``, ``"collate"``, ``"transport"``, ``"device"``
            or ``"consumer"``.
        factor: The factor; below 1, the stage gets faster.
    """
    fields: dict[str, tuple[str, ...]] = {
        "read": ("read", "slowest"),
        "transform": ("transform", "awaited"),
        "transport": ("transport", "sending"),
        "device": ("copy",),
        "consumer": ("step",),
    }
    names = fields.get(stage, (stage,))
    return [
        one._replace(**{name: getattr(one, name) * factor for name in names})
        for one in batches
    ]


def batches_of(
    records: Sequence[Record], setting: Setting, copies: Sequence[Copy] = ()
) -> list[Batch]:
    """Return the durations of the latest recorded batches, without interference.

    Some are estimated: the transport of batches that the consumer did not wait for
    (``transports``); processor time and waits for a processor, which are measured for
    few batches; and how long threads waited for the interpreter's lock.

    Args:
        records: The records, in the order of delivery.
        setting: The loader's setting.
        copies: The recorded copies to the device, if any.
    """
    records = [one for one in on_one_clock(records) if is_made(one)]
    if len(records) < 2:
        return []
    moved = [way.seconds for way in transports(*until_copied(records, setting, copies))]
    copied, sizes = _copied(records, moved, setting, copies)
    sending = _sending_share(records, moved, setting)
    share, removed = _shares(records, setting)
    slow = slow_workers(records, setting)
    least = hand_over(records, setting)
    batches = []
    waits = lock_waits(records, setting)
    if any(waits):  # the GIL delays batches too
        moved = [0.0] * len(moved)
    steps = [later.asked - one.taken + least for one, later in pairwise(records)]
    # Requests go out by number, whatever the order of delivery.
    by_number = sorted(
        zip(records, moved, copied, strict=True), key=lambda each: each[0].number
    )
    for (one, transport, copy), step, wait in zip(
        by_number, steps, waits, strict=False
    ):
        began, read, started, transformed, collated, busy, *_ = one.made
        awaited = 0.0
        if setting.transforms_async:
            awaited, busy, started = busy, 0.0, transformed
        factor = slow[one.lane] if one.lane < len(slow) else 1.0
        factor /= 1 - removed
        wall = (read - began) / (factor if is_coupled(setting) else 1.0)
        making = (collated - started) / factor
        total = busy if busy and not is_coupled(setting) else wall
        is_each = bool(busy) or is_coupled(setting)
        plain = making + (wall if is_coupled(setting) else 0.0)
        cpu = making if share is None else share * plain
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
                is_measured=share is not None,
                make_cpu=min(1.0, cpu / making) if making else 0.0,
                locked=wait,
                awaited=awaited,
                samples=max(1, one.samples),
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
    """Return each batch's copy time and copied bytes, by number."""
    if not setting.on_device:
        return [0.0] * len(records), {}
    if not copies:
        return list(moved), {}
    seconds = copy_seconds(copies)
    usual = median(seconds.values())
    sizes = {one.number: one.nbytes for one in copies}
    return [seconds.get(one.number, usual) for one in records], sizes


def slow_workers(records: Sequence[Record], setting: Setting) -> tuple[float, ...]:
    """Return how many times longer each worker takes than the median worker.

    It is 1 for workers that take less than twice as long: that may be chance.
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


def start_seconds(records: Sequence[Record], setting: Setting) -> float:
    """Return how long an epoch has waited for its worker processes to start.

    It is 0 if they are kept between epochs, or if the first batch is not recorded.
    """
    starts = setting.worker_kind == "process" and not setting.is_persistent
    first = records[0]
    if not starts or first.number or not is_made(first):
        return 0.0
    return max(0.0, first.made[making_starts(setting)] - first.asked)


def busy_lanes(
    records: Sequence[Record], setting: Setting, slow: Sequence[float] = ()
) -> float:
    """Return the share of the time in which the lanes that make batches are busy.

    A lane is not idle for want of samples while a batch that was read waits for it:
    the hand-over, or the interpreter's lock, takes that time.

    Args:
        records: The records in the order of delivery.
        setting: The loader's setting.
        slow: How many times longer each worker takes; others would be as fast as usual.
    """
    first, last, begins = records[0].taken, records[-1].taken, making_starts(setting)
    busy = 0.0
    free: dict[int, float] = {}  # since when each lane is
    for one in sorted(filter(is_made, records), key=lambda one: one.made[begins]):
        begin, end = one.made[begins], one.made[4]
        if begins == 2:  # the lane gets batches that were read
            begin = min(begin, max(one.made[1], free.get(one.lane, begin)))
        free[one.lane] = end
        factor = slow[one.lane] if one.lane < len(slow) else 1.0
        busy += max(0.0, min(last, end) - max(first, begin)) / factor
    seconds = (last - first) * making_lanes(setting)
    return min(1.0, busy / seconds) if seconds > 0 else 0.0


def _sending_share(
    records: Sequence[Record], moved: Sequence[float], setting: Setting
) -> float:
    """Return the share of transport in which a worker does not make the next batch.

    Its lane is idle at least that long, but may be idle for other reasons: so a low
    percentile is taken.
    """
    begins = making_starts(setting)
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


def measured_cpu(records: Sequence[Record], setting: Setting) -> tuple[float, float]:
    """Return the processor time of a batch, and how long it waited for a processor.

    They are shares of its plain code's seconds, medians of the measured batches: the
    first one may wait longer for imports, page faults or a disk than all others take.
    Zeros if none is measured.
    """
    shares, delays = [], []
    for made in (one.made for one in records if one.made[6]):
        if took := _plain(made, setting):
            shares.append(min(1.0, made[6] / took))
            delays.append(min(1.0, made[7] / took))
    if not shares:
        return 0.0, 0.0
    share = median(shares)
    return share, max(0.0, min(1 - share, median(delays)))


def crowding(records: Sequence[Record], setting: Setting) -> float:
    """Return how many times longer computing takes because others use the cores.

    It is 1 if this loader's own lanes explain why they wait for a processor.
    """
    share, delay = measured_cpu(records, setting)
    seconds = records[-1].taken - records[0].taken
    if not share or not seconds:
        return 1.0
    busy = sum(_plain(one.made, setting) for one in records if is_made(one))
    own = max(1.0, busy * (share + delay) / seconds / processors(setting))
    return max(1.0, (share + delay) / share / own)


def _plain(made: Made, setting: Setting) -> float:
    """Return the seconds of a batch's plain code."""
    return made[4] - made[2] + (made[1] - made[0] if is_coupled(setting) else 0.0)


def _shares(records: Sequence[Record], setting: Setting) -> tuple[float | None, float]:
    """Return two shares of the plain code's seconds.

    The first is processor time, of cores as slow as others make them; None if not
    known. The second is the time that this loader's lanes wait for each other.
    """
    share, delay = measured_cpu(records, setting)
    if not share:
        return None, 0.0
    slowed = min(share * crowding(records, setting), share + delay)
    removed = min(0.95, share + delay - slowed)
    return min(1.0, slowed / (1 - removed)), removed


def _undisturbed(batches: list[Batch], setting: Setting, seconds: float) -> list[Batch]:
    """Return the batches without the time that their lanes waited for each other.

    Waits for the interpreter's lock and for readers are not measured, but follow from
    their utilization: at full utilization, all but processor time is waiting. The 8th
    power fits closed queues: there is little waiting for lanes that are half busy.

    Args:
        batches: The batches, with their durations.
        setting: The loader's setting.
        seconds: Seconds per batch.
    """
    if not seconds:
        return batches
    factor = 1.0
    if processors(setting) < making_lanes(setting) and is_shared(setting):
        used = mean(one.cpu for one in batches) / seconds
        factor = 1 - min(1.0, used) ** 8
    readers_used = mean(one.read for one in batches) / (
        seconds * reading_lanes(setting)
    )
    spare = max(0.0, 1 - readers_used)
    return [_alone(one, setting, factor, spare) for one in batches]


def _alone(one: Batch, setting: Setting, factor: float, spare: float) -> Batch:
    """Return a batch with less time other than processor time.

    Args:
        one: The batch.
        setting: The loader's setting.
        factor: The share of that time to keep.
        spare: How idle readers are. If idle, reading took longer than even shares
            because of the slowest sample; if busy, because of other batches.
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
