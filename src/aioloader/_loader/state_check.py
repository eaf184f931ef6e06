"""Whether a state fits a loader."""

import contextlib
from typing import Any, NoReturn

from torch.utils.data import RandomSampler

from aioloader._loader.options import Options
from aioloader._loader.state import State, generators_of, identity
from aioloader._order.indices import contents_of, described
from aioloader._order.orders import drawing_part_of
from aioloader._order.stream_states import are_in_step, merged
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind, is_own_stream


def check(options: Options, state: State) -> None:
    """Check that ``state`` was saved by a loader like this one.

    Raises:
        StateMismatchError: If it was not; names both.
    """
    mine = identity(options)
    for name, message in _MESSAGES.items():
        saved, found = state.get(name), mine[name]
        is_known = name not in _UNKNOWN or not (saved is None or found is None)
        is_known &= name != "readers" or not options.is_own_stream
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
        StateMismatchError: If they belong to another stream.
    """
    dataset = options.dataset
    if not is_own_stream(dataset):
        return state
    state = {**state, "states": shared(state, options.readers)}
    for key in {"states", "last"} & state.keys():
        state[key] = {
            reader: {**one, "dataset": dataset.fitted(one["dataset"], strict=strict)}
            if "dataset" in one
            else one
            for reader, one in state[key].items()
        }
    return {**state, "readers": options.readers}


def shared(state: State, readers: int, *, is_part: bool = True) -> State:
    """Return the states of one of our streams, for another number of workers.

    After whole rounds, all workers are in step, as ranks are: their states are one, and
    any number of workers continues from it. Otherwise some are a batch ahead.

    Args:
        state: The state.
        readers: Number of workers that each read a part; or 1.
        is_part: Whether other ranks may have other parts.

    Raises:
        StateMismatchError: If they are not in step, and their number differs.
    """
    states: State = state["states"]
    saved = state["readers"]
    parts = [one["dataset"] for one in states.values()]
    if len(parts) == saved and not state["beyond"] and are_in_step(parts):
        whole = merged(parts, is_part=is_part) if saved > 1 else parts[0]
        one = {**states["0"], "dataset": whole}
        return {str(reader): one for reader in range(readers)}
    if saved == readers or not parts:
        return states
    raise StateMismatchError(
        f"the state was saved with {saved} workers that each read a part of the "
        f"stream, after {state['done']:,} batches: some had delivered one more than "
        f"others; load it with num_workers={saved}, or save after a multiple of "
        f"{saved} batches, in order",
        expected=saved,
        found=readers,
    )


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
    between = dict(state.get("generators") or {})
    between.pop("default", None)
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


def _counted(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)
