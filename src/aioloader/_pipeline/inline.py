"""Feeds that make batches in the caller's thread, without a pipeline."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from aioloader._base.records import is_clocked
from aioloader._order.epoch import UNDER_WAY, Epoch
from aioloader._order.indices import IndexBatch
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.plain import Feed
from aioloader._pipeline.runner import CallerRunner, Runner
from aioloader._pipeline.stream import StreamBatcher
from aioloader.protocols import Kind

if TYPE_CHECKING:
    from aioloader._pipeline.batch_task import BatchTask


class InlineFeed(Feed):
    """A feed that makes each batch in the caller's thread, for plain user code.

    The feed owns a lease on ``runner`` (if given), which enters the lifespan.
    """

    def __init__(self, epoch: Epoch, maker: BatchMaker, runner: Runner | None) -> None:
        super().__init__(epoch)
        self._maker = maker
        self._runner = runner
        self._stream: StreamBatcher | None = None
        self._read: Callable[[BatchTask], None] = maker.read
        if maker.kind is Kind.ITERABLE:
            resume = epoch.start.states.get(0)
            self._stream = StreamBatcher(maker, resume=resume, keys=maker.reader_keys())
            self._read = self._stream.pull
        if isinstance(runner, CallerRunner):
            try:
                runner.open()
            except BaseException as error:  # raised by the first step
                runner.release()
                self._runner, self._requests = None, _failing(error)

    def next(self) -> Any:
        asked = began = perf_counter()
        while True:
            task, outer = self._maker.task(self._draw()), UNDER_WAY.get()
            try:
                result = self._maker.make(task, self._read)
            finally:
                UNDER_WAY.set(outer)  # an interrupt may have skipped the maker's reset
            result.state, result.size, result.made = task.state, task.size, task.made()
            taken = perf_counter()
            self._drawn += max(0.0, task.began - began)
            self.counters.waited += taken - began
            began = taken
            if result.is_end:
                self._requests = iter(())
            if self._accept(task.number, result, asked, taken):
                return result.batch

    def close(self) -> None:
        super().close()
        self._maker.side_loop.close()
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.release()


class GatherFeed(Feed):
    """A feed that gathers rows of strided CPU tensors, fast enough for event loops."""

    _as_lists = False

    def __init__(self, tensors: tuple[torch.Tensor, ...], epoch: Epoch) -> None:
        super().__init__(epoch)
        self._tensors = tensors

    def next(self) -> list[torch.Tensor]:
        asked = perf_counter()
        number, _, chunk, _, _ = self._draw()
        began = perf_counter()
        self._next = number + 1
        try:
            if type(chunk) is range:
                batch = [_copied(tensor, chunk) for tensor in self._tensors]
            else:
                batch = [tensor.index_select(0, chunk) for tensor in self._tensors]
        except BaseException as error:
            self._progress.fail(number)
            if isinstance(error, IndexError):
                # Index one by one: then torch's error names the index.
                [tensor[index] for tensor in self._tensors for index in chunk]
            raise
        taken = perf_counter()
        self.counters.waited += taken - asked
        cpu = taken - began if is_clocked(number) else 0.0  # a copy never waits
        made = began, taken, taken, taken, taken, 0.0, cpu, 0.0
        size = len(chunk) if type(chunk) is range else chunk.numel()
        record = number, asked, taken, 0, size, made, began - asked
        self._deliver(batch, None, record)
        return batch


def _failing(error: BaseException) -> Iterator[IndexBatch]:
    """Return an iterator whose first step raises ``error``."""
    raise error
    yield


def _copied(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    if rows[-1] >= len(tensor):
        raise IndexError(
            f"index {rows[-1]} is out of bounds for dimension 0 with size {len(tensor)}"
        )
    part = tensor[rows.start : rows.stop : rows.step]
    return part.clone(memory_format=torch.contiguous_format)
