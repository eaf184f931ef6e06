"""Streams of JSON lines and of lines of text.

Lines end with a line feed, or with the shard. A carriage return before the line feed is
dropped, and so is a UTF-8 byte order mark at the start of a shard. Memory holds one
piece of a shard, and a line that continues in the next piece.
"""

import codecs
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, TypeAlias, Unpack

import numpy as np

from aioloader._base.blocks import FailedSample
from aioloader.datasets._checks import check_at_least, names_options
from aioloader.datasets._streams.engine import (
    ByteFeed,
    ByteFormatSpec,
    Cuts,
    Steps,
    at_line_ends,
)
from aioloader.datasets.sharded import (
    MAX_SAMPLE_BYTES,
    Addresses,
    ByteStream,
    StreamOptions,
)
from aioloader.errors import DatasetError

# orjson decodes integers with fewer digits exactly.
_LARGE_DIGITS = 19
_LONG_RUN, _POINT = b"0" * _LARGE_DIGITS, ord(".")
_DIGITS_TO_ZERO = bytes(
    ord("0") if chr(byte).isdigit() else byte for byte in range(128)
) + bytes(range(128, 256))
_NOT_ZERO = re.compile(rb"[^0]")
_UPPER, _THREES = np.frombuffer(b"\xf0" * 8 + b"0" * 8, np.uint64)
# Maximum nesting passed to orjson; orjson and json fail near 1,000.
_MAX_DEPTH = 500
# Maximum number of lines to decode at once, and of bytes (about), for the CPU cache.
_CHUNK_LINES, _CHUNK_BYTES = 128, 1 << 17
_BOM = "\ufeff".encode()
# Encodings in which many lines can be decoded as one text.
_JOINABLE = frozenset({"utf-8", "ascii", "iso8859-1"})


class JSONDecoder:
    """Decodes JSON lines with ``orjson``, or with ``json`` where the two differ.

    ``orjson`` turns integers beyond 64 bits into floats, and rejects ``NaN``, numbers
    too large for a float, lone surrogates, byte order marks and UTF-16.
    """

    def decode_line(self, line: bytes) -> list[Any]:
        """Return ``[value]``, or ``[]`` if blank; raise a ValueError if not JSON."""
        if not line.strip():
            return []
        fast = _orjson_loads()
        if fast is not None and not (_has_large_number(line) or _is_deep(line)):
            with contextlib.suppress(ValueError):  # `json` may accept the line
                return [fast(line)]
        try:
            return [json.loads(line)]
        except RecursionError:
            raise ValueError("values are nested too deep") from None

    def is_plain(self, piece: bytes | memoryview) -> bool:
        """Tell whether a piece of a shard certainly contains no large integers."""
        # A long run of digits fills an aligned word of eight bytes. A digit's upper
        # half is 3, as in six other characters.
        text = np.frombuffer(piece, np.uint8)
        words = text[: len(text) & -8].view(np.uint64)
        return not ((words & _UPPER) == _THREES).any()

    def decode_lines(
        self, lines: Sequence[bytes], longest: int, *, is_plain: bool
    ) -> list[Any] | None:
        """Decode many lines at once; return None if ``decode_line`` must decode each.

        ``longest`` is the longest line's length; ``is_plain`` tells if all are plain.
        """
        fast, is_long = _orjson_loads(), longest > 2 * _MAX_DEPTH
        if fast is None:
            return None
        if is_long or not is_plain:
            text = b"".join(lines)
            if not is_plain and _has_large_number(text):
                return None
            if is_long and _has_many_brackets(text) and any(map(_is_deep, lines)):
                return None
        if b"\n" in lines:
            lines = [line for line in lines if line != b"\n"]
        try:
            return list(map(fast, lines))
        except ValueError:
            return None


def _has_large_number(text: bytes) -> bool:
    """Tell whether ``text`` has a long run of digits, except after a decimal point."""
    digits = text.translate(_DIGITS_TO_ZERO)
    start = digits.find(_LONG_RUN)
    while start > 0 and text[start - 1] == _POINT:
        end = _NOT_ZERO.search(digits, start)
        start = digits.find(_LONG_RUN, end.start()) if end else -1
    return start >= 0


def _has_many_brackets(text: bytes) -> bool:
    # "[" and "{" differ in one bit; `bytes.count` takes as long as orjson.
    brackets = (np.frombuffer(text, np.uint8) | 0x20) == ord("{")
    return bool(np.count_nonzero(brackets) > _MAX_DEPTH)


def _is_deep(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > _MAX_DEPTH


@functools.cache
def _orjson_loads() -> Callable[[bytes], Any] | None:
    """Return orjson's ``loads``, imported at the first line; None without orjson."""
    try:
        import orjson  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return None
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


class JSONLinesDataset(ByteStream[Any]):
    """Streams samples from files with one JSON value per line.

    Blank lines and a byte order mark are skipped. A line that is not JSON is one failed
    sample; the error names the shard and the byte offset. Values are those of Python's
    ``json``, with ``NaN`` and integers of any size. If ``orjson`` is installed, it
    decodes the lines for which both libraries return the same value.

    Args:
        addresses: Paths or URLs, such as ``"https://host/{0..9}.jsonl.zst"``.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_line_ends)

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(addresses, _spec(JSONDecoder(), max_sample_bytes), **options)


class TextDataset(ByteStream[str]):
    """Streams lines of text, without line ends.

    Args:
        addresses: Paths or URLs.
        encoding: Encoding of the text, in which a line feed must be one byte. A line
            that cannot be decoded is one failed sample. A UTF-8 byte order mark at the
            start of a file is dropped.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_line_ends)

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        *,
        encoding: str = "utf-8",
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        **options: Unpack[StreamOptions],
    ) -> None:
        # Raises a LookupError now, not at the first line.
        self._encoding = codecs.lookup(encoding).name
        end = "\n\n".encode(encoding).removeprefix("\n".encode(encoding))
        if end != b"\n":
            raise ValueError(
                f"lines in {encoding!r} do not end with the byte of a line feed; "
                "convert the files to UTF-8"
            )
        kind = _spec(_TextDecoder(self._encoding), max_sample_bytes)
        super().__init__(addresses, kind, **options)

    def describe(self) -> dict[str, Any]:
        """Return the settings that a state depends on, including the encoding."""
        return {**super().describe(), "encoding": self._encoding}


