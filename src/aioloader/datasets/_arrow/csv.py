"""CSV files, whose shards are ranges of lines that pyarrow parses in blocks.

Unless the caller gives them, column names come from the first line, and types from the
first lines of all files. A plain file is cut into ranges. A compressed file is a single
shard, and so is any file with ``newlines_in_values``. An iteration resumes at a block,
or at the beginning of a compressed file. Unreadable lines become failed samples.
"""

import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import compute, csv

from aioloader._base.blocks import FailedSample
from aioloader._base.cancellation import in_thread
from aioloader.datasets._arrow.files import (
    DecodePlan,
    FileMetadata,
    FilePart,
    Item,
    RestartPoint,
    TableFormat,
    edges,
    request_bytes,
)
from aioloader.datasets._arrow.projection import Projection, checked
from aioloader.datasets._streams.shards import ShardPosition, Summary
from aioloader.errors import DatasetError, TruncatedReadError

_RANGE_BYTES = 32 << 20
# Bytes parsed per call; few, because the search for quotes holds the GIL.
_BLOCK_BYTES = 1 << 18
_MAX_LINE = 1 << 28
# Bytes read to find column names and types.
_MIN_HEAD, _MAX_HEAD = 1 << 16, 1 << 26
# First bytes read of a compressed file; bzip2 has blocks of 900 KB.
_PACKED_HEAD = 1 << 20
_PACKINGS = {
    "gz": "gzip", "bz2": "bz2", "zst": "zstd", "zstd": "zstd", "lz4": "lz4",
    "br": "brotli",
}  # fmt: skip
_UNSUPPORTED = {"xz", "zip", "7z"}
# Approximate memory of a file's metadata, in bytes.
_NBYTES = 1 << 12
# pyarrow's message for a value that does not fit its column's type.
_MISFIT = re.compile(
    r"(?s)In CSV column #(\d+): (?:Row #\d+: )?"
    r"(?:CSV conversion error to (.+): invalid value '(.*)')?"
)
_BOM = "\ufeff".encode()


@dataclass(frozen=True)
class Dialect:
    """A CSV dialect; see ``CSVDataset``. Newlines within quotes do not end a line."""

    delimiter: str = ","
    quote_char: str | bool = '"'
    escape_char: str | bool = False
    newlines_in_values: bool = False
    null_values: Sequence[str] | None = None
    strings_can_be_null: bool = False

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote_char", "escape_char"):
            sign = getattr(self, name)
            is_off = sign is False and name != "delimiter"
            if not is_off and not (isinstance(sign, str) and len(sign.encode()) == 1):
                raise ValueError(f"{name} must be one character, got {sign!r}")
        if isinstance(self.null_values, str | AbstractSet):
            raise TypeError(f"null_values must be a list, got {self.null_values!r}")

    def describe(self) -> dict[str, Any]:
        nulls = None if self.null_values is None else list(self.null_values)
        return {**asdict(self), "null_values": nulls}

    def first_end(self, data: bytes) -> int:
        """Return the offset just after the first whole line, or 0 if there is none."""
        if not self._is_quoted(data):
            return data.find(b"\n") + 1
        line = re.match(self._values + rb"\n", data)
        return 0 if line is None else line.end()

    def last_end(self, data: bytes) -> int:
        """Return the offset just after the last whole line, or 0 if there is none."""
        if not self._is_quoted(data):
            return data.rfind(b"\n") + 1
        lines = re.match(rb"(?:" + self._values + rb"\n)*+", data)
        return 0 if lines is None else lines.end()

    def is_open(self, data: bytes) -> bool:
        """Return whether ``data`` ends within quotes."""
        rest = data[self.last_end(data) :]
        return self._is_quoted(rest) and not re.fullmatch(self._values, rest)

    def parse(
        self,
        data: bytes,
        names: Sequence[str] = (),
        types: Mapping[str, pa.DataType] | None = None,
        include: Sequence[str] = (),
        *,
        skip_wrong: bool = False,
    ) -> pa.Table:
        """Parse whole lines; ``skip_wrong`` skips lines with a wrong number of values.

        Without ``names``, the first line contains the names. Without ``include``, all
        columns are returned. A column that is not in ``types`` has an inferred type.
        """
        if data.startswith(_BOM):  # here it is text, but pyarrow would drop it
            data = b"\n" + data
        nulls = {} if self.null_values is None else {"null_values": self.null_values}
        return csv.read_csv(
            pa.BufferReader(data),
            csv.ReadOptions(
                column_names=names, use_threads=False, block_size=len(data) + 1
            ),
            csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote_char,
                escape_char=self.escape_char,
                newlines_in_values=True,
                invalid_row_handler=(lambda _: "skip") if skip_wrong else None,
            ),
            csv.ConvertOptions(
                column_types=types,
                include_columns=include,
                strings_can_be_null=self.strings_can_be_null,
                **nulls,
            ),
        )

    def _is_quoted(self, data: bytes) -> bool:
        return self.quote_char is not False and str(self.quote_char).encode() in data

    @functools.cached_property
    def _values(self) -> bytes:
        """A pattern for a line's values; quotes within unquoted values are literal."""
        quote, escape, delimiter = (
            re.escape(str(sign or "").encode())
            for sign in (self.quote_char, self.escape_char, self.delimiter)
        )
        inner = rb"[^" + quote + escape + rb"]|" + quote + quote
        if escape:
            inner += rb"|" + escape + rb"(?s:.)"
        quoted = quote + rb"(?:" + inner + rb")*+" + quote
        value = rb"(?:" + quoted + rb"|(?!" + quote + rb"))[^" + delimiter + rb"\r\n]*+"
        return value + rb"(?:[" + delimiter + rb"\r]" + value + rb")*+"


