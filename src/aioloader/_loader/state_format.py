"""The shape of a state: is it one at all, and whole, with numbers where they belong?

A state may come back from a file that was cut, edited, or restored only in part: then
it is refused, for with a part of it another run would go on, quietly.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from aioloader._order.generators import is_packed
from aioloader.errors import StateMismatchError

_KEYS = ("kind", "epoch", "done", "beyond", "states")
# All keys of a state; the parts are mappings whose own keys depend on the moment.
_WHOLE = (
    "version",
    "kind",
    "length",
    "batch_size",
    "readers",
    "ranks",
    "epoch",
    "seed",
    "done",
    "beyond",
    "default",
)
_PARTS = ("order", "generator", "generators", "states", "last", "datasets")


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with all keys, each part in a tuple of one (empty: of none).

    ``torch.distributed.checkpoint`` restores what a fresh loader has keys for, and
    looks into mappings, but saves a tuple as one value.
    """
    whole = {key: state.get(key) for key in _WHOLE}
    parts = {key: (state[key],) if state.get(key) else () for key in _PARTS}
    return {**whole, **parts}


def unsealed(state: Any) -> Any:
    """Return what ``sealed`` was given; what is no state, as it is.

    Raises:
        StateMismatchError: If a part is none.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        return state
    found = {key: one for key, one in state.items() if one is not None}
    for key in set(_PARTS) & set(found):
        part = found.pop(key)
        if not isinstance(part, (list, tuple)) or len(part) > 1:
            _refuse(key, f"is no part of a state: {_shown(part)}")
        if part or key == "states":
            found[key] = part[0] if part else {}
    return found


def check_shape(state: Any, version: int) -> None:
    """Check that ``state`` is what ``state_dict`` returned.

    Raises:
        StateMismatchError: If it is of another version, or something is missing or
            wrong; says what.
    """
    _check_version(state, version)
    for key in _KEYS:
        if key not in state:
            _refuse(key, "is missing")
    for key in ("epoch", "done"):
        _check_count(key, state[key])
    _check_beyond(state["beyond"], state["done"])
    for key in ("states", "order", "generators", "last", "datasets"):
        if not isinstance(state.get(key, {}), Mapping):
            _refuse(key, f"is no dict: {_shown(state[key])}")
    for name, packed in _generators(state):
        if not is_packed(packed):
            _refuse(name, f"is no state of a generator: {_shown(packed)}")
    _check_readers(state)
    _check_datasets(state.get("datasets", {}))
    if state["done"] or state["beyond"]:
        _check_drawn(state)


def _check_version(state: Any, version: int) -> None:
    if not isinstance(state, Mapping) or "version" not in state:
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateMismatchError(
            f"this is no state of an aioloader.DataLoader: {_shown(keys)}",
            expected="a state",
            found=type(state).__name__,
        )
    if state["version"] != version:
        raise StateMismatchError(
            f"the state is of version {state['version']!r}, and this aioloader reads "
            f"version {version}",
            expected=state["version"],
            found=version,
        )


def _generators(state: Any) -> list[tuple[str, Any]]:
    found = [(f"generators.{k}", one) for k, one in state.get("generators", {}).items()]
    if "generator" in state:
        found.append(("generator", state["generator"]))
    if "generator" in state.get("order", {}):
        found.append(("order.generator", state["order"]["generator"]))
    return found


def _check_beyond(beyond: Any, done: int) -> None:
    if not isinstance(beyond, (list, tuple)):
        _refuse("beyond", f"is no list: {_shown(beyond)}")
    for number in beyond:
        _check_count("beyond", number)
        if number < done:
            _refuse("beyond", f"has {number}, which is below done, {done}")


def _check_readers(state: Any) -> None:
    """Check the states of readers: of streams they also count samples."""
    for reader, one in state["states"].items():
        name = f"states.{reader}"
        if not str(reader).isdecimal() or not isinstance(one, Mapping):
            _refuse(name, f"is no state of a reader: {_shown(one)}")
        if state["kind"] == "map":
            continue
        for key in ("read", "skip"):
            if key not in one and "is_over" not in one:
                _refuse(f"{name}.{key}", "is missing")
            _check_count(f"{name}.{key}", one.get(key, 0))
        if one.get("skip", 0) > one.get("read", 0):
            _refuse(name, f"skips {one['skip']} of {one['read']} samples")


def _check_datasets(datasets: Any) -> None:
    """Check of whose map-style dataset the states are: the loader's, or workers'."""
    names = set(map(str, datasets))
    if names and names != {"loader"} and names != set(map(str, range(len(datasets)))):
        _refuse("datasets", f"is of {_shown(sorted(names))}")


def _check_drawn(state: Any) -> None:
    """Check that what was drawn is there, once something was delivered."""
    if type(state.get("seed")) is not int:
        _refuse("seed", "is missing, though batches were delivered")
    if state["kind"] != "map":
        if not state["states"] and state["done"]:
            _refuse("states", "is empty, though batches were delivered")
        return
    order = state.get("order", {})
    if "sampler" not in order:
        _refuse("order", "is missing, though batches were delivered")
    is_drawn = "generator" in order or type(order.get("seed")) is int
    if order["sampler"] in ("RandomSampler", "ShuffledIndices") and not is_drawn:
        _refuse("order.seed", "is missing, though batches were delivered")
    for key in ("seed", "epoch", "length"):
        if type(order.get(key)) not in {int, type(None)}:
            _refuse(f"order.{key}", f"is no number: {_shown(order[key])}")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        _refuse(name, f"is no count: {_shown(value)}")


def _refuse(name: str, what: str) -> NoReturn:
    raise StateMismatchError(
        f"the state is damaged, or only a part of it: {name!r} {what}",
        expected=name,
        found=what,
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