class _TextDecoder:
    """Decodes lines of text, with the same methods as ``JSONDecoder``."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def decode_line(self, line: bytes) -> list[str]:
        return [line.decode(self._encoding)]

    def is_plain(self, _piece: bytes | memoryview) -> bool:
        return True

    def decode_lines(
        self,
        lines: Sequence[bytes],
        _longest: int,
        *,
        is_plain: bool,  # noqa: ARG002  (all are)
    ) -> list[str] | None:
        encoding = self._encoding
        try:
            if encoding in _JOINABLE and lines[-1].endswith(b"\n"):
                text = b"".join(lines).replace(b"\r\n", b"\n").decode(encoding)
                texts = text.split("\n")
                texts.pop()  # after the last line
                return texts
            return [without_end(line).decode(encoding) for line in lines]
        except ValueError:
            return None


LineDecoder: TypeAlias = JSONDecoder | _TextDecoder


def _spec(decoder: LineDecoder, max_sample_bytes: int) -> ByteFormatSpec:
    check_at_least(max_sample_bytes, 1, "max_sample_bytes")
    args = decoder, max_sample_bytes
    return ByteFormatSpec(
        partial(samples, *args), is_quick=True, quick=partial(_single, *args)
    )


def _single(
    decoder: LineDecoder, max_bytes: int, _url: str, start: int, data: memoryview
) -> Any:
    """Return one line's sample; NotImplemented if only ``samples`` can decode it."""
    line = bytes(data)
    if start and len(line) <= max_bytes and line.find(b"\n") in {-1, len(line) - 1}:
        with contextlib.suppress(ValueError):
            for sample in decoder.decode_line(without_end(line)):
                return sample
    return NotImplemented


def samples(decoder: LineDecoder, max_bytes: int, feed: ByteFeed) -> Steps:
    """Yield the lines' samples; a line over ``max_bytes`` fails without buffering."""
    offset = feed.at
    # The parts of a line that continues in the next piece, and their length.
    parts, length = list[bytes](), 0
    while not feed.has_ended:
        yield None
        # Twice as fast as `split`, because line ends are found many bytes at a time.
        lines, is_plain = BytesIO(feed.view).readlines(), decoder.is_plain(feed.view)
        feed.used = len(feed.view)
        rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        if length and (lines or feed.has_ended):
            end = lines.pop(0) if lines else b""
            length += len(end)
            if length > max_bytes + 1:
                failed = _too_long(feed.url, offset, length - len(end[-1:]), max_bytes)
                yield [failed], (offset := offset + length)
            else:
                lines.insert(0, b"".join([*parts, end]))
                is_plain = is_plain and decoder.is_plain(lines[0])
            parts, length = [], 0
        length += len(rest)
        parts = [] if length > max_bytes + 1 else [*parts, rest]
        if not offset and lines and lines[0].startswith(_BOM):
            offset = len(_BOM)
            lines[0] = lines[0].removeprefix(_BOM)
            if not lines[0]:
                lines.pop(0)  # the mark was the whole line
        done, fitting = 0, 1 + _CHUNK_BYTES * len(lines) // max(1, len(feed.view))
        while done < len(lines):
            chunk = lines[done : done + min(feed.want, _CHUNK_LINES, fitting)]
            done += len(chunk)
            lengths = list(map(len, chunk))
            longest, values = max(lengths), None
            if longest <= max_bytes:
                values = decoder.decode_lines(chunk, longest, is_plain=is_plain)
            if values is None:
                values = [*_one_by_one(decoder, max_bytes, feed.url, chunk, offset)]
            offset += sum(lengths)
            yield values, offset


def _one_by_one(
    decoder: LineDecoder, max_bytes: int, url: str, lines: list[bytes], offset: int
) -> Iterator[Any]:
    for line in lines:
        length = len(line) - line.endswith(b"\n")
        if length > max_bytes:
            yield _too_long(url, offset, length, max_bytes)
        else:
            try:
                yield from decoder.decode_line(without_end(line))
            except ValueError as error:
                text = (
                    f"{url!r}: the line at byte {offset:,} is damaged: {error}; "
                    "correct it, or skip it (on_error='skip')"
                )
                failure = DatasetError(text, location=url)
                failure.__cause__ = error
                yield FailedSample(failure)
        offset += len(line)


def _too_long(url: str, offset: int, length: int, max_bytes: int) -> FailedSample:
    text = (
        f"{url!r}: the line at byte {offset:,} has {length:,} bytes, over "
        f"max_sample_bytes={max_bytes:,}"
    )
    return FailedSample(DatasetError(text, location=url))


def without_end(line: bytes) -> bytes:
    """Return a line without its line feed and a carriage return before that."""
    return line.removesuffix(b"\n").removesuffix(b"\r")
