"""A loader's state, written and read: which epoch, its order, and what was delivered.

A state is a dict of a few numbers, ready for JSON if the dataset's own state is. It
says nothing of workers, prefetch or devices, so these may differ where it is loaded.
Only delivered batches count: the dataset's state is the one after the last delivered
batch, for each reader of an iterable, for each worker's copy of a map-style dataset.
Source: torchdata 0.11, ``stateful_dataloader/worker.py``.
"""

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict

import torch
from torch.utils.data import RandomSampler

from aioloader._loader.options import Options
from aioloader._observe.warnings import warn
from aioloader._order.epoch import Bookmark, Epoch, EpochNumbers
from aioloader._order.generators import packed, unpacked
from aioloader._order.indices import described
from aioloader._order.orders import drawing_part_of, seeds_itself
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind

State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, Any]
VERSION = 3
_LOADER = "loader"  # the dataset is this process's own, and not a worker's copy


class LoaderState(TypedDict):
    """A state of this version with all keys, as ``state_dict`` returns it.

    Attributes:
        kind: Kind of the dataset. It must be the same where the state is loaded, as
            must ``length``, ``batch_size`` (of all ranks together), ``readers``,
            ``ranks`` and ``tail`` (of our streams, if several ranks read them).
        epoch: Its number.
        seed: The seed that random draws are keyed with; None: not drawn yet.
        done: Batches below this number were delivered.
        beyond: Numbers of later batches that were delivered too.
        default: A checksum of torch's default generator.
        order: What restores the order. This and all keys below are in a tuple of one
            or none, since ``torch.distributed.checkpoint`` restores what a fresh
            loader has keys for, looks into mappings, and saves a tuple as one value.
        generators: The user's generators: the ``"loader"``'s and the ``"sampler"``'s.
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
    seed: int | None
    done: int
    beyond: list[int]
    default: int | None
    order: tuple[State, ...]
    generators: tuple[State, ...]
    states: tuple[State, ...]
    last: tuple[State, ...]
    datasets: tuple[State, ...]


PARTS = ("order", "generators", "states", "last", "datasets")
_VALUES = [name for name in LoaderState.__annotations__ if name not in PARTS]


def sealed(state: State) -> State:
    """Return a state with all keys of ``LoaderState``."""
    values = {key: state.get(key) for key in _VALUES}
    parts = {key: (state[key],) if state.get(key) else () for key in PARTS}
    return {**values, **parts}


def unsealed(state: Any) -> Any:
    """Undo ``sealed``; return anything else unchanged.

    Raises:
        StateMismatchError: If a part is not a mapping.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        return state
    found = {key: one for key, one in state.items() if one is not None}
    for key in set(PARTS) & set(found):
        part = found.pop(key)
        if not isinstance(part, (list, tuple)) or len(part) > 1:
            raise StateMismatchError(
                f"the state is damaged, or only a part of it: {key!r} is no part of a "
                f"state: {str(part)[:80]}",
                expected=key,
                found=part,
            )
        if part or key == "states":
            found[key] = part[0] if part else {}
    return found


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
    drawn: Epoch | None,
    is_kept: bool,
) -> State:
    """Return the state of a loader, sealed.

    Args:
        options: The loader's options.
        numbers: Which epoch is next.
        epoch: The latest epoch that has started, if one has.
        drawn: The epoch of an iterator that has not started, if there is one.
        is_kept: Whether workers of the latest epoch persist.
    """
    if epoch is None or epoch.progress.is_over:
        epoch = numbers.latest_reserved() or epoch
    if epoch is None or epoch.progress.is_over:
        state = _between(options, numbers, epoch, drawn, is_kept=is_kept)
    else:
        bookmark = epoch.progress.bookmark()
        head = epoch.head = epoch.head or _head(options, epoch)
        state = {
            **head,
            "order": {**head["order"]},
            "done": bookmark.done,
            "beyond": sorted(bookmark.beyond),
            "states": _by_name({**epoch.first, **bookmark.states}),
        }
    state["datasets"] = _datasets_of(options, epoch, is_kept=is_kept)
    if options.generator is None:
        state["default"] = _fingerprint()
    return sealed(state)


