"""Cutting bytes into lines, each of which becomes a sample or a failure of its own.

Lines end with a line feed, or the shard's end; a carriage return before it is dropped.
Memory holds one piece, and a line that crosses from one piece to the next.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from typing_extensions import Buffer

from aioloader._order.blocks import Bad
from aioloader.errors import DatasetError

SKIP: Final = object()
"""What ``decode`` returns for a line that is no sample."""


class LineParser:
    """Lines to samples.

    Args:
        url: Address of the shard, for errors.
        decode: Line without its end to a sample, or ``SKIP``; raises ``ValueError``.
        max_sample_bytes: Longer lines fail, and are not held.
        offset: Where in the shard the first byte that is fed lies.
    """

    def __init__(
        self,
        url: str,
        decode: Callable[[bytes], Any],
        *,
        max_sample_bytes: int,
        offset: int = 0,
    ) -> None:
        self.offset = offset
        self.is_over = False
        self._url = url
        self._decode = decode
        self._limit = max_sample_bytes
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._length = 0  # of that line, held or not

    def feed(self, piece: Buffer) -> None:
        """Add bytes."""
        first, *lines = bytes(piece).split(b"\n")
        self._extend(first)
        if lines:
            self._complete()
            self._lines.extend(lines[:-1])
            self._extend(lines[-1])

    def end(self) -> None:
        """Learn that there are no more bytes."""
        if self._length:
            self._complete()

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` samples."""
        samples: list[Any] = []
        lines = self._lines
        while lines and len(samples) < limit:
            line = lines.popleft()
            start = self.offset
            if isinstance(line, _TooLong):
                self.offset += line.length + 1
                samples.append(self._too_long(start, line.length))
                continue
            self.offset += len(line) + 1
            sample = self._sample(line, start)
            if sample is not SKIP:
                samples.append(sample)
        return samples

    def _extend(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self._limit:
            self._parts.clear()
        else:
            self._parts.append(part)

    def _complete(self) -> None:
        is_held = self._length <= self._limit
        line = b"".join(self._parts) if is_held else _TooLong.of(self._length)
        self._lines.append(line)
        self._parts, self._length = [], 0

    def _sample(self, line: bytes, start: int) -> Any:
        if len(line) > self._limit:
            return self._too_long(start, len(line))
        try:
            return self._decode(line[:-1] if line.endswith(b"\r") else line)
        except ValueError as error:
            text = f"{self._url!r}: the line at byte {start:,} is damaged: {error}"
            failure = DatasetError(text, location=self._url)
            failure.__cause__ = error
            return Bad(failure)

    def _too_long(self, start: int, length: int) -> Bad:
        text = (
            f"{self._url!r}: the line at byte {start:,} has {length:,} bytes, over "
            f"max_sample_bytes={self._limit:,}"
        )
        return Bad(DatasetError(text, location=self._url))


class _TooLong(bytes):
    """Stands for a line that was too long to be held."""

    length: int

    @classmethod
    def of(cls, length: int) -> "_TooLong":
        line = cls()
        line.length = length
        return line
