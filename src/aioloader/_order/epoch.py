"""Epochs, with their numbers, orders and base seeds, and the consumer's position.

Only delivered batches count. With ``in_order=False``, a position is the number below
which all batches were delivered, and the set of later batches that were delivered.
Nothing here does I/O or awaits; positions may be read from any thread.
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
    """A loader's or stream's iteration that runs user code in an epoch.

    ``reads_whole`` is True if workers do not split the streams that this code iterates.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def reads_whole(self) -> bool: ...


# The iteration that runs user code. A loader or stream that this code iterates takes
# this iteration's epoch number: its own count would restart at 0 after a resume.
UNDER_WAY: ContextVar[HasEpoch | None] = ContextVar("aioloader_epoch", default=None)


@contextlib.contextmanager
def under_way(driver: HasEpoch) -> Iterator[None]:
    before = UNDER_WAY.get()
    UNDER_WAY.set(driver)
    try:
        yield
    finally:
        # No token: a dropped coroutine may be closed in another context.
        if UNDER_WAY.get() is driver:
            UNDER_WAY.set(before)


@dataclass(eq=False, repr=False)
class EpochPosition:
    """The delivered batches of an epoch, and the states after them."""

    done: int = 0  # every batch below this number was delivered
    beyond: frozenset[int] = frozenset()  # later batches that were delivered too
    # By reader: the sampler's or stream's state after its last batch below ``done``.
    states: dict[int, Any] = field(default_factory=dict)
    # By worker: the state of its copy of a map-style dataset after its latest batch.
    datasets: dict[int, Any] = field(default_factory=dict)

    def delivered(self) -> int:
        """Return how many batches were delivered."""
        return self.done + len(self.beyond)


BEGINNING = EpochPosition()
# One lock for all positions: it is held rarely, and for microseconds. Reentrant, as a
# signal handler may save a state.
_LOCK = fork_safe(threading.RLock())


