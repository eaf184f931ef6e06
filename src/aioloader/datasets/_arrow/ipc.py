"""Arrow IPC files, a few record batches per shard, and IPC streams, one shard each.

The order is that of files, batches, rows. Only a shard's batches are requested from an
object. Record batches are decoded one at a time; memory holds at least one of them,
however large it was written. Arrow has no checksums: damage is detected only by the
structure.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioloader._observe.warnings import warn
from aioloader.datasets._arrow.copies import Opener
from aioloader.datasets._arrow.files import (
    Part,
    TableFormat,
    read_head,
    read_tail,
)
from aioloader.datasets._arrow.ranges import RangeFile, Ranges, Span, plan
from aioloader.datasets._arrow.reader import Place, Slice, Source, TableReader, shares
from aioloader.datasets._arrow.wanted import Wanted, checked
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._streams.shards import Position

# An address, and the first of its record batches and one past the last. For a stream
# their number is not known: (0, 0).
# Then, optionally, a part of its only record batch, and the number of parts.
Batches: TypeAlias = tuple[Any, ...]

_MAGIC = b"ARROW1"
# Length of the footer, and the magic number after it.
_END = 4 + len(_MAGIC)
_CONTINUED = 0xFFFFFFFF
# Small batches are read together, up to this many bytes.
_SHARD = 4 << 20
_LEAST_REQUEST, _MOST_REQUEST = 1 << 18, 8 << 20


class Layout(NamedTuple):
    """Positions in a file.

    Attributes:
        schema: Its columns.
        version: The version of the file.
        footer: The end of the file, from the footer on; empty for a stream.
        dictionaries: Positions of the dictionaries.
        batches: Positions of the record batches.
    """

    schema: "pa.Schema"
    version: Version
    footer: bytes
    dictionaries: list[Span]
    batches: list[Span]

    @property
    def size(self) -> int:
        """Length, in bytes."""
        return self.version.size


class ArrowFormat(TableFormat[Layout]):
    """Record batches of Arrow IPC files and streams (also known as Feather).

    Args:
        addresses: As for ``TableFormat``.
        opener: As for ``TableFormat``.
        missing_end: What a stream without its end mark is.
        wanted: As for ``TableFormat``.
    """

    def __init__(
        self,
        addresses: Any,
        opener: Opener,
        *,
        missing_end: MissingEnd = "error",
        **wanted: Any,
    ) -> None:
        super().__init__(addresses, opener, **wanted)
        self._missing_end = missing_end

    def open(self, shard: Batches, position: "Position", budget: int) -> TableReader:
        """Return a reader of some record batches."""
        address, first, stop, *part = shard
        unit = f"record batches {first} to {stop - 1}" if stop else ""
        place = Place(self._opener.label(address), unit, Slice(*part))
        opening = partial(self._open, address, range(first, stop), place, position)
        return TableReader(opening, place, position.get("row", 0), budget)

    def _cut(self, shard: Part, count: int) -> list[Part]:
        address, first, stop = shard
        if not stop:
            raise ValueError(
                f"{self._opener.label(address)!r} is a stream, which is one shard and "
                "cannot be cut for more readers; write it as an Arrow file"
            )
        if count <= stop - first:
            edges = [first]
            for share in shares(stop - first, count):
                edges.append(edges[-1] + share)
            return [(address, *pair) for pair in pairwise(edges)]
        return [
            (address, number, number + 1, part, parts)
            for number, parts in enumerate(shares(count, stop - first), first)
            for part in range(parts)
        ]

    def _parts_of(self, end: Layout) -> Iterable[tuple[Part, int]]:
        for first, last in _grouped(end.batches) if end.footer else [(0, 0)]:
            nbytes = sum(stop - start for start, stop in end.batches[first:last])
            yield (first, last), nbytes or end.size

    async def _read_end(self, address: str, location: str) -> Layout:
        tail = await read_tail(self._opener, address)
        if not tail.data.endswith(_MAGIC):
            head = await self._stream_head(address, tail.version)
            schema = await asyncio.to_thread(_schema_of, head, location)
            return Layout(schema, tail.version, b"", [], [(0, tail.size)])
        length = _footer_length(tail.data, tail.size, location)
        if length > len(tail.data):
            tail = await read_tail(self._opener, address, length, tail.version)
        footer = tail.data[-length:]
        return await asyncio.to_thread(_file_layout, footer, tail.version, location)

    def _drop_ends(self) -> None:
        # Shards of one file are mostly read one after the other.
        while len(self._kept) > 1:
            self._kept.popitem(last=False)

    async def _stream_head(self, address: str, version: Version) -> bytes:
        """Return the first message of a stream, which holds the schema."""
        location, size = self._opener.label(address), version.size
        head = await read_head(self._opener, address, min(size, 8), version)
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
                return await read_head(self._opener, address, stop, version)
        text = f"{location!r} is not an Arrow file or stream"
        if size < 8 or (first == _CONTINUED and stop > size):
            text += f", or was cut short at {size:,} bytes"
            raise TruncatedReadError(text, location=location, received=size)
        raise DatasetError(text, location=location)

    async def _open(
        self,
        address: str,
        numbers: range,
        place: Place,
        position: "Position",
        window: int,
    ) -> Source:
        layout = await self._end(address, position)
        if numbers.stop > len(layout.batches) or bool(numbers) != bool(layout.footer):
            raise DatasetError(
                f"{place.location!r} has {len(layout.batches)} record batches, of "
                f"which {numbers.start} to {numbers.stop} are wanted; it was "
                "rewritten meanwhile",
                location=place.location,
            )
        ranges, path = None, self._opener.path(address)
        if path is None:
            chosen = layout.batches[numbers.start : numbers.stop] or layout.batches
            most = max(_LEAST_REQUEST, min(window // 4, _MOST_REQUEST))
            spans = plan([*layout.dictionaries, *chosen], most)
            ranges = Ranges(
                partial(self._opener.read, address, version=layout.version),
                layout.size,
                sorted(spans, key=lambda found: found.start),
                budget=window,
                location=place.location,
                in_order=True,
            )
        file = partial(_file_of, path, ranges, layout)
        read = (
            partial(_file_batches, numbers=numbers, part=place.part)
            if numbers
            else partial(
                _stream_batches,
                location=place.location,
                missing_end=self._missing_end,
            )
        )
        batches = partial(_batches, file, read, layout.schema, self._wanted)
        check = partial(self._opener.check, address, layout.version)
        rows_of = self._rows_of(address, self._wanted, place.location)
        return Source(batches, rows_of, None, ranges, layout.version, check)


def _grouped(batches: list[Span]) -> list[tuple[int, int]]:
    """Group small batches: the first number of each group, and one past its last."""
    groups: list[tuple[int, int]] = []
    nbytes = _SHARD
    for number, (start, stop) in enumerate(batches):
        if nbytes + stop - start > _SHARD:
            groups.append((number, number))
            nbytes = 0
        groups[-1] = groups[-1][0], number + 1
        nbytes += stop - start
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
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    try:
        return checked(pa.ipc.read_schema(pa.BufferReader(head)))
    except Exception as error:
        text = f"{location!r} is not an Arrow stream, or is damaged: {error}"
        raise DatasetError(text, location=location) from error


def _file_layout(footer: bytes, version: Version, location: str) -> Layout:
    """Read a footer; in a thread, because wide tables take long."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    # The start and the end of the file are enough for the metadata.
    ends = pa.BufferReader(_MAGIC + b"\0\0" + footer)
    try:
        with pa.ipc.open_file(ends) as reader:
            schema, count = checked(reader.schema), reader.num_record_batches
        dictionaries, batches = _blocks(footer[:-_END], version.size, count)
    except Exception as error:
        text = f"{location!r} has a footer that cannot be read: {error}; it is damaged"
        raise DatasetError(text, location=location) from error
    return Layout(schema, version, footer, dictionaries, batches)


