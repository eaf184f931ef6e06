"""Any iterable as a stream: generators, custom file formats, other libraries' readers.

Each of N readers reads the iterable from its beginning and keeps every Nth sample. The
saved position is a count: earlier samples are read again and dropped. A sample that
fails without ending the iterable counts as a sample.
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
# Most samples read at once for a reader that leaves most of them out.
_MOST = 1 << 12


def from_iterable(source: IterableSource) -> Stream[Any]:
    """Return a stream of the samples of ``source``, read in a separate thread.

    Args:
        source: An iterable that can be iterated again in every epoch, or a function
            that returns one, such as a generator function. Each reader iterates it.
            Its ``set_epoch``, if it has one, is called with the number of each epoch;
            for later passes of ``repeat``, with a number below 2**31 for each of them.
            A loader of aioloader that it iterates takes that number, too.

    Raises:
        TypeError: If it is neither, or an iterator, which can be read only once.
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
            generator function. Streams that it iterates take the number of each epoch.

    Raises:
        TypeError: If it is neither, or an async iterator, which can be read only once.
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


def _repeats(source: Any) -> bool:
    """Tell whether the epochs of a source can be repeated."""
    if isinstance(source, torch.utils.data.DataLoader):
        is_known = type(source.sampler) in {SequentialSampler, ShuffledIndices}
        return is_known or isinstance(source.dataset, OwnStream)
    return isinstance(source, Sequence) or callable(getattr(source, "set_epoch", None))


class _Iterable(Stream[Any]):
    def __init__(self, source: Any, *, is_async: bool) -> None:
        super().__init__()
        self._source, self._is_async = source, is_async
        self.reread = [] if _repeats(source) else [qualname(source)]

    async def open(self, reading: Reading, state: State) -> Cursor:
        return _IterableCursor(self._source, reading, state, is_async=self._is_async)

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead: an iterator may wait for each sample."""
        return Ahead.FREE if isinstance(self._source, Sequence) else Ahead.QUICK

    def describe(self) -> State:
        return {"kind": "iterable", "function": qualname(self._source)}

    def __repr__(self) -> str:
        name = getattr(self._source, "__qualname__", type(self._source).__qualname__)
        return f"stream of {name}"


class _IterableCursor(Cursor):
    """Selects this reader's samples of a source, and counts the samples read.

    A plain iterable is read in one thread, because some iterables need that.
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
        self._error: BaseException | None = None  # error at the end, until it is raised
        self._same_errors = SameErrors()

    async def _next(self, count: int) -> tuple[list[Any], bool]:
        """Return the next samples of all readers, and whether it has ended."""
        with under_way(self._reading):
            if self._is_async:
                begun = self._begin(aiter)
                return begun or await read_block_async(self._iterator, count)
            self._thread = self._thread or ThreadPoolExecutor(1, "aioloader-iterable")
            read = lambda: self._begin(iter) or read_block(self._iterator, count)  # noqa: E731
            return await in_thread(read, executor=self._thread)

    def _make_state(self) -> State:
        """Return the number of samples read; it is the same for all readers."""
        return {"read": max(self._read, self._start)}

    async def _make(self, limit: int) -> list[Any]:
        """Return the next samples; after the last ones, raise what ended them."""
        samples: list[Any] = []
        reader, readers = self._reading.share.reader, self._reading.share.readers
        while len(samples) < limit and not self._has_ended:
            first = max(self._read, self._start)
            first += (reader - first) % readers - self._read  # samples to leave out
            last = first + (limit - len(samples) - 1) * readers
            block, has_ended = await self._next(min(last + 1, max(limit, _MOST)))
            if has_ended or self._same_errors.is_stuck(block):
                self._has_ended, self._error = True, self._ended_by(block)
            samples += block[first::readers]
            self._read += len(block)
        if not samples and self._error is not None:
            error, self._error = self._error, None
            raise carried(error)
        return samples

    def _ended_by(self, block: list[Any]) -> BaseException | None:
        """Return what is raised after the last block."""
        if (
            block and type(block[-1]) is FailedSample
        ):  # for every reader, and not a sample
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

    def _opened(self) -> Any:
        made = self._source() if callable(self._source) else self._source
        if isinstance(made, Iterated):
            made = made.for_epoch()  # it may be shared
        elif callable(set_epoch := getattr(made, "set_epoch", None)):
            epoch = self._reading.epoch
            # Those of the passes of ``repeat`` are too large for a seed of NumPy.
            is_pass = epoch >= 1 << 32
            set_epoch(zlib.crc32(str(epoch).encode()) >> 1 if is_pass else epoch)
        return made

    def _begin(self, begin: Callable[[Any], Any]) -> tuple[list[Any], bool] | None:
        """Begin at the first call; return what ends it if that fails."""
        try:
            if self._iterator is None:
                self._iterator = begin(self._opened())
        except BaseException as error:  # noqa: BLE001  (raised at the end)
            return [failed(error)], True
        return None

    async def _close(self) -> None:
        """Close a generator, where it runs, or an inner stream; end the thread."""
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
