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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from aioloader._observe.records import (
    Copies,
    Copy,
    Latest,
    MadeAt,
    Record,
    Records,
    RecordTuple,
    Setting,
)
from aioloader._observe.stages import is_made, on_one_clock
from aioloader._observe.warnings import warn

Event: TypeAlias = dict[str, Any]
StrPath: TypeAlias = str | os.PathLike[str]
# Kineto's base is a multiple of this since 1970: three mean months.
_QUARTER_NS = 7_889_238 * 10**9
# Process ids are below this.
_BEYOND_PROCESSES = 1 << 22
_traces = itertools.count(1)
_MOVED = {"placed": "as late as possible: another machine's clock"}
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
        self._traced: list[Traced] = []
        # What is collected, and where it is added.
        self._sinks: list[tuple[Latest[Any], Callable[[Any], None]]] = []
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
        """
        traced = Traced(epoch, setting)
        self._traced.append(traced)
        found: list[tuple[Latest[Any] | None, Callable[[Any], None]]]
        found = [(records, traced.records.append), (copies, traced.copies.append)]
        for latest, sink in found:
            if latest is not None:
                self._sinks.append((latest, sink))
                if self._clock is not None:
                    latest.add_sink(sink)

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
        for latest, sink in self._sinks:
            latest.add_sink(sink)

    def _stop(self) -> None:
        self._traces.remove(self)
        for latest, sink in self._sinks:
            latest.remove_sink(sink)

    def _write(self, error: BaseException | None) -> None:
        assert self._clock is not None
        traced, self._traced, self._sinks = self._traced, [], []
        try:
            write_trace(self._path, traced, self._clock)
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"the trace was not written: {failure}")


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


class _Job(NamedTuple):
    """Slices that follow each other on one track.

    Attributes:
        track: Kind of the track, its lane, and its name.
        slices: The slices that take time, at least one.
        args: Arguments shown for each.
    """

    track: tuple[int, int, str]
    slices: list[_Slice]
    args: dict[str, Any]


def trace_events(
    traced: Iterable[Traced], clock: Clock, process: int
) -> Iterator[Event]:
    """Yield the events of a trace."""
    traced = list(traced)
    name = f"aioloader (process {os.getpid()})"
    yield _event("process_name", process, "M", name=name)
    yield _event("process_sort_index", process, "M", sort_index=os.getpid())
    jobs = [job for one in traced for job in _jobs(one)]
    for thread, ((track, row), on_track) in enumerate(sorted(_on_tracks(jobs).items())):
        name = f"{track[2]} ({row + 1})" if row else track[2]
        yield _event("thread_name", process, "M", thread, name=name)
        yield _event("thread_sort_index", process, "M", thread, sort_index=thread)
        for job in on_track:
            for one in job.slices:
                begin, end = clock.micros(one.began), clock.micros(one.ended)
                event = _event(one.name, process, "X", thread, **job.args)
                duration = round(end - begin, 3)
                yield {**event, "cat": "aioloader", "ts": begin, "dur": duration}
    for at, ready in _ready(traced):
        event = _event("batches ready", process, "C", batches=ready)
        yield {**event, "cat": "aioloader", "ts": clock.micros(at)}


def _event(
    name: str, process: int, kind: str, thread: int = 0, /, **args: Any
) -> Event:
    return {"ph": kind, "name": name, "pid": process, "tid": thread, "args": args}


def _jobs(traced: Traced) -> Iterator[_Job]:
    """Yield the jobs of an epoch that take time."""
    for track, slices, args in _all_jobs(traced):
        lasting = [one for one in slices if one.ended > one.began]
        if lasting:
            yield _Job(track, lasting, args)


def _all_jobs(traced: Traced) -> Iterator[_Job]:
    raw = [Record._make(one) for one in traced.records]
    records = on_one_clock(raw, traced.setting)
    name = "make" if traced.setting.place == "inline" else "wait"
    consumer = _CONSUMER, 0, "consumer"
    for before, record, after in zip(raw, records, [*records[1:], None], strict=False):
        args = _args(traced, record.number, samples=record.samples)
        yield _Job(consumer, [_Slice(name, record.asked, record.taken)], args)
        if after is not None:
            yield _Job(consumer, [_Slice("step", record.taken, after.asked)], args)
        if is_made(record):
            moved = {} if record is before else _MOVED
            yield from _made(traced.setting, record, args | moved)
    free = 0.0  # when the copy before had ended
    for number, _, began, ended, nbytes in traced.copies:
        copied = [_Slice("copy", max(began, free), ended)]
        args = _args(traced, number, bytes=nbytes)
        yield _Job((_COPIES, 0, "copies to the device"), copied, args)
        free = ended


def _args(traced: Traced, number: int, **more: int) -> dict[str, Any]:
    return {"epoch": traced.epoch, "batch": number, **more}


def _made(setting: Setting, record: Record, args: dict[str, Any]) -> Iterator[_Job]:
    """Yield the jobs of making a batch."""
    made = MadeAt._make(record.made)
    spent = {
        "seconds of coroutines, summed over samples": made.busy,
        "seconds of processor time": made.cpu,
        "seconds of waiting for a processor": made.delayed,
    }
    args |= {name: seconds for name, seconds in spent.items() if seconds}
    names = ("read", "queued", "transform", "collate")
    slices = list(map(_Slice, names, made, made[1:]))
    # Reads run in another place than later steps, several batches at a time.
    if setting.place == "loop" or (setting.workers and not setting.reads_in_workers):
        yield _Job((_READS, 0, "reads"), slices[:2], args)
        slices = slices[2:]
    where = {"inline": "loader", "workers": f"worker {record.lane}"}
    name = where.get(setting.place, "thread")
    yield _Job((_LANE, record.lane, name), slices, args)


def _on_tracks(
    jobs: Iterable[_Job],
) -> dict[tuple[tuple[int, int, str], int], list[_Job]]:
    """Put jobs on tracks so that none overlaps another.

    Returns:
        The jobs of each track, and of its number among those of the same name.
    """
    tracks: dict[tuple[tuple[int, int, str], int], list[_Job]] = {}
    for job in sorted(jobs, key=lambda job: job.slices[0].began):
        for row in itertools.count():
            track = tracks.setdefault((job.track, row), [])
            if not track or track[-1].slices[-1].ended <= job.slices[0].began:
                track.append(job)
                break
    return tracks


def _ready(traced: Iterable[Traced]) -> Iterator[tuple[float, int]]:
    """Yield each change of the number of batches that wait for the consumer."""
    changes = [
        (at, change)
        for one in traced
        if one.setting.place != "inline"
        for record in on_one_clock(list(map(Record._make, one.records)), one.setting)
        if is_made(record)
        for at, change in ((record.made[4], 1), (record.taken, -1))
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
    """Write a trace event by event."""
    with (
        replacing(path) as partial,
        (
            gzip.open(partial, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else partial.open("w", encoding="utf-8")
        ) as file,
    ):
        file.write(json.dumps(head, default=_plain)[:-1] + ', "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file is there only once it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
