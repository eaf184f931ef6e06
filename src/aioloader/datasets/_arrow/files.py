"""The common part of Parquet and Arrow files: addresses, and metadata at the end.

Shards are in the order of the files. Ends of files are read many at a time.
"""

import asyncio
import copy
import importlib
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
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

from aioloader.datasets._arrow.copies import Copies, Opener
from aioloader.datasets._arrow.hive import (
    columns_of,
    condition_of,
    values_of,
    with_columns,
)
from aioloader.datasets._arrow.reader import Place, Source, TableReader, shares
from aioloader.datasets._arrow.wanted import Wanted
from aioloader.datasets._stores.addresses import sealed, shown_addresses
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.places import Listed, each
from aioloader.datasets._stores.versions import Known, Version, version_of_file
from aioloader.datasets._streams.shards import CutsShards, WeighsShards, summary_of
from aioloader.errors import TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._streams.shards import Position, ShardReader, Summary

T = TypeVar("T")
# The address of a file, and a part of it.
Part: TypeAlias = tuple[Any, ...]

# Most footers are shorter, so that one request gets them.
_TAIL = 1 << 16
# Recent schemas to compare with, so that equal ones share an object.
_SCHEMAS = 8
# Suffix of the name of a shard in which no row is wanted.
SKIPPED = "skipped"


class Tail(NamedTuple):
    """The end of a file.

    Attributes:
        version: The version of the file.
        data: Its last bytes.
    """

    version: Version
    data: bytes

    @property
    def size(self) -> int:
        """Length of the whole file, in bytes."""
        return self.version.size


class End(Protocol):
    """The metadata at the end of a file."""

    @property
    def version(self) -> Version:
        """The version of the file."""

    @property
    def schema(self) -> "pa.Schema":
        """All its columns."""


SomeEnd = TypeVar("SomeEnd", bound=End)


