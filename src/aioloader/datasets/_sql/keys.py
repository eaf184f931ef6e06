"""Keys: how they are written in a state, and the check that each comes once, in order.

A key is a number, or its text as the database reads it; bytes are in hexadecimals. The
check looks at whole columns: a nanosecond or so for each row.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

Key: TypeAlias = int | str


@dataclass(frozen=True)
class Span:
    """A half-open range of keys.

    Attributes:
        start: The first key that may be in it; None: there is no bound.
        stop: The first key after it; None: there is no bound.
        is_void: Whether nothing is in it, whatever the bounds.
    """

    start: Key | None = None
    stop: Key | None = None
    is_void: bool = False

    def words(self, key: str) -> str:
        """Return what errors say of it."""
        bounds = [
            f"{key} {sign} {bound!r}"
            for sign, bound in ((">=", self.start), ("<", self.stop))
            if bound is not None
        ]
        return " and ".join(bounds) or f"every {key}"


def spans_of(bounds: list[Key], count: int) -> list[Span]:
    """Return the ranges between ``bounds``, filled up to ``count`` with void ones."""
    edges = [None, *bounds, None]
    spans = [Span(*pair) for pair in pairwise(edges)]
    return spans + [Span(is_void=True)] * (count - len(spans))


def encoded(value: Any) -> Key:
    """Return a key's value as a state and the database have it.

    Raises:
        ValueError: If it is NULL.
    """
    match value:
        case None:
            raise ValueError("it is NULL")
        case int():
            return int(value)
        case bytes():
            return f"\\x{value.hex()}"
        case _:
            return str(value)


def as_bytes(key: Key) -> bytes:
    """Return the bytes that ``encoded`` was given."""
    return bytes.fromhex(str(key).removeprefix("\\x"))


class NotUniqueError(ValueError):
    """Say that a key comes twice, to a reader."""


class KeyCheck:
    """See that every key comes once; drop the row that was read before.

    Args:
        name: The key's column.
        last: Key of the last row that was read; reading goes on at that very row.
    """

    def __init__(self, name: str, last: Key | None) -> None:
        self._name = name
        self._is_again = last is not None
        self.last = last

    def restart(self) -> None:
        """Expect the last row once more."""
        self._is_again = self.last is not None

    def passed(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return what is new in a batch, not an empty one.

        Raises:
            NotUniqueError: If a key comes twice.
            ValueError: If a key is NULL.
        """
        keys = _plain(batch.column(self._name))
        first, before = encoded(batch.column(self._name)[0].as_py()), self.last
        repeated = _repeated(keys)
        if repeated is not None:
            self._refuse(encoded(batch.column(self._name)[repeated].as_py()))
        if first == before and not self._is_again:
            self._refuse(first)
        start = int(self._is_again and first == before)
        self._is_again = False
        self.last = encoded(batch.column(self._name)[-1].as_py())
        return batch.slice(start)

    def _refuse(self, key: Key) -> None:
        raise NotUniqueError(
            f"key {self._name!r} is not unique: {key!r} comes twice; choose a column "
            "that is, or make one in a query"
        )


def _plain(keys: "pa.Array") -> "pa.Array":
    return getattr(keys, "storage", keys)


def _repeated(keys: "pa.Array") -> int | None:
    """Return where a key is that equals the next one; None if there is none."""
    from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

    if len(keys) < 2:
        return None
    same = compute.equal(keys[:-1], keys[1:])
    found: int = compute.index(same, True).as_py()
    return None if found < 0 else found
