"""The utilization of each stage, computed from the records of the latest batches.

All statistics are for the span from the request of the first recorded batch to the
delivery of the last. A slot is a worker, a thread, or one of the coroutines that read
samples concurrently. It does one thing at a time. Work on batches that are not recorded
yet is missing, so slots look idle at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aioloader._base.records import BatchRecord, Copy, RecordedSettings

Floats: TypeAlias = NDArray[np.float64]
# A stage's name, its begin and end for each batch, and how many samples run at a time.
_StageTimes: TypeAlias = tuple[str, Floats, Floats, Any]

# Limit on the seconds that a consumer needs to take a batch that is ready.
_MAX_HAND_OVER = 200e-6
# A consumer's wait for a batch counts if it is longer than this share of the transport,
# and longer than the drawing of indices.
_WAITED_SHARE = 0.02


@dataclass(frozen=True)
class StageStats:
    """What one stage did in the recorded span.

    A slot starves while it has no work: its input is not ready, or no batch is
    requested. A slot is blocked while it does a later stage of a batch, or has no work
    while finished batches wait for the consumer or for an earlier batch.

    Attributes:
        name: ``"sampler"`` (drawing indices, in the consumer's thread), ``"read"``,
            ``"transform"``, ``"collate"``, ``"transport"`` (from collating until the
            consumer or the device stage could take the batch; estimated if neither
            waited), ``"device"`` (moving the batch there) or ``"consumer"`` (busy from
            taking a batch to requesting the next).
        lanes: How many slots the stage has: jobs that run at a time.
        items: How many batches passed the stage.
        busy: Seconds of work, summed over slots like the next two fields.
        starved: Seconds in which slots had no work to do.
        blocked: Seconds in which slots were blocked, in the sense above.
        p50: The median of seconds per batch. If a batch's samples are read
            concurrently, its reading ends with the last of them.
        p95: The 95th percentile of seconds per batch.
        p99: The 99th percentile of seconds per batch.
        nbytes: Bytes copied, for the device stage.
    """

    name: str
    lanes: int
    items: int
    busy: float
    starved: float
    blocked: float
    p50: float
    p95: float
    p99: float
    nbytes: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time, from 0 to 1: ``busy``, ``starved`` and ``blocked``."""
        parts = {"busy": self.busy, "starved": self.starved, "blocked": self.blocked}
        seconds = sum(parts.values())
        return {
            name: part / seconds if seconds else 0.0 for name, part in parts.items()
        }

    @property
    def utilisation(self) -> float:
        """Share of the slots' time in which they were busy, from 0 to 1."""
        return self.shares["busy"]


def stage_stats(
    records: Sequence[BatchRecord],
    setting: RecordedSettings,
    copies: Sequence[Copy] = (),
) -> tuple[StageStats, ...]:
    """Return what each stage did; empty without records.

    Each stage's ``busy + starved + blocked`` is ``lanes`` times the span's seconds.
    """
    if not records:
        return ()
    span = _Timeline(records, setting, copies)
    device = [span.device(copies)] if copies else []
    draw = [] if setting.is_stream else [span.draw()]
    return (*draw, *span.making(), span.transport(), *device, span.consumer())


def until_copied(
    records: Sequence[BatchRecord], setting: RecordedSettings, copies: Sequence[Copy]
) -> tuple[Sequence[BatchRecord], RecordedSettings]:
    """Return records and settings as if the device stage were the consumer.

    Both are unchanged if there are no copies.
    """
    if not copies:
        return records, setting
    known = {copy.number: copy for copy in copies}
    return [
        record._replace(asked=copy.asked, taken=copy.began)
        if (copy := known.get(record.number)) is not None
        else record
        for record in records
    ], replace(setting, on_device=0)


def copy_seconds(copies: Sequence[Copy]) -> dict[int, float]:
    """Return the seconds of each batch's copy, by number; copies run one by one."""
    seconds, free = {}, 0.0
    for copy in copies:
        seconds[copy.number] = max(0.0, copy.ended - max(copy.began, free))
        free = copy.ended
    return seconds


def _weight(busy: Floats, seconds: Floats) -> Floats:
    """Return how many samples of each batch were processed concurrently, on average."""
    weight = np.ones(len(busy))
    is_summed = (busy > 0) & (seconds > 0)
    weight[is_summed] = busy[is_summed] / seconds[is_summed]
    return weight


def percentiles(seconds: Sequence[float] | Floats) -> tuple[float, float, float]:
    """Return the 50th, 95th and 99th percentiles; zeros without values."""
    if not len(seconds):
        return 0.0, 0.0, 0.0
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
    return float(p50), float(p95), float(p99)


def is_made(record: BatchRecord) -> bool:
    """Tell whether the record has the times of the batch's stages."""
    return record.made[4] != 0


def hand_over(records: Sequence[BatchRecord], setting: RecordedSettings) -> float:
    """Return the seconds that a consumer needs to take a batch that is ready.

    This is the recorded minimum, up to a limit. It is 0 if batches are moved to a
    device or made inline.
    """
    if setting.on_device or setting.place == "inline":
        return 0.0
    least = min(
        record.taken - record.drawn - max(record.asked, record.made[4])
        for record in records
    )
    return min(max(0.0, least), _MAX_HAND_OVER)


def transports(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> tuple[Floats, Floats]:
    """Return the seconds of each batch's transport, and when the batch could be taken.

    The transport of a batch that the consumer waited for is measured. With a device,
    where batches move one by one, transport starts after the previous batch. For other
    batches, the median is assumed, or the time available if that is less. Inline,
    transport is the time between request and delivery without making and drawing.
    """
    ends = np.array([record.taken - record.drawn for record in records])
    if setting.place == "inline":
        rest = [_waited(record) - record.made[4] + record.made[0] for record in records]
        return np.maximum(0.0, rest), ends
    known = seen_transports(records, setting)
    usual = median(known.values()) if known else 0.0
    seconds = np.zeros(len(records))
    for place, record in enumerate(records):
        if place in known:
            seconds[place] = known[place]
        elif is_made(record):
            seconds[place] = max(0.0, min(usual, record.asked - record.made[4]))
            ends[place] = record.made[4] + seconds[place]
    return seconds, ends


def seen_transports(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> dict[int, float]:
    """Return transport seconds, by record index, of batches the consumer waited for."""
    least = hand_over(records, setting)
    known: dict[int, float] = {}
    free = 0.0
    for place, record in enumerate(records):
        collated = record.made[4]
        before = max(collated, free) if setting.on_device else collated
        free = record.taken
        seconds, waited = record.taken - record.drawn - before, _waited(record) - least
        has_waited = waited > max(_WAITED_SHARE * seconds, record.drawn)
        if is_made(record) and (record.asked <= collated or has_waited):
            known[place] = max(0.0, seconds - least)
    return known


def _waited(record: BatchRecord) -> float:
    """Return the seconds that the consumer waited, without the drawing of indices."""
    return record.taken - record.asked - record.drawn


def held_back(records: Sequence[BatchRecord], setting: RecordedSettings) -> float:
    """Return the total seconds that finished batches waited for an earlier batch."""
    if not setting.in_order or setting.place == "inline" or not records:
        return 0.0
    held, latest = 0.0, 0.0
    for record in records:
        if is_made(record):
            held += max(0.0, latest - record.made[4])
            latest = max(latest, record.made[4])
    return held


def _union(begins: Floats, ends: Floats) -> Callable[[Any], Any]:
    """Return a function that tells how much of the intervals' union precedes a time."""
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    # An interval starts a new part of the union if all earlier ones have ended.
    is_new = np.append(True, begins[1:] > ends[:-1])
    first = begins[is_new]
    last = ends[np.append(np.flatnonzero(is_new)[1:] - 1, len(ends) - 1)]
    times = np.stack([first, last], 1).ravel()
    seconds = np.cumsum(last - first)
    return partial(
        np.interp, xp=times, fp=np.stack([seconds - (last - first), seconds], 1).ravel()
    )


class _Timeline:
    """The times in the recorded span, as arrays with one entry per batch."""

    def __init__(
        self,
        records: Sequence[BatchRecord],
        setting: RecordedSettings,
        copies: Sequence[Copy],
    ) -> None:
        self._setting, self._items = setting, len(records)
        self._begin, self._end = records[0].asked, records[-1].taken
        self._asked = np.array([record.asked for record in records])
        self._taken = np.array([record.taken for record in records])
        self._drawn = np.array([record.drawn for record in records])
        moved, reduced = until_copied(records, setting, copies)
        self._moved, self._ready = transports(moved, reduced)
        self._left = np.array([record.taken for record in moved])
        self._is_made = np.array([is_made(record) for record in records])
        self._made = np.array([record.made for record in records if is_made(record)]).T

    def draw(self) -> StageStats:
        """Return the sampler's stage; it is blocked whenever it does not draw."""
        busy, seconds = float(self._drawn.sum()), self._end - self._begin
        return StageStats(
            *("sampler", 1, self._items, busy, 0.0, max(0.0, seconds - busy)),
            *percentiles(self._drawn),
        )

    def making(self) -> list[StageStats]:
        """Return the stages that make batches; empty if no record has their times."""
        if not self._is_made.any():
            return []
        setting, making = self._setting, self._setting.making_lanes
        began, read, started, transformed, collated, busy, *_ = self._made
        lying = _union(self._clip(collated), self._taken[self._is_made])
        is_awaited = setting.transforms_async
        reads_many = not (is_awaited or setting.is_coupled or setting.is_stream)
        weight = _weight(busy * reads_many, read - began)
        to_read: _StageTimes = ("read", began, read, weight)
        weight = _weight(busy * is_awaited, transformed - started)
        to_transform: _StageTimes = ("transform", started, transformed, weight)
        to_collate: _StageTimes = ("collate", transformed, collated, 1.0)
        groups = [(setting.reading_lanes, [to_read])]
        if is_awaited:
            groups.append((setting.transforming_lanes, [to_transform]))
            groups.append((making, [to_collate]))
        elif setting.is_coupled:
            groups = [(making, [to_read, to_transform, to_collate])]
        else:
            groups.append((making, [to_transform, to_collate]))
        return [stage for group in groups for stage in self._shared(*group, lying)]

    def _shared(
        self, lanes: int, steps: list[_StageTimes], lying: Callable[[Any], Any]
    ) -> list[StageStats]:
        """Return stages that share slots; a slot runs a batch's ``steps`` in turn."""
        busy, within = [], 0.0
        for _, begin, end, weight in steps:
            begins, ends = self._clip(begin), self._clip(end)
            busy.append(float(((ends - begins) * weight).sum()))
            overlap = (lying(ends) - lying(begins)) * weight
            within += float(overlap.sum())
        idle = max(0.0, lanes * (self._end - self._begin) - sum(busy))
        blocked = lanes * float(lying(self._end) - lying(self._begin))
        blocked = min(idle, max(0.0, blocked - within))
        return [
            StageStats(
                *(name, lanes, len(begin), busy[place]),
                sum(busy[:place]) + idle - blocked,
                sum(busy[place + 1 :]) + blocked,
                *percentiles(end - begin),
            )
            for place, (name, begin, end, _) in enumerate(steps)
        ]

    def transport(self) -> StageStats:
        """Return the transport stage; it is busy while any batch is in transit."""
        begins, ends = self._clip(self._ready - self._moved), self._clip(self._ready)
        left = self._clip(self._left)
        seconds = self._end - self._begin
        busy = float(_union(begins, ends)(self._end))
        present = _union(np.append(begins, ends), np.append(ends, left))
        lying = float(present(self._end)) - busy
        return StageStats(
            *("transport", 1, self._items, busy, seconds - busy - lying, lying),
            *percentiles(self._moved),
        )

    def device(self, copies: Sequence[Copy]) -> StageStats:
        """Return the device stage; it starves while it has room but no batch."""
        times = np.array([(copy.asked, copy.began, copy.ended) for copy in copies])
        asked, began, ended = self._clip(times.T)
        seconds = self._end - self._begin
        busy = float(_union(began, ended)(self._end))
        wanted = _union(np.append(asked, began), np.append(began, ended))
        starved = float(wanted(self._end)) - busy
        return StageStats(
            *("device", 1, len(copies), busy, starved, seconds - busy - starved),
            *percentiles([*copy_seconds(copies).values()]),
            nbytes=sum(copy.nbytes for copy in copies),
        )

    def consumer(self) -> StageStats:
        """Return the consumer's stage; it is busy in steps and starves in waits."""
        steps = self._asked[1:] - self._taken[:-1]
        waits = float((self._taken - self._asked).sum())
        return StageStats(
            *("consumer", 1, self._items, float(steps.sum()), waits, 0.0),
            *percentiles(steps),
        )

    def _clip(self, times: Any) -> Any:
        return np.clip(times, self._begin, self._end)
