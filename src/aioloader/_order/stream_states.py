"""The state of an aioloader stream, for one rank or merged for all ranks.

It holds the position of all ranks together, and each reader's state and number of
samples, so it can be loaded on another number of ranks. Its description of the stream
is a JSON-ready dict of ``"kind"``, the parameters that determine the samples and their
order, and ``"of"``, the description of the previous step. It excludes the data's
location, caches and read-ahead. ``"function"`` is the name of a user function, which
may have been renamed, so a difference there causes only a warning.

A checksum detects states that were truncated, edited, or restored only in part: they
could silently yield wrong samples.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from types import NoneType
from typing import Any, TypeAlias

from aioloader._base.raising import usable
from aioloader._base.warnings import warn
from aioloader._order.ranks import ReaderAssignment
from aioloader.errors import StateMismatchError

State: TypeAlias = dict[str, Any]
Description: TypeAlias = dict[str, Any]
VERSION = 5


def state_of(**entries: Any) -> State:
    """Return the state of a stream, still without its checksum.

    Its entries are ``stream``: the description; ``epoch``: its number; ``begun``: the
    epoch in which the readers began; ``readers``: the number of readers; ``position``:
    how many positions all ranks have taken, if they are in step; ``streams``: by reader
    (a string), its ``"state"`` after ``"taken"`` samples, and ``"ended"`` if it has no
    more. ``ended`` is added once the state's ranks have delivered all their samples.
    """
    return {"version": VERSION, **entries}


def sealed(state: State) -> State:
    return {**state, "checksum": checksum(state)}


def opened(state: Any) -> State:
    """Return a state without its checksum.

    Raises:
        StateMismatchError: If ``state`` is no state, damaged, or of another version.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION:
        raise StateMismatchError(
            f"the state is of version {version!r}, and this aioloader reads version "
            f"{VERSION}: restart the epoch, or resume with the aioloader that saved "
            "it",
            expected=version,
            found=VERSION,
        )
    entries = {key: value for key, value in state.items() if key != "checksum"}
    if state.get("checksum") != checksum(entries):
        raise StateMismatchError(
            "the state is damaged, or only a part of it: it is not as it was saved; "
            "load what state_dict() returned, or restart the epoch",
            expected=state.get("checksum"),
            found=checksum(entries),
        )
    return entries


def checksum(value: Any) -> int:
    """Return a checksum that JSON, pickle and ``torch.save`` preserve.

    Lists equal tuples, keys equal their text, in any order. Values with neither a JSON
    form nor an ``__index__`` are ignored, but a ``FailedState`` raises its error.
    """
    words: list[str] = []
    _spell(value, words.append)
    return zlib.crc32("\0".join(words).encode(errors="backslashreplace"))


def _spell(value: Any, add: Callable[[str], object]) -> None:
    if isinstance(value, str):
        add(f"'{value}")
    elif isinstance(value, (int, NoneType)):  # booleans too
        add(str(value))
    elif isinstance(value, (list, tuple)):
        add("[")
        for item in value:
            _spell(item, add)
        add("]")
    elif isinstance(value, (dict, Mapping)):  # ``dict`` first: the check is faster
        add("{")
        for key in sorted(value, key=str):
            add(str(key))
            _spell(value[key], add)
        add("}")
    elif isinstance(value, float):
        add(repr(float(value)))
    else:
        usable(value)
        with contextlib.suppress(TypeError):  # numpy's integers have an index too
            add(str(index(value)))


def part_of(state: State, assignment: ReaderAssignment) -> State:
    """Return the part of a state that one rank needs.

    Raises:
        StateMismatchError: If the state lacks a reader that the rank needs.
    """
    assigned, streams = assignment.assigned(), state["streams"]
    missing = [reader for reader in assigned if str(reader) not in streams]
    if missing:
        raise StateMismatchError(
            f"the state has {_named(streams)} of {state['readers']}, but rank "
            f"{assignment.rank} of {assignment.ranks} (ranks times workers) also reads "
            f"{_listed(missing)}: merge the states of all ranks with merge_states() "
            "and load the result",
            expected=sorted(map(int, streams)),
            found=sorted(assigned),
        )
    return {
        **state,
        "streams": {str(reader): streams[str(reader)] for reader in assigned},
    }


def merged(states: Sequence[State], *, is_part: bool = False) -> State:
    """Merge the states of all ranks into one that any number of ranks can load.

    All must be saved after the same number of batches, except those of ranks that ended
    earlier. With ``is_part``, the result is part of a state and may lack readers.

    Raises:
        StateMismatchError: If the states are of different streams, epochs or moments,
            or readers are missing.
        ValueError: If there are no states.
    """
    if not states:
        raise ValueError("there are no states to merge: pass those of all ranks")
    first = states[0]
    _check_alike(states)
    position = _latest(states)
    if not are_in_step(states):
        positions = sorted({state["position"] for state in states} - {position})
        raise StateMismatchError(
            f"the states are not of one moment: one was saved after {position:,} "
            f"samples of all ranks, others after {', '.join(map(str, positions))}; "
            "save all ranks after the same number of batches",
            expected=position,
            found=positions,
        )
    streams: State = {}
    for state in states:
        # The failures of a rank that ended earlier are incomplete at this position.
        left_out = {"failed"} if state["position"] < position else set()
        for reader, stream in state["streams"].items():
            if reader not in streams or _progress(stream) > _progress(streams[reader]):
                streams[reader] = {k: v for k, v in stream.items() if k not in left_out}
    missing = [n for n in range(first["readers"]) if str(n) not in streams]
    if missing and not is_part:
        raise StateMismatchError(
            f"the states have {_named(streams)} of {first['readers']}; "
            f"{_listed(missing)} are missing: merge the states of all ranks and "
            "workers",
            expected=first["readers"],
            found=sorted(map(int, streams)),
        )
    whole = {key: value for key, value in first.items() if key != "ended"}
    whole["position"] = position
    whole["streams"] = {key: streams[key] for key in sorted(streams, key=int)}
    is_over = all(state.get("ended") for state in states)
    return {**whole, "ended": True} if is_over else whole


