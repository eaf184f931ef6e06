"""JSON as Python's ``json`` reads it, with ``orjson`` where the result is the same.

They differ: orjson turns integers beyond 64 bits into floats, and rejects ``NaN``,
``Infinity``, numbers too large for a float, lone surrogates, byte order marks and
UTF-16. ``json`` reads the lines that it rejects, and those that may hold a large
integer. For a duplicate key both keep the last value.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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


class JSONDecoder:
    """Decodes lines of JSON: one without its end, or many with their ends.

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
