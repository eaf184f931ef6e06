"""The common part of Parquet, Arrow and CSV files: addresses, columns and shards.

Shards are in the order of the files. What is to be known of a file before it is read,
mostly its end, is read once, of many files at a time.
"""

import asyncio
import copy
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from aioloader.datasets._arrow.copies import Copies
from aioloader.datasets._arrow.hive import (
    columns_of,
    condition_of,
    values_of,
    with_columns,
)
from aioloader.datasets._arrow.ranges import Ranges, Span, plan
from aioloader.datasets._arrow.reader import Opened, TableReader, shares
from aioloader.datasets._arrow.wanted import Wanted
from aioloader.datasets._stores.addresses import sealed, shown_addresses
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.places import Listed, each
from aioloader.datasets._stores.versions import Known, Version
from aioloader.datasets._streams.shards import StoredFormat, summary_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import dataset as ds

    from aioloader.datasets._streams.shards import Position, Summary

# An address, and what distinguishes a part of the file.
Part: TypeAlias = tuple[Any, ...]

# Most footers are shorter, so that one request gets them.
TAIL = 1 << 16
# Ends kept, in bytes: shards of one file are mostly read one after the other.
_KEPT = 64 << 20
# Recent schemas to compare with, so that equal ones share an object.
_SCHEMAS = 8
# Suffix of the name of a shard in which no row is wanted.
SKIPPED = "skipped"


@dataclass(frozen=True)
class End:
    """What is known of a file before it is read, mostly from its end.

    Attributes:
        version: Its version.
        schema: All its columns.
        parts: What distinguishes its shards, and their lengths in rows or bytes.
        facts: What the format knows besides.
        nbytes: About how much memory this takes.
        skipped: Numbers of the shards in which no row is wanted.
    """

    version: Version
    schema: "pa.Schema"
    parts: Sequence[tuple[Part, int]]
    facts: Any
    nbytes: int
    skipped: Collection[int] = ()

    @property
    def size(self) -> int:
        """Length of the whole file, in bytes."""
        return self.version.size


