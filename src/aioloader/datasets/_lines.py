"""Cuts bytes into lines, each of which becomes a sample or a failure.

Lines end with a line feed, or with the shard; a carriage return before it is dropped,
and so is a UTF-8 byte order mark at the start of a shard. Memory holds one piece, and a
line that crosses into the next piece.
"""

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import Any, Final, Protocol

from aioloader._order.blocks import Bad
from aioloader.datasets._engine import Feed, Steps
from aioloader.errors import DatasetError

# Lines decoded at once, and about their bytes: intermediate values stay in the cache.
_AT_ONCE, _BYTES_AT_ONCE = 128, 1 << 17
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

    def is_plain(self, piece: bytes | memoryview) -> bool:
        """Return whether ``many`` need not look closer at lines of these bytes."""

    def many(
        self, lines: Sequence[bytes], longest: int, *, is_plain: bool
    ) -> list[Any] | None:
        """Return the results of ``one`` for all lines, faster; None if undecided.

        Args:
            lines: With their ends: a line feed, with or without a carriage return.
            longest: Length of the longest one.
            is_plain: Result for all bytes of the lines.
        """


def samples(decoder: Decoder, max_sample_bytes: int, feed: Feed) -> Steps:
    """Yield the samples of lines.

    Args:
        decoder: Makes the samples.
        max_sample_bytes: Longer lines fail, and are not kept.
        feed: The bytes, from the start of a line on.
    """
    make = partial(_made_of, decoder, max_sample_bytes, feed.url)
    at = feed.at
    # Of an unfinished line: what is kept, and its length.
    parts, length = list[bytes](), 0
    while not feed.has_ended:
        yield None
        # Twice as fast as `split`: line ends are found many bytes at a time.
        lines, is_plain = BytesIO(feed.view).readlines(), decoder.is_plain(feed.view)
        feed.used = len(feed.view)
        last = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        if length and (lines or feed.has_ended):
            length += sum(map(len, lines[:1]))
            if length > max_sample_bytes + 1:
                failed = _too_long(
                    feed.url, at, length - len(lines[:1]), max_sample_bytes
                )
                yield [failed], (at := at + length)
                del lines[:1]
            else:
                first = b"".join([*parts, *lines[:1]])
                is_plain = is_plain and decoder.is_plain(first)
                lines[:1] = [first]
            parts, length = [], 0
        length += len(last)
        if length > max_sample_bytes + 1:
            parts = []
        elif last:
            parts.append(last)
        if not at and lines and lines[0].startswith(_BOM):
            at = len(_BOM)
            lines[0] = lines[0].removeprefix(_BOM)
            if not lines[0]:
                lines.pop(0)  # it was the whole line
        taken, most = 0, 1 + _BYTES_AT_ONCE * len(lines) // max(1, len(feed.view))
        while taken < len(lines):
            some = lines[taken : taken + min(feed.want, _AT_ONCE, most)]
            taken += len(some)
            made, at = make(some, at, is_plain=is_plain)
            yield made, at


def _made_of(
    decoder: Decoder,
    limit: int,
    url: str,
    lines: list[bytes],
    at: int,
    *,
    is_plain: bool,
) -> tuple[list[Any], int]:
    """Return the samples of lines, decoded together if all are valid; and the end."""
    lengths = list(map(len, lines))
    longest = max(lengths)
    if longest <= limit:
        together = decoder.many(lines, longest, is_plain=is_plain)
        if together is not None:
            return together, at + sum(lengths)
    made: list[Any] = []
    for line in lines:
        sample = _sample(decoder, limit, url, line, at)
        at += len(line)
        if sample is not SKIP:
            made.append(sample)
    return made, at


def _sample(decoder: Decoder, limit: int, url: str, line: bytes, at: int) -> Any:
    length = len(line) - line.endswith(b"\n")
    if length > limit:
        return _too_long(url, at, length, limit)
    try:
        return decoder.one(without_end(line))
    except ValueError as error:
        text = f"{url!r}: the line at byte {at:,} is damaged: {error}"
        failure = DatasetError(text, location=url)
        failure.__cause__ = error
        return Bad(failure)


def _too_long(url: str, at: int, length: int, limit: int) -> Bad:
    text = (
        f"{url!r}: the line at byte {at:,} has {length:,} bytes, over "
        f"max_sample_bytes={limit:,}"
    )
    return Bad(DatasetError(text, location=url))


def without_end(line: bytes) -> bytes:
    """Return a line without the line feed, and the carriage return before it."""
    line = line.removesuffix(b"\n")
    return line.removesuffix(b"\r")
