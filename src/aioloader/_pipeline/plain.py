"""``Feed``, from which iterators take batches, and the simplest feed, ``PlainFeed``.

``PlainFeed`` makes batches of a map-style dataset on demand, in the calling thread, as
torch does. ``inline`` has more feeds without a pipeline; ``ahead_feed`` reads ahead.
"""

import abc
import asyncio
import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from aioloader._base.awaitables import close_coroutines, holds_awaitables
from aioloader._base.blocks import FailedSample
from aioloader._base.failures import Failure, noted
from aioloader._base.forks import fork_safe
from aioloader._base.raising import raisable
from aioloader._base.records import (
    Counters,
    RecordTuple,
    is_clocked,
    spent,
    thread_clocks,
)
from aioloader._collate.collate import collated
from aioloader._order.epoch import UNDER_WAY, Epoch
from aioloader._order.indices import IndexBatch
from aioloader._pipeline.awaiting import SideLoop, refuse_coroutines
from aioloader._pipeline.batch_task import stage_note
from aioloader._transport.slots import SlotPool
from aioloader.errors import LoaderClosedError

if TYPE_CHECKING:
    from aioloader._order.orders import ReaderTurns
    from aioloader._pipeline.batch_task import BatchResult

INTERRUPTS = KeyboardInterrupt, SystemExit
NOTHING: Final = object()
"""Returned instead of a batch: none is ready."""
# Seconds after which a task that never waits yields to the other tasks of its loop.
YIELD_AFTER = 0.001


class Feed(abc.ABC):
    """A source of one epoch's batches, which draws requests and counts deliveries."""

    _as_lists: bool = True  # whether requests have lists of indices

    def __init__(self, epoch: Epoch) -> None:
        self.counters: Counters = epoch.counters
        self.is_finished: bool = False  # there are no more batches
        self._drawn = 0.0  # seconds of drawing since a batch was last delivered
        self._was_interrupted = False  # later steps raise
        self.epoch = epoch
        self._records = epoch.counters.records
        self._progress = epoch.progress
        self._requests: Iterator[IndexBatch] = epoch.requests(as_lists=self._as_lists)
        self._lock = fork_safe(threading.RLock())
        self._next = epoch.start.done  # the number of the next request
        self._yielded = 0.0  # when the consumer's task last yielded to other tasks
        self._drawing: Future[list[IndexBatch]] | None = None  # a request in a thread
        # For streams: numbers of batches not delivered again, and the order of readers.
        self._dropped: frozenset[int] = epoch.dropped
        self._turns: ReaderTurns | None = epoch.turns

    def poll(self) -> Any:
        """Return the next batch, or ``NOTHING`` if ``next_async`` must be awaited."""
        waits = (
            perf_counter() - self._yielded > YIELD_AFTER or self._drawing is not None
        )
        if not (waits or self.epoch.draws_slowly(self._next)):
            with contextlib.suppress(StopIteration), self._lock:
                return self.next()
        return NOTHING

    @abc.abstractmethod
    def next(self) -> Any:
        """Return the next batch, or raise ``StopIteration``."""

    async def next_async(self) -> Any:
        """Return the next batch; yield to other tasks about every millisecond.

        A long permutation is drawn in a thread, and kept if the step is cancelled.
        """
        if perf_counter() - self._yielded > YIELD_AFTER:
            await asyncio.sleep(0)
            self._yielded = perf_counter()
        is_free = not (self.is_finished or self._drawing)
        if is_free and self.epoch.draws_slowly(self._next):
            thread = ThreadPoolExecutor(1, "aioloader-once")
            self._drawing = thread.submit(list, islice(self._requests, 1))
            thread.shutdown(wait=False)
            self._requests = _after(self._drawing, self._requests)
        if self._drawing is not None:
            if not self._drawing.done():
                await asyncio.wait([asyncio.wrap_future(self._drawing)])
            self._drawing = None
        # No await from here on: another task could take the batch.
        try:
            with self._lock:  # a loop in another thread may iterate, too
                return self.next()
        except StopIteration:
            raise StopAsyncIteration from None

    def open(self, *, requests: bool = True) -> None:  # noqa: B027  (a default)
        """Start workers before the first step; if ``requests``, request batches."""

    def _draw(self) -> IndexBatch:
        """Return the next request; close the feed if there is none or drawing fails."""
        try:
            return next(self._requests)
        except BaseException as error:
            if isinstance(error, StopIteration):
                self._check()
                if not self.is_finished:
                    self._progress.is_over = True
            self.close()
            self._was_interrupted = isinstance(error, INTERRUPTS)
            self.epoch.check_failures()
            raise

    def _check(self) -> None:
        """Raise if an interrupt has ended the iteration."""
        if self._was_interrupted:
            text = "the loader was interrupted; start a new iteration"
            raise LoaderClosedError(text) from None

    def _deliver(self, batch: Any, state: Any, record: RecordTuple) -> None:
        """Count and record a delivered batch, and advance the epoch's progress."""
        number = record[0]
        self.counters.batches += 1
        if is_clocked(number):
            self.counters.weigh(batch)
        self._records.append(record)
        self._progress.take(number, state)  # last: an interrupt would lose the batch

    def _accept(
        self, number: int, result: "BatchResult", asked: float, taken: float
    ) -> bool:
        """Record a result; return whether it has a batch, or raise its error."""
        progress, state, error = self._progress, result.state, result.error
        is_wanted = number not in self._dropped
        if result.dataset is not None:
            progress.note_dataset(*result.dataset)
        if error is not None:
            progress.fail(number, state)
        elif result.is_end:
            progress.end(number, state)
        elif result.is_empty or not is_wanted:
            progress.take(number, state)
        else:
            record = number, asked, taken, result.worker, result.size, result.made
            drawn, self._drawn = self._drawn, 0.0
            self._deliver(result.batch, state, (*record, drawn))
            return True
        if self._turns is not None and result.has_ended:
            progress.end_reader(number)
        result.error = None
        try:
            if error is not None and is_wanted:
                raise raisable(error, "user code")
        finally:
            del error  # its traceback has this frame
        return False

    def dismiss(self) -> None:  # noqa: B027  (a default)
        """Start to end the iteration; ``close`` and ``aclose`` wait for its end."""

    def close(self) -> None:
        """End the iteration, and wait until everything is released."""
        self._requests, self.is_finished = iter(()), True
        self._was_interrupted = False

    async def aclose(self) -> None:
        """End the iteration like ``close``, without blocking the event loop."""
        self.close()

    def abandon(self) -> None:
        """End the iteration of an iterator that was dropped or is open at exit."""
        self.close()


