"""Traces: their format, their sums, their clock; and merged with torch's."""

import asyncio
import gzip
import json
import math
import time
from pathlib import Path
from types import BuiltinMethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from aioloader import DataLoader, merge_traces
from aioloader._base.records import (
    NOT_MADE,
    Copy,
    Counters,
    RecordedSettings,
    Records,
    RecordTuple,
)
from aioloader._observe.trace import Trace, Traced, trace_events
from observe.showing import SETTINGS, WORKERS
from observe.trace_format import check_trace, of_kind, tracks


def record(number: int, at: float, *, lane: int = 0, size: int = 4) -> RecordTuple:
    """Return a batch that took 2 s to read, 1 to wait, 3 to transform, 1 to collate."""
    made = (at, at + 2, at + 3, at + 6, at + 7, 5.0, 0.5, 0.1)
    return number, at + 5, at + 8, lane, size, made, 0.0


def traced(setting: RecordedSettings, count: int = 6) -> Traced:
    """Return an epoch of batches that overlap where there are two lanes."""
    lanes = max(1, setting.workers)
    records = [record(n, 4.0 * n, lane=n % lanes) for n in range(count)]
    return Traced(Counters(3), setting, records)


def loaded(path: Path) -> Any:
    """Return a trace that keeps to the format."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace = json.loads(content)
    check_trace(trace)
    return trace


def total(events: list[Any], name: str) -> float:
    """Return the seconds of all events of a name."""
    return math.fsum(one["dur"] for one in of_kind(events, name)) / 1e6


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.floats(0, 9),
            st.integers(0, 2),
            st.lists(st.floats(0, 3), min_size=4, max_size=4),
        ),
        max_size=12,
    ),
    st.sampled_from(SETTINGS),
)
def test_any_times(drawn: list[Any], setting: RecordedSettings) -> None:
    """Nothing overlaps on a track, whatever was recorded; every second is there."""
    one = Traced(Counters(0), setting)
    for number, (began, wait, lane, lasts) in enumerate(drawn):
        at = [began]
        for seconds in lasts:
            at.append(at[-1] + seconds)
        asked = at[-1] - wait
        made = (*at, 0.0, 0.0, 0.0)
        one.records.append((number, asked, at[-1] + 1, lane, 1, made, 0.0))
    events = list(trace_events([one], 0, 1))
    check_trace({"traceEvents": events})
    for index, stage in enumerate(("read", "queued", "transform", "collate")):
        seconds = sum(lasts[index] for *_, lasts in drawn)
        assert total(events, stage) == pytest.approx(seconds, abs=1e-6)
    name = "make" if setting.place == "inline" else "wait"
    waits = math.fsum(wait + 1 for _, wait, *_ in drawn)
    assert total(events, name) == pytest.approx(waits, abs=1e-6)
    batches = {event["args"]["batch"] for event in of_kind(events, name)}
    assert batches == set(range(len(drawn)))


def test_tracks() -> None:
    """The consumer's first, then the readers', one for each worker, then the copies."""
    both = RecordedSettings("workers", workers=2, worker_kind="thread", concurrency=64)
    epoch = traced(both)
    epoch.copies = [Copy(0, 7.0, 8.0, 8.5, 64), Copy(1, 11.0, 12.0, 12.5, 64)]
    events = list(trace_events([epoch], 0, 7))
    check_trace({"traceEvents": events})
    consumer, *names, copies = tracks(events).values()
    assert (consumer, copies) == ("consumer", "copies to the device")
    assert names == ["reads", "worker 0", "worker 1"]
    inline = list(
        tracks(trace_events([traced(RecordedSettings("inline"))], 0, 7)).values()
    )
    assert inline == ["consumer", "loader", "loader (2)"]


def test_all_records_of_all_epochs(tmp_path: Path) -> None:
    """Not only those that are kept; from those of the epoch under way at its start."""
    traces: list[Trace] = []
    path = tmp_path / "run.json"
    under_way, next_one = Records(), Records()
    under_way.append(record(0, 0.0))
    trace = Trace(path, traces)
    trace.follow(Counters(0, records=under_way), WORKERS)
    with trace:
        assert traces == [trace]
        for number in range(1, 3000):
            under_way.append(record(number, 8.0 * number))
        for one in traces:
            one.follow(Counters(1, records=next_one), WORKERS)
        next_one.append(record(0, 8.0 * 3000))
        assert not path.exists()
    under_way.append(record(3000, 8.0 * 3001))
    assert traces == []
    events = loaded(path)["traceEvents"]
    found = [one["args"] for one in of_kind(events, "collate")]
    batches = [(one["epoch"], one["batch"]) for one in found]
    assert sorted(batches) == [*((0, n) for n in range(1, 3000)), (1, 0)]
    assert isinstance(under_way.append, BuiltinMethodType)  # as quick as before
    assert len(under_way) == 1024
    assert list(tmp_path.iterdir()) == [path]


def test_two_traces_at_once(tmp_path: Path) -> None:
    """Each has what was recorded in its block, under a process of its own."""
    traces: list[Trace] = []
    records = Records()
    outer, inner = (Trace(tmp_path / name, traces) for name in ("a.json", "b.json.gz"))
    for one in (outer, inner):
        one.follow(Counters(0, records=records), WORKERS)
    with outer:
        records.append(record(0, 0.0))
        with inner:
            records.append(record(1, 8.0))
        records.append(record(2, 16.0))
    a, b = (loaded(tmp_path / name) for name in ("a.json", "b.json.gz"))
    for trace, batches in ((a, 3), (b, 1)):
        assert len(of_kind(trace["traceEvents"], "collate")) == batches
        assert trace["otherData"]["epochs"][0]["batches"] == batches
    merge_traces(tmp_path / "a.json", tmp_path / "b.json.gz", tmp_path / "c.json")
    merged = loaded(tmp_path / "c.json")["traceEvents"]
    assert len(of_kind(merged, "collate")) == 4


def test_iterations_under_way(tmp_path: Path) -> None:
    """All that deliver batches in the block, also earlier ones than the latest."""
    path, loader = tmp_path / "run.json", DataLoader(range(12), 2)
    over, first, second = iter(loader), iter(loader), iter(loader)
    assert [len(list(over)), len(next(first)), len(next(second))] == [6, 2, 2]
    with loader.trace(path):
        next(first), next(second), next(first)
        list(loader)
    epochs = loaded(path)["otherData"]["epochs"]
    assert [(e["epoch"], e["batches"]) for e in epochs] == [(1, 2), (2, 1), (3, 6)]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Is an error; beside one of the block, a note of that."""
    none = Trace(tmp_path / "none" / "run.json", [])
    with pytest.raises(FileNotFoundError, match="no folder"), none:
        pass
    taken = tmp_path / "folder"
    taken.mkdir()
    with pytest.raises(IsADirectoryError), Trace(taken, []):
        pass
    with pytest.raises(LookupError) as caught, Trace(taken, []):
        raise LookupError
    assert "was not written" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == [taken]


