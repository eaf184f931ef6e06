"""Arrow IPC files, a few record batches per shard, and IPC streams, one shard each.

The order is that of files, batches, rows. Only a shard's batches are requested from an
object. Record batches are decoded one at a time; memory holds at least one of them,
however large it was written. Arrow has no checksums: damage is detected only by the
structure.
"""

import asyncio
import contextlib
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aioloader._observe.warnings import warn
from aioloader.datasets._arrow.files import TAIL, End, Part, TableFormat
from aioloader.datasets._arrow.ranges import Span, file_of
from aioloader.datasets._arrow.reader import Opened, TableReader, part_of, shares
from aioloader.datasets._arrow.wanted import checked
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    from aioloader.datasets._streams.shards import Position

_MAGIC = b"ARROW1"
# Length of the footer, and the magic number after it.
_END = 4 + len(_MAGIC)
_CONTINUED = 0xFFFFFFFF
# Small batches are read together, up to this many bytes.
_SHARD = 4 << 20
_LEAST_REQUEST, _MOST_REQUEST = 1 << 18, 8 << 20


class ArrowFormat(TableFormat):
    """Record batches of Arrow IPC files and streams (also known as Feather).

    A shard is an address, the first of its record batches and one past the last: (0, 0)
    for a stream, whose number is not known. Then, optionally, a part of its only record
    batch, and the number of parts.

    Args:
        addresses: As for ``TableFormat``.
        places: As for ``TableFormat``.
        missing_end: What a stream without its end mark is.
        wanted: As for ``TableFormat``.
    """

    def __init__(
        self,
        addresses: Any,
        places: Any,
        *,
        missing_end: MissingEnd = "error",
        **wanted: Any,
    ) -> None:
        super().__init__(addresses, places, **wanted)
        self._missing_end = missing_end

    def open(self, shard: Part, position: "Position", budget: int) -> TableReader:
        """Return a reader of some record batches."""
        address, first, stop, *part = shard
        unit = f"record batches {first} to {stop - 1}" if stop else ""
        opening = partial(self._open, address, range(first, stop), part, position)
        label = self._opener.label(address)
        return TableReader(opening, label, unit, position, budget)

    def _cut(self, shard: Part, count: int) -> list[Part]:
        address, first, stop = shard
        if not stop:
            raise ValueError(
                f"{self._opener.label(address)!r} is a stream, which is one shard and "
                "cannot be cut for more readers; write it as an Arrow file"
            )
        if count <= stop - first:
            edges = [part_of(stop - first, at, count)[0] for at in range(count + 1)]
            return [(address, first + a, first + b) for a, b in pairwise(edges)]
        return [
            (address, number, number + 1, part, parts)
            for number, parts in enumerate(shares(count, stop - first), first)
            for part in range(parts)
        ]

    # -- ends of files --------------------------------------------------------------

    async def _read_end(self, address: str, location: str) -> End:
        tail, version = await self._opener.part(address, -TAIL)
        if not tail.endswith(_MAGIC):
            head = await self._stream_head(address, version, location)
            schema = await asyncio.to_thread(_schema_of, head, location)
            none: list[Span] = []
            whole, size = (b"", none, [(0, version.size)]), version.size
            return End(version, schema, [((0, 0), size)], whole, len(head))
        length = _footer_length(tail, version.size, location)
        if length > len(tail):
            tail, _ = await self._opener.part(address, -length, 0, version)
        args = tail[-length:], version, location
        return await asyncio.to_thread(self._parsed, *args)

    def _parsed(self, footer: bytes, version: Version, location: str) -> End:
        """Read a footer; in a thread, because wide tables take long."""
        # The start and the end of the file are enough for the metadata.
        ends = pa.BufferReader(_MAGIC + b"\0\0" + footer)
        try:
            with pa.ipc.open_file(ends) as reader:
                schema, count = checked(reader.schema), reader.num_record_batches
            dictionaries, batches = _blocks(footer[:-_END], version.size, count)
        except Exception as error:
            text = (
                f"{location!r} has a footer that cannot be read: {error}; it is damaged"
            )
            raise DatasetError(text, location=location) from error
        # The footer, and where dictionaries and record batches are.
        facts, parts = (footer, dictionaries, batches), _grouped(batches)
        return End(version, self._shared(schema), parts, facts, len(footer))

    async def _stream_head(
        self, address: str, version: Version, location: str
    ) -> bytes:
        """Return the first message of a stream, which holds the schema."""
        size = version.size
        head, _ = await self._opener.part(address, 0, min(size, 8), version)
        if head.startswith(_MAGIC):
            raise TruncatedReadError(
                f"{location!r} starts as an Arrow file and does not end as one: it was "
                f"cut short at {size:,} bytes",
                location=location,
                received=size,
            )
        first, stop = 0, 0
        if len(head) == 8:
            first, length = struct.unpack("<Ii", head)
            # Streams from before Arrow 0.15 start with the length.
            stop = 8 + length if first == _CONTINUED else 4 + first
            if 8 < stop <= size:
                return (await self._opener.part(address, 0, stop, version))[0]
        text = f"{location!r} is not an Arrow file or stream"
        if size < 8 or (first == _CONTINUED and stop > size):
            text += f", or was cut short at {size:,} bytes"
            raise TruncatedReadError(text, location=location, received=size)
        raise DatasetError(text, location=location)

    # -- reading --------------------------------------------------------------------

    async def _open(
        self,
        address: str,
        numbers: range,
        part: Sequence[int],
        position: "Position",
        window: int,
    ) -> Opened:
        end, wanted = await self._end(address, position)
        footer, dictionaries, batches = end.facts
        location = self._opener.label(address)
        if numbers.stop > len(batches) or bool(numbers) != bool(footer):
            raise DatasetError(
                f"{location!r} has {len(batches)} record batches, of which "
                f"{numbers.start} to {numbers.stop} are wanted; it was rewritten "
                "meanwhile",
                location=location,
            )
        spans = dictionaries + (batches[numbers.start : numbers.stop] or batches)
        most = max(_LEAST_REQUEST, min(window // 4, _MOST_REQUEST))
        ranges = self._ranges(address, end, spans, most, window)
        if ranges is not None:
            ranges.tail = footer
        path = self._opener.path(address)
        names = wanted.present(end.schema)
        fields = [end.schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)

        def items() -> "Iterator[pa.RecordBatch]":
            with contextlib.closing(file_of(path, ranges)) as file:
                batches = (
                    _file_batches(file, options, numbers, part)
                    if numbers
                    else _stream_batches(file, options, location, self._missing_end)
                )
                for batch in batches:
                    yield batch.select(names)

        return self._opened(address, end, wanted, items=items, ranges=ranges)


def _grouped(batches: list[Span]) -> list[tuple[Part, int]]:
    """Group small batches: the first number of each group, one past its last, bytes."""
    groups: list[tuple[Part, int]] = []
    for number, (start, stop) in enumerate(batches):
        (first, _), nbytes = groups[-1] if groups else ((0, 0), _SHARD)
        if nbytes + stop - start > _SHARD:
            groups.append(((number, number + 1), stop - start))
        else:
            groups[-1] = (first, number + 1), nbytes + stop - start
    return groups


# -- positions ---------------------------------------------------------------------


def _footer_length(data: bytes, size: int, location: str) -> int:
    """Return how many bytes at a file's end are its footer, with length and magic."""
    length = -1
    if len(data) >= _END:
        length = struct.unpack("<i", data[-_END : -len(_MAGIC)])[0]
    if length <= 0 or length + _END + 8 > size:
        raise DatasetError(
            f"{location!r} is damaged: its footer has {length:,} bytes, the whole file "
            f"has {size:,}",
            location=location,
        )
    return int(length) + _END


def _schema_of(head: bytes, location: str) -> "pa.Schema":
    try:
        return checked(pa.ipc.read_schema(pa.BufferReader(head)))
    except Exception as error:
        text = f"{location!r} is not an Arrow stream, or is damaged: {error}"
        raise DatasetError(text, location=location) from error


def _blocks(footer: bytes, size: int, count: int) -> tuple[list[Span], list[Span]]:
    """Return the positions of dictionaries and record batches in a footer.

    pyarrow does not expose them, and without them each batch would take two requests,
    one after the other. The footer is a FlatBuffer: a table whose third and fourth
    fields are vectors of (offset, length of metadata, length of body).
    Source: Arrow's ``format/File.fbs``, and the FlatBuffers internals.

    Raises:
        ValueError: If they are not within ``size`` bytes, or there are not ``count``
            record batches.
        struct.error: If the footer is damaged.
    """
    (table,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, table)
    fields = table - back
    (length,) = struct.unpack_from("<H", footer, fields)
    found: list[list[Span]] = []
    for entry in (8, 10):
        (offset,) = struct.unpack_from("<H", footer, fields + entry)
        is_there = entry < length and offset
        found.append(_spans(footer, table + offset, size) if is_there else [])
    dictionaries, batches = found
    if len(batches) != count:
        raise ValueError(f"{len(batches)} of {count} record batches are listed")
    return dictionaries, batches


def _spans(footer: bytes, field: int, size: int) -> list[Span]:
    (vector,) = struct.unpack_from("<I", footer, field)
    (count,) = struct.unpack_from("<I", footer, field + vector)
    first = field + vector + 4
    spans: list[Span] = []
    for start, head, body in struct.iter_unpack(
        "<qi4xq", footer[first : first + 24 * count]
    ):
        if min(start, head, body) < 0 or start + head + body > size:
            raise ValueError(f"a message is outside the file's {size:,} bytes")
        spans.append((start, start + head + body))
    if len(spans) != count:
        raise ValueError(f"a list has {count:,} entries")
    return spans


# -- decoding, in the thread that iterates -----------------------------------------


def _file_batches(
    file: Any, options: Any, numbers: range, part: Sequence[int]
) -> "Iterator[pa.RecordBatch]":
    with pa.ipc.open_file(file, options=options) as reader:
        for number in numbers:
            batch = reader.get_batch(number)
            first, stop = part_of(batch.num_rows, *part)
            yield batch.slice(first, stop - first) if part else batch


def _stream_batches(
    file: Any, options: Any, location: str, missing_end: MissingEnd
) -> "Iterator[pa.RecordBatch]":
    size = file.size()
    try:
        with pa.ipc.open_stream(file, options=options) as reader:
            at = file.tell()
            for batch in reader:
                yield batch
                at = file.tell()
    except (ValueError, OSError) as error:
        if file.tell() < size:
            raise
        raise _cut_short(location, size, f"within a message: {error}") from error
    if file.tell() < size:
        raise ValueError(f"the stream ends at byte {file.tell():,} of {size:,}")
    if file.tell() > at:  # the mark was read, after the last message
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
    text = f"{location!r} was cut short at {size:,} bytes, {why}"
    return TruncatedReadError(text, location=location, received=size)
