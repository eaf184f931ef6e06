"""Parquet files: row groups as shards, and only the columns that are wanted.

The order is that of files, row groups, rows. A row group is decoded a few thousand rows
at a time, so memory does not depend on its size. Only the bytes of the wanted columns
are requested from an object. Checksums of pages, where present, are verified.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioloader.datasets._arrow.files import (
    SKIPPED,
    Part,
    TableFormat,
    Tail,
    read_tail,
)
from aioloader.datasets._arrow.hive import condition_of
from aioloader.datasets._arrow.ranges import RangeFile, Ranges, Span, plan
from aioloader.datasets._arrow.reader import (
    Place,
    Slice,
    Source,
    TableReader,
    begin_together,
    between,
)
from aioloader.datasets._arrow.wanted import Wanted, checked
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.shards import OpensTogether
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet as pq

    from aioloader.datasets._streams.shards import Position, ShardReader

# An address and a number; then a word if no row of it is wanted, or a part and the
# number of parts.
RowGroup: TypeAlias = tuple[Any, ...]

# Length of the footer and the magic number after it.
_END = 8
_MAGIC = b"PAR1"
# Most rows of a batch: enough to make its fixed cost small.
_ROWS = 16_384
# Encoded bytes of a batch; those of a step count as decoded.
_BATCH = 1 << 20
# Footers kept, in bytes: row groups of one file are mostly read one after the other.
_KEPT = 64 << 20
# Most columns that are looked up without a thread, which would cost more.
_FEW = 64
# Row groups decoded in one thread call: least bytes in all, and least number.
# When fewer than four are left, the next ones are opened (see ``START_DIVISOR``).
_TOGETHER, _FEWEST = 4 << 20, 2
_LEAST_REQUEST, _MOST_REQUEST = 1 << 16, 8 << 20
_LEAST_BUFFER, _MOST_BUFFER = 1 << 14, 1 << 20


@dataclass
class Footer:
    """The metadata at the end of a file.

    Attributes:
        metadata: The parsed footer.
        schema: The columns.
        version: The version of the file.
        skipped: Row groups in which no row is wanted, by their statistics.
        leaves: Numbers of the wanted leaf columns in each row group, once looked up; a
            nested column has several.
        is_sound: Whether the wanted columns of all row groups were checked.
    """

    metadata: "pq.FileMetaData"
    schema: "pa.Schema"
    version: Version
    skipped: set[int]
    leaves: list[int] | None = None
    is_sound: bool = False

    @property
    def size(self) -> int:
        """Length of the file, in bytes."""
        return self.version.size


class Group(NamedTuple):
    """The wanted part of a row group.

    Attributes:
        spans: Positions of its columns in the file.
        rows: Number of rows.
        batch_rows: Rows to decode at once.
    """

    spans: list[Span]
    rows: int
    batch_rows: int


class ParquetFormat(TableFormat[Footer], OpensTogether):
    """Row groups of Parquet files; a shard is an address and a number.

    Arguments and errors are those of ``TableFormat``.
    """

    modules = ("pyarrow.parquet", "pyarrow.compute")

    def open(self, shard: RowGroup, position: "Position", budget: int) -> TableReader:
        """Return a reader of one row group."""
        address, number, *more = shard
        label, unit = self._opener.label(address), f"row group {number}"
        if more == [SKIPPED]:
            return self._void(Place(label, unit))
        place = Place(label, unit, Slice(*more))
        opening = partial(self._open, address, number, place, position)
        return TableReader(opening, place, position.get("row", 0), budget)

    def open_together(
        self, shards: Sequence[RowGroup], budget: int
    ) -> list["ShardReader"]:
        """Return readers of the first row groups, if several are small and local."""
        left = nbytes = min(_TOGETHER, budget // 4)
        readers: list[TableReader] = []
        for shard in shards:
            size = self._small(shard)
            if size is None or size > left:
                break
            left -= size
            readers.append(self.open(shard, {}, budget))
        if len(readers) < _FEWEST:
            return []
        begin_together(readers, nbytes)
        return [*readers]

    def _small(self, shard: RowGroup) -> int | None:
        """Return about how many bytes a row group has; None: opening it waits."""
        address, number, *more = shard
        footer = self._kept.get(address)
        if more or footer is None or not footer.is_sound or not footer.leaves:
            return None
        if len(footer.leaves) > _FEW or self._opener.path(address) is None:
            return None
        metadata = footer.metadata
        if number >= metadata.num_row_groups:
            return None
        whole: int = metadata.row_group(number).total_byte_size
        nbytes: int = max(0, whole) * len(footer.leaves) // metadata.num_columns
        return nbytes

    def _parts_of(self, end: Footer) -> Iterable[tuple[Part, int]]:
        groups = map(end.metadata.row_group, range(end.metadata.num_row_groups))
        return (((number,), group.num_rows) for number, group in enumerate(groups))

    def _skipped_of(self, end: Footer) -> set[int]:
        return end.skipped

    async def _read_end(self, address: str, location: str) -> Footer:
        tail = await read_tail(self._opener, address)
        length = _footer_length(tail, location)
        if length > len(tail.data):
            tail = await read_tail(self._opener, address, length, tail.version)
        return await asyncio.to_thread(self._parsed, tail, length, address, location)

    def _parsed(self, tail: Tail, length: int, address: str, location: str) -> Footer:
        """Read a footer; in a thread, because wide tables take long."""
        footer, filters = _parsed(tail, length, location), self._wanted.filters
        if filters is not None:
            known, columns = None, self._in_names
            if columns:
                name = self._opener.name(address)
                known = condition_of(name, columns, footer.schema)
            schema = self._with_name(footer.schema, address)
            metadata = footer.metadata
            found = filters.row_groups(tail.size, tail.data, metadata, schema, known)
            footer.skipped.update({*range(metadata.num_row_groups)} - {*found})
        return footer

    def _drop_ends(self) -> None:
        sizes = [footer.metadata.serialized_size for footer in self._kept.values()]
        kept = sum(sizes)
        for size in sizes[:-1]:
            if kept <= _KEPT:
                break
            self._kept.popitem(last=False)
            kept -= size

    async def _open(
        self,
        address: str,
        number: int,
        place: Place,
        position: "Position",
        window: int,
    ) -> Source:
        footer = await self._end(address, position)
        wanted = self._wanted  # a later listing replaces it
        if number >= footer.metadata.num_row_groups:
            text = f"{place.location!r} has {footer.metadata.num_row_groups} row groups"
            raise DatasetError(
                f"{text}, number {number} is wanted; it was rewritten meanwhile",
                location=place.location,
            )
        names = wanted.table.present(footer.schema)
        if footer.is_sound and len(footer.leaves or names) <= _FEW:
            group = _group_of(footer, number, names, place)
        else:
            group = await asyncio.to_thread(_group_of, footer, number, names, place)
        ranges, path = None, self._opener.path(address)
        if path is None:
            ranges = Ranges(
                partial(self._opener.read, address, version=footer.version),
                footer.size,
                plan(group.spans, _request_for(group, window)),
                budget=window,
                location=place.location,
            )
        file = partial(_file_of, path, ranges)
        buffer = _buffer_for(group, window)
        first, stop = place.part.bounds(group.rows)
        batches = partial(
            _between, first, stop, file, footer, number, group, buffer, wanted
        )
        check = partial(self._opener.check, address, footer.version)
        rows_of = self._rows_of(address, wanted, place.location)
        return Source(batches, rows_of, stop - first, ranges, footer.version, check)


def _within(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _footer_length(tail: Tail, location: str) -> int:
    """Return how many bytes at a file's end are its footer, with length and magic."""
    end = tail.data[-_END:]
    if end[4:] == b"PARE":
        text = f"{location!r} is an encrypted Parquet file, which cannot be read"
        raise DatasetError(text, location=location)
    if len(end) < _END or end[4:] != _MAGIC:
        raise TruncatedReadError(
            f"{location!r} does not end like a Parquet file: it is not one, or was cut "
            f"short at {tail.size:,} bytes",
            location=location,
            received=tail.size,
        )
    length: int = struct.unpack("<I", end[:4])[0] + _END
    if length + len(_MAGIC) > tail.size:
        raise DatasetError(
            f"{location!r} is damaged: its footer has {length:,} bytes, the whole file "
            f"has {tail.size:,}",
            location=location,
        )
    return length


