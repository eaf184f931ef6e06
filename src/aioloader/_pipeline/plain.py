"""Iterations without a pipeline: ``next`` makes the batch in the calling thread.

``PlainIterator`` is torch's loop over a map-style dataset; ``inline`` has the others.
"""

import abc
import asyncio
import time
import types
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from aioloader._collate.collate import lending
from aioloader._observe.records import Counters, spent, thread_clocks
from aioloader._order.blocks import Bad
from aioloader._order.epoch import Epoch
from aioloader._order.failures import Failure, noted
from aioloader._order.indices import IndexBatch
from aioloader._order.orders import StreamOrder
from aioloader._order.raising import raisable
from aioloader._order.ranks import WHOLE
from aioloader._pipeline.awaiting import (
    SideLoop,
    close_coroutines,
    holds_awaitables,
    refuse_coroutines,
)
from aioloader._pipeline.batch_task import place_of
from aioloader._pipeline.waiting import Latch
from aioloader._transport.slots import SlotPool

# Seconds after which an async consumer that never waits yields to its loop.
_YIELD_EVERY = 0.001


class LocalIterator(abc.ABC):
    """Base of these iterators: async consumers are served on their own loop.

    Args:
        epoch: The epoch to deliver; its progress is updated here.
        requests: The epoch's requests.

    Attributes:
        must_close: Whether something must be released when the iterator is dropped.
        pipeline: None: batches are made by ``next``.
    """

    must_close = False
    pipeline = None

    def __init__(self, epoch: Epoch, requests: Iterator[IndexBatch]) -> None:
        self.epoch = epoch
        self.counters: Counters = epoch.counters
        self._records = epoch.counters.records
        self._progress = epoch.progress
        self._requests = requests
        self._is_closed = False
        self._yielded = time.monotonic()

    @abc.abstractmethod
    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """

    def is_finished(self) -> bool:
        """Tell whether there are no more batches."""
        return self._is_closed or self._progress.is_over

    def _end(self, *, is_over: bool) -> None:
        """Close after the last request, at the epoch's end or a sampler's error."""
        if is_over and not self._is_closed:
            self._progress.finish()
        self.close()

    async def next_async(self) -> Any:
        """Return the next batch; yield to other tasks about every millisecond.

        Raises:
            StopAsyncIteration: At the end.
        """
        now = time.monotonic()
        if now - self._yielded > _YIELD_EVERY:
            await asyncio.sleep(0)
            self._yielded = time.monotonic()
        # Another task may take a batch during each wait; no await follows this loop.
        while (drawn := self.undrawn()) is not None:
            await drawn.wait_async()
        try:
            return self.next()
        except StopIteration:
            raise StopAsyncIteration from None

    def undrawn(self) -> Latch | None:
        """Return what is set when a thread has drawn the next request, or None."""
        return None

    def close(self) -> None:
        """Release what the iteration holds."""
        self._requests, self._is_closed = iter(()), True

    async def aclose(self) -> None:
        """Release what the iteration holds."""
        self.close()


class ClosedIterator(LocalIterator):
    """No batches: the iteration was closed before its first step."""

    def __init__(self) -> None:
        super().__init__(Epoch(0, StreamOrder(None, WHOLE)), iter(()))

    def next(self) -> Any:
        """End.

        Raises:
            StopIteration: At once.
        """
        raise StopIteration


class PlainIterator(LocalIterator):
    """Read and collate in the caller's thread, one batch at a time, as torch does.

    Args:
        epoch: The epoch to deliver.
        dataset: Map-style and plain.
        collate_fn: Turns samples (one sample if not ``batched``) into a batch.
        slots: The slots that big batches are written into.
        batched: Whether samples are gathered into batches.
        concurrency: Limit on concurrent awaitables of one batch, if plain code
            returns awaitables.
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
        super().__init__(epoch, epoch.requests())
        self._get = dataset.__getitem__
        self._collate_fn = collate_fn
        self._batched = batched
        self._slots = slots
        self._concurrency = concurrency
        self._side_loop: SideLoop | None = None
        self._took = 1.0

    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """
        asked = perf_counter()
        try:
            number, _, indices, _, state = next(self._requests)
        except BaseException as error:
            self._end(is_over=isinstance(error, StopIteration))
            raise
        clocks = thread_clocks(number, self._took)
        samples: list[Any] = []
        stage = "fetch"
        try:
            for index in indices:
                samples.append(self._get(index))  # noqa: PERF401  (kept if one fails)
            if holds_awaitables(samples):
                samples = self._awaited(samples)
            stage, read = "collate", perf_counter()
            with lending(self._slots):
                batch = self._collate_fn(samples if self._batched else samples[0])
            if isinstance(batch, types.CoroutineType):
                refuse_coroutines(batch, "collate_fn")
        except BaseException as error:
            close_coroutines(samples)
            self._progress.fail(number, state)
            raise self._noted(stage, number, indices, len(samples), error)  # noqa: B904
        self.counters.batches += 1
        cpu, delayed = spent(clocks)
        if clocks is not None:
            self.counters.weigh(batch)
        taken = perf_counter()
        self._took = taken - asked
        self.counters.waited += self._took
        made = asked, read, read, read, taken, 0.0, cpu, delayed
        self._records.append((number, asked, taken, 0, len(indices), made))
        self._progress.take(number, state)
        return batch

    def _noted(
        self, stage: str, number: int, indices: Any, read: int, error: BaseException
    ) -> BaseException:
        """Return the error to raise, with a note that names its stage and batch."""
        epoch = self.epoch.number
        if stage == "collate":
            error = raisable(error, "collate_fn")
            return noted(error, place_of(stage, epoch, number, indices))
        error = raisable(error, "the dataset")
        if read < len(indices):
            index = indices[read]
            failure: Any = Failure(stage, epoch, number, read, index, error)  # type: ignore[arg-type]
            where = failure.describe()
        else:  # raised by one of several coroutines
            where = place_of(stage, epoch, number, indices)
        return noted(error, where)

    def _awaited(self, samples: list[Any]) -> list[Any]:
        """Await what a plain ``__getitem__`` has returned.

        Raises:
            Exception: The error of the first sample that failed.
        """
        if self._side_loop is None:
            self._side_loop, self.must_close = SideLoop(), True
        found = self._side_loop.resolve(samples, self._concurrency)
        for position, sample in enumerate(found):
            if type(sample) is Bad:
                del samples[position:]  # the error names the next one
                raise sample.error
        return found

    def close(self) -> None:
        """Release the thread that awaits what plain code returned, if any."""
        super().close()
        if self._side_loop is not None:
            self._side_loop.close()