class CSVFormat(TableFormat):
    """A format for CSV files; a shard is (address, start, stop); stop 0 is the end."""

    def __init__(
        self,
        addresses: Any,
        storage: Any,
        *,
        dialect: Dialect,
        column_names: Sequence[str] | None = None,
        column_types: Mapping[str, Any] | None = None,
        **projection: Any,
    ) -> None:
        super().__init__(addresses, storage, **projection)
        if isinstance(column_names, str):
            raise TypeError(f"column_names must be a list, got {column_names!r}")
        self._dialect = dialect
        self._column_names = None if column_names is None else list(column_names)
        self._types = {n: _type(n, kind) for n, kind in (column_types or {}).items()}
        self._types |= {f.name: f.type for f in projection.get("schema") or ()}

    def describe(self) -> dict[str, Any]:
        types = {name: str(kind) for name, kind in sorted(self._types.items())}
        names = {"column_names": self._column_names, "column_types": types}
        return {**super().describe(), **self._dialect.describe(), **names}

    def summary(self, shards: Sequence[FilePart]) -> Summary:
        """Return a summary with a digest of the cuts, which depend on file lengths."""
        cuts = "".join(f"{start}-{stop};" for _, start, stop in shards if start + stop)
        digest = {"cuts": f"{zlib.crc32(cuts.encode()):08x}"} if cuts else {}
        return {**super().summary(shards), **digest}

    def _cut(self, shard: FilePart, count: int) -> list[FilePart]:
        address, start, stop = shard
        meta = self._cache.get(address)
        if meta is None or self._is_whole(address):
            raise ValueError(
                f"{self.storage.label(address)!r} is compressed, or may have newlines "
                "in values, so it is one shard and cannot be cut for more readers; "
                "write more files, or plain ones"
            )
        size = (stop or meta.version.size) - start
        cuts = [start + edge for edge in edges(size, count)[:-1]]
        return [(address, *pair) for pair in pairwise([*cuts, stop])]

    def _is_whole(self, address: str) -> bool:
        """Return whether a file cannot be cut into ranges."""
        is_packed = _packing(self.storage.label(address)) is not None
        return is_packed or self._dialect.newlines_in_values

    async def _read_metadata(self, address: str, location: str) -> FileMetadata:
        packing, version = _packing(location), await self.storage.version(address)
        size = version.size
        if packing and not size:
            text = f"{location!r} is empty, as no compressed file is: write it again"
            raise TruncatedReadError(text, location=location, received=0)
        length, head = _PACKED_HEAD if packing else _MIN_HEAD, None
        while head is None:
            data, _ = await self.storage.part(address, 0, min(size, length), version)
            parse = partial(self._parse_head, is_all=len(data) >= size)
            head = await in_thread(parse, data, packing, location)
            length *= 16
        schema, start = head
        count = 1 if self._is_whole(address) else max(1, -(-size // _RANGE_BYTES))
        cuts = pairwise([*edges(size, count)[:-1], 0])
        parts: list[tuple[FilePart, int]] = [(pair, size // count) for pair in cuts]
        # ``details`` is the offset of the first row in the unpacked data.
        schema = self._shared(schema)
        return FileMetadata(address, location, version, schema, parts, start, _NBYTES)

    def _parse_head(
        self, data: bytes, packing: str | None, location: str, *, is_all: bool
    ) -> tuple[pa.Schema, int] | None:
        """Return schema and offset of the first row; None if ``data`` is too short."""
        dialect = self._dialect
        if packing is not None:
            data, is_all = _unpacked(data, packing, location, is_all=is_all)
        is_enough = is_all or len(data) >= _MAX_HEAD
        start = len(_BOM) if data.startswith(_BOM) else 0
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
        types = self._inferred(data[start:end], names)
        types |= {n: kind for n, kind in self._types.items() if n in types}
        return checked(pa.schema([(name, types[name]) for name in names])), start

    def _names_in(self, line: bytes, location: str) -> list[str]:
        text = f"{location!r} has no first line with the names of columns"
        if not line.strip():
            raise DatasetError(
                f"{text}: it is empty; pass column_names= for files without one",
                location=location,
            )
        try:
            table = self._dialect.parse(line + b"\n")
            names = [str(name) for name in table.column_names]
        except ValueError as error:
            raise DatasetError(
                f"{location!r} has no first line with the names of columns: {error}; "
                "pass column_names=",
                location=location,
            ) from error
        if table.num_rows:
            raise DatasetError(
                f"{text}: it has carriage returns without newlines, and lines must end "
                "with newlines; convert the file",
                location=location,
            )
        return names

    def _inferred(self, data: bytes, names: Sequence[str]) -> dict[str, pa.DataType]:
        """Infer column types from the first lines; ignore lines that cannot be read."""
        types = dict.fromkeys(names, pa.null())
        while data.strip(b"\r\n"):
            is_text = False  # pyarrow can skip a line only if it can decode it
            with contextlib.suppress(UnicodeDecodeError):
                is_text = bool(data.decode())
            parse = partial(self._dialect.parse, data, names, skip_wrong=is_text)
            try:
                table = parse()
            except ValueError:  # a bad line that is not UTF-8: try fewer lines
                data = data[: self._dialect.last_end(data[: len(data) // 2])]
                continue
            types |= {field.name: field.type for field in table.schema}
            for name in names:
                if types[name] == pa.float64() and _is_integral(parse, table, name):
                    types[name] = _integer_type(parse, name)
            return types
        return types

    def _unit(self, part: Sequence[Any]) -> str:
        return f"the lines from byte {part[0]:,} on" if any(part) else ""

    async def _decode_plan(
        self,
        meta: FileMetadata,
        projection: Projection,
        part: Sequence[Any],
        position: ShardPosition,
        window: int,
    ) -> DecodePlan:
        packing, (start, stop) = _packing(meta.location), part
        # A cut may be within the line of names, or within empty lines before it.
        first, is_inside = max(start, meta.details), start > meta.details
        if "from" in position:
            (first, *_), is_inside = position["from"], False
        elif is_inside:
            first -= 1  # unless this is a newline, a line started earlier
        names, present = [*meta.schema.names], projection.present(meta.schema)
        types = {name: projection.schema.field(name).type for name in present}
        # pyarrow takes an empty list to mean all columns.
        include = present or names[:1]
        parse = partial(self._dialect.parse, names=names, types=types, include=include)
        lines = Lines(self._dialect, parse, names, meta.location)

        def items(file: pa.NativeFile) -> Iterator[Item]:
            with _read_from(first, file, packing, meta.location) as read:
                for pos, data in lines.blocks(read, first, stop, is_inside=is_inside):
                    if packing is None:
                        yield RestartPoint(pos)
                    yield from lines.batches(data, pos)

        spans = [(0 if packing else first, stop or meta.version.size)]
        return DecodePlan(items, spans, request_bytes(window))


class Lines(NamedTuple):
    """Splits the bytes of a range into lines, and parses these in blocks."""

    dialect: Dialect
    parse: Callable[[bytes], pa.Table]  # takes whole lines
    names: Sequence[str]  # all columns of a line
    location: str

    def blocks(
        self, read: Callable[[int], bytes], pos: int, stop: int, *, is_inside: bool
    ) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of the lines that start in a range, as (byte offset, lines).

        ``read`` returns the bytes from ``pos`` on. If ``is_inside``, ``pos`` may be in
        an earlier line, which is skipped. A ``stop`` of 0 is the end of the file.
        """
        data, is_last = b"", False
        while not is_last:
            piece = read(max(_BLOCK_BYTES, len(data)))
            data, is_last = data + piece, not piece
            if is_inside:
                end = data.find(b"\n") + 1 or len(data)
                is_inside = data[end - 1 : end] != b"\n"
                pos, data = pos + end, data[end:]
            if stop and pos + len(data) >= stop and not is_inside:
                end = 0 if pos >= stop else data.find(b"\n", stop - 1 - pos) + 1
                if end or pos >= stop:
                    data, is_last = data[:end], True
            end = self.dialect.last_end(data)
            if is_last and end < len(data):
                self._check_end(data[end:], pos + end)
                end = len(data)
            if end:
                yield pos, data[:end]
            pos, data = pos + end, data[end:]
            if len(data) > _MAX_LINE:
                self._check_end(b"", pos)

    def _check_end(self, line: bytes, pos: int) -> None:
        """Raise if ``line`` ends within quotes, or is empty (the line is too long)."""
        if line and not self.dialect.is_open(line):
            return
        where = "within quotes" if line else f"after more than {_MAX_LINE:,} bytes"
        raise DatasetError(
            f"{self.location!r} has a line at byte {pos:,} that ends {where}: a quote "
            "is missing, or there is a newline in a value (pass "
            "newlines_in_values=True)",
            location=self.location,
        )

    def batches(self, data: bytes, pos: int) -> Iterator[pa.RecordBatch | FailedSample]:
        """Parse whole lines; yield record batches, and FailedSamples for bad lines."""
        if not data.strip(b"\r\n"):
            return
        try:
            batches = self.parse(data).combine_chunks().to_batches()
        except (ValueError, TypeError, NotImplementedError) as error:
            dialect = self.dialect
            end = dialect.last_end(data[: len(data) // 2]) or dialect.first_end(data)
            if isinstance(error, NotImplementedError) or end in {0, len(data)}:
                yield self._unread(data, pos, error)
                return
            yield from self.batches(data[:end], pos)
            yield from self.batches(data[end:], pos + end)
        else:
            yield from batches

    def _unread(self, line: bytes, pos: int, error: Exception) -> FailedSample:
        shown = line[:60].decode("utf-8", "backslashreplace").rstrip("\r\n")
        why, fix = str(error), "correct the line, or pass other types (column_types=)"
        if misfit := _MISFIT.match(why):
            number, kind, value = misfit.groups()
            name, why = self.names[int(number)], why[misfit.end() :]
            if kind == "null":
                why = f"has {value!r} and no known type: its first values are empty"
            elif kind:
                why = f"has {value!r}, which is not {kind}"
            why = f"column {name!r} {why}"
            fix = f"pass its type, as in column_types={{{name!r}: 'string'}}"
        failure = DatasetError(
            f"the line at byte {pos:,} of {self.location!r} cannot be read: {why}; it "
            f"starts {shown!r}; {fix}",
            location=self.location,
        )
        failure.__cause__ = error
        return FailedSample(failure)


def _is_integral(parse: Callable[..., pa.Table], table: pa.Table, name: str) -> bool:
    """Return whether a column inferred as float contains only integers and NULLs."""
    texts = parse(types={name: pa.string()}, include=[name])[name]
    digits = compute.match_substring_regex(texts, r"^\s*[-+]?\d+\s*$")
    return bool(compute.all(compute.or_(digits, table[name].is_null())).as_py())


def _integer_type(parse: Callable[..., pa.Table], name: str) -> pa.DataType:
    try:
        parse(types={name: pa.uint64()}, include=[name])
    except ValueError:
        return pa.int64()
    return pa.uint64()


@contextlib.contextmanager
def _read_from(
    start: int, file: pa.NativeFile, packing: str | None, location: str
) -> Iterator[Any]:
    """Yield a function that reads a file's unpacked data from offset ``start``."""
    if packing is None:
        file.seek(start)
        yield file.read
        return
    with pa.CompressedInputStream(file, packing) as unpacked:
        read = _unpacking(unpacked, location)
        while start and (skipped := read(min(start, _BLOCK_BYTES))):
            start -= len(skipped)
        yield read


def _unpacking(stream: pa.NativeFile, location: str) -> Callable[[int], bytes]:
    """Return a function that reads unpacked bytes, and raises after the valid bytes."""
    failure: Exception | None = None

    def read(size: int) -> bytes:
        nonlocal failure
        piece = bytearray(size)
        try:
            if failure is None:
                return bytes(memoryview(piece)[: stream.readinto(piece)])
        except OSError as error:
            if error.errno is not None:
                raise
            failure = _damage(error, location)
            failure.__cause__ = error
            # Arrow has filled part of the buffer, but does not report how much.
            if good := piece.rstrip(b"\0"):
                return bytes(good)
        raise failure

    return read


def _packing(location: str) -> str | None:
    ending = location.rpartition(".")[2].lower()  # a label has no query
    if ending in _UNSUPPORTED:
        endings = ", ".join(f".{name}" for name in _PACKINGS)
        raise DatasetError(
            f"{location!r} is compressed as .{ending}, which CSV files are not read "
            f"from: decompress it, or use one of {endings}",
            location=location,
        )
    return _PACKINGS.get(ending)


def _unpacked(
    data: bytes, packing: str, location: str, *, is_all: bool
) -> tuple[bytes, bool]:
    """Return a file's unpacked beginning, and whether no more can be unpacked."""
    head = b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), packing) as stream:
            read = _unpacking(stream, location)
            while part := read(_MIN_HEAD):
                head += part
                if len(head) >= max(_MIN_HEAD, len(data) // 16):
                    return head, False
    except DatasetError:
        if not is_all:
            return head, False
        head = head[: head.rfind(b"\n") + 1]  # reading rows raises the error
        if not head:
            raise
    return head, is_all


def _damage(error: OSError, location: str) -> DatasetError:
    text = f"{location!r} cannot be unpacked: {error}; write or download it again"
    if "memory" in str(error):
        text = f"{location!r}: {error}; pack it again with a smaller window"
    if "Truncated" in str(error):  # pyarrow has no separate type for this
        return TruncatedReadError(text, location=location)
    return DatasetError(text, location=location)


def _type(name: str, given: Any) -> pa.DataType:
    if isinstance(given, pa.DataType):
        return given
    try:
        return pa.type_for_alias(given)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"column_types={{{name!r}: {given!r}}} is not an Arrow type: {error}"
        ) from error
