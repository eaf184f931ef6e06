"""A loader on a simulated clock, tick by tick, to check computed paces against.

It shares no code with ``pace``, and divides processors differently: lanes take turns
at them, tick by tick.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

from hypothesis import strategies as st

from aioloader._base.records import BatchRecord, Copy, RecordedSettings
from aioloader._observe.changes import changes
from aioloader._observe.costs import costs_of
from aioloader._observe.pace import window_of
from aioloader._observe.verdict import report

TICK = 1e-3


class Ticks(NamedTuple):
    """The ticks that one batch takes.

    Attributes:
        reads: For each of its samples.
        transform: For the batch; for each sample if coroutines transform.
        uses_cpu: Which of "read", "transform" and "collate" are processor time.
    """

    reads: tuple[int, ...] = (0,)
    transform: int = 0
    collate: int = 0
    transport: int = 0
    step: int = 0
    draw: int = 0
    uses_cpu: tuple[str, ...] = ()


def ticks(least: int, most: int, at_least: int) -> st.SearchStrategy[Ticks]:
    """Draw the ticks of a batch of ``least`` to ``most`` samples."""
    few, many = st.integers(at_least, 6), st.integers(0, 12)
    return st.builds(
        Ticks,
        reads=st.lists(few, min_size=least, max_size=most).map(tuple),
        transform=many,
        collate=few,
        transport=st.integers(0, 5),
        step=st.integers(1, 20),
        draw=st.just(0),
        uses_cpu=st.just(()),
    )


class _Job:
    """A batch in flight."""

    def __init__(self, number: int, ticks: Ticks, *, awaits: bool = False) -> None:
        self.number, self.ticks = number, ticks
        # Work of coroutines for its samples: reads or, after plain reads, transforms.
        self.reads = deque(
            (ticks.transform,) * len(ticks.reads) if awaits else ticks.reads
        )
        # For each read: whether few others ran at its start, its start, its ticks left.
        self.reading: list[tuple[bool, int, list[int]]] = []
        self.busy = 0  # ticks of its reads
        self.stage, self.left, self.lane = "read", sum(ticks.reads), 0
        self.at: dict[str, int] = {}
        self.cpu = self.delayed = 0


class Clock:
    """A loader and its consumer. Reads take no time if coroutines transform.

    Args:
        setting: The loader.
        batches: The ticks of each batch, repeated.
        slow: How many times longer the first worker takes.
        client: How many reads are served at a time; the others wait.
        locks: Whether threads that compute hold the GIL: the consumer continues when
            they release it, or after 5 ticks.
    """

    def __init__(
        self,
        setting: RecordedSettings,
        batches: Sequence[Ticks],
        slow: int = 1,
        *,
        client: int = 1 << 30,
        locks: bool = False,
    ) -> None:
        self._setting, self._batches, self._slow = setting, batches, slow
        self._is_coupled = setting.place in {"inline", "thread"} or (
            setting.place == "workers"
            and setting.reads_in_workers
            and setting.concurrency == 1
            and not setting.transforms_async
        )
        self._now, self._numbers = 0, count()
        self._open = 0  # requested and not taken
        self._queue: deque[_Job] = deque()  # to be read
        self._reading: list[_Job] = []
        self._to_make: deque[_Job] = deque()
        self._lanes: list[_Job | None] = [None] * max(1, setting.workers)
        self._idle_since = [0] * len(self._lanes)
        self._moving: list[_Job] = []
        self._made: list[_Job] = []  # collated, and not yet in turn
        self._next = 0
        self._to_copy: deque[_Job] = deque()
        self._ready: deque[_Job] = deque()
        self._step, self._asked = 0, -1
        self._locks = locks and setting.worker_kind != "process"
        self._wants = 0  # ticks that it waits for the lock, at most
        self._turn = 0
        self._is_waiting = False
        self._client = client
        self.alone: list[float] = []  # seconds of reads that began while few ran
        self.records: list[BatchRecord] = []
        self.copies: list[Copy] = []
        self._room = -1  # since when there is room on the device

    def run(self, batches: int) -> list[BatchRecord]:
        """Return the records of ``batches`` batches."""
        while len(self.records) < batches:
            while any([self._take(), self._request(), self._read(), self._make(),
                       self._deliver(), self._copy()]):  # fmt: skip
                pass
            self._tick()
        return self.records

    def _take(self) -> bool:
        if self._step or self._wants:
            return False
        is_new = self._asked < 0
        if is_new:
            self._asked = self._now
        if not self._ready:
            self._is_waiting = True
            return is_new
        if self._is_waiting and self._locks:  # it wakes up
            self._is_waiting, self._wants = False, 5
            return True
        job = self._ready.popleft()
        made = [job.at[name] for name in ("read", "there", "transform", "collate")]
        busy = 0 if self._is_coupled else job.busy * TICK
        if self._setting.transforms_async:
            made[1:3] = made[0], made[0]
            busy = job.ticks.transform * len(job.ticks.reads) * TICK
        times = [tick * TICK + 1 for tick in (*made, job.at["made"])]
        is_clocked = job.number % 4 == 0
        cpu, delayed = (
            each * TICK * is_clocked for each in (job.cpu or 1e-6, job.delayed)
        )
        asked, taken = self._asked * TICK + 1, self._now * TICK + 1
        measured: Any = (*times, busy, cpu, delayed)
        size = len(job.ticks.reads)
        ticks = self._batches[len(self.records) % len(self._batches)]
        is_first = self._setting.place == "inline"
        drawn = ticks.draw * TICK
        if is_first:  # before it was made; otherwise, once it was there
            asked -= drawn
        else:
            taken += drawn
        record = BatchRecord(job.number, asked, taken, job.lane, size, measured, drawn)
        self.records.append(record)
        self._open -= 1
        self._asked = -1
        self._step = ticks.step + ticks.draw
        return True

    def _request(self) -> bool:
        setting = self._setting
        window = 1 if setting.place == "inline" else setting.window
        assert window is not None
        if self._open >= window or (setting.place == "inline" and self._step):
            return False
        number = next(self._numbers)
        ticks = self._batches[number % len(self._batches)]
        job = _Job(number, ticks, awaits=setting.transforms_async)
        self._open += 1
        (self._to_make if self._is_coupled else self._queue).append(job)
        return True

    def _read(self) -> bool:
        """Give free readers the next samples."""
        setting = self._setting
        readers = setting.workers if setting.reads_in_workers else 1
        busy = sum(len(job.reading) for job in self._reading)
        if not self._queue or busy >= readers * setting.concurrency:
            return self._end_reads()
        job = self._queue[0]
        if job not in self._reading:
            job.at["read"] = self._now
            self._reading.append(job)
        is_few = busy < setting.concurrency // 8
        job.reading.append((is_few, self._now, [job.reads.popleft()]))
        if not job.reads:
            self._queue.popleft()
        return True

    def _end_reads(self) -> bool:
        for job in self._reading:
            for is_few, began, left in job.reading:
                if not left[0]:
                    job.busy += self._now - began
                    self.alone += [(self._now - began) * TICK] if is_few else []
            job.reading = [read for read in job.reading if read[-1][0]]
            if not job.reads and not job.reading:
                self._reading.remove(job)
                job.at["there"] = self._now
                self._to_make.append(job)
                return True
        return False

    def _make(self) -> bool:
        """Let lanes go on to the next stage, or the next batch."""
        lanes = sorted(range(len(self._lanes)), key=self._idle_since.__getitem__)
        for lane in lanes:
            job = self._lanes[lane]
            if job is None and self._to_make:
                new = self._lanes[lane] = self._to_make.popleft()
                new.lane = lane
                self._enter(new, "read" if self._is_coupled else "transform")
                return True
            if job is None or job.left:
                continue
            if job.stage == "read":
                job.at["there"] = self._now
                self._enter(job, "transform")
            elif job.stage == "transform":
                self._enter(job, "collate")
            else:
                job.stage, job.at["made"] = "transport", self._now
                job.left = 0 if self._setting.on_device else job.ticks.transport
                self._lanes[lane] = None
                self._idle_since[lane] = self._now
                self._moving.append(job)
            return True
        return False

    def _enter(self, job: _Job, stage: str) -> None:
        ticks = job.ticks
        is_awaited = self._setting.transforms_async
        taking = {"read": sum(ticks.reads), "collate": ticks.collate,
                  "transform": 0 if is_awaited else ticks.transform}  # fmt: skip
        job.stage, job.left = stage, taking[stage]
        job.left *= self._slow if job.lane == 0 else 1
        job.at[stage] = self._now

    def _deliver(self) -> bool:
        for job in self._moving:
            if not job.left:
                self._moving.remove(job)
                self._made.append(job)
                return True
        for job in self._made:
            if job.number == self._next or not self._setting.in_order:
                self._made.remove(job)
                self._next += 1
                (self._to_copy if self._setting.on_device else self._ready).append(job)
                return True
        return False

    def _copy(self) -> bool:
        """Move the next batch to the device, if there is room."""
        has_room = len(self._ready) < self._setting.on_device
        is_free = not (self._to_copy and "copy" in self._to_copy[0].at)
        if is_free and has_room and self._room < 0:
            self._room = self._now
        if not self._to_copy:
            return False
        job = self._to_copy[0]
        if is_free:
            if not has_room:
                return False
            job.at["copy"], job.left = self._now, job.ticks.transport
            return True
        if not job.left:
            self._ready.append(self._to_copy.popleft())
            times = (self._room, job.at["copy"], self._now)
            asked, began, ended = (each * TICK + 1 for each in times)
            self.copies.append(Copy(job.number, asked, began, ended, 1 << 20))
            self._room = -1
            return True
        return False

    def _tick(self) -> None:
        self._now += 1
        self._wants = max(0, self._wants - 1)
        if self._step:
            self._step -= 1
            self._wants = 0 if self._step or not self._locks else 5
        reads = (left for job in self._reading for *_, left in job.reading)
        for left in islice(reads, self._client):
            left[0] -= 1
        moving = [*self._moving, *list(self._to_copy)[:1]]
        for job in moving:
            job.left -= job.left > 0
        self._work()

    def _work(self) -> None:
        """Let lanes work; those that need a processor take turns."""
        setting = self._setting
        is_one = self._locks or setting.worker_kind in {"thread", "ThreadPoolExecutor"}
        processors = 1 if is_one else setting.cores
        lanes = [job for job in self._lanes if job is not None and job.left]
        computing = [job for job in lanes if job.stage in job.ticks.uses_cpu]
        if not computing:
            self._wants = 0
        if computing:
            self._turn += processors
            first = self._turn % len(computing)
            computing = (computing[first:] + computing[:first])[:processors]
        for job in lanes:
            if job.stage not in job.ticks.uses_cpu:
                job.left -= 1
            elif job in computing:
                job.left -= 1
                job.cpu += 1
            elif not is_one:
                job.delayed += 1


def delayed(record: BatchRecord, seconds: float) -> BatchRecord:
    """Return a record whose batch was requested, made and taken later."""
    made: Any = (*(time + seconds for time in record.made[:5]), *record.made[5:])
    asked, taken = record.asked + seconds, record.taken + seconds
    return record._replace(asked=asked, taken=taken, made=made)


def seconds_per_batch(records: Sequence[BatchRecord]) -> float:
    """Return the seconds per batch of the later half."""
    half = len(records) // 2
    return (records[-1].taken - records[half].taken) / (len(records) - 1 - half)


def advised(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> RecordedSettings:
    """Return the setting of a loader that is changed as its report advises."""
    advice = report(records, setting).advice
    assert advice is not None
    return changed(records, setting)[advice.argument, advice.new]


def changed(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> dict[tuple[str, object], RecordedSettings]:
    """Return the settings of a loader after each change, by argument and new value."""
    costs = costs_of(records, setting)
    assert costs is not None
    return {
        (change.argument, change.new): replace(
            change.setting, window=window_of(change.setting, costs)
        )
        for change in changes(costs, setting)
    }
