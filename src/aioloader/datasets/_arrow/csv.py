"""CSV files in columns: ranges of lines as shards, parsed by pyarrow block by block.

Column names come from the first line, types from the first lines, unified over all
files, unless the user gives them. A plain file is cut into ranges; a compressed one, or
one with newlines in values, is one shard. Resuming starts at the block that holds the
next row; in a compressed file, at its beginning.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aioloader.datasets._arrow.files import End, Part, TableFormat
from aioloader.datasets._arrow.lines import BLOCK, BOM, Dialect, batches, blocks
from aioloader.datasets._arrow.ranges import file_of
from aioloader.datasets._arrow.reader import Item, Mark, Opened, TableReader, part_of
from aioloader.datasets._arrow.wanted import Wanted, checked
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    from aioloader.datasets._streams.shards import Position, Summary

_RANGE = 32 << 20
_LEAST_HEAD, _MOST_HEAD = 1 << 16, 1 << 26
_LEAST_REQUEST, _MOST_REQUEST = 1 << 18, 8 << 20
# Packed bytes needed to unpack that many: bzip2 packs 900 KB at once.
_PACKED_HEAD = 1 << 20
_PACKED = {
    "gz": "gzip", "bz2": "bz2", "zst": "zstd", "zstd": "zstd", "lz4": "lz4",
    "br": "brotli",
}  # fmt: skip
# About how much memory a schema of a few columns takes.
_HEAD = 1 << 12


class CSVFormat(TableFormat):
    """Lines of CSV files.

    A shard is an address, the first byte, and one past the last (0: the end of the
    file).

    Args:
        addresses: Patterns of the files' addresses.
        places: Opens them.
        dialect: How lines are written.
        column_names: Names of the columns, for files whose first line has none.
        column_types: Column to type, or to the type's name in Arrow.
        wanted: As for ``TableFormat``.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        addresses: Any,
        places: Any,
        *,
        dialect: Dialect,
        column_names: Sequence[str] | None = None,
        column_types: "Mapping[str, Any] | None" = None,
        **wanted: Any,
    ) -> None:
        super().__init__(addresses, places, **wanted)
        if isinstance(column_names, str):
            raise TypeError(f"column_names must be a list, got {column_names!r}")
        self._dialect = dialect
        self._column_names = None if column_names is None else list(column_names)
        self._types = {n: _type(n, one) for n, one in (column_types or {}).items()}
        self._types |= {one.name: one.type for one in wanted.get("schema") or ()}

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

    def open(self, shard: Part, position: "Position", budget: int) -> TableReader:
        """Return a reader of a range."""
        address, start, stop = shard
        unit = f"the lines from byte {start:,} on" if start or stop else ""
        opening = partial(self._open, address, (start, stop), position)
        label = self._opener.label(address)
        return TableReader(opening, label, unit, position, budget)

    def _cut(self, shard: Part, count: int) -> list[Part]:
        address, start, stop = shard
        end = self._kept.get(address)
        if end is None or self._is_whole(address):
            raise ValueError(
                f"{self._opener.label(address)!r} is compressed, or may have newlines "
                "in values, so it is one shard and cannot be cut for more readers; "
                "write more files, or plain ones"
            )
        size = (stop or end.size) - start
        edges = [start + part_of(size, at, count)[0] for at in range(count)]
        return [(address, *pair) for pair in pairwise([*edges, stop])]

    def _is_whole(self, address: str) -> bool:
        """Return whether a file can only be read from its beginning."""
        is_packed = _packing(self._opener.label(address)) is not None
        return is_packed or self._dialect.newlines_in_values

    # -- beginnings of files --------------------------------------------------------

    async def _read_end(self, address: str, location: str) -> End:
        packing, version = _packing(location), await self._opener.version(address)
        size = version.size
        if packing and not size:
            text = f"{location!r} is empty, and not what a compressed file begins with"
            raise TruncatedReadError(text, location=location, received=0)
        least, found = _PACKED_HEAD if packing else _LEAST_HEAD, None
        while found is None:
            data, _ = await self._opener.part(address, 0, min(size, least), version)
            is_all = len(data) >= size
            found = await asyncio.to_thread(
                self._head_of, data, packing, location, is_all=is_all
            )
            least *= 16
        schema, start = found
        count = 1 if self._is_whole(address) else max(1, -(-size // _RANGE))
        edges = [part_of(size, at, count)[0] for at in range(count)]
        parts = [(part, size // count) for part in pairwise([*edges, 0])]
        # The fact is where the first line after the names starts, unpacked.
        return End(version, self._shared(schema), parts, start, _HEAD)

    def _head_of(
        self, data: bytes, packing: str | None, location: str, *, is_all: bool
    ) -> "tuple[pa.Schema, int] | None":
        """Return columns and start of the lines; None: needs more. In a thread."""
        dialect = self._dialect
        if packing is not None:
            data, is_all = _unpacked(data, packing, location, is_all=is_all)
        is_enough = is_all or len(data) >= _MOST_HEAD
        start = len(BOM) if data.startswith(BOM) else 0
        names = self._column_names
        if names is None:
            start += len(data[start:]) - len(data[start:].lstrip(b"\r\n"))
            first = dialect.first_end(data[start:])
            if not first and not is_enough:
                return None
            line, start = start, start + first if first else len(data)
            names = self._names_in(data[line:start], location)
        end = start + dialect.last_end(data[start:])
        if end == start and not is_enough:
            return None
        if is_all and not dialect.is_open(data[start:]):
            end = len(data)
        types = self._guessed(data[start:end], names)
        types |= {n: one for n, one in self._types.items() if n in types}
        return checked(pa.schema([(name, types[name]) for name in names])), start

    def _guessed(self, data: bytes, names: Sequence[str]) -> "dict[str, pa.DataType]":
        """Return the types of columns by the first lines, without those that fail."""
        types = dict.fromkeys(names, pa.null())
        while data.strip(b"\r\n"):
            try:
                guessed = self._dialect.parse(data, names).schema
            except ValueError:  # a wrong line that is no text
                data = data[: self._dialect.last_end(data[: len(data) // 2])]
                continue
            return types | {one.name: one.type for one in guessed}
        return types

    def _names_in(self, line: bytes, location: str) -> list[str]:
        """Return the values of the first line."""
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

    # -- reading --------------------------------------------------------------------

    async def _open(
        self, address: str, edges: tuple[int, int], position: "Position", window: int
    ) -> Opened:
        end, wanted = await self._end(address, position)
        location, path = self._opener.label(address), self._opener.path(address)
        packing, (start, stop) = _packing(location), edges
        # A cut may be within the first line, or within empty lines before it.
        first, is_inside = max(start, end.facts), start > end.facts
        if "from" in position:
            (first, *_), is_inside = position["from"], False
        elif is_inside:
            first -= 1  # a line may have started earlier
        most = max(_LEAST_REQUEST, min(window // 4, _MOST_REQUEST))
        spans = [(0 if packing else first, stop or end.size)]
        ranges = self._ranges(address, end, spans, most, window)
        parse = self._parser(end.schema, wanted)

        def items() -> "Iterator[Item]":
            file = file_of(path, ranges)
            args = stop or None, self._dialect, location
            with _at(file, first, packing, location) as read:
                for at, data in blocks(read, first, *args, is_inside=is_inside):
                    if packing is None:
                        yield Mark(at)
                    yield from batches(data, at, parse, self._dialect, location)

        return self._opened(address, end, wanted, items=items, ranges=ranges)

    def _parser(self, schema: "pa.Schema", wanted: Wanted) -> Any:
        """Return the function that makes a table of lines."""
        names = [*schema.names]
        present = wanted.present(schema)
        return partial(
            self._dialect.parse,
            names=names,
            types={name: wanted.schema.field(name).type for name in present},
            include=present or names[:1],  # an empty list would be all
        )


@contextlib.contextmanager
def _at(file: Any, start: int, packing: str | None, location: str) -> "Iterator[Any]":
    """Yield the ``read`` of a file from a byte on, unpacked; close it at the end.

    Raises:
        DatasetError: If it is packed, and cannot be unpacked.
    """
    with contextlib.closing(file):
        if packing is None:
            file.seek(start)
            yield file.read
            return
        try:
            with pa.CompressedInputStream(file, packing) as unpacked:
                while start:
                    start -= len(unpacked.read(min(start, BLOCK)))
                yield unpacked.read
        except OSError as error:
            if error.errno is not None:
                raise
            raise _damage(error, location) from error


def _packing(location: str) -> str | None:
    ending = location.partition("?")[0].rpartition(".")[2].lower()
    return _PACKED.get(ending)


def _unpacked(
    data: bytes, packing: str, location: str, *, is_all: bool
) -> tuple[bytes, bool]:
    """Return the beginning of the unpacked data, and whether that is all."""
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


def _type(name: str, given: Any) -> "pa.DataType":
    if isinstance(given, pa.DataType):
        return given
    try:
        return pa.type_for_alias(given)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"column_types={{{name!r}: {given!r}}} is not an Arrow type: {error}"
        ) from error