class TableFormat(StoredFormat):
    """Tables in files, each with one or more shards.

    Args:
        addresses: Patterns of the files' addresses.
        places: Opens them.
        wanted: As for ``Wanted``: ``columns``, ``nulls``, ``schema``, ``filters``.

    Raises:
        ValueError: If ``wanted`` is wrong.
    """

    def __init__(self, addresses: Any, places: Any, **wanted: Any) -> None:
        self._addresses = addresses
        self._opener = Copies(places)
        self._wanted = Wanted(**wanted)
        # The columns that are in the names of files.
        self._in_names: pa.Schema | None = None
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[str, End] = OrderedDict()
        # Of all files, as listed: an end may be dropped and read again.
        self._listed: list[str] = []
        self._versions: dict[str, Version] = {}
        self._schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)

    def cached(self, cache: CacheDir) -> Self:
        """Return the same format, with files read through a cache."""
        clone = copy.copy(self)
        clone._opener = self._opener.cached(cache)  # noqa: SLF001
        return clone

    # -- shards ---------------------------------------------------------------------

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
            self._forget()
            self._listed = [*addresses]
        names = map(self._opener.name, addresses)
        given = self._wanted.given or ()
        self._in_names = await asyncio.to_thread(columns_of, names, given)
        # The first file decides which columns are read; all decide their types.
        first = await self._known_end(addresses[0])
        wanted, others = await asyncio.to_thread(self._begun, first, addresses)
        ends = [first, *await each(self._known_end, others)]
        files = [*zip([addresses[0], *others], ends, strict=True)]
        shards = await asyncio.to_thread(self._unified, files, wanted)
        self._wanted = wanted  # other iterations used the previous one until here
        return shards

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

    def _begun(
        self, first: End, addresses: Sequence[str]
    ) -> tuple[Wanted, Sequence[str]]:
        """Begin a table; return it, and the other files that may have wanted rows."""
        address, *others = addresses
        schema, in_names = self._with_name(first.schema, address), self._in_names
        location = self._opener.label(address)
        wanted = copy.copy(self._wanted)
        wanted.start(schema, location, in_names=bool(in_names))
        if wanted.filters is None or not in_names:
            return wanted, others
        known = [self._condition(one, first.schema) for one in others]
        kept = wanted.filters.files(schema, known)
        return wanted, [others[number] for number in kept]

    def _unified(self, files: Sequence[tuple[str, End]], wanted: Wanted) -> list[Part]:
        """Unify the files into one table, and return their shards; in a thread."""
        schemas = [self._with_name(end.schema, address) for address, end in files]
        for (address, _), schema in zip(files, schemas, strict=True):
            wanted.add(schema, self._opener.label(address))
        wanted.settle()
        filters, shards = wanted.filters, Listed()
        about = [] if filters is None else filters.names(wanted.schema)
        sizes: list[int] = []
        skipped: list[Part] = []
        for (address, end), schema in zip(files, schemas, strict=True):
            # Statistics do not apply to values that are cast before the comparison.
            is_plain = not end.skipped or wanted.has(schema, about)
            for number, (part, size) in enumerate(end.parts):
                if is_plain and number in end.skipped:
                    skipped.append((address, *part, SKIPPED))
                else:
                    shards.append((address, *part))
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

    # -- ends of files --------------------------------------------------------------

    async def _known_end(self, address: str) -> End:
        end = self._kept.get(address)
        if end is None:
            location = self._opener.label(address)
            end = await self._read_end(address, location)
            first = self._versions.setdefault(address, end.version)
            Known(first).check(location, end.version)
            self._kept[address] = end
            sizes = [one.nbytes for one in self._kept.values()]
            while sum(sizes) > _KEPT and len(sizes) > 1:
                self._kept.popitem(last=False)
                del sizes[0]
        return end

    @abstractmethod
    async def _read_end(self, address: str, location: str) -> End:
        """Read the end of a file."""

    async def _end(self, address: str, position: "Position") -> tuple[End, Wanted]:
        """Return the end of a file, checked for the state, and what is wanted of it."""
        end, location = await self._known_end(address), self._opener.label(address)
        Known.of(position).check(location, end.version)
        schema = self._with_name(end.schema, address)
        self._wanted = self._wanted.checked(schema, location)
        return end, self._wanted  # a later listing replaces it

    def _shared(self, schema: "pa.Schema") -> "pa.Schema":
        """Return one object for equal schemas: there may be many files."""
        found = next((one for one in self._schemas if one.equals(schema)), schema)
        if found is schema:
            self._schemas.append(schema)
        return found

    def _with_name(self, schema: "pa.Schema", address: str) -> "pa.Schema":
        """Return the columns of a file, and those in its name."""
        if not self._in_names:
            return schema
        return with_columns(schema, self._in_names, self._opener.name(address))

    def _condition(self, address: str, own: "pa.Schema") -> "ds.Expression | None":
        """Return what a file's name says of all its rows, or None."""
        if not self._in_names:
            return None
        return condition_of(self._opener.name(address), self._in_names, own)

    # -- reading --------------------------------------------------------------------

    @abstractmethod
    def open(self, shard: Any, position: "Position", budget: int) -> TableReader:
        """Return a reader of a shard."""

    def _ranges(
        self,
        address: str,
        end: End,
        spans: Iterable[Span],
        most: int,
        budget: int,
        *,
        in_order: bool = True,
    ) -> Ranges | None:
        """Return the requests for parts of a file; None if it is local.

        Args:
            address: The file.
            end: Its end.
            spans: The parts.
            most: Most bytes of a request.
            budget: Most bytes to hold.
            in_order: Whether the parts are read one after the other.
        """
        if self._opener.path(address) is not None:
            return None
        return Ranges(
            partial(self._opener.read, address, version=end.version),
            end.size,
            plan(spans, most, in_order=in_order),
            budget=budget,
            location=self._opener.label(address),
            in_order=in_order,
        )

    def _opened(self, address: str, end: End, wanted: Wanted, **options: Any) -> Opened:
        """Return an open shard of a file.

        Args:
            address: The file.
            end: Its end.
            wanted: What is read of it.
            options: The other attributes of ``Opened``.
        """
        in_name = values_of(self._opener.name(address)) if self._in_names else None
        location = self._opener.label(address)
        return Opened(
            rows_of=partial(wanted.rows_of, location=location, in_name=in_name),
            version=end.version,
            check=partial(self._opener.check, address, end.version),
            **options,
        )

    def __getstate__(self) -> dict[str, Any]:
        schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)
        known: dict[str, Any] = {"_kept": OrderedDict(), "_schemas": schemas}
        return {**self.__dict__, **known, "_listed": [], "_versions": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(sealed(self._addresses))})"
