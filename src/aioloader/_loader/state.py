"""Save and load the state of a loader, such as its epoch and delivered batches.

A state is a dict of a few numbers with checksums, ready for JSON if the states of
dataset and sampler are. Workers, prefetching and devices are not saved, and may differ.
Only delivered batches count. The dataset's state is as of the last delivered batch,
for each reader of an iterable or each worker's copy of a map-style dataset.
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
_LOADER = "loader"  # the key of this process's dataset, in place of a worker's number


def _must_match(
    differs: str, of: Callable[[Options], Any], *, if_known: bool = False
) -> Any:
    """Declare a field that must have the same value in the loader that loads the state.

    ``of`` computes the value, ``differs`` is the error, ``if_known`` lets None match.
    """
    rule = {"differs": differs, "of": of, "if_known": if_known}
    return field(default=None, metadata=rule)


# A sealed field is saved as the tuple ``(value, checksum)``, or ``()`` if it is empty:
# ``torch.distributed.checkpoint`` would restore only those entries of a mapping that a
# fresh loader has too, but saves a tuple as one value.
_SEALED = {"is_sealed": True}


def _length_of(options: Options) -> int | None:
    try:
        return len(options.dataset)
    except Exception:  # noqa: BLE001  (user code; the length is then unknown)
        return None


def _tail_of(options: Options) -> str | None:
    if not options.is_own_stream or options.outline().world_size == 1:
        return None
    return options.tail or "wrap"  # the lengths of the ranks' parts depend on ``tail``


@dataclass(eq=False, repr=False)
class LoaderState:
    """The contents of a saved state; each field is an entry of the saved dict."""

    version: int = VERSION
    kind: str = _must_match(
        "the state was saved for a dataset of kind {saved}, but this one's is {found}; "
        "load it with the same dataset",
        lambda options: options.kind.value,
    )
    length: int | None = _must_match(
        "the state was saved for {saved} samples, but the dataset has {found}; load it "
        "with the same dataset",
        _length_of,
        if_known=True,
    )
    batch_size: int | None = _must_match(  # of all ranks together
        "the state was saved with batches of {saved} samples (of all ranks together), "
        "but the loader makes {found}; load it with the same batch_size x world_size",
        lambda options: options.global_batch_size,
    )
    ranks: int | None = _must_match(  # if a user's batch sampler makes the batches
        "the state was saved on {saved} ranks, but there are {found}; with a custom "
        "batch_sampler a run cannot be resumed on another number of ranks",
        lambda options: (
            options.part.world_size if options.global_batch_size is None else None
        ),
    )
    tail: str | None = _must_match(  # of our streams, if several ranks read them
        "the state was saved with tail={saved}, but the loader has tail={found}; load "
        "it with the same tail=, or restart the epoch",
        _tail_of,
        if_known=True,
    )
    readers: int = _must_match(
        "the state was saved with {saved} readers of the iterable (workers that each "
        "read a part of it), but the loader has {found}; load it with the same "
        "num_workers and fetch",
        lambda options: options.readers,
    )
    epoch: int = 0
    # The dataset's ``epoch``, if it also has ``set_epoch``.
    dataset_epoch: int | None = None
    done: int = 0  # all batches below this number were delivered
    beyond: list[int] = field(default_factory=list)  # later batches delivered
    # The base seed of random numbers; None: not drawn yet.
    seed: int | None = field(default=None, metadata=_SEALED)
    # Data that restores the order.
    order: State = field(default_factory=dict, metadata=_SEALED)
    # States of the generators that epochs draw from: the user's, of the ``"loader"``
    # and the ``"sampler"``, and torch's ``"default"`` one.
    generators: State = field(default_factory=dict, metadata=_SEALED)
    # States of an iterable's readers, or of a map-style dataset's sampler ("0").
    states: State = field(default_factory=dict, metadata=_SEALED)
    # The states of an aioloader stream, by reader, at the previous epoch's end.
    last: State = field(default_factory=dict, metadata=_SEALED)
    # States of a map-style dataset, by worker or for this process.
    datasets: State = field(default_factory=dict, metadata=_SEALED)

    @classmethod
    def of(cls, options: Options, **values: Any) -> "LoaderState":
        """Return a state of ``values`` and of the options that a load must match."""
        values |= {each.name: each.metadata["of"](options) for each in MUST_MATCH}
        return cls(**values)

    def sealed(self) -> State:
        """Return the dict, with checksums, that ``state_dict`` returns."""
        values = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        parts: State = {name: getattr(self, name) for name in _SEALED_FIELDS}
        for name, part in parts.items():
            is_empty = part is None or part == {}
            parts[name] = () if is_empty else (part, checksum({name: part}))
        return {**values, "checksum": _checksum(values, parts), **parts}


_FIELDS: tuple[Field[Any], ...] = fields(LoaderState)
MUST_MATCH = [each for each in _FIELDS if "differs" in each.metadata]
_SEALED_FIELDS = [each.name for each in _FIELDS if "is_sealed" in each.metadata]
_PLAIN_FIELDS = [each.name for each in _FIELDS if each.name not in _SEALED_FIELDS]


def unsealed(state: Any) -> LoaderState:
    """Return the ``LoaderState`` that a saved dict contains.

    Raises:
        StateMismatchError: If ``state`` is damaged, of another version, or no state.
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
    parts = {name: state.get(name) for name in _SEALED_FIELDS}
    for name, part in parts.items():
        is_sealed = isinstance(part, (list, tuple)) and len(part) in {0, 2}
        if not is_sealed or (part and part[1] != checksum({name: part[0]})):
            _refuse_damage(name, part)
    if state.get("checksum") != _checksum(state, parts):
        _refuse_damage("checksum", state.get("checksum"))
    saved = {name: state[name] for name in _PLAIN_FIELDS}
    saved |= {name: part[0] for name, part in parts.items() if part}
    return LoaderState(**saved)


