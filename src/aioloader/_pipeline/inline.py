"""Epochs that need no hand-over: work done where ``next`` is called.

``InlineSource`` is torch's plain loop over a sync dataset. ``GatherSource`` serves
tensors that are in memory: one ``index_select`` per tensor and batch, no per-sample
work, so that even an async consumer is served in place.
"""

import abc
import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from aioloader._observe.stats import Counters
from aioloader._order.indices import Chunk
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.home import Home, InlineHome, Keeper
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.stream import SyncStream
from aioloader._pipeline.waiting import Latch
from aioloader._pipeline.work import Outcome, Work
from aioloader.protocols import Kind

# An async consumer that never has to wait still lets its loop breathe, in seconds.
_BREATH = 0.001
# Rows from which drawing a permutation takes longer than a few milliseconds.
_LONG = 1 << 18


class _LocalSource(abc.ABC):
    """What both sources share: an async consumer is served in place."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
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


class InlineSource(_LocalSource):
    """Read, transform and collate in the caller's thread, one batch at a time.

    Args:
        recipe: The user's functions, all sync.
        requests: Index batches.
        counters: Where the delivered batches are counted.
        home: The open dataset, leased; None if it needs no opening.
        drop_last: Drop the short last batch of a stream.
    """

    def __init__(
        self,
        recipe: Recipe,
        requests: Iterator[Any],
        counters: Counters,
        home: Home | None,
        *,
        drop_last: bool,
    ) -> None:
        super().__init__(counters)
        self._recipe = recipe
        self._requests = requests
        self._home = home
        self._number = 0
        self._stream: SyncStream | None = None
        if recipe.kind is Kind.ITERABLE:
            self._stream = SyncStream(recipe, drop_last=drop_last)
        if isinstance(home, InlineHome):
            try:
                home.open()
            except BaseException:
                home.dismiss(Keeper())
                raise

    def next(self) -> Any:
        """Return the next batch, made now.

        Raises:
            StopIteration: At the end.
        """
        while True:
            try:
                work = self._recipe.work(self._number, next(self._requests))
            except StopIteration:
                self.close()
                raise
            self._number += 1
            with self._recipe.around(work):
                outcome = self._make(work)
            if outcome.is_end:
                self.close()
                raise StopIteration
            if not outcome.is_empty:
                self._counters.batches += 1
                return outcome.batch

    def _make(self, work: Work) -> Outcome:
        if self._stream is None:
            self._recipe.read(work, time.sleep)
        else:
            self._stream.pull(work)
        if work.outcome is not None:
            return work.outcome
        self._recipe.apply(work)
        return self._recipe.collate(work)

    def must_close(self) -> bool:
        """Tell whether a stream or a dataset is open."""
        return self._stream is not None or self._home is not None

    def close(self) -> None:
        """Close the stream, and leave the dataset if this was its last iteration."""
        self._requests = iter(())
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            home, self._home = self._home, None
            if home is not None:
                home.dismiss(Keeper())


class GatherSource(_LocalSource):
    """Gather each batch of in-memory tensors by an index tensor.

    Args:
        tensors: Strided CPU tensors of one length.
        chunks: Index tensors or ranges, one per batch.
        counters: Where the delivered batches are counted.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        chunks: Iterator[Chunk],
        counters: Counters,
    ) -> None:
        super().__init__(counters)
        self._tensors = tensors
        self._chunks = chunks
        self._opener: CpuThread | None = None
        self._opened = Latch()

    def next(self) -> list[torch.Tensor]:
        """Return the next batch: a fresh tensor for each of the dataset's.

        Raises:
            StopIteration: At the end.
        """
        chunk = next(self._chunks)
        self._counters.batches += 1
        if type(chunk) is range:
            return [self._copy(tensor, chunk) for tensor in self._tensors]
        return [tensor.index_select(0, chunk) for tensor in self._tensors]

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
            first = list(itertools.islice(self._chunks, 1))
        except BaseException as error:  # raised by the next step
            self._chunks = _raising(error)
        else:
            self._chunks = itertools.chain(first, self._chunks)

    def _copy(self, tensor: torch.Tensor, rows: range) -> torch.Tensor:
        if rows.stop > len(tensor):
            raise IndexError(
                f"index {rows.stop - 1} is out of bounds for dimension 0 with size "
                f"{len(tensor)}"
            )
        part = tensor[rows.start : rows.stop]
        return part.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Let go of the order: the iteration is over."""
        self._chunks = iter(())


def _raising(error: BaseException) -> Iterator[Chunk]:
    raise error
    yield
