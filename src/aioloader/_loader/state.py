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
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils.data import Subset

from aioloader._base.raising import saved_state
from aioloader._base.warnings import warn
from aioloader._loader.options import Options
from aioloader._order.epoch import BEGINNING, Epoch, EpochNumbers, EpochPosition
from aioloader._order.indices import described, epoch_of, packed, set_epoch, unpacked
from aioloader._order.orders import drawing_part_of, draws_from_default
from aioloader._order.permutation import KeyedOrder
from aioloader._order.stream_states import checksum
from aioloader._pipeline.position import StateLoads
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind, Outline, own_datasets

State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, Any]
VERSION = 5
_LOADER = "loader"  # the dataset is this process's own, and not a worker's copy


def _alike(
    differs: str, of: Callable[[Options], Any], *, if_known: bool = False
) -> Any:
    """Declare a value that must equal the one ``of`` the loader that loads the state.

    Otherwise an error says how it ``differs``; but ``if_known``, None equals anything.
    """
    rule = {"differs": differs, "of": of, "if_known": if_known}
    return field(default=None, metadata=rule)


# A value that is saved as a tuple of it and its checksum, or empty. That is because
# ``torch.distributed.checkpoint`` restores what a fresh loader has keys for, looks into
# mappings, saves a tuple as one value, and takes it from any rank.
_PART = {"is_part": True}


def _length_of(options: Options) -> int | None:
    try:
        return len(options.dataset)
    except Exception:  # noqa: BLE001  (the user's; the length is then unknown)
        return None


def _tail_of(options: Options) -> str | None:
    if not options.is_own_stream:  # the lengths of its ranks' parts depend on it
        return None
    is_one = options.outline().world_size == 1
    return None if is_one else options.tail or "wrap"


@dataclass(eq=False, repr=False)
class LoaderState:
    """A state of this version: what is saved follows from its fields."""

    version: int = VERSION
    kind: str = _alike(
        "the state was saved for a dataset of kind {saved}, but this one's is {found}; "
        "load it with the same dataset",
        lambda options: options.kind.value,
    )
    length: int | None = _alike(
        "the state was saved for {saved} samples, but the dataset has {found}; load it "
        "with the same dataset",
        _length_of,
        if_known=True,
    )
    batch_size: int | None = _alike(  # of all ranks together
        "the state was saved with batches of {saved} samples (of all ranks together), "
        "but the loader makes {found}; load it with the same batch_size x world_size",
        lambda options: options.global_batch_size,
    )
    ranks: int | None = _alike(  # if a user's batch sampler makes the batches
        "the state was saved on {saved} ranks, but there are {found}; with a custom "
        "batch_sampler a run cannot be resumed on another number of ranks",
        lambda options: (
            options.part.world_size if options.global_batch_size is None else None
        ),
    )
    tail: str | None = _alike(  # of our streams, if several ranks read them
        "the state was saved with tail={saved}, but the loader has tail={found}; load "
        "it with the same tail=, or restart the epoch",
        _tail_of,
        if_known=True,
    )
    readers: int = _alike(
        "the state was saved with {saved} readers of the iterable (workers that each "
        "read a part of it), but the loader has {found}; load it with the same "
        "num_workers and fetch",
        lambda options: options.readers,
    )
    epoch: int = 0
    # The number last given to the dataset's ``set_epoch``, if it has one and an
    # attribute ``epoch``.
    dataset_epoch: int | None = None
    done: int = 0  # batches below this number were delivered
    beyond: list[int] = field(default_factory=list)  # and these later ones
    # The seed that random draws are keyed with; None: not drawn yet.
    seed: int | None = field(default=None, metadata=_PART)
    # What restores the order.
    order: State = field(default_factory=dict, metadata=_PART)
    # Where the generators are that epochs draw from: the user's, of the ``"loader"``
    # and the ``"sampler"``, and torch's ``"default"`` one.
    generators: State = field(default_factory=dict, metadata=_PART)
    # Of the readers (the sampler, or streams); of our streams, those at the end of the
    # previous epoch; of a map-style dataset: the loader's, or each worker's.
    states: State = field(default_factory=dict, metadata=_PART)
    last: State = field(default_factory=dict, metadata=_PART)
    datasets: State = field(default_factory=dict, metadata=_PART)

    @classmethod
    def of(cls, options: Options, **values: Any) -> "LoaderState":
        """Return a state with what must be equal where it is loaded."""
        values |= {one.name: one.metadata["of"](options) for one in ALIKE}
        return cls(**values)

    def sealed(self) -> State:
        """Return it with its checksums, as ``state_dict`` does."""
        values = {name: getattr(self, name) for name in _VALUES}
        parts: State = {name: getattr(self, name) for name in _PARTS}
        for name, part in parts.items():
            is_empty = part is None or part == {}
            parts[name] = () if is_empty else (part, checksum({name: part}))
        return {**values, "checksum": _checksum(values, parts), **parts}


