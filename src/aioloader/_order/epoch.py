"""One pass over the data: its order, its seed and its consumer's position.

Only delivered batches count. Batches may be delivered out of order, so the position is
a number below which all were delivered, and the set of later ones that were delivered
too. Pure and synchronous; the state may be read from any thread.
"""

import contextlib
import math
import operator
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from aioloader._base.failures import FailurePolicy
from aioloader._base.forks import fork_safe
from aioloader._base.records import Counters
from aioloader._order.indices import IndexBatch, IndexOrder, Order, SamplerDraws, State
from aioloader._order.orders import IteratedOrder, ReaderTurns
from aioloader._order.permutation import KeyedOrder, SeekableOrder
from aioloader._order.ranks import WHOLE, RankPart


class HasEpoch(Protocol):
    """What drives user code in an epoch.

    A stream with ``reads_whole`` is shared by the workers: one within it is not.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def reads_whole(self) -> bool: ...


# A stream or a loader that user code iterates meanwhile takes the epoch from it, and
# does not count its own: a resumed run would count from 0 again.
UNDER_WAY: ContextVar[HasEpoch | None] = ContextVar("aioloader_epoch", default=None)


@contextlib.contextmanager
def under_way(driver: HasEpoch) -> Iterator[None]:
    before = UNDER_WAY.get()
    UNDER_WAY.set(driver)
    try:
        yield
    finally:
        # No token: a coroutine that is dropped may be closed in another context.
        if UNDER_WAY.get() is driver:
            UNDER_WAY.set(before)


@dataclass(eq=False, repr=False)
class EpochPosition:
    """A position in an epoch."""

    done: int = 0  # every batch below this number was delivered
    beyond: frozenset[int] = frozenset()  # later batches that were delivered too
    # States of the readers (the sampler, or streams) after their last batch below
    # ``done``, by number of the reader.
    states: dict[int, Any] = field(default_factory=dict)
    # Of the copies of a stateful map-style dataset after their latest delivered batch,
    # by number of the worker.
    datasets: dict[int, Any] = field(default_factory=dict)

    def delivered(self) -> int:
        """Return how many batches were delivered."""
        return self.done + len(self.beyond)


BEGINNING = EpochPosition()
# One lock for all positions: it is held rarely, and for microseconds. A signal handler
# that saves a state may need it too.
_LOCK = fork_safe(threading.RLock())


class Progress:
    """The position of one iteration, whose batches come from readers in turn.

    A batch that raised counts as soon as another one is delivered after it.
    """

    def __init__(
        self, bookmark: EpochPosition = BEGINNING, *, readers: int = 1
    ) -> None:
        self.is_over: bool = False  # every batch of the epoch was delivered
        self._done = bookmark.done
        self._states = dict(bookmark.states)
        self._datasets = dict(bookmark.datasets)
        self._beyond: dict[int, Any] = {}
        # Delivered before; passed once their reader's state is known again.
        self._before = set(bookmark.beyond)
        self._failed: dict[int, Any] = {}
        self._readers = readers
        self._ended: dict[int, int] = {}  # by reader: the first batch it cannot make
        # The same of a stream that the loader reads, and the state there.
        self._end: tuple[int, Any] | None = None
        self._latest: tuple[int, Any] | None = None  # taken and not noted yet
        # Whether all batches before the latest were taken, of one reader.
        self._is_plain = not self._before and readers == 1

    def take(self, number: int, state: Any = None) -> None:
        """Note that a batch was delivered, or was empty, and its reader's state.

        Called last. An interrupt (Ctrl-C) comes only at function calls, so it finds the
        batch either delivered or not: this method is one assignment.
        """
        latest = self._latest
        is_next = number == (self._done if latest is None else latest[0] + 1)
        if not (is_next and self._is_plain):
            with _LOCK:
                self._settle()
                is_open = self._beyond or self._failed or self._before
                is_next = number == self._done and self._readers == 1
                self._is_plain = is_next and not is_open
        self._latest = number, state

    def pass_over(self, number: int, state: Any = None) -> None:
        """Note the reader's state after a batch that was delivered before."""
        with _LOCK:
            self._settle()
            self._note(number, state)

    def fail(self, number: int, state: Any = None) -> None:
        with _LOCK:
            self._settle()
            self._is_plain, self._latest = False, None
            self._failed[number] = state

    def end(self, number: int, state: Any = None) -> None:
        """Note that a reader had ended instead of making batch ``number``.

        Its earlier batches may still be under way, and the state is the one after them.
        """
        with _LOCK:
            self._settle()
            if state is not None and (self._end is None or number < self._end[0]):
                self._end = number, state
            self._advance()

    def end_reader(self, number: int) -> None:
        """Note that a reader has ended: batch ``number`` and later ones do not come."""
        with _LOCK:
            self._settle()
            reader = number % self._readers
            self._ended[reader] = min(number, self._ended.get(reader, number))
            self._advance()

    def leave(self, worker: int, state: Any) -> None:
        """Note the state of a worker's dataset after a delivered batch."""
        self._datasets[worker] = state

    def bookmark(self) -> EpochPosition:
        """Return the current position, from any thread."""
        with _LOCK:
            self._settle()
            beyond = frozenset(self._before.union(self._beyond))
            return EpochPosition(
                self._done, beyond, {**self._states}, {**self._datasets}
            )

    def _settle(self) -> None:
        """Note the latest batch; harmless if repeated."""
        latest = self._latest  # another thread may take the next one
        if latest is not None or self.is_over:
            self._beyond.update(self._failed)
            self._failed.clear()
            if latest is not None and not self._is_plain:
                self._note(*latest)
            elif latest is not None and latest[0] >= self._done:
                if latest[1] is not None:
                    self._states[0] = latest[1]
                self._done = latest[0] + 1
            self._advance()

    def _note(self, number: int, state: Any) -> None:
        self._before.discard(number)
        if number >= self._done:  # otherwise its reader has ended
            self._beyond[number] = state
            self._advance()

    def _advance(self) -> None:
        """Advance over delivered batches and those that ended readers will not make."""
        while True:
            done, reader = self._done, self._done % self._readers
            if self._end is not None and self._end[0] == done:
                self._states[reader] = self._end[1]
            if not self._beyond:
                return
            if done in self._beyond:
                state = self._beyond[done]
                if state is not None:
                    self._states[reader] = state
            elif done < self._ended.get(reader, math.inf):
                return
            self._done = done + 1
            self._beyond.pop(done, None)  # last: a signal handler may read the state


