"""The common part of Parquet, Arrow and CSV files: addresses, columns and shards.

Shards are in the order of the files. What is to be known of a file before it is read,
mostly its end, is read once, of many files at a time.
"""

import contextlib
import copy
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from aioloader._base.outlast import each, in_thread
from aioloader.datasets._arrow.filters import Partitions
from aioloader.datasets._arrow.ranges import RangeFile, Ranges, Span, plan
from aioloader.datasets._arrow.reader import Item, Opened, TableReader, edges
from aioloader.datasets._arrow.wanted import Wanted
from aioloader.datasets._stores.addresses import sealed, shown_addresses
from aioloader.datasets._stores.places import Listed, Places
from aioloader.datasets._stores.versions import Known, Version
from aioloader.datasets._streams.shards import (
    Position,
    ShardFormat,
    Summary,
    summary_of,
)
from aioloader.errors import DatasetError

# An address, and what distinguishes a part of the file.
Part: TypeAlias = tuple[Any, ...]

# Most footers are shorter, so that one request gets them.
_TAIL = 1 << 16
# Ends kept, in bytes: shards of one file are mostly read one after the other.
_KEPT = 64 << 20
# Recent schemas to compare with, so that equal ones share an object.
_SCHEMAS = 8


class End(NamedTuple):
    """What is known of a file before it is read, mostly from its end."""

    address: str
    location: str  # the address, redacted
    version: Version
    schema: pa.Schema
    # What distinguishes its shards, and their lengths in rows or bytes.
    parts: Sequence[tuple[Part, int]]
    facts: Any  # what the format knows besides
    nbytes: int  # about how much memory this takes
    skipped: Collection[int] = ()  # shards in which no row is wanted


class Decoding(NamedTuple):
    """How a shard is decoded from the open file, in a thread."""

    items: Callable[[pa.NativeFile], Iterator[Item]]
    spans: Sequence[Span]  # bytes to request of an object
    most: int  # bytes of a request
    in_order: bool = True  # whether the bytes are read one after the other
    rows: int | None = None  # that are expected
    tail: bytes = b""  # the end of the file, if that is known and read again