def _head(options: Options, epoch: Epoch) -> State:
    """Return the part of an epoch's state that is constant."""
    head: State = {
        "version": VERSION,
        **identity(options),
        "epoch": epoch.number,
        "seed": epoch.base_seed,
        "order": copy.deepcopy(epoch.order.state()),
    }
    if epoch.generator is not None:
        head["generators"] = {_LOADER: packed(epoch.generator)}
    return head


def _between(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    drawn: Epoch | None,
    *,
    is_kept: bool,
) -> State:
    """Return the state before an epoch: nothing is drawn for it yet."""
    first = first_states(options, epoch, is_kept=is_kept)
    state: State = {"version": VERSION, **identity(options)}
    state |= {"epoch": numbers.next, "done": 0, "beyond": []}
    if drawn is not None:  # an iterator was made and has not started
        state["seed"] = drawn.base_seed
    elif epoch is not None and is_kept:
        state["seed"] = epoch.base_seed
    if epoch is not None:
        if epoch.order.end is not None:  # of a sampler that may count epochs
            first = {0: {**epoch.order.end, "is_over": True}}
        if options.is_own_stream:  # other ranks may have more of it: ``merge_states``
            state["last"] = _by_name(epoch.progress.bookmark().states)
    state["states"] = _by_name(first)
    if options.kind is Kind.MAP:
        state["order"] = described(options.index_sampler)
        if drawn is not None:
            state["order"] |= drawn.order.state()
        upcoming = numbers.upcoming()
        if upcoming is not None:
            state["order"]["epoch"] = upcoming
    state["generators"] = {
        name: packed(generator.get_state())
        for name, generator in generators_of(options).items()
    }
    return state


def _fingerprint() -> int:
    """Return a checksum of the state of torch's default generator.

    The first bytes suffice: seed, position in the block and the block's first numbers.
    """
    state = torch.default_generator.get_state().numpy()
    return zlib.crc32(state[:64].tobytes())


def _by_name(states: States) -> State:
    """Return states by reader number, as strings for JSON."""
    return {str(reader): one for reader, one in states.items()}


def generators_of(options: Options) -> dict[str, torch.Generator]:
    """Return the user's generators that epochs draw from."""
    loader: torch.Generator | None = options.generator
    sampler = getattr(drawing_part_of(options.index_sampler), "generator", None)
    found = {_LOADER: loader, "sampler": None if sampler is loader else sampler}
    return {name: one for name, one in found.items() if one is not None}


def own_generator_state(options: Options) -> torch.Tensor | None:
    """Return the state of the user's generator, if the order does not draw from it."""
    generator = options.generator
    if generator is None:
        return None
    part = drawing_part_of(options.index_sampler)
    is_shared = part is not None and part.generator is generator
    return None if is_shared else generator.get_state()


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


def _datasets_of(options: Options, epoch: Epoch | None, *, is_kept: bool) -> State:
    """Return the states of a map-style dataset: by worker, or the loader's own."""
    if options.kind is not Kind.MAP or not options.is_stateful:
        return {}
    are_new = options.has_copies and not is_kept
    is_new = epoch is None or (epoch.progress.is_over and are_new)
    if epoch is None or is_new or not epoch.reads_ahead:
        return {_LOADER: copy.deepcopy(options.dataset.state_dict())}
    found = {**epoch.first_datasets, **epoch.progress.bookmark().datasets}
    if not options.has_copies:
        return {_LOADER: found[0]}
    return {str(worker): one for worker, one in sorted(found.items())}