@dataclass(eq=False, repr=False)
class Epoch:
    """One pass over the dataset: drawn when an iterator is made, started by its use."""

    base_seed: int  # that random draws are keyed with
    order: Order
    number: int = -1  # from 0; -1 before it starts
    shuffled: int | None = None  # the epoch of the loader's ``KeyedOrder``
    seen: int | None = None  # the epoch that this had when it was made
    bookmark: EpochPosition = BEGINNING  # where this iteration starts
    # Of a stream: batches beyond it, which are made but not delivered again.
    dropped: frozenset[int] = frozenset()
    progress: Progress = field(default_factory=Progress)  # of its consumer
    counters: Counters = field(default_factory=Counters)
    policy: FailurePolicy | None = None  # for failed samples, if any may be skipped
    turns: ReaderTurns | None = None  # choose the requests if these do not ascend
    dataset_epoch: int | None = None  # the dataset's own number for it
    saved: Any = None  # the ``LoaderState`` that it resumes from
    first: dict[int, Any] = field(default_factory=dict)  # states of iterables' readers
    reads_ahead: bool = False  # samples are read before their batch is requested
    head: Any = None  # the constant part of its state, once needed

    def begin(
        self, bookmark: EpochPosition, *, readers: int = 1, in_order: bool = True
    ) -> None:
        """Start it, from a position: its order is drawn from now on."""
        self.counters.epoch = self.number
        self.order.prepare(self.shuffled)
        if bookmark is not BEGINNING or readers > 1:
            self.bookmark = bookmark
            self.progress = Progress(bookmark, readers=readers)
            if type(self.order) is Order:  # it must be read past them
                self.dropped = bookmark.beyond
        if readers > 1 and not in_order:
            self.turns = ReaderTurns(readers, bookmark.done)

    def judge(self) -> None:
        """Raise, once, if at the end it turns out that too many samples failed."""
        if self.progress.is_over and self.policy is not None:
            self.policy.end()

    def is_untouched(self) -> bool:
        """Tell whether nothing was delivered yet."""
        now, then = self.progress.bookmark(), self.bookmark
        is_there = now.done == then.done and now.beyond == then.beyond
        return is_there and not self.progress.is_over

    def requests(self, *, as_lists: bool = True) -> Iterator[IndexBatch]:
        """Return the remaining requests, drawn as they are pulled; called once.

        Their indices are lists, or else an ``IndexOrder`` gives tensors and ranges.
        """
        order, start = self.order, self.bookmark
        if isinstance(order, IndexOrder):
            batches = order.batches(start.done, as_lists=as_lists)
        elif self.turns is not None:
            batches = order.batches_of(self.turns)
        else:
            batches = order.batches(start.done, start.states.get(0))
        return self._undelivered(batches) if start.beyond else batches

    def _undelivered(self, batches: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        beyond = self.bookmark.beyond - self.dropped
        for batch in batches:
            if batch.number in beyond:
                self.progress.pass_over(batch.number, batch.state)
            else:
                yield batch

    def draws_long(self, number: int) -> bool:
        return self.order.draws_long(number, self.bookmark.done)


class EpochNumbers:
    """Number the epochs of a loader, and set the epoch of its ``KeyedOrder``."""

    def __init__(
        self, sampler: Any, number: int = 0, shuffled: int | None = None
    ) -> None:
        self.next = number
        # How often the user has chosen an epoch, and the latest one.
        self.chosen: tuple[int, int | None] = (0, None)
        self._order = sampler if isinstance(sampler, KeyedOrder) else None
        self._shuffled = shuffled  # its epoch, if it was set here
        self._is_chosen = False  # whether the user has chosen the next
        # Epochs of iterators that have not started, since an epoch was last chosen.
        self._reserved: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._lock = fork_safe(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochNumbers, (self._order, self.next, self._shuffled)

    def copy(self, sampler: Any) -> "EpochNumbers":
        return EpochNumbers(sampler, self.next, self._shuffled)

    def reserve(self, epoch: Epoch) -> None:
        """Number an epoch, and its order: a new one, or as its ``saved`` state does.

        No other iterator has a new number; it is free again if one is dropped unused.
        """
        saved, order = epoch.saved, self._order
        with self._lock:
            self._reserved.discard(epoch)
            epoch.seen = None if order is None else order.epoch
            driver = None if self._is_chosen else UNDER_WAY.get()
            if saved is not None:
                number, epoch.shuffled = saved.epoch, saved.order.get("epoch")
                self.next = number + 1
            elif driver is not None:
                number = driver.epoch
                epoch.shuffled = None if order is None else number
            else:
                number = self.next
                epoch.shuffled = None if order is None else self.upcoming()
                for one in self._reserved:
                    number = max(number, one.number + 1)
                    if epoch.shuffled is not None and one.shuffled is not None:
                        epoch.shuffled = max(epoch.shuffled, one.shuffled + 1)
            epoch.number = number  # at once: another thread may reserve the next
            self._reserved.add(epoch)

    def release(self, epoch: Epoch) -> None:
        """Free the number of an epoch that could not start, and may be retried."""
        epoch.number = -1
        with self._lock:
            self._reserved.discard(epoch)

    def latest_reserved(self) -> Epoch | None:
        """Return the epoch of the latest iterator that has not started, if any."""
        number = operator.attrgetter("number")
        with self._lock:
            return max(self._reserved, key=number, default=None)

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch as started, unless another was chosen since it was made."""
        with self._lock:
            if epoch not in self._reserved:
                return
            self._reserved.remove(epoch)
            self._is_chosen = False
            following = epoch.number + 1
            # Of two threads, one resumes, and the next epoch may have started before.
            is_again = epoch.saved is not None and self.next <= following
            self.next = max(self.next, following)
            order, shuffled = self._order, epoch.shuffled
            if order is None or shuffled is None:
                return
            # Unless the user has set another.
            if order.epoch in {epoch.seen, self._shuffled}:
                if order.epoch == self._shuffled and not is_again:
                    shuffled = max(shuffled, order.epoch)
                order.set_epoch(shuffled)
                self._shuffled = shuffled

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next; the user sets the epoch of the sampler.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        with self._lock:
            self.next = epoch
            self._is_chosen, self._shuffled = True, None
            self.chosen = self.chosen[0] + 1, epoch
            self._reserved.clear()

    def upcoming(self) -> int | None:
        """Return the epoch that the ``KeyedOrder`` would have next.

        That is a new one, unless the user has chosen it.
        """
        if self._order is None:
            return None
        return self._order.epoch + (self._order.epoch == self._shuffled)


def index_sampler_of(sampler: Any, batch_sampler: Any) -> Any:
    """Return the sampler that determines the order: of batches, or else of indices.

    A program may have replaced the ``__iter__`` of one of torch's classes.
    """
    is_torchs = type(batch_sampler) is BatchSampler
    if is_torchs and BatchSampler.__iter__.__module__ == BatchSampler.__module__:
        return batch_sampler.sampler
    return sampler if batch_sampler is None else batch_sampler


def order_of(
    sampler: Any, batch_sampler: Any, part: RankPart = WHOLE, saved: State | None = None
) -> IndexOrder | IteratedOrder:
    """Return the next epoch's order of a map-style dataset, or a saved one again.

    It is cut from random access if it is known what torch's exact class, or ours, does.
    """
    saved, drop_last = saved or {}, False
    size: int | None = 1 if batch_sampler is None else None
    sampler = index_sampler_of(sampler, batch_sampler)
    is_torchs = batch_sampler is not None and sampler is not batch_sampler
    if is_torchs:
        size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    sampler = () if sampler is None else sampler
    is_seekable = isinstance(sampler, SeekableOrder)
    is_known = is_seekable or type(sampler) is SequentialSampler
    draws: SamplerDraws | None = None
    if type(sampler) is RandomSampler:
        is_whole = sampler.num_samples == len(sampler.data_source)
        is_known = is_whole and not sampler.replacement
        draws = SamplerDraws(sampler, saved) if is_known else None
    at = size, part, saved.get("pulled", 0)
    own = SeekableOrder if is_seekable else type(sampler)  # a user's may iterate itself
    if size and is_known and sampler.__iter__.__module__ == own.__module__:
        return IndexOrder(*at, sampler=sampler, drop_last=drop_last, draws=draws)
    begins = not (is_torchs or isinstance(sampler, KeyedOrder))
    return IteratedOrder(
        *at, sampler=sampler, drop_last=drop_last, saved=saved, begins=begins
    )
