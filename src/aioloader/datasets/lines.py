"""Shards of lines: JSON lines and text, plain or compressed.

Lines end with a line feed, or with the shard; a carriage return before it is dropped,
and so is a UTF-8 byte order mark at the start of a shard. Memory holds one piece, and a
line that crosses into the next piece.
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

# orjson reads integers with fewer digits exactly.
_DIGITS = 19
_RUN, _POINT = b"0" * _DIGITS, ord(".")
_ZEROS = bytes(ord("0") if chr(one).isdigit() else one for one in range(128)) + bytes(
    range(128, 256)
)
_END = re.compile(rb"[^0]")
_UPPER, _THREES = np.frombuffer(b"\xf0" * 8 + b"0" * 8, np.uint64)
# Deepest nesting passed to orjson; both libraries fail near a thousand.
_DEPTH = 500
# Lines decoded at once, and about their bytes: intermediate values stay in the cache.
_AT_ONCE, _BYTES_AT_ONCE = 128, 1 << 17
_BOM = "\ufeff".encode()
# Encodings in which the text of many lines is that of each.
_WHOLE = frozenset({"utf-8", "ascii", "iso8859-1"})


class JSONDecoder:
    """Decodes lines of JSON: one without its end, or many with their ends.

    By ``orjson`` where the result is that of ``json``: it turns integers beyond 64 bits
    into floats, and rejects ``NaN``, numbers too large for a float, lone surrogates,
    byte order marks and UTF-16.

    ``is_plain`` of many lines is the result for all their bytes, ``longest`` the length
    of the longest one.
    """

    def one(self, line: bytes) -> list[Any]:
        """Return the value of a line; nothing if it is empty; or raise a ValueError."""
        if not line.strip():
            return []
        fast = _orjson_loads()
        if fast is not None and not (_has_large(line) or _is_deep(line)):
            with contextlib.suppress(ValueError):  # it may still be JSON to Python
                return [fast(line)]
        try:
            return [json.loads(line)]
        except RecursionError:
            raise ValueError("values are nested too deep") from None

    def is_plain(self, piece: bytes | memoryview) -> bool:
        """Return whether no integer is large, wherever lines start and end."""
        # A long run of digits has eight of them in one word; their upper halves are 3,
        # as are those of six other characters.
        text = np.frombuffer(piece, np.uint8)
        words = text[: len(text) & -8].view(np.uint64)
        return not ((words & _UPPER) == _THREES).any()

    def many(
        self, lines: Sequence[bytes], longest: int, *, is_plain: bool
    ) -> list[Any] | None:
        """Return the values of lines, faster; None if ``one`` must decide.

        Without orjson it must, and if a value may differ.
        """
        fast, is_long = _orjson_loads(), longest > 2 * _DEPTH
        if fast is None:
            return None
        if is_long or not is_plain:
            text = b"".join(lines)
            if not is_plain and _has_large(text):
                return None
            if is_long and _have_brackets(text) and any(map(_is_deep, lines)):
                return None
        if b"\n" in lines:
            lines = [line for line in lines if line != b"\n"]
        try:
            return list(map(fast, lines))
        except ValueError:
            return None


def _has_large(text: bytes) -> bool:
    """Return whether there is a run of that many digits, except after a point."""
    digits = text.translate(_ZEROS)
    at = digits.find(_RUN)
    while at > 0 and text[at - 1] == _POINT:
        end = _END.search(digits, at)
        at = digits.find(_RUN, end.start()) if end else -1
    return at >= 0


def _have_brackets(text: bytes) -> bool:
    # They differ in one bit; `count` takes as long as orjson.
    brackets = (np.frombuffer(text, np.uint8) | 0x20) == ord("{")
    return bool(np.count_nonzero(brackets) > _DEPTH)


def _is_deep(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > _DEPTH


@functools.cache
def _orjson_loads() -> Callable[[bytes], Any] | None:
    """Return orjson's ``loads``, imported with the first line; None without orjson."""
    try:
        import orjson  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return None
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


class JSONLinesDataset(ByteStream[Any]):
    """Streams samples from files with one JSON value per line.

    Empty lines are skipped, and so is a byte order mark. A line that is not JSON is one
    failed sample; the error names the shard and the byte offset. Values are those of
    Python's ``json``, with ``NaN`` and integers of any size; ``orjson``, if installed,
    is faster and used for lines where it gives the same result.

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
        super().__init__(addresses, _kind(JSONDecoder(), max_sample_bytes), **options)


class TextDataset(ByteStream[str]):
    """Streams lines of text, without their ends.

    Args:
        addresses: Paths or URLs.
        encoding: Encoding of the text; its line feed must be one byte. A line that it
            cannot decode is one failed sample. A UTF-8 byte order mark at the beginning
            of a file is dropped.
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
        # A LookupError now, not at the first line.
        self._encoding = codecs.lookup(encoding).name
        end = "\n\n".encode(encoding).removeprefix("\n".encode(encoding))
        if end != b"\n":
            raise ValueError(
                f"lines in {encoding!r} do not end with the byte of a line feed; "
                "convert the files to UTF-8"
            )
        kind = _kind(_TextDecoder(self._encoding), max_sample_bytes)
        super().__init__(addresses, kind, **options)

    def describe(self) -> dict[str, Any]:
        """Return what a state depends on, including the encoding."""
        return {**super().describe(), "encoding": self._encoding}


