"""What a loader's state holds: which epoch, its order, and how far it was delivered.

A state is a dict of a few numbers, ready for JSON where the dataset's own state is. It
tells nothing of workers, prefetch, places or hosts, so it can be loaded with others.
"""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from aioloader._loader.dataset_states import (
    Firsts,
    datasets_of,
    first_states,
    note_first,
    read_again,
    restore_datasets,
)
from aioloader._loader.state_check import (
    VERSION,
    State,
    generators_of,
    identity,
    readers_of,
)
from aioloader._observe.warnings import warn
from aioloader._order.generators import packed, unpacked
from aioloader._order.orders import Order, described, drawing_part_of, seeds_itself
from aioloader._order.progress import Bookmark, Progress
from aioloader.protocols import Kind, is_own_stream

if TYPE_CHECKING:
    from aioloader._loader.loader import DataLoader


@dataclass(frozen=True, eq=False)
class Draft:
    """What is drawn when an iterator is made, before anything is asked of it.

    Attributes:
        base_seed: What random draws are keyed with.
        order: Of the samples.
        generator: The state of the user's generator behind the draw of the base seed;
            None if there is none, or it is the order's too.
    """

    base_seed: int
    order: Order
    generator: torch.Tensor | None = None


@dataclass(eq=False)
class Passage:
    """One pass over the dataset, under way or over.

    Attributes:
        epoch: Its number.
        base_seed: What random draws are keyed with.
        order: Of its samples.
        bookmark: Where it began.
        progress: How far it is.
        generator: The user's generator behind the draw of the base seed, if it is not
            the order's too.
        saved: The state that it goes on from, if there was one.
        first: What the readers of an iterable begin with, if it has a state.
        first_datasets: What copies of a map-style dataset begin with, if it has one.
        reads_ahead: Whether samples are read before their batch is asked for.
    """

    epoch: int
    base_seed: int
    order: Order
    bookmark: Bookmark
    progress: Progress
    generator: torch.Tensor | None = None
    saved: State | None = None
    first: Firsts = field(default_factory=dict)
    first_datasets: Firsts = field(default_factory=dict)
    reads_ahead: bool = False
    _head: State | None = None

    @classmethod
    def begun(
        cls, epoch: int, draft: Draft, bookmark: Bookmark, readers: int
    ) -> "Passage":
        """Return a pass that begins at ``bookmark``; its order is drawn from now on."""
        draft.order.prepare()
        progress = Progress(bookmark, readers=readers)
        seed, order, generator = draft.base_seed, draft.order, draft.generator
        return cls(epoch, seed, order, bookmark, progress, generator)

    def is_untouched(self) -> bool:
        """Tell whether nothing was delivered yet."""
        now, then = self.progress.bookmark(), self.bookmark
        is_there = (now.done, now.beyond) == (then.done, then.beyond)
        return is_there and not self.progress.is_over()

    def head(self, loader: "DataLoader[Any]") -> State:
        """Return what of its state does not change as it goes on."""
        if self._head is None:
            order = copy.deepcopy(self.order.state())
            self._head = {
                "version": VERSION,
                **identity(loader),
                "epoch": self.epoch,
                "seed": self.base_seed,
                "order": order,
            }
            if self.generator is not None:
                self._head["generator"] = packed(self.generator)
        return self._head


def state_of(loader: "DataLoader[Any]", passage: Passage | None) -> State:
    """Return the state of ``loader``.

    Args:
        loader: Whose state.
        passage: Its latest pass; None if it has begun none.
    """
    if passage is None or passage.progress.is_over():
        passage = loader._live.prepared() or passage
    if passage is None or passage.progress.is_over():
        state = {"version": VERSION, **identity(loader), **_between(loader, passage)}
    else:
        bookmark = passage.progress.bookmark()
        head = passage.head(loader)
        state = {
            **head,
            "order": {**head["order"]},
            "done": bookmark.done,
            "beyond": sorted(bookmark.beyond) if bookmark.beyond else [],
            "states": _by_name({**passage.first, **bookmark.states}),
        }
    state["datasets"] = datasets_of(loader, passage)
    if loader.generator is None:
        state["default"] = _fingerprint()
    return state


def _fingerprint() -> int:
    """Return what tells whether torch's default generator is as it was.

    Its seed, its place in a block of numbers and the first of them come first: enough.
    """
    state = torch.default_generator.get_state().numpy()
    return zlib.crc32(state[:64].tobytes())


