"""A loader's state, written and read: which epoch, its order, and what was delivered.

A state is a dict of a few numbers, ready for JSON if the dataset's own state is. Its
checksums hold for what was saved, so what is loaded need not be checked again. It
says nothing of workers, prefetch or devices, so these may differ where it is loaded.
Only delivered batches count: the dataset's state is the one after the last delivered
batch, for each reader of an iterable, for each worker's copy of a map-style dataset.
Source: torchdata 0.11, ``stateful_dataloader/worker.py``.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypedDict

import torch

from aioloader._loader.options import Options
from aioloader._observe.warnings import warn
from aioloader._order.checksums import checksum
from aioloader._order.epoch import BEGINNING, Bookmark, Epoch, EpochNumbers
from aioloader._order.generators import packed, unpacked
from aioloader._order.indices import described, epoch_of, set_epoch
from aioloader._order.orders import (
    drawing_part_of,
    draws_from_default,
    is_repeatable,
)
from aioloader._pipeline.position import Loads
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind, OwnStream, is_stateful

State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, Any]
VERSION = 4
_MOST_NUMBERS = 64  # data, if there are more
_LOADER = "loader"  # the dataset is this process's own, and not a worker's copy


class LoaderState(TypedDict):
    """A state of this version with all keys, as ``state_dict`` returns it.

    Attributes:
        kind: Kind of the dataset. It must be the same where the state is loaded, as
            must ``length``, ``batch_size`` (of all ranks together), ``readers``,
            ``ranks`` and ``tail`` (of our streams, if several ranks read them).
        epoch: Its number.
        dataset_epoch: The number last given to the dataset's ``set_epoch``, if it has
            one and an attribute ``epoch``.
        moved: The name of an attribute of an iterable dataset that had changed, where
            it is no part of a state.
        done: Batches below this number were delivered.
        beyond: Numbers of later batches that were delivered too.
        checksum: Of these values, and of which parts there are.
        seed: The seed that random draws are keyed with. This and all keys below are
            parts: a tuple of the value and its checksum, or empty. That is because
            ``torch.distributed.checkpoint`` restores what a fresh loader has keys for,
            looks into mappings, saves a tuple as one value, and takes it from any rank.
        order: What restores the order.
        generators: Where the generators are that epochs draw from: the user's, of the
            ``"loader"`` and the ``"sampler"``, and torch's ``"default"`` one.
        states: States of the readers (the sampler, or streams).
        last: For our streams, the states at the end of the previous epoch.
        datasets: States of a map-style dataset: the loader's, or each worker's.
    """

    version: int
    kind: str
    length: int | None
    batch_size: int | None
    readers: int
    ranks: int | None
    tail: str | None
    epoch: int
    dataset_epoch: int | None
    moved: str | None
    done: int
    beyond: list[int]
    checksum: int
    seed: tuple[int, ...]
    order: tuple[Any, ...]
    generators: tuple[Any, ...]
    states: tuple[Any, ...]
    last: tuple[Any, ...]
    datasets: tuple[Any, ...]


PARTS = ("seed", "order", "generators", "states", "last", "datasets")
_VALUES = [
    key for key in LoaderState.__annotations__ if key not in {*PARTS, "checksum"}
]


def sealed(state: State) -> State:
    """Return a state with all keys of ``LoaderState``."""
    made = {key: state.get(key) for key in _VALUES}
    parts = {key: _part(key, state.get(key)) for key in PARTS}
    return {**made, "checksum": _checksum(made, parts), **parts}


def unsealed(state: Any) -> State:
    """Undo ``sealed``.

    Raises:
        StateMismatchError: If it is no state, of another version, or not as it was
            saved.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateMismatchError(
            f"this is no state of an aioloader.DataLoader: {keys!s:.80}",
            expected="a state",
            found=type(state).__name__,
        )
    if state["version"] != VERSION:
        raise StateMismatchError(
            f"the state is of version {state['version']!r}, and this aioloader reads "
            f"version {VERSION}; resume with the aioloader that saved it, or start the "
            "epoch again",
            expected=state["version"],
            found=VERSION,
        )
    parts = {key: state.get(key) for key in PARTS}
    for key, part in parts.items():
        if not _is_part(key, part):
            _refuse_damage(key, part)
    if state.get("checksum") != _checksum(state, parts):
        _refuse_damage("checksum", state.get("checksum"))
    found: State = {"states": {}}
    found |= {key: state[key] for key in _VALUES if state[key] is not None}
    return found | {key: part[0] for key, part in parts.items() if part}


