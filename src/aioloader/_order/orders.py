"""The order of one epoch: index batches from any position, and the state to restore it.

An order is made for one iteration, draws when torch draws (with the first batch), and
has a state from which another process restores it. Torch's samplers are drawn again
from a seed; the state of a sampler with ``state_dict`` is taken after each batch; any
other sampler is iterated again up to the position.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from aioloader._observe.warnings import warn
from aioloader._order.failures import noted
from aioloader._order.generators import WITH_GENERATOR, Draws
from aioloader._order.indices import (
    IndexBatch,
    State,
    contents_of,
    described,
    epoch_of,
    nested,
    set_epoch,
)
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.raising import raisable
from aioloader._order.ranks import Part
from aioloader.protocols import is_stateful

_WITHOUT_DRAWS = {
    BatchSampler,
    DistributedSampler,  # it seeds a generator with its epoch
    SequentialSampler,
    ShuffledIndices,
    list,
    range,
    tuple,
}


class Order(Protocol):
    """The index batches of one epoch.

    Attributes:
        end: The final state of the sampler, if it has one.
        pulled: How far it was drawn, perhaps ahead of what was delivered.
    """

    end: State | None
    pulled: int

    def prepare(self, epoch: int | None = None) -> None:
        """Draw the contents of the state, once: a seed, but no permutation yet.

        Args:
            epoch: The epoch of ``ShuffledIndices``; None: its current one.
        """

    def batches(self, start: int = 0, after: Any = None, /) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on; called once.

        Args:
            start: Number of the first batch.
            after: The ``state`` of the batch before it.
        """

    def draws_long(self, number: int, start: int) -> bool:
        """Tell whether it may take milliseconds to draw a request.

        Args:
            number: The request's number.
            start: Number of the first request.
        """

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""


class StreamOrder:
    """Positions in a stream, without an end: only the stream knows its end.

    Args:
        size: Samples per batch, or None for single ones.
        part: The rank's part.
    """

    end: State | None = None
    pulled = 0

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
        """Return an empty state: the stream has its own."""
        return {}


