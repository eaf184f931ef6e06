"""Streams: datasets that are read from the front, shard by shard, and made of steps.

A stream is a description; iterating opens a cursor over it. Its methods return new
streams. The order is a function of the seed, the epoch and the numbers of lanes and of
readers; its state is a position, small and independent of what was read ahead. Memory
holds what is read ahead (``max_bytes``) and, per reader, two windows of each
``shuffle``.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

from torch.utils.data import Dataset, get_worker_info

from aioloader._observe.warnings import warn
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.shares import Deal
from aioloader._order.stream_states import check_version
from aioloader.datasets._streams.cursors import (
    Batched,
    Cursor,
    Filtered,
    Mapped,
    MappedAsync,
    Skipped,
    State,
    Taken,
)
from aioloader.datasets._streams.descriptions import name_of
from aioloader.datasets._streams.iterators import Reading, StreamIterator
from aioloader.datasets._streams.mix import Mixed, Until
from aioloader.datasets._streams.windows import Shuffled
from aioloader.protocols import OwnStream, is_async_function

if TYPE_CHECKING:
    import os

    StrPath: TypeAlias = str | os.PathLike[str]

Sample_co = TypeVar("Sample_co", covariant=True)
# Default bound of a cache, in bytes.
CACHE_BYTES = 10 << 30


class Stream(Dataset[Sample_co], OwnStream):
    """A dataset for ``async for``; the base of its kinds and steps.

    A loader reads it on its own loop, one block per batch; with ``fetch="workers"``
    each worker reads its share. All ranks read all of it, unless the loader's ``rank``
    or ``shard`` says otherwise.
    """

    # Without this, `for x in stream` would ask for `__getitem__`, and never end.
    __iter__: ClassVar[None] = None

    def __init__(self) -> None:
        self._epoch = 0
        self._is_chosen = False
        self.ranks = None
        self.num_readers: int | None = None
        self._loaded: State | None = None

    # -- iterating ----------------------------------------------------------------

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        """Return an iteration over what this rank reads.

        Raises:
            StateMismatchError: If a loaded state lacks what this rank reads.
        """
        state = self._loaded
        epoch = self._epoch if state is None else state["epoch"]
        deal = self._deal(None if state is None else state["readers"])
        cost = deal.cost()
        if cost is not None:
            warn(cost)
        iterator: StreamIterator[Sample_co]
        iterator = StreamIterator(self, epoch, deal, state)
        self._loaded = None
        if not self._is_chosen:
            self._epoch = epoch + 1
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, until another one is chosen."""
        self._epoch = operator.index(epoch)
        self._is_chosen = True

    def begin_epoch(self, epoch: int) -> None:
        """Take the number of an epoch that begins, unless the user has chosen one."""
        if not self._is_chosen:
            self._epoch = epoch

    def shard(self, rank: int, world_size: int) -> Self:
        """Read the part of one rank.

        Raises:
            ValueError: If ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range({world_size}), got {rank}")
        clone = self._clone()
        clone.ranks = rank, world_size
        return clone

    def readers(self, count: int) -> Self:
        """Make the order of ``count`` readers, so that any number of ranks has it.

        Readers take turns, sample by sample, and ranks share them: the samples of all
        ranks' batches number ``k`` are the same ones for each number of ranks, if their
        sizes add up to the same. A reader that ends before the others leaves its turns
        empty. Without this method each rank (each worker, with ``fetch="workers"``) is
        one reader, and the order depends on how many there are.

        Each reader has lanes, steps and windows of ``shuffle`` of its own, and reads an
        iterable from the front by itself; ``max_bytes`` is for all on one rank. So
        there must be as many shards; and best it is a multiple of all numbers of ranks
        that are to come (24 for 1, 2, 3, 4, 6, 8 and 12): others read some readers more
        than once, and warn.

        Raises:
            ValueError: If ``count`` is below 1.
        """
        check_at_least(count, 1, "count")
        clone = self._clone()
        clone.num_readers = operator.index(count)
        return clone

    def load_state_dict(self, state: State) -> None:
        """Begin the next iteration where ``state_dict`` of an iterator was taken.

        It may have been taken on another number of ranks, if it is what
        ``merge_states`` made of the states of all. The number of readers is then that
        of the state.

        Raises:
            StateMismatchError: If it is of another version.
        """
        check_version(state)
        self._loaded = state

    def _clone(self) -> Self:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def _deal(self, readers: int | None) -> Deal:
        """Return what this rank, or this worker of it, reads."""
        rank, world_size = self.ranks or (0, 1)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks = world_size * workers
        return Deal(
            rank * workers + number, ranks, readers or self.num_readers or ranks
        )

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""
        raise NotImplementedError

    def describe(self) -> State:
        """Return what a state is bound to, ready for JSON.

        That is what determines the samples and their order, but for the names of the
        shards, which the state itself holds: ``"kind"``, parameters, and ``"of"``, the
        same of the stream before it. Not: where the data lies, credentials, caches and
        what is read ahead. Under ``"function"`` are names of the user's functions: if
        they differ, that is a warning only.
        """
        return {"kind": type(self).__name__}

    # -- steps --------------------------------------------------------------------

    def map(
        self, function: Callable[[Any], Any], *, concurrency: int = 64
    ) -> "Stream[Any]":
        """Return the stream of ``function(sample)``.

        A coroutine function runs on the loop, ``concurrency`` samples at a time and in
        order; a plain one in a thread. What should run in worker processes is the
        loader's ``transform``.
        """
        check_at_least(concurrency, 1, "concurrency")
        is_async = is_async_function(function)
        making = _Making(Mapped, function)
        if is_async:
            making = _Making(MappedAsync, function, concurrency)
        named = name_of(function)
        return _Step(self, making, "map", function=named, is_async=is_async)

    def filter(self, function: Callable[[Any], Any]) -> "Stream[Sample_co]":
        """Return the stream of those samples for which ``function`` says yes."""
        making = _Making(Filtered, function, is_async=is_async_function(function))
        return _Step(self, making, "filter", function=name_of(function))

    def shuffle(self, size: int, *, seed: int = 0) -> "Stream[Sample_co]":
        """Return the stream with each window of ``size`` samples permuted.

        Another permutation for each window and epoch. Shards that are interleaved
        bring samples of many places into one window.
        """
        check_at_least(size, 1, "size")
        return _Shuffle(self, size, operator.index(seed))

    def take(self, count: int) -> "Stream[Sample_co]":
        """Return the stream of the first ``count`` samples of each reader."""
        check_at_least(count, 0, "count")
        return _Step(self, _Making(Taken, count), "take", count=count)

    def skip(self, count: int) -> "Stream[Sample_co]":
        """Return the stream without the first ``count`` samples of each reader."""
        check_at_least(count, 0, "count")
        return _Step(self, _Making(Skipped, count), "skip", count=count)

    def batch(self, size: int, *, drop_last: bool = False) -> "Stream[Any]":
        """Return the stream of lists of ``size`` samples (of ``Rows`` for tables)."""
        check_at_least(size, 1, "size")
        making = _Making(Batched, size, drop_last=drop_last)
        return _Step(self, making, "batch", size=size, drop_last=drop_last)

    def cache(
        self,
        directory: "StrPath",  # noqa: ARG002  (for those that have shards)
        max_bytes: int = CACHE_BYTES,  # noqa: ARG002
    ) -> "Stream[Sample_co]":
        """Return the stream with what its shards are read from kept in a directory.

        Workers and other processes share it; the least recently used goes first.

        Raises:
            TypeError: If it is read from no store.
        """
        raise TypeError(f"{self!r} has no shards that could be cached")

    def mix(
        self,
        *others: "Stream[Any]",
        weights: Sequence[float] | None = None,
        seed: int = 0,
        until: Until = "all",
    ) -> "Stream[Any]":
        """Return a stream that draws each sample from this or another stream.

        Its ranks and readers are those of this one.

        Args:
            others: The other streams.
            weights: Probability of each stream, this one first; default: equal.
            seed: Key of the draws, which also depend on the epoch.
            until: ``"all"``: those that are left go on when one ends; ``"first"``:
                the end of one is the end.

        Raises:
            ValueError: If there is not one positive weight for each stream.
        """
        streams = (self, *others)
        weights = [float(one) for one in weights or [1.0] * len(streams)]
        if len(weights) != len(streams) or min(weights) <= 0:
            raise ValueError(
                f"weights must be {len(streams)} positive numbers, got {weights}"
            )
        if until not in {"all", "first"}:
            raise ValueError(f"until must be 'all' or 'first', got {until!r}")
        return _Mix(streams, weights, operator.index(seed), until)


def check_at_least(value: int, least: int, name: str) -> None:
    """Raise a ValueError if an argument is too small."""
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


# -- streams made of streams ------------------------------------------------------


class _Making:
    """A step to be: its cursor and that one's arguments; it can be pickled."""

    def __init__(self, cursor: Any, *args: Any, **options: Any) -> None:
        self._cursor, self._args, self._options = cursor, args, options
        self.has_state: bool = cursor.has_state

    def make(self, upstream: Cursor, state: State) -> Cursor:
        cursor: Cursor = self._cursor(upstream, *self._args, **self._options)
        if self.has_state:
            cursor.load(state)  # type: ignore[attr-defined]
        return cursor


