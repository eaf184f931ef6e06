"""JSON as Python's ``json`` reads it, by ``orjson`` where that gives the same.

They differ: of integers beyond 64 bits orjson makes floats, and it refuses ``NaN``,
``Infinity``, numbers too large for a float, lone surrogates, byte order marks and
UTF-16. A line that it refuses is read by ``json``, and so is one that may hold a large
integer. Of a key that occurs twice both keep the last.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from aioloader.datasets._lines import SKIP

# Integers that orjson reads as such have fewer digits.
_DIGITS = 19
_LARGE = re.compile(rb"[0-9]{%d}" % _DIGITS)
# Two digits so far from each other, in all bytes at one distance, show a large integer.
_STRIDE = (_DIGITS - 1) // 2
_ZEROS = bytes(ord("0") if chr(one).isdigit() else one for one in range(128)) + bytes(
    range(128, 256)
)
_RUN = b"0" * _DIGITS
# How deep values may be nested before orjson is not asked; both end near a thousand.
_DEPTH = 500


class JSONDecoder:
    """Lines of JSON to values."""

    def one(self, line: bytes) -> Any:
        """Return the value of a line; ``SKIP`` if it is empty.

        Raises:
            ValueError: If it is no JSON.
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
        """Return the values of lines, if orjson is there and they raise no question."""
        fast = _orjson_loads()
        if b"" in lines:
            lines = list(filter(None, lines))
        if fast is None or _may_one_differ(lines):
            return None
        try:
            return list(map(fast, lines))
        except ValueError:
            return None


def _may_one_differ(lines: Sequence[bytes]) -> bool:
    """Tell whether ``json`` may read one of many lines in another way than orjson."""
    text = b" ".join(lines)
    if b"00" in text[::_STRIDE].translate(_ZEROS) and _RUN in text.translate(_ZEROS):
        return True
    return any(len(line) > 2 * _DEPTH and _is_deep(line) for line in lines)


def _may_differ(line: bytes) -> bool:
    return _LARGE.search(line) is not None or _is_deep(line)


def _is_deep(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > _DEPTH


@functools.cache
def _orjson_loads() -> Callable[[bytes], Any] | None:
    """Return what is faster: imported with the first line, not before."""
    try:
        import orjson  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return None
    loads: Callable[[bytes], Any] = orjson.loads
    return loads
