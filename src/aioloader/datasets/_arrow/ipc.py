"""Arrow IPC files, read in shards of a few record batches, and streams, each a shard.

Rows come in the order of files, batches and rows. From a remote file, a shard requests
only its batches and the dictionaries. Batches are decoded one at a time, so each must
fit into memory. Arrow has no checksums, so only damage to the structure is detected.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from aioloader._base.cancellation import in_thread
from aioloader._base.warnings import warn
from aioloader.datasets._arrow.files import (
    DecodePlan,
    FileMetadata,
    FilePart,
    Item,
    TableFormat,
    check_footer,
    damaged_footer,
    edges,
    request_bytes,
)
from aioloader.datasets._arrow.projection import Projection, checked
from aioloader.datasets._arrow.ranges import ByteSpan
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._streams.shards import MissingEnd, ShardPosition
from aioloader.errors import DatasetError, TruncatedReadError

_MAGIC = b"ARROW1"
# The footer is followed by its length and the magic number.
_END_BYTES = 4 + len(_MAGIC)
_CONTINUATION = 0xFFFFFFFF
# Small batches are joined into shards of up to this many bytes.
_SHARD_BYTES = 4 << 20


class ArrowFormat(TableFormat):
    """A format for Arrow IPC files (Feather) and streams.

    A shard is (address, first batch, stop); in a stream's shard, both numbers are 0. A
    shard for a part of a batch adds the part's number and the number of parts.
    """

    def __init__(
        self,
        addresses: Any,
        storage: Any,
        *,
        missing_end: MissingEnd = "error",
        **projection: Any,
    ) -> None:
        super().__init__(addresses, storage, **projection)
        self.missing_end = missing_end

    def _cut(self, shard: FilePart, count: int) -> list[FilePart]:
        address, first, stop = shard
        if not stop:
            raise ValueError(
                f"{self.storage.label(address)!r} is a stream, which is one shard and "
                "cannot be cut for more readers; write it as an Arrow file"
            )
        batches = stop - first
        if count <= batches:
            cuts = [first + offset for offset in edges(batches, count)]
            return [(address, *pair) for pair in pairwise(cuts)]
        counts = (b - a for a, b in pairwise(edges(count, batches)))
        return [
            (address, number, number + 1, part, parts)
            for number, parts in enumerate(counts, first)
            for part in range(parts)
        ]

    async def _read_metadata(self, address: str, location: str) -> FileMetadata:
        footer, version = await self._tail(address, _footer_length)
        if footer:
            return await in_thread(
                self._parse_footer, footer, version, address, location
            )
        head = await self._stream_head(address, version, location)
        schema = await in_thread(_schema_of, head, location)
        parts: list[tuple[FilePart, int]] = [((0, 0), version.size)]
        details: Any = b"", [], [(0, version.size)]
        return FileMetadata(
            address, location, version, schema, parts, details, len(head)
        )

    def _parse_footer(
        self, footer: bytes, version: Version, address: str, location: str
    ) -> FileMetadata:
        """Parse a footer; call this in a thread, because wide tables take long."""
        # To parse the metadata, pyarrow needs only the start and end of the file.
        ends = pa.BufferReader(_MAGIC + b"\0\0" + footer)
        try:
            with pa.ipc.open_file(ends) as reader:
                schema, count = checked(reader.schema), reader.num_record_batches
            dictionaries, batches = _blocks(footer[:-_END_BYTES], version.size, count)
        except Exception as error:
            raise damaged_footer(repr(location), location, error) from error
        # Join small batches into parts: ((first batch, stop), bytes).
        parts: list[tuple[FilePart, int]] = []
        for number, (start, stop) in enumerate(batches):
            (first, _), nbytes = parts[-1] if parts else ((0, 0), _SHARD_BYTES)
            if nbytes + stop - start > _SHARD_BYTES:
                parts.append(((number, number + 1), stop - start))
            else:
                parts[-1] = (first, number + 1), nbytes + stop - start
        details, schema = (footer, dictionaries, batches), self._shared(schema)
        return FileMetadata(
            address, location, version, schema, parts, details, len(footer)
        )

    async def _stream_head(
        self, address: str, version: Version, location: str
    ) -> bytes:
        """Return a stream's first message, which contains the schema."""
        size = version.size
        head, _ = await self.storage.part(address, 0, min(size, 8), version)
        if head.startswith(_MAGIC):
            raise TruncatedReadError(
                f"{location!r} starts as an Arrow file and does not end as one: it was "
                f"cut short at {size:,} bytes; write or copy it again",
                location=location,
                received=size,
            )
        first, stop = 0, 0
        if len(head) == 8:
            first, length = struct.unpack("<Ii", head)
            # Streams written before Arrow 0.15 start with the length.
            stop = 8 + length if first == _CONTINUATION else 4 + first
            if 8 < stop <= size:
                return (await self.storage.part(address, 0, stop, version))[0]
        text = f"{location!r} is not an Arrow file or stream; write or copy it again"
        if size < 8 or (first == _CONTINUATION and stop > size):
            text += f": it may be cut short at {size:,} bytes"
            raise TruncatedReadError(text, location=location, received=size)
        raise DatasetError(text, location=location)

    def _unit(self, part: Sequence[Any]) -> str:
        first, stop, *_ = part
        return f"record batches {first} to {stop - 1}" if stop else ""

    async def _decode_plan(
        self,
        meta: FileMetadata,
        projection: Projection,
        part: Sequence[Any],
        position: ShardPosition,  # noqa: ARG002  (rows before it are decoded too)
        window: int,
    ) -> DecodePlan:
        footer, dictionaries, batches = meta.details
        first, stop, *cut = part
        if stop > len(batches) or bool(stop) != bool(footer):
            raise DatasetError(
                f"{meta.location!r} has {len(batches)} record batches, of which "
                f"{first} to {stop} are wanted: it was rewritten; start again",
                location=meta.location,
            )
        names = projection.present(meta.schema)
        fields = [meta.schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)

        def items(file: pa.NativeFile) -> Iterator[Item]:
            if not stop:
                args = file, options, meta.location, self.missing_end
                yield from (batch.select(names) for batch in stream_batches(*args))
                return
            with pa.ipc.open_file(file, options=options) as reader:
                for number in range(first, stop):
                    batch = reader.get_batch(number).select(names)
                    if cut:
                        start, last = edges(batch.num_rows, cut[1])[cut[0] :][:2]
                        batch = batch.slice(start, last - start)
                    yield batch

        spans = dictionaries + (batches[first:stop] or batches)
        return DecodePlan(items, spans, request_bytes(window), tail=footer)


