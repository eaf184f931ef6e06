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
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert used == tracks(events).keys()
    processes = [event["pid"] for event in of_kind(events, "process_name")]
    assert len(set(processes)) == len(processes)


def check_event(event: Event) -> None:
    """Raise where an event departs from the format."""
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert isinstance(event["name"], str)
    assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        ((key, kind),) = METADATA[event["name"]].items()
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
        assert {*map(type, event["args"].values())} <= {int, float}


def check_nesting(events: Iterable[Event]) -> None:
    """Raise where events of a thread overlap by more than rounding, a nanosecond."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for spans in threads.values():
        end = float("-inf")
        for begin, lasts in sorted(spans):
            assert begin >= end - 0.002
            end = begin + lasts


def of_kind(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def tracks(events: Iterable[Event]) -> dict[tuple[int, int], str]:
    """Return the names of the tracks by process and thread."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_kind(events, "thread_name")
    }
