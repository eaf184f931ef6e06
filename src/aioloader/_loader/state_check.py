"""Whether a state fits a loader, and the states of all ranks as one.

Over a map-style dataset all unfinished ranks have the same state, and any of them will
do. Streams are split between ranks, so each rank has a part of their state.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.utils.data import RandomSampler

from aioloader._loader.options import Options
from aioloader._loader.state import (
    ALIKE,
    LoaderState,
    State,
    generators_of,
    rules_of,
    unsealed,
)
from aioloader._order.indices import contents_of, described
from aioloader._order.orders import drawing_part_of
from aioloader._order.permutation import KeyedOrder
from aioloader._order.stream_states import (
    are_in_step,
    is_repeatable,
    merged,
    warn_of_order,
)
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind

_ORDER = {
    "sampler": "the sampler {!r}",
    "length": "a sampler of {!r} indices",
    "seed": "the seed {!r} of the sampler",
    "max_tokens": "max_tokens={!r} of the sampler",
    "block": "block={!r} of the sampler",
    "window": "window={!r} of the sampler",
    "lanes": "lanes={!r} of the sampler",
    "shuffle": "shuffle={!r} of the sampler",
    "replacement": "replacement={!r} of the sampler",
    "drop_last": "drop_last={!r}",
    "mixture": "a mixture of weights and lengths with checksum {!r}",
    "shards": "shards of the fingerprint {!r}",
    "versions": "shards whose versions have the checksum {!r}",
    "contents": "indices, weights or lengths of the sampler with checksum {!r}",
}
_MAY_LACK = {"seed", "shuffle", "drop_last", "mixture", "shards", "versions"}
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


def fitted(options: Options, state: LoaderState, *, strict: bool) -> LoaderState:
    """Return a state for a loader, with the states of its stream converted.

    Raises:
        StateMismatchError: If another loader, or another stream, saved it; names both.
    """
    if not strict:  # the versions of shards may differ, as those of copies do
        order = {name: one for name, one in state.order.items() if name != "versions"}
        state = replace(state, order=order)
    _check(options, state)
    if not options.is_own_stream:
        return state
    dataset, states = options.dataset, shared(state, options.readers)
    streams = [one["dataset"]["stream"] for one in states.values() if "dataset" in one]
    if state.beyond and not all(map(is_repeatable, streams)):
        warn_of_order()  # what was delivered out of order is read again
    parts = [
        {
            reader: {**one, "dataset": dataset.fitted(one["dataset"], strict=strict)}
            if "dataset" in one
            else one
            for reader, one in part.items()
        }
        for part in (states, state.last)
    ]
    return replace(state, states=parts[0], last=parts[1], readers=options.readers)


def _check(options: Options, state: LoaderState) -> None:
    for one in ALIKE:
        saved, found = getattr(state, one.name), one.metadata["of"](options)
        is_known = not (one.metadata["if_known"] and None in (saved, found))
        is_fixed = one.name != "readers" or not options.is_own_stream
        if is_known and is_fixed and saved != found:
            words = {"saved": _counted(saved), "found": _counted(found)}
            text = one.metadata["differs"].format(**words)
            raise StateMismatchError(text, expected=saved, found=found)
    if state.order:
        _check_order(options, state)
    if options.kind is not Kind.MAP:
        return
    if isinstance(options.batch_sampler, KeyedOrder):
        return  # an epoch of its contents; to count its batches takes long
    with contextlib.suppress(TypeError, NotImplementedError):
        delivered = max((state.done, *(one + 1 for one in state.beyond)))
        most = options.length(options.part._replace(rank=0, tail="uneven"))
        if delivered > most:  # of all ranks: this one may have one less
            _refuse("an epoch of {} batches or more", delivered, most)


def _counted(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)


def _check_order(options: Options, state: LoaderState) -> None:
    """Check the sampler, and the seed of the generator that it draws from."""
    saved, mine, is_map = state.order, rules_of(options), options.kind is Kind.MAP
    if is_map:
        mine |= described(options.index_sampler)
    if is_map and "contents" in saved:  # not between epochs
        mine |= contents_of(options.index_sampler)
    for name, what in _ORDER.items():
        is_known = name in saved or name not in _MAY_LACK
        if name in mine and is_known and saved.get(name) != mine[name]:
            _refuse(what, saved.get(name), mine[name])
    if not is_map:
        return
    what = "a generator of seed {!r} for the order"
    between = {} if state.done or state.beyond else {**state.generators}
    between.pop("default", None)
    for name in between.keys() - generators_of(options):
        _refuse(what, between[name]["seed"], None)
    part = drawing_part_of(options.index_sampler)
    is_random = isinstance(options.index_sampler, RandomSampler)
    if part is None and not (is_random and "generator" in saved):
        return
    drawn = saved.get("generator") or between.get("sampler") or between.get("loader")
    seed = (drawn or {}).get("seed")
    found = None if part is None else part.generator.initial_seed()
    if seed != found:
        _refuse(what, seed, found)


def _refuse(what: str, saved: Any, found: Any) -> NoReturn:
    hint = ""
    if sorted(map(str, (saved, found))) == ["RandomSampler", "ShuffledIndices"]:
        hint = " (shuffle=True with ranks: rank=0, world_size=1 is one rank)"
    elif "generator" in what and not (saved is None or found is None):
        hint = f"; give it the same seed with manual_seed({saved})"
    elif "versions" in what:
        hint = "; if they are copies with the same contents, load it with strict=False"
    elif "shards" in what:
        hint = "; load it with the same shards, in the same order"
    elif "checksum" in what:
        hint = "; set them as they were at the start of the epoch, before loading"
    raise StateMismatchError(
        f"the state was saved with {what.format(saved)}, but the loader has "
        f"{what.format(found)}{hint}",
        expected=saved,
        found=found,
    )


def shared(state: LoaderState, readers: int, *, is_part: bool = True) -> State:
    """Return the states of one of our streams, for another number of workers.

    After whole rounds, all workers are in step, as ranks are: their states are one, and
    any number of workers continues from it. Otherwise some are a batch ahead. Other
    ranks may have other parts.

    Raises:
        StateMismatchError: If they are not in step, and their number differs.
    """
    states, saved = state.states, state.readers
    parts = [one["dataset"] for one in states.values()]
    if len(parts) == saved and not state.beyond and are_in_step(parts):
        whole = merged(parts, is_part=is_part) if saved > 1 else parts[0]
        one = {**states["0"], "dataset": whole}
        return {str(reader): one for reader in range(readers)}
    if not parts:
        return states
    if saved == readers:
        # A worker from which nothing was delivered has the readers of the others.
        start = {**parts[0], "position": 0, "streams": {}}
        start.pop("ended", None)
        begin = {"read": 0, "skip": 0, "dataset": start}
        return {str(one): states.get(str(one), begin) for one in range(readers)}
    raise StateMismatchError(
        f"the state was saved with {saved} workers that each read a part of the "
        f"stream, after {state.done:,} batches: some had delivered one more than "
        f"others; load it with num_workers={saved}, or save after a multiple of "
        f"{saved} batches, in order",
        expected=saved,
        found=readers,
    )


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
    found = [*map(unsealed, states)]
    if not found:
        raise ValueError("there are no states to merge: pass those of all ranks")
    _check_alike(found, [one.name for one in ALIKE])
    epoch = min(state.epoch for state in found)
    going = [state for state in found if state.epoch == epoch]
    over = [state for state in found if state.epoch != epoch]
    for state in over:
        if state.epoch != epoch + 1 or state.done:
            _refuse_merge("epoch", epoch, state.epoch)
    first = going[0]
    _check_alike(going, ["done", "beyond"], _READ if first.readers > 1 else _SAVE)
    _check_orders(going)
    parts = {reader: _merged(reader, going, over) for reader in first.states}
    whole = replace(first, states=parts, generators={**first.generators})
    default = [state.generators.get("default") for state in found]
    if default != default[:1] * len(found):  # each rank has its own, and keeps it
        whole.generators.pop("default", None)
    if whole.readers > 1 and _is_of_ours(whole.states.get("0")):
        whole.states = shared(whole, whole.readers, is_part=False)
    return whole.sealed()


def _merged(
    reader: str, going: Sequence[LoaderState], over: Sequence[LoaderState]
) -> Any:
    parts: list[Any] = [state.states.get(reader) for state in going]
    first = parts[0]
    if not _is_of_ours(first):
        for part in parts:
            if part != first:
                _refuse_merge(f"the state of reader {reader}", first, part)
        return first
    streams = [part["dataset"] for part in parts]
    for state in over:
        last = state.last.get(reader, {})
        if "dataset" in last:
            streams.append({**last["dataset"], "ended": True})
    whole = {key: one for key, one in first.items() if key != "again"}
    is_part = going[0].readers > 1  # of the workers of this number
    return {**whole, "dataset": merged(streams, is_part=is_part)}


def _is_of_ours(one: Any) -> bool:
    state = one.get("dataset") if isinstance(one, dict) else None
    return isinstance(state, dict) and "streams" in state


def _check_alike(
    states: Sequence[LoaderState], names: Iterable[str], hint: str = _SAVE
) -> None:
    for name in names:
        first, *others = (getattr(state, name) for state in states)
        for other in others:
            if other != first:
                _refuse_merge(name, first, other, hint)


def _check_orders(states: Sequence[LoaderState]) -> None:
    """Check that all draw from one order; before an epoch, not all may have drawn."""
    first = states[0].order
    for state in states:
        for key, one in state.order.items():
            if key not in _OF_ONE and first.get(key, one) != one:
                _refuse_merge(f"{key} of the order", first[key], one, _SEED)


def _refuse_merge(key: str, one: Any, other: Any, hint: str = _SAVE) -> NoReturn:
    # The state of a generator is long; its seed comes first.
    raise StateMismatchError(
        f"the states are not of one run and one moment: {key} is {one!r:.80} in one of "
        f"them and {other!r:.80} in another; {hint}",
        expected=one,
        found=other,
    )