def _footer_length(data: bytes, size: int, location: str) -> int:
    """Return a file's length from its footer to its end; 0 if it may be a stream."""
    if not data.endswith(_MAGIC):
        return 0
    length = -1
    if len(data) >= _END_BYTES:
        length = struct.unpack("<i", data[-_END_BYTES : -len(_MAGIC)])[0]
    check_footer(length, size - _END_BYTES - 8, size, location)
    return length + _END_BYTES


def _schema_of(head: bytes, location: str) -> pa.Schema:
    try:
        return checked(pa.ipc.read_schema(pa.BufferReader(head)))
    except Exception as error:
        text = f"{location!r} is no Arrow stream, or damaged: {error}; write it again"
        raise DatasetError(text, location=location) from error


def _blocks(footer: bytes, size: int, count: int) -> list[list[ByteSpan]]:
    """Parse the byte spans of dictionaries and of record batches from a footer.

    pyarrow does not expose these spans. The footer is a FlatBuffer table; its third
    and fourth fields are vectors of (offset, metadata length, body length).
    Source: Arrow's ``format/File.fbs``, and the FlatBuffers internals.
    """
    (table,) = struct.unpack_from("<I", footer, 0)
    fields = table - struct.unpack_from("<i", footer, table)[0]
    (length,) = struct.unpack_from("<H", footer, fields)
    blocks: list[list[ByteSpan]] = []
    for entry in (8, 10):
        spans: list[ByteSpan] = []
        (offset,) = struct.unpack_from("<H", footer, fields + entry)
        if entry < length and offset:
            field = table + offset
            vector = field + struct.unpack_from("<I", footer, field)[0]
            (entries,) = struct.unpack_from("<I", footer, vector)
            data = footer[vector + 4 : vector + 4 + 24 * entries]
            for start, head, body in struct.iter_unpack("<qi4xq", data):
                if min(start, head, body) < 0 or start + head + body > size:
                    raise ValueError(f"a message is outside the file's {size:,} bytes")
                spans.append((start, start + head + body))
            if len(spans) != entries:
                raise ValueError(f"a list has {entries:,} entries")
        blocks.append(spans)
    if len(blocks[1]) != count:
        raise ValueError(f"{len(blocks[1])} of {count} record batches are listed")
    return blocks


def stream_batches(
    file: pa.NativeFile, options: Any, location: str, missing_end: MissingEnd
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an IPC stream; raise if it is cut short."""
    size = file.size()
    try:
        with pa.ipc.open_stream(file, options=options) as reader:
            last_end = file.tell()
            for batch in reader:
                yield batch
                last_end = file.tell()
    except (ValueError, OSError) as error:
        if file.tell() < size:
            raise
        raise _cut_short(location, size, f"within a message: {error}") from error
    if file.tell() < size:
        raise ValueError(f"the stream ends at byte {file.tell():,} of {size:,}")
    if file.tell() > last_end:  # the end-of-stream mark was read
        return
    if missing_end == "warn":
        warn(
            f"{location!r} has no mark at its end, as Arrow streams have; it is read "
            "to where it stops, because of missing_end='warn'"
        )
        return
    why = "or its writer leaves out the mark at the end (missing_end='warn')"
    raise _cut_short(location, size, why)


def _cut_short(location: str, size: int, why: str) -> TruncatedReadError:
    text = (
        f"{location!r} was cut short at {size:,} bytes, {why}: write or copy it again"
    )
    return TruncatedReadError(text, location=location, received=size)
