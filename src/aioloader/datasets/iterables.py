"""Any iterable as a stream: generators, files of one's own, other libraries' readers.

It is read from the front by each reader, who keeps every so many-th sample; a saved
position is a count, and what was before it is read again and dropped. What fails and
does not end the iterable is a sample too.
"""

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from aioloader._order.blocks import Bad
from aioloader._order.shares import Share
from aioloader.datasets._streams.cursors import Cursor, State
from aioloader.datasets._streams.iterators import Reading
from aioloader.datasets.streams import Stream

Source: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
AsyncSource: TypeAlias = AsyncIterable[Any] | Callable[[], AsyncIterable[Any]]


def from_iterable(source: Source) -> Stream[Any]:
    """Return a stream of what ``source`` yields, read in a thread of its own.

    Args:
        source: An iterable that can be iterated again for every epoch, or a function
            that returns an iterable: a generator function, say. Each reader does so.

    Raises:
        TypeError: If it is an iterator, which is over after one epoch.
    """
    _check_is_no_iterator(source, "from_iterable", Iterator)
    return _Iterable(source, _SyncCursor)


def from_async_iterable(source: AsyncSource) -> Stream[Any]:
    """Return a stream of what ``source`` yields, read on the loop.

    Args:
        source: An async iterable, or a function that returns one: an async generator
            function, say.

    Raises:
        TypeError: If it is an async iterator, which is over after one epoch.
    """
    _check_is_no_iterator(source, "from_async_iterable", AsyncIterator)
    return _Iterable(source, _AsyncCursor)


def _check_is_no_iterator(source: object, name: str, kind: type) -> None:
    if isinstance(source, kind):
        raise TypeError(
            f"{name} got the iterator {type(source).__name__!r}, which is over after "
            "one epoch; pass the function that made it, or an iterable"
        )


class _Iterable(Stream[Any]):
    """A stream of what an iterable of either colour yields."""

    def __init__(self, source: Any, cursor: Any) -> None:
        super().__init__()
        self._source = source
        self._cursor = cursor

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor over this reader's samples."""
        cursor: Cursor = self._cursor(self._source, reading.share, state.get("read", 0))
        return cursor

    def __repr__(self) -> str:
        name = getattr(self._source, "__qualname__", type(self._source).__qualname__)
        return f"stream of {name}"


class _Counting:
    """Which samples are this reader's, and how many were read."""

    def __init__(self, source: Any, share: Share, start: int) -> None:
        self._source = source
        self._share = share
        self._start = start
        self._read = 0
        self._has_ended = False

    def state(self) -> State:
        """Return how many samples were read, by all readers alike."""
        return {"read": max(self._read, self._start)}

    def _made(self) -> Any:
        return self._source() if callable(self._source) else self._source

    def _is_mine(self) -> bool:
        """Count a sample; tell whether it is to be passed on."""
        place, self._read = self._read, self._read + 1
        # Whatever ended it, all readers have to tell.
        is_mine = place % self._share.readers == self._share.reader or self._has_ended
        return is_mine and place >= self._start


class _SyncCursor(_Counting):
    """Samples of an iterable, read in one thread: some have to be."""

    def __init__(self, source: Any, share: Share, start: int) -> None:
        super().__init__(source, share, start)
        self._iterator: Iterator[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def pull(self, limit: int) -> list[Any]:
        """Return the next samples."""
        if self._has_ended:
            return []
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "aioloader-iterable")
        samples: list[Any] = await self._beside(partial(self._next, limit))
        return samples

    async def aclose(self) -> None:
        """Close a generator in its thread, and end the thread."""
        thread = self._thread
        if thread is not None:
            await self._beside(self._close)
            self._thread = None
            await asyncio.to_thread(thread.shutdown)

    async def _beside(self, job: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, job)

    def _next(self, limit: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < limit and not self._has_ended:
            try:
                if self._iterator is None:
                    self._iterator = iter(self._made())
                sample = next(self._iterator)
            except StopIteration:
                self._has_ended = True
            except Exception as error:  # noqa: BLE001  (the loader's policy decides)
                # A generator that has raised is over.
                self._has_ended = not _can_go_on(self._iterator, inspect.isgenerator)
                if self._is_mine():
                    samples.append(Bad(error))
            else:
                if self._is_mine():
                    samples.append(sample)
        return samples

    def _close(self) -> None:
        self._has_ended = True
        if inspect.isgenerator(self._iterator):
            self._iterator.close()
        self._iterator = None


class _AsyncCursor(_Counting):
    """Samples of an async iterable."""

    def __init__(self, source: Any, share: Share, start: int) -> None:
        super().__init__(source, share, start)
        self._iterator: AsyncIterator[Any] | None = None

    async def pull(self, limit: int) -> list[Any]:
        """Return the next samples."""
        samples: list[Any] = []
        while len(samples) < limit and not self._has_ended:
            try:
                if self._iterator is None:
                    self._iterator = aiter(self._made())
                sample = await anext(self._iterator)
            except StopAsyncIteration:
                self._has_ended = True
            except Exception as error:  # noqa: BLE001  (the loader's policy decides)
                self._has_ended = not _can_go_on(self._iterator, inspect.isasyncgen)
                if self._is_mine():
                    samples.append(Bad(error))
            else:
                if self._is_mine():
                    samples.append(sample)
        return samples

    async def aclose(self) -> None:
        """Close a generator."""
        self._has_ended = True
        iterator, self._iterator = self._iterator, None
        if inspect.isasyncgen(iterator):
            await iterator.aclose()


def _can_go_on(iterator: Any, is_generator: Callable[[Any], bool]) -> bool:
    return iterator is not None and not is_generator(iterator)
