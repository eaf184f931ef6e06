"""One pass over the data: its order, its seed, and how far its consumer has come.

What was delivered counts, not what was begun. Batches may be delivered out of order, so
the position is a number below which all were delivered, and those beyond it that were
delivered too. Pure and synchronous; the state may be asked for from any thread.
"""

import operator
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import BatchSampler

from aioloader._observe.records import Counters
from aioloader._order.failures import FailurePolicy, OnError
from aioloader._order.forks import fork_safe
from aioloader._order.indices import IndexBatch, IndexOrder, State, is_known_by_place
from aioloader._order.orders import IteratedOrder, Order, StreamOrder
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import WHOLE, Part
from aioloader._order.turns import Turns


@dataclass(frozen=True)
class Bookmark:
    """A position in an epoch.

    Attributes:
        done: Every batch below this number was delivered.
        beyond: Batches above that were delivered too.
        states: What the readers (the sampler, or streams) were left in after the last
            of their batches below ``done``, by number of the reader.
        datasets: What state the copies of a stateful map-style dataset were left in by
            the latest batch of theirs that was delivered, by number of the worker.
    """

    done: int = 0
    beyond: frozenset[int] = frozenset()
    states: dict[int, Any] = field(default_factory=dict)
    datasets: dict[int, Any] = field(default_factory=dict)

    def read(self) -> int:
        """Return how many batches were delivered."""
        return self.done + len(self.beyond)


BEGINNING = Bookmark()
_NOTHING: frozenset[int] = frozenset()
# Of all positions: it is held for microseconds, and seldom.
_LOCK = fork_safe(threading.Lock())


class Progress:
    """The position of one iteration.

    A batch that raised counts as soon as another one is delivered after it.

    Args:
        bookmark: Where it began.
        readers: How many readers the batches come from, in turns.

    Attributes:
        is_over: Whether every batch of the epoch was delivered.
    """

    def __init__(self, bookmark: Bookmark = BEGINNING, *, readers: int = 1) -> None:
        self.is_over: bool = False
        self._done = bookmark.done
        self._states = dict(bookmark.states)
        self._datasets = dict(bookmark.datasets)
        self._beyond: dict[int, Any] = {}
        # Delivered before; they are passed when their reader's state is known again.
        self._before = set(bookmark.beyond)
        self._failed: dict[int, Any] = {}
        self._readers = readers
        self._ended: set[int] = set()  # readers
        self._latest: tuple[int, Any] | None = None  # taken, and not noted yet
        self._is_plain = not self._before  # ``_done`` is all there is to say

    def take(self, number: int, state: Any = None) -> None:
        """Note that a batch was delivered, or turned out to be none.

        Called last of all. An interrupt (Ctrl-C) comes only where a function is called,
        so it finds the batch delivered, or not: what is said here is one assignment.

        Args:
            number: Its number.
            state: What its reader was left in after it, if that is known.
        """
        if not self._is_plain or number != self._done or state is not None:
            with _LOCK:
                self._settle()
                self._is_plain &= number == self._done and state is None
        if self._is_plain:
            self._done = number + 1  # as nearly always
        else:
            self._latest = number, state

    def pass_over(self, number: int, state: Any = None) -> None:
        """Note what a batch that was delivered before has left its reader in."""
        with _LOCK:
            self._settle()
            self._note(number, state)

    def fail(self, number: int, state: Any = None) -> None:
        """Note that a batch raised."""
        with _LOCK:
            self._settle()
            self._is_plain = False
            self._failed[number] = state

    def end(self, number: int, state: Any = None) -> None:
        """Note that a reader was at its end, instead of batch ``number``."""
        with _LOCK:
            self._settle()
            if state is not None:
                self._states[number % self._readers] = state

    def end_reader(self, number: int) -> None:
        """Note that the reader of batch ``number`` has ended: no more is to come."""
        with _LOCK:
            self._settle()
            self._ended.add(number % self._readers)
            self._advance()

    def leave(self, worker: int, state: Any) -> None:
        """Note what state a delivered batch has left a worker's dataset in."""
        with _LOCK:
            self._datasets[worker] = state

    def finish(self) -> None:
        """Note that the epoch is over."""
        self.is_over = True

    def bookmark(self) -> Bookmark:
        """Return the position now; from any thread."""
        with _LOCK:
            self._settle()
            beyond = _NOTHING
            if self._before or self._beyond:
                beyond = frozenset(self._before.union(self._beyond))
            states, datasets = dict(self._states), dict(self._datasets)
            return Bookmark(self._done, beyond, states, datasets)

    def _settle(self) -> None:
        """Note the latest batch; twice is harmless, should that be interrupted."""
        if self._latest is not None:
            number, state = self._latest
            self._beyond.update(self._failed)
            self._failed.clear()
            self._note(number, state)
            self._latest = None

    def _note(self, number: int, state: Any) -> None:
        self._before.discard(number)
        if number == self._done and not self._beyond:
            self._pass(state)
        elif number >= self._done:  # else it is of a reader that has ended
            self._beyond[number] = state
            self._advance()
        self._is_plain = not (self._beyond or self._failed or self._before)

    def _advance(self) -> None:
        """Pass what was delivered, and what ended readers will not deliver."""
        while self._beyond:
            if self._done in self._beyond:
                self._pass(self._beyond.pop(self._done))
            elif self._done % self._readers in self._ended:
                self._done += 1
            else:
                return

    def _pass(self, state: Any) -> None:
        if state is not None:
            self._states[self._done % self._readers] = state
        self._done += 1


