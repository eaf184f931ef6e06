"""Lines of CSV files: finding their ends, and parsing them into columns.

A newline within quotes ends no line. An unreadable line is a failed sample; the lines
around it are read.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
from pyarrow import csv

from aioloader._order.blocks import Bad
from aioloader.errors import DatasetError

# Bytes parsed at once: the search for quotes holds the interpreter lock.
BLOCK = 1 << 18
# The longest line.
_LONGEST = 1 << 28
# The byte order mark at the start of a file.
BOM = "\ufeff".encode()


@dataclass(frozen=True)
class Dialect:
    """How values are written.

    Attributes:
        delimiter: Separates values.
        quote_char: Encloses values; ``False``: none.
        escape_char: Precedes a literal character; ``False``: none.
        newlines_in_values: Whether quoted values may have newlines.
        null_values: Spellings of NULL; None: pyarrow's.
        strings_can_be_null: Whether they apply to text columns too.

    Raises:
        ValueError: If a character is not a single one.
    """

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
        """Return all settings, JSON-serialisable."""
        nulls = None if self.null_values is None else list(self.null_values)
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {**settings, "null_values": nulls}

    def first_end(self, data: bytes) -> int:
        """Return where the first line ends, after its newline; 0: not in ``data``."""
        if not self._is_quoted(data):
            return data.find(b"\n") + 1
        found = re.match(self._values + rb"\n", data)
        return 0 if found is None else found.end()

    def last_end(self, data: bytes) -> int:
        """Return where the last whole line ends, after its newline; 0: none.

        Args:
            data: Starts with a line.
        """
        if not self._is_quoted(data):
            return data.rfind(b"\n") + 1
        found = re.match(rb"(?:" + self._values + rb"\n)*+", data)
        return 0 if found is None else found.end()

    def is_open(self, data: bytes) -> bool:
        """Return whether ``data`` ends within quotes."""
        rest = data[self.last_end(data) :]
        return self._is_quoted(rest) and not re.fullmatch(self._values, rest)

    def parse(
        self,
        data: bytes,
        names: Sequence[str],
        types: "Mapping[str, pa.DataType] | None" = None,
        include: Sequence[str] = (),
    ) -> "pa.Table":
        """Return whole lines as a table.

        Args:
            data: The lines.
            names: All their columns.
            types: Types of columns; None: they are guessed, and wrong lines left out
                if all is text.
            include: The columns to return; empty: all.
        """
        if data.startswith(BOM):  # here it is text, but pyarrow would drop it
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
                invalid_row_handler=_skip if types is None and _is_text(data) else None,
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
        """A pattern of the values of one line, which are not within quotes at its end.

        A quote within a value is a character.
        """
        quote, escape, between = (
            re.escape(str(sign or "").encode())
            for sign in (self.quote_char, self.escape_char, self.delimiter)
        )
        inner = rb"[^" + quote + escape + rb"]|" + quote + quote
        if escape:
            inner += rb"|" + escape + rb"(?s:.)"
        quoted = quote + rb"(?:" + inner + rb")*+" + quote
        value = rb"(?:" + quoted + rb"|(?!" + quote + rb"))[^" + between + rb"\r\n]*+"
        return value + rb"(?:[" + between + rb"\r]" + value + rb")*+"


# Names of the settings.
SETTINGS = tuple(one.name for one in fields(Dialect) if one.init)


def _is_text(data: bytes) -> bool:
    """Return whether pyarrow can pass wrong lines on: it decodes them."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _skip(_row: Any) -> str:
    return "skip"


def blocks(
    read: Callable[[int], bytes],
    at: int,
    stop: int | None,
    dialect: Dialect,
    location: str,
    *,
    is_inside: bool,
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that start in a range of a file, and their positions.

    Args:
        read: Returns the next bytes of the range; none at the end.
        at: Its first byte.
        stop: One past its last byte; None: no end.
        dialect: How lines are written.
        location: Redacted address, for errors.
        is_inside: Whether the first byte belongs to a line that started earlier.

    Raises:
        DatasetError: If the range or the file ends within quotes.
    """
    data, is_last = b"", False
    while not is_last:
        piece = read(max(BLOCK, len(data)))
        data, is_last = data + piece, not piece
        if is_inside:
            end = data.find(b"\n") + 1 or len(data)
            is_inside = data[end - 1 : end] != b"\n"
            at, data = at + end, data[end:]
        if stop is not None and at + len(data) >= stop and not is_inside:
            end = 0 if at >= stop else data.find(b"\n", stop - 1 - at) + 1
            if end or at >= stop:
                data, is_last = data[:end], True
        end = dialect.last_end(data)
        if is_last and end < len(data):
            _check_end(dialect, data[end:], at + end, location)
            end = len(data)
        if end:
            yield at, data[:end]
        at, data = at + end, data[end:]
        if len(data) > _LONGEST:
            _check_end(dialect, b"", at, location)


def _check_end(dialect: Dialect, line: bytes, at: int, location: str) -> None:
    """Check that the rest of a range or file is a whole line.

    Raises:
        DatasetError: If it is not.
    """
    if line and not dialect.is_open(line):
        return
    what = "within quotes" if line else f"after more than {_LONGEST:,} bytes"
    raise DatasetError(
        f"{location!r} has a line at byte {at:,} that ends {what}: a quote is "
        "missing, or there is a newline in a value (pass newlines_in_values=True)",
        location=location,
    )


def batches(
    data: bytes,
    at: int,
    parse: "Callable[[bytes], pa.Table]",
    dialect: Dialect,
    location: str,
) -> "Iterator[pa.RecordBatch | Bad]":
    """Yield lines as record batches, and unreadable lines one by one.

    Args:
        data: Whole lines.
        at: Their position in the file.
        parse: Makes a table of lines.
        dialect: How lines are written.
        location: Redacted address, for errors.
    """
    if not data.strip(b"\r\n"):
        return
    try:
        found = parse(data).combine_chunks().to_batches()
    except (ValueError, TypeError, NotImplementedError) as error:
        end = dialect.last_end(data[: len(data) // 2]) or dialect.first_end(data)
        if isinstance(error, NotImplementedError) or end in {0, len(data)}:
            yield _unread(data, at, error, location)
            return
        yield from batches(data[:end], at, parse, dialect, location)
        yield from batches(data[end:], at + end, parse, dialect, location)
    else:
        yield from found


def _unread(line: bytes, at: int, error: Exception, location: str) -> Bad:
    shown = line[:60].decode("utf-8", "backslashreplace").rstrip("\r\n")
    failure = DatasetError(
        f"the line at byte {at:,} of {location!r} cannot be read: {error}; it starts "
        f"{shown!r}; types are guessed from the first lines, or set by column_types= "
        "and schema=",
        location=location,
    )
    failure.__cause__ = error
    return Bad(failure)
