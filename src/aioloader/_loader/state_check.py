"""Whether a state fits a loader: what of both must be the same."""

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import RandomSampler

from aioloader._loader import arguments
from aioloader._loader.state_format import check_shape
from aioloader._order.orders import described, drawing_part_of
from aioloader.errors import StateMismatchError
from aioloader.protocols import Kind

if TYPE_CHECKING:
    from aioloader._loader.loader import DataLoader

State: TypeAlias = dict[str, Any]
VERSION = 2


def check(loader: "DataLoader[Any]", state: State) -> None:
    """Check that ``state`` was saved by a loader like this one.

    Raises:
        StateMismatchError: If it was not; names both.
    """
    check_shape(state, VERSION)
    mine = identity(loader)
    for name, say in _WORDS.items():
        saved, found = state.get(name), mine[name]
        is_known = name != "length" or not (saved is None or found is None)
        if is_known and saved != found:
            raise StateMismatchError(
                say.format(saved=_shown(saved), found=_shown(found)),
                expected=saved,
                found=found,
            )
    _check_order(loader, state)
    if loader._kind is Kind.MAP:
        with contextlib.suppress(TypeError, NotImplementedError):
            delivered = max((state["done"], *(one + 1 for one in state["beyond"])))
            length = loader._sampling.length(loader.dataset)
            if delivered > length:
                _refuse("an epoch of {} batches or more", delivered, length)


def identity(loader: "DataLoader[Any]") -> State:
    """Return what of a loader must be the same where its state is loaded."""
    try:
        length = len(loader.dataset)
    except Exception:  # noqa: BLE001  (of the user's; then it is not known)
        length = None
    return {
        "kind": loader._kind.value,
        "length": length,
        "batch_size": loader._sampling.global_batch_size,
        "readers": readers_of(loader),
        "ranks": loader._sampling.ranks_of_state,
    }


_WORDS = {
    "kind": "the state was saved for a dataset of kind {saved}, but this one's is "
    "{found}; load it with the same dataset",
    "length": "the state was saved for {saved} samples, but the dataset has "
    "{found}; load it with the same dataset",
    "batch_size": "the state was saved with batches of {saved} samples (of all ranks "
    "together), but the loader makes {found}; load it with the same batch_size x "
    "world_size",
    "ranks": "the state was saved on {saved} ranks, but there are {found}; with a "
    "batch_sampler of its own a run cannot go on with others",
    "readers": "the state was saved with {saved} readers of the iterable (workers that "
    "each read a part of their own), but the loader has {found}; load it with the same "
    "num_workers and fetch",
}


def _check_order(loader: "DataLoader[Any]", state: State) -> None:
    """Check sampler, number of indices and seed."""
    saved = state.get("order") or {}
    if loader._kind is not Kind.MAP or not saved:
        return
    mine = described(loader._sampling.index_sampler)
    for name, what in (
        ("sampler", "the sampler {!r}"),
        ("length", "a sampler of {!r} indices"),
        ("seed", "the seed {!r} of ShuffledIndices"),
    ):
        is_drawn = name == "seed" and "seed" not in mine
        if not is_drawn and saved.get(name) != mine.get(name):
            _refuse(what, saved.get(name), mine.get(name))
    _check_generator(loader, state, saved)


def _check_generator(loader: "DataLoader[Any]", state: State, saved: State) -> None:
    """Check the seed of the generator that the order is drawn from."""
    between = state.get("generators") or {}
    for name in set(between) - set(generators_of(loader)):
        _refuse("a generator of seed {!r} for the order", between[name]["seed"], None)
    part = drawing_part_of(loader._sampling.index_sampler)
    generator = None if part is None else part.generator
    is_random = isinstance(loader._sampling.index_sampler, RandomSampler)
    if generator is None and not (is_random and "generator" in saved):
        return
    drawn = (
        saved.get("generator") or between.get("sampler") or between.get("loader") or {}
    )
    found = None if generator is None else generator.initial_seed()
    if drawn.get("seed") != found:
        what = "a generator of seed {!r} for the order"
        _refuse(what, drawn.get("seed"), found)


def _refuse(what: str, saved: Any, found: Any) -> None:
    hint = ""
    if sorted(map(str, (saved, found))) == ["RandomSampler", "ShuffledIndices"]:
        hint = " (shuffle=True with ranks: rank=0, world_size=1 is one rank)"
    elif "generator" in what and not (saved is None or found is None):
        hint = f"; seed it alike, with manual_seed({saved})"
    raise StateMismatchError(
        f"the state was saved with {what.format(saved)}, but the loader has "
        f"{what.format(found)}{hint}",
        expected=saved,
        found=found,
    )


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)


def generators_of(loader: "DataLoader[Any]") -> dict[str, torch.Generator]:
    """Return the generators of the user's that epochs draw from."""
    found = {
        "loader": loader.generator,
        "sampler": getattr(
            drawing_part_of(loader._sampling.index_sampler), "generator", None
        ),
    }
    if found["sampler"] is found["loader"]:
        del found["sampler"]
    return {name: one for name, one in found.items() if one is not None}


def reads_in_workers(loader: "DataLoader[Any]") -> bool:
    """Tell whether workers read samples, rather than the loader for them.

    Processes read all but async iterables, of which there is one stream; threads
    and executors read what is plain and map-style, Ray's actors what is map-style.
    """
    if loader.fetch != "auto":
        return loader.fetch == "workers"
    if loader.workers == "process":
        return loader._kind is not Kind.ASYNC_ITERABLE
    functions = loader.transform, loader.collate_fn
    return arguments.suits(loader.workers, loader.dataset, *functions)


def readers_of(loader: "DataLoader[Any]") -> int:
    """Return how many streams the batches come from, in turns."""
    is_replicated = loader._kind is not Kind.MAP and reads_in_workers(loader)
    return max(1, loader.num_workers) if is_replicated else 1
