"""Match states to streams: names of functions, and what must be equal."""

import functools
import inspect
from typing import Any

from aioloader._base.warnings import warn
from aioloader._order.stream_states import (
    Description,
    differences,
    is_repeatable,
    warn_of_order,
)
from aioloader.datasets._streams.cursors import State
from aioloader.errors import StateMismatchError

_MAIN = {"__main__", "__mp_main__"}


def name_of(function: Any) -> str:
    """Return the qualified name of a function, or of the class of a callable.

    It is the same in each process: no addresses, arguments or contents.
    """
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    is_known = module and module not in _MAIN
    return f"{module}.{named.__qualname__}" if is_known else str(named.__qualname__)


def fitted(state: State, found: Description, *, strict: bool) -> State:
    """Return a state of an iterator in the form that the described stream can load.

    If ``strict``, shards must have the same versions, not only the same lengths. A
    StateMismatchError if it is of another stream; it names the differences.
    """
    errors, renamed = differences(state["stream"], found)
    if errors:
        raise StateMismatchError(
            f"the state is of another stream: {'; '.join(errors)}; load it with the "
            "stream that saved it, or restart the epoch",
            expected=state["stream"],
            found=found,
        )
    if renamed:
        warn(
            f"the state was saved with functions of other names: {'; '.join(renamed)}; "
            "if they do something else, the samples are others"
        )
    if not is_repeatable(found) and any(map(_counts, state["streams"].values())):
        warn_of_order()
    streams = state["streams"] if strict else _without_stamps(state["streams"])
    return {**state, "stream": found, "streams": streams}


def _without_stamps(state: Any) -> Any:
    """Return a state that any shards of the same sizes fit."""
    if isinstance(state, list):
        return [*map(_without_stamps, state)]
    if not isinstance(state, dict):
        return state
    if isinstance(at := state.get("at"), dict):  # in a shard
        return {**state, "at": {k: one for k, one in at.items() if k != "stamp"}}
    return {name: _without_stamps(one) for name, one in state.items()}


def _counts(one: State) -> bool:
    """Return whether steps of a reader had read ahead of the samples passed on."""
    found = [one["state"]]
    while found:
        state = found.pop()
        taken = state.get("taken", 0) or state.get("offset", 0)
        up = state.get("up") or []
        if max(taken) if isinstance(taken, list) else taken:
            return True
        found += up if isinstance(up, list) else [up] if up else []
    return False