class _TextDecoder:
    """Decodes lines of text; its methods are those of ``JSONDecoder``."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def one(self, line: bytes) -> list[str]:
        return [line.decode(self._encoding)]

    def is_plain(self, _piece: bytes | memoryview) -> bool:
        return True

    def many(
        self,
        lines: Sequence[bytes],
        _longest: int,
        *,
        is_plain: bool,  # noqa: ARG002  (all are)
    ) -> list[str] | None:
        encoding = self._encoding
        try:
            if encoding in _WHOLE and lines[-1].endswith(b"\n"):
                text = b"".join(lines).replace(b"\r\n", b"\n").decode(encoding)
                made = text.split("\n")
                made.pop()  # after the last line
                return made
            return [without_end(line).decode(encoding) for line in lines]
        except ValueError:
            return None


LineDecoder: TypeAlias = JSONDecoder | _TextDecoder


def _kind(decoder: LineDecoder, max_sample_bytes: int) -> ByteFormatSpec:
    check_at_least(max_sample_bytes, 1, "max_sample_bytes")
    args = decoder, max_sample_bytes
    return ByteFormatSpec(
        partial(samples, *args), is_quick=True, quick=partial(_only, *args)
    )


def _only(
    decoder: LineDecoder, max_bytes: int, _url: str, start: int, data: memoryview
) -> Any:
    """Return the sample of a plain line, or else NotImplemented."""
    line = bytes(data)
    if start and len(line) <= max_bytes and line.find(b"\n") in {-1, len(line) - 1}:
        with contextlib.suppress(ValueError):
            for sample in decoder.one(without_end(line)):
                return sample
    return NotImplemented


def samples(decoder: LineDecoder, max_bytes: int, feed: ByteFeed) -> Steps:
    """Yield the samples of lines; those over ``max_bytes`` fail, and are not kept."""
    at = feed.at
    # Of a line that crosses into the next piece: what is kept, and its length.
    parts, length = list[bytes](), 0
    while not feed.has_ended:
        yield None
        # Twice as fast as `split`: line ends are found many bytes at a time.
        lines, is_plain = BytesIO(feed.view).readlines(), decoder.is_plain(feed.view)
        feed.used = len(feed.view)
        rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        if length and (lines or feed.has_ended):
            end = lines.pop(0) if lines else b""
            length += len(end)
            if length > max_bytes + 1:
                failed = _too_long(feed.url, at, length - len(end[-1:]), max_bytes)
                yield [failed], (at := at + length)
            else:
                lines.insert(0, b"".join([*parts, end]))
                is_plain = is_plain and decoder.is_plain(lines[0])
            parts, length = [], 0
        length += len(rest)
        parts = [] if length > max_bytes + 1 else [*parts, rest]
        if not at and lines and lines[0].startswith(_BOM):
            at = len(_BOM)
            lines[0] = lines[0].removeprefix(_BOM)
            if not lines[0]:
                lines.pop(0)  # it was the whole line
        taken, most = 0, 1 + _BYTES_AT_ONCE * len(lines) // max(1, len(feed.view))
        while taken < len(lines):
            some = lines[taken : taken + min(feed.want, _AT_ONCE, most)]
            taken += len(some)
            lengths = list(map(len, some))
            longest, made = max(lengths), None
            if longest <= max_bytes:
                made = decoder.many(some, longest, is_plain=is_plain)
            if made is None:
                made = [*_singly(decoder, max_bytes, feed.url, some, at)]
            at += sum(lengths)
            yield made, at


def _singly(
    decoder: LineDecoder, max_bytes: int, url: str, lines: list[bytes], at: int
) -> Iterator[Any]:
    for line in lines:
        length = len(line) - line.endswith(b"\n")
        if length > max_bytes:
            yield _too_long(url, at, length, max_bytes)
        else:
            try:
                yield from decoder.one(without_end(line))
            except ValueError as error:
                text = (
                    f"{url!r}: the line at byte {at:,} is damaged: {error}; correct "
                    "it, or skip it (on_error='skip')"
                )
                failure = DatasetError(text, location=url)
                failure.__cause__ = error
                yield FailedSample(failure)
        at += len(line)


def _too_long(url: str, at: int, length: int, most: int) -> FailedSample:
    text = (
        f"{url!r}: the line at byte {at:,} has {length:,} bytes, over "
        f"max_sample_bytes={most:,}"
    )
    return FailedSample(DatasetError(text, location=url))


def without_end(line: bytes) -> bytes:
    """Return a line without the line feed, and the carriage return before it."""
    return line.removesuffix(b"\n").removesuffix(b"\r")
