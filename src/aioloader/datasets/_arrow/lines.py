"""Lines of CSV files: finding their ends, and parsing them into columns.

A newline within quotes ends no line. An unreadable line is a failed sample; the lines
around it are read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
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
    _quoted: "re.Pattern[bytes] | None" = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote_char", "escape_char"):
            sign = getattr(self, name)
            is_off = sign is False and name != "delimiter"
            if not is_off and not (isinstance(sign, str) and len(sign.encode()) == 1):
                raise ValueError(f"{name} must be one character, got {sign!r}")
        if isinstance(self.null_values, str | AbstractSet):
            raise TypeError(f"null_values must be a list, got {self.null_values!r}")
        object.__setattr__(self, "_quoted", self._pattern())

    def describe(self) -> dict[str, Any]:
        """Return all settings, JSON-serialisable."""
        nulls = None if self.null_values is None else list(self.null_values)
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {**settings, "null_values": nulls}

    def first_end(self, data: bytes) -> int:
        """Return where the first line ends, after its newline; 0: not in ``data``."""
        end = data.find(b"\n") + 1
        for start, stop, is_open in self._spans(data):
            if not end or end <= start:
                break
            if end <= stop or is_open:
                end = 0 if is_open else data.find(b"\n", stop) + 1
        return end

    def last_end(self, data: bytes) -> int:
        """Return where the last whole line ends, after its newline; 0: none.

        Args:
            data: Starts with a line.
        """
        end = data.rfind(b"\n") + 1
        for start, stop, is_open in reversed(self._spans(data)):
            if stop < end and not is_open:
                break
            if start < end:
                end = data.rfind(b"\n", 0, start) + 1
        return end

    def is_open(self, data: bytes) -> bool:
        """Return whether ``data`` ends within quotes."""
        spans = self._spans(data)
        return bool(spans) and spans[-1][2]

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

    def _spans(self, data: bytes) -> list[tuple[int, int, bool]]:
        """Return the positions of quoted values, and whether one is not closed."""
        if self._quoted is None or self.quote_bytes not in data:
            return []
        found = self._quoted.finditer(data)
        return [(one.start(), one.end(), not one[1]) for one in found]

    @property
    def quote_bytes(self) -> bytes:
        """The quote character."""
        return str(self.quote_char).encode()

    def _pattern(self) -> "re.Pattern[bytes] | None":
        """Return a pattern for a quoted value, which starts where a value does."""
        if self.quote_char is False:
            return None
        quote, between = re.escape(self.quote_bytes), re.escape(self.delimiter.encode())
        inner = [rb"[^" + quote + rb"]", quote + quote]
        if self.escape_char is not False:
            escape = re.escape(str(self.escape_char).encode())
            inner = [
                rb"[^" + quote + escape + rb"]",
                quote + quote,
                escape + rb"(?s:.)",
            ]
        begin = rb"(?:\A|(?<=[" + between + rb"\r\n]))"
        return re.compile(begin + quote + rb"(?:" + rb"|".join(inner) + rb")*+(" + quote
                          + rb"|\Z)")  # fmt: skip


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
