"""Streams of any iterable, such as a generator or another library's reader.

Each of N readers reads the iterable from its start and keeps every Nth sample. The
saved position is the number of samples read: a resume reads earlier samples again and
drops them. Failed samples count, unless the failure ends the iterable.
"""

import inspect
import zlib
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.utils.data import SequentialSampler

from aioloader._base.blocks import (
    FailedSample,
    SameErrors,
    failed,
    read_block,
    read_block_async,
)
from aioloader._base.cancellation import in_thread
from aioloader._base.raising import carried
from aioloader._order.epoch import under_way
from aioloader._order.permutation import ShuffledIndices
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State, qualname
from aioloader.datasets._streams.iterated import Iterated, StreamIterator
from aioloader.datasets.streams import Stream
from aioloader.errors import ShardChangedError
from aioloader.protocols import OwnStream, generator_of, is_async_function

IterableSource: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
AsyncSource: TypeAlias = AsyncIterable[Any] | Callable[[], AsyncIterable[Any]]
# Maximum number of samples to read at a time, if a reader drops most of them.
_MAX_BLOCK = 1 << 12


def from_iterable(source: IterableSource) -> Stream[Any]:
    """Return a stream of the samples of ``source``, read in a separate thread.

    Args:
        source: An iterable that can be iterated in every epoch, or a function that
            returns an iterable, such as a generator function. Each reader iterates it.
            The iterable's ``set_epoch``, if any, is called with the epoch's number; in
            later passes of ``repeat``, with a hash (below 2**31) of epoch and pass. A
            loader of aioloader in ``source`` uses the epoch of the stream.

    Raises:
        TypeError: If ``source`` is none of these, or an iterator.
    """
    is_async = is_async_function(source) or generator_of(source) == "async generator"
    is_known = isinstance(source, Iterable) or hasattr(source, "__getitem__")
    fits = is_known or (callable(source) and not is_async)
    _check_source(source, "from_iterable", Iterator, fits=fits)
    return _Iterable(source, is_async=False)


def from_async_iterable(source: AsyncSource) -> Stream[Any]:
    """Return a stream of the samples of ``source``, read on the loop.

    Args:
        source: An async iterable, or a function that returns one, such as an async
            generator function. Streams that ``source`` iterates use the same epoch.

    Raises:
        TypeError: If ``source`` is none of these, or an async iterator.
    """
    is_plain = is_async_function(source) or generator_of(source) == "generator"
    fits = isinstance(source, AsyncIterable) or (callable(source) and not is_plain)
    _check_source(source, "from_async_iterable", AsyncIterator, fits=fits)
    return _Iterable(source, is_async=True)


def _check_source(source: object, name: str, kind: type, *, fits: bool) -> None:
    if isinstance(source, kind):
        raise TypeError(
            f"{name} got the iterator {type(source).__name__!r}, which can be read "
            "only once; pass the function that made it, or an iterable"
        )
    if not fits:
        raise TypeError(
            f"{name} needs an iterable or a function that returns one, got "
            f"{qualname(source)!r} (from_async_iterable takes async ones)"
        )


def _is_repeatable(source: Any) -> bool:
    """Tell whether reading an epoch of a source again yields the same samples."""
    if isinstance(source, torch.utils.data.DataLoader):
        is_known = type(source.sampler) in {SequentialSampler, ShuffledIndices}
        return is_known or isinstance(source.dataset, OwnStream)
    return isinstance(source, Sequence) or callable(getattr(source, "set_epoch", None))


class _Iterable(Stream[Any]):
    def __init__(self, source: Any, *, is_async: bool) -> None:
        super().__init__()
        self._source, self._is_async = source, is_async
        self.reread = [] if _is_repeatable(source) else [qualname(source)]

    async def open(self, reading: Reading, state: State) -> Cursor:
        return _IterableCursor(self._source, reading, state, is_async=self._is_async)

    def ahead(self) -> Ahead:
        """Return how far to read ahead, which is less if samples may be slow."""
        return Ahead.FREE if isinstance(self._source, Sequence) else Ahead.QUICK

    def describe(self) -> State:
        return {"kind": "iterable", "function": qualname(self._source)}

    def __repr__(self) -> str:
        name = getattr(self._source, "__qualname__", type(self._source).__qualname__)
        return f"stream of {name}"