def _checksum(state: Mapping[str, Any], parts: State) -> int:
    values = {name: state.get(name, "missing") for name in _PLAIN_FIELDS}
    return checksum([values, {name: bool(part) for name, part in parts.items()}])


def _refuse_damage(name: str, value: Any) -> NoReturn:
    raise StateMismatchError(
        f"the state is damaged, or only a part of it: {name!r} is not as it was saved: "
        f"{value!s:.80}; load what state_dict() returned, or restart the epoch",
        expected=name,
        found=value,
    )


def state_of(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    *,
    newer: Epoch | None,
    is_kept: bool = False,
    seed: int | None = None,
) -> State:
    """Return a loader's state, as the dict that ``state_dict`` returns.

    ``epoch``: the latest epoch that has started. ``newer``: the next epoch, if it has
    an iterator. ``is_kept``: whether persistent workers exist. ``seed``: the base seed
    that the next epoch takes from the latest one.
    """
    if newer is not None and newer.number >= 0:  # its workers have started
        epoch, newer = newer, None
    is_between = epoch is None or epoch.progress.is_over or newer is not None
    if epoch is None or is_between:
        first = first_states(options, epoch, is_kept=is_kept)
        state = _between(options, numbers, epoch, newer, first)
        state.seed = seed if newer is None else newer.base_seed
    else:
        position = epoch.progress.position()
        head = epoch.state_head or LoaderState.of(
            options,
            epoch=epoch.number,
            seed=epoch.base_seed,
            order=copy.deepcopy(epoch.order.state()) | epoch_settings(options),
            dataset_epoch=epoch.dataset_epoch,
        )
        if position.delivered():
            epoch.state_head = head  # constant once the order is drawn
        pulled = {"pulled": epoch.order.pulled} if epoch.order.pulled else {}
        state = replace(
            head,
            order={**head.order, **pulled},
            done=position.done,
            beyond=sorted(position.beyond),
            states=_str_keys({**epoch.first, **position.states}),
        )
    latest = epoch or newer
    keeps = options.persistent_workers if latest is None else latest.keeps_seed
    state.order = {**state.order, "keeps_seed": keeps}
    is_new = is_between and options.has_copies and not is_kept
    state.datasets = _datasets_of(options, None if is_new else epoch)
    state.generators = _generator_states(options)
    return state.sealed()


def epoch_settings(options: Options) -> State:
    """Return the settings, besides the sampler's, that decide an epoch's samples."""
    dataset = options.dataset
    drop_last = getattr(options.batch_sampler, "drop_last", options.drop_last)
    is_mixture = type(dataset) is Subset and hasattr(dataset.indices, "described")
    mixture = dataset.indices.described() if is_mixture else {}
    return {"drop_last": drop_last} | mixture | fingerprint_of(dataset)


def fingerprint_of(dataset: Any) -> State:
    """Return the fingerprints of aioloader's datasets in ``dataset``, by entry name.

    Each value lists that entry of each dataset, or None where a dataset lacks it.
    """
    prints = [*filter(None, (own.fingerprint() for own in own_datasets(dataset)))]
    names = {name for entries in prints for name in entries}
    return {name: [entries.get(name) for entries in prints] for name in sorted(names)}


