"""A map-style dataset as a stream: in order, or shuffled as a whole.

The order of an epoch is a seeded permutation of the indices, which is computed, not
held. Readers take its positions in turn, so the saved position is an integer, and
nothing is read again on resume.
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

# Most indices looked up at once: half a millisecond, if they are shuffled.
_AT_ONCE = 1 << 10


def from_dataset(
    dataset: Any, *, shuffle: bool = False, seed: int = 0, concurrency: int = 64
) -> Stream[Any]:
    """Return a stream of all samples of a map-style dataset.

    You can add steps to it, mix it and share it between any ranks. A coroutine
    ``__getitem__`` runs on the loop, many at a time; a plain one in one thread, which
    all readers share, because few datasets are thread-safe. ``__getitems__`` is used
    where it is defined. A failed sample is passed on as its error. The length is known,
    so ranks have equal parts, as with torch's ``DistributedSampler``: the loader's
    ``tail`` decides about the last samples.

    Args:
        dataset: It has ``__getitem__`` and ``__len__``; its length is part of a state.
        shuffle: Whether all samples are permuted, differently in each epoch.
        seed: Seed of the permutation.
        concurrency: How many samples of an async dataset are read at a time, by all
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
    """A stream of the samples of a map-style dataset; permuted, if there is a seed."""

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
        get = partial(_awaited if is_async else _item, dataset)
        if is_async and many is None:
            most = -(-self._concurrency // share.per_rank)
            return _AwaitedCursor(
                indices, state, reading, function=get, concurrency=most
            )
        how: Any = {"function": get, "many": many, "thread": listed[id(dataset)]}
        return _ReadCursor(indices, state, reading, **how)

    async def _enter(self, reading: Reading) -> ThreadPoolExecutor | None:
        """Enter what the dataset needs on a loop; return the thread of a plain one."""
        for one in own_datasets(self._dataset):
            await reading.stack.enter_async_context(one.lifespan())
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
        for one in own_datasets(self._dataset):
            fingerprint |= one.fingerprint()
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
    """The indices of one reader's samples, in the order of an epoch."""

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
        self._at: int = state.get("at", 0)
        self._share, self._order, self._length = share, order, length
        self._count, _ = share.parts(length, tail)

    def _make_state(self) -> State:
        return {"at": self._at}

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        return {"at": before["at"] + count}

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (many at once)
        stop = min(self._at + _AT_ONCE, self._count)
        share = self._share
        places = np.arange(self._at, stop) * share.readers + share.reader
        if stop > self._at:  # those past the end are the first ones again
            places %= self._length
        self._at = stop
        found = places if self._order is None else self._order.at(places)
        indices: list[int] = found.tolist()
        return indices


class _PositionCursor(Cursor):
    """Its position is that of a sample in the order, read in advance or not."""

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        return {"up": {"at": before["up"]["at"] + count}}


class _AwaitedCursor(_PositionCursor, MappedAsync):
    kind = "from_dataset"


class _ReadCursor(_PositionCursor, Mapped):
    """Reads several samples at once, in the thread or by ``__getitems__``."""

    kind = "from_dataset"
    many: Callable[[list[int]], Any] | None
    thread: ThreadPoolExecutor | None  # None: it is a coroutine function
    _found: Sequence[Any] = ()  # what the thread returned last

    async def _make(self, limit: int) -> Block:
        block: Any = await self.upstream.pull(limit)
        if not block:
            return []
        if self.thread is None:
            return await self._read(block)
        made = await in_thread(self._apply, block, executor=self.thread)
        # A wrapper of an async dataset may be plain.
        return await self._await(resolved, made) if holds_awaitables(made) else made

    async def _read(self, indices: list[int]) -> list[Any]:
        assert self.many is not None
        try:
            found = [*await resolved(self.many(indices))]
            if len(found) == len(indices):
                return found
        except BaseException as error:
            if ends_task(error):
                raise
        return await self._await(self.function, indices)  # each fails alone

    def _apply(self, block: Any) -> list[Any]:
        found: list[Any] = []
        if self.many is not None:
            with suppress(BaseException):
                found = [*self.many(block)]
        if len(found) != len(block):  # each is read alone
            found = super()._apply(block)
        self._found = found
        return found

    async def _close(self) -> None:
        close_coroutines(self._found)  # those that were not awaited
        await super()._close()


def _item(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except BaseException as error:
        noted(error, f"sample {index:,} of {type(dataset).__name__}")
        raise


async def _awaited(dataset: Any, index: int) -> Any:
    try:
        return await resolved(dataset[index])
    except BaseException as error:
        noted(error, f"sample {index:,} of {type(dataset).__name__}")
        raise
