"""Checksums of states, which tell a damaged state from a whole one.

A state may come from a file that was truncated, edited, or restored only in part. Each
wrong value would have its own consequence: another error, or silently other samples. So
a state carries a checksum of its contents, and only what was saved is ever loaded.
"""

import contextlib
import zlib
from collections.abc import Callable, Mapping
from operator import index
from types import NoneType
from typing import Any


def checksum(value: Any) -> int:
    """Return a checksum that JSON, pickle and ``torch.save`` preserve.

    Lists and tuples are alike, as are keys and their text, in any order. What JSON
    cannot hold has no part in it.
    """
    words: list[str] = []
    _spell(value, words.append)
    return zlib.crc32("\0".join(words).encode(errors="backslashreplace"))


def _spell(value: Any, add: Callable[[str], object]) -> None:
    if isinstance(value, str):
        add(f"'{value}")
    elif isinstance(value, (int, NoneType)):  # booleans too
        add(str(value))
    elif isinstance(value, Mapping):
        add("{")
        for key in sorted(value, key=str):
            add(str(key))
            _spell(value[key], add)
        add("}")
    elif isinstance(value, (list, tuple)):
        add("[")
        for one in value:
            _spell(one, add)
        add("]")
    elif isinstance(value, float):
        add(repr(float(value)))
    else:
        with contextlib.suppress(TypeError):  # numpy's integers have an index too
            add(str(index(value)))
