"""Parquet files, whose shards are row groups; only projected columns are read.

Rows come in the order of files, row groups and rows. A row group is decoded a few
thousand rows at a time, so memory does not depend on its size. Page checksums are
verified where present.
"""

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from aioloader._base.cancellation import in_thread
from aioloader.datasets._arrow.files import (
    BATCH_ROWS,
    MAX_REQUEST,
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

# The footer is followed by its length and the magic number.
_END_BYTES = 8
_MAGIC = b"PAR1"
# Bytes of a batch, uncompressed but still encoded.
_BATCH_BYTES = 1 << 20
# For up to this many columns, a lookup is cheaper than a thread call for it.
_MAX_QUICK_COLUMNS = 64
# Maximum bytes and minimum number of small row groups to decode in one thread call.
_GROUPED_BYTES, _MIN_GROUPED = 4 << 20, 2
_MIN_REQUEST = 1 << 16
_MIN_BUFFER, _MAX_BUFFER = 1 << 14, 1 << 20


@dataclass
class Footer:
    """A parsed footer, and cached facts about the projected columns."""

    metadata: pq.FileMetaData
    # Indices of the leaf columns once looked up; a nested column has several.
    leaves: list[int] | None = None
    # Whether the projected columns can be opened in all row groups.
    is_sound: bool = False


class ParquetFormat(TableFormat):
    """A format for Parquet files; a shard is (address, row group[, part, parts])."""

    def open_together(
        self, shards: Sequence[FilePart], budget: int
    ) -> list[ShardReader]:
        """Start readers of two or more leading small local shards, or return []."""
        left = nbytes = min(_GROUPED_BYTES, budget // 4)
        readers: list[TableReader] = []
        for shard in shards:
            size = self._small_size(shard)
            if size is None or size > left:
                break
            left -= size
            readers.append(self.open(shard, {}, budget))
        if len(readers) < _MIN_GROUPED:
            return []
        begin_together(readers, nbytes)
        return [*readers]

    def _small_size(self, shard: FilePart) -> int | None:
        """Estimate the bytes read for a shard; None if it needs its own thread call."""
        address, number, *more = shard
        meta = self._cache.get(address)
        if more or meta is None or self.storage.path(address) is None:
            return None
        metadata, leaves = meta.details.metadata, meta.details.leaves
        if not meta.details.is_sound or not leaves or len(leaves) > _MAX_QUICK_COLUMNS:
            return None
        if number >= metadata.num_row_groups:
            return None
        whole: int = metadata.row_group(number).total_byte_size
        return max(0, whole) * len(leaves) // int(metadata.num_columns)

    async def _read_metadata(self, address: str, location: str) -> FileMetadata:
        footer, version = await self._tail(address, _footer_length)
        return await in_thread(self._parse_footer, footer, version, address, location)

    def _parse_footer(
        self, footer: bytes, version: Version, address: str, location: str
    ) -> FileMetadata:
        """Parse a footer; call this in a thread, because wide tables take long."""
        try:
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
            schema = checked(metadata.schema.to_arrow_schema())
        except Exception as error:
            raise damaged_footer(repr(location), location, error) from error
        groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
        parts = [((number,), group.num_rows) for number, group in enumerate(groups)]
        skipped: set[int] = set()
        # A longer footer is signed. pyarrow would crash on encrypted statistics.
        is_encrypted = metadata.serialized_size + _END_BYTES < len(footer)
        filters = self._projection.filters
        if filters is not None and not is_encrypted:
            guarantee = self._guarantee(address, schema)
            columns = self._columns(schema, address)
            kept = filters.row_groups(version.size, footer, columns, guarantee)
            skipped = {*range(len(parts))} - kept if kept is not None else set()
        details, nbytes = Footer(metadata), metadata.serialized_size
        schema = self._shared(schema)
        return FileMetadata(
            address, location, version, schema, parts, details, nbytes, skipped
        )

    def _unit(self, part: Sequence[Any]) -> str:
        return f"row group {part[0]}"

    async def _decode_plan(
        self,
        meta: FileMetadata,
        projection: Projection,
        part: Sequence[Any],
        position: ShardPosition,  # noqa: ARG002  (rows before it are decoded too)
        window: int,
    ) -> DecodePlan:
        footer: Footer = meta.details
        metadata, (number, *cut) = footer.metadata, part
        if number >= metadata.num_row_groups:
            text = f"{meta.location!r} has {metadata.num_row_groups} row groups"
            raise DatasetError(
                f"{text}, number {number} is wanted: it was rewritten; start again",
                location=meta.location,
            )
        names = projection.present(meta.schema)
        is_quick = footer.is_sound and len(footer.leaves or names) <= _MAX_QUICK_COLUMNS
        args = meta, number, names, self._unit(part)
        spans, decoded = await in_thread(_spans, *args, is_quick=is_quick)
        rows = metadata.row_group(number).num_rows
        batch_rows = _within(
            1, _BATCH_BYTES // max(1, decoded // max(1, rows)), BATCH_ROWS
        )
        # Whether the compressed columns fit into half the window. If not, each column
        # gets a buffer, with one request in use and one in flight.
        is_small = sum(stop - start for start, stop in spans) <= window // 2
        requests = 4 if is_small else 2 * max(2, len(spans))
        buffer = 0
        if not is_small:
            buffer = _within(_MIN_BUFFER, window // 4 // len(spans), _MAX_BUFFER)
        first, stop = edges(rows, cut[1])[cut[0] :][:2] if cut else (0, rows)

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
            # An uncut row group is read to its end, so that extra rows raise an error.
            return between(batches(file), first, stop) if cut else batches(file)

        return DecodePlan(
            items,
            spans,
            max_request=_within(_MIN_REQUEST, window // requests, MAX_REQUEST),
            in_order=False,
            rows=stop - first,
        )


def _within(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _footer_length(tail: bytes, size: int, location: str) -> int:
    """Return the length from the footer's start to the end; raise if it is missing."""
    end = tail[-_END_BYTES:]
    if end[4:] == b"PARE":
        text = f"{location!r} is an encrypted Parquet file: decrypt it first"
        raise DatasetError(text, location=location)
    if len(end) < _END_BYTES or end[4:] != _MAGIC:
        raise TruncatedReadError(
            f"{location!r} does not end like a Parquet file: it is not one, or was cut "
            f"short at {size:,} bytes: write or copy it again",
            location=location,
            received=size,
        )
    length: int = struct.unpack("<I", end[:4])[0] + _END_BYTES
    check_footer(length, size - len(_MAGIC), size, location)
    return length


def _spans(
    meta: FileMetadata, number: int, names: list[str], unit: str
) -> tuple[list[ByteSpan], int]:
    """Return the byte spans of the columns ``names``, and their uncompressed size."""
    footer: Footer = meta.details
    label = f"{unit} of {meta.location!r}"
    if footer.leaves is None:
        # Check once per file. If all row groups are sound, none is checked again.
        footer.is_sound = _why_unsound(meta, None, names) is None
        prefixes, schema = tuple(f"{name}." for name in names), footer.metadata.schema
        footer.leaves = [
            leaf
            for leaf in range(footer.metadata.num_columns)
            if f"{schema.column(leaf).path}.".startswith(prefixes)
        ]
    if not footer.is_sound and (error := _why_unsound(meta, number, names)):
        if "decrypt" in str(error):
            text = (
                f"{label} has encrypted columns: {error}; leave them out (columns=), "
                "or decrypt it first"
            )
            raise DatasetError(text, location=meta.location) from error
        raise damaged_footer(label, meta.location, error) from error
    group = footer.metadata.row_group(number)
    spans: list[ByteSpan] = []
    decoded = 0
    for leaf in footer.leaves:
        chunk = group.column(leaf)
        if chunk.file_path:
            text = (
                f"{label} has columns in other files: {chunk.file_path!r}; leave them "
                "out (columns=), or write one file"
            )
            raise DatasetError(text, location=meta.location)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
            start = chunk.dictionary_page_offset
        stop = min(meta.version.size, start + chunk.total_compressed_size)
        spans.append((start, stop))
        decoded += max(0, chunk.total_uncompressed_size)
    return spans, decoded


def _why_unsound(
    meta: FileMetadata, number: int | None, names: list[str]
) -> Exception | None:
    """Return an error in a row group's columns; check all groups if ``number`` is None.

    The check lets pyarrow decode until its first read of the file, because a damaged
    footer fails earlier. Inspecting the columns could end the process by a C++
    exception. ``read`` returns no bytes: pyarrow would leak an exception raised by it.
    """
    reads: list[int] = []

    def read(start: int, _stop: int) -> bytes:
        reads.append(start)
        return b""

    metadata = meta.details.metadata
    numbers = range(metadata.num_row_groups) if number is None else [number]
    try:
        file = RangeFile(meta.version.size, read)
        parquet = pq.ParquetFile(file, metadata=metadata, pre_buffer=True)
        next(parquet.iter_batches(1, [*numbers], names, use_threads=False), None)
    except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
        return None if reads else error
    return None