def _restore_datasets(options: Options, state: State) -> States:
    """Restore a map-style dataset's state; return the states for the workers.

    Each worker gets the state of its predecessor. If their number differs, all get the
    state of the worker that made the last delivered batch.

    Raises:
        StateMismatchError: If the dataset cannot load a state.
    """
    saved = state.get("datasets") or {}
    if not saved:
        return {}
    dataset = options.dataset
    if not options.is_stateful:
        raise StateMismatchError(
            f"the state holds the dataset's own state, but {type(dataset).__name__} "
            "has no state_dict() and load_state_dict(); load it with the same dataset",
            expected="a dataset with a state",
            found=type(dataset).__name__,
        )
    is_own = _LOADER in saved
    latest = saved[_LOADER if is_own else str((state["done"] - 1) % len(saved))]
    if is_own or not options.has_copies:
        dataset.load_state_dict(copy.deepcopy(latest))
    if is_own or not options.has_copies:
        return {}  # workers are started with it
    workers = range(options.num_workers)
    if len(saved) != options.num_workers:
        return dict.fromkeys(workers, latest)
    return {worker: saved[str(worker)] for worker in workers}


# -- read ---------------------------------------------------------------------------


def resumed(
    options: Options,
    numbers: EpochNumbers,
    state: State,
    draw: Callable[[Options], Epoch],
) -> Epoch:
    """Return the epoch that a state was saved in, at its position.

    Persistent workers must have been released before.

    Args:
        options: The options of the loader that loads it.
        numbers: Which epoch is next.
        state: The state, unsealed and checked.
        draw: Draws for an epoch, if nothing was drawn for it yet.
    """
    order = state.get("order") or {}
    mine = generators_of(options)
    for name, one in (state.get("generators") or {}).items():
        if name in mine:
            mine[name].set_state(unpacked(one))
    is_between = not (state["done"] or state["beyond"])
    if not is_between and state.get("default") != _fingerprint():
        _draw_as_before(options, state)
    bookmark = Bookmark(
        state["done"],
        frozenset(state["beyond"]),
        {int(reader): one for reader, one in state["states"].items()},
        _restore_datasets(options, state),
    )
    if "seed" in state:
        own = own_generator_state(options)
        epoch = Epoch(state["seed"], options.order_of(order), own)
    else:
        bookmark = _restore_sampler(options, bookmark)
        epoch = draw(options)
    epoch.saved = state
    numbers.reserve_again(epoch, order.get("epoch"))
    if options.kind is not Kind.MAP:
        _warn_of_reading_again(options, bookmark)
    epoch.begin(state["epoch"], bookmark, readers=options.readers)
    note_first(options, epoch, None, is_kept=False)
    return epoch


def _restore_sampler(options: Options, bookmark: Bookmark) -> Bookmark:
    """Restore a sampler's state between epochs, before it is iterated again."""
    one = bookmark.states.get(0, {})
    if options.kind is not Kind.MAP or "sampler" not in one:
        return bookmark
    options.index_sampler.load_state_dict(copy.deepcopy(one["sampler"]))
    return replace(bookmark, states={})


def _draw_as_before(options: Options, state: State) -> None:
    """Repeat the draws from torch's default generator before the state was saved.

    A script that is run again seeds it again, so later epochs would repeat the draws of
    earlier ones. If the user has restored the generator, nothing is drawn. (Nor is it
    between epochs: a script may seed it for each.)
    """
    if options.generator is not None:
        return
    epochs = state["epoch"] + 1
    draws = 1 if options.persistent_workers else epochs  # those keep their base seed
    sampler = options.index_sampler
    draws_seed = isinstance(sampler, RandomSampler) and sampler.generator is None
    if draws_seed and not seeds_itself(sampler):
        draws += epochs
    for _ in range(draws):
        torch.empty((), dtype=torch.int64).random_()


def _warn_of_reading_again(options: Options, bookmark: Bookmark) -> None:
    """Warn about the cost of resuming a stream that has no state."""
    states = bookmark.states.values()
    plain = [one for one in states if not ("iterator" in one or "dataset" in one)]
    again = sum(one["read"] for one in plain if one.get("skip") and "ended" not in one)
    if again:
        warn(
            f"{type(options.dataset).__name__} has no state_dict(): its first "
            f"{again:,} samples are read again and dropped, which takes as long as "
            "the first time, and is correct only if they come in the same order"
        )