class Epoch:
    """One pass over the dataset: drawn when an iterator is made, begun with its use.

    Args:
        base_seed: What random draws are keyed with.
        order: Of the samples.
        generator: The state of the user's generator after the draw of the base seed;
            None if there is none, or the order draws from it too.

    Attributes:
        number: Its number, from 0; -1 before it is begun.
        shuffled: Which epoch of the loader's ``ShuffledIndices`` it has, if there are.
        seen: What ``EpochNumbers`` was when it was made: for its own use.
        bookmark: Where this iteration begins.
        progress: How far its consumer is.
        counters: Figures of this iteration.
        turns: What chooses the requests, if they do not ascend.
        saved: The state that it goes on from, if there was one.
        first: What the readers of an iterable begin with, if it has a state.
        first_datasets: What copies of a map-style dataset begin with, if it has one.
        reads_ahead: Whether samples are read before their batch is asked for.
        head: What of its state does not change as it goes on, once that was needed.
    """

    on_error: OnError = "raise"
    max_failures: float | None = None
    number: int = -1
    shuffled: int | None = None
    seen: tuple[int, int | None] = (0, None)
    bookmark: Bookmark = BEGINNING
    turns: Turns | None = None
    saved: State | None = None
    reads_ahead: bool = False
    head: State | None = None

    def __init__(
        self, base_seed: int, order: Order, generator: torch.Tensor | None = None
    ) -> None:
        self.base_seed = base_seed
        self.order = order
        self.generator = generator
        self.progress: Progress = Progress()
        self.counters: Counters = Counters()
        self.first: dict[int, Any] = {}
        self.first_datasets: dict[int, Any] = {}

    def begin(
        self, number: int, bookmark: Bookmark = BEGINNING, *, readers: int = 1
    ) -> None:
        """Begin it: its order is drawn from now on.

        Args:
            number: Its number.
            bookmark: Where it begins.
            readers: How many readers the batches come from, in turns.
        """
        self.number = self.counters.epoch = number
        self.order.prepare(self.shuffled)
        if bookmark is not BEGINNING or readers > 1:
            self.bookmark = bookmark
            self.progress = Progress(bookmark, readers=readers)

    @cached_property
    def policy(self) -> FailurePolicy:
        """What becomes of failed samples; made when one is, or may have, failed."""
        return FailurePolicy(self.on_error, self.max_failures)

    @property
    def failures(self) -> FailurePolicy | None:
        """The policy, if it was needed."""
        return vars(self).get("policy")

    def is_untouched(self) -> bool:
        """Tell whether nothing was delivered yet."""
        now, then = self.progress.bookmark(), self.bookmark
        is_there = (now.done, now.beyond) == (then.done, then.beyond)
        return is_there and not self.progress.is_over

    # -- what is to be delivered --------------------------------------------------

    def requests(self, *, as_lists: bool = True) -> Iterator[IndexBatch]:
        """Return the requests that are left, drawn as they are pulled; called once.

        Args:
            as_lists: Whether indices are lists; else tensors and ranges, where the
                order is an ``IndexOrder``.
        """
        order, start = self.order, self.bookmark
        if isinstance(order, IndexOrder):
            batches = order.batches(start.done, as_lists=as_lists)
        elif isinstance(order, StreamOrder) and self.turns is not None:
            batches = order.batches_of(self.turns)
        else:
            batches = order.batches(start.done, start.states.get(0))
        return self._without_delivered(batches) if start.beyond else batches

    def _without_delivered(self, batches: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        """Yield the batches that have to be made."""
        beyond = self.bookmark.beyond - self.dropped()
        for batch in batches:
            if batch.number in beyond:
                self.progress.pass_over(batch.number, batch.state)
            else:
                yield batch

    def dropped(self) -> frozenset[int]:
        """Return the batches that are made, and not delivered again.

        A stream has to be read to get past what was delivered beyond the position.
        """
        return self.bookmark.beyond if isinstance(self.order, StreamOrder) else _NOTHING

    def draws_long(self, number: int) -> bool:
        """Tell whether it may take milliseconds to draw a request.

        So it does to permute more than 65,536 indices (before the first batch, and as
        torch's sampler once more after the last one), and to run a user's sampler.

        Args:
            number: Of the request.
        """
        return self.order.draws_long(number, self.bookmark.done)

    def begins_quickly(self) -> bool:
        """Tell whether the first request can be drawn on an event loop."""
        return not self.draws_long(self.bookmark.done)


class EpochNumbers:
    """Numbers the epochs of a loader, and moves its ``ShuffledIndices`` along.

    Args:
        sampler: The loader's sampler; only a ``ShuffledIndices`` is touched.

    Attributes:
        next: The number of the next epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self.next = 0
        self._order = sampler if isinstance(sampler, ShuffledIndices) else None
        self._shuffled: int | None = None  # its epoch, where we have set it
        self._choices = 0
        # Epochs of iterators that were made, and not used yet.
        self._reserved: weakref.WeakSet[Epoch] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reserved": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reserved=weakref.WeakSet())

    def reserve(self, epoch: Epoch) -> int:
        """Return the number of an epoch that is made now, and note its order.

        It is that of no other iterator; once one is dropped unused, it is free again.
        """
        number, order = self.next, self._order
        if order is not None:
            epoch.shuffled = self.upcoming()
        epoch.seen = self._choices, None if order is None else order.epoch
        for one in self._reserved:
            if one is not epoch:
                number = max(number, one.number + 1)
                if epoch.shuffled is not None and one.shuffled is not None:
                    epoch.shuffled = max(epoch.shuffled, one.shuffled + 1)
        self._reserved.add(epoch)
        return number

    def reserve_again(self, epoch: Epoch, order: int | None) -> None:
        """Note the order of an epoch that was begun before.

        Args:
            epoch: The epoch, which goes on from a saved state.
            order: The epoch of the ``ShuffledIndices`` then, if there is one.
        """
        epoch.shuffled = order
        seen = None if self._order is None else self._order.epoch
        epoch.seen = self._choices, seen
        self._reserved.add(epoch)

    def release(self, epoch: Epoch) -> None:
        """Free the number of an epoch that could not be begun."""
        self._reserved.discard(epoch)

    def latest_reserved(self) -> Epoch | None:
        """Return the epoch of the latest iterator that was not used yet, if any."""
        return max(self._reserved, key=operator.attrgetter("number"), default=None)

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch as begun, unless another was chosen since it was made."""
        self._reserved.discard(epoch)
        choices, order_epoch = epoch.seen
        if choices != self._choices:
            return
        is_again = epoch.saved is not None
        following = epoch.number + 1
        self.next = following if is_again else max(self.next, following)
        order, shuffled = self._order, epoch.shuffled
        if order is None or shuffled is None:
            return
        if order.epoch in {order_epoch, self._shuffled}:  # the user has set no other
            if order.epoch == self._shuffled and not is_again:
                shuffled = max(shuffled, order.epoch)
            order.set_epoch(shuffled)
            self._shuffled = shuffled

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next; the user sets the epoch of the sampler.

        Raises:
            TypeError: If it is no integer.
            ValueError: If it is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self.next = epoch
        self._shuffled = None
        self._choices += 1
        self._reserved.clear()

    def upcoming(self) -> int | None:
        """Return the epoch that the ``ShuffledIndices`` would have next.

        That is a new one, unless the user has chosen it.
        """
        if self._order is None:
            return None
        return self._order.epoch + (self._order.epoch == self._shuffled)

    def state(self) -> tuple[int, int | None, int | None]:
        """Return what decides about the next epoch."""
        return self.next, self._shuffled, self.upcoming()


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
