"""The order of one epoch: index batches from any place on, and what makes it again.

An order is made for one iteration, draws where torch draws (with the first batch), and
tells what a state has to hold so that another process finds the same order. Torch's
samplers are drawn again from a seed; one that has a state of its own (``state_dict``)
is asked for it behind each batch; any other is iterated, and what came before dropped.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader._observe.warnings import warn
from aioloader._order.draws import Draws
from aioloader._order.indices import (
    Ascending,
    Cutting,
    IndexBatch,
    Indices,
    Permuted,
    cut,
    is_known_by_place,
)
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import WHOLE, Part
from aioloader.protocols import is_stateful

State: TypeAlias = dict[str, Any]
_DEEPEST = 8  # wrappers around a sampler
_WITH_GENERATOR = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}


class Order(Protocol):
    """The index batches of one epoch."""

    def prepare(self) -> None:
        """Draw what the state holds, once: a seed, but no permutation yet."""

    def batches(self, start: int = 0, behind: Any = None, /) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on; called once.

        Args:
            start: Number of the first batch.
            behind: What the batch before it had for a ``state``.
        """

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""


class StreamOrder:
    """Places in a stream, without an end: the stream tells where it ends.

    Args:
        size: Samples of a batch, or None for single ones.
        part: Which rank's.
    """

    def __init__(self, size: int | None, part: Part) -> None:
        self._size = size or 1
        self._part = part

    def prepare(self) -> None:
        """Draw nothing."""

    def batches(self, start: int = 0, _behind: Any = None) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on."""
        yield from self.batches_of(itertools.count(start))

    def batches_of(self, numbers: Iterable[int]) -> Iterator[IndexBatch]:
        """Yield the batches of these numbers."""
        whole = self._size * self._part.world_size
        for number in numbers:
            first = number * whole
            places = self._part.places(first, first + whole)
            yield IndexBatch(number, places.start, places)

    def state(self) -> State:
        """Return nothing: the stream has its own state."""
        return {}


class IndexOrder:
    """Batches cut from an order that is known by place.

    Args:
        sampler: One for which ``is_known_by_place``.
        size: Samples of a batch.
        drop_last: Whether a short last batch is left out.
        part: Which rank's.
        saved: What ``state`` returned; or empty.
    """

    def __init__(
        self, sampler: Any, size: int, part: Part, saved: State, *, drop_last: bool
    ) -> None:
        self._sampler = sampler
        self._size = size
        self._drop_last = drop_last
        self._part = part
        self._name = described(sampler)
        self._draws = None
        if isinstance(sampler, RandomSampler):
            self._draws = Draws(sampler, saved)
        self._generator: torch.Generator | None = None
        self._shuffled: ShuffledIndices | None = None

    def prepare(self) -> None:
        """Draw a seed, or note the state of the user's generator, or the epoch."""
        if self._draws is not None and self._generator is None:
            self._generator = self._draws.begin()
        if isinstance(self._sampler, ShuffledIndices) and self._shuffled is None:
            # Of this epoch, whatever is set meanwhile.
            self._shuffled = self._sampler.copy()
            self._name = described(self._shuffled)

    def batches(self, start: int = 0, _behind: Any = None) -> Iterator[IndexBatch]:
        """Yield lists of indices, from batch ``start`` on."""
        return self._cut(start, as_lists=True)

    def chunks(self, start: int = 0) -> Iterator[IndexBatch]:
        """Yield index tensors, or ranges, from batch ``start`` on."""
        return self._cut(start, as_lists=False)

    def _cut(self, start: int, *, as_lists: bool) -> Iterator[IndexBatch]:
        n = len(self._sampler)
        indices: Indices = Ascending(n)
        self.prepare()
        generator = self._generator
        if self._shuffled is not None:
            indices = self._shuffled
        elif generator is not None:
            indices = Permuted(torch.randperm(n, generator=generator))
        cutting = Cutting(self._size, self._part, self._drop_last, as_lists)
        # Torch's sampler draws another permutation at its end, and uses nothing of it:
        # with a short last batch, which runs into the end, else after the last one.
        is_own = generator is not None and generator is self._sampler.generator
        short = n // self._size if n % self._size and not self._drop_last else None
        for batch in cut(indices, cutting, start):
            if is_own and batch.number == short:
                torch.randperm(n, generator=generator)
                is_own = False
            yield batch
        if is_own:
            torch.randperm(n, generator=generator)

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""
        drawn = {} if self._draws is None else self._draws.state()
        return self._name | drawn


