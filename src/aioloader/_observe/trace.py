"""Records as a trace: Chrome's trace event format, which Perfetto opens.

There is a track for the consumer (its steps and waits), tracks for reads, and one for
each worker, or two if batches overlap. Times are on the clock of ``torch.profiler``, so
that both files can be merged: microseconds of Unix time since ``baseTimeNanoseconds``.
Source: "Trace Event Format" (Google, 2016); for the clock, libkineto's
``ChromeTraceBaseTime`` (torch 2.13).
"""

import asyncio
import gzip
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from aioloader._observe.records import (
    NOT_MADE,
    Copies,
    Copy,
    MadeAt,
    Record,
    Records,
    RecordTuple,
    Setting,
)
from aioloader._observe.warnings import warn

Event: TypeAlias = dict[str, Any]
StrPath: TypeAlias = str | os.PathLike[str]
# Kineto's base is a multiple of this since 1970: three mean months.
_QUARTER_NS = 7_889_238 * 10**9
# Process ids are below this.
_BEYOND_PROCESSES = 1 << 22
_traces = itertools.count(1)
_RAY = "RayWorkers"  # on machines with other clocks
# Kinds of tracks, from top to bottom.
_CONSUMER, _READS, _LANE, _COPIES = range(4)


class Clock(NamedTuple):
    """Convert ``time.perf_counter`` to the clock of a trace.

    Both run at the same rate and differ only in their origin.

    Attributes:
        unix: Nanoseconds since 1970 when ``time.perf_counter_ns`` was 0.
        base: ``baseTimeNanoseconds``, the origin of times in the file.
    """

    unix: int
    base: int

    @classmethod
    def now(cls) -> "Clock":
        """Compare the clocks: the best of some tries, within a microsecond."""
        tries = []
        for _ in range(8):
            before = time.perf_counter_ns()
            unix = time.time_ns()
            after = time.perf_counter_ns()
            tries.append((after - before, unix - (before + after) // 2))
        unix = min(tries)[1]
        return cls(unix, time.time_ns() // _QUARTER_NS * _QUARTER_NS)

    def micros(self, seconds: float) -> float:
        """Return a reading in the file's microseconds, to the nanosecond."""
        return (round(seconds * 1e9) + self.unix - self.base) / 1000


@dataclass
class Traced:
    """The part of a trace for one epoch.

    Attributes:
        epoch: Its number.
        setting: How the loader was set up.
        records: Records of the batches delivered during the trace.
        copies: Copies to the device that ended during the trace.
    """

    epoch: int
    setting: Setting
    records: list[RecordTuple] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


class Trace:
    """Collect all records in a ``with`` block and write them at its end.

    A batch costs an entry of a list. If the block raises, the trace is written all the
    same: in this thread after ``with``, in another after ``async with``.

    Args:
        path: The JSON file; an existing one is replaced once all is written. It is
            compressed if the name ends with ``".gz"``.
        traces: The loader's active traces; includes this one during the block.
    """

    def __init__(self, path: StrPath, traces: "list[Trace]") -> None:
        self._path = Path(path)
        self._traces = traces
        self._followed: list[tuple[Records, Copies | None, Traced]] = []
        self._clock: Clock | None = None  # since the block began

    def follow(
        self,
        epoch: int,
        records: Records,
        setting: Setting,
        copies: Copies | None = None,
    ) -> None:
        """Collect the records of an epoch during the block.

        The loader calls it for the epochs under way when it makes the trace, and for
        each that starts in the block, before its first batch.

        Args:
            epoch: Its number.
            records: The records of its batches.
            setting: How the loader is set up for it.
            copies: The records of copies to the device, if there is one.
        """
        followed = records, copies, Traced(epoch, setting)
        self._followed.append(followed)
        if self._clock is not None:
            _begin(*followed)

    def __enter__(self) -> Self:
        self._check_folder()
        self._start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        self._stop()
        self._write(error)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._check_folder)
        self._start()
        return self

    async def __aexit__(
        self, _kind: object, error: BaseException | None, *_: object
    ) -> None:
        self._stop()
        await asyncio.to_thread(self._write, error)

    def _check_folder(self) -> None:
        """Fail before the block, not after it."""
        folder = self._path.parent
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder '{folder}' for the trace")

    def _start(self) -> None:
        if self._clock is not None:
            raise RuntimeError("this trace has already been recorded; make a new one")
        self._clock = Clock.now()
        self._traces.append(self)
        for followed in self._followed:
            _begin(*followed)

    def _stop(self) -> None:
        self._traces.remove(self)
        for records, copies, traced in self._followed:
            records.remove_sink(traced.records.append)
            if copies is not None:
                copies.remove_sink(traced.copies.append)

    def _write(self, error: BaseException | None) -> None:
        assert self._clock is not None
        traced = [one for *_, one in self._followed]
        self._followed = []
        try:
            write_trace(self._path, traced, self._clock)
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"the trace was not written: {failure}")


def _begin(records: Records, copies: Copies | None, traced: Traced) -> None:
    records.add_sink(traced.records.append)
    if copies is not None:
        copies.add_sink(traced.copies.append)


def write_trace(path: Path, traced: Sequence[Traced], clock: Clock) -> None:
    """Write a trace completely or not at all."""
    number = next(_traces) * _BEYOND_PROCESSES + os.getpid()
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": clock.base,
        "otherData": {
            "epochs": [
                {"epoch": one.epoch, "batches": len(one.records)} | asdict(one.setting)
                for one in traced
            ]
        },
    }
    _write_json(path, head, trace_events(traced, clock, number))