class _Over(Stream[Any]):
    """A stream over another one."""

    def __init__(self, upstream: Stream[Any]) -> None:
        super().__init__()
        self.ranks = upstream.ranks
        self.num_readers = upstream.num_readers
        self.upstream = upstream

    def cache(self, directory: "StrPath", max_bytes: int = CACHE_BYTES) -> Self:
        """Return the stream with its source cached."""
        clone = self._clone()
        clone.upstream = self.upstream.cache(directory, max_bytes)
        return clone


class _Step(_Over):
    """A stream made of another one by a step.

    Args:
        upstream: The other one.
        making: Makes the cursor.
        kind: Name of the step.
        parameters: Those of ``describe``.
    """

    def __init__(
        self, upstream: Stream[Any], making: _Making, kind: str, **parameters: Any
    ) -> None:
        super().__init__(upstream)
        self._making = making
        self._kind = kind
        self._parameters = parameters

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return the step's cursor over that of the stream before it."""
        inner = state.get("up", {}) if self._making.has_state else state
        upstream = await self.upstream.open(reading, inner)
        return self._making.make(upstream, state)

    def __repr__(self) -> str:
        return f"{self.upstream!r}.{self._kind}(...)"

    def describe(self) -> State:
        """Return the step's parameters, and the stream before it."""
        upstream = self.upstream.describe()
        return {"kind": self._kind, **self._parameters, "of": upstream}


