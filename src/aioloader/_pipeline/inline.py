"""The other iterations without a pipeline: streams, transforms, tensors in memory.

``InlineIterator`` adds streams, transforms and failures to ``PlainIterator``.
``GatherIterator`` serves tensors in memory: one ``index_select`` per tensor and batch
and no work per sample, which is fast enough for an async consumer's loop.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from aioloader._observe.records import is_clocked
from aioloader._order.epoch import Epoch
from aioloader._order.indices import IndexBatch
from aioloader._order.raising import raisable
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.host import CallerHost, Host
from aioloader._pipeline.plain import LocalIterator
from aioloader._pipeline.stream import SyncStream
from aioloader._pipeline.waiting import Latch
from aioloader.protocols import Kind

if TYPE_CHECKING:
    from aioloader._pipeline.batch_task import BatchTask


class InlineIterator(LocalIterator):
    """Read, transform and collate in the caller's thread, one batch at a time.

    Args:
        epoch: The epoch to deliver.
        maker: The user's functions, all sync.
        host: The leased host of the lifespan; None if there is none.
    """

    def __init__(self, epoch: Epoch, maker: BatchMaker, host: Host | None) -> None:
        super().__init__(epoch, epoch.requests())
        self._maker = maker
        self._dropped = epoch.dropped()
        self._host = host
        self._stream: SyncStream | None = None
        if maker.kind is Kind.ITERABLE:
            resume = epoch.bookmark.states.get(0)
            self._stream = SyncStream(maker, resume=resume, keys=maker.seeds())
        pull = self._stream and self._stream.pull
        self._read: Callable[[BatchTask], None] = pull or maker.read
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
            result = self._maker.make(task, self._read)
            if result.error is not None:
                self._progress.fail(task.number, task.state)
                failed, result.error = result.error, None
                try:
                    raise raisable(failed, "user code")
                finally:
                    del failed  # its traceback has this frame
            if result.is_end:
                self._progress.end(task.number, task.state)
                self._end(is_over=True)
                raise StopIteration
            is_delivered = not result.is_empty and task.number not in self._dropped
            self.counters.batches += is_delivered
            asked = asked or task.began
            if is_delivered:
                if is_clocked(task.number):
                    self.counters.weigh(result.batch)
                taken = task.collated
                self.counters.waited += taken - asked
                self._records.append(
                    (task.number, asked, taken, 0, task.size, task.made())
                )
            self._progress.take(task.number, task.state)
            if is_delivered:
                return result.batch

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
        if is_clocked(number):
            cpu = taken - asked  # copying memory never waits
            self.counters.weigh(batch)
        made = asked, taken, taken, taken, taken, 0.0, cpu, 0.0
        self._records.append((number, asked, taken, 0, chunk_size, made))
        self._progress.take(number)
        return batch

    def undrawn(self) -> Latch | None:
        """Return what is set when a thread has drawn the next request, or None."""
        if self._drawing is None:
            if self._is_closed or not self.epoch.draws_long(self._next):
                return None
            self._drawing = _Drawing(self._requests)
        return None if self._drawing.ended.is_set() else self._drawing.ended

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
