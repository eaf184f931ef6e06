"""Write records as a trace in Chrome's trace event format, which Perfetto opens.

The consumer, reads, each worker, and copies to the device have a track each, or several
if jobs overlap. Times are microseconds of Unix time since ``baseTimeNanoseconds``. This
is ``torch.profiler``'s clock, so that files can be merged.
Source: "Trace Event Format" (Google, 2016); for the clock, libkineto's
``ChromeTraceBaseTime`` (torch 2.13).
"""

import gzip
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from aioloader._base.cancellation import in_thread
from aioloader._base.records import (
    BatchRecord,
    Copy,
    Counters,
    RecordedSettings,
    RecordTuple,
)
from aioloader._base.warnings import warn
from aioloader._observe.stages import is_made

Event: TypeAlias = dict[str, Any]
StrPath: TypeAlias = str | os.PathLike[str]
# The position of this kind of track from the top, the slot, and the track's name.
_Track: TypeAlias = tuple[int, int, str]

# Kineto's base time is a multiple of this, three mean months, after 1970.
_QUARTER_NS = 7_889_238 * 10**9
# Process ids are below this, so ids of traces are above it.
_BEYOND_PROCESSES = 1 << 22
_traces = itertools.count(1)
_CONSUMER: _Track = (0, 0, "consumer")
_READS: _Track = (1, 0, "reads")
_WORKERS = 2
_COPIES: _Track = (3, 0, "copies to the device")
_STEPS = ("read", "queued", "transform", "collate")


@dataclass
class Traced:
    """The records that a trace collects in one epoch: delivered batches and copies."""

    counters: Counters
    setting: RecordedSettings
    records: list[RecordTuple] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    def start(self) -> None:
        self.counters.records.add_sink(self.records.append)
        self.counters.copies.add_sink(self.copies.append)

    def stop(self) -> None:
        self.counters.records.remove_sink(self.records.append)
        self.counters.copies.remove_sink(self.copies.append)


class Trace:
    """A context manager that collects a loader's records and writes them at the end.

    Collecting costs one list entry per batch. The file is also written if the block
    raises. ``with`` writes it in this thread, ``async with`` in another one.

    Args:
        path: The JSON file; it replaces an existing one only when complete. It is
            compressed if the name ends with ``".gz"``.
        traces: The loader's list of active traces, with this one during the block.
    """

    def __init__(self, path: StrPath, traces: "list[Trace]") -> None:
        self._path = Path(path)
        self._traces = traces
        self._traced: list[Traced] = []
        self._unix: int | None = None  # set when the block starts

    def follow(self, counters: Counters, setting: RecordedSettings) -> None:
        """Collect the records of an epoch during the block.

        The loader calls this for the latest epoch, and others under way, when the trace
        is made, and for each epoch that starts in the block, before its first batch.
        """
        traced = Traced(counters, setting)
        self._traced.append(traced)
        if self._unix is not None:
            traced.start()

    def __enter__(self) -> Self:
        return self._start(has_folder=self._path.parent.is_dir())

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        self._stop()
        self._write(error)

    async def __aenter__(self) -> Self:
        has_folder = await in_thread(self._path.parent.is_dir)
        return self._start(has_folder=has_folder)

    async def __aexit__(
        self, _kind: object, error: BaseException | None, *_: object
    ) -> None:
        self._stop()
        await in_thread(self._write, error)

    def _start(self, *, has_folder: bool) -> Self:
        if not has_folder:  # fail before the block, not after it
            folder = self._path.parent
            raise FileNotFoundError(
                f"there is no folder '{folder}' for the trace: make it"
            )
        if self._unix is not None:
            raise RuntimeError("this trace has already been recorded; make a new one")
        self._unix = _unix_of_clock()
        self._traces.append(self)
        for epoch in self._traced:
            epoch.start()
        return self

    def _stop(self) -> None:
        self._traces.remove(self)
        for epoch in self._traced:
            epoch.stop()

    def _write(self, error: BaseException | None) -> None:
        """Write the whole file or none; ``error`` is what the block raised, if any."""
        assert self._unix is not None
        traced, self._traced = self._traced, []
        epochs = [
            {"epoch": epoch.counters.epoch, "batches": len(epoch.records)}
            | asdict(epoch.setting)
            for epoch in traced
        ]
        base = time.time_ns() // _QUARTER_NS * _QUARTER_NS
        head = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base,
            "otherData": {"epochs": epochs},
        }
        number = next(_traces) * _BEYOND_PROCESSES + os.getpid()
        events = trace_events(traced, self._unix - base, number)
        try:
            _write_json(self._path, head, events)
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"the trace was not written: {failure}")


