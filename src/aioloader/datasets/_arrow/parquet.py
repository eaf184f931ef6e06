"""Parquet files: row groups as shards, and only the columns that are wanted.

The order is that of files, row groups, rows. A row group is decoded a few thousand rows
at a time, so memory does not depend on its size. Only the bytes of the wanted columns
are requested from an object. Checksums of pages, where present, are verified.
"""

import asyncio
import contextlib
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq

from aioloader.datasets._arrow.files import SKIPPED, TAIL, End, Part, TableFormat
from aioloader.datasets._arrow.ranges import RangeFile, Span, file_of
from aioloader.datasets._arrow.reader import (
    Opened,
    TableReader,
    begin_together,
    between,
    part_of,
)
from aioloader.datasets._arrow.wanted import checked
from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    from aioloader.datasets._streams.shards import Position, ShardReader

# Length of the footer and the magic number after it.
_END = 8
_MAGIC = b"PAR1"
# Most rows of a batch: enough to make its fixed cost small.
_ROWS = 16_384
# Encoded bytes of a batch; those of a step count as decoded.
_BATCH = 1 << 20
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
        leaves: Numbers of the wanted leaf columns in each row group, once looked up; a
            nested column has several.
        is_sound: Whether the wanted columns of all row groups were checked.
    """

    metadata: "pq.FileMetaData"
    leaves: list[int] | None = None
    is_sound: bool = False


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

    def is_small(self, window: int) -> bool:
        """Return whether the whole encoded row group may be in memory."""
        return sum(stop - start for start, stop in self.spans) <= window // 2

    def request(self, window: int) -> int:
        """Return the most bytes of a request."""
        # In a large row group, each column has one request in use and one in flight.
        parts = 4 if self.is_small(window) else 2 * max(2, len(self.spans))
        return _within(_LEAST_REQUEST, window // parts, _MOST_REQUEST)

    def buffer(self, window: int) -> int:
        """Return the buffer of each column; 0: read a small row group whole."""
        if self.is_small(window):
            return 0
        return _within(_LEAST_BUFFER, window // 4 // len(self.spans), _MOST_BUFFER)


class ParquetFormat(TableFormat):
    """Row groups of Parquet files.

    A shard is an address and a number; then a word if no row of it is wanted, or a part
    and the number of parts. Arguments and errors are those of ``TableFormat``.
    """

    def open(self, shard: Part, position: "Position", budget: int) -> TableReader:
        """Return a reader of one row group."""
        address, number, *part = shard
        label, unit = self._opener.label(address), f"row group {number}"
        opening = partial(self._open, address, number, part, position, (label, unit))
        return TableReader(opening, label, unit, position, budget)

    def open_together(self, shards: Sequence[Part], budget: int) -> list["ShardReader"]:
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

    def _small(self, shard: Part) -> int | None:
        """Return about how many bytes a row group has; None: opening it waits."""
        address, number, *more = shard
        end = self._kept.get(address)
        if more or end is None or self._opener.path(address) is None:
            return None
        metadata, leaves = end.facts.metadata, end.facts.leaves
        if not end.facts.is_sound or not leaves or len(leaves) > _FEW:
            return None
        if number >= metadata.num_row_groups:
            return None
        whole: int = metadata.row_group(number).total_byte_size
        nbytes: int = max(0, whole) * len(leaves) // metadata.num_columns
        return nbytes

    async def _read_end(self, address: str, location: str) -> End:
        tail, version = await self._opener.part(address, -TAIL)
        length = _footer_length(tail, version.size, location)
        if length > len(tail):
            tail, _ = await self._opener.part(address, -length, 0, version)
        args = tail[-length:], version, address, location
        return await asyncio.to_thread(self._parsed, *args)

    def _parsed(
        self, footer: bytes, version: Version, address: str, location: str
    ) -> End:
        """Read a footer; in a thread, because wide tables take long."""
        try:
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
            schema = checked(metadata.schema.to_arrow_schema())
        except Exception as error:
            raise _damaged(repr(location), location, error) from error
        groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
        parts = [((at,), group.num_rows) for at, group in enumerate(groups)]
        skipped: set[int] = set()
        if (filters := self._wanted.filters) is not None:
            known = self._condition(address, schema)
            named = self._with_name(schema, address)
            found = filters.row_groups(version.size, footer, named, known)
            skipped = {*range(len(parts))} - {
                *(range(len(parts)) if found is None else found)
            }
        nbytes = metadata.serialized_size
        return End(
            version, self._shared(schema), parts, Footer(metadata), nbytes, skipped
        )

    async def _open(
        self,
        address: str,
        number: int,
        part: Sequence[Any],
        position: "Position",
        place: tuple[str, str],
        window: int,
    ) -> Opened:
        if part == [SKIPPED]:
            return Opened(lambda: iter(()), lambda batch: batch, 0)
        end, wanted = await self._end(address, position)
        location, unit = place
        footer: Footer = end.facts
        if number >= footer.metadata.num_row_groups:
            text = f"{location!r} has {footer.metadata.num_row_groups} row groups"
            raise DatasetError(
                f"{text}, number {number} is wanted; it was rewritten meanwhile",
                location=location,
            )
        names = wanted.present(end.schema)
        find = partial(
            _group_of, end, number, names, f"{unit} of {location!r}", location
        )
        is_quick = footer.is_sound and len(footer.leaves or names) <= _FEW
        group = find() if is_quick else await asyncio.to_thread(find)
        most = group.request(window)
        ranges = self._ranges(address, end, group.spans, most, window, in_order=False)
        first, stop = part_of(group.rows, *part)
        path, buffer = self._opener.path(address), group.buffer(window)

        def items() -> "Iterator[pa.RecordBatch]":
            file = file_of(path, ranges)
            batches = _batches(file, footer.metadata, number, group, buffer, names)
            # Of all rows, those beyond are an error.
            return between(batches, first, stop) if part else batches

        return self._opened(
            address, end, wanted, items=items, rows=stop - first, ranges=ranges
        )


def _within(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _damaged(place: str, location: str, error: Exception) -> DatasetError:
    text = f"{place} has a footer that cannot be read: {error}; it is damaged"
    return DatasetError(text, location=location)


def _footer_length(tail: bytes, size: int, location: str) -> int:
    """Return how many bytes at a file's end are its footer, with length and magic."""
    end = tail[-_END:]
    if end[4:] == b"PARE":
        text = f"{location!r} is an encrypted Parquet file, which cannot be read"
        raise DatasetError(text, location=location)
    if len(end) < _END or end[4:] != _MAGIC:
        raise TruncatedReadError(
            f"{location!r} does not end like a Parquet file: it is not one, or was cut "
            f"short at {size:,} bytes",
            location=location,
            received=size,
        )
    length: int = struct.unpack("<I", end[:4])[0] + _END
    if length + len(_MAGIC) > size:
        raise DatasetError(
            f"{location!r} is damaged: its footer has {length:,} bytes, the whole file "
            f"has {size:,}",
            location=location,
        )
    return length