def _part(key: str, value: Any) -> tuple[Any, ...]:
    """Return a part of a sealed state, with its checksum."""
    if value is None or value == {}:
        return ()
    return value, checksum({key: value})


def _is_part(key: str, part: Any) -> bool:
    """Tell whether a part of a sealed state is as it was saved."""
    if not isinstance(part, (list, tuple)) or len(part) not in {0, 2}:
        return False
    return not part or part[1] == checksum({key: part[0]})


def _checksum(state: Mapping[str, Any], parts: State) -> int:
    values = {key: state.get(key, "missing") for key in _VALUES}
    return checksum([values, {key: bool(part) for key, part in parts.items()}])


def _refuse_damage(key: str, found: Any) -> NoReturn:
    raise StateMismatchError(
        f"the state is damaged, or only a part of it: {key!r} is not as it was saved: "
        f"{found!s:.80}; load what state_dict() returned, or restart the epoch",
        expected=key,
        found=found,
    )


def identity(options: Options) -> State:
    """Return what must be equal in the loader that loads the state."""
    try:
        length = len(options.dataset)
    except Exception:  # noqa: BLE001  (the user's; the length is then unknown)
        length = None
    size = options.global_batch_size
    return {
        "kind": options.kind.value,
        "length": length,
        "batch_size": size,
        "readers": options.readers,
        "ranks": options.part.world_size if size is None else None,
        "tail": _tail(options),
    }


def _tail(options: Options) -> str | None:
    """Return ``tail`` if the lengths of the ranks' parts of our stream depend on it."""
    if not options.is_own_stream:
        return None
    ranks = max(options.part.world_size, (options.dataset.ranks or (0, 1))[1])
    return (options.tail or "wrap") if ranks > 1 else None


# -- written ------------------------------------------------------------------------


def state_of(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    *,
    newer: Epoch | None,
    kept: int | None,
    moved: Callable[[Options], str | None],
) -> State:
    """Return the state of a loader, sealed.

    Args:
        options: The loader's options.
        numbers: Which epoch is next.
        epoch: The latest epoch that has started, if one has.
        newer: The epoch of an iterator that is next, if there is one.
        kept: The seed of the workers that persist, if there are any.
        moved: Returns the name of a number of the user's that has changed, if any.
    """
    if newer is not None and newer.number >= 0:  # its workers have started
        epoch, newer = newer, None
    is_between = epoch is None or epoch.progress.is_over or newer is not None
    if epoch is None or is_between:
        state = _between(options, numbers, epoch, newer, kept)
        state["moved"] = moved(options)
    else:
        bookmark = epoch.progress.bookmark()
        head = epoch.head or _head(options, epoch)
        if bookmark.read():
            epoch.head = head  # constant, now that the order is drawn
        state = {
            **head,
            "order": {**head["order"]},
            "done": bookmark.done,
            "beyond": sorted(bookmark.beyond),
            "states": _by_name({**epoch.first, **bookmark.states}),
        }
        if epoch.order.pulled:
            state["order"]["pulled"] = epoch.order.pulled
    is_new = is_between and options.has_copies and kept is None
    state["datasets"] = _datasets_of(options, None if is_new else epoch)
    state["generators"] = positions(options)
    return sealed(state)


def _head(options: Options, epoch: Epoch) -> State:
    """Return the part of an epoch's state that is constant once it is drawn."""
    return {
        "version": VERSION,
        **identity(options),
        "epoch": epoch.number,
        "seed": epoch.base_seed,
        "order": copy.deepcopy(epoch.order.state()),
        "dataset_epoch": epoch.dataset_epoch,
        "moved": epoch.moved,
    }