class Progress:
    """The position of one iteration, whose batches come from readers in turn.

    A failed batch counts as delivered once a later batch is, or the epoch is over.
    """

    def __init__(self, start: EpochPosition = BEGINNING, *, readers: int = 1) -> None:
        self.is_over: bool = False  # every batch of the epoch was delivered
        self._done = start.done
        self._states = dict(start.states)
        self._datasets = dict(start.datasets)
        self._beyond: dict[int, Any] = {}  # state by batch, beyond ``_done``
        # Batches delivered before the resume; their states are not known again yet.
        self._before = set(start.beyond)
        self._failed: dict[int, Any] = {}
        self._readers = readers
        self._ended: dict[int, int] = {}  # by reader: the first batch it cannot make
        # For a stream that the loader reads: its first missing batch, its final state.
        self._end: tuple[int, Any] | None = None
        self._latest: tuple[int, Any] | None = None  # delivered, but not noted yet
        # There is one reader, and all batches before the latest were delivered.
        self._is_plain = not self._before and readers == 1

    def take(self, number: int, state: Any = None) -> None:
        """Count a batch as delivered (or as empty), and note its reader's state.

        This is the last call before delivery. It ends with one assignment, so that
        Ctrl-C finds the batch either delivered or not.
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

    def skip_delivered(self, number: int, state: Any = None) -> None:
        """Note the reader's state after a batch delivered before the resume."""
        with _LOCK:
            self._settle()
            self._note(number, state)

    def fail(self, number: int, state: Any = None) -> None:
        with _LOCK:
            self._settle()
            self._is_plain, self._latest = False, None
            self._failed[number] = state

    def end(self, number: int, state: Any = None) -> None:
        """Note the final state of a stream that ended before batch ``number``.

        Earlier batches of the stream may still be in flight.
        """
        with _LOCK:
            self._settle()
            if state is not None and (self._end is None or number < self._end[0]):
                self._end = number, state
            self._advance()

    def end_reader(self, number: int) -> None:
        """Note that the reader of batch ``number`` ended before making that batch."""
        with _LOCK:
            self._settle()
            reader = number % self._readers
            self._ended[reader] = min(number, self._ended.get(reader, number))
            self._advance()

    def note_dataset(self, worker: int, state: Any) -> None:
        """Note a worker's dataset state, at the start or after a delivered batch."""
        self._datasets[worker] = state

    def position(self) -> EpochPosition:
        """Return the current position; any thread may call this."""
        with _LOCK:
            self._settle()
            beyond = frozenset(self._before.union(self._beyond))
            return EpochPosition(
                self._done, beyond, {**self._states}, {**self._datasets}
            )

    def _settle(self) -> None:
        """Add the latest batch and earlier failures to the position. Idempotent."""
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
        """Advance ``_done`` past delivered batches and numbers of ended readers."""
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
    """A pass over the dataset, drawn for an iterator and begun at its first step."""

    base_seed: int  # of random numbers in this epoch
    order: Order
    keeps_seed: bool = False  # whether the next epoch has the same base seed
    number: int = -1  # from 0; -1 until reserved
    order_epoch: int | None = None  # the epoch of the loader's ``KeyedOrder``
    seen_order_epoch: int | None = None  # the ``KeyedOrder``'s epoch at the reservation
    start: EpochPosition = BEGINNING  # where this iteration starts
    # Of a stream: batches delivered out of order, which are made again and dropped.
    dropped: frozenset[int] = frozenset()
    progress: Progress = field(default_factory=Progress)  # of its consumer
    counters: Counters = field(default_factory=Counters)
    policy: FailurePolicy | None = None  # for failed samples
    turns: ReaderTurns | None = None  # numbers of the requests, if not ascending
    dataset_epoch: int | None = None  # the dataset's ``epoch``
    saved: Any = None  # the ``LoaderState`` that the epoch resumes from
    first: dict[int, Any] = field(default_factory=dict)  # states of iterables' readers
    reads_ahead: bool = False  # samples are read before their batch is requested
    state_head: Any = None  # the constant part of the saved state, once needed

    def begin(
        self, start: EpochPosition, *, readers: int = 1, in_order: bool = True
    ) -> None:
        """Begin the epoch at a position, and draw the seed of its order."""
        self.counters.epoch = self.number
        self.order.prepare(self.order_epoch)
        if start is not BEGINNING or readers > 1:
            self.start = start
            self.progress = Progress(start, readers=readers)
            if type(self.order) is Order:  # a stream must be read past these batches
                self.dropped = start.beyond
        if readers > 1 and not in_order:
            self.turns = ReaderTurns(readers, start.done)

    def check_failures(self) -> None:
        """Once the epoch is over, raise an error if too many samples failed."""
        if self.progress.is_over and self.policy is not None:
            self.policy.end()

    def is_untouched(self) -> bool:
        """Tell whether this iteration has delivered no batch and has not ended."""
        now, then = self.progress.position(), self.start
        is_equal = now.done == then.done and now.beyond == then.beyond
        return is_equal and not self.progress.is_over

    def requests(self, *, as_lists: bool = True) -> Iterator[IndexBatch]:
        """Return an iterator that draws the remaining requests; call this once.

        Without ``as_lists``, an ``IndexOrder`` yields indices as tensors or ranges.
        """
        order, start = self.order, self.start
        if isinstance(order, IndexOrder):
            batches = order.batches(start.done, as_lists=as_lists)
        elif self.turns is not None:
            batches = order.batches_of(self.turns)
        else:
            batches = order.batches(start.done, start.states.get(0))
        return self._undelivered(batches) if start.beyond else batches

    def _undelivered(self, batches: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        beyond = self.start.beyond - self.dropped
        for batch in batches:
            if batch.number in beyond:
                self.progress.skip_delivered(batch.number, batch.state)
            else:
                yield batch

    def draws_slowly(self, number: int) -> bool:
        return self.order.draws_slowly(number, self.start.done)


class EpochNumbers:
    """A counter of a loader's epochs, which also sets the epoch of a ``KeyedOrder``."""

    def __init__(
        self, sampler: Any, number: int = 0, order_epoch: int | None = None
    ) -> None:
        self.next = number
        # How often the user has called ``set_epoch``, and the latest epoch.
        self.chosen: tuple[int, int | None] = (0, None)
        self._order = sampler if isinstance(sampler, KeyedOrder) else None
        self._order_epoch = order_epoch  # the order's epoch, if it was set here
        self._is_chosen = False  # whether the user has chosen the next epoch
        # Epochs whose iterators have not started, since the user last chose an epoch.
        self._reserved: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._lock = fork_safe(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochNumbers, (self._order, self.next, self._order_epoch)

    def copy(self, sampler: Any) -> "EpochNumbers":
        return EpochNumbers(sampler, self.next, self._order_epoch)

    def reserve(self, epoch: Epoch) -> None:
        """Reserve a number for an epoch, and choose the epoch of its order.

        The number is free again if the epoch is dropped before it starts.
        """
        saved, order = epoch.saved, self._order
        with self._lock:
            self._reserved.discard(epoch)
            epoch.seen_order_epoch = None if order is None else order.epoch
            driver = None if self._is_chosen else UNDER_WAY.get()
            if saved is not None:
                number, epoch.order_epoch = saved.epoch, saved.order.get("epoch")
                self.next = number + 1
            elif driver is not None:
                number = driver.epoch
                epoch.order_epoch = None if order is None else number
            else:
                number = self.next
                epoch.order_epoch = None if order is None else self.next_order_epoch()
                for held in self._reserved:
                    number = max(number, held.number + 1)
                    if epoch.order_epoch is not None and held.order_epoch is not None:
                        next_epoch = held.order_epoch + 1
                        epoch.order_epoch = max(epoch.order_epoch, next_epoch)
            epoch.number = number  # before another thread reserves the next one
            self._reserved.add(epoch)

    def release(self, epoch: Epoch) -> None:
        """Free the number of an epoch that could not start but may be retried."""
        epoch.number = -1
        with self._lock:
            self._reserved.discard(epoch)

    def latest_reserved(self) -> Epoch | None:
        """Return the reserved epoch with the highest number, or None."""
        number = operator.attrgetter("number")
        with self._lock:
            return max(self._reserved, key=number, default=None)

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch as started, unless the user has chosen another since."""
        with self._lock:
            if epoch not in self._reserved:
                return
            self._reserved.remove(epoch)
            self._is_chosen = False
            following = epoch.number + 1
            # If another thread resumed, the next epoch may already have started.
            is_again = epoch.saved is not None and self.next <= following
            self.next = max(self.next, following)
            order, order_epoch = self._order, epoch.order_epoch
            if order is None or order_epoch is None:
                return
            # Unless the user has set another epoch in the order.
            if order.epoch in {epoch.seen_order_epoch, self._order_epoch}:
                if order.epoch == self._order_epoch and not is_again:
                    order_epoch = max(order_epoch, order.epoch)
                order.set_epoch(order_epoch)
                self._order_epoch = order_epoch

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next number; the caller sets the samplers' epoch."""
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        with self._lock:
            self.next = epoch
            self._is_chosen, self._order_epoch = True, None
            self.chosen = self.chosen[0] + 1, epoch
            self._reserved.clear()

    def next_order_epoch(self) -> int | None:
        """Return the next epoch of the ``KeyedOrder``, or None if there is none."""
        if self._order is None:
            return None
        return self._order.epoch + (self._order.epoch == self._order_epoch)


def index_sampler_of(sampler: Any, batch_sampler: Any) -> Any:
    """Return the sampler, of batches or of indices, that determines the order."""
    # Unless a program has replaced the ``__iter__`` of torch's class.
    is_torchs = type(batch_sampler) is BatchSampler
    if is_torchs and BatchSampler.__iter__.__module__ == BatchSampler.__module__:
        return batch_sampler.sampler
    return sampler if batch_sampler is None else batch_sampler


def order_of(
    sampler: Any, batch_sampler: Any, part: RankPart = WHOLE, saved: State | None = None
) -> IndexOrder | IteratedOrder:
    """Return the next epoch's order of a map-style dataset, or a saved order.

    Where possible this is an ``IndexOrder``, otherwise an ``IteratedOrder``.
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
    given = size, part, saved.get("pulled", 0)
    own = SeekableOrder if is_seekable else type(sampler)  # not a user's __iter__
    if size and is_known and sampler.__iter__.__module__ == own.__module__:
        return IndexOrder(*given, sampler=sampler, drop_last=drop_last, draws=draws)
    begins = not (is_torchs or isinstance(sampler, KeyedOrder))
    return IteratedOrder(
        *given, sampler=sampler, drop_last=drop_last, saved=saved, begins=begins
    )
