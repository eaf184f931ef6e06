"""JSON as Python's ``json`` reads it, with ``orjson`` where the result is the same.

They differ: orjson turns integers beyond 64 bits into floats, and rejects ``NaN``,
``Infinity``, numbers too large for a float, lone surrogates, byte order marks and
UTF-16. ``json`` reads the lines that it rejects, and those that may hold a large
integer. For a duplicate key both keep the last value.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.datasets._lines import SKIP

# orjson reads integers with fewer digits exactly; those after a point are of a float.
_DIGITS = 19
_LARGE = re.compile(rb"(?<![.0-9])[0-9]{%d}" % _DIGITS)
_UPPER, _THREES = np.frombuffer(b"\xf0" * 8 + b"0" * 8, np.uint64)
# Deepest nesting passed to orjson; both libraries fail near a thousand.
_DEPTH = 500


class JSONDecoder:
    """Decodes lines of JSON."""

    def one(self, line: bytes) -> Any:
        """Return the value of a line; ``SKIP`` if it is empty.

        Raises:
            ValueError: If it is not JSON.
        """
        if not line.strip():
            return SKIP
        fast = _orjson_loads()
        if fast is not None and not _may_differ(line):
            try:
                return fast(line)
            except ValueError:
                pass  # it may still be JSON to Python
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("values are nested too deep") from None

    def many(self, lines: Sequence[bytes]) -> list[Any] | None:
        """Return the values of lines; None without orjson, or if results may differ."""
        fast = _orjson_loads()
        if b"\n" in lines:
            lines = [line for line in lines if line != b"\n"]
        if fast is None:
            return None
        try:
            if _may_one_differ(lines):
                return [self.one(x) if _may_differ(x) else fast(x) for x in lines]
            return list(map(fast, lines))
        except ValueError:
            return None


def _may_one_differ(lines: Sequence[bytes]) -> bool:
    """Return whether ``json`` may read one of many lines differently from orjson."""
    text = np.frombuffer(b"".join(lines), np.uint8)
    if _has_one_large(text):
        return True
    # The brackets differ in one bit; `count` takes as long as orjson.
    is_long = max(map(len, lines), default=0) > 2 * _DEPTH
    if not is_long or np.count_nonzero((text | 0x20) == ord("{")) <= _DEPTH:
        return False
    return any(map(_is_deep, lines))


def _has_one_large(text: npt.NDArray[np.uint8]) -> bool:
    """Return whether ``_LARGE`` matches, faster for the text of many lines."""
    # Each longer run of digits has eight of them in one word; their upper halves are 3,
    # as are those of six other characters.
    words = text[: len(text) & -8].view(np.uint64)
    if not ((words & _UPPER) == _THREES).any():
        return False
    is_digit = (text - ord("0")) < 10
    runs = is_digit
    for shift in (1, 2, 4, 8, 3):  # starts of 2, 4, 8, 16, 19 digits
        runs = runs[:-shift] & runs[shift:]
    # A run that starts after a point, or continues an earlier one, does not count.
    is_inner = is_digit[:-_DIGITS] | (text[:-_DIGITS] == ord("."))
    return bool(runs[:1].any() or (runs[1:] > is_inner).any())


def _may_differ(line: bytes) -> bool:
    return _LARGE.search(line) is not None or _is_deep(line)


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
