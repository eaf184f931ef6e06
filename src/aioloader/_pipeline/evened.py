"""Deliver equally many batches on all ranks, for streams of unknown length.

With ``tail="drop"``, ``EvenedQueue`` delivers a batch once all ranks have made as many.
Otherwise it delivers at once, and ``EvenedFeed`` repeats samples until all ranks end.
"""

import contextlib
from typing import Any, Final

from aioloader._order.shared_end import SharedEnd
from aioloader._pipeline.ahead_feed import AheadFeed
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader.errors import BatchTimeoutError

# The batch number of an empty result that only wakes the consumer.
_NEWS: Final = -1


class EvenedQueue(ReadyQueue):
    """A queue that ends together with the queues of the other ranks.

    ``rounds``: the stream's ``EpochEndRounds``, which the queue owns. ``dropped``: the
    numbers of batches that are made but neither delivered nor counted.
    """

    def __init__(
        self,
        rounds: Any,
        dropped: frozenset[int],
        readers: int,
        *,
        pads: bool,
        **options: Any,
    ) -> None:
        self.end, self.rounds = SharedEnd(pads), rounds
        self._dropped = dropped
        self._readers = readers
        self._errors: list[Exception] = []  # of rounds; raised when counts are needed
        self._has_news = False  # the consumer must check the end again
        self._repeats = False
        self._empty_repeats = 0  # how many repeated requests in a row found no samples
        super().__init__(**options)

    def _is_true(self) -> bool:
        may_fail = self._errors and self.end.needs_others()
        return bool(self._is_over or self._has_news or self._may_pass() or may_fail)

    def _may_pass(self) -> bool:
        """Tell whether the next result has arrived and may be delivered."""
        if not self._items or self.end.is_over():
            return False
        return self.end.may_pass() or not self._is_batch(*self._items[0])

    def _is_batch(self, number: int, result: BatchResult) -> bool:
        """Tell whether a result counts as a batch of this rank; an error does."""
        return not (result.is_empty or result.is_end or number in self._dropped)

    def begin(self) -> None:
        """Start to exchange counts with the other ranks. Idempotent."""
        self.rounds.begin(self.end, self._on_counts)

    def end_here(self) -> None:
        """Report to the other ranks that this rank has no more batches. Idempotent."""
        if not (self.end.has_ended or self.end.is_over()):
            self.end.has_ended = True
            self.rounds.note()

    def repeat(self, first: int) -> None:
        """Expect repeated samples from batch ``first`` on; no request is in flight."""
        self._next, self._repeats = first, True

    def put(self, number: int, result: BatchResult, *, wakes: bool = True) -> None:
        """Add a result; count its batch, and report the count when a report is due."""
        is_counted = self._is_batch(number, result) and not self.end.has_ended
        if is_counted:  # before the consumer sees it and may end
            with self.lock:
                self.end.made += 1
        super().put(number, result, wakes=wakes)
        if is_counted:
            if self.end.has_news():
                self.rounds.note()
            if self.end.needs_others():
                self._wake_consumer()

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Return the next item to deliver, or a ``_NEWS`` item, or None if neither."""
        end = self.end
        if not self._items:
            self.collect()
        if not self._may_pass():
            if self._errors and end.needs_others():
                raise self._errors.pop()
            if self._has_news:
                self._has_news = False
                return _NEWS, BatchResult(is_empty=True)
            if not self._items:
                self._raise_error()
            return None
        number, result = self._items.popleft()
        end.passed += self._is_batch(number, result)
        if end.has_news():
            self.rounds.note()
        if end.is_over():
            self._wake_consumer()
        if self._repeats and result.batch is None and result.error is None:
            self._empty_repeats += 1
        else:
            self._empty_repeats = 0
        if self._empty_repeats >= self._readers:
            raise ValueError(
                f"{self.rounds.who} has no samples in this epoch, so it has none to "
                f"repeat while another rank has {end.counts.most:,} batches: use fewer "
                "ranks, or more, smaller shards, or tail='drop'"
            )
        return number, result

    def close(self) -> None:
        self.rounds.close()
        super().close()

    def join(self) -> bool:
        has_ended: bool = self.rounds.join()
        return has_ended

    def joins_at_once(self) -> bool:
        return False

    def _on_counts(self, error: Exception | None) -> None:
        """Wake the consumer after a round, which brings new counts or an error."""
        if error is not None:
            self._errors.append(error)
        if self.end.has_ended or self.end.is_over():
            self._wake_consumer()
        else:
            self.wake()

    def _wake_consumer(self) -> None:
        self._has_news = True
        self.wake()


class EvenedFeed(AheadFeed):
    """A feed that ends when all ranks have agreed on the end of the epoch."""

    @property
    def _queue(self) -> EvenedQueue:
        assert isinstance(self.pipeline.ready, EvenedQueue)
        return self.pipeline.ready

    def _take(self) -> Any:
        self._queue.begin()
        return super()._take()

    def _account(self, number: int, result: BatchResult) -> None:
        if number != _NEWS:
            super()._account(number, result)
        elif self._queue.end.is_over():  # batches in flight are not delivered
            self._is_exhausted, self._samples = True, 0
            self._in_flight.clear()

    def _accept(self, number: int, *result: Any) -> bool:
        return number != _NEWS and super()._accept(number, *result)

    def _may_end(self) -> bool:
        """Tell whether all ranks agree on the end; request batches still lacking."""
        queue, end = self._queue, self._queue.end
        queue.end_here()
        lacking = end.lacking()
        if lacking and not self._repeats:  # from the beginning of this rank's stream
            first, self._turns = self._progress.position().done, None
            queue.repeat(first)
            self._repeats, self._requests = True, self.epoch.order.batches(first)
        if lacking:
            self._is_exhausted = False
            self._fill(lacking)
            self._is_exhausted = True
        return end.is_over() and end.is_agreed

    def _limit(self) -> float | None:
        limit = super()._limit()
        if not self._queue.end.needs_others():
            return limit
        allowed: float = self._queue.rounds.timeout
        return allowed if limit is None else min(limit, allowed)

    def _time_out(self, waited: float) -> None:
        end, rounds = self._queue.end, self._queue.rounds
        if not end.needs_others():
            if self._timeout is not None:
                super()._time_out(waited)
            return
        ranks = "the other ranks"
        with contextlib.suppress(RuntimeError):  # the store is gone too
            ranks = rounds.waits_for()
        limit = self._limit() or 0.0
        raise BatchTimeoutError(
            f"DataLoader timed out after {limit:g} seconds: {rounds.who} has delivered "
            f"{end.passed:,} batches, and waits for {ranks} to report whether the "
            "epoch continues; check why these ranks are late, or allow more time with "
            "the stream's agree(timeout=...)",
            timeout=limit,
            batch=self._next,
        )
