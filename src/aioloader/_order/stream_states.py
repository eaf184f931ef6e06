"""The state of one of aioloader's streams: of one rank, or of all ranks at one moment.

The state is global: the position of all ranks together, and for each reader its state
and the number of its samples before that state. All ranks have delivered these samples,
so the state can be loaded on another number of ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from aioloader._order.checksums import checksum
from aioloader._order.shares import Deal
from aioloader._order.stream_chains import Description, differences
from aioloader.errors import StateMismatchError

State: TypeAlias = dict[str, Any]
VERSION = 5


def sealed(state: State) -> State:
    """Return a state with its checksum."""
    return {**state, "checksum": checksum(state)}


def opened(state: Any) -> State:
    """Return a state without its checksum.

    Raises:
        StateMismatchError: If it is no state, of another version, or not as it was
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


def state_of(  # noqa: PLR0913  (its entries)
    stream: Description,
    epoch: int,
    readers: int,
    position: int,
    streams: State,
    *,
    begun: int,
    has_ended: bool = False,
) -> State:
    """Return a state.

    Args:
        stream: The description of the stream.
        epoch: The number of the epoch.
        readers: Number of readers in the order.
        position: How many positions all ranks have taken, if all are in step.
        streams: For each reader (a string) its ``"state"`` after ``"taken"`` samples;
            ``"ended"`` if there are no more.
        begun: The number of the epoch in which they were at their beginning.
        has_ended: Whether these ranks have delivered all their samples.
    """
    end = {"ended": True} if has_ended else {}
    return {
        "version": VERSION,
        "stream": stream,
        "epoch": epoch,
        "begun": begun,
        "position": position,
        "readers": readers,
        "streams": streams,
        **end,
    }


def part_of(state: State, deal: Deal) -> State:
    """Return the part of a state that one rank needs.

    Raises:
        StateMismatchError: If a reader is missing.
    """
    hosted, streams = deal.hosted(), state["streams"]
    missing = [reader for reader in hosted if str(reader) not in streams]
    if missing:
        raise StateMismatchError(
            f"the state has {_named(streams)} of {state['readers']}, but rank "
            f"{deal.rank} of {deal.ranks} also reads {_listed(missing)}: merge the "
            "states of all ranks with merge_states() and load the result",
            expected=sorted(map(int, streams)),
            found=sorted(hosted),
        )
    mine = {str(reader): streams[str(reader)] for reader in hosted}
    return {**state, "streams": mine}


def merge_states(states: Iterable[State]) -> State:
    """Merge what ``state_dict`` of all ranks' iterators returned: see ``merged``."""
    return sealed(merged(map(opened, states)))


def merged(states: Iterable[State], *, is_part: bool = False) -> State:
    """Return the positions of all ranks as one, which any number of ranks can load.

    All must be saved after the same number of batches; a rank that ended earlier may
    have had fewer.

    Args:
        states: The ``position`` of each rank's iterator, in any order.
        is_part: Whether readers may be missing.

    Raises:
        StateMismatchError: If they are not of one epoch and one moment, or if readers
            are missing.
        ValueError: If there are no states.
    """
    states = list(states)
    if not states:
        raise ValueError("there are no states to merge")
    stream = _common_stream(states)
    epoch, begun = _common(states, "epoch"), _common(states, "begun")
    readers = _common(states, "readers")
    position = _position(states)
    streams: State = {}
    for state in states:
        # Up to a later position there may be no more samples, or more that failed.
        left_out = {"failed"} if state["position"] < position else set()
        for reader, one in state["streams"].items():
            if reader not in streams or _progress(one) > _progress(streams[reader]):
                streams[reader] = {k: v for k, v in one.items() if k not in left_out}
    missing = [reader for reader in range(readers) if str(reader) not in streams]
    if missing and not is_part:
        raise StateMismatchError(
            f"the states have {_named(streams)} of {readers}; {_listed(missing)} are "
            "missing: merge the states of all ranks and workers",
            expected=readers,
            found=sorted(map(int, streams)),
        )
    ordered = {reader: streams[reader] for reader in sorted(streams, key=int)}
    is_over = all(state.get("ended") for state in states)
    return state_of(
        stream, epoch, readers, position, ordered, begun=begun, has_ended=is_over
    )


def _common(states: Sequence[State], key: str) -> Any:
    """Return the value of a key that must be equal in all states."""
    first = states[0][key]
    for state in states[1:]:
        if state[key] != first:
            raise StateMismatchError(
                f"the states are not of one moment: one has {key} {first}, another "
                f"one has {key} {state[key]}",
                expected=first,
                found=state[key],
            )
    return first


def _common_stream(states: Sequence[State]) -> Description:
    """Return the description of the stream that all states belong to."""
    first: Description = states[0]["stream"]
    for state in states[1:]:
        errors = differences(first, state["stream"]).errors
        if errors:
            raise StateMismatchError(
                f"the states belong to different streams: {'; '.join(errors)}",
                expected=first,
                found=state["stream"],
            )
    return first


def are_in_step(states: Sequence[State]) -> bool:
    """Tell whether all ranks or workers are at one position, or have ended before."""
    going, ended = _positions(states)
    return len(going) <= 1 and max(ended, default=0) <= max(going or ended)


def _positions(states: Sequence[State]) -> tuple[set[int], set[int]]:
    """Return the positions of those that continue, and of those that have ended."""
    going = {one["position"] for one in states if not one.get("ended")}
    return going, {one["position"] for one in states if one.get("ended")}


def _position(states: Sequence[State]) -> int:
    """Return the position of all ranks that are in step.

    It is that of the ranks that continue. One that has ended has taken all its samples,
    which cannot be more.
    """
    going, ended = _positions(states)
    position: int = max(going or ended)
    if not are_in_step(states):
        others = sorted((going | ended) - {position})
        raise StateMismatchError(
            f"the states are not of one moment: one was saved after {position:,} "
            f"samples of all ranks, others after {', '.join(map(str, others))}; save "
            "all ranks after the same number of batches",
            expected=position,
            found=others,
        )
    return position


def _progress(one: State) -> tuple[bool, int]:
    return one.get("ended", False), one["taken"]


def _named(streams: State) -> str:
    return f"readers {_listed(sorted(map(int, streams)))}"


def _listed(readers: Sequence[int]) -> str:
    """Return reader numbers as text, shortened if there are many."""
    shown = ", ".join(map(str, readers[:8]))
    return shown if len(readers) <= 8 else f"{shown}... ({len(readers)} in all)"
