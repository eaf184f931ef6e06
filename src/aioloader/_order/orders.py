"""The order of a sampler that can only be iterated, and how to restore it.

An order is made for one iteration, and draws random numbers when torch does. To restore
it, torch's samplers draw again from a seed or generator state. The ``state_dict`` of
other samplers is saved after each batch; without one, they are iterated again.
"""

import copy
import itertools
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from aioloader._base.failures import noted
from aioloader._base.raising import raisable, saved_state
from aioloader._base.warnings import warn
from aioloader._order.indices import (
    WITH_GENERATOR,
    IndexBatch,
    Order,
    SamplerDraws,
    State,
    contents_of,
    described,
    epoch_of,
    nested,
    set_epoch,
)
from aioloader._order.permutation import KeyedOrder
from aioloader.protocols import is_stateful

_WITHOUT_DRAWS = {
    BatchSampler,
    DistributedSampler,  # it seeds a generator with its epoch
    SequentialSampler,
    list,
    range,
    tuple,
}


class ReaderTurns:
    """The numbers of requests to readers with ``in_order=False``, in order of issue.

    Batch k is from reader ``k % readers``. A reader gets a new request when it has
    answered one, so that slow readers do not delay the others.
    Source: ``_try_put_index`` of torch 2.9's ``_MultiProcessingDataLoaderIter``.
    """

    def __init__(self, readers: int, start: int) -> None:
        self._next = [start + (reader - start) % readers for reader in range(readers)]
        self._open = dict.fromkeys(range(readers), 0)  # requests of active readers

    def __iter__(self) -> Iterator[int]:
        """Yield the next number, for the reader with the fewest open requests."""
        while self._open:
            reader = min(self._open, key=lambda r: (self._open[r], self._next[r]))
            number = self._next[reader]
            self._next[reader] += len(self._next)
            self._open[reader] += 1
            yield number

    def may_issue(self, window: int) -> bool:
        """Tell whether a reader has fewer requests than its share, or all ended."""
        share = max(1, window // max(1, len(self._open)))
        return min(self._open.values(), default=0) < share

    def take(self, number: int, *, has_ended: bool) -> None:
        """Note that a request was answered, and whether its reader has ended."""
        reader = number % len(self._next)
        if has_ended:
            self._open.pop(reader, None)
        elif reader in self._open:
            self._open[reader] -= 1


@dataclass(eq=False, repr=False, kw_only=True)
class IteratedOrder(Order):
    """The order of a sampler that can only be iterated.

    With a ``size``, the sampler yields indices, otherwise batches. ``begins`` is
    True if torch calls ``iter(sampler)`` in the loader's ``iter``, not at batch 0.
    """

    sampler: Any
    drop_last: bool
    saved: InitVar[State]
    begins: bool

    def __post_init__(self, saved: State) -> None:
        sampler, part = self.sampler, self.part
        self._whole = (self.size or 1) * part.world_size  # units of a global batch
        self._name = described(sampler)
        self._contents: State | None = None  # set when the order is drawn
        # States include the first units, for padding, unless they can be computed.
        is_computable = isinstance(sampler, KeyedOrder)
        self._holds_beginning = part.world_size > 1 and not is_computable
        self._is_again = bool(saved)
        self._epoch = saved.get("epoch", epoch_of(sampler))
        drawing = drawing_part_of(sampler)
        if drawing is None and draws_from_default(sampler):
            drawing = sampler
        self._draws = SamplerDraws(drawing, saved)
        self._iterator: Iterator[Any] | None = None
        if self.begins and not saved and type(sampler) not in WITH_GENERATOR:
            self._iterator = self._begin({})
            self._draws.begin_later()

    def prepare(self, epoch: int | None = None, /) -> None:
        if self._contents is None:
            self._contents = contents_of(self.sampler)
            if isinstance(self.sampler, KeyedOrder):
                self.sampler = self.sampler.copy()  # unaffected by a later set_epoch
                if epoch is not None:
                    self._epoch = epoch
                    self.sampler.set_epoch(epoch)
        self._draws.prepare()

    def draws_slowly(self, _number: int, _start: int, /) -> bool:
        return type(self.sampler) not in {list, tuple, range}

    def batches(
        self, start: int = 0, after: State | None = None, /
    ) -> Iterator[IndexBatch]:
        after, whole = after or {}, self._whole
        rank, ranks = self.part.rank, self.part.world_size
        with self._draws.replayed():
            self._draws.begin()
            iterator = self._begin(after) if self._iterator is None else self._iterator
            number, first = 0, 0
            beginning: list[Any] = []
            if after and "is_over" not in after:
                number, first = start, after["first"]
                beginning = self._beginning(after)
            elif start and self._is_again and not is_repeatable(self.sampler):
                warn(
                    f"{type(self.sampler).__name__} has no state_dict(): it is "
                    f"iterated again and its first {start} batches are dropped, which "
                    "is correct only if it gives the same order again"
                )
            pulled, self.pulled = self.pulled, number
            groups = self._groups(iter(()) if after.get("ended") else iterator)
            for group in itertools.islice(groups, start - number):
                beginning = beginning or group[:ranks]
                first += self._count(group)
            # Batches drawn but not delivered are drawn again, from the same state.
            has_state = is_stateful(iterator) or is_stateful(self.sampler)
            ahead = 0 if has_state else max(0, pulled - start)
            drawn = list(itertools.islice(groups, ahead))
        for number, group in enumerate(itertools.chain(drawn, groups), start):
            if self.drop_last and len(group) < whole:
                break
            beginning = beginning or group[:ranks]
            units, padding, position = self._rank_part(group)
            units += [beginning[position % len(beginning)]] * padding
            before = first + (rank if self.size else self._count(group[:rank]))
            first += self._count(group)
            if not units:
                continue
            state = self._state_of(iterator, first)
            if state is not None:
                state |= {"beginning": beginning} if self._holds_beginning else {}
                # At its end the iterator may have restarted.
                state |= {"ended": True} if len(group) < whole else {}
            if not self.size:
                units, padding = units[0], padding and len(units[0])
            yield IndexBatch(number, before, units, padding, state)
        self.end = self._state_of(iterator, first)
        if self.end is not None and iterator is self.sampler:
            self.end["sampler"] = self.end.pop("iterator")

    def _beginning(self, after: State) -> list[Any]:
        """Return the first units of the order, which pad the last global batch."""
        if isinstance(self.sampler, KeyedOrder) and self.part.world_size > 1:
            return [*itertools.islice(self.sampler, self.part.world_size)]
        beginning: list[Any] = after.get("beginning", [])
        return beginning

    def _begin(self, after: State) -> Iterator[Any]:
        """Return the sampler's iterator, restored unless ``after`` is empty."""
        self.prepare()
        sampler, generator = self.sampler, self._draws.begin()
        try:
            if type(sampler) is RandomSampler and sampler.generator is None:
                sampler = copy.copy(sampler)
                sampler.generator = generator
            if self._is_again:
                set_epoch(sampler, self._epoch)
            if "sampler" in after:
                sampler.load_state_dict(after["sampler"])
            iterator: Any = iter(sampler)
            # The iterator's state at an epoch's end does not apply to the next epoch.
            if "iterator" in after and "is_over" not in after:
                iterator.load_state_dict(after["iterator"])
        except BaseException as error:  # noqa: BLE001  (raised)
            raise _noted(error, "in the sampler's __iter__")  # noqa: B904  (it keeps its cause)
        begun: Iterator[Any] = iterator
        return begun

    def _groups(self, iterator: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield global batches as lists of indices or batches; increment ``pulled``."""
        # ``islice(iterator, n)`` would call ``iter``, which may restart it.
        steps: Iterator[Any] = map(next, itertools.repeat(iterator))
        if not is_repeatable(self.sampler):  # torch's samplers make new objects
            steps = map(_copied, steps)
        if not self.size:
            steps = map(_as_sequence, steps)
        while True:
            try:
                group = list(itertools.islice(steps, self._whole))
            except BaseException as error:  # noqa: BLE001  (raised)
                raise _noted(error, f"in the sampler, at batch {self.pulled}")  # noqa: B904
            self.pulled += 1
            if not group:
                return
            yield group

    def _count(self, units: list[Any]) -> int:
        return len(units) if self.size else sum(map(len, units))

    def _state_of(self, iterator: Any, first: int) -> State | None:
        """Return the iterator's current state, or else the sampler's, or None."""
        for name, part in (("iterator", iterator), ("sampler", self.sampler)):
            if is_stateful(part):
                try:
                    return {name: saved_state(part), "first": first}
                except BaseException as error:  # noqa: BLE001  (raised)
                    raise _noted(error, "in its state_dict()")  # noqa: B904
        return None

    def state(self) -> State:
        epoch = {} if self._epoch is None else {"epoch": self._epoch}
        return self._name | (self._contents or {}) | self._draws.state() | epoch

    @property
    def is_restorable(self) -> bool:
        counts = self._epoch is not None or is_stateful(self.sampler)
        return counts or is_repeatable(self.sampler)


def drawing_part_of(sampler: Any) -> Any:
    """Return the sampler that draws from a generator it does not seed, or None."""
    for part in nested(sampler):
        if isinstance(getattr(part, "generator", None), torch.Generator):
            return None if _seeds_itself(part) else part
    return None


def draws_from_default(sampler: Any) -> bool:
    """Tell whether a sampler may draw from torch's default generator."""
    return any(
        getattr(part, "generator", None) is None
        and type(part) not in _WITHOUT_DRAWS
        and not isinstance(part, KeyedOrder)
        and not _seeds_itself(part)
        for part in nested(sampler)
    )


def is_repeatable(sampler: Any) -> bool:
    """Tell whether a sampler is known to repeat its order without a saved state."""
    is_ours = isinstance(sampler, (Sequence, KeyedOrder))
    return is_ours or type(sampler).__module__.startswith("torch.utils.data")


def _seeds_itself(sampler: Any) -> bool:
    """Tell whether a sampler seeds its generator each epoch, as accelerate's does."""
    return hasattr(sampler, "epoch") and isinstance(
        getattr(sampler, "initial_seed", None), int
    )


def _noted(error: BaseException, where: str) -> BaseException:
    return noted(raisable(error, "the sampler"), where)


def _copied(indices: Any) -> Any:
    """Return indices, copied if the sampler could overwrite them."""
    if type(indices) is int:
        return indices
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    is_mutable = isinstance(indices, (MutableSequence, np.ndarray))
    return copy.copy(indices) if is_mutable else indices


def _as_sequence(indices: Any) -> Any:
    if isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return indices
    return list(indices)
