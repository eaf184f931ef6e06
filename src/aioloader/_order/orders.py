"""The order of one epoch: index batches from any place on, and what makes it again.

An order is made for one iteration, draws where torch draws (with the first batch), and
says what a state has to hold so that another process finds the same order. Torch's
samplers are drawn again from a seed; one that has a state (``state_dict``)
is asked for it after each batch; any other is iterated, and what came before dropped.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader._observe.warnings import warn
from aioloader._order.generators import Draws
from aioloader._order.indices import (
    IndexBatch,
    State,
    described,
)
from aioloader._order.ranks import Part
from aioloader.protocols import is_stateful

_DEEPEST = 8  # wrappers around a sampler
_WITH_GENERATOR = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}


class Order(Protocol):
    """The index batches of one epoch.

    Attributes:
        end: The state of the sampler at its end, if it has one.
    """

    end: State | None

    def prepare(self, epoch: int | None = None) -> None:
        """Draw what the state holds, once: a seed, but no permutation yet.

        Args:
            epoch: Of ``ShuffledIndices``; None: the one that it is set to.
        """

    def batches(self, start: int = 0, after: Any = None, /) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on; called once.

        Args:
            start: Number of the first batch.
            after: What the batch before it had for a ``state``.
        """

    def draws_long(self, number: int, start: int) -> bool:
        """Tell whether it may take milliseconds to draw a request.

        Args:
            number: Of the request.
            start: Number of the first one.
        """

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""


class StreamOrder:
    """Places in a stream, without an end: the stream says where it ends.

    Args:
        size: Samples of a batch, or None for single ones.
        part: Which rank's.
    """

    end: State | None = None

    def __init__(self, size: int | None, part: Part) -> None:
        self._size = size or 1
        self._part = part

    def prepare(self, _epoch: int | None = None) -> None:
        """Draw nothing."""

    def draws_long(self, _number: int, _start: int) -> bool:
        """Return False: there is nothing to draw."""
        return False

    def batches(self, start: int = 0, _after: Any = None) -> Iterator[IndexBatch]:
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

    def prepare(self, _epoch: int | None = None) -> None:
        """Draw a seed, or note the state of the generator."""
        if self._draws is not None and self._generator is None:
            self._generator = self._draws.begin()

    def draws_long(self, _number: int, _start: int) -> bool:
        """Tell whether the user's code runs with each request."""
        return type(self._sampler) not in {list, tuple, range}

    def batches(self, start: int = 0, after: Any = None) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on."""
        iterator = self._begin(after) if self._iterator is None else self._iterator
        number, first, beginning = self._place(start, after)
        if after is not None and after.get("ended"):
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
                for batch in self._own_part(found, beginning, number, first):
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

    def _place(self, start: int, after: Any) -> tuple[int, int, list[Any]]:
        """Return the numbers of the first batch and sample, and what came at first."""
        if after is not None and "is_over" not in after:
            return start, after["first"], after.get("beginning", [])
        if start:
            self._warn(start)
        return 0, 0, []

    def _own_part(
        self, found: list[Any], beginning: list[Any], number: int, first: int
    ) -> Iterator[IndexBatch]:
        """Yield our part of a global batch, if we have one."""
        part = self._part
        mine, padding = part.share(len(found))
        units = found[part.rank :: part.world_size][:mine]
        # As in torch, the order begins anew after its end.
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

    def _begin(self, after: Any) -> Iterator[Any]:
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
        if after is not None and "sampler" in after:
            sampler.load_state_dict(after["sampler"])
        iterator: Any = iter(sampler)
        # That of an epoch that is over is nothing to the next one.
        if after is not None and "iterator" in after and "is_over" not in after:
            iterator.load_state_dict(after["iterator"])
        begun: Iterator[Any] = iterator
        return begun

    def _state_of(self, iterator: Any, first: int) -> State | None:
        """Return the state after the latest batch, of a sampler that has one."""
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
    """Yield the rest; ``islice`` would call ``iter``, which may begin anew."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def _as_sequence(indices: Any) -> Any:
    """Return what a batch sampler gave as something with a length and places."""
    if isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return indices
    return list(indices)