def merge_traces(ours: StrPath, theirs: StrPath, out: StrPath) -> None:
    """Write a loader's trace and a profiler's as one file.

    Args:
        ours: Written by ``loader.trace``.
        theirs: Written by ``torch.profiler``, or another one of ``loader.trace``.
        out: The file to write. All files are compressed if their name ends with
            ``".gz"``.

    Raises:
        ValueError: If one of them is not a trace.
    """
    mine, other = _read_json(ours), _read_json(theirs)
    events, others = mine.pop("traceEvents"), other.pop("traceEvents")
    offset = mine.get("baseTimeNanoseconds", 0) - other.get("baseTimeNanoseconds", 0)
    for event in events:
        if "ts" in event:
            event["ts"] += offset / 1000
    (begin, end), (from_, to) = _extent(events), _extent(others)
    if begin > to or from_ > end:
        warn(f"nothing in '{ours}' happened at the time of '{theirs}'")
    _write_json(Path(out), {**mine, **other}, itertools.chain(others, events))


# -- events -------------------------------------------------------------------------


class _Slice(NamedTuple):
    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class _Job:
    """Slices that follow each other on one track.

    Attributes:
        kind: Kind of the track; ``kind``, ``lane`` and ``name`` identify the track.
        slices: The slices that take time.
        args: Arguments shown for each.
    """

    kind: int
    lane: int
    name: str
    slices: tuple[_Slice, ...]
    args: dict[str, Any]

    @property
    def began(self) -> float:
        return self.slices[0].began

    @property
    def ended(self) -> float:
        return self.slices[-1].ended


def trace_events(
    traced: Iterable[Traced], clock: Clock, process: int
) -> Iterator[Event]:
    """Yield the events of a trace.

    Args:
        traced: The part of the trace for each epoch.
        clock: Turns clock readings into times of the file.
        process: Id of the process that the tracks belong to.
    """
    traced = list(traced)
    jobs = [job for one in traced for job in _jobs(one) if job.slices]
    tracks = _on_tracks(sorted(jobs, key=attrgetter("began")))
    name = f"aioloader (process {os.getpid()})"
    yield _described("process_name", process, 0, name=name)
    yield _described("process_sort_index", process, 0, sort_index=os.getpid())
    for thread, (track, on_track) in enumerate(sorted(tracks.items())):
        name = f"{track[2]} ({track[3] + 1})" if track[3] else track[2]
        yield _described("thread_name", process, thread, name=name)
        yield _described("thread_sort_index", process, thread, sort_index=thread)
        for job in on_track:
            for one in job.slices:
                begin, end = clock.micros(one.began), clock.micros(one.ended)
                yield {
                    "ph": "X",
                    "cat": "aioloader",
                    "name": one.name,
                    "pid": process,
                    "tid": thread,
                    "ts": begin,
                    "dur": round(end - begin, 3),
                    "args": job.args,
                }
    for at, ready in _ready(traced):
        yield {
            "ph": "C",
            "cat": "aioloader",
            "name": "batches ready",
            "pid": process,
            "tid": 0,
            "ts": clock.micros(at),
            "args": {"batches": ready},
        }