class TableFormat(CutsShards, WeighsShards, Generic[SomeEnd]):
    """Tables in files, each with one or more shards.

    Args:
        addresses: Patterns of the files' addresses.
        opener: Opens them.
        wanted: As for ``Wanted``: ``columns``, ``nulls``, ``schema``, ``filters``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If ``wanted`` is wrong.
    """

    # The pyarrow modules needed; importing them is slow.
    modules: ClassVar[tuple[str, ...]] = ("pyarrow.compute",)

    def __init__(
        self,
        addresses: Any,
        opener: Opener,
        **wanted: Any,
    ) -> None:
        _import(self.modules)
        self._addresses = addresses
        self._opener = Copies(opener)
        self._wanted = Wanted(**wanted)
        # The columns that are in the names of files.
        self._in_names: pa.Schema | None = None
        self._kept: OrderedDict[str, SomeEnd] = OrderedDict()
        # Of all files, as listed: an end may be dropped and read again.
        self._listed: list[str] = []
        self._versions: dict[str, Version] = {}
        self._schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)

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
        self._opener.enter()
        stack.push_async_callback(self._opener.aclose)
        addresses = await self._opener.expand(self._addresses)
        if not await self._are_unchanged(addresses):
            self._kept.clear()
            self._versions, self._listed = {}, [*addresses]
        # Other iterations use the previous table until this one is complete.
        wanted = copy.copy(self._wanted)
        names = map(self._opener.name, addresses)
        self._in_names = await asyncio.to_thread(columns_of, names, wanted.given or ())
        # The first file decides which columns are read; all decide their types.
        first, own = await self._look(addresses[0]), await self._known_end(addresses[0])
        others = await asyncio.to_thread(
            self._begun, first, own.schema, wanted, addresses[1:]
        )
        found = [first, *await each(self._look, others)]
        parts = await asyncio.to_thread(self._unified, found, wanted)
        self._wanted = wanted
        return parts

    def _begun(
        self,
        first: "_File",
        own: "pa.Schema",
        wanted: Wanted,
        others: "Sequence[str]",
    ) -> "Sequence[str]":
        """Begin a table; return the other files that may have wanted rows."""
        columns = self._in_names
        assert columns is not None
        wanted.begin(first.schema, first.location, in_names=len(columns) > 0)
        if wanted.filters is None or not len(columns):
            return others
        names = map(self._opener.name, others)
        known = [condition_of(name, columns, own) for name in names]
        kept = wanted.filters.files(first.schema, known)
        return [others[number] for number in kept]

    async def _are_unchanged(self, addresses: Sequence[str]) -> bool:
        """Return whether the files are those of the latest listing: ends stay valid.

        One changed file may change the columns that are read of the others.
        """
        if [*addresses] != self._listed:
            return False
        read = [*self._versions]
        versions = await each(self._opener.version, read)
        return all(
            now.is_marked and now.is_of(self._versions[address])
            for address, now in zip(read, versions, strict=True)
        )

    def _unified(self, files: "Sequence[_File]", wanted: Wanted) -> list[Part]:
        """Unify the files into one table, and return their shards; in a thread."""
        table, filters = wanted.table, wanted.filters
        for file in files:
            table.add(file.schema, file.location)
        wanted.settle()
        shards = Listed()
        sizes: list[int] = []
        skipped: list[Part] = []
        about = [] if filters is None else filters.names(table.schema)
        for file in files:
            # Statistics do not apply to values that are cast before the comparison.
            is_plain = table.has(file.schema, about)
            for number, (part, size) in enumerate(file.parts):
                one = (file.address, *part)
                if is_plain and number in file.skipped:
                    skipped.append((*one, SKIPPED))
                else:
                    shards.append(one)
                    sizes.append(size)
        # Empty shards come last, so that lanes have equal shares of the others; where
        # these are fewer than readers, they are cut.
        shards.sizes = sizes + [0] * len(skipped)
        shards += skipped
        return shards

    async def sizes(
        self,
        shards: Sequence[Part],
        *,
        must: bool,  # noqa: ARG002  (they were read with the ends of the files)
    ) -> Sequence[int] | None:
        """Return the length of each shard: in rows, or in bytes."""
        return shards.sizes if isinstance(shards, Listed) else None

    def summary(self, shards: Sequence[Part]) -> "Summary":
        """Return the number of shards, and a checksum of their files' names."""
        return summary_of(address for address, *_ in shards)

    def describe(self) -> dict[str, Any]:
        """Return which columns are read, and the replacements of NULLs in them."""
        return self._wanted.describe()

    def count(self, shards: Sequence[Part]) -> int:
        """Return how many shards may have wanted rows."""
        return sum(shard[-1] != SKIPPED for shard in shards)

    async def cut(self, shards: Sequence[Part], count: int) -> list[Part]:
        """Return ``count`` shards that have the same rows in the same order.

        Raises:
            ValueError: If a file cannot be cut.
        """
        whole = [shard for shard in shards if shard[-1] != SKIPPED]
        void = [shard for shard in shards if shard[-1] == SKIPPED]
        if not whole:
            return void if len(void) >= count else (void * count)[:count]
        # Empty shards are left out, so that each reader has rows.
        found: list[Part] = []
        for shard, parts in zip(whole, shares(count, len(whole)), strict=True):
            found += self._cut(shard, parts) if parts > 1 else [shard]
        return found

    def _cut(self, shard: Part, count: int) -> list[Part]:
        """Return a shard in parts; a part's reader also decodes the rows before it."""
        return [(*shard, number, count) for number in range(count)]

    async def _look(self, address: str) -> "_File":
        """Return the facts about a file needed before it is read."""
        end = await self._known_end(address)
        schema = self._shared(self._with_name(end.schema, address))
        parts, skipped = [*self._parts_of(end)], self._skipped_of(end)
        return _File(address, self._opener.label(address), schema, parts, skipped)

    def _with_name(self, schema: "pa.Schema", address: str) -> "pa.Schema":
        """Return the columns of a file, and those in its name."""
        if not self._in_names:
            return schema
        return with_columns(schema, self._in_names, self._opener.name(address))

    def _rows_of(self, address: str, wanted: Wanted, location: str) -> Any:
        """Return what makes the rows to deliver from a checked batch of a file."""
        in_name = values_of(self._opener.name(address)) if self._in_names else None
        return partial(wanted.rows_of, location=location, in_name=in_name)

    def _shared(self, schema: "pa.Schema") -> "pa.Schema":
        """Return one object for equal schemas: there may be many files."""
        found = next((one for one in self._schemas if one.equals(schema)), schema)
        if found is schema:
            self._schemas.append(schema)
        return found

    async def _end(self, address: str, position: "Position") -> SomeEnd:
        """Return the end of a file, checked for wanted columns and the state."""
        end, location = await self._known_end(address), self._opener.label(address)
        Known.of(position).check(location, end.version)
        self._wanted.check(self._with_name(end.schema, address), location)
        return end

    async def _known_end(self, address: str) -> SomeEnd:
        end = self._kept.get(address)
        if end is None:
            location = self._opener.label(address)
            end = await self._read_end(address, location)
            first = self._versions.setdefault(address, end.version)
            Known(first).check(location, end.version)
            self._kept[address] = end
            self._drop_ends()
        return end

    def _void(self, place: Place) -> TableReader:
        """Return a reader of a shard in which no row is wanted."""

        async def opening(_window: int) -> Source:
            return Source(lambda: iter(()), _same, 0)

        return TableReader(opening, place, 0, 0)

    def _skipped_of(self, end: SomeEnd) -> Collection[int]:  # noqa: ARG002
        """Return the parts of a file in which no row is wanted, by number."""
        return ()

    @abstractmethod
    def open(self, shard: Any, position: "Position", budget: int) -> "ShardReader":
        """Return a reader of a shard."""

    @abstractmethod
    async def _read_end(self, address: str, location: str) -> SomeEnd:
        """Read the end of a file."""

    @abstractmethod
    def _drop_ends(self) -> None:
        """Drop ends of files if there are too many; the last one stays."""

    @abstractmethod
    def _parts_of(self, end: SomeEnd) -> Iterable[tuple[Part, int]]:
        """Return what distinguishes the shards of a file, and their lengths."""

    def __getstate__(self) -> dict[str, Any]:
        schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)
        kept: dict[str, Any] = {"_kept": OrderedDict(), "_schemas": schemas}
        return {**self.__dict__, **kept, "_versions": {}, "_listed": []}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(sealed(self._addresses))})"


