"""Parquet files: row groups as shards, and only the columns that are wanted.

The order is that of files, row groups, rows. A row group is decoded a few thousand rows
at a time, so memory does not depend on its size. Only the bytes of the wanted columns
are requested from an object. Checksums of pages, where present, are verified.
"""

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from aioloader._base.cancellation import in_thread
from aioloader.datasets._arrow.files import (
    DecodePlan,
    FileMetadata,
    FilePart,
    Item,
    TableFormat,
    TableReader,
    begin_together,
    between,
    check_footer,
    damaged_footer,
    edges,
)
from aioloader.datasets._arrow.projection import Projection, checked
from aioloader.datasets._arrow.ranges import ByteSpan, RangeFile
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._streams.shards import ShardPosition, ShardReader
from aioloader.errors import DatasetError, TruncatedReadError

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
    metadata: pq.FileMetaData
    # Numbers of the wanted leaf columns, once looked up; a nested column has several.
    leaves: list[int] | None = None
    # Whether the wanted columns of all row groups were checked.
    is_sound: bool = False


class ParquetFormat(TableFormat):
    """Row groups of Parquet files.

    A shard is an address and a number; then, optionally, a part and the number of
    parts. Arguments and errors are those of ``TableFormat``.
    """

    def open_together(
        self, shards: Sequence[FilePart], budget: int
    ) -> list[ShardReader]:
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

    def _small(self, shard: FilePart) -> int | None:
        """Return about how many bytes a row group has; None: opening it waits."""
        address, number, *more = shard
        end = self._kept.get(address)
        if more or end is None or self.storage.path(address) is None:
            return None
        metadata, leaves = end.facts.metadata, end.facts.leaves
        if not end.facts.is_sound or not leaves or len(leaves) > _FEW:
            return None
        if number >= metadata.num_row_groups:
            return None
        whole: int = metadata.row_group(number).total_byte_size
        return max(0, whole) * len(leaves) // int(metadata.num_columns)

    async def _read_end(self, address: str, location: str) -> FileMetadata:
        footer, version = await self._tail(address, _footer_length)
        return await in_thread(self._parsed, footer, version, address, location)

    def _parsed(
        self, footer: bytes, version: Version, address: str, location: str
    ) -> FileMetadata:
        """Read a footer; in a thread, because wide tables take long."""
        try:
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
            schema = checked(metadata.schema.to_arrow_schema())
        except Exception as error:
            raise damaged_footer(repr(location), location, error) from error
        groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
        parts = [((at,), group.num_rows) for at, group in enumerate(groups)]
        skipped: set[int] = set()
        # Such a footer is signed. Encrypted statistics would crash pyarrow.
        is_encrypted = metadata.serialized_size + _END < len(footer)
        filters = self._wanted.filters
        if filters is not None and not is_encrypted:
            known = self._condition(address, schema)
            named = self._with_name(schema, address)
            found = filters.row_groups(version.size, footer, named, known)
            skipped = {*range(len(parts))} - found if found is not None else set()
        facts, nbytes = Footer(metadata), metadata.serialized_size
        schema = self._shared(schema)
        return FileMetadata(
            address, location, version, schema, parts, facts, nbytes, skipped
        )

    def _unit(self, part: Sequence[Any]) -> str:
        return f"row group {part[0]}"

    async def _decoding(
        self,
        end: FileMetadata,
        wanted: Projection,
        part: Sequence[Any],
        position: ShardPosition,  # noqa: ARG002  (rows before it are decoded too)
        window: int,
    ) -> DecodePlan:
        footer: Footer = end.facts
        metadata, (number, *share) = footer.metadata, part
        if number >= metadata.num_row_groups:
            text = f"{end.location!r} has {metadata.num_row_groups} row groups"
            raise DatasetError(
                f"{text}, number {number} is wanted: it was rewritten; start again",
                location=end.location,
            )
        names = wanted.present(end.schema)
        is_quick = footer.is_sound and len(footer.leaves or names) <= _FEW
        args = end, number, names, self._unit(part)
        spans, decoded = await in_thread(_spans, *args, is_quick=is_quick)
        rows = metadata.row_group(number).num_rows
        batch_rows = _within(1, _BATCH // max(1, decoded // max(1, rows)), _ROWS)
        # Whether the whole encoded row group may be in memory; if it may not, each
        # column has a buffer, one request in use and one in flight.
        is_small = sum(stop - start for start, stop in spans) <= window // 2
        requests = 4 if is_small else 2 * max(2, len(spans))
        buffer = 0
        if not is_small:
            buffer = _within(_LEAST_BUFFER, window // 4 // len(spans), _MOST_BUFFER)
        first, stop = edges(rows, share[1])[share[0] :][:2] if share else (0, rows)

        def batches(file: pa.NativeFile) -> Generator[pa.RecordBatch, None, None]:
            parquet = pq.ParquetFile(
                file,
                metadata=metadata,
                buffer_size=buffer,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            for batch in parquet.iter_batches(
                batch_rows, row_groups=[number], columns=names, use_threads=False
            ):
                yield batch.select(names)

        def items(file: pa.NativeFile) -> Iterator[Item]:
            # Of all rows, those beyond are an error.
            found = batches(file)
            return between(found, first, stop) if share else found

        return DecodePlan(
            items,
            spans,
            most=_within(_LEAST_REQUEST, window // requests, _MOST_REQUEST),
            in_order=False,
            rows=stop - first,
        )


def _within(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _footer_length(tail: bytes, size: int, location: str) -> int:
    """Return how many bytes at a file's end are its footer, with length and magic."""
    end = tail[-_END:]
    if end[4:] == b"PARE":
        text = f"{location!r} is an encrypted Parquet file: decrypt it first"
        raise DatasetError(text, location=location)
    if len(end) < _END or end[4:] != _MAGIC:
        raise TruncatedReadError(
            f"{location!r} does not end like a Parquet file: it is not one, or was cut "
            f"short at {size:,} bytes: write or copy it again",
            location=location,
            received=size,
        )
    length: int = struct.unpack("<I", end[:4])[0] + _END
    check_footer(length, size - len(_MAGIC), size, location)
    return length


def _spans(
    end: FileMetadata, number: int, names: list[str], unit: str
) -> tuple[list[ByteSpan], int]:
    """Find the columns ``names`` of a row group: where they are, and their length."""
    footer: Footer = end.facts
    place = f"{unit} of {end.location!r}"
    if footer.leaves is None:
        # Only once: later row groups of the file need no further check of columns.
        footer.is_sound = _why_unsound(end, None, names) is None
        prefixes, schema = tuple(f"{name}." for name in names), footer.metadata.schema
        footer.leaves = [
            at
            for at in range(footer.metadata.num_columns)
            if f"{schema.column(at).path}.".startswith(prefixes)
        ]
    if not footer.is_sound and (error := _why_unsound(end, number, names)):
        if "decrypt" in str(error):
            text = (
                f"{place} has encrypted columns: {error}; leave them out (columns=), "
                "or decrypt it first"
            )
            raise DatasetError(text, location=end.location) from error
        raise damaged_footer(place, end.location, error) from error
    group = footer.metadata.row_group(number)
    spans: list[ByteSpan] = []
    decoded = 0
    for at in footer.leaves:
        chunk = group.column(at)
        if chunk.file_path:
            text = (
                f"{place} has columns in other files: {chunk.file_path!r}; leave them "
                "out (columns=), or write one file"
            )
            raise DatasetError(text, location=end.location)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
            start = chunk.dictionary_page_offset
        stop = min(end.version.size, start + chunk.total_compressed_size)
        spans.append((start, stop))
        decoded += max(0, chunk.total_uncompressed_size)
    return spans, decoded


def _why_unsound(
    end: FileMetadata, number: int | None, names: list[str]
) -> Exception | None:
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
        file = RangeFile(end.version.size, read)
        parquet = pq.ParquetFile(file, metadata=metadata, pre_buffer=True)
        next(parquet.iter_batches(1, [*numbers], names, use_threads=False), None)
    except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
        return None if begun else error
    return None