class IteratedOrder:
    """What a sampler of indices or of batches yields, one after the other.

    Args:
        sampler: Gives indices if ``size`` is set, else batches of them.
        size: Samples of a batch, or None.
        drop_last: Whether a short last batch is left out.
        part: Which rank's.
        saved: What ``state`` returned; or empty.
        begins: Whether torch iterates it with the loader, and not with the first batch.
    """

    def __init__(
        self,
        sampler: Any,
        size: int | None,
        part: Part,
        saved: State,
        *,
        drop_last: bool,
        begins: bool,
    ) -> None:
        self._sampler = sampler
        self._size = size
        self._drop_last = drop_last
        self._part = part
        self._draws: Draws | None = None
        self._name = described(sampler)
        self._is_again = bool(saved)
        self._epoch = saved.get("epoch", getattr(sampler, "epoch", None))
        owner = drawing_part_of(sampler)
        if type(sampler) in _WITH_GENERATOR or owner is not None:
            self._draws = Draws(owner or sampler, saved)
        self.end: State | None = None  # of the sampler, at its end
        self._generator: torch.Generator | None = None
        self._iterator: Iterator[Any] | None = None
        if begins and not saved and type(sampler) not in _WITH_GENERATOR:
            self._iterator = self._begin(None)

    def prepare(self) -> None:
        """Draw a seed, or note the state of the generator."""
        if self._draws is not None and self._generator is None:
            self._generator = self._draws.begin()

    def batches(self, start: int = 0, behind: Any = None) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on."""
        iterator = self._begin(behind) if self._iterator is None else self._iterator
        number, first, beginning = self._place(start, behind)
        if behind is not None and behind.get("ended"):
            iterator = iter(())
        per_rank, ranks = self._size or 1, self._part.world_size
        whole = per_rank * ranks
        steps = _stepped(iterator)
        while found := list(itertools.islice(steps, whole)):
            if self._drop_last and len(found) < whole:
                break
            if self._size is None:
                found = [_as_sequence(indices) for indices in found]
            beginning = beginning or found[:ranks]
            end = first + (len(found) if self._size else sum(map(len, found)))
            if number >= start:
                for batch in self._dealt(found, beginning, number, first):
                    state = self._state_of(iterator, end)
                    if state is not None:
                        state |= {"beginning": beginning} if ranks > 1 else {}
                        # At its end it may have begun anew.
                        state |= {"ended": True} if len(found) < whole else {}
                    yield batch if state is None else batch._replace(state=state)
            number, first = number + 1, end
        self.end = self._state_of(iterator, first)
        if self.end is not None and iterator is self._sampler:
            self.end["sampler"] = self.end.pop("iterator")

    def _place(self, start: int, behind: Any) -> tuple[int, int, list[Any]]:
        """Return the numbers of the first batch and sample, and what came at first."""
        if behind is not None and "is_over" not in behind:
            return start, behind["first"], behind.get("beginning", [])
        if start:
            self._warn(start)
        return 0, 0, []

    def _dealt(
        self, found: list[Any], beginning: list[Any], number: int, first: int
    ) -> Iterator[IndexBatch]:
        """Yield our part of a global batch, if we have one."""
        part = self._part
        mine, padding = part.share(len(found))
        units = found[part.rank :: part.world_size][:mine]
        # As in torch, the order begins anew behind its end.
        place = part.rank + mine * part.world_size - len(found)
        units += [beginning[place % len(beginning)]] * padding
        if not units:
            return
        indices = units
        if self._size is None:
            indices = units[0]
            first += sum(map(len, found[: part.rank]))
            padding = padding and len(indices)
        else:
            first += part.rank
        yield IndexBatch(number, first, indices, padding)

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""
        drawn = {} if self._draws is None else self._draws.state()
        state = self._name | drawn
        if type(self._epoch) is int:
            state["epoch"] = self._epoch
        return state

    def _begin(self, behind: Any) -> Iterator[Any]:
        """Return an iterator, that of the saved order where there is one."""
        sampler = self._sampler
        self.prepare()
        is_known = type(sampler) in _WITH_GENERATOR
        if is_known and (self._is_again or type(sampler) is RandomSampler):
            sampler = copy.copy(sampler)
            sampler.generator = self._generator
        if self._is_again and type(self._epoch) is int:
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        if behind is not None and "sampler" in behind:
            sampler.load_state_dict(behind["sampler"])
        iterator: Any = iter(sampler)
        # That of an epoch that is over is nothing to the next one.
        if behind is not None and "iterator" in behind and "is_over" not in behind:
            iterator.load_state_dict(behind["iterator"])
        begun: Iterator[Any] = iterator
        return begun

    def _state_of(self, iterator: Any, first: int) -> State | None:
        """Return the state behind the latest batch, of a sampler that has one."""
        for name, part in (("iterator", iterator), ("sampler", self._sampler)):
            if is_stateful(part):
                return {name: copy.deepcopy(part.state_dict()), "first": first}
        return None

    def _warn(self, start: int) -> None:
        """Say what it costs that the sampler has no state."""
        module = type(self._sampler).__module__
        if self._is_again and not module.startswith("torch.utils.data"):
            warn(
                f"{type(self._sampler).__name__} has no state_dict(): it is iterated "
                f"anew and its first {start} batches are dropped, which is right only "
                "if it gives the same order again"
            )


def drawing_part_of(sampler: Any) -> Any:
    """Return what has the user's generator: a sampler, or one inside it; or None."""
    for part in nested(sampler):
        if isinstance(getattr(part, "generator", None), torch.Generator):
            return None if seeds_itself(part) else part
    return None


