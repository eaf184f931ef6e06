"""The iterations of streams whose ranks end together, however much each has read.

``EvenedQueue`` passes a batch on when all ranks have one in its place (``"drop"``), or
at once (``"wrap"``, ``"pad"``). ``EvenedIterator`` requests repeated batches after its
rank's last one, until the last rank ends.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from aioloader._order.epoch import Epoch
from aioloader._order.indices import IndexBatch  # noqa: TC001  (an annotation of an attribute)
from aioloader._order.shared_end import EndTalk, SharedEnd
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.pipeline_iterator import Patience, PipelineIterator, Window
from aioloader._pipeline.ready import Items, ReadyQueue
from aioloader.errors import BatchTimeoutError

# Makes the consumer look again; no batch has this number.
_NEWS: Final = -1


class EvenedQueue(ReadyQueue):
    """A queue that holds batches until the other ranks have as many.

    Args:
        end: This rank's side of the common end.
        talk: Carries counts between the ranks; owned.
        dropped: Numbers of batches that are made but not delivered.
        options: As for ``ReadyQueue``.
    """

    def __init__(
        self, end: SharedEnd, talk: EndTalk, dropped: frozenset[int], **options: Any
    ) -> None:
        self.end, self.talk = end, talk
        self._dropped = dropped
        self._news: list[None] = []  # not empty: the consumer must look again
        self._errors: list[Exception] = []  # why ranks cannot agree, once needed
        super().__init__(**options)

    def _settled(self, items: Items, ends: list[None]) -> Callable[[], bool]:
        end, dropped, news, errors = self.end, self._dropped, self._news, self._errors
        return lambda: bool(
            ends
            or news
            or _passable(items, end, dropped)
            or (errors and end.needs_others())
        )

    def begin(self) -> None:
        """Start to agree with the other ranks."""
        self.talk.begin(self.end, self._hear)

    def end_here(self) -> None:
        """Note that this rank has no more batches."""
        if not (self.end.has_ended or self.end.is_over()):
            self.end.has_ended = True
            self.talk.note()

    def put(self, number: int, result: BatchResult, *, more: bool = False) -> None:
        """Add the result of request ``number``, and count its batch, any thread."""
        is_counted = _is_batch(number, result, self._dropped) and not self.end.has_ended
        if is_counted:  # before the consumer sees it, which may then end
            with self._waiters.lock:
                self.end.made += 1
        super().put(number, result, more=more)
        if is_counted:
            if self.end.has_news():
                self.talk.note()
            if self.end.needs_others():
                self._look()

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item that may be passed on, or None.

        Raises:
            BaseException: The error given to ``fail``, or why ranks cannot agree.
        """
        end, items = self.end, self._items
        if not items and self._pump is not None:
            self._pump.collect()
        if _passable(items, end, self._dropped):
            item = items.popleft()
            end.passed += _is_batch(*item, self._dropped)
            if end.has_news():
                self.talk.note()
            if end.is_over():
                self._look()
            return item
        if self._errors and end.needs_others():
            raise self._errors.pop()
        if self._news:
            self._news.clear()
            return _NEWS, BatchResult(is_empty=True)
        if not items:
            self._raise_broken()
        return None

    def close(self) -> None:
        """Drop ready and later results; stop agreeing."""
        self.talk.close()
        super().close()

    def join(self) -> bool:
        """Wait, bounded, for the threads that agree; return whether they have ended."""
        return self.talk.join()

    def joins_at_once(self) -> bool:
        """Return False: there may be threads."""
        return False

    def _hear(self, error: Exception | None) -> None:
        """Look again: the other ranks have told more, or cannot."""
        if error is not None:
            self._errors.append(error)
        if self.end.has_ended or self.end.is_over():
            self._look()
        else:
            self._waiters.wake()

    def _look(self) -> None:
        if not self._news:
            self._news.append(None)
        self._waiters.wake()