def _unix_of_clock() -> int:
    """Return the Unix time, in nanoseconds, when ``time.perf_counter_ns`` was 0.

    Both clocks run at the same rate. The best of 8 tries is exact to a microsecond.
    """
    tries = []
    for _ in range(8):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        tries.append((after - before, unix - (before + after) // 2))
    return min(tries)[1]


def merge_traces(ours: StrPath, theirs: StrPath, out: StrPath) -> None:
    """Merge a loader's trace and a profiler's into one file.

    Args:
        ours: A file that ``loader.trace`` has written.
        theirs: A file that ``torch.profiler`` or another ``loader.trace`` has written.
        out: The file to write. Any of the files is compressed if its name ends with
            ``".gz"``.

    Raises:
        ValueError: If one of the two files is not a trace.
    """
    mine, profile = _read_json(ours), _read_json(theirs)
    events, profiled = mine.pop("traceEvents"), profile.pop("traceEvents")
    offset = mine.get("baseTimeNanoseconds", 0) - profile.get("baseTimeNanoseconds", 0)
    for event in events:
        if "ts" in event:
            event["ts"] += offset / 1000
    (begin, end), (from_, to) = _extent(events), _extent(profiled)
    if begin > to or from_ > end:
        warn(
            f"nothing in '{ours}' happened at the time of '{theirs}': merge "
            "traces of one run"
        )
    _write_json(Path(out), {**mine, **profile}, itertools.chain(profiled, events))


def _extent(events: Iterable[Event]) -> tuple[float, float]:
    times = [event["ts"] for event in events if event.get("ph") == "X"]
    return min(times, default=0.0), max(times, default=0.0)


class _Slices(NamedTuple):
    """Consecutive slices on a track; ``times`` holds their begins and the final end."""

    track: _Track
    names: Sequence[str]
    times: Sequence[float]
    args: dict[str, Any]


def trace_events(
    traced: Sequence[Traced], origin: int, process: int
) -> Iterator[Event]:
    """Yield the events of a trace; ``process`` is its id, unique in a merged file.

    ``origin``: nanoseconds from the file's base to the zero of ``time.perf_counter``.
    """

    def event(kind: str, name: str, thread: int = 0, /, **args: Any) -> Event:
        return {"ph": kind, "name": name, "pid": process, "tid": thread, "args": args}

    def micros(seconds: float) -> float:
        return (round(seconds * 1e9) + origin) / 1000

    yield event("M", "process_name", name=f"aioloader (process {os.getpid()})")
    yield event("M", "process_sort_index", sort_index=os.getpid())
    tracks = _on_tracks(job for epoch in traced for job in _jobs(epoch))
    for thread, ((track, row), jobs) in enumerate(sorted(tracks.items())):
        name = f"{track[2]} ({row + 1})" if row else track[2]
        yield event("M", "thread_name", thread, name=name)
        yield event("M", "thread_sort_index", thread, sort_index=thread)
        for job in jobs:
            for name, (began, ended) in zip(
                job.names, pairwise(job.times), strict=True
            ):
                if ended > began:
                    start, end = micros(began), micros(ended)
                    span = {"ts": start, "dur": round(end - start, 3)}
                    added = {"cat": "aioloader", **span}
                    yield event("X", name, thread, **job.args) | added
    ready = 0
    for moment, change in sorted(itertools.chain(*map(_ready, traced))):
        ready += change
        when = {"cat": "aioloader", "ts": micros(moment)}
        yield event("C", "batches ready", batches=ready) | when


def _on_tracks(jobs: Iterable[_Slices]) -> dict[tuple[_Track, int], list[_Slices]]:
    """Assign jobs of nonzero duration to tracks; no two jobs on a track overlap."""
    tracks: dict[tuple[_Track, int], list[_Slices]] = {}
    lasting = [job for job in jobs if job.times[-1] > job.times[0]]
    for job in sorted(lasting, key=lambda job: job.times[0]):
        for row in itertools.count():
            track = tracks.setdefault((job.track, row), [])
            if not track or track[-1].times[-1] <= job.times[0]:
                track.append(job)
                break
    return tracks


def _jobs(traced: Traced) -> Iterator[_Slices]:
    """Yield an epoch's steps, waits, batches and copies, even if they took no time."""
    epoch = {"epoch": traced.counters.epoch}
    wait = "make" if traced.setting.place == "inline" else "wait"
    before: BatchRecord | None = None
    for record in starmap(BatchRecord, traced.records):
        if before is not None:
            args = epoch | {"batch": before.number, "samples": before.samples}
            yield _Slices(_CONSUMER, ["step"], [before.taken, record.asked], args)
        before = record
        args = epoch | {"batch": record.number, "samples": record.samples}
        # Inline, a batch's indices are drawn first; otherwise later batches' come last.
        is_first = traced.setting.place == "inline"
        drawn = record.asked + record.drawn if is_first else record.taken - record.drawn
        names = ["sampler", wait] if is_first else [wait, "sampler"]
        yield _Slices(_CONSUMER, names, [record.asked, drawn, record.taken], args)
        if is_made(record):
            yield from _making(traced.setting, record, args)
    free = 0.0  # when the previous copy had ended
    for number, _, began, ended, nbytes in traced.copies:
        args = epoch | {"batch": number, "bytes": nbytes}
        yield _Slices(_COPIES, ["copy"], [max(began, free), ended], args)
        free = ended


def _making(
    setting: RecordedSettings, record: BatchRecord, args: dict[str, Any]
) -> Iterator[_Slices]:
    *marks, busy, cpu, delayed = record.made
    spent = {
        "seconds of coroutines, summed over samples": busy,
        "seconds of processor time": cpu,
        "seconds of waiting for a processor": delayed,
    }
    args |= {name: seconds for name, seconds in spent.items() if seconds}
    names: Sequence[str] = _STEPS
    times: Sequence[float] = marks
    # Reads run elsewhere than later steps, for several batches at a time.
    if setting.place == "loop" or (setting.workers and not setting.reads_in_workers):
        yield _Slices(_READS, names[:2], times[:3], args)
        names, times = names[2:], times[2:]
    where = {"inline": "loader", "workers": f"worker {record.worker}"}
    track = _WORKERS, record.worker, where.get(setting.place, "thread")
    yield _Slices(track, names, times, args)


def _ready(traced: Traced) -> Iterator[tuple[float, int]]:
    """Yield pairs of a time and +1 (a batch became ready) or -1 (it was taken)."""
    if traced.setting.place != "inline":
        for record in filter(is_made, starmap(BatchRecord, traced.records)):
            yield record.made[4], 1
            yield record.taken, -1


def _opened(path: Path, mode: str, encoding: str | None = None) -> Any:
    """Open a file, through gzip if its name ends with ``".gz"``."""
    opener: Any = gzip.open if path.suffix == ".gz" else Path.open
    return opener(path, mode, encoding=encoding)


def _read_json(path: StrPath) -> dict[str, Any]:
    with _opened(Path(path), "rb") as file:
        content = json.load(file)
    trace = content if isinstance(content, dict) else {"traceEvents": content}
    if type(trace.get("traceEvents")) is not list:
        raise ValueError(f"'{path}' has no list of 'traceEvents': pass a trace")
    return trace


def _write_json(path: Path, head: dict[str, Any], events: Iterable[Event]) -> None:
    """Write a trace to ``path``: first its head, then one event per line."""
    with replacing(path) as partial, _opened(partial, "wt", "utf-8") as file:
        # `default`: settings may have numpy's integers, which the loader accepts.
        file.write(json.dumps(head, default=int)[:-1] + ', "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes ``path`` if the block succeeds."""
    partial = path.with_name(f".{os.getpid()}.partial.{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
