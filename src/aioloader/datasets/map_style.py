"""Streams of map-style datasets, in order or shuffled as a whole.

The order of a shuffled epoch is a seeded permutation of the indices, computed without
storing it. Readers take its positions in turn, so the saved position is an integer, and
a resume reads no sample again.
"""

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self

import numpy as np

from aioloader._base.awaitables import close_coroutines, holds_awaitables, resolved
from aioloader._base.blocks import Block
from aioloader._base.cancellation import in_thread
from aioloader._base.failures import noted
from aioloader._base.raising import ends_task
from aioloader._order.permutation import ShuffledIndices, keyed_order
from aioloader._order.ranks import ReaderShare, Tail
from aioloader.datasets._checks import check_at_least
from aioloader.datasets._streams.cursors import Cursor, Reading, State, qualname
from aioloader.datasets._streams.steps import Mapped, MappedAsync
from aioloader.datasets.streams import Stream
from aioloader.protocols import Kind, batch_getter, kind_of, own_datasets, reads_async

# Maximum number of indices per block; shuffled ones take half a millisecond.
_MAX_INDICES = 1 << 10


def from_dataset(
    dataset: Any, *, shuffle: bool = False, seed: int = 0, concurrency: int = 64
) -> Stream[Any]:
    """Return a stream of all samples of a map-style dataset.

    The stream can have steps, be mixed, and be divided among any number of ranks. A
    coroutine ``__getitem__`` runs on the loop, for many samples at a time. A plain
    method runs in a thread that readers share, because few datasets are thread-safe.
    ``__getitems__`` is used if the dataset has it. A failed sample is delivered as an
    error. Because the length is known, ranks have equal parts, as with torch's
    ``DistributedSampler``: the loader's ``tail`` decides about the last samples.

    Args:
        dataset: A map-style dataset; a state requires a dataset of equal length.
        shuffle: Whether to permute all samples, differently in each epoch.
        seed: Seed of the permutation.
        concurrency: How many samples of an async dataset to read at a time, in all
            readers of a rank together.

    Raises:
        TypeError: If the dataset is not map-style, or has no length.
        ValueError: If ``concurrency`` is below 1.
    """
    name = type(dataset).__name__
    if kind_of(dataset) is not Kind.MAP or not hasattr(type(dataset), "__len__"):
        raise TypeError(
            f"from_dataset needs a dataset with __getitem__ and __len__, got {name!r}; "
            "for others there are from_iterable and from_async_iterable"
        )
    concurrency = check_at_least(concurrency, 1, "concurrency")
    return _MapStyle(dataset, operator.index(seed) if shuffle else None, concurrency)