def _between(
    options: Options,
    numbers: EpochNumbers,
    epoch: Epoch | None,
    drawn: Epoch | None,
    first: States,
) -> LoaderState:
    """Return the state between epochs, without a seed.

    ``drawn``: the next epoch, if it was drawn. ``first``: the states of its readers.
    """
    state = LoaderState.of(options, epoch=numbers.next)
    state.dataset_epoch = epoch_of(options.dataset)
    if epoch is not None and epoch.order.end is not None:
        # The sampler may count epochs.
        first = {0: {**epoch.order.end, "is_over": True}}
    if epoch is not None and options.is_own_stream:
        outline = options.outline()
        first = stream_start(options, outline, epoch, numbers.next).states
        if epoch.progress.is_over:  # but not on all ranks: see ``merge_states``
            state.last = _str_keys(epoch.progress.position().states)
    state.states = _str_keys(first)
    if options.kind is Kind.MAP:
        sampler, number = options.index_sampler, numbers.next_order_epoch()
        order = described(sampler) | ({} if drawn is None else drawn.order.state())
        order |= {"next": epoch_of(sampler)} if number is None else {"epoch": number}
        state.order = order | fingerprint_of(options.dataset)
    return state


def pending_state(options: Options, loaded: LoaderState, drawn: Epoch | None) -> State:
    """Return the dict of a loaded state that no iteration has resumed from.

    It includes the epoch ``drawn`` since, if any, and epoch numbers set by the user.
    """
    state, sampler = copy.deepcopy(loaded), options.index_sampler
    if drawn is not None:
        state.seed = drawn.base_seed
        order = drawn.order.state()
        if isinstance(sampler, KeyedOrder):
            order.pop("epoch")  # set when the iteration starts
        state.order |= order
    if not (state.done or state.beyond):
        state.dataset_epoch = epoch_of(options.dataset)
        if "next" in state.order:
            state.order["next"] = epoch_of(sampler)
    state.generators = _generator_states(options)
    return state.sealed()


def _generator_states(options: Options) -> State:
    generators = generators_of(options)
    return {name: packed(each.get_state()) for name, each in generators.items()}


def generators_of(options: Options) -> dict[str, torch.Generator]:
    """Return, by name, the generators from which the loader's epochs draw."""
    loader: torch.Generator | None = options.generator
    sampler = getattr(drawing_part_of(options.index_sampler), "generator", None)
    generators = {_LOADER: loader, "sampler": None if sampler is loader else sampler}
    is_map = options.kind is Kind.MAP
    if loader is None or (is_map and draws_from_default(options.index_sampler)):
        generators["default"] = torch.default_generator
    return {name: each for name, each in generators.items() if each is not None}


def _str_keys(states: States) -> State:
    return {str(reader): state for reader, state in states.items()}  # for JSON


def record_first_states(
    options: Options, epoch: Epoch, before: Epoch | None, *, is_kept: bool
) -> None:
    """Record the dataset's states at the start of an epoch.

    They continue from the epoch ``before``, unless new workers copy the dataset.
    """
    if options.kind is not Kind.MAP:
        epoch.first = first_states(options, before, is_kept=is_kept)
        return
    if not options.is_stateful:
        return
    first = epoch.start.datasets
    if before is not None and (is_kept or not options.has_copies):
        first = before.progress.position().datasets | first
    else:
        copies = options.num_workers if options.has_copies else 1
        first = dict.fromkeys(range(copies), saved_state(options.dataset)) | first
    for worker, state in first.items():
        epoch.progress.note_dataset(worker, state)


def stream_start(
    options: Options, outline: Outline, before: Epoch | None, number: int
) -> EpochPosition:
    """Return the position where epoch ``number`` of an aioloader stream starts.

    Some streams continue where the epoch ``before`` ended.
    """
    if before is None or not outline.continues:
        return BEGINNING
    # A copy: a state that the user has loaded into the dataset stays there.
    stream, workers = options.for_epoch(copy.copy(options.dataset)), options.readers
    starts = {
        reader: stream.following(state["dataset"], number, workers)
        for reader, state in before.progress.position().states.items()
    }
    if not starts:
        return BEGINNING
    # A worker from which nothing was delivered starts its part in the same pass.
    default = {**next(iter(starts.values())), "streams": {}}
    return EpochPosition(
        states={
            reader: {"read": 0, "skip": 0, "dataset": starts.get(reader, default)}
            for reader in range(workers)
        }
    )


def first_states(options: Options, before: Epoch | None, *, is_kept: bool) -> States:
    """Return the readers' states of a user's iterable when the next epoch starts."""
    if options.kind is Kind.MAP or options.is_own_stream:
        return {}
    if before is not None and (is_kept or not options.has_copies):
        states = before.progress.position().states
        return {reader: {**state, "is_over": True} for reader, state in states.items()}
    if not options.is_stateful:
        return {}
    saved = saved_state(options.dataset)
    first = {"read": 0, "skip": 0, "dataset": saved, "is_first": True}
    return dict.fromkeys(range(options.readers), first)


