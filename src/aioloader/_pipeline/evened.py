"""The iterations of streams whose ranks end together, however much each has read.

``EvenedQueue`` passes a batch on when all ranks have one in its place (``"drop"``), or
at once (``"wrap"``, ``"pad"``). ``EvenedFeed`` requests repeated batches after its
rank's last one, until the last rank ends.
"""

import contextlib
from typing import Any, Final

from aioloader._order.shared_end import SharedEnd
from aioloader._pipeline.ahead_feed import AheadFeed
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader.errors import BatchTimeoutError

# Makes the consumer look again; no batch has this number.
_NEWS: Final = -1


class EvenedQueue(ReadyQueue):
    """A queue that holds batches until the other ranks have as many.

    It owns the ``talk``, a ``StoreTalk``. Of ``dropped``, numbers of batches that are
    made but not delivered, the ranks do not speak.
    """

    def __init__(
        self,
        talk: Any,
        dropped: frozenset[int],
        readers: int,
        *,
        pads: bool,
        **options: Any,
    ) -> None:
        self.end, self.talk = SharedEnd(pads), talk
        self._dropped = dropped
        self._readers = readers
        self._errors: list[Exception] = []  # why ranks cannot agree, once needed
        self._has_news = False  # the consumer must look again
        self._repeats = False
        self._barren = 0  # repeats in a row for which there was nothing to repeat
        super().__init__(**options)

    def _is_true(self) -> bool:
        may_fail = self._errors and self.end.needs_others()
        return bool(self._is_over or self._has_news or self._may_pass() or may_fail)

    def _may_pass(self) -> bool:
        """Tell whether there is an item that may be passed on."""
        if not self._items or self.end.is_over():
            return False
        return self.end.may_pass() or not self._is_batch(*self._items[0])

    def _is_batch(self, number: int, result: BatchResult) -> bool:
        """Tell whether a result takes a batch's place; an error does too."""
        return not (result.is_empty or result.is_end or number in self._dropped)

    def begin(self) -> None:
        """Start to agree with the other ranks. Idempotent."""
        self.talk.begin(self.end, self._hear)

    def end_here(self) -> None:
        """Note that this rank has no more batches."""
        if not (self.end.has_ended or self.end.is_over()):
            self.end.has_ended = True
            self.talk.note()

    def repeat(self, first: int) -> None:
        """Expect repeated batches from number ``first`` on; nothing is under way."""
        self._next, self._repeats = first, True

    def put(self, number: int, result: BatchResult, *, wakes: bool = True) -> None:
        """Add a result, and count its batch."""
        is_counted = self._is_batch(number, result) and not self.end.has_ended
        if is_counted:  # before the consumer sees it, which may then end
            with self.lock:
                self.end.made += 1
        super().put(number, result, wakes=wakes)
        if is_counted:
            if self.end.has_news():
                self.talk.note()
            if self.end.needs_others():
                self._look()

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item that may be passed on, or None."""
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
                self._raise_broken()
            return None
        number, result = self._items.popleft()
        end.passed += self._is_batch(number, result)
        if end.has_news():
            self.talk.note()
        if end.is_over():
            self._look()
        is_nothing = result.batch is None and result.error is None
        self._barren = self._barren + 1 if self._repeats and is_nothing else 0
        if self._barren >= self._readers:
            raise ValueError(
                f"{self.talk.who} has no samples in this epoch, so it has none to "
                f"repeat while another rank has {end.counts.most:,} batches: use fewer "
                "ranks, or more, smaller shards, or tail='drop'"
            )
        return number, result

    def close(self) -> None:
        self.talk.close()
        super().close()

    def join(self) -> bool:
        has_ended: bool = self.talk.join()
        return has_ended

    def joins_at_once(self) -> bool:
        return False

    def _hear(self, error: Exception | None) -> None:
        """Look again: the other ranks have told more, or cannot."""
        if error is not None:
            self._errors.append(error)
        if self.end.has_ended or self.end.is_over():
            self._look()
        else:
            self.wake()

    def _look(self) -> None:
        self._has_news = True
        self.wake()


class EvenedFeed(AheadFeed):
    """A feed that ends when its ranks have agreed that it does."""

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
        elif self._queue.end.is_over():  # of what was read ahead, nothing is delivered
            self._is_exhausted, self._samples = True, 0
            self._in_flight.clear()

    def _note(self, number: int, *result: Any) -> bool:
        return number != _NEWS and super()._note(number, *result)

    def _may_end(self) -> bool:
        """Tell whether all ranks have ended; repeat what this one lacks until then."""
        queue, end = self._queue, self._queue.end
        queue.end_here()
        lacking = end.lacking()
        if lacking and not self._repeats:  # samples of this rank's beginning
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
        allowed: float = self._queue.talk.timeout
        return allowed if limit is None else min(limit, allowed)

    def _time_out(self, waited: float) -> None:
        end, talk = self._queue.end, self._queue.talk
        if not end.needs_others():
            if self._timeout is not None:
                super()._time_out(waited)
            return
        ranks = "the other ranks"
        with contextlib.suppress(RuntimeError):  # the store is gone too
            ranks = talk.waits_for()
        limit = self._limit() or 0.0
        raise BatchTimeoutError(
            f"DataLoader timed out after {limit:g} seconds: {talk.who} has delivered "
            f"{end.passed:,} batches, and waits for {ranks} to tell whether the epoch "
            "continues; look at what is wrong there, or allow more time with the "
            "stream's agree(timeout=...)",
            timeout=limit,
            batch=self._next,
        )
