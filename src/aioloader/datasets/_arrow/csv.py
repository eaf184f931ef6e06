"""CSV files in columns: ranges of lines as shards, parsed by pyarrow block by block.

Column names come from the first line, types from the first lines, unified over all
files, unless the user gives them. A plain file is cut into ranges; a compressed one, or
one with newlines in values, is one shard. Resuming within a shard reads it again from
its beginning.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioloader.datasets._arrow.copies import Opener
from aioloader.datasets._arrow.files import Part, TableFormat, read_head, read_tail
from aioloader.datasets._arrow.lines import BLOCK, BOM, Dialect, Range, batches, blocks
from aioloader.datasets._arrow.ranges import RangeFile, Ranges, plan
from aioloader.datasets._arrow.reader import Place, Source, TableReader
from aioloader.datasets._arrow.wanted import checked
from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader._order.blocks import Bad
    from aioloader.datasets._arrow.unified import Table
    from aioloader.datasets._streams.shards import Position, Summary

# An address, the first byte, and one past the last (0: the end of the file).
Lines: TypeAlias = tuple[str, int, int]

_RANGE = 32 << 20
_LEAST_HEAD, _MOST_HEAD = 1 << 16, 1 << 26
_LEAST_REQUEST, _MOST_REQUEST = 1 << 18, 8 << 20
# Packed bytes needed to unpack that many: bzip2 packs 900 KB at once.
_PACKED_HEAD = 1 << 20
_PACKED = {
    "gz": "gzip", "bz2": "bz2", "zst": "zstd", "zstd": "zstd", "lz4": "lz4",
    "br": "brotli",
}  # fmt: skip


class Head(NamedTuple):
    """Facts about a file, known before it is read.

    Attributes:
        schema: Its columns.
        version: The version of the stored file.
        start: Where the first line after the names starts, unpacked.
        is_whole: Whether it can only be read from its beginning.
    """

    schema: "pa.Schema"
    version: Version
    start: int
    is_whole: bool

    @property
    def size(self) -> int:
        """Stored length, in bytes."""
        return self.version.size


class CSVFormat(TableFormat[Head]):
    """Lines of CSV files.

    Args:
        addresses: Patterns of the files' addresses.
        opener: Opens them.
        dialect: How lines are written.
        column_names: Names of the columns, for files whose first line has none.
        column_types: Column to type, or to the type's name in Arrow.
        wanted: As for ``TableFormat``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    modules = ("pyarrow.csv", "pyarrow.compute")

    def __init__(
        self,
        addresses: Any,
        opener: Opener,
        *,
        dialect: Dialect,
        column_names: Sequence[str] | None = None,
        column_types: "Mapping[str, Any] | None" = None,
        **wanted: Any,
    ) -> None:
        super().__init__(addresses, opener, **wanted)
        if isinstance(column_names, str):
            raise TypeError(f"column_names must be a list, got {column_names!r}")
        self._dialect = dialect
        self._column_names = None if column_names is None else list(column_names)
        self._types = {n: _type(n, one) for n, one in (column_types or {}).items()}
        given = wanted.get("schema")
        if given is not None:
            self._types |= {one.name: one.type for one in given}

    def describe(self) -> dict[str, Any]:
        """Return how lines are parsed, and which parts are read."""
        types = {name: str(one) for name, one in sorted(self._types.items())}
        return {
            **super().describe(),
            **self._dialect.describe(),
            "column_names": self._column_names,
            "column_types": types,
        }

    def summary(self, shards: "Sequence[Part]") -> "Summary":
        """Return the number of shards, and checksums of their names and ranges.

        Where a file is cut depends on its length, which may grow.
        """
        edges = "".join(f"{start}-{stop};" for _, start, stop in shards if start + stop)
        cuts = {"cuts": f"{zlib.crc32(edges.encode()):08x}"} if edges else {}
        return {**super().summary(shards), **cuts}

    def open(self, shard: Lines, position: "Position", budget: int) -> TableReader:
        """Return a reader of a range."""
        address, start, stop = shard
        unit = f"the lines from byte {start:,} on" if start or stop else ""
        place = Place(self._opener.label(address), unit)
        opening = partial(self._open, address, (start, stop), place, position)
        return TableReader(opening, place, position.get("row", 0), budget)

    def _cut(self, shard: Part, count: int) -> list[Part]:
        address, start, stop = shard
        head = self._kept.get(address)
        if head is None or head.is_whole:
            raise ValueError(
                f"{self._opener.label(address)!r} is compressed, or may have newlines "
                "in values, so it is one shard and cannot be cut for more readers; "
                "write more files, or plain ones"
            )
        end = stop or head.size
        edges = [start + (end - start) * at // count for at in range(count)]
        return [(address, *pair) for pair in pairwise([*edges, stop])]

    def _parts_of(self, end: Head) -> Iterable[tuple[Part, int]]:
        if end.is_whole:
            return [((0, 0), end.size)]
        count = max(1, -(-end.size // _RANGE))
        edges = [end.size * at // count for at in range(count)]
        parts = zip(edges, [*edges[1:], 0], strict=True)
        return [(part, end.size // count) for part in parts]

    def _drop_ends(self) -> None:
        while len(self._kept) > 1024:
            self._kept.popitem(last=False)

    async def _read_end(self, address: str, location: str) -> Head:
        packing = _packing(location)
        version = (await read_tail(self._opener, address, 1)).version
        size = version.size
        if packing and not size:
            text = f"{location!r} is empty, and not what a compressed file begins with"
            raise TruncatedReadError(text, location=location, received=0)
        least = _PACKED_HEAD if packing else _LEAST_HEAD
        while True:
            data = await read_head(self._opener, address, min(size, least), version)
            is_all = len(data) >= size
            head = await asyncio.to_thread(
                self._head_of, data, packing, location, is_all=is_all
            )
            if head is not None:
                schema, start = head
                is_whole = bool(packing) or self._dialect.newlines_in_values
                return Head(schema, version, start, is_whole)
            least *= 16

    def _head_of(
        self, data: bytes, packing: str | None, location: str, *, is_all: bool
    ) -> "tuple[pa.Schema, int] | None":
        """Return columns and start of the lines; None: needs more. In a thread."""
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        dialect = self._dialect
        if packing is not None:
            data, is_all = _unpacked(data, packing, location, is_all=is_all)
        mark = len(BOM) if data.startswith(BOM) else 0
        start, names = mark, self._column_names
        if names is None:
            blank = len(data) - len(data[mark:].lstrip(b"\r\n")) - mark
            first = dialect.first_end(data[mark + blank :])
            if not first and not is_all and len(data) < _MOST_HEAD:
                return None
            start = mark + blank + first if first else len(data)
            names = self._names_in(data[mark + blank : start], location)
        end = start + dialect.last_end(data[start:])
        if end == start and not is_all and len(data) < _MOST_HEAD:
            return None
        if is_all and not dialect.is_open(data[start:]):
            end = len(data)
        types = dict.fromkeys(names, pa.null())
        while end > start and data[start:end].strip(b"\r\n"):
            try:
                guessed = dialect.parse(data[start:end], names).schema
            except ValueError:  # a wrong line that is no text
                end = start + dialect.last_end(data[start : (start + end) // 2])
                continue
            types |= {one.name: one.type for one in guessed}
            break
        types |= {n: one for n, one in self._types.items() if n in types}
        return checked(pa.schema([(name, types[name]) for name in names])), start

    def _names_in(self, line: bytes, location: str) -> list[str]:
        """Return the values of the first line."""
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        text = f"{location!r} has no first line with the names of columns"
        if not line.strip():
            raise DatasetError(
                f"{text}: it is empty; pass column_names= for files without one",
                location=location,
            )
        sign = self._dialect.delimiter.encode()
        try:
            # More columns than any file has; the dialect decides.
            many = [str(at) for at in range(line.count(sign) + 1)]
            while many:
                with contextlib.suppress(ValueError):
                    types = dict.fromkeys(many, pa.string())
                    table = self._dialect.parse(line, many, types)
                    break
                many.pop()
        except UnicodeDecodeError as error:
            raise DatasetError(f"{text}: {error}", location=location) from error
        if not many:
            raise DatasetError(text, location=location)
        if table.num_rows > 1:
            raise DatasetError(
                f"{text}: it has carriage returns without newlines, and lines must end "
                "with newlines; convert the file",
                location=location,
            )
        return [str(column[0].as_py() or "") for column in table.columns]

    async def _open(
        self,
        address: str,
        edges: tuple[int, int],
        place: Place,
        position: "Position",
        window: int,
    ) -> Source:
        head = await self._end(address, position)
        start, stop = edges
        path, ranges, packing = (
            self._opener.path(address),
            None,
            _packing(place.location),
        )
        # A cut may be within the first line, or within empty lines before it.
        first = max(start, head.start)
        span = Range(first, stop or None, is_first=start <= head.start)
        if path is None:
            most = max(_LEAST_REQUEST, min(window // 4, _MOST_REQUEST))
            begin = 0 if packing else span.begin
            ranges = Ranges(
                partial(self._opener.read, address, version=head.version),
                head.size,
                plan([(begin, stop or head.size)], most),
                budget=window,
                location=place.location,
                in_order=True,
            )
        lines = _Lines(path, ranges, packing, span)
        wanted = self._wanted  # a later listing replaces it
        found: Callable[[], Iterator[Any]]
        found = partial(self._batches, lines, head, place, wanted.table)
        rows_of = self._rows_of(address, wanted, place.location)
        check = partial(self._opener.check, address, head.version)
        return Source(found, rows_of, None, ranges, head.version, check)

    def _batches(
        self, lines: "_Lines", head: Head, place: Place, table: "Table"
    ) -> "Iterator[pa.RecordBatch | Bad]":
        """Parse lines, in the thread that iterates."""
        dialect, location = self._dialect, place.location
        names = [*head.schema.names]
        present = table.present(head.schema)
        known = {one.name: one.type for one in table.schema}
        types = {name: known[name] for name in present}
        include = present or names[:1]  # an empty list would be all
        parse = partial(dialect.parse, names=names, types=types, include=include)
        with lines.opened(location) as read:
            for at, data in blocks(read, lines.span, dialect, location):
                yield from batches(data, at, parse, dialect, location)


class _Lines(NamedTuple):
    """The bytes of a range."""

    path: str | None
    ranges: Ranges | None
    packing: str | None
    span: Range

    @contextlib.contextmanager
    def opened(self, location: str) -> "Iterator[Any]":
        """Open the file at the start of the range; yield its ``read``.

        Raises:
            DatasetError: If it is packed, and cannot be unpacked.
        """
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        with contextlib.ExitStack() as stack:
            if self.path is not None:
                file = stack.enter_context(pa.OSFile(self.path))
            else:
                assert self.ranges is not None
                remote = RangeFile(self.ranges.size, self.ranges.read)
                file = stack.enter_context(pa.PythonFile(remote, mode="r"))
            before = self.span.begin
            if self.packing is None:
                file.seek(before)
            else:
                stack.enter_context(_told(location))
                file = pa.CompressedInputStream(file, self.packing)
                stack.enter_context(file)
                while before:
                    before -= len(file.read(min(before, BLOCK)))
            yield file.read


def _packing(location: str) -> str | None:
    ending = location.partition("?")[0].rpartition(".")[2].lower()
    return _PACKED.get(ending)


def _unpacked(
    data: bytes, packing: str, location: str, *, is_all: bool
) -> tuple[bytes, bool]:
    """Return the beginning of the unpacked data, and whether that is all."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    parts: list[bytes] = []
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), packing) as stream:
            while part := stream.read(_LEAST_HEAD):
                parts.append(part)
                if sum(map(len, parts)) >= max(_LEAST_HEAD, len(data) // 16):
                    return b"".join(parts), False
    except OSError as error:
        if is_all:
            raise _damage(error, location) from error
        return b"".join(parts), False
    return b"".join(parts), is_all


def _damage(error: OSError, location: str) -> DatasetError:
    text = f"{location!r} cannot be unpacked: {error}; it is damaged, or cut short"
    if "Truncated" in str(error):  # pyarrow has one type for all
        return TruncatedReadError(text, location=location)
    return DatasetError(text, location=location)


@contextlib.contextmanager
def _told(location: str) -> "Iterator[None]":
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damage(error, location) from error


def _type(name: str, given: Any) -> "pa.DataType":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if isinstance(given, pa.DataType):
        return given
    try:
        return pa.type_for_alias(given)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"column_types={{{name!r}: {given!r}}} is not an Arrow type: {error}"
        ) from error
