"""Iterations without a pipeline: ``next`` makes the batch in the calling thread.

``PlainIterator`` is torch's loop over a map-style dataset, ``InlineIterator`` adds
streams, transforms and failures. ``GatherIterator`` serves tensors in memory: one
``index_select`` per tensor and batch and no work per sample, which is fast enough for
an async consumer's loop.
"""

import abc
import asyncio
import time
import types
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from aioloader._collate.collate import lending
from aioloader._observe.records import CLOCKED, Counters, spent, thread_clocks
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
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask, place_of
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.host import CallerHost, Host
from aioloader._pipeline.stream import SyncStream
from aioloader._pipeline.waiting import Latch
from aioloader._transport.slots import SlotPool
from aioloader.protocols import Kind

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
        while (drawing := self.undrawn()) is not None:
            await drawing.ended.wait_async()
        try:
            return self.next()
        except StopIteration:
            raise StopAsyncIteration from None

    def undrawn(self) -> "_Drawing | None":
        """Return the drawing of the next request, if a thread must draw it."""
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


class InlineIterator(LocalIterator):
    """Read, transform and collate in the caller's thread, one batch at a time.

    Args:
        epoch: The epoch to deliver.
        maker: The user's functions, all sync.
        host: The leased host of the lifespan; None if there is none.
        drop_last: Drop the short last batch of a stream.
    """

    def __init__(
        self, epoch: Epoch, maker: BatchMaker, host: Host | None, *, drop_last: bool
    ) -> None:
        super().__init__(epoch, epoch.requests())
        self._maker = maker
        self._dropped = epoch.dropped()
        self._host = host
        self._stream: SyncStream | None = None
        if maker.kind is Kind.ITERABLE:
            resume = epoch.bookmark.states.get(0)
            self._stream = SyncStream(
                maker, drop_last=drop_last, resume=resume, keys=maker.seeds()
            )
        self.must_close = True
        if isinstance(host, CallerHost):
            try:
                host.open()
            except BaseException as error:  # raised by the first step
                host.release()
                self._host, self._requests = None, _failing(error)

    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """
        asked = 0.0
        while True:
            try:
                request = next(self._requests)
            except BaseException as error:
                self._end(is_over=isinstance(error, StopIteration))
                raise
            task = self._maker.task(request)
            clocks = thread_clocks(task.number)
            try:
                with self._maker.around(task):
                    result = self._made(task)
            except BaseException as error:
                self._progress.fail(task.number, task.state)
                raise raisable(error, "user code")  # noqa: B904  (it keeps its cause)
            if result.is_end:
                self._progress.end(task.number, task.state)
                self._end(is_over=True)
                raise StopIteration
            is_delivered = not result.is_empty and task.number not in self._dropped
            self.counters.batches += is_delivered
            asked = asked or task.began
            if is_delivered:
                task.spent = spent(clocks)
                if clocks is not None:
                    self.counters.weigh(result.batch)
                taken = task.collated
                self.counters.waited += taken - asked
                self._records.append(
                    (task.number, asked, taken, 0, task.size, task.made())
                )
            self._progress.take(task.number, task.state)
            if is_delivered:
                return result.batch

    def _made(self, task: BatchTask) -> BatchResult:
        if self._stream is None:
            self._maker.read(task, time.sleep)
        else:
            self._stream.pull(task)
        if task.result is not None:
            return task.result
        self._maker.apply(task)
        return self._maker.collate(task)

    def close(self) -> None:
        """Close the stream, and leave the lifespan after the last iteration."""
        super().close()
        self._maker.close()
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            host, self._host = self._host, None
            if host is not None:
                host.release()


class GatherIterator(LocalIterator):
    """Gather each batch of in-memory tensors by an index tensor.

    Args:
        tensors: Strided CPU tensors of equal length.
        epoch: The epoch to deliver; its order is an ``IndexOrder``.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], epoch: Epoch) -> None:
        super().__init__(epoch, epoch.requests(as_lists=False))
        self._tensors = tensors
        self._next = epoch.bookmark.done
        self._drawing: _Drawing | None = None

    def next(self) -> list[torch.Tensor]:
        """Return the next batch: a new tensor for each of the dataset's.

        Raises:
            StopIteration: At the end.
        """
        asked = perf_counter()
        try:
            drawing, self._drawing = self._drawing, None
            number, _, chunk, _, _ = (
                next(self._requests) if drawing is None else drawing.result()
            )
        except BaseException as error:
            self._end(is_over=isinstance(error, StopIteration))
            raise
        self._next = number + 1
        try:
            if type(chunk) is range:
                batch = [_copied(tensor, chunk) for tensor in self._tensors]
            else:
                batch = [tensor.index_select(0, chunk) for tensor in self._tensors]
        except BaseException:
            self._progress.fail(number)
            raise
        self.counters.batches += 1
        taken = perf_counter()
        self.counters.waited += taken - asked
        chunk_size = len(chunk) if type(chunk) is range else chunk.numel()
        cpu = 0.0
        if number % CLOCKED == 1:
            cpu = taken - asked  # copying memory never waits
            self.counters.weigh(batch)
        made = asked, taken, taken, taken, taken, 0.0, cpu, 0.0
        self._records.append((number, asked, taken, 0, chunk_size, made))
        self._progress.take(number)
        return batch

    def undrawn(self) -> "_Drawing | None":
        """Return the drawing of the next request, in a thread if it takes long."""
        if self._drawing is None:
            if self._is_closed or not self.epoch.draws_long(self._next):
                return None
            self._drawing = _Drawing(self._requests)
        return None if self._drawing.ended.is_set() else self._drawing

    def close(self) -> None:
        """Release what the iteration holds."""
        super().close()
        self._drawing = None


class _Drawing:
    """A request drawn in a thread; kept for the next step if this one is cancelled."""

    def __init__(self, requests: Iterator[IndexBatch]) -> None:
        self.ended: Latch = Latch()
        self._requests = requests
        self._drawn: IndexBatch | None = None
        self._error: BaseException | None = None
        thread = CpuThread("aioloader-once")
        thread.post(self._draw)
        thread.stop(self.ended.set)

    def result(self) -> IndexBatch:
        """Wait for the request and return it, or raise the error of drawing it."""
        self.ended.wait()
        if self._drawn is None:
            assert self._error is not None
            raise self._error
        return self._drawn

    def _draw(self) -> None:
        try:
            self._drawn = next(self._requests)
        except BaseException as error:  # raised by the step
            self._error = error


def _failing(error: BaseException) -> Iterator[IndexBatch]:
    """Raise an error instead of the first request."""
    raise error
    yield


def _copied(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    if rows[-1] >= len(tensor):
        raise IndexError(
            f"index {rows[-1]} is out of bounds for dimension 0 with size {len(tensor)}"
        )
    part = tensor[rows.start : rows.stop : rows.step]
    return part.clone(memory_format=torch.contiguous_format)