class _File(NamedTuple):
    """Facts about a file, known before it is read.

    Attributes:
        address: The file's address.
        location: The address as it may be shown.
        schema: All its columns.
        parts: What distinguishes its shards, and their lengths.
        skipped: Numbers of the shards in which no row is wanted.
    """

    address: str
    location: str
    schema: "pa.Schema"
    parts: list[tuple[Part, int]]
    skipped: Collection[int]


def _same(batch: "pa.RecordBatch") -> "pa.RecordBatch":
    return batch


def _import(modules: Iterable[str]) -> None:
    try:
        for name in ("pyarrow", *modules):
            importlib.import_module(name)
    except ImportError as exc:
        raise ImportError(
            'Parquet and Arrow files need pyarrow: pip install "aioloader[arrow]"'
        ) from exc


async def read_tail(
    opener: Copies, address: str, least: int = _TAIL, version: Version | None = None
) -> Tail:
    """Return the last ``least`` bytes of a file, or all that it has.

    Raises:
        DatasetError: If it cannot be read, or is not of ``version``.
    """
    path = opener.local(address)
    if path is not None:
        return await asyncio.to_thread(_read_local, path, -least, 0, Known(version))
    version = version or await opener.version(address)
    start = max(0, version.size - least)
    return Tail(version, await _read(opener, address, start, version.size, version))


async def read_head(opener: Copies, address: str, stop: int, version: Version) -> bytes:
    """Return the first ``stop`` bytes of a file that has that many.

    Raises:
        DatasetError: If it cannot be read, or is not of ``version``.
    """
    path = opener.local(address)
    if path is None:
        return await _read(opener, address, 0, stop, version)
    known = Known(version)
    return (await asyncio.to_thread(_read_local, path, 0, stop, known)).data


async def _read(
    opener: Copies, address: str, start: int, stop: int, version: Version
) -> bytes:
    if start >= stop:
        return b""
    data = bytes(memoryview(await opener.read(address, start, stop, version)))
    return _checked(data, stop - start, opener.label(address))


def _read_local(path: str, start: int, stop: int, known: Known) -> Tail:
    """Return bytes of a local file; a start of 0 or less counts from the end."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (thousands of them)
            version = version_of_file(file.fileno())
            start = max(0, start + version.size) if start < 0 else start
            file.seek(start)
            data = file.read((stop or version.size) - start)
    except OSError as error:
        raise file_failure(path, error) from error
    known.check(path, version)
    return Tail(version, _checked(data, (stop or version.size) - start, path))


def _checked(data: bytes, expected: int, location: str) -> bytes:
    if len(data) != expected:
        raise TruncatedReadError(
            f"{location!r} gave {len(data):,} of {expected:,} bytes; it was rewritten "
            "meanwhile",
            location=location,
            expected=expected,
            received=len(data),
        )
    return data
