"""Whether a state is whole, and fits a loader.

A state may come from a file that was truncated, edited, or restored only in part. It is
refused then: part of a state would silently resume a different run.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

from torch.utils.data import RandomSampler

from aioloader._loader.options import Options
from aioloader._loader.state import VERSION, State, generators_of, identity
from aioloader._order.generators import is_packed
from aioloader._order.indices import contents_of, described
from aioloader._order.orders import drawing_part_of
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind, is_own_stream


def check(options: Options, state: State) -> None:
    """Check that ``state`` was saved by a loader like this one.

    Raises:
        StateMismatchError: If it was not; names both.
    """
    check_shape(state)
    mine = identity(options)
    for name, message in _MESSAGES.items():
        saved, found = state.get(name), mine[name]
        is_known = name not in _UNKNOWN or not (saved is None or found is None)
        if is_known and saved != found:
            raise StateMismatchError(
                message.format(saved=_counted(saved), found=_counted(found)),
                expected=saved,
                found=found,
            )
    if options.kind is not Kind.MAP:
        return
    if state.get("order"):
        _check_order(options, state, state["order"])
    with contextlib.suppress(TypeError, NotImplementedError):
        delivered = max((state["done"], *(one + 1 for one in state["beyond"])))
        if delivered > options.length():
            _refuse("an epoch of {} batches or more", delivered, options.length())


def fitted(options: Options, state: State, *, strict: bool) -> State:
    """Return a state with its stream states converted for this loader's stream.

    Raises:
        StateMismatchError: If they belong to another stream, and ``strict`` is set.
    """
    dataset = options.dataset
    if not is_own_stream(dataset):
        return state
    state = dict(state)
    for key in {"states", "last"} & state.keys():
        state[key] = {
            reader: {**one, "dataset": dataset.fitted(one["dataset"], strict=strict)}
            if "dataset" in one
            else one
            for reader, one in state[key].items()
        }
    return state


# Keys that may be None, in the state or in the loader.
_UNKNOWN = {"length", "tail"}
_MESSAGES = {
    "kind": "the state was saved for a dataset of kind {saved}, but this one's is "
    "{found}; load it with the same dataset",
    "length": "the state was saved for {saved} samples, but the dataset has "
    "{found}; load it with the same dataset",
    "batch_size": "the state was saved with batches of {saved} samples (of all ranks "
    "together), but the loader makes {found}; load it with the same batch_size x "
    "world_size",
    "ranks": "the state was saved on {saved} ranks, but there are {found}; with a "
    "custom batch_sampler a run cannot be resumed on another number of ranks",
    "tail": "the state was saved with tail={saved}, but the loader has tail={found}; "
    "load it with the same tail, or restart the epoch",
    "readers": "the state was saved with {saved} readers of the iterable (workers that "
    "each read a part of it), but the loader has {found}; load it with the same "
    "num_workers and fetch",
}


_ORDER = {
    "sampler": "the sampler {!r}",
    "length": "a sampler of {!r} indices",
    "seed": "the seed {!r} of ShuffledIndices",
    "replacement": "replacement={!r} of the sampler",
    "contents": "indices or weights of the sampler with checksum {!r}",
}
_NEWER = {"replacement", "contents"}


def _check_order(options: Options, state: State, saved: State) -> None:
    """Check the sampler, and the seed of its generator."""
    mine = described(options.index_sampler)
    if "contents" in saved:  # not between epochs
        mine |= contents_of(options.index_sampler)
    for name, what in _ORDER.items():
        # States of older versions lack some keys.
        is_known = name in mine and (name in saved or name not in _NEWER)
        if is_known and saved.get(name) != mine[name]:
            _refuse(what, saved.get(name), mine[name])
    _check_generator(options, state, saved)


def _check_generator(options: Options, state: State, saved: State) -> None:
    """Check the seed of the generator that the order is drawn from."""
    what = "a generator of seed {!r} for the order"
    between = state.get("generators") or {}
    if state["done"] or state["beyond"]:  # the order has its own generator
        between = {}
    for name in set(between) - set(generators_of(options)):
        _refuse(what, between[name]["seed"], None)
    part = drawing_part_of(options.index_sampler)
    generator = None if part is None else part.generator
    is_random = isinstance(options.index_sampler, RandomSampler)
    if generator is None and not (is_random and "generator" in saved):
        return
    drawn = (
        saved.get("generator") or between.get("sampler") or between.get("loader") or {}
    )
    found = None if generator is None else generator.initial_seed()
    if drawn.get("seed") != found:
        _refuse(what, drawn.get("seed"), found)


def _refuse(what: str, saved: Any, found: Any) -> NoReturn:
    hint = ""
    if sorted(map(str, (saved, found))) == ["RandomSampler", "ShuffledIndices"]:
        hint = " (shuffle=True with ranks: rank=0, world_size=1 is one rank)"
    elif "generator" in what and not (saved is None or found is None):
        hint = f"; give it the same seed with manual_seed({saved})"
    elif "checksum" in what:
        hint = "; set them as they were at the start of the epoch, before loading"
    raise StateMismatchError(
        f"the state was saved with {what.format(saved)}, but the loader has "
        f"{what.format(found)}{hint}",
        expected=saved,
        found=found,
    )


# -- is it a state, and whole? ------------------------------------------------------


def check_shape(state: Any) -> None:
    """Check that ``state`` is what ``state_dict`` returned, unsealed.

    Raises:
        StateMismatchError: If it is of another version, or something is missing or
            wrong; names it.
    """
    _check_version(state)
    for key in ("kind", "epoch", "done", "beyond", "states"):
        if key not in state:
            _damaged(key, "is missing")
    for key in ("epoch", "done"):
        _check_count(key, state[key])
    _check_beyond(state["beyond"], state["done"])
    for key in ("states", "order", "generators", "last", "datasets"):
        if not isinstance(state.get(key, {}), Mapping):
            _damaged(key, f"is no dict: {_shown(state[key])}")
    _check_generators(state)
    _check_readers(state)
    names = set(map(str, state.get("datasets", {})))
    if names and names != {"loader"} and names != set(map(str, range(len(names)))):
        _damaged("datasets", f"is of {_shown(sorted(names))}")
    if state["done"] or state["beyond"]:
        _check_drawn(state)


def _check_version(state: Any) -> None:
    if not isinstance(state, Mapping) or "version" not in state:
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateMismatchError(
            f"this is no state of an aioloader.DataLoader: {_shown(keys)}",
            expected="a state",
            found=type(state).__name__,
        )
    if state["version"] != VERSION:
        raise StateMismatchError(
            f"the state is of version {state['version']!r}, and this aioloader reads "
            f"version {VERSION}",
            expected=state["version"],
            found=VERSION,
        )


def _check_generators(state: Any) -> None:
    found = {f"generators.{k}": one for k, one in state.get("generators", {}).items()}
    if "generator" in state.get("order", {}):
        found["order.generator"] = state["order"]["generator"]
    for name, one in found.items():
        if not is_packed(one):
            _damaged(name, f"is no state of a generator: {_shown(one)}")


def _check_beyond(beyond: Any, done: int) -> None:
    if not isinstance(beyond, (list, tuple)):
        _damaged("beyond", f"is no list: {_shown(beyond)}")
    for number in beyond:
        _check_count("beyond", number)
        if number < done:
            _damaged("beyond", f"has {number}, which is below done, {done}")


def _check_readers(state: Any) -> None:
    """Check the states of readers; those of streams also count samples."""
    for reader, one in state["states"].items():
        name = f"states.{reader}"
        if not str(reader).isdecimal() or not isinstance(one, Mapping):
            _damaged(name, f"is no state of a reader: {_shown(one)}")
        if state["kind"] == "map":
            continue
        for key in ("read", "skip"):
            if key not in one and "is_over" not in one:
                _damaged(f"{name}.{key}", "is missing")
            _check_count(f"{name}.{key}", one.get(key, 0))
        if one.get("skip", 0) > one.get("read", 0):
            _damaged(name, f"skips {one['skip']} of only {one['read']} samples")


def _check_drawn(state: Any) -> None:
    """Check that what was drawn is there, once something was delivered."""
    if type(state.get("seed")) is not int:
        _damaged("seed", "is missing, though batches were delivered")
    if state["kind"] != "map":
        if not state["states"] and state["done"]:
            _damaged("states", "is empty, though batches were delivered")
        return
    order = state.get("order", {})
    if "sampler" not in order:
        _damaged("order", "is missing, though batches were delivered")
    is_drawn = "generator" in order or type(order.get("seed")) is int
    if order["sampler"] in ("RandomSampler", "ShuffledIndices") and not is_drawn:
        _damaged("order.seed", "is missing, though batches were delivered")
    for key in ("seed", "epoch", "length"):
        if type(order.get(key)) not in {int, type(None)}:
            _damaged(f"order.{key}", f"is no number: {_shown(order[key])}")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        _damaged(name, f"is no count: {_shown(value)}")


def _damaged(name: str, what: str) -> NoReturn:
    raise StateMismatchError(
        f"the state is damaged, or only a part of it: {name!r} {what}",
        expected=name,
        found=what,
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _counted(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)