def _between(loader: "DataLoader[Any]", passage: Passage | None) -> State:
    """Return the state before an epoch: nothing of it was drawn yet."""
    epochs = loader._epochs
    first = first_states(loader, passage)
    state: State = {"epoch": epochs.next, "done": 0, "beyond": []}
    drafted = loader._live.drafted()
    if drafted is not None:  # an iterator was made, and has not begun
        state["seed"] = drafted.base_seed
    elif passage is not None and loader._live.pools.has_kept():
        state["seed"] = passage.base_seed
    if passage is not None:
        end = getattr(passage.order, "end", None)
        if end is not None:  # of a sampler with a state, which may know of epochs
            first = {0: {**end, "is_over": True}}
        # Other ranks may have more of this stream: see ``merge_states``.
        if is_own_stream(loader.dataset):
            state["last"] = _by_name(passage.progress.bookmark().states)
    state["states"] = _by_name(first)
    if loader._kind is Kind.MAP:
        state["order"] = described(loader._sampling.index_sampler)
        if drafted is not None:
            state["order"] |= drafted.order.state()
        upcoming = epochs.upcoming()
        if upcoming is not None:
            state["order"]["epoch"] = upcoming
    generators = {
        name: packed(generator.get_state())
        for name, generator in generators_of(loader).items()
    }
    if generators:
        state["generators"] = generators
    return state


def restore_generators(loader: "DataLoader[Any]", state: State) -> None:
    """Give the user's generators the states that they were saved with."""
    mine = generators_of(loader)
    saved = state.get("generators") or {}
    if "generator" in state:
        saved = {"loader": state["generator"]}
    for name, one in saved.items():
        if name in mine:
            mine[name].set_state(unpacked(one))


def resumed(
    loader: "DataLoader[Any]",
    state: State,
    draw: Callable[["DataLoader[Any]"], Draft],
) -> Passage:
    """Return the pass that a state was saved in, from where it was.

    Args:
        loader: What it was loaded into.
        state: The state, checked.
        draw: Draws for a pass of which nothing was drawn yet.
    """
    order = state.get("order") or {}
    loader._epochs.begin_again(state["epoch"], order.get("epoch"))
    restore_generators(loader, state)
    is_between = not (state["done"] or state["beyond"])
    if not is_between and state.get("default") != _fingerprint():
        _draw_as_before(loader, state)
    datasets = restore_datasets(loader, state)
    bookmark = bookmark_of(state, datasets)
    if "seed" not in state:
        bookmark = _restore_sampler(loader, bookmark)
        draft = draw(loader)
    else:
        saved = loader._sampling.order(order)
        draft = Draft(state["seed"], saved, own_state(loader))
    if loader._kind is not Kind.MAP:
        _warn_of_reading_again(loader, bookmark)
    passage = Passage.begun(state["epoch"], draft, bookmark, readers_of(loader))
    passage.saved = state
    note_first(loader, passage, None)
    return passage


def _restore_sampler(loader: "DataLoader[Any]", bookmark: Bookmark) -> Bookmark:
    """Give a sampler its state behind an epoch, before it is iterated for the next."""
    one = bookmark.states.get(0, {})
    if loader._kind is not Kind.MAP or "sampler" not in one:
        return bookmark
    loader._sampling.index_sampler.load_state_dict(copy.deepcopy(one["sampler"]))
    return replace(bookmark, states={})


def own_state(loader: "DataLoader[Any]") -> torch.Tensor | None:
    """Return the state of the user's generator, if the order does not draw from it."""
    generator = loader.generator
    part = drawing_part_of(loader._sampling.index_sampler)
    is_shared = part is not None and part.generator is generator
    return None if generator is None or is_shared else generator.get_state()


def _draw_as_before(loader: "DataLoader[Any]", state: State) -> None:
    """Draw from torch's default generator what was drawn before the state was saved.

    A script that is run again seeds it again, and the epochs to come would be drawn
    like those that were. Whoever has restored it is left alone. (Between epochs whoever
    seeds for each of them must be.)
    """
    if loader.generator is not None:
        return
    epochs = state["epoch"] + 1
    draws = 1 if loader.persistent_workers else epochs  # they keep their base seed
    sampler = loader._sampling.index_sampler
    draws_seed = isinstance(sampler, RandomSampler) and sampler.generator is None
    if draws_seed and not seeds_itself(sampler):
        draws += epochs
    for _ in range(draws):
        torch.empty((), dtype=torch.int64).random_()


def _warn_of_reading_again(loader: "DataLoader[Any]", bookmark: Bookmark) -> None:
    """Say what it costs to resume a stream that has no state of its own."""
    again = read_again(bookmark)
    if again:
        warn(
            f"{type(loader.dataset).__name__} has no state_dict(): its first {again:,} "
            "samples are read again and dropped, which takes as long as reading them "
            "took, and is right only if they come in the same order"
        )


def bookmark_of(state: State, datasets: Firsts) -> Bookmark:
    """Return where the epoch of a state begins.

    Args:
        state: The state.
        datasets: States of the copies of a map-style dataset, by worker.
    """
    states = {int(reader): one for reader, one in state["states"].items()}
    return Bookmark(state["done"], frozenset(state["beyond"]), states, datasets)


def _by_name(states: Firsts) -> State:
    """Return states by the number of their reader, as JSON has it."""
    return {str(reader): one for reader, one in states.items()}
