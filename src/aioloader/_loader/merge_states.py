"""The states of all ranks as one, which any number of ranks can load.

Over a map-style dataset all unfinished ranks have the same state, and any of them will
do. Streams are split between ranks, so each rank has a part of their state.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from aioloader._loader.state import State, sealed, unsealed
from aioloader._loader.state_check import shared
from aioloader._order.stream_states import merged as merge_streams
from aioloader.errors import StateMismatchError

_ALIKE = ("kind", "length", "batch_size", "readers")
_OF_ONE = {"before", "pulled"}  # of an order: ranks may be ahead of each other
_SAVE = (
    "save all ranks after the same batch (with in_order=True, if there are batches "
    "beyond it)"
)
_READ = (
    _SAVE + "; once a worker that reads has ended, its rank is ahead of the others: "
    "load the own state of each rank, on as many ranks and workers"
)
_SEED = "give the loaders of all ranks the same sampler, seeded alike"


def merge_states(states: Iterable[State]) -> State:
    """Return one state for all ranks, from the state of each.

    All must be saved after the same number of batches; a rank that had fewer is
    included with its state between epochs.

    Args:
        states: What ``state_dict`` of each rank's loader returned, in any order.

    Raises:
        StateMismatchError: If they are not of one run and one moment, or parts of the
            streams are missing.
        ValueError: If there are no states.
    """
    states = [unsealed(state) for state in states]
    if not states:
        raise ValueError("there are no states to merge")
    for key in _ALIKE:
        _check_alike(states, key, states[0].get(key))
    epoch = min(state["epoch"] for state in states)
    going = [state for state in states if state["epoch"] == epoch]
    over = [state for state in states if state["epoch"] != epoch]
    for state in over:
        if state["epoch"] != epoch + 1 or state["done"]:
            _refuse("epoch", epoch, state["epoch"])
    hint = _READ if going[0]["readers"] > 1 else _SAVE
    for key in ("done", "beyond"):
        _check_alike(going, key, going[0][key], hint)
    _check_orders(going)
    merged = dict(going[0])
    if merged["states"]:
        merged["states"] = {
            reader: _merged(reader, going, over) for reader in merged["states"]
        }
    default = [(state.get("generators") or {}).get("default") for state in states]
    if "generators" in merged and default != default[:1] * len(states):
        # Each rank has its own, and keeps it.
        merged["generators"] = {**merged["generators"]}
        merged["generators"].pop("default", None)
    if merged["readers"] > 1 and _is_of_ours(merged["states"].get("0")):
        merged["states"] = shared(merged, merged["readers"], is_part=False)
    return sealed(merged)


def _merged(reader: str, going: Sequence[State], over: Sequence[State]) -> Any:
    """Return the state of one reader, which has a part on each rank."""
    parts = [state["states"].get(reader) for state in going]
    first = parts[0]
    if not _is_of_ours(first):
        for part in parts:
            if part != first:
                _refuse(f"the state of reader {reader}", first, part)
        return first
    streams = [part["dataset"] for part in parts]
    for state in over:
        last = (state.get("last") or {}).get(reader)
        if last is not None and "dataset" in last:
            streams.append({**last["dataset"], "ended": True})
    whole = {key: one for key, one in first.items() if key != "again"}
    is_part = going[0]["readers"] > 1  # of the workers of this number
    return {**whole, "dataset": merge_streams(streams, is_part=is_part)}


def _is_of_ours(one: Any) -> bool:
    """Tell whether the state of a reader is that of one of our streams."""
    state = one.get("dataset") if isinstance(one, dict) else None
    return isinstance(state, dict) and "streams" in state


def _check_alike(
    states: Sequence[State], key: str, value: Any, hint: str = _SAVE
) -> None:
    for state in states:
        if state.get(key) != value:
            _refuse(key, value, state.get(key), hint)


def _check_orders(states: Sequence[State]) -> None:
    """Check that all draw from one order; before an epoch, not all may have drawn."""
    first = states[0].get("order", {})
    for state in states:
        for key, one in state.get("order", {}).items():
            if key not in _OF_ONE and first.get(key, one) != one:
                _refuse(f"{key} of the order", first[key], one, _SEED)


def _refuse(key: str, one: Any, other: Any, hint: str = _SAVE) -> None:
    # The state of a generator is long; its seed comes first.
    raise StateMismatchError(
        f"the states are not of one run and one moment: {key} is {one!r:.80} in one of "
        f"them and {other!r:.80} in another; {hint}",
        expected=one,
        found=other,
    )
