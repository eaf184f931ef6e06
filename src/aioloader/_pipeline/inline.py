"""Epochs that need no hand-over: task done where ``next`` is called.

``InlineIterator`` is torch's plain loop over a sync dataset. ``GatherIterator`` serves
tensors that are in memory: one ``index_select`` per tensor and batch, no per-sample
task, so that even an async consumer is served in place.
"""

import abc
import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from aioloader._observe.stats import Counters
from aioloader._order.indices import IndexBatch
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.host import CallerHost, Host
from aioloader._pipeline.plan import Plan
from aioloader._pipeline.stream import SyncStream
from aioloader._pipeline.waiting import Latch
from aioloader.protocols import Kind

# An async consumer that never has to wait still lets its loop breathe, in seconds.
_BREATH = 0.001
# Rows from which drawing a permutation takes longer than a few milliseconds.
_LONG = 1 << 18


class _LocalSource(abc.ABC):
    """What both sources share: an async consumer is served in place."""

    def __init__(self, counters: Counters, plan: Plan) -> None:
        self.counters = counters
        self._progress = plan.progress
        self._is_closed = False
        self._breathed = time.monotonic()

    @abc.abstractmethod
    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what the iteration holds."""

    def must_close(self) -> bool:
        """Tell whether something must be released when the iterator is dropped."""
        return False

    def is_finished(self) -> bool:
        """Tell whether there is no more to come."""
        return self._is_closed or self._progress.is_over()

    def _next(self, requests: Iterator[IndexBatch]) -> IndexBatch:
        """Return the next request.

        Raises:
            StopIteration: At the end of the epoch.
        """
        try:
            return next(requests)
        except StopIteration:
            self._end()
            raise
        except BaseException:  # of the sampler: there is no more, but that is no end
            self._is_closed = True
            raise

    def _end(self) -> None:
        """Note that the epoch is over, unless it was only closed; close."""
        if not self._is_closed:
            self._progress.finish()
        self.close()

    async def next_async(self) -> Any:
        """Return the next batch; give way to other tasks about every millisecond.

        Raises:
            StopAsyncIteration: At the end.
        """
        now = time.monotonic()
        if now - self._breathed > _BREATH:
            await asyncio.sleep(0)
            self._breathed = time.monotonic()
        try:
            return self.next()
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Let go of what the iteration holds."""
        self.close()


class InlineIterator(_LocalSource):
    """Read, transform and collate in the caller's thread, one batch at a time.

    Args:
        maker: The user's functions, all sync.
        plan: What is to be delivered.
        counters: Where the delivered batches are counted.
        host: Holds the lifespan, leased; None if there is none.
        drop_last: Drop the short last batch of a stream.
    """

    def __init__(
        self,
        maker: BatchMaker,
        plan: Plan,
        counters: Counters,
        host: Host | None,
        *,
        drop_last: bool,
    ) -> None:
        super().__init__(counters, plan)
        self._maker = maker
        self._requests = plan.requests()
        self._dropped = plan.dropped()
        self._host = host
        self._stream: SyncStream | None = None
        if maker.kind is Kind.ITERABLE:
            resume = plan.bookmark.states.get(0)
            self._stream = SyncStream(
                maker, drop_last=drop_last, resume=resume, keys=maker.seeds()
            )
        if isinstance(host, CallerHost):
            try:
                host.open()
            except BaseException:
                host.release()
                raise

    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """
        while True:
            task = self._maker.task(self._next(self._requests))
            with self._maker.around(task):
                result = self._made(task)
            if result.is_end:
                self._progress.end(task.number, task.state)
                self._end()
                raise StopIteration
            self._progress.take(task.number, task.state)
            if not result.is_empty and task.number not in self._dropped:
                self.counters.batches += 1
                return result.batch

    def _made(self, task: BatchTask) -> BatchResult:
        try:
            return self._make(task)
        except BaseException:
            self._progress.fail(task.number, task.state)
            raise

    def _make(self, task: BatchTask) -> BatchResult:
        if self._stream is None:
            self._maker.read(task, time.sleep)
        else:
            self._stream.pull(task)
        if task.result is not None:
            return task.result
        self._maker.apply(task)
        return self._maker.collate(task)

    def must_close(self) -> bool:
        """Tell whether a stream, a lifespan or a thread is open."""
        is_held = self._stream is not None or self._host is not None
        return is_held or self._maker.side_loop.is_open()

    def close(self) -> None:
        """Close the stream, and leave the lifespan after the last iteration."""
        self._requests, self._is_closed = iter(()), True
        self._maker.close()
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            host, self._host = self._host, None
            if host is not None:
                host.release()


class GatherIterator(_LocalSource):
    """Gather each batch of in-memory tensors by an index tensor.

    Args:
        tensors: Strided CPU tensors of one length.
        plan: What is to be delivered, as index tensors or ranges.
        counters: Where the delivered batches are counted.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        plan: Plan,
        counters: Counters,
    ) -> None:
        super().__init__(counters, plan)
        self._tensors = tensors
        self._batches = plan.requests() if plan.bookmark.beyond else plan.batches
        self._opener: CpuThread | None = None
        self._opened = Latch()

    def next(self) -> list[torch.Tensor]:
        """Return the next batch: a fresh tensor for each of the dataset's.

        Raises:
            StopIteration: At the end.
        """
        number, _, chunk, _, _ = self._next(self._batches)
        try:
            if type(chunk) is range:
                batch = [self._copy(tensor, chunk) for tensor in self._tensors]
            else:
                batch = [tensor.index_select(0, chunk) for tensor in self._tensors]
        except BaseException:
            self._progress.fail(number)
            raise
        self.counters.batches += 1
        self._progress.take(number)
        return batch

    async def next_async(self) -> Any:
        """Return the next batch; a long permutation is drawn beside the loop.

        Raises:
            StopAsyncIteration: At the end.
        """
        if len(self._tensors[0]) > _LONG and not self._opened.is_set():
            if self._opener is None:
                self._opener = CpuThread("aioloader-once")
                self._opener.post(self._draw)
                self._opener.stop(self._opened.set)
            await self._opened.wait_async()
        return await super().next_async()

    def _draw(self) -> None:
        """Draw the order, beside the loop; it is kept if nobody waits any more."""
        try:
            first = list(itertools.islice(self._batches, 1))
        except BaseException as error:  # raised by the next step
            self._batches = _raising(error)
        else:
            self._batches = itertools.chain(first, self._batches)

    def _copy(self, tensor: torch.Tensor, rows: range) -> torch.Tensor:
        if rows[-1] >= len(tensor):
            raise IndexError(
                f"index {rows[-1]} is out of bounds for dimension 0 with size "
                f"{len(tensor)}"
            )
        part = tensor[rows.start : rows.stop : rows.step]
        return part.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Let go of the order: the iteration is over."""
        self._batches, self._is_closed = iter(()), True


def _raising(error: BaseException) -> Iterator[IndexBatch]:
    raise error
    yield