_FIELDS: tuple[Field[Any], ...] = fields(LoaderState)
ALIKE = [one for one in _FIELDS if "differs" in one.metadata]
_PARTS = [one.name for one in _FIELDS if "is_part" in one.metadata]
_VALUES = [one.name for one in _FIELDS if one.name not in _PARTS]


def unsealed(state: Any) -> LoaderState:
    """Undo ``sealed``.

    Raises:
        StateMismatchError: If it is not a state, of another version, or not as it was
            saved.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateMismatchError(
            f"this is no state of an aioloader.DataLoader: {keys!s:.80}; load what "
            "state_dict() returned",
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
    parts = {name: state.get(name) for name in _PARTS}
    for name, part in parts.items():
        is_part = isinstance(part, (list, tuple)) and len(part) in {0, 2}
        if not is_part or (part and part[1] != checksum({name: part[0]})):
            _refuse_damage(name, part)
    if state.get("checksum") != _checksum(state, parts):
        _refuse_damage("checksum", state.get("checksum"))
    saved = {name: state[name] for name in _VALUES}
    return LoaderState(**saved, **{name: one[0] for name, one in parts.items() if one})


def _checksum(state: Mapping[str, Any], parts: State) -> int:
    values = {name: state.get(name, "missing") for name in _VALUES}
    return checksum([values, {name: bool(part) for name, part in parts.items()}])


def _refuse_damage(name: str, found: Any) -> NoReturn:
    raise StateMismatchError(
        f"the state is damaged, or only a part of it: {name!r} is not as it was saved: "
        f"{found!s:.80}; load what state_dict() returned, or restart the epoch",
        expected=name,
        found=found,
    )


def state_of(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    *,
    newer: Epoch | None,
    kept: int | None,
) -> State:
    """Return the state of a loader, sealed.

    ``epoch`` is the latest that has started, ``newer`` that of an iterator that is
    next; ``kept`` is the seed of the workers that persist.
    """
    if newer is not None and newer.number >= 0:  # its workers have started
        epoch, newer = newer, None
    is_between = epoch is None or epoch.progress.is_over or newer is not None
    if epoch is None or is_between:
        state = _between(options, numbers, epoch, newer, kept)
    else:
        bookmark = epoch.progress.bookmark()
        head = epoch.head or LoaderState.of(
            options,
            epoch=epoch.number,
            seed=epoch.base_seed,
            order=copy.deepcopy(epoch.order.state()) | rules_of(options),
            dataset_epoch=epoch.dataset_epoch,
        )
        if bookmark.delivered():
            epoch.head = head  # constant, now that the order is drawn
        pulled = {"pulled": epoch.order.pulled} if epoch.order.pulled else {}
        state = replace(
            head,
            order={**head.order, **pulled},
            done=bookmark.done,
            beyond=sorted(bookmark.beyond),
            states=_by_name({**epoch.first, **bookmark.states}),
        )
    is_new = is_between and options.has_copies and kept is None
    state.datasets = _datasets_of(options, None if is_new else epoch)
    state.generators = _positions(options)
    return state.sealed()


def rules_of(options: Options) -> State:
    """Return what else tells an epoch from others; an older state may not have it."""
    dataset = options.dataset
    drop_last = getattr(options.batch_sampler, "drop_last", options.drop_last)
    is_mixture = type(dataset) is Subset and hasattr(dataset.indices, "described")
    mixture = dataset.indices.described() if is_mixture else {}
    return {"drop_last": drop_last} | mixture | fingerprint_of(dataset)


def fingerprint_of(dataset: Any) -> State:
    """Return the fingerprints of aioloader's datasets in ``dataset``, by entry.

    Each entry is a list with a value per dataset; None if that has no such entry.
    """
    prints = [*filter(None, (own.fingerprint() for own in own_datasets(dataset)))]
    names = {name for entries in prints for name in entries}
    return {name: [entries.get(name) for entries in prints] for name in sorted(names)}


def _between(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    drawn: Epoch | None,
    kept: int | None,
) -> LoaderState:
    """Return the state before an epoch: nothing is drawn for it yet."""
    state = LoaderState.of(options, epoch=numbers.next)
    # Drawn for an iterator that was made and has not started, or kept.
    state.seed = kept if drawn is None else drawn.base_seed
    state.dataset_epoch = epoch_of(options.dataset)
    first = first_states(options, epoch, is_kept=kept is not None)
    if epoch is not None and epoch.order.end is not None:
        first = {0: {**epoch.order.end, "is_over": True}}  # it may count epochs
    if epoch is not None and options.is_own_stream:
        # Other ranks may have more of it: see ``merge_states``.
        outline = options.outline()
        first = continued(options, outline, epoch, numbers.next).states
        if epoch.progress.is_over:
            state.last = _by_name(epoch.progress.bookmark().states)
    state.states = _by_name(first)
    if options.kind is Kind.MAP:
        sampler, upcoming = options.index_sampler, numbers.upcoming()
        known = described(sampler) | ({} if drawn is None else drawn.order.state())
        is_ours = upcoming is not None
        at = {"epoch": upcoming} if is_ours else {"next": epoch_of(sampler)}
        state.order = known | at | fingerprint_of(options.dataset)
    return state


def loaded_again(options: Options, loaded: LoaderState, drawn: Epoch | None) -> State:
    """Return a state that has not taken effect, for another load; sealed.

    An epoch may have been drawn for it since, and the user may have set its number.
    """
    state, sampler = copy.deepcopy(loaded), options.index_sampler
    if drawn is not None:
        state.seed = drawn.base_seed
        order = drawn.order.state()
        if isinstance(sampler, KeyedOrder):
            order.pop("epoch")  # it is set when the iteration starts
        state.order |= order
    if not (state.done or state.beyond):
        state.dataset_epoch = epoch_of(options.dataset)
        if "next" in state.order:
            state.order["next"] = epoch_of(sampler)
    state.generators = _positions(options)
    return state.sealed()


def _positions(options: Options) -> State:
    return {key: packed(one.get_state()) for key, one in generators_of(options).items()}


def generators_of(options: Options) -> dict[str, torch.Generator]:
    """Return the generators that epochs draw from: the user's and the default one."""
    loader: torch.Generator | None = options.generator
    sampler = getattr(drawing_part_of(options.index_sampler), "generator", None)
    found = {_LOADER: loader, "sampler": None if sampler is loader else sampler}
    is_map = options.kind is Kind.MAP
    if loader is None or (is_map and draws_from_default(options.index_sampler)):
        found["default"] = torch.default_generator
    return {name: one for name, one in found.items() if one is not None}