class _MapStyle(Stream[Any]):
    """A stream of a map-style dataset's samples, permuted if there is a seed."""

    _tail: Tail = "uneven"

    def __init__(self, dataset: Any, seed: int | None, concurrency: int) -> None:
        super().__init__()
        self._dataset, self._seed = dataset, seed
        self._concurrency = concurrency

    async def open(self, reading: Reading, state: State) -> Cursor:
        dataset, share, listed = self._dataset, reading.share, reading.listed
        if id(dataset) not in listed:
            listed[id(dataset)] = await self._enter(reading)
        order: ShuffledIndices | None = None
        if self._seed is not None:
            order = keyed_order(len(dataset), self._seed, reading.epoch, 0)
        up = state.get("up", {})
        indices = _IndexCursor(up, share, order, len(dataset), self._tail)
        many, is_async = batch_getter(dataset), reads_async(dataset)
        get = partial(_aget if is_async else _get, dataset)
        if is_async and many is None:
            most = -(-self._concurrency // share.per_rank)
            return _AwaitedCursor(
                indices, state, reading, function=get, concurrency=most
            )
        options: Any = {"function": get, "many": many, "thread": listed[id(dataset)]}
        return _ReadCursor(indices, state, reading, **options)

    async def _enter(self, reading: Reading) -> ThreadPoolExecutor | None:
        """Enter the dataset on the loop; return a new thread if the dataset is sync."""
        for owner in own_datasets(self._dataset):
            await reading.stack.enter_async_context(owner.lifespan())
        if reads_async(self._dataset):
            return None
        thread = ThreadPoolExecutor(1, "aioloader-dataset")
        reading.stack.push_async_callback(in_thread, thread.shutdown)
        return thread

    def total(self) -> int:
        return len(self._dataset)

    def evened(self, tail: Tail, *, is_skipped: bool = False) -> Self:  # noqa: ARG002
        return self._clone(_tail=tail)

    def describe(self) -> State:
        fingerprint: State = {}
        for owner in own_datasets(self._dataset):
            fingerprint |= owner.fingerprint()
        return {
            "kind": "dataset",
            "function": qualname(self._dataset),
            "length": len(self._dataset),
            **fingerprint,
            "shuffle": self._seed is not None,
            "seed": self._seed or 0,
        }

    def __repr__(self) -> str:
        return f"stream of {type(self._dataset).__name__}"


class _IndexCursor(Cursor):
    """Cursor over the indices of one reader's samples, in the order of an epoch."""

    overshoots = True

    def __init__(
        self,
        state: State,
        share: ReaderShare,
        order: ShuffledIndices | None,
        length: int,
        tail: Tail,
    ) -> None:
        super().__init__({})
        self._position: int = state.get("at", 0)
        self._share, self._order, self._length = share, order, length
        self._count, _ = share.parts(length, tail)

    def _make_state(self) -> State:
        return {"at": self._position}

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        return {"at": before["at"] + count}

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (many at once)
        stop = min(self._position + _MAX_INDICES, self._count)
        share = self._share
        positions = np.arange(self._position, stop) * share.readers + share.reader
        if stop > self._position:  # positions past the end wrap around
            positions %= self._length
        self._position = stop
        array = positions if self._order is None else self._order.at(positions)
        indices: list[int] = array.tolist()
        return indices


class _PositionCursor(Cursor):
    """Cursor whose state is a position in the order, independent of read-ahead."""

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        return {"up": {"at": before["up"]["at"] + count}}


class _AwaitedCursor(_PositionCursor, MappedAsync):
    kind = "from_dataset"


class _ReadCursor(_PositionCursor, Mapped):
    """Cursor that reads blocks of samples, in a thread or by async ``__getitems__``."""

    kind = "from_dataset"
    many: Callable[[list[int]], Any] | None
    thread: ThreadPoolExecutor | None  # None: `many` is a coroutine function
    _results: Sequence[Any] = ()  # the last block from the thread

    async def _make(self, limit: int) -> Block:
        block: Any = await self.upstream.pull(limit)
        if not block:
            return []
        if self.thread is None:
            return await self._read(block)
        samples = await in_thread(self._apply, block, executor=self.thread)
        if holds_awaitables(samples):  # a plain method may wrap an async dataset
            samples = await self._await(resolved, samples)
        return samples

    async def _read(self, indices: list[int]) -> list[Any]:
        assert self.many is not None
        try:
            samples = [*await resolved(self.many(indices))]
            if len(samples) == len(indices):
                return samples
        except BaseException as error:
            if ends_task(error):
                raise
        return await self._await(self.function, indices)  # each fails alone

    def _apply(self, block: Any) -> list[Any]:
        samples: list[Any] = []
        if self.many is not None:
            with suppress(BaseException):
                samples = [*self.many(block)]
        if len(samples) != len(block):  # each is read alone
            samples = super()._apply(block)
        self._results = samples
        return samples

    async def _close(self) -> None:
        close_coroutines(self._results)  # coroutines never awaited
        await super()._close()


def _get(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except BaseException as error:
        noted(error, f"sample {index:,} of {type(dataset).__name__}")
        raise


async def _aget(dataset: Any, index: int) -> Any:
    try:
        return await resolved(dataset[index])
    except BaseException as error:
        noted(error, f"sample {index:,} of {type(dataset).__name__}")
        raise
