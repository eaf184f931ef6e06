"""The state of one of aioloader's streams: of one rank, or of all ranks at one moment.

The state is global: the position of all ranks together, and for each reader its state
and the number of its samples before that state. All ranks have delivered these samples,
so the state can be loaded on another number of ranks. It holds the description of the
stream: a dict, ready for JSON, of ``"kind"``, the parameters that determine the samples
and their order, and ``"of"``, the description of the stream before it. The location of
the data (root, store, credentials), caches, and how much is read ahead are no part of
it. ``"function"`` is the name of a user function, which may have been renamed: a
difference there is only worth a warning.

A state may come from a file that was truncated, edited, or restored only in part. Each
wrong value would have its own consequence: another error, or silently other samples. So
a state carries a checksum of its contents, and only what was saved is ever loaded.
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
    """Return a state.

    Its entries are ``stream``: its description; ``epoch``: its number; ``begun``: the
    number of the epoch in which the readers were at their beginning; ``readers``: how
    many are in the order; ``position``: how many positions all ranks have taken, if all
    are in step; ``streams``: for each reader (a string) its ``"state"`` after
    ``"taken"`` samples, and ``"ended"`` if there are no more. ``ended`` is added once
    these ranks have delivered all.
    """
    return {"version": VERSION, **entries}


def sealed(state: State) -> State:
    return {**state, "checksum": checksum(state)}


def opened(state: Any) -> State:
    """Return a state without its checksum.

    Raises:
        StateMismatchError: If it is not a state, of another version, or not as it was
            saved.
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
    found = {key: one for key, one in state.items() if key != "checksum"}
    if state.get("checksum") != checksum(found):
        raise StateMismatchError(
            "the state is damaged, or only a part of it: it is not as it was saved; "
            "load what state_dict() returned, or restart the epoch",
            expected=state.get("checksum"),
            found=checksum(found),
        )
    return found