def _group_of(
    end: End, number: int, names: list[str], place: str, location: str
) -> Group:
    """Find the columns ``names`` of a row group; in a thread, as above."""
    footer: Footer = end.facts
    if footer.leaves is None:
        # Only once: later row groups of the file need no further check of columns.
        footer.is_sound = _why_unsound(end, None, names) is None
        footer.leaves = _leaves(footer.metadata, names)
    if not footer.is_sound and (error := _why_unsound(end, number, names)):
        raise _damaged(place, location, error) from error
    group = footer.metadata.row_group(number)
    spans: list[Span] = []
    decoded = 0
    for at in footer.leaves:
        chunk = group.column(at)
        if chunk.file_path:
            text = f"{place} has columns in other files: {chunk.file_path!r}"
            raise DatasetError(text, location=location)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
            start = chunk.dictionary_page_offset
        spans.append((start, min(end.size, start + chunk.total_compressed_size)))
        decoded += max(0, chunk.total_uncompressed_size)
    per_row = decoded // max(1, group.num_rows)
    return Group(spans, group.num_rows, _within(1, _BATCH // max(1, per_row), _ROWS))


def _why_unsound(end: End, number: int | None, names: list[str]) -> Exception | None:
    """Start reading columns of one or all row groups, up to the first byte.

    With a damaged footer this fails. Inspecting its columns one by one does not:
    pyarrow lets a C++ exception escape there, which ends the process. The missing byte
    makes pyarrow raise its own error; it would keep an exception of ours forever.
    """
    begun: list[int] = []

    def read(start: int, _stop: int) -> bytes:
        begun.append(start)
        return b""

    metadata = end.facts.metadata
    numbers = range(metadata.num_row_groups) if number is None else [number]
    try:
        file = RangeFile(end.size, read)
        parquet = pq.ParquetFile(file, metadata=metadata, pre_buffer=True)
        next(parquet.iter_batches(1, [*numbers], names, use_threads=False), None)
    except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
        return None if begun else error
    return None


def _leaves(metadata: "pq.FileMetaData", names: list[str]) -> list[int]:
    """Return the numbers of the columns ``names``, including nested ones."""
    schema = metadata.schema
    prefixes = tuple(f"{name}." for name in names)
    return [
        at
        for at in range(metadata.num_columns)
        if f"{schema.column(at).path}.".startswith(prefixes)
    ]


def _batches(
    file: Any,
    metadata: "pq.FileMetaData",
    number: int,
    group: Group,
    buffer_size: int,
    names: list[str],
) -> "Generator[pa.RecordBatch, None, None]":
    """Decode a row group, in the thread that iterates."""
    with contextlib.closing(file):
        parquet = pq.ParquetFile(
            file,
            metadata=metadata,
            buffer_size=buffer_size,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        for batch in parquet.iter_batches(
            group.batch_rows, row_groups=[number], columns=names, use_threads=False
        ):
            yield batch.select(names)