def _between(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    drawn: Epoch | None,
    kept: int | None,
) -> State:
    """Return the state before an epoch: nothing is drawn for it yet."""
    first = first_states(options, epoch, is_kept=kept is not None)
    state: State = {"version": VERSION, **identity(options)}
    state |= {"epoch": numbers.next, "done": 0, "beyond": []}
    # Drawn for an iterator that was made and has not started, or kept.
    state["seed"] = kept if drawn is None else drawn.base_seed
    if epoch is not None:
        if epoch.order.end is not None:  # of a sampler that may count epochs
            first = {0: {**epoch.order.end, "is_over": True}}
        if options.is_own_stream:  # other ranks may have more of it: ``merge_states``
            first = continued(options, epoch, numbers.next).states
            if epoch.progress.is_over:
                state["last"] = _by_name(epoch.progress.bookmark().states)
    state["states"] = _by_name(first)
    state["dataset_epoch"] = epoch_of(options.dataset)
    if options.kind is Kind.MAP:
        state["order"] = described(options.index_sampler)
        upcoming = numbers.upcoming()
        if upcoming is None:
            state["order"]["next"] = epoch_of(options.index_sampler)
        if drawn is not None:
            state["order"] |= drawn.order.state()
        if upcoming is not None:
            state["order"]["epoch"] = upcoming
    return state


def positions(options: Options) -> State:
    """Return where the generators are that epochs draw from."""
    return {
        name: packed(generator.get_state())
        for name, generator in generators_of(options).items()
    }


def restore_positions(options: Options, state: State) -> None:
    """Put the generators where they were when a state was saved.

    At the load, as ``torch.set_rng_state`` would: a script may seed them afterwards.
    """
    mine = generators_of(options)
    for name, one in (state.get("generators") or {}).items():
        if name in mine:
            mine[name].set_state(unpacked(one))


def _by_name(states: States) -> State:
    """Return states by reader number, as strings for JSON."""
    return {str(reader): one for reader, one in states.items()}


def generators_of(options: Options) -> dict[str, torch.Generator]:
    """Return the generators that epochs draw from: the user's and the default one."""
    loader: torch.Generator | None = options.generator
    sampler = getattr(drawing_part_of(options.index_sampler), "generator", None)
    found = {_LOADER: loader, "sampler": None if sampler is loader else sampler}
    is_map = options.kind is Kind.MAP
    if loader is None or (is_map and draws_from_default(options.index_sampler)):
        found["default"] = torch.default_generator
    return {name: one for name, one in found.items() if one is not None}


# -- of the dataset -----------------------------------------------------------------


def note_first(
    options: Options, epoch: Epoch, before: Epoch | None, *, is_kept: bool
) -> None:
    """Note the states of the dataset at the start of an epoch.

    Args:
        options: The loader's options.
        epoch: The epoch.
        before: The previous epoch, if there was one.
        is_kept: Whether workers of the previous epoch persist.
    """
    if options.kind is not Kind.MAP:
        epoch.first = first_states(options, before, is_kept=is_kept)
    elif options.is_stateful:
        if before is not None and (is_kept or not options.has_copies):
            latest = before.progress.bookmark().datasets
            epoch.first_datasets = {**before.first_datasets, **latest}
        else:
            own = copy.deepcopy(options.dataset.state_dict())
            copies = options.num_workers if options.has_copies else 1
            epoch.first_datasets = dict.fromkeys(range(copies), own)


def continued(options: Options, before: Epoch | None, number: int) -> Bookmark:
    """Return where the epoch of a number starts: our streams may continue.

    Args:
        options: The loader's options.
        before: The previous epoch, if there was one.
        number: The number of the new one.
    """
    if before is None or not options.is_own_stream or not options.dataset.continues():
        return BEGINNING
    stream, workers = options.shared_out(options.dataset), options.readers
    states = before.progress.bookmark().states
    found = {reader: one["dataset"] for reader, one in states.items()}
    if not found:
        return BEGINNING
    starts = {k: stream.following(one, number, workers) for k, one in found.items()}
    # A worker from which nothing was delivered starts its part in the same pass.
    other = {**next(iter(starts.values())), "streams": {}}
    return Bookmark(
        states={
            reader: {"read": 0, "skip": 0, "dataset": starts.get(reader, other)}
            for reader in range(workers)
        }
    )


def first_states(options: Options, before: Epoch | None, *, is_kept: bool) -> States:
    """Return the states of an iterable's readers at the start of the next epoch."""
    if options.kind is Kind.MAP or options.is_own_stream:
        return {}
    if before is not None and (is_kept or not options.has_copies):
        states = before.progress.bookmark().states
        return {reader: {**one, "is_over": True} for reader, one in states.items()}
    if not options.is_stateful:
        return {}
    own = copy.deepcopy(options.dataset.state_dict())
    first = {"read": 0, "skip": 0, "dataset": own, "is_first": True}
    return dict.fromkeys(range(options.readers), first)