def _datasets_of(options: Options, epoch: Epoch | None) -> State:
    """Return a map-style dataset's states, keyed by worker or ``"loader"``."""
    if options.kind is not Kind.MAP or not options.is_stateful:
        return {}
    if epoch is None or not epoch.reads_ahead:
        return {_LOADER: saved_state(options.dataset)}
    states = epoch.progress.position().datasets
    return _str_keys(states) if options.has_copies else {_LOADER: states[0]}


def _latest_copy(state: LoaderState) -> Any:
    """Return the state of a map-style dataset after the last delivered batch."""
    saved = state.datasets
    latest = str((state.done - 1) % len(saved))
    return saved[_LOADER if _LOADER in saved else latest]


def restore(options: Options, state: LoaderState, loads: StateLoads) -> None:
    """Restore generators, epoch numbers and dataset of this process from a state.

    This happens at the load, as in ``torch.set_rng_state``, so that a script may then
    seed generators or set epochs. A resumed epoch loads its own state when it starts.

    Raises:
        StateMismatchError: If the dataset cannot load a state.
    """
    if options.kind is Kind.MAP:
        set_epoch(options.index_sampler, state.order.get("next"))
    set_epoch(options.dataset, state.dataset_epoch)
    _restore_dataset(options, state, loads)
    generators = generators_of(options)
    for name, saved in state.generators.items():
        if name in generators:
            generators[name].set_state(unpacked(saved))


def _restore_dataset(options: Options, state: LoaderState, loads: StateLoads) -> None:
    """Restore the dataset of this process; an iterable is restored between epochs only.

    The dataset may set torch's generator, from which the next epoch is drawn. If
    workers have copies of the dataset, this process's generator stays unchanged.
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
            dataset.load_state_dict(copy.deepcopy(_latest_copy(state)))
        elif options.kind is not Kind.MAP and options.is_stateful:
            for entry in state.states.values():
                is_mine = "is_over" in entry and not options.has_copies
                has_state = "dataset" in entry or "is_dataset" in entry
                if has_state and (is_mine or "is_first" in entry):
                    loads.load_early(dataset, entry)
                    return


def restore_sampler(options: Options, state: LoaderState) -> None:
    """Restore a sampler's state between epochs, before it is iterated again."""
    saved = state.states.get("0", {})
    if options.kind is Kind.MAP and "sampler" in saved:
        options.index_sampler.load_state_dict(copy.deepcopy(saved["sampler"]))


def start_of(options: Options, state: LoaderState) -> EpochPosition:
    """Return the position at which an epoch resumes from a state."""
    states = {int(reader): saved for reader, saved in state.states.items()}
    if state.seed is None and options.kind is Kind.MAP:
        states = {}  # ``restore_sampler`` has used them
    copies: States = {}  # by default workers copy the loader's dataset
    if not options.has_copies:  # between epochs, the dataset may be newer
        copies = {0: _latest_copy(state)} if state.datasets and state.done else {}
    elif _LOADER not in state.datasets:
        # Each worker gets its predecessor's state. If their number has changed, all get
        # the state of the worker that made the last delivered batch.
        copies = {int(worker): saved for worker, saved in state.datasets.items()}
        if copies and len(copies) != options.num_workers:
            copies = dict.fromkeys(range(options.num_workers), _latest_copy(state))
    return EpochPosition(state.done, frozenset(state.beyond), states, copies)


def warn_of_inexact_resume(
    options: Options, epoch: Epoch, outline: Outline | None
) -> None:
    """Warn if the state may not suffice to repeat the rest of the run exactly."""
    states, name = list(epoch.start.states.values()), type(options.dataset).__name__
    delivered = epoch.start.delivered()
    if options.kind is Kind.MAP:
        if options.reads_async and options.is_stateful and delivered:
            warn(
                f"{name} reads many samples at once, so its state_dict() after a batch "
                "counts later samples too: the rest of the epoch is exact only if each "
                "sample follows from its index"
            )
        saved = epoch.saved.states.values()
        has_iterator = any("iterator" in state for state in saved)
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
        rereads = not any({"iterator", "dataset"} & state.keys() for state in states)
        is_known = options.is_stateful or epoch.dataset_epoch is not None
        is_new = options.has_copies and not options.persistent_workers
        counts = not (is_known or is_new)  # new workers copy this process's dataset
    problem = f"{name} has no state_dict()"
    if outline is not None:
        problem += " that from_iterable uses"
    again = sum(state.get("read", 0) for state in states)
    has_ended = all("ended" in state for state in states)
    if delivered and again and rereads and not has_ended:
        warn(
            f"{problem}: its first {again:,} samples are read again "
            "and dropped, which takes as long as the first time, and is correct only "
            "if they come in the same order"
        )
    elif epoch.number and counts:
        warn(
            f"{problem}: epoch {epoch.number} starts as the first one of this process, "
            "which is correct only if all epochs have the same samples; give it "
            "state_dict() and load_state_dict(), or set_epoch() and the attribute "
            "`epoch`"
        )