def _blocks(footer: bytes, size: int, count: int) -> tuple[list[Span], list[Span]]:
    """Return the positions of dictionaries and record batches in a footer.

    pyarrow does not expose them. The footer is a FlatBuffer: a table whose third and
    fourth fields are vectors of (offset, length of metadata, length of body).
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
        spans: list[Span] = []
        if entry < length and offset:
            (vector,) = struct.unpack_from("<I", footer, table + offset)
            spans = _spans(footer, table + offset + vector, size)
        found.append(spans)
    dictionaries, batches = found
    if len(batches) != count:
        raise ValueError(f"{len(batches)} of {count} record batches are listed")
    return dictionaries, batches


def _spans(footer: bytes, vector: int, size: int) -> list[Span]:
    (count,) = struct.unpack_from("<I", footer, vector)
    if count > len(footer):
        raise ValueError(f"a list has {count:,} entries")
    spans: list[Span] = []
    for number in range(count):
        start, metadata, body = struct.unpack_from(
            "<qi4xq", footer, vector + 4 + 24 * number
        )
        if min(start, metadata, body) < 0 or start + metadata + body > size:
            raise ValueError(f"a message is outside the file's {size:,} bytes")
        spans.append((start, start + metadata + body))
    return spans


# -- decoding ----------------------------------------------------------------------


def _file_of(path: str | None, ranges: Ranges | None, layout: Layout) -> Any:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if path is not None:
        return pa.OSFile(path)
    assert ranges is not None
    footer = layout.footer
    known = {layout.size - len(footer): footer} if footer else {}
    return pa.PythonFile(RangeFile(ranges.size, ranges.read, known), mode="r")


def _batches(
    make_file: Callable[[], Any],
    read: "Callable[[Any, Any], Iterator[pa.RecordBatch]]",
    schema: "pa.Schema",
    wanted: Wanted,
) -> "Iterator[pa.RecordBatch]":
    """Decode record batches, in the thread that iterates."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    fields = [schema.get_field_index(name) for name in wanted.table.present(schema)]
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
    with contextlib.closing(make_file()) as file:
        for batch in read(file, options):
            yield wanted.of(batch)


def _file_batches(
    file: Any, options: Any, *, numbers: range, part: Slice
) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    with pa.ipc.open_file(file, options=options) as reader:
        for number in numbers:
            batch = reader.get_batch(number)
            first, stop = part.bounds(batch.num_rows)
            yield batch.slice(first, stop - first) if part.parts > 1 else batch


def _stream_batches(
    file: Any, options: Any, *, location: str, missing_end: MissingEnd
) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

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
