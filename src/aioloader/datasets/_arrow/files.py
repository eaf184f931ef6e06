"""What Parquet and Arrow files have in common: where they lie, and what their ends say.

Shards are in the order of the files. Ends of files are read many at a time.
"""

import asyncio
import copy
import importlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
)

from typing_extensions import Buffer

from aioloader.datasets._arrow.wanted import Wanted
from aioloader.datasets._stores.bytes import file_failure
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._streams.shards import summary_of
from aioloader.errors import TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._streams.shards import Position, ShardReader, Summary

T = TypeVar("T")
# The address of a file, and which part of it.
Part: TypeAlias = tuple[Any, ...]

# Files whose ends are read at once.
_AT_ONCE = 32
# Most footers are shorter, so that one request gets them.
_TAIL = 1 << 16


class Opener(Protocol):
    """Where files lie."""

    async def expand(self, patterns: str | Iterable[str]) -> list[str]:
        """Return the addresses that ``patterns`` name, in order."""

    def label(self, address: str) -> str:
        """Return what may be shown of an address."""

    def path(self, address: str) -> str | None:
        """Return the path of a local file, or None."""

    async def size(self, address: str) -> int:
        """Return the length of a file that is not local, in bytes."""

    async def read(self, address: str, start: int, stop: int) -> Buffer:
        """Return bytes of such a file, as it was when its size was asked for."""

    def cached(self, cache: CacheDir) -> Self:
        """Return the same, read through a cache."""

    async def aclose(self) -> None:
        """Wait for requests in flight, and drop connections."""


class Tail(NamedTuple):
    """The end of a file.

    Attributes:
        size: Length of the whole file, in bytes.
        data: Its last bytes.
    """

    size: int
    data: bytes


class End(Protocol):
    """What the end of a file says of it."""

    @property
    def schema(self) -> "pa.Schema":
        """All its columns."""


SomeEnd = TypeVar("SomeEnd", bound=End)


class TableFormat(ABC, Generic[SomeEnd]):
    """Tables in files, of which each has several shards.

    Args:
        addresses: Patterns of the files' addresses.
        opener: Where they lie.
        columns: Names of the columns to read; None: those of the first file.
        nulls: Column to the value that is read instead of NULL.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If ``columns`` or ``nulls`` are wrong.
    """

    # What is needed of pyarrow; to import it takes a while.
    modules: ClassVar[tuple[str, ...]] = ("pyarrow.compute",)

    def __init__(
        self,
        addresses: Any,
        opener: Opener,
        *,
        columns: Iterable[str] | None = None,
        nulls: Mapping[str, Any] | None = None,
    ) -> None:
        _import(self.modules)
        self._addresses = addresses
        self._opener = opener
        self._wanted = Wanted(columns, nulls)
        self._kept: OrderedDict[str, SomeEnd] = OrderedDict()

    def cached(self, cache: CacheDir) -> Self:
        """Return the same format, with files read through a cache."""
        clone = copy.copy(self)
        clone._opener = self._opener.cached(cache)  # noqa: SLF001
        return clone

    async def shards(
        self, stack: AsyncExitStack, _known: "Summary | None" = None
    ) -> list[Part]:
        """Return the shards of all files, in order.

        Raises:
            DatasetError: If a file cannot be read, is of another kind, or lacks a
                column.
        """
        stack.push_async_callback(self._opener.aclose)
        addresses = await self._opener.expand(self._addresses)
        self._kept.clear()
        # The first file says what the columns of all must be.
        found = [await self._shards_of(addresses[0])]
        found += await each(self._shards_of, addresses[1:])
        return list(chain.from_iterable(found))

    def summary(self, shards: Sequence[Part]) -> "Summary":
        """Return how many there are, and a checksum of their files' names."""
        return summary_of(address for address, *_ in shards)

    def describe(self) -> dict[str, Any]:
        """Return which columns are read, and what replaces NULLs in them."""
        return self._wanted.describe()

    async def _shards_of(self, address: str) -> list[Part]:
        return [(address, *part) for part in self._parts_of(await self._end(address))]

    async def _end(self, address: str) -> SomeEnd:
        """Return the end of a file that has the wanted columns."""
        location = self._opener.label(address)
        end = self._kept.get(address)
        if end is None:
            end = await self._read_end(address, location)
            self._kept[address] = end
            self._drop_ends()
        self._wanted.check(end.schema, location)
        return end

    @abstractmethod
    def open(self, shard: Any, position: "Position", budget: int) -> "ShardReader":
        """Return a reader of a shard."""

    @abstractmethod
    async def _read_end(self, address: str, location: str) -> SomeEnd:
        """Read the end of a file."""

    @abstractmethod
    def _drop_ends(self) -> None:
        """Keep fewer ends of files, if there are too many; the last one stays."""

    @abstractmethod
    def _parts_of(self, end: SomeEnd) -> Iterable[Part]:
        """Return what tells the shards of a file apart."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._addresses!r})"


def _import(modules: Iterable[str]) -> None:
    try:
        for name in ("pyarrow", *modules):
            importlib.import_module(name)
    except ImportError as exc:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'aioloader[arrow]'"
        ) from exc


async def read_tail(opener: Opener, address: str, least: int = _TAIL) -> Tail:
    """Return the last ``least`` bytes of a file, or all that it has.

    Raises:
        DatasetError: If it cannot be read.
    """
    path = opener.path(address)
    if path is not None:
        return await asyncio.to_thread(_read_local, path, -least, 0)
    size = await opener.size(address)
    start = max(0, size - least)
    data = bytes(memoryview(await opener.read(address, start, size)))
    return Tail(size, _checked(data, size - start, opener.label(address)))


async def read_head(opener: Opener, address: str, stop: int) -> bytes:
    """Return the first ``stop`` bytes of a file, which has as many.

    Raises:
        DatasetError: If it cannot be read.
    """
    path = opener.path(address)
    if path is not None:
        return (await asyncio.to_thread(_read_local, path, 0, stop)).data
    data = bytes(memoryview(await opener.read(address, 0, stop)))
    return _checked(data, stop, opener.label(address))


def _read_local(path: str, start: int, stop: int) -> Tail:
    """Return bytes of a local file; a negative start counts from the end, as 0 does."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (thousands of them)
            size = os.fstat(file.fileno()).st_size
            start = max(0, start + size) if start < 0 else start
            file.seek(start)
            data = file.read((stop or size) - start)
    except OSError as error:
        raise file_failure(path, error) from error
    return Tail(size, _checked(data, (stop or size) - start, path))


def _checked(data: bytes, expected: int, location: str) -> bytes:
    if len(data) != expected:
        raise TruncatedReadError(
            f"{location!r} gave {len(data):,} of {expected:,} bytes; it was written "
            "anew meanwhile",
            location=location,
            expected=expected,
            received=len(data),
        )
    return data


async def each(
    function: Callable[[str], Awaitable[T]], addresses: Sequence[str]
) -> list[T]:
    """Return ``function`` of each address, several at a time, in order.

    The first failure ends the others.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(addresses))

    async def work() -> None:
        for number, address in waiting:
            found[number] = await function(address)

    workers = [
        asyncio.ensure_future(work()) for _ in range(min(_AT_ONCE, len(addresses)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[number] for number in range(len(addresses))]
