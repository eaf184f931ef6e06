"""Match states to streams: names of functions, and which parts of a state are loaded.

The state of each step holds that of the previous one under ``"up"``, so the parts
that belong to changed steps can be left out.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from aioloader._observe.warnings import warn
from aioloader._order.stream_chains import (
    Description,
    differences,
    is_repeatable,
    steps_of,
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
    """Return a state in the form that the described stream can load.

    Args:
        state: What ``state_dict`` of an iterator returned.
        found: The description of the stream.
        strict: Whether it must be the same stream; if not, parts that do not fit are
            left out, with a warning that names them.

    Raises:
        StateMismatchError: If the state is of another stream; names the differences.
    """
    errors, renamed = differences(state["stream"], found)
    if errors and strict:
        raise StateMismatchError(
            f"the state is of another stream: {'; '.join(errors)}; load it with the "
            "stream that saved it, or load the parts that fit with strict=False",
            expected=state["stream"],
            found=found,
        )
    if renamed:
        warn(
            f"the state was saved with functions of other names: {'; '.join(renamed)}; "
            "if they do something else, the samples are others"
        )
    if errors:
        state = _moved(state, errors, state["stream"], found)
    if not is_repeatable(found) and any(map(_counts, state["streams"].values())):
        warn(
            "the stream has deterministic=False: what its steps had read ahead now "
            "comes in another order, so samples may be lost or duplicated; "
            "use deterministic=True to resume exactly"
        )
    state = {**state, "stream": found}
    return state if strict else {**state, "strict": False}


def _counts(one: State) -> bool:
    """Return whether steps of a reader had read ahead of the samples passed on."""
    found = [one["state"]]
    while found:
        state = found.pop()
        taken, up = state.get("taken", 0), state.get("up") or []
        if max(taken) if isinstance(taken, list) else taken:
            return True
        found += up if isinstance(up, list) else [up] if up else []
    return False


def _moved(
    state: State, errors: Sequence[str], saved: Description, found: Description
) -> State:
    """Leave out the parts that do not fit, and warn."""
    lost: dict[str, None] = {}
    streams = {}
    rounds, more = divmod(state["position"], state["readers"])
    for reader, one in state["streams"].items():
        inner = _carried(one["state"], saved, found, lost)
        # Samples passed on since then come again: another chain cannot tell which.
        given = rounds + (int(reader) < more)
        streams[reader] = {**one, "state": inner, "taken": given}
    warn(
        f"the state is of another stream: {'; '.join(errors)}; what fits is loaded, "
        f"and this is ignored: {'; '.join(lost) or 'nothing'}"
    )
    return {**state, "streams": streams}


def _carried(
    state: State, saved: Description, found: Description, lost: dict[str, None]
) -> State:
    """Return the parts of a cursor's state that fit another chain; note the rest."""
    if not state:
        return {}
    before, now = steps_of(saved), steps_of(found)
    owns: list[State] = []  # states of the steps, last one first
    for _ in before[1:]:
        owns.append({name: one for name, one in state.items() if name != "up"})
        state = state.get("up") or {}
    made = _carried_source(state, before[0], now[0], lost)
    if not made:
        return {}
    at = 1
    for step in now[1:]:
        places = range(at, len(before))
        same = next((k for k in places if _is_alike(before[k], step)), None)
        if same is None:
            lost[f"{step['kind']} has no state, and starts again"] = None
        own = {} if same is None else owns[len(before) - 1 - same]
        skipped = before[at:same] if same is not None else []
        lost.update({f"the state of {one['kind']}": None for one in skipped})
        at = at if same is None else same + 1
        made = {**own, "up": made}
    lost.update({f"the state of {one['kind']}": None for one in before[at:]})
    return made


def _carried_source(
    state: State, saved: Description, found: Description, lost: dict[str, None]
) -> State:
    """Return the parts of a source's state that fit another source; may be empty."""
    if _is_alike(saved, found):
        return state
    pairs = list(zip(saved.get("streams", ()), found.get("streams", ()), strict=False))
    if not pairs or len(saved["streams"]) != len(found["streams"]) or not state:
        lost[f"all of it but the epoch: {found['kind']} starts again"] = None
        return {}
    up = [
        _carried(one, *pair, lost) for one, pair in zip(state["up"], pairs, strict=True)
    ]
    return {**state, "up": up}


def _is_alike(one: Description, other: Description) -> bool:
    """Return whether two steps differ at most in the names of functions."""
    return not any(
        one.get(name) != other.get(name)
        for name in one.keys() | other.keys()
        if name not in {"function", "of"}
    )