def profiled(path: Path) -> tuple[float, float]:
    """Profile a block; return clock readings just inside it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("warm"):
            pass
        with record_function("block"):
            began = time.perf_counter()
            torch.ones(1000, 1000).sum()
            ended = time.perf_counter()
    profiler.export_chrome_trace(str(path))
    return began, ended


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_on_torchs_clock(tmp_path: Path, suffix: str) -> None:
    """A wait that was inside a block of the profiler's is inside it in the merged file.

    Both clocks are compared within some microseconds; half a millisecond is allowed.
    """
    theirs, ours = tmp_path / f"theirs{suffix}", tmp_path / f"ours{suffix}"
    records, trace = Records(), Trace(ours, [])
    trace.follow(Counters(0, records=records), RecordedSettings("thread"))
    with trace:
        began, ended = profiled(theirs)
        records.append((0, began, ended, 0, 1, NOT_MADE, 0.0))
    merge_traces(ours, theirs, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    (block,) = of_kind(events, "block")
    (wait,) = of_kind(events, "wait")
    assert wait["dur"] == pytest.approx((ended - began) * 1e6, abs=0.01)
    assert block["ts"] - 500 <= wait["ts"]
    assert wait["ts"] + wait["dur"] <= block["ts"] + block["dur"] + 500
    assert wait["pid"] != block["pid"]


EVENT = {"ph": "X", "name": "x", "cat": "c", "pid": 1, "tid": 1, "dur": 1}


def test_traces_of_other_times_are_said(tmp_path: Path) -> None:
    """Such as those of two runs."""
    for name, ts in (("a", 1.0), ("b", 3e9)):
        (tmp_path / name).write_text(json.dumps([{**EVENT, "ts": ts}]))
    with pytest.warns(UserWarning, match="happened at the time of"):
        merge_traces(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    (tmp_path / "b").write_text("{}")
    with pytest.raises(ValueError, match="pass a trace"):
        merge_traces(tmp_path / "a", tmp_path / "b", tmp_path / "c")


async def test_another_thread_writes(tmp_path: Path) -> None:
    """``async with``: also where the block is cancelled; what is there is replaced.

    It is recorded once: a second block would replace the first one's file.
    """
    (tmp_path / "run.json").write_text("before")
    records, trace = Records(), Trace(tmp_path / "run.json", [])
    trace.follow(Counters(0, records=records), WORKERS)
    began = asyncio.Event()

    async def run() -> None:
        async with trace:
            records.append(record(0, 0.0))
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RuntimeError, match="make a new one"):
        await trace.__aenter__()
    found = await asyncio.to_thread(loaded, tmp_path / "run.json")
    assert of_kind(found["traceEvents"], "collate")