def _described(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _jobs(traced: Traced) -> Iterator[_Job]:
    """Yield the jobs of an epoch, with their tracks."""
    records = [Record._make(one) for one in traced.records]
    is_inline = traced.setting.place == "inline"
    name = "make" if is_inline else "wait"
    after: Record | None
    for record, after in itertools.zip_longest(records, records[1:]):
        args = _args(traced, record.number, samples=record.samples)
        slices = [_Slice(name, record.asked, record.taken)]
        if after is not None:
            slices.append(_Slice("step", record.taken, after.asked))
        for one in slices:
            yield _Job(_CONSUMER, 0, "consumer", _lasting(one), args)
        yield from _made(traced.setting, record, args)
    free = 0.0  # when the copy before had ended
    for number, _, began, ended, nbytes in traced.copies:
        copied = _lasting(_Slice("copy", max(began, free), ended))
        args = _args(traced, number, bytes=nbytes)
        yield _Job(_COPIES, 0, "copies to the device", copied, args)
        free = ended


def _args(traced: Traced, number: int, **more: int) -> dict[str, Any]:
    return {"epoch": traced.epoch, "batch": number, **more}


def _made(setting: Setting, record: Record, args: dict[str, Any]) -> Iterator[_Job]:
    """Yield the jobs of making a batch."""
    times = made_times(setting, record)
    if not times:
        return
    made = MadeAt._make(record.made)
    if times[0] != made.began:
        args = {**args, "placed": "as late as possible: another machine's clock"}
    if made.busy:
        args = {**args, "seconds of coroutines, summed over samples": made.busy}
    if made.cpu:
        args = {**args, "seconds of processor time": made.cpu}
    if made.delayed:
        args = {**args, "seconds of waiting for a processor": made.delayed}
    names = ("read", "queued", "transform", "collate")
    slices = list(map(_Slice, names, times, times[1:]))
    # Reads run in another place than later steps, several batches at a time.
    if setting.place == "loop" or (setting.workers and not setting.reads_in_workers):
        yield _Job(_READS, 0, "reads", _lasting(*slices[:2]), args)
        slices = slices[2:]
    name = {"inline": "loader", "workers": f"worker {record.lane}"}
    where = name.get(setting.place, "thread")
    yield _Job(_LANE, record.lane, where, _lasting(*slices), args)


def made_times(setting: Setting, record: Record) -> tuple[float, ...]:
    """Return ``began`` to ``collated`` on this machine's clock; empty if unknown.

    Times of another machine are moved to be as late as possible.
    """
    if record.made == NOT_MADE:
        return ()
    times = record.made[:5]
    back = times[-1] - record.taken if setting.worker_kind == _RAY else 0.0
    return tuple(one - back for one in times)


def _lasting(*slices: _Slice) -> tuple[_Slice, ...]:
    return tuple(one for one in slices if one.ended > one.began)


def _on_tracks(jobs: Iterable[_Job]) -> dict[tuple[int, int, str, int], list[_Job]]:
    """Put jobs, the earliest first, on tracks so that none overlaps another.

    Returns:
        The jobs of each track (kind, lane, name, and number among equal ones).
    """
    tracks: dict[tuple[int, int, str, int], list[_Job]] = {}
    for job in jobs:
        for row in itertools.count():
            track = tracks.setdefault((job.kind, job.lane, job.name, row), [])
            if not track or track[-1].ended <= job.began:
                track.append(job)
                break
    return tracks


def _ready(traced: Iterable[Traced]) -> Iterator[tuple[float, int]]:
    """Yield each change of the number of batches that wait for the consumer."""
    changes = [
        (at, change)
        for one in traced
        if one.setting.place != "inline" and one.setting.worker_kind != _RAY
        for record in map(Record._make, one.records)
        if record.made != NOT_MADE
        for at, change in ((MadeAt._make(record.made).collated, 1), (record.taken, -1))
    ]
    ready = 0
    for at, change in sorted(changes):
        ready += change
        yield at, ready


def _extent(events: Iterable[Event]) -> tuple[float, float]:
    times = [one["ts"] for one in events if one.get("ph") == "X"]
    return min(times, default=0.0), max(times, default=0.0)


# -- files --------------------------------------------------------------------------


def _read_json(path: StrPath) -> dict[str, Any]:
    content = Path(path).read_bytes()
    if os.fspath(path).endswith(".gz"):
        content = gzip.decompress(content)
    found = json.loads(content)
    trace = found if isinstance(found, dict) else {"traceEvents": found}
    if type(trace.get("traceEvents")) is not list:
        raise ValueError(f"'{path}' is not a trace: it has no list of 'traceEvents'")
    return trace


def _plain(value: Any) -> int:
    """Return a number of numpy's, which the loader accepts, as one of Python's."""
    return int(value)


def _write_json(path: Path, head: dict[str, Any], events: Iterable[Event]) -> None:
    """Write a trace event by event; the file appears once it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with (
            gzip.open(partial, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else partial.open("w", encoding="utf-8") as file
        ):
            file.write(json.dumps(head, default=_plain)[:-1] + ', "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