class IteratedOrder:
    """The order of a sampler that can only be iterated.

    Args:
        sampler: Yields indices if ``size`` is set, or else batches of them.
        size: Samples per batch, or None.
        drop_last: Whether to drop a short last batch.
        part: The rank's part.
        saved: The result of ``state``, or empty.
        begins: Whether torch calls ``iter`` on it with the loader's, not at the first
            batch.
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
        self._contents: State | None = None  # as the order is drawn
        self._is_again = bool(saved)
        self.pulled: int = saved.get("pulled", 0)
        self._epoch = saved.get("epoch", epoch_of(sampler))
        owner = drawing_part_of(sampler)
        if owner is not None or draws_from_default(sampler):
            self._draws = Draws(owner or sampler, saved)
        self.end: State | None = None  # the sampler's final state
        self._iterator: Iterator[Any] | None = None
        if begins and not saved and type(sampler) not in WITH_GENERATOR:
            self._iterator = self._begin(None)
            if self._draws is not None:
                self._draws.begin_later()

    def prepare(self, _epoch: int | None = None) -> None:
        """Draw a seed, if the order has one, and note what is drawn from."""
        if self._contents is None:
            self._contents = contents_of(self._sampler)
        if self._draws is not None:
            self._draws.prepare()

    def draws_long(self, _number: int, _start: int) -> bool:
        """Tell whether user code runs for each request."""
        return type(self._sampler) not in {list, tuple, range}

    def batches(self, start: int = 0, after: Any = None) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on."""
        is_whole, ranks = bool(self._size), self._part.world_size
        whole = (self._size or 1) * ranks
        with self._draws.replayed() if self._draws else contextlib.nullcontext():
            if self._draws is not None:
                self._draws.begin()
            iterator = self._begin(after) if self._iterator is None else self._iterator
            number, first, beginning = self._place(start, after)
            if after is not None and after.get("ended"):
                iterator = iter(())
            pulled, self.pulled = self.pulled, number
            groups = self._groups(iterator, whole)
            for found in itertools.islice(groups, start - number):
                beginning = beginning or found[:ranks]
                first += len(found) if is_whole else sum(map(len, found))
            # What had been drawn ahead is drawn again, as it was.
            has_state = is_stateful(iterator) or is_stateful(self._sampler)
            ahead = 0 if has_state else max(0, pulled - start)
            drawn = list(itertools.islice(groups, ahead))
        for number, found in enumerate(itertools.chain(drawn, groups), start):
            if self._drop_last and len(found) < whole:
                break
            beginning = beginning or found[:ranks]
            end = first + (len(found) if is_whole else sum(map(len, found)))
            for batch in self._own_part(found, beginning, number, first):
                state = self._state_of(iterator, end)
                if state is not None:
                    state |= {"beginning": beginning} if ranks > 1 else {}
                    # At its end it may have restarted.
                    state |= {"ended": True} if len(found) < whole else {}
                yield batch if state is None else batch._replace(state=state)
            first = end
        self.end = self._state_of(iterator, first)
        if self.end is not None and iterator is self._sampler:
            self.end["sampler"] = self.end.pop("iterator")

    def _groups(self, iterator: Iterator[Any], whole: int) -> Iterator[list[Any]]:
        """Yield the units of each global batch."""
        steps = _stepped(iterator)
        if not self._size:
            steps = (_as_sequence(indices) for indices in steps)
        while found := _taken(steps, whole, self.pulled):
            self.pulled += 1
            yield found
        self.pulled += 1  # its end

    def _place(self, start: int, after: Any) -> tuple[int, int, list[Any]]:
        """Return the numbers of the first batch and sample, and the first units."""
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
        # As in torch, the order wraps around at its end.
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
        state = self._name | (self._contents or {}) | drawn
        if self._epoch is not None:
            state["epoch"] = self._epoch
        return state

    def _begin(self, after: Any) -> Iterator[Any]:
        """Return an iterator, restored from the saved state if there is one."""
        self.prepare()
        generator = None if self._draws is None else self._draws.begin()
        try:
            return self._iterator_of(self._sampler, after, generator)
        except BaseException as error:  # noqa: BLE001  (raised)
            error = raisable(error, "the sampler")
            raise noted(error, "in the sampler's __iter__")  # noqa: B904  (it keeps its cause)

    def _iterator_of(
        self, sampler: Any, after: Any, generator: torch.Generator | None
    ) -> Iterator[Any]:
        if type(sampler) is RandomSampler and sampler.generator is None:
            sampler = copy.copy(sampler)
            sampler.generator = generator
        if self._is_again:
            set_epoch(sampler, self._epoch)
        if after is not None and "sampler" in after:
            sampler.load_state_dict(after["sampler"])
        iterator: Any = iter(sampler)
        # The iterator's state at an epoch's end does not apply to the next epoch.
        if after is not None and "iterator" in after and "is_over" not in after:
            iterator.load_state_dict(after["iterator"])
        begun: Iterator[Any] = iterator
        return begun

    def _state_of(self, iterator: Any, first: int) -> State | None:
        """Return the sampler's state after the latest batch, if it has one."""
        for name, part in (("iterator", iterator), ("sampler", self._sampler)):
            if is_stateful(part):
                try:
                    return {name: copy.deepcopy(part.state_dict()), "first": first}
                except BaseException as error:  # noqa: BLE001  (raised)
                    error = raisable(error, "the sampler")
                    raise noted(error, "in its state_dict()")  # noqa: B904  (it keeps its cause)
        return None

    def _warn(self, start: int) -> None:
        """Warn that a sampler without a state is iterated again."""
        if self._is_again and not is_repeatable(self._sampler):
            warn(
                f"{type(self._sampler).__name__} has no state_dict(): it is iterated "
                f"again and its first {start} batches are dropped, which is correct "
                "only if it gives the same order again"
            )


def drawing_part_of(sampler: Any) -> Any:
    """Return the sampler with the user's generator, perhaps a wrapped one, or None."""
    for part in nested(sampler):
        if isinstance(getattr(part, "generator", None), torch.Generator):
            return None if seeds_itself(part) else part
    return None


def draws_from_default(sampler: Any) -> bool:
    """Tell whether an order may draw from torch's default generator."""
    return any(
        getattr(part, "generator", None) is None
        and type(part) not in _WITHOUT_DRAWS
        and not seeds_itself(part)
        for part in nested(sampler)
    )


def is_repeatable(sampler: Any) -> bool:
    """Tell whether it is known that a sampler without a state gives an order again."""
    is_ours = isinstance(sampler, (Sequence, ShuffledIndices))
    return is_ours or type(sampler).__module__.startswith("torch.utils.data")


def seeds_itself(sampler: Any) -> bool:
    """Tell whether it seeds its generator for each epoch, as accelerate's does."""
    return hasattr(sampler, "epoch") and isinstance(
        getattr(sampler, "initial_seed", None), int
    )


def _taken(steps: Iterator[Any], count: int, number: int) -> list[Any]:
    """Return the next units, for batch ``number``; fewer at the end."""
    try:
        return list(itertools.islice(steps, count))
    except BaseException as error:  # noqa: BLE001  (raised)
        where = f"in the sampler, at batch {number}"
        raise noted(raisable(error, "the sampler"), where)  # noqa: B904  (it keeps its cause)


def _stepped(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest; ``islice`` would call ``iter``, which may restart it."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def _as_sequence(indices: Any) -> Any:
    """Return the batch of a batch sampler as a sequence."""
    if isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return indices
    return list(indices)