class _IterableCursor(Cursor):
    """Cursor over one reader's samples of a source; it counts all samples read.

    A plain iterable is read in a single thread, which some iterables require.
    """

    def __init__(
        self, source: Any, reading: Reading, state: State, *, is_async: bool
    ) -> None:
        super().__init__(state)
        self._source, self._is_async = source, is_async
        self._thread: ThreadPoolExecutor | None = None
        self._reading = reading
        self._start: int = state.get("read", 0)
        self._read = 0
        self._iterator: Any = None
        self._has_ended = False
        self._error: BaseException | None = None  # to raise after the last samples
        self._same_errors = SameErrors()

    async def _next(self, count: int) -> tuple[list[Any], bool]:
        """Return the source's next samples, and whether the source has ended."""
        with under_way(self._reading):
            if self._is_async:
                failure = self._begin(aiter)
                return failure or await read_block_async(self._iterator, count)
            self._thread = self._thread or ThreadPoolExecutor(1, "aioloader-iterable")
            read = lambda: self._begin(iter) or read_block(self._iterator, count)  # noqa: E731
            return await in_thread(read, executor=self._thread)

    def _make_state(self) -> State:
        """Return the number of samples read, including those for other readers."""
        return {"read": max(self._read, self._start)}

    async def _make(self, limit: int) -> list[Any]:
        """Return the reader's next samples; at the end, raise the source's error."""
        samples: list[Any] = []
        reader, readers = self._reading.share.reader, self._reading.share.readers
        while len(samples) < limit and not self._has_ended:
            first = max(self._read, self._start)
            first += (reader - first) % readers - self._read  # samples to drop
            last = first + (limit - len(samples) - 1) * readers
            block, has_ended = await self._next(min(last + 1, max(limit, _MAX_BLOCK)))
            if has_ended or self._same_errors.is_stuck(block):
                self._has_ended, self._error = True, self._final_error(block)
            samples += block[first::readers]
            self._read += len(block)
        if not samples and self._error is not None:
            error, self._error = self._error, None
            raise carried(error)
        return samples

    def _final_error(self, block: list[Any]) -> BaseException | None:
        """Return the error to raise after the last block, or None."""
        if block and type(block[-1]) is FailedSample:  # of the source, not of a sample
            error: BaseException = block.pop().error
            return error
        read = self._read + len(block)
        if read >= self._start:
            return None
        return ShardChangedError(
            f"{qualname(self._source)!r} ended after {read:,} samples, but the state "
            f"was saved after {self._start:,}; resume with the same samples, or "
            "restart the epoch"
        )

    def _open_source(self) -> Any:
        iterable = self._source() if callable(self._source) else self._source
        if isinstance(iterable, Iterated):
            iterable = iterable.for_epoch()  # a copy: other readers may iterate it
        elif callable(set_epoch := getattr(iterable, "set_epoch", None)):
            epoch = self._reading.epoch
            # Epoch numbers of later passes are too large for a NumPy seed: hash them.
            is_pass = epoch >= 1 << 32
            set_epoch(zlib.crc32(str(epoch).encode()) >> 1 if is_pass else epoch)
        return iterable

    def _begin(self, begin: Callable[[Any], Any]) -> tuple[list[Any], bool] | None:
        """Open the source at the first call; return an error block if opening fails."""
        try:
            if self._iterator is None:
                self._iterator = begin(self._open_source())
        except BaseException as error:  # noqa: BLE001  (raised at the end)
            return [failed(error)], True
        return None

    async def _close(self) -> None:
        """Close the source's generator or ``StreamIterator``, and end the thread."""
        self._has_ended = True
        if (thread := self._thread) is not None:
            await in_thread(self._end, executor=thread)
            self._thread = None
            await in_thread(thread.shutdown)
        iterator, self._iterator = self._iterator, None
        if inspect.isasyncgen(iterator) or isinstance(iterator, StreamIterator):
            await iterator.aclose()

    def _end(self) -> None:
        if inspect.isgenerator(self._iterator):
            self._iterator.close()
        self._iterator = None
