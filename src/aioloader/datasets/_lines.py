"""Cuts bytes into lines, each of which becomes a sample or a failure.

Lines end with a line feed, or with the shard; a carriage return before it is dropped,
and so is a UTF-8 byte order mark at the start of a shard. Memory holds one piece, and a
line that crosses into the next piece.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final, Protocol

from typing_extensions import Buffer

from aioloader._order.blocks import Bad
from aioloader.datasets._streams.shards import Quick
from aioloader.errors import DatasetError

# Lines decoded at once: their intermediate values stay in the cache.
_AT_ONCE = 128
_BOM = "\ufeff".encode()

SKIP: Final = object()
"""Returned by ``Decoder.one`` for a line that is not a sample."""


class Decoder(Protocol):
    """Decodes lines into samples."""

    def one(self, line: bytes) -> Any:
        """Return the sample of a line without its end, or ``SKIP``.

        Raises:
            ValueError: If there is none.
        """

    def many(self, lines: Sequence[bytes]) -> list[Any] | None:
        """Return the results of ``one`` for all lines, faster; None if undecided.

        Args:
            lines: With their ends: a line feed, with or without a carriage return.
        """


class LineParser(Quick):
    """Parses lines into samples.

    Args:
        url: Address of the shard, for errors.
        decoder: Makes the samples.
        max_sample_bytes: Longer lines fail, and are not kept.
        offset: Offset in the shard of the first byte fed.
    """

    def __init__(
        self, url: str, decoder: Decoder, *, max_sample_bytes: int, offset: int = 0
    ) -> None:
        self.offset = offset
        self.is_over = False
        self._url = url
        self._decoder = decoder
        self._limit = max_sample_bytes
        self._lines: list[bytes] = []
        self._taken = 0  # of those lines
        self._parts: list[bytes] = []  # of an unfinished line
        self._length = 0  # of that line, kept or not
        self._has_long = False  # whether a line was too long to keep

    def feed(self, piece: Buffer) -> None:
        """Add bytes."""
        # Twice as fast as `split`: line ends are found many bytes at a time.
        lines = BytesIO(piece).readlines()
        last = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        if self._length and lines:
            self._extend(lines[0])
            lines[0] = self._completed()
        self._lines += lines
        if last:
            self._extend(last)

    def end(self) -> None:
        """Note that there are no more bytes."""
        if self._length:
            self._lines.append(self._completed())

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` samples."""
        if not self.offset:
            self._drop_mark()
        samples: list[Any] = []
        while self._taken < len(self._lines) and len(samples) < limit:
            stop = self._taken + min(limit - len(samples), _AT_ONCE)
            lines = self._lines[self._taken : stop]
            samples += self._many(lines)
            self._taken += len(lines)
        if self._taken >= len(self._lines):
            self._lines, self._taken = [], 0
        return samples

    def _drop_mark(self) -> None:
        """Drop a byte order mark at the start of a shard's first line."""
        if self._lines and self._lines[0].startswith(_BOM):
            self.offset = len(_BOM)
            self._lines[0] = self._lines[0].removeprefix(_BOM)
            if not self._lines[0]:
                self._lines.pop(0)  # it was the whole line

    def _many(self, lines: list[bytes]) -> list[Any]:
        """Return the samples of lines, decoded together if all are valid."""
        lengths = list(map(len, lines))
        if max(lengths) <= self._limit and not self._has_long:
            made = self._decoder.many(lines)
            if made is not None:
                self.offset += sum(lengths)
                return made
        samples = map(self._one, lines)
        return [sample for sample in samples if sample is not SKIP]

    def _one(self, line: bytes) -> Any:
        start = self.offset
        if isinstance(line, _TooLong):
            self.offset += line.length
            return self._too_long(start, line.length - line.has_end)
        self.offset += len(line)
        if len(line) - line.endswith(b"\n") > self._limit:
            return self._too_long(start, len(line) - line.endswith(b"\n"))
        try:
            return self._decoder.one(without_end(line))
        except ValueError as error:
            text = f"{self._url!r}: the line at byte {start:,} is damaged: {error}"
            failure = DatasetError(text, location=self._url)
            failure.__cause__ = error
            return Bad(failure)

    def _extend(self, part: bytes) -> None:
        """Add to the unfinished line."""
        self._length += len(part)
        if self._length > self._limit + 1:
            self._parts = [part[-1:]]
        else:
            self._parts.append(part)

    def _completed(self) -> bytes:
        """Return the finished line, or its placeholder."""
        line = b"".join(self._parts)
        if self._length > self._limit + 1:
            line = _TooLong.of(self._length, has_end=line.endswith(b"\n"))
            self._has_long = True
        self._parts, self._length = [], 0
        return line

    def _too_long(self, start: int, length: int) -> Bad:
        text = (
            f"{self._url!r}: the line at byte {start:,} has {length:,} bytes, over "
            f"max_sample_bytes={self._limit:,}"
        )
        return Bad(DatasetError(text, location=self._url))


def without_end(line: bytes) -> bytes:
    """Return a line without the line feed, and the carriage return before it."""
    line = line.removesuffix(b"\n")
    return line.removesuffix(b"\r")


class _TooLong(bytes):
    """Placeholder for a line that was too long to keep."""

    length: int
    has_end: bool

    @classmethod
    def of(cls, length: int, *, has_end: bool) -> "_TooLong":
        line = cls()
        line.length, line.has_end = length, has_end
        return line