def _parsed(tail: Tail, length: int, location: str) -> Footer:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
    from pyarrow import parquet as pq  # noqa: PLC0415  (an optional dependency)

    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail.data[-length:]))
        schema = checked(metadata.schema.to_arrow_schema())
    except Exception as error:
        text = f"{location!r} has a footer that cannot be read: {error}; it is damaged"
        raise DatasetError(text, location=location) from error
    return Footer(metadata, schema, tail.version, set())


def _group_of(footer: Footer, number: int, names: list[str], place: Place) -> Group:
    """Find the columns ``names`` of a row group; in a thread, as above."""
    if footer.leaves is None:
        # Only once: later row groups of the file need no further check of columns.
        footer.is_sound = _why_unsound(footer, None, names) is None
        footer.leaves = _leaves(footer, names)
    if not footer.is_sound and (error := _why_unsound(footer, number, names)):
        text = f"{place} has a footer that cannot be read: {error}; it is damaged"
        raise DatasetError(text, location=place.location) from error
    group = footer.metadata.row_group(number)
    spans: list[Span] = []
    decoded = 0
    for at in footer.leaves:
        chunk = group.column(at)
        if chunk.file_path:
            text = f"{place} has columns in other files: {chunk.file_path!r}"
            raise DatasetError(text, location=place.location)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
            start = chunk.dictionary_page_offset
        stop = min(footer.size, start + chunk.total_compressed_size)
        spans.append((start, stop))
        decoded += max(0, chunk.total_uncompressed_size)
    per_row = decoded // max(1, group.num_rows)
    return Group(spans, group.num_rows, _within(1, _BATCH // max(1, per_row), _ROWS))


def _why_unsound(
    footer: Footer, number: int | None, names: list[str]
) -> Exception | None:
    """Start reading columns of one or all row groups, up to the first byte.

    With a damaged footer this fails. Inspecting its columns one by one does not:
    pyarrow lets a C++ exception escape there, which ends the process. The missing byte
    makes pyarrow raise its own error; it would keep an exception of ours forever.
    """
    from pyarrow import parquet as pq  # noqa: PLC0415  (an optional dependency)

    begun: list[int] = []

    def read(start: int, _stop: int) -> bytes:
        begun.append(start)
        return b""

    file = RangeFile(footer.size, read)
    numbers = range(footer.metadata.num_row_groups) if number is None else [number]
    try:
        parquet = pq.ParquetFile(file, metadata=footer.metadata, pre_buffer=True)
        next(parquet.iter_batches(1, [*numbers], names, use_threads=False), None)
    except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
        return None if begun else error
    return None


def _leaves(footer: Footer, names: list[str]) -> list[int]:
    """Return the numbers of the columns ``names``, including nested ones."""
    schema = footer.metadata.schema
    prefixes = tuple(f"{name}." for name in names)
    return [
        at
        for at in range(footer.metadata.num_columns)
        if f"{schema.column(at).path}.".startswith(prefixes)
    ]


def _request_for(group: Group, window: int) -> int:
    """Return the most bytes of a request."""
    # In a large row group, each column has one request in use and the next in flight.
    parts = 4 if _is_small(group, window) else 2 * max(2, len(group.spans))
    return _within(_LEAST_REQUEST, window // parts, _MOST_REQUEST)


def _is_small(group: Group, window: int) -> bool:
    """Return whether the whole encoded row group may be in memory."""
    return sum(stop - start for start, stop in group.spans) <= window // 2


def _buffer_for(group: Group, window: int) -> int:
    """Return the buffer of each column; 0: the row group is small, so read it whole."""
    if _is_small(group, window):
        return 0
    return _within(_LEAST_BUFFER, window // 4 // len(group.spans), _MOST_BUFFER)


def _file_of(path: str | None, ranges: Ranges | None) -> Any:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if path is not None:
        return pa.OSFile(path)
    assert ranges is not None
    return pa.PythonFile(RangeFile(ranges.size, ranges.read), mode="r")


def _between(
    first: int, stop: int, make_file: Callable[[], Any], *args: Any
) -> "Iterator[pa.RecordBatch]":
    """Decode some rows of a row group, and the rows before them."""
    group: Group = args[2]
    batches = _batches(make_file, *args)
    if (first, stop) == (0, group.rows):
        return batches  # all: rows beyond are an error
    return between(batches, first, stop)


def _batches(
    make_file: Callable[[], Any],
    footer: Footer,
    number: int,
    group: Group,
    buffer_size: int,
    wanted: Wanted,
) -> "Generator[pa.RecordBatch, None, None]":
    """Decode a row group, in the thread that iterates."""
    from pyarrow import parquet as pq  # noqa: PLC0415  (an optional dependency)

    with contextlib.closing(make_file()) as file:
        parquet = pq.ParquetFile(
            file,
            metadata=footer.metadata,
            buffer_size=buffer_size,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        for batch in parquet.iter_batches(
            group.batch_rows,
            row_groups=[number],
            columns=wanted.table.present(footer.schema),
            use_threads=False,
        ):
            yield wanted.of(batch)