def _datasets_of(options: Options, epoch: Epoch | None) -> State:
    """Return the states of a map-style dataset: by worker, or the loader's own."""
    if options.kind is not Kind.MAP or not options.is_stateful:
        return {}
    if epoch is None or not epoch.reads_ahead:
        return {_LOADER: copy.deepcopy(options.dataset.state_dict())}
    found = {**epoch.first_datasets, **epoch.progress.bookmark().datasets}
    if not options.has_copies:
        return {_LOADER: found[0]}
    return {str(worker): one for worker, one in sorted(found.items())}


def _copies_of(options: Options, state: State) -> States:
    """Return the states of a map-style dataset for the workers' copies, if any differ.

    Each worker gets the state of its predecessor. If their number differs, all get the
    state of the worker that made the last delivered batch.
    """
    saved = state.get("datasets") or {}
    if not saved or _LOADER in saved or not options.has_copies:
        return {}  # workers are started with the loader's
    workers = range(options.num_workers)
    if len(saved) != options.num_workers:
        return dict.fromkeys(workers, _latest_of(state))
    return {worker: saved[str(worker)] for worker in workers}


def _latest_of(state: State) -> Any:
    """Return the state of a map-style dataset after the last delivered batch."""
    saved = state["datasets"]
    is_own = _LOADER in saved
    return saved[_LOADER if is_own else str((state["done"] - 1) % len(saved))]


# -- read ---------------------------------------------------------------------------


def resume(options: Options, epoch: Epoch) -> None:
    """Start an epoch at the position of the state that it resumes from.

    Persistent workers must have been released before.

    Args:
        options: The options of the loader that loads it.
        epoch: The epoch; its ``saved`` state is unsealed and checked.
    """
    state = epoch.saved
    assert state is not None
    bookmark = Bookmark(
        state["done"],
        frozenset(state["beyond"]),
        {int(reader): one for reader, one in state["states"].items()},
        _copies_of(options, state),
    )
    if "seed" not in state and options.kind is Kind.MAP:
        bookmark = replace(bookmark, states={})  # ``restore_sampler`` has used them
    if bookmark.read():
        set_epoch(options.dataset, state.get("dataset_epoch"))
    epoch.dataset_epoch = epoch_of(options.dataset)
    epoch.moved = state.get("moved")
    _warn_of_what_is_lost(options, state, bookmark)
    epoch.begin(state["epoch"], bookmark, readers=options.readers)
    note_first(options, epoch, None, is_kept=False)


def restore_epochs(options: Options, state: State) -> None:
    """Set the epochs of the dataset and the sampler, if they have one, as they were.

    Within an epoch that is repeated when it starts. Between two, the user may choose
    others after loading.
    """
    if options.kind is Kind.MAP:
        set_epoch(options.index_sampler, state.get("order", {}).get("next"))
    set_epoch(options.dataset, state.get("dataset_epoch"))


def restore_dataset(options: Options, state: State, loads: Loads) -> None:
    """Load the state of this process's dataset; an iterable's, if between two epochs.

    Now, because it may hold torch's generator, from which the next epoch draws first.
    Workers seed theirs; those of this process do not move for them.

    Raises:
        StateMismatchError: If the dataset cannot load a state.
    """
    saved, dataset = state.get("datasets") or {}, options.dataset
    if saved and not options.is_stateful:
        raise StateMismatchError(
            f"the state holds the dataset's own state, but {type(dataset).__name__} "
            "has no state_dict() and load_state_dict(); load it with the same dataset",
            expected="a dataset with a state",
            found=type(dataset).__name__,
        )
    with torch.random.fork_rng(devices=[], enabled=options.has_copies):
        if saved and (_LOADER in saved or not options.has_copies):
            dataset.load_state_dict(copy.deepcopy(_latest_of(state)))
        elif options.kind is not Kind.MAP and options.is_stateful:
            for one in state["states"].values():
                is_mine = "is_over" in one and not options.has_copies
                has_one = "dataset" in one or "is_dataset" in one
                if has_one and (is_mine or "is_first" in one):
                    loads.load_early(dataset, one)
                    return