class TableFormat(ShardFormat[Part]):
    """Tables in files, each with one or more shards.

    A format says what is known of a file (``_read_end``), and how a part of it is
    decoded (``_decoding``). ``addresses`` are patterns; the other arguments are those
    of ``Wanted``, whose errors it raises.
    """

    def __init__(self, addresses: Any, places: Places, **wanted: Any) -> None:
        self._addresses = addresses
        self.places: Places = places
        self._wanted = Wanted(**wanted)
        self._partitions = Partitions()
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[str, End] = OrderedDict()
        # Of all files, as listed: an end may be dropped and read again.
        self._listed: list[str] = []
        self._versions: dict[str, Version] = {}
        self._schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)

    # -- shards ---------------------------------------------------------------------

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[Part]:
        stack.push_async_callback(self.places.aclose)
        addresses = await self.places.expand(self._addresses)
        if not await self._are_unchanged(addresses):
            self._forget()
            self._listed = [*addresses]
        names = map(self.places.name, addresses)
        given = self._wanted.given or ()
        self._partitions = await in_thread(Partitions, names, given)
        # The first file decides which columns are read; all decide their types.
        first = await self._known_end(addresses[0])
        wanted, others = await in_thread(self._begun, first, addresses[1:])
        ends = [first, *await each(self._known_end, others)]
        shards = await in_thread(self._unified, ends, wanted)
        self._wanted = wanted  # other iterations used the previous one until here
        return shards

    async def _are_unchanged(self, addresses: Sequence[str]) -> bool:
        """Return whether the files are those of the latest listing: ends stay valid.

        One changed file may change the columns that are read of the others.
        """
        if [*addresses] != self._listed:
            return False
        versions = await each(self.places.version, [*self._versions])
        return all(
            now.is_marked and now.is_of(known)
            for now, known in zip(versions, self._versions.values(), strict=True)
        )

    def _begun(self, first: End, others: Sequence[str]) -> tuple[Wanted, Sequence[str]]:
        """Begin a table; return it, and the other files that may have wanted rows."""
        schema = self._with_name(first.schema, first.address)
        wanted = copy.copy(self._wanted)
        wanted.start(schema, first.location)
        if wanted.filters is None or not self._partitions:
            return wanted, others
        known = [self._condition(one, first.schema) for one in others]
        return wanted, [others[at] for at in wanted.filters.files(schema, known)]

    def _unified(self, ends: Sequence[End], wanted: Wanted) -> list[Part]:
        """Unify the files into one table, and return their shards; in a thread."""
        for end in ends:
            wanted.add(self._with_name(end.schema, end.address), end.location)
        wanted.settle()
        filters, shards = wanted.filters, Listed()
        about = [] if filters is None else filters.names(wanted.schema)
        shards.sizes = sizes = []
        for end in ends:
            schema = self._with_name(end.schema, end.address)
            # Statistics do not apply to values that are cast before the comparison.
            is_plain = not end.skipped or wanted.has(schema, about)
            for number, (part, size) in enumerate(end.parts):
                if not (is_plain and number in end.skipped):
                    shards.append((end.address, *part))
                    sizes.append(size)
        if not shards and (left := next((end for end in ends if end.parts), None)):
            # One that has no wanted row, for its readers to find out.
            (part, size), *_ = left.parts
            shards.append((left.address, *part))
            sizes.append(size)
        return shards

    async def sizes(self, shards: Sequence[Part], *, must: bool) -> list[int] | None:  # noqa: ARG002  (they were read with the ends of the files)
        return shards.sizes if isinstance(shards, Listed) else None

    def summary(self, shards: Sequence[Part]) -> Summary:
        return summary_of(address for address, *_ in shards)

    def describe(self) -> dict[str, Any]:
        return self._wanted.describe()

    async def cut(self, shards: Sequence[Part], count: int) -> list[Part]:
        found: list[Part] = []
        if not shards:  # files without row groups
            return found
        counts = (b - a for a, b in pairwise(edges(count, len(shards))))
        for shard, parts in zip(shards, counts, strict=True):
            found += self._cut(shard, parts) if parts > 1 else [shard]
        return found

    def _cut(self, shard: Part, count: int) -> list[Part]:
        """Return a shard in parts; a part's reader also decodes the rows before it."""
        return [(*shard, number, count) for number in range(count)]

    # -- ends of files --------------------------------------------------------------

    async def _known_end(self, address: str) -> End:
        end = self._kept.get(address)
        if end is None:
            end = await self._read_end(address, self.places.label(address))
            first = self._versions.setdefault(address, end.version)
            Known(first).check(end.location, end.version)
            self._kept[address] = end
            sizes = [one.nbytes for one in self._kept.values()]
            while sum(sizes) > _KEPT and len(sizes) > 1:
                self._kept.popitem(last=False)
                del sizes[0]
        return end

    @abstractmethod
    async def _read_end(self, address: str, location: str) -> End:
        """Read what is to be known of a file."""

    async def _tail(
        self, address: str, length_of: Callable[[bytes, int, str], int]
    ) -> tuple[bytes, Version]:
        """Return the end of a file, as long as it says, and the file's version."""
        tail, version = await self.places.part(address, -_TAIL)
        length = length_of(tail, version.size, self.places.label(address))
        if length > len(tail):
            tail, _ = await self.places.part(address, -length, 0, version)
        return tail[len(tail) - length :], version

    def _shared(self, schema: pa.Schema) -> pa.Schema:
        """Return one object for equal schemas: there may be many files."""
        found = next((one for one in self._schemas if one.equals(schema)), schema)
        if found is schema:
            self._schemas.append(schema)
        return found

    def _with_name(self, schema: pa.Schema, address: str) -> pa.Schema:
        """Return the columns of a file, and those in its name."""
        if not self._partitions:
            return schema
        return self._partitions.added(schema, self.places.name(address))

    def _condition(self, address: str, own: pa.Schema) -> Any:
        """Return what a file's name says of all its rows, or None."""
        if not self._partitions:
            return None
        return self._partitions.condition(self.places.name(address), own)

    # -- reading --------------------------------------------------------------------

    def open(self, shard: Part, position: Position, budget: int) -> TableReader:
        address, *part = shard
        opening = partial(self._open, address, part, position)
        label = self.places.label(address)
        return TableReader(opening, label, self._unit(part), position, budget)

    @abstractmethod
    def _unit(self, part: Sequence[Any]) -> str:
        """Return what a part of a file is called in errors; empty: all of it."""

    @abstractmethod
    async def _decoding(
        self,
        end: End,
        wanted: Wanted,
        part: Sequence[Any],
        position: Position,
        window: int,
    ) -> Decoding:
        """Return how a part of a file is decoded, holding up to ``window`` bytes."""

    async def _open(
        self, address: str, part: Sequence[Any], position: Position, window: int
    ) -> Opened:
        end = await self._known_end(address)
        Known.of(position).check(end.location, end.version)
        columns = self._with_name(end.schema, address)
        # A later listing replaces it.
        wanted = self._wanted = self._wanted.checked(columns, end.location)
        how = await self._decoding(end, wanted, part, position, window)
        ranges = None
        path = self.places.path(address)
        if path is None:
            ranges = Ranges(
                partial(self.places.read, address, version=end.version),
                end.version.size,
                plan(how.spans, how.most, in_order=how.in_order),
                budget=window,
                location=end.location,
                in_order=how.in_order,
            )
            ranges.tail = how.tail

        def items() -> Iterator[Item]:
            if ranges is None:
                file = pa.OSFile(path)
            else:
                raw = RangeFile(end.version.size, ranges.read)
                file = pa.PythonFile(raw, mode="r")
            with contextlib.closing(file):
                yield from how.items(file)

        in_name = Partitions.of(self.places.name(address)) if self._partitions else None
        return Opened(
            items=items,
            rows_of=partial(wanted.rows_of, location=end.location, in_name=in_name),
            rows=how.rows,
            ranges=ranges,
            version=end.version,
            check=partial(self.places.check, address, end.version),
            may_wait=ranges is not None,
        )

    def __getstate__(self) -> dict[str, Any]:
        schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)
        known: dict[str, Any] = {"_kept": OrderedDict(), "_schemas": schemas}
        return {**self.__dict__, **known, "_listed": [], "_versions": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(sealed(self._addresses))})"


def damaged_footer(place: str, location: str, error: Exception) -> DatasetError:
    text = f"{place} has a footer that cannot be read: {error}; write or copy it again"
    return DatasetError(text, location=location)


def check_footer(length: int, room: int, size: int, location: str) -> None:
    """Check that a file of ``size`` bytes has ``room`` for its footer."""
    if not 0 < length <= room:
        raise DatasetError(
            f"{location!r} is damaged: its footer has {length:,} bytes, the whole file "
            f"has {size:,}; write or copy it again",
            location=location,
        )
