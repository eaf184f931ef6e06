"""Checks that many datasets share: of arguments, and of what a writer resumes."""

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex, get_args

from aioloader.errors import StateMismatchError


def check_at_least(value: int, least: int, name: str) -> int:
    """Return an integer; raise a TypeError or a ValueError unless it is enough."""
    check_is(value, SupportsIndex, name, "an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


def check_token(value: Any, name: str) -> int:
    """Return a token; raise a TypeError or a ValueError if it is no int64."""
    token = check_at_least(value, -(1 << 63), name)
    if token >= 1 << 63:
        raise ValueError(f"{name} must be below 2**63, as an int64 is, got {token:,}")
    return token


def check_same(
    begun: Mapping[str, Any], now: Mapping[str, Any], text: str, where: str
) -> None:
    """Raise a StateMismatchError if a writer has begun something else than ``now``.

    Its ``text`` says ``{where}``, and ``{what}`` differs: of mappings, which entries.
    """
    for name, old in begun.items():
        if old == (new := now[name]):
            continue
        what = name
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            what += f" ({', '.join(names)})"
        said = text.format(where=where, what=what)
        raise StateMismatchError(said, expected=old, found=new)


def check_is(value: object, kind: Any, name: str, words: str) -> None:
    """Raise a TypeError with ``words`` for the kind, unless ``value`` is of it."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, got {type(value).__name__}")


def check_word(value: object, words: Any, name: str) -> None:
    """Raise a ValueError unless ``value`` is one of the words of a ``Literal``."""
    known = get_args(words)
    if value not in known:
        *others, last = map(repr, known)
        shown = f"{', '.join(others)} or {last}"
        raise ValueError(f"{name} must be {shown}, got {value!r}")


def position_of(index: SupportsIndex, count: int) -> int:
    """Return an index of ``count`` samples, counted from the front."""
    position = operator.index(index)
    if not -count <= position < count:
        raise IndexError(f"index {position} is out of range for {count:,} samples")
    return position if position >= 0 else position + count
