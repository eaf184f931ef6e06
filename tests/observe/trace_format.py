"""A checker of the trace event format, from its documentation (Google, 2016).

Only what loaders write: complete events (X), counters (C) and metadata (M), in the JSON
object format.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
METADATA: dict[str, dict[str, type]] = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check_trace(trace: Any) -> None:
    """Raise ``AssertionError`` where a trace departs from the format."""
    assert isinstance(trace, dict)
    assert trace.get("displayTimeUnit", "ms") in {"ms", "ns"}
    assert isinstance(trace.get("otherData", {}), dict)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        check_event(event)
    check_nesting(events)
    named = {(one["pid"], one["tid"]) for one in of_kind(events, "thread_name")}
    used = {(one["pid"], one["tid"]) for one in events if one["ph"] == "X"}
    assert used == named
    processes = [one["pid"] for one in of_kind(events, "process_name")]
    assert len(set(processes)) == len(processes)


def check_event(event: Event) -> None:
    """Raise where one event departs from it."""
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert isinstance(event["name"], str)
    assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        (key, kind), *others = METADATA[event["name"]].items()
        assert not others
        assert set(event["args"]) == {key}
        assert type(event["args"][key]) is kind
        return
    assert isinstance(event["cat"], str)
    assert isinstance(event["ts"], int | float)
    if event["ph"] == "X":
        assert isinstance(event["dur"], int | float)
        assert event["dur"] >= 0
    else:
        assert event["ph"] == "C"
        assert event["args"]
        assert all(type(one) in {int, float} for one in event["args"].values())


def check_nesting(events: Iterable[Event]) -> None:
    """Raise where two complete events of a thread overlap; a nanosecond is rounding."""
    threads = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append((one["ts"], one["dur"]))
    for spans in threads.values():
        end = float("-inf")
        for begin, lasts in sorted(spans):
            assert begin >= end - 0.002
            end = begin + lasts


def of_kind(events: Iterable[Event], name: str) -> list[Event]:
    """Return the events of a name."""
    return [one for one in events if one["name"] == name]


def tracks(events: Iterable[Event]) -> dict[tuple[int, int], str]:
    """Return the names of the tracks."""
    return {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in of_kind(list(events), "thread_name")
    }