def _check_alike(states: Sequence[State]) -> None:
    first = states[0]
    for state in states[1:]:
        errors, _ = differences(first["stream"], state["stream"])
        if errors:
            raise StateMismatchError(
                f"the states belong to different streams: {'; '.join(errors)}"
                "; merge those of one",
                expected=first["stream"],
                found=state["stream"],
            )
        for key in ("epoch", "begun", "readers"):
            if state[key] != first[key]:
                raise StateMismatchError(
                    f"the states are not of one moment: one has {key} {first[key]}, "
                    f"another one has {key} {state[key]}; save all ranks after the "
                    "same number of batches",
                    expected=first[key],
                    found=state[key],
                )


def are_in_step(states: Sequence[State]) -> bool:
    """Tell whether all states have the same position, or ended at an earlier one."""
    last = _latest(states)
    positions = ((state["position"], state.get("ended")) for state in states)
    return all(n <= last if has_ended else n == last for n, has_ended in positions)


def _latest(states: Sequence[State]) -> int:
    """Return the latest position of the running ranks, or of all ranks if none runs."""
    going = [state for state in states if not state.get("ended")]
    latest: int = max(state["position"] for state in going or states)
    return latest


def _progress(stream: State) -> tuple[bool, int]:
    return stream.get("ended", False), stream["taken"]


def _named(streams: State) -> str:
    return f"readers {_listed(sorted(map(int, streams)))}"


def _listed(readers: Sequence[int]) -> str:
    shown = ", ".join(map(str, readers[:8]))
    return shown if len(readers) <= 8 else f"{shown}... ({len(readers)} in all)"


Differences: TypeAlias = tuple[list[str], list[str]]


def differences(saved: Description, current: Description) -> Differences:
    """Compare two descriptions; return the texts of errors and of warnings."""
    before, now = _steps_of(saved), _steps_of(current)
    chains = [".".join(step["kind"] for step in steps) for steps in (before, now)]
    if chains[0] != chains[1]:
        return [f"it was saved by {chains[0]}, and this is {chains[1]}"], []
    result: Differences = [], []
    for old, new in zip(before, now, strict=True):
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                _compare(old, new, name, result)
    return result


def is_repeatable(description: Description) -> bool:
    """Tell whether a stream yields the same samples when read again."""
    return all(
        step.get("deterministic", True)
        and all(map(is_repeatable, step.get("streams", ())))
        for step in _steps_of(description)
    )


def warn_of_order() -> None:
    """Warn that a stream that is not repeatable is read again."""
    warn(
        "the stream has deterministic=False: what its steps had read ahead now "
        "comes in another order, so samples may be lost or duplicated; "
        "use deterministic=True to resume exactly"
    )


def _steps_of(description: Description) -> list[Description]:
    steps = [description]
    while "of" in steps[-1]:
        steps.append(steps[-1]["of"])
    return [{k: v for k, v in step.items() if k != "of"} for step in reversed(steps)]


def mixture_counts(states: Iterable[State]) -> dict[str, tuple[int, float]]:
    """Return sample counts and mean pass numbers of mixtures' sources, by name.

    Sources of a mixture within a mixture are named ``"outer/inner"``.
    """
    counted: dict[str, list[tuple[int, int]]] = {}
    for state in states:
        for reader in state["streams"].values():
            _count(state["stream"], reader["state"] or {}, "", counted)
    return {
        name: (sum(n for n, _ in counts), sum(n for _, n in counts) / len(counts))
        for name, counts in counted.items()
    }


def _count(
    stream: Description,
    state: State,
    prefix: str,
    counted: dict[str, list[tuple[int, int]]],
) -> None:
    """Add one reader's sample count and pass number to ``counted``, for each source."""
    stream, state = _step(stream, state, {"mix"})
    if stream["kind"] != "mix":
        return
    blank: list[Any] = [0] * len(stream["names"])
    each = stream["names"], stream["streams"]
    counts, ups = (state.get(name) or blank for name in ("counts", "up"))
    for name, source, count, up in zip(*each, counts, ups, strict=True):
        last, where = _step(source, up or {}, {"repeat", "mix"})
        passes = where.get("pass", 0) + 1 if last["kind"] == "repeat" else 1
        pair = count, passes if count else 0
        counted.setdefault(f"{prefix}{name}", []).append(pair)
        _count(source, up or {}, f"{prefix}{name}/", counted)


def _step(
    stream: Description, state: State, kinds: set[str]
) -> tuple[Description, State]:
    """Return the last step of the given kinds, or else the source, and its state."""
    while stream["kind"] not in kinds and "of" in stream:
        stream, state = stream["of"], state.get("up") or {}
    return stream, state


def _compare(
    old: Description, new: Description, name: str, result: Differences
) -> None:
    was, is_now = old.get(name), new.get(name)
    if name == "streams" and was and is_now and len(was) == len(is_now):
        for number, pair in enumerate(zip(was, is_now, strict=True)):
            where = f"stream {number} of {old['kind']}"
            for texts, more in zip(result, differences(*pair), strict=True):
                texts.extend(f"{where}: {text}" for text in more)
        return
    if name == "streams":
        was, is_now = (f"{len(streams or ())} streams" for streams in (was, is_now))
    text = f"{name} of {old['kind']} was {was!r}, and is {is_now!r}"
    result[name == "function"].append(text)