def seeds_itself(sampler: Any) -> bool:
    """Tell whether it seeds its generator for each epoch, as accelerate's does."""
    return hasattr(sampler, "epoch") and isinstance(
        getattr(sampler, "initial_seed", None), int
    )


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it wraps, by the names that wrappers use."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is one for one in seen) or len(seen) == _DEEPEST:
            continue
        seen.append(part)
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]


def _stepped(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest: whoever slices an iterator iterates it, and it may begin anew."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def described(sampler: Any) -> State:
    """Return what of a sampler is known before it is iterated."""
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError):
        length = None
    state: State = {"sampler": type(sampler).__name__, "length": length}
    if isinstance(sampler, ShuffledIndices):
        state |= {"seed": sampler.seed, "epoch": sampler.epoch}
    return state


def index_sampler_of(sampler: Any, batch_sampler: Any) -> Any:
    """Return what decides about the order: what gives indices, or else batches."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler
    return sampler if batch_sampler is None else batch_sampler


def order_of(
    sampler: Any,
    batch_sampler: Any,
    part: Part = WHOLE,
    saved: State | None = None,
) -> IndexOrder | IteratedOrder:
    """Return the order of the next epoch of a map-style dataset.

    Args:
        sampler: Gives indices.
        batch_sampler: Gives lists of them; None: indices go one by one.
        part: Which rank's.
        saved: What ``state`` of an order returned, to make that one again.
    """
    saved = saved or {}
    size, drop_last = 1, False
    begins = batch_sampler is None
    if type(batch_sampler) is BatchSampler:
        sampler = batch_sampler.sampler
        size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    elif batch_sampler is not None:
        return IteratedOrder(
            batch_sampler, None, part, saved, drop_last=False, begins=True
        )
    sampler = () if sampler is None else sampler
    if is_known_by_place(sampler):
        return IndexOrder(sampler, size, part, saved, drop_last=drop_last)
    return IteratedOrder(sampler, size, part, saved, drop_last=drop_last, begins=begins)


def _as_sequence(indices: Any) -> Any:
    """Return what a batch sampler gave as something with a length and places."""
    if isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return indices
    return list(indices)
