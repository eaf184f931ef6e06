"""Traces: their format, their sums, their clock, and merging with torch's."""

import asyncio
import gzip
import json
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from aioloader import DataLoader, merge_traces
from aioloader._base.records import Copy, Counters, RecordedSettings
from aioloader._observe.trace import Traced, trace_events
from observe.showing import SETTINGS
from observe.trace_format import check_trace, of_kind, tracks


def traced(setting: RecordedSettings, count: int = 6) -> Traced:
    """Return an epoch of batches that overlap if there are two lanes.

    Each took 2 s to read, 1 to wait, 3 to transform, 1 to collate.
    """
    epoch = Traced(Counters(3), setting)
    for n in range(count):
        t, lane = 4.0 * n, n % max(1, setting.workers)
        made = (t, t + 2, t + 3, t + 6, t + 7, 5.0, 0.5, 0.1)
        epoch.records.append((n, t + 5, t + 8, lane, 4, made, 0.0))
    return epoch


def loaded(path: Path) -> Any:
    """Return the trace of a file, after a check of its format."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace = json.loads(content)
    check_trace(trace)
    return trace


def total(events: list[Any], name: str) -> float:
    """Return the total seconds of the events of a name."""
    return math.fsum(event["dur"] for event in of_kind(events, name)) / 1e6


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
def test_events_of_a_track_do_not_overlap(
    drawn: list[Any], setting: RecordedSettings
) -> None:
    """Whatever was recorded; every second is there."""
    epoch = Traced(Counters(0), setting)
    for number, (began, wait, lane, lasts) in enumerate(drawn):
        times = [*accumulate(lasts, initial=began)]
        asked, taken = times[-1] - wait, times[-1] + 1
        made = (*times, 0.0, 0.0, 0.0)
        epoch.records.append((number, asked, taken, lane, 1, made, 0.0))
    events = list(trace_events([epoch], 0, 1))
    check_trace({"traceEvents": events})
    for index, stage in enumerate(("read", "queued", "transform", "collate")):
        seconds = sum(lasts[index] for *_, lasts in drawn)
        assert total(events, stage) == pytest.approx(seconds, abs=1e-6)
    name = "make" if setting.place == "inline" else "wait"
    waits = math.fsum(wait + 1 for _, wait, *_ in drawn)
    assert total(events, name) == pytest.approx(waits, abs=1e-6)
    batches = {event["args"]["batch"] for event in of_kind(events, name)}
    assert batches == set(range(len(drawn)))


def test_a_trace_has_a_track_for_each_worker() -> None:
    """The consumer's first, then reads, workers, copies."""
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


def test_a_trace_has_all_batches_of_its_block(tmp_path: Path) -> None:
    """More than the records that are kept; of the running epoch and of later ones."""
    path, loader = tmp_path / "run.json", DataLoader(range(3001))
    batches = iter(loader)
    next(batches)
    with loader.trace(path):
        for _ in range(2999):
            next(batches)
        assert loader.stats().recent == 1024
        next(iter(loader))
        assert not path.exists()
    assert len(list(batches)) == 1
    makes = [event["args"] for event in of_kind(loaded(path)["traceEvents"], "make")]
    numbers = [(args["epoch"], args["batch"]) for args in makes]
    assert sorted(numbers) == [*((0, n) for n in range(1, 3000)), (1, 0)]
    assert list(tmp_path.iterdir()) == [path]


def test_nested_traces_each_have_their_batches(tmp_path: Path) -> None:
    """Merged, each is a process of its own."""
    a, b, c = (tmp_path / name for name in ("a.json", "b.json.gz", "c.json"))
    loader = DataLoader(range(4))
    batches = iter(loader)
    with loader.trace(a):
        next(batches)
        with loader.trace(b):
            next(batches)
        next(batches)
    for path, count in ((a, 3), (b, 1)):
        trace = loaded(path)
        assert len(of_kind(trace["traceEvents"], "make")) == count
        assert trace["otherData"]["epochs"][0]["batches"] == count
    merge_traces(a, b, c)
    assert len(of_kind(loaded(c)["traceEvents"], "make")) == 4


def test_a_trace_has_all_iterations_under_way(tmp_path: Path) -> None:
    """Those that deliver batches in the block, not only the latest."""
    path, loader = tmp_path / "run.json", DataLoader(range(12), 2)
    over, first, second = iter(loader), iter(loader), iter(loader)
    assert [len(list(over)), len(next(first)), len(next(second))] == [6, 2, 2]
    with loader.trace(path):
        next(first), next(second), next(first)
        list(loader)
    epochs = loaded(path)["otherData"]["epochs"]
    assert [(e["epoch"], e["batches"]) for e in epochs] == [(1, 2), (2, 1), (3, 6)]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """An exception of the block gets a note instead."""
    loader, folder = DataLoader([0]), tmp_path / "folder"
    folder.mkdir()
    with (
        pytest.raises(FileNotFoundError, match="no folder"),
        loader.trace(tmp_path / "none" / "run.json"),
    ):
        pass
    with pytest.raises(IsADirectoryError), loader.trace(folder):
        pass
    with pytest.raises(LookupError) as caught, loader.trace(folder):
        raise LookupError
    assert "was not written" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_merged_traces_are_on_torchs_clock(tmp_path: Path, suffix: str) -> None:
    """A wait inside a block of the profiler's is inside it in the merged file.

    Both clocks are compared within some microseconds; half a millisecond is allowed.
    """
    theirs, ours = tmp_path / f"theirs{suffix}", tmp_path / f"ours{suffix}"
    loader = DataLoader(range(2))
    batches = iter(loader)
    next(batches)
    with loader.trace(ours), profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("warm"):
            pass
        before = loader.stats().waited
        with record_function("block"):
            next(batches)
    profiler.export_chrome_trace(str(theirs))
    merge_traces(ours, theirs, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    (block,) = of_kind(events, "block")
    (wait,) = of_kind(events, "make")
    assert 0 < wait["dur"] <= (loader.stats().waited - before) * 1e6 + 0.01
    assert block["ts"] - 500 <= wait["ts"]
    assert wait["ts"] + wait["dur"] <= block["ts"] + block["dur"] + 500
    assert wait["pid"] != block["pid"]


EVENT = {"ph": "X", "name": "x", "cat": "c", "pid": 1, "tid": 1, "dur": 1}


def test_merging_traces_of_different_times_warns(tmp_path: Path) -> None:
    """As those of two runs."""
    for name, ts in (("a", 1.0), ("b", 3e9)):
        (tmp_path / name).write_text(json.dumps([{**EVENT, "ts": ts}]))
    with pytest.warns(UserWarning, match="happened at the time of"):
        merge_traces(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    (tmp_path / "b").write_text("{}")
    with pytest.raises(ValueError, match="pass a trace"):
        merge_traces(tmp_path / "a", tmp_path / "b", tmp_path / "c")


async def test_a_cancelled_block_writes_its_trace(tmp_path: Path) -> None:
    """It replaces the file.

    A trace records once: a second block would replace the first one's file.
    """
    path, began = tmp_path / "run.json", asyncio.Event()
    path.write_text("before")
    loader = DataLoader(range(2))
    trace = loader.trace(path)

    async def run() -> None:
        async with trace:
            async for _ in loader:
                began.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RuntimeError, match="make a new one"):
        await trace.__aenter__()
    written = await asyncio.to_thread(loaded, path)
    assert of_kind(written["traceEvents"], "wait")
    await loader.aclose()