def checksum(value: Any) -> int:
    """Return a checksum that JSON, pickle and ``torch.save`` preserve.

    Lists and tuples are alike, as are keys and their text, in any order. What JSON
    cannot hold has no part in it. An error in place of a state is raised.
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
        for one in value:
            _spell(one, add)
        add("]")
    elif isinstance(value, (dict, Mapping)):  # in this order: a dict is found quickly
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


def part_of(state: State, deal: ReaderAssignment) -> State:
    """Return the part of a state that one rank needs.

    Raises:
        StateMismatchError: If a reader is missing.
    """
    hosted, streams = deal.hosted(), state["streams"]
    missing = [reader for reader in hosted if str(reader) not in streams]
    if missing:
        raise StateMismatchError(
            f"the state has {_named(streams)} of {state['readers']}, but rank "
            f"{deal.rank} of {deal.ranks} (ranks times workers) also reads "
            f"{_listed(missing)}: merge the states of all ranks with merge_states() "
            "and load the result",
            expected=sorted(map(int, streams)),
            found=sorted(hosted),
        )
    return {
        **state,
        "streams": {str(reader): streams[str(reader)] for reader in hosted},
    }


def merged(states: Sequence[State], *, is_part: bool = False) -> State:
    """Return the positions of all ranks as one, which any number of ranks can load.

    All must be saved after the same number of batches; a rank that ended earlier may
    have had fewer. If it is a part, readers may be missing.

    Raises:
        StateMismatchError: If they are not of one epoch and one moment, or if readers
            are missing.
        ValueError: If there are no states.
    """
    if not states:
        raise ValueError("there are no states to merge: pass those of all ranks")
    first = states[0]
    _check_alike(states)
    position = _latest(states)
    if not are_in_step(states):
        others = sorted({one["position"] for one in states} - {position})
        raise StateMismatchError(
            f"the states are not of one moment: one was saved after {position:,} "
            f"samples of all ranks, others after {', '.join(map(str, others))}; save "
            "all ranks after the same number of batches",
            expected=position,
            found=others,
        )
    streams: State = {}
    for state in states:
        # Up to a later position there may be no more samples, or more that failed.
        left_out = {"failed"} if state["position"] < position else set()
        for reader, one in state["streams"].items():
            if reader not in streams or _progress(one) > _progress(streams[reader]):
                streams[reader] = {k: v for k, v in one.items() if k not in left_out}
    missing = [one for one in range(first["readers"]) if str(one) not in streams]
    if missing and not is_part:
        raise StateMismatchError(
            f"the states have {_named(streams)} of {first['readers']}; "
            f"{_listed(missing)} are missing: merge the states of all ranks and "
            "workers",
            expected=first["readers"],
            found=sorted(map(int, streams)),
        )
    whole = {key: one for key, one in first.items() if key != "ended"}
    whole["position"] = position
    whole["streams"] = {one: streams[one] for one in sorted(streams, key=int)}
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
    """Tell whether all ranks or workers are at one position, or have ended before."""
    position = _latest(states)
    return all(
        one["position"] <= position if one.get("ended") else one["position"] == position
        for one in states
    )


def _latest(states: Sequence[State]) -> int:
    """Return the position of the ranks that continue, or else the last one's.

    A rank that has ended has taken all its samples, which cannot be more.
    """
    going = [one for one in states if not one.get("ended")]
    latest: int = max(one["position"] for one in going or states)
    return latest


def _progress(one: State) -> tuple[bool, int]:
    return one.get("ended", False), one["taken"]


def _named(streams: State) -> str:
    return f"readers {_listed(sorted(map(int, streams)))}"


def _listed(readers: Sequence[int]) -> str:
    shown = ", ".join(map(str, readers[:8]))
    return shown if len(readers) <= 8 else f"{shown}... ({len(readers)} in all)"


Differences: TypeAlias = tuple[list[str], list[str]]


def differences(saved: Description, found: Description) -> Differences:
    """Compare two descriptions; return texts for an error, and for a warning."""
    before, now = _steps_of(saved), _steps_of(found)
    chains = [".".join(one["kind"] for one in steps) for steps in (before, now)]
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
    return [{k: v for k, v in one.items() if k != "of"} for one in reversed(steps)]


def mixed(states: Iterable[State]) -> dict[str, tuple[int, float]]:
    """Return of each source of mixtures, by name, how often it was read.

    The names of a mixture within another one follow that one's, after a slash. Of each:
    the samples that it gave in total, and in which pass over it its readers are, on
    average.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for state in states:
        for one in state["streams"].values():
            _count(state["stream"], one["state"] or {}, "", found)
    return {
        name: (sum(samples), sum(passes) / len(passes))
        for name, (samples, passes) in (
            (name, tuple(zip(*counts, strict=True))) for name, counts in found.items()
        )
    }


def _count(
    stream: Description,
    state: State,
    prefix: str,
    found: dict[str, list[tuple[int, int]]],
) -> None:
    """Add the samples and the passes of one reader, for each source of a mixture."""
    stream, state = _step(stream, state, {"mix"})
    if stream["kind"] != "mix":
        return
    blank: list[Any] = [0] * len(stream["names"])
    each = stream["names"], stream["streams"]
    counts, ups = (state.get(name) or blank for name in ("counts", "up"))
    for name, source, count, up in zip(*each, counts, ups, strict=True):
        last, where = _step(source, up or {}, {"repeat", "mix"})
        passes = where.get("pass", 0) + 1 if last["kind"] == "repeat" else 1
        found.setdefault(f"{prefix}{name}", []).append((count, passes if count else 0))
        _count(source, up or {}, f"{prefix}{name}/", found)


def _step(
    stream: Description, state: State, kinds: set[str]
) -> tuple[Description, State]:
    """Return the last step of one of the kinds, or else the source, and its state."""
    while stream["kind"] not in kinds and "of" in stream:
        stream, state = stream["of"], state.get("up") or {}
    return stream, state


def _compare(
    old: Description, new: Description, name: str, result: Differences
) -> None:
    was, is_now = old.get(name), new.get(name)
    if name == "streams" and was and is_now and len(was) == len(is_now):
        for at, (one, other) in enumerate(zip(was, is_now, strict=True)):
            for texts, more in zip(result, differences(one, other), strict=True):
                texts.extend(f"stream {at} of {old['kind']}: {text}" for text in more)
        return
    if name == "streams":
        was, is_now = (f"{len(found or ())} streams" for found in (was, is_now))
    text = f"{name} of {old['kind']} was {was!r}, and is {is_now!r}"
    result[name == "function"].append(text)