def numbers_of(options: Options) -> dict[str, int]:
    """Return the numbers in which an iterable dataset may count its epochs.

    Empty if they are restored, or only copies of it in new workers have them.
    """
    part = options.dataset
    is_restored = is_stateful(part) or epoch_of(part) is not None
    if options.kind is Kind.MAP or is_restored or isinstance(part, OwnStream):
        return {}
    name = type(part).__name__
    values = {**vars(type(part)), **getattr(part, "__dict__", {})}
    found = {key: one for key, one in values.items() if type(one) is int}
    found |= _numbers_within(getattr(part, "__dict__", {}), depth=2)
    return {f"{name}.{key}": one for key, one in found.items()}


def _numbers_within(values: Any, depth: int) -> dict[str, int]:
    """Return the integers in a few attributes, and within these."""
    if isinstance(values, (list, tuple)):
        values = dict(enumerate(values[: _MOST_NUMBERS + 1]))
    elif not isinstance(values, dict):
        values = getattr(values, "__dict__", {})
    if len(values) > _MOST_NUMBERS:  # data
        return {}
    found = {}
    for key, one in [*values.items()]:  # at once: it may be read in another thread
        if type(one) is int:
            found[f"{key}"] = one
        elif depth:
            within = _numbers_within(one, depth - 1)
            found |= {f"{key}.{name}": number for name, number in within.items()}
    return found


def restore_sampler(options: Options, state: State) -> None:
    """Restore a sampler's state between epochs, before it is iterated again."""
    one = state["states"].get("0", {})
    if options.kind is Kind.MAP and "sampler" in one:
        options.index_sampler.load_state_dict(copy.deepcopy(one["sampler"]))


def loaded_again(options: Options, loaded: State, drawn: Epoch | None) -> State:
    """Return a loaded state that has not taken effect, for another load.

    Args:
        options: The loader's options.
        loaded: The state.
        drawn: The epoch that was drawn for it since, if one was.
    """
    state = copy.deepcopy(loaded)
    if drawn is not None:
        state["seed"] = drawn.base_seed
        state["order"] = state.get("order", {}) | drawn.order.state()
    state["generators"] = positions(options)
    return state


def _warn_of_what_is_lost(options: Options, state: State, bookmark: Bookmark) -> None:
    """Warn where the rest of the epoch, or the next one, depends on more than this."""
    states, dataset = list(bookmark.states.values()), options.dataset
    if options.kind is Kind.MAP:
        _warn_of_sampler(options.index_sampler, state, bookmark)
        return
    if options.is_own_stream:
        names = dataset.reread()
    elif any("iterator" in one or "dataset" in one for one in states):
        names = []
    else:
        names = [type(dataset).__name__]
    name, moved = ", ".join(names), state.get("moved")
    what = f"{name} has no state_dict()"
    if options.is_own_stream:
        what += " that from_iterable uses"
    again = sum(one.get("read", 0) for one in states)
    has_ended = all("ended" in one for one in states)
    if bookmark.read() and again and name and not has_ended:
        warn(
            f"{what}: its first {again:,} samples are read again "
            "and dropped, which takes as long as the first time, and is correct only "
            "if they come in the same order"
        )
    elif moved is not None:
        warn(
            f"{moved} had changed when the state was saved, and is no part of it: the "
            "samples may be others; give it state_dict() and load_state_dict(), or "
            "set_epoch() and the attribute `epoch`"
        )
    elif name and state["epoch"] and (again or options.is_own_stream):
        warn(
            f"{what}: epoch {state['epoch']} starts as the first "
            "one of this process, which is correct only if all epochs have the same "
            "samples"
        )


def _warn_of_sampler(sampler: Any, state: State, bookmark: Bookmark) -> None:
    """Warn of one that may count its epochs; within an epoch, the order warns."""
    is_known = is_repeatable(sampler) or is_stateful(sampler)
    is_known |= any("iterator" in one for one in state["states"].values())
    if is_known or epoch_of(sampler) is not None:
        return
    if state["epoch"] and not bookmark.read():
        warn(
            f"{type(sampler).__name__} has no state_dict(): epoch {state['epoch']} "
            "starts as the first one of this process, which is correct only if the "
            "order is the same in each epoch, or drawn from torch's generators; give "
            "it state_dict() and load_state_dict(), or set_epoch() and the attribute "
            "`epoch`"
        )
