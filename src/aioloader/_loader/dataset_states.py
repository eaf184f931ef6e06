"""A dataset's own state, as a loader's state holds it: whose copy it is of, and when.

The position counts what was delivered, so the dataset's state is that after the last
delivered batch: of an iterable for each reader, of a map-style dataset for each worker
that has a copy. Source: torchdata 0.11, ``stateful_dataloader/worker.py``.
"""

import copy
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader._loader.state_check import State, readers_of, reads_in_workers
from aioloader._order.progress import Bookmark
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind, is_own_stream, is_stateful

if TYPE_CHECKING:
    from aioloader._loader.loader import DataLoader
    from aioloader._loader.state import Passage

Firsts: TypeAlias = dict[int, Any]
_LOADER = "loader"  # the dataset is this process's own, and not a worker's copy


def note_first(
    loader: "DataLoader[Any]", passage: "Passage", before: "Passage | None"
) -> None:
    """Note the states of the dataset that a pass begins with.

    Args:
        loader: Whose dataset.
        passage: The pass.
        before: The one before, if there was one.
    """
    passage.first = first_states(loader, before)
    passage.first_datasets = _first_datasets(loader, before)


def first_states(loader: "DataLoader[Any]", before: "Passage | None") -> Firsts:
    """Return the states that an iterable's readers begin the next epoch with.

    Args:
        loader: Whose dataset.
        before: The latest pass, if there was one.
    """
    dataset = loader.dataset
    if loader._kind is Kind.MAP or is_own_stream(dataset):
        return {}
    if before is not None and not _are_new(loader):
        states = before.progress.bookmark().states
        return {reader: {**one, "is_over": True} for reader, one in states.items()}
    if not is_stateful(dataset):
        return {}
    own = copy.deepcopy(dataset.state_dict())
    first = {"read": 0, "skip": 0, "dataset": own, "is_first": True}
    return dict.fromkeys(range(readers_of(loader)), first)


def _first_datasets(loader: "DataLoader[Any]", before: "Passage | None") -> Firsts:
    """Return what copies of a map-style dataset begin the next epoch with."""
    if not _has_state(loader):
        return {}
    if before is not None and not _are_new(loader):
        return {**before.first_datasets, **before.progress.bookmark().datasets}
    own = copy.deepcopy(loader.dataset.state_dict())
    copies = loader.num_workers if _are_copies(loader) else 1
    return dict.fromkeys(range(copies), own)


def datasets_of(loader: "DataLoader[Any]", passage: "Passage | None") -> State:
    """Return the states of a map-style dataset, by worker, or of the loader's own.

    Args:
        loader: Whose dataset.
        passage: The latest pass, if there was one.
    """
    if not _has_state(loader):
        return {}
    is_over = passage is None or passage.progress.is_over()
    if passage is None or (is_over and _are_new(loader)) or not passage.reads_ahead:
        return {_LOADER: copy.deepcopy(loader.dataset.state_dict())}
    found = {**passage.first_datasets, **passage.progress.bookmark().datasets}
    if not _are_copies(loader):
        return {_LOADER: found[0]}
    return {str(worker): one for worker, one in sorted(found.items())}


def snapshot_every(loader: "DataLoader[Any]") -> int:
    """Return how often a stream is asked for its state; 0: only at first.

    Of one of ours it costs little, and could not be moved to other ranks else. Without
    workers, torchdata asks for it with the loader's.
    """
    every = loader.snapshot_every_n_steps or 0
    is_ours = is_own_stream(loader.dataset)
    return 1 if is_ours or not (every or loader.num_workers) else every


def restore_datasets(loader: "DataLoader[Any]", state: State) -> Firsts:
    """Give a map-style dataset its state back; return those that are for workers.

    Each worker gets that of its predecessor. Where there were others, all get that of
    the worker which made the last delivered batch.

    Raises:
        StateMismatchError: If the dataset takes no state.
    """
    saved = state.get("datasets") or {}
    if not saved:
        return {}
    dataset = loader.dataset
    if not is_stateful(dataset):
        raise StateMismatchError(
            f"the state holds the dataset's own state, but {type(dataset).__name__} "
            "has no state_dict() and load_state_dict(); load it with the same dataset",
            expected="a dataset with a state",
            found=type(dataset).__name__,
        )
    if _LOADER in saved:
        latest = saved[_LOADER]
        dataset.load_state_dict(copy.deepcopy(latest))
    else:
        latest = saved[str((state["done"] - 1) % len(saved))]
    if not _are_copies(loader):
        if _LOADER not in saved:
            dataset.load_state_dict(copy.deepcopy(latest))
        return {}
    workers = range(loader.num_workers)
    if _LOADER in saved:  # which they are forked with, unless they are there
        return {} if _are_new(loader) else dict.fromkeys(workers, latest)
    if len(saved) != loader.num_workers:
        return dict.fromkeys(workers, latest)
    return {worker: saved[str(worker)] for worker in workers}


def read_again(bookmark: Bookmark) -> int:
    """Return how many samples have to be read again, for want of a state."""
    states = bookmark.states.values()
    plain = [one for one in states if not ("iterator" in one or "dataset" in one)]
    return sum(one["read"] for one in plain if one.get("skip") and "ended" not in one)


def _has_state(loader: "DataLoader[Any]") -> bool:
    return loader._kind is Kind.MAP and is_stateful(loader.dataset)


def _are_copies(loader: "DataLoader[Any]") -> bool:
    """Tell whether worker processes have copies of the dataset."""
    is_process = loader.num_workers > 0 and loader.workers == "process"
    return is_process and reads_in_workers(loader)


def _are_new(loader: "DataLoader[Any]") -> bool:
    """Tell whether the next epoch's workers get new copies of the loader's dataset."""
    return _are_copies(loader) and not loader._live.pools.has_kept()