class _Shuffle(_Over):
    """A stream whose windows are permuted."""

    def __init__(self, upstream: Stream[Any], size: int, seed: int) -> None:
        super().__init__(upstream)
        self._size = size
        self._seed = seed

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor that permutes windows of the stream before it."""
        upstream = await self.upstream.open(reading, state.get("up", {}))

        def order(number: int, length: int) -> list[int]:
            # Readers permute their windows differently too.
            place = number * reading.share.readers + reading.share.reader
            return keyed_order(length, self._seed, reading.epoch, place)

        return Shuffled(upstream, self._size, order, state)

    def describe(self) -> State:
        """Return size and seed, and the stream before it."""
        of = self.upstream.describe()
        return {"kind": "shuffle", "size": self._size, "seed": self._seed, "of": of}

    def __repr__(self) -> str:
        return f"{self.upstream!r}.shuffle({self._size})"


class _Mix(Stream[Any]):
    """Several streams as one."""

    def __init__(
        self,
        streams: Sequence[Stream[Any]],
        weights: list[float],
        seed: int,
        until: Until,
    ) -> None:
        super().__init__()
        self.ranks = streams[0].ranks
        self.num_readers = streams[0].num_readers
        self.streams = streams
        self._weights = weights
        self._seed = seed
        self._until = until

    async def open(self, reading: Reading, state: State) -> Cursor:
        inner = state.get("up") or [{} for _ in self.streams]
        cursors = [
            await stream.open(reading, one)
            for stream, one in zip(self.streams, inner, strict=True)
        ]
        key = (self._seed, reading.epoch, reading.share.reader)
        return Mixed(cursors, self._weights, key, self._until, state)

    def describe(self) -> State:
        """Return how the streams are mixed, and what each is."""
        return {
            "kind": "mix",
            "streams": [stream.describe() for stream in self.streams],
            "weights": self._weights,
            "seed": self._seed,
            "until": self._until,
        }

    def cache(self, directory: "StrPath", max_bytes: int = CACHE_BYTES) -> Self:
        """Return the stream with all of its sources cached."""
        clone = self._clone()
        clone.streams = [one.cache(directory, max_bytes) for one in self.streams]
        return clone

    def __repr__(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.mix({', '.join(others)})"


def keyed_order(length: int, seed: int, epoch: int, place: int) -> list[int]:
    """Return a permutation of ``range(length)`` for one place of an epoch."""
    order = ShuffledIndices(length, seed * 0x9E3779B97F4A7C15 + place)
    order.set_epoch(epoch)
    places: list[int] = order.take(0, length).tolist()
    return places