def _is_batch(number: int, result: BatchResult, dropped: frozenset[int]) -> bool:
    """Tell whether a result takes a batch's place; an error does too."""
    return not (result.is_empty or result.is_end or number in dropped)


def _passable(items: Items, end: SharedEnd, dropped: frozenset[int]) -> bool:
    """Tell whether there is an item that may be passed on."""
    if not items or end.is_over():
        return False
    return end.may_pass() or not _is_batch(*items[0], dropped)


class EvenedIterator(PipelineIterator):
    """An iteration that ends when its ranks have agreed that it does.

    Args:
        pipeline: As for ``PipelineIterator``, with an ``EvenedQueue``.
        epoch: As for ``PipelineIterator``, as are the next two.
        window: How many batches may be in flight.
        patience: How long to wait for a batch.
        readers: How many readers the batches come from.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        epoch: Epoch,
        window: Window,
        patience: Patience,
        *,
        readers: int,
    ) -> None:
        super().__init__(pipeline, epoch, window, patience)
        assert isinstance(pipeline.ready, EvenedQueue)
        self._queue = pipeline.ready
        self._end = self._queue.end
        self._repeats: Iterator[IndexBatch] | None = None
        self._readers = readers
        self._barren = 0  # requests in a row for which there was nothing to repeat

    def _begin(self) -> None:
        self._queue.begin()
        super()._begin()

    def _pop(self) -> tuple[int, BatchResult] | None:
        item = super()._pop()
        if item is None or item[0] != _NEWS:
            return item
        if self._end.is_over():  # of what was read ahead, nothing is delivered
            self._is_exhausted, self._samples = True, 0
            self._in_flight.clear()
        return None

    def _is_over(self) -> bool:
        if self._is_cut or not super()._is_over():
            return super()._is_over()
        end = self._end
        self._queue.end_here()
        for _ in range(end.lacking()):
            if self._in_flight and not self._may_issue(len(self._in_flight)):
                break
            self._repeat()
        return end.is_over() and end.is_agreed

    def _repeat(self) -> None:
        """Request a batch of samples from this rank's beginning."""
        if self._repeats is None:
            first, self._turns = self._progress.bookmark().done, None
            self._queue.restart(first)
            self._repeats = iter(self._epoch.order.batches(first))
        self._send(next(self._repeats), again=True)

    def _account(self, number: int, result: BatchResult) -> None:
        super()._account(number, result)
        is_nothing = result.batch is None and result.error is None
        self._barren = self._barren + 1 if self._repeats and is_nothing else 0
        if self._barren and self._barren >= self._readers:
            self.dismiss()
            raise ValueError(
                f"{self._queue.talk.who} has no samples in this epoch, so it has none "
                f"to repeat while another rank has {self._end.counts.most:,} batches: "
                "use fewer ranks, or more, smaller shards, or tail='drop'"
            )

    # -- waiting for the other ranks ----------------------------------------------

    def _naps(self) -> bool:
        return super()._naps() and not self._end.needs_others()

    def _limit(self) -> float | None:
        limit = super()._limit()
        if not self._end.needs_others():
            return limit
        allowed = self._queue.talk.timeout
        return allowed if limit is None else min(limit, allowed)

    def _time_out(self, waited: float) -> None:
        if not self._end.needs_others():
            if self._timeout is not None:
                super()._time_out(waited)
            return
        ranks = "the other ranks"
        with contextlib.suppress(RuntimeError):  # the store is gone too
            ranks = self._queue.talk.waits_for()
        limit = self._limit() or 0.0
        raise BatchTimeoutError(
            f"DataLoader timed out after {limit:g} seconds: {self._queue.talk.who} has "
            f"delivered {self._end.passed:,} batches, and waits for {ranks} to tell "
            "whether the epoch continues; look at what is wrong there, or allow more "
            "time with the stream's agree(timeout=...)",
            timeout=limit,
            batch=self._next,
        )
