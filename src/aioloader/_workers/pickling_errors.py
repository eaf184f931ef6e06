"""Messages that say which attribute cannot be pickled, and what to do about it."""

import contextlib
import types
from typing import Any

from aioloader._transport.codec import Reducers, encode_by_value

_NONE: Reducers = {}
_PARTS = (
    *("dataset", "transform", "collate_fn", "worker_init_fn", "lifespan"),
    *("on_error", "retry", "default_collate_fn_map"),
)


def explain(spec: object, error: Exception, reducers: Reducers = _NONE) -> str:
    """Return a message naming what cannot be pickled; raise ``error`` if all can be."""
    for name in _PARTS:
        part = getattr(spec, name, None)
        refusal = _refusal(part, set(), reducers)
        if refusal is not None:
            path, culprit = refusal
            where = (type(part).__name__ if name == "dataset" else name) + path
            return (
                f"{where} cannot be pickled, so it cannot be sent to worker processes: "
                f"a {type(culprit).__name__!r} object ({error}); open it in the worker "
                "(lazily, in `lifespan=` or in `worker_init_fn`), leave it out in "
                "`__getstate__`, define it in a module that your script imports, let "
                "workers inherit it with multiprocessing_context='fork', or use "
                "workers='thread'"
            )
    if _refusal(spec, set(), reducers) is None:  # e.g. a signal handler raised it
        raise error
    return (
        f"what the workers need cannot be pickled: {error}; "
        "multiprocessing_context='fork' lets them inherit it"
    )


def _refusal(
    value: object, seen: set[int], reducers: Reducers
) -> tuple[str, object] | None:
    """Return path and value of a part that cannot be pickled; None if none is found."""
    if len(seen) > 10_000 or id(value) in seen:
        return None
    with contextlib.suppress(Exception):  # a user's __reduce__ may raise anything
        encode_by_value(value, reducers)
        return None
    seen.add(id(value))
    for step, part in _parts(value):
        refusal = _refusal(part, seen, reducers)
        if refusal is not None:
            return step + refusal[0], refusal[1]
    return "", value


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return (name, part) pairs for the parts of ``value`` that pickling visits."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, type):
        return [(f".{name}", part) for name, part in vars(value).items()]
    inner = ("func", "args", "keywords", "__self__")  # of partials and bound methods
    parts = [(f".{k}", getattr(value, k)) for k in inner if hasattr(value, k)]
    # The class comes last: workers cannot import it if it is local or in a script.
    cls = type(value)
    is_sent = cls.__module__ == "__main__" or "<locals>" in cls.__qualname__
    return [*_state_of(value), *parts, *([("", cls)] if is_sent else [])]


def _state_of(value: Any) -> list[tuple[str, Any]]:
    """Return (name, value) pairs for the attributes that pickling ``value`` visits."""
    try:
        state = value.__getstate__()
    except Exception:  # of the user's code
        return []
    states = state if isinstance(state, tuple) else (state,)  # a dict, and slots
    spaces = [space for space in states if isinstance(space, dict)]
    return [(f".{name}", part) for space in spaces for name, part in space.items()]


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return (name, object) pairs for a function's closure, defaults and globals."""
    parts = []
    code, space = function.__code__, function.__globals__
    cells = function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            parts.append((f".<{name}>", cell.cell_contents))
    by_name = (function.__kwdefaults__ or {}).values()
    defaults = (*(function.__defaults__ or ()), *by_name)
    parts += [(f".__defaults__[{place}]", part) for place, part in enumerate(defaults)]
    return parts + [(f".<{k}>", space[k]) for k in code.co_names if k in space]