def _after(
    drawing: "Future[list[IndexBatch]]", requests: Iterator[IndexBatch]
) -> Iterator[IndexBatch]:
    """Yield the request that a thread draws, then the items of ``requests``."""
    yield from drawing.result()
    yield from requests


class PlainFeed(Feed):
    """A feed that reads and collates each batch in the caller's thread, as torch does.

    Big batches are written into ``slots``. If ``__getitem__`` returns awaitables, up to
    ``concurrency`` of a batch are awaited at once.
    """

    def __init__(
        self,
        epoch: Epoch,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        slots: SlotPool,
        *,
        batched: bool,
        concurrency: int,
    ) -> None:
        super().__init__(epoch)
        self._get = dataset.__getitem__
        self._collate_fn = collate_fn
        self._batched = batched
        self._slots = slots
        self._concurrency = concurrency
        self._side_loop: SideLoop | None = None
        self._last_seconds = 1.0  # of making the latest batch

    def next(self) -> Any:
        asked = perf_counter()
        number, _, indices, _, state = self._draw()
        began, self._next = perf_counter(), number + 1
        clocks = thread_clocks(number, self._last_seconds)
        samples: list[Any] = []
        stage, outer = "fetch", UNDER_WAY.get()
        try:
            UNDER_WAY.set(self.counters)
            for index in indices:
                samples.append(self._get(index))  # noqa: PERF401  (kept if one fails)
            if holds_awaitables(samples):
                samples = self._awaited(samples)
            stage, read = "collate", perf_counter()
            own = samples if self._batched else samples[0]
            batch = collated(self._slots.allocate, self._collate_fn, own)
            if isinstance(batch, types.CoroutineType):
                refuse_coroutines(batch, "collate_fn")
        except BaseException as error:
            close_coroutines(samples)
            self._progress.fail(number, state)
            raise self._noted(stage, number, indices, len(samples), error)  # noqa: B904
        finally:
            UNDER_WAY.set(outer)
        cpu, delayed = (0.0, 0.0) if clocks is None else spent(clocks)
        taken = perf_counter()
        self._last_seconds = taken - began
        self.counters.waited += taken - asked
        made = began, read, read, read, taken, 0.0, cpu, delayed
        record = number, asked, taken, 0, len(indices), made, began - asked
        self._deliver(batch, state, record)
        return batch

    def _noted(
        self, stage: str, number: int, indices: Any, read: int, error: BaseException
    ) -> BaseException:
        """Return the error to raise for ``error``, with a note on stage and batch."""
        source = "collate_fn" if stage == "collate" else "the dataset"
        error, epoch = raisable(error, source), self.epoch.number
        note = stage_note(stage, epoch, number, indices)
        if stage == "fetch" and read < len(indices):  # the sample is known
            index = indices[read]
            failure: Any = Failure(stage, epoch, number, read, index, error)  # type: ignore[arg-type]
            note = failure.describe()
        return noted(error, note)

    def _awaited(self, samples: list[Any]) -> list[Any]:
        """Await the results of a plain ``__getitem__``, or raise the first error."""
        if self._side_loop is None:
            self._side_loop = SideLoop()
        awaited = self._side_loop.resolve(samples, self._concurrency)
        for position, sample in enumerate(awaited):
            if type(sample) is FailedSample:
                del samples[position:]  # for the error's note
                raise sample.error
        return awaited

    def close(self) -> None:
        super().close()
        if self._side_loop is not None:
            self._side_loop.close()