def _by_name(states: States) -> State:
    return {str(reader): one for reader, one in states.items()}  # for JSON


def note_first(
    options: Options, epoch: Epoch, before: Epoch | None, *, is_kept: bool
) -> None:
    """Note the states of the dataset at the start of an epoch.

    Those of the epoch before, if its readers, or the workers' copies, are kept.
    """
    if options.kind is not Kind.MAP:
        epoch.first = first_states(options, before, is_kept=is_kept)
        return
    if not options.is_stateful:
        return
    first = epoch.bookmark.datasets
    if before is not None and (is_kept or not options.has_copies):
        first = before.progress.bookmark().datasets | first
    else:
        copies = options.num_workers if options.has_copies else 1
        first = dict.fromkeys(range(copies), saved_state(options.dataset)) | first
    for worker, one in first.items():
        epoch.progress.leave(worker, one)


def continued(
    options: Options, outline: Outline, before: Epoch | None, number: int
) -> EpochPosition:
    """Return where the epoch of a number starts: our streams may continue."""
    if before is None or not outline.continues:
        return BEGINNING
    # A copy: a state that the user has loaded stays with the dataset.
    stream, workers = options.for_epoch(copy.copy(options.dataset)), options.readers
    starts = {
        reader: stream.following(one["dataset"], number, workers)
        for reader, one in before.progress.bookmark().states.items()
    }
    if not starts:
        return BEGINNING
    # A worker from which nothing was delivered starts its part in the same pass.
    other = {**next(iter(starts.values())), "streams": {}}
    return EpochPosition(
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
    first = {
        "read": 0,
        "skip": 0,
        "dataset": saved_state(options.dataset),
        "is_first": True,
    }
    return dict.fromkeys(range(options.readers), first)


def _datasets_of(options: Options, epoch: Epoch | None) -> State:
    """Return the states of a map-style dataset: by worker, or the loader's own."""
    if options.kind is not Kind.MAP or not options.is_stateful:
        return {}
    if epoch is None or not epoch.reads_ahead:
        return {_LOADER: saved_state(options.dataset)}
    found = epoch.progress.bookmark().datasets
    return _by_name(found) if options.has_copies else {_LOADER: found[0]}


def _latest_of(state: LoaderState) -> Any:
    """Return the state of a map-style dataset after the last delivered batch."""
    saved = state.datasets
    latest = str((state.done - 1) % len(saved))
    return saved[_LOADER if _LOADER in saved else latest]


def restore(options: Options, state: LoaderState, loads: StateLoads) -> None:
    """Set what this process has as it was when a state was saved.

    At the load, as ``torch.set_rng_state`` would: a script may seed the generators
    afterwards, or set other epochs between two. Within an epoch they are set again when
    it starts.

    Raises:
        StateMismatchError: If the dataset cannot load a state.
    """
    if options.kind is Kind.MAP:
        set_epoch(options.index_sampler, state.order.get("next"))
    set_epoch(options.dataset, state.dataset_epoch)
    _restore_dataset(options, state, loads)
    mine = generators_of(options)
    for name, one in state.generators.items():
        if name in mine:
            mine[name].set_state(unpacked(one))


def _restore_dataset(options: Options, state: LoaderState, loads: StateLoads) -> None:
    """Load the state of this process's dataset; an iterable's, if between two epochs.

    Now, because it may hold torch's generator, from which the next epoch draws first.
    Workers seed theirs; those of this process do not move for them.
    """
    saved, dataset = state.datasets, options.dataset
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
            for one in state.states.values():
                is_mine = "is_over" in one and not options.has_copies
                has_one = "dataset" in one or "is_dataset" in one
                if has_one and (is_mine or "is_first" in one):
                    loads.load_early(dataset, one)
                    return


def restore_sampler(options: Options, state: LoaderState) -> None:
    """Restore a sampler's state between epochs, before it is iterated again."""
    one = state.states.get("0", {})
    if options.kind is Kind.MAP and "sampler" in one:
        options.index_sampler.load_state_dict(copy.deepcopy(one["sampler"]))


def start_of(options: Options, state: LoaderState) -> EpochPosition:
    """Return where an epoch starts that resumes from a state."""
    states = {int(reader): one for reader, one in state.states.items()}
    if state.seed is None and options.kind is Kind.MAP:
        states = {}  # ``restore_sampler`` has used them
    copies: States = {}  # workers are started with the loader's
    if not options.has_copies:  # between epochs, more was drawn since the load
        copies = {0: _latest_of(state)} if state.datasets and state.done else {}
    elif _LOADER not in state.datasets:
        # Each gets the state of its predecessor; of another number of workers, that of
        # the worker that made the last delivered batch.
        copies = {int(worker): one for worker, one in state.datasets.items()}
        if copies and len(copies) != options.num_workers:
            copies = dict.fromkeys(range(options.num_workers), _latest_of(state))
    return EpochPosition(state.done, frozenset(state.beyond), states, copies)


def warn_of_what_is_lost(
    options: Options, epoch: Epoch, outline: Outline | None
) -> None:
    """Warn where the rest of the epoch, or the next one, depends on more than this."""
    states, name = list(epoch.bookmark.states.values()), type(options.dataset).__name__
    delivered = epoch.bookmark.delivered()
    if options.kind is Kind.MAP:
        if options.reads_async and options.is_stateful and delivered:
            warn(
                f"{name} reads many samples at once, so its state_dict() after a batch "
                "counts later samples too: the rest of the epoch is exact only if each "
                "sample follows from its index"
            )
        saved = epoch.saved.states.values()
        has_iterator = any("iterator" in one for one in saved)
        is_known = delivered or has_iterator or epoch.order.is_restorable
        if epoch.number and not is_known:
            name = type(options.index_sampler).__name__
            warn(
                f"{name} has no state_dict(): epoch {epoch.number} "
                "starts as the first one of this process, which is correct only if the "
                "order is the same in each epoch, or comes from torch's generators; "
                "give it state_dict() and load_state_dict(), or set_epoch() and the "
                "attribute `epoch`"
            )
        return
    if outline is not None:
        name = ", ".join(outline.reread)
        rereads = counts = bool(name)
    else:
        rereads = not any("iterator" in one or "dataset" in one for one in states)
        is_known = options.is_stateful or epoch.dataset_epoch is not None
        is_new = options.has_copies and not options.persistent_workers
        counts = not (is_known or is_new)  # new workers start from this one's dataset
    what = f"{name} has no state_dict()"
    if outline is not None:
        what += " that from_iterable uses"
    again = sum(one.get("read", 0) for one in states)
    has_ended = all("ended" in one for one in states)
    if delivered and again and rereads and not has_ended:
        warn(
            f"{what}: its first {again:,} samples are read again "
            "and dropped, which takes as long as the first time, and is correct only "
            "if they come in the same order"
        )
    elif epoch.number and counts:
        warn(
            f"{what}: epoch {epoch.number} starts as the first one of this process, "
            "which is correct only if all epochs have the same samples; give it "
            "state_dict() and load_state_dict(), or set_epoch() and the attribute "
            "`epoch`"
        )
