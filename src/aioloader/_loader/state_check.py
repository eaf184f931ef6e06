"""Check that a state fits a loader, and merge the states of all ranks.

Over a map-style dataset all unfinished ranks have the same state. Streams are split
between ranks, so each rank saves only a part of a stream's state.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.utils.data import RandomSampler

from aioloader._loader.options import Options
from aioloader._loader.state import (
    MUST_MATCH,
    LoaderState,
    State,
    epoch_settings,
    generators_of,
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

_ORDER_LABELS = {
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
_OPTIONAL = {"seed", "shuffle", "drop_last", "mixture", "shards", "versions"}
_PER_RANK = {"before", "pulled"}  # entries of orders: some ranks may be ahead
_HINT = (
    "save all ranks after the same batch (with in_order=True, if there are batches "
    "beyond it)"
)
_WORKERS_HINT = (
    _HINT + "; once a worker that reads has ended, its rank is ahead of the others: "
    "load each rank's own state, on the same number of ranks and workers"
)
_SEED_HINT = "give the loaders of all ranks the same sampler, seeded alike"


def fitted(options: Options, state: LoaderState, *, strict: bool) -> LoaderState:
    """Check that a state fits; convert a stream's states for this loader's workers.

    Raises:
        StateMismatchError: If the state is of a different loader or stream.
    """
    if not strict:  # copies of shards have other versions
        order = {key: value for key, value in state.order.items() if key != "versions"}
        state = replace(state, order=order)
    _check(options, state)
    if not options.is_own_stream:
        return state
    dataset, states = options.dataset, for_workers(state, options.readers)
    saved = [entry["dataset"] for entry in states.values() if "dataset" in entry]
    if state.beyond and not all(is_repeatable(stream["stream"]) for stream in saved):
        warn_of_order()  # batches delivered out of order are read again
    parts = [
        {
            reader: entry | {"dataset": dataset.fitted(entry["dataset"], strict=strict)}
            if "dataset" in entry
            else entry
            for reader, entry in part.items()
        }
        for part in (states, state.last)
    ]
    return replace(state, states=parts[0], last=parts[1], readers=options.readers)


def _check(options: Options, state: LoaderState) -> None:
    for field in MUST_MATCH:
        saved, actual = getattr(state, field.name), field.metadata["of"](options)
        is_known = not (field.metadata["if_known"] and None in (saved, actual))
        is_fixed = field.name != "readers" or not options.is_own_stream
        if is_known and is_fixed and saved != actual:
            words = {"saved": _counted(saved), "found": _counted(actual)}
            text = field.metadata["differs"].format(**words)
            raise StateMismatchError(text, expected=saved, found=actual)
    if state.order:
        _check_order(options, state)
    if options.kind is not Kind.MAP:
        return
    if isinstance(options.batch_sampler, KeyedOrder):
        return  # its contents are compared; counting its batches takes long
    with contextlib.suppress(TypeError, NotImplementedError):
        delivered = max((state.done, *(number + 1 for number in state.beyond)))
        # Rank 0 has the most batches; this rank may have one fewer.
        most = options.length(options.part._replace(rank=0, tail="uneven"))
        if delivered > most:
            _refuse("an epoch of {} batches or more", delivered, most)


def _counted(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)


def _check_order(options: Options, state: LoaderState) -> None:
    """Check the sampler's settings, and the seed of the sampler's generator."""
    saved, mine, is_map = state.order, epoch_settings(options), options.kind is Kind.MAP
    if is_map:
        mine |= described(options.index_sampler)
    if is_map and "contents" in saved:  # not between epochs
        mine |= contents_of(options.index_sampler)
    for name, label in _ORDER_LABELS.items():
        is_known = name in saved or name not in _OPTIONAL
        if name in mine and is_known and saved.get(name) != mine[name]:
            _refuse(label, saved.get(name), mine[name])
    if not is_map:
        return
    label = "a generator of seed {!r} for the order"
    between = {} if state.done or state.beyond else {**state.generators}
    between.pop("default", None)
    for name in between.keys() - generators_of(options):
        _refuse(label, between[name]["seed"], None)
    part = drawing_part_of(options.index_sampler)
    is_random = isinstance(options.index_sampler, RandomSampler)
    if part is None and not (is_random and "generator" in saved):
        return
    drawn = saved.get("generator") or between.get("sampler") or between.get("loader")
    saved_seed = (drawn or {}).get("seed")
    seed = None if part is None else part.generator.initial_seed()
    if saved_seed != seed:
        _refuse(label, saved_seed, seed)


def _refuse(label: str, saved: Any, actual: Any) -> NoReturn:
    hint = ""
    if sorted(map(str, (saved, actual))) == ["RandomSampler", "ShuffledIndices"]:
        hint = " (shuffle=True with ranks: rank=0, world_size=1 is one rank)"
    elif "generator" in label and not (saved is None or actual is None):
        hint = f"; give it the same seed with manual_seed({saved})"
    elif "versions" in label:
        hint = "; if they are copies with the same contents, load it with strict=False"
    elif "shards" in label:
        hint = "; load it with the same shards, in the same order"
    elif "checksum" in label:
        hint = "; set them as they were at the start of the epoch, before loading"
    raise StateMismatchError(
        f"the state was saved with {label.format(saved)}, but the loader has "
        f"{label.format(actual)}{hint}",
        expected=saved,
        found=actual,
    )


def for_workers(state: LoaderState, readers: int, *, is_part: bool = True) -> State:
    """Return a stream's saved states, converted for ``readers`` workers.

    If all workers have delivered equally many batches, their states are merged, and any
    number of workers can load the result. ``is_part``: other ranks hold other parts.

    Raises:
        StateMismatchError: If ``readers`` differs and the workers were not in step.
    """
    states, saved = state.states, state.readers
    parts = [entry["dataset"] for entry in states.values()]
    if len(parts) == saved and not state.beyond and are_in_step(parts):
        whole = merged(parts, is_part=is_part) if saved > 1 else parts[0]
        entry = {**states["0"], "dataset": whole}
        return {str(reader): entry for reader in range(readers)}
    if not parts:
        return states
    if saved == readers:
        # A worker from which nothing was delivered starts like the others.
        start = {**parts[0], "position": 0, "streams": {}}
        start.pop("ended", None)
        default = {"read": 0, "skip": 0, "dataset": start}
        return {name: states.get(name, default) for name in map(str, range(readers))}
    raise StateMismatchError(
        f"the state was saved with {saved} workers that each read a part of the "
        f"stream, after {state.done:,} batches: some had delivered one more than "
        f"others; load it with num_workers={saved}, or save after a multiple of "
        f"{saved} batches, in order",
        expected=saved,
        found=readers,
    )


def merge_states(states: Iterable[State]) -> State:
    """Merge the states of all ranks into one that any number of ranks can load.

    All ranks must save after the same number of batches. Include the ranks whose epoch
    ended earlier, with the states that they saved after its end.

    Args:
        states: What ``state_dict`` of each rank's loader returned, in any order.

    Raises:
        StateMismatchError: If the states are damaged, of another version, of different
            runs or moments, or parts of a stream are missing.
        ValueError: If there are no states.
    """
    ranks = [*map(unsealed, states)]
    if not ranks:
        raise ValueError("there are no states to merge: pass those of all ranks")
    _check_alike(ranks, [field.name for field in MUST_MATCH])
    epoch = min(state.epoch for state in ranks)
    going = [state for state in ranks if state.epoch == epoch]
    over = [state for state in ranks if state.epoch != epoch]
    for state in over:
        if state.epoch != epoch + 1 or state.done:
            _refuse_merge("epoch", epoch, state.epoch)
    first = going[0]
    hint = _WORKERS_HINT if first.readers > 1 else _HINT
    _check_alike(going, ["done", "beyond"], hint)
    _check_orders(going)
    parts = {reader: _merged(reader, going, over) for reader in first.states}
    whole = replace(first, states=parts, generators={**first.generators})
    default = [state.generators.get("default") for state in ranks]
    if default != default[:1] * len(ranks):  # each rank keeps its own
        whole.generators.pop("default", None)
    if whole.readers > 1 and _is_own_stream(whole.states.get("0")):
        whole.states = for_workers(whole, whole.readers, is_part=False)
    return whole.sealed()


def _merged(
    reader: str, going: Sequence[LoaderState], over: Sequence[LoaderState]
) -> Any:
    parts: list[Any] = [state.states.get(reader) for state in going]
    first = parts[0]
    if not _is_own_stream(first):
        for part in parts:
            if part != first:
                _refuse_merge(f"the state of reader {reader}", first, part)
        return first
    streams = [part["dataset"] for part in parts]
    for state in over:
        last = state.last.get(reader, {})
        if "dataset" in last:
            streams.append({**last["dataset"], "ended": True})
    whole = {key: value for key, value in first.items() if key != "again"}
    is_part = going[0].readers > 1  # other workers have the rest
    return {**whole, "dataset": merged(streams, is_part=is_part)}


def _is_own_stream(entry: Any) -> bool:
    state = entry.get("dataset") if isinstance(entry, dict) else None
    return isinstance(state, dict) and "streams" in state


def _check_alike(
    states: Sequence[LoaderState], names: Iterable[str], hint: str = _HINT
) -> None:
    for name in names:
        first, *values = (getattr(state, name) for state in states)
        for value in values:
            if value != first:
                _refuse_merge(name, first, value, hint)


def _check_orders(states: Sequence[LoaderState]) -> None:
    """Check that all ranks have the same order; some may not have drawn one yet."""
    first = states[0].order
    for state in states:
        for key, value in state.order.items():
            if key not in _PER_RANK and first.get(key, value) != value:
                _refuse_merge(f"{key} of the order", first[key], value, _SEED_HINT)


def _refuse_merge(key: str, left: Any, right: Any, hint: str = _HINT) -> NoReturn:
    # A generator's state is long and starts with the seed: 80 characters are enough.
    raise StateMismatchError(
        f"the states are not of one run and one moment: {key} is {left!r:.80} in one "
        f"of them and {right!r:.80} in another; {hint}",
        expected=left,
        found=right,
    )
