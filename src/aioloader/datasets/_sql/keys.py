"""Keys: their encoding in a state, and the check that they are unique and in order.

A key is a number, or its text as the database reads it; bytes are hexadecimal. The
check works on whole columns: about a nanosecond per row.
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
        start: The first key that may be in it; None: no bound.
        stop: The first key after it; None: no bound.
        is_void: Whether it is empty, whatever the bounds.
    """

    start: Key | None = None
    stop: Key | None = None
    is_void: bool = False

    def words(self, key: str) -> str:
        """Return the description for errors."""
        bounds = [
            f"{key} {sign} {bound!r}"
            for sign, bound in ((">=", self.start), ("<", self.stop))
            if bound is not None
        ]
        return " and ".join(bounds) or f"every {key}"


def spans_of(bounds: list[Key], count: int) -> list[Span]:
    """Return the ranges between ``bounds``, padded to ``count`` with empty ones."""
    edges = [None, *bounds, None]
    spans = [Span(*pair) for pair in pairwise(edges)]
    return spans + [Span(is_void=True)] * (count - len(spans))


def encoded(value: Any) -> Key:
    """Return a key's value as encoded in a state and passed to the database.

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
    """Return the original bytes of an encoded key."""
    return bytes.fromhex(str(key).removeprefix("\\x"))


class NotUniqueError(ValueError):
    """A key is not unique; becomes a ``DatasetError`` where rows are read."""


def collation_error(name: str, exact: str) -> ValueError:
    """Return the error for a key whose collation equates different texts.

    Their order is arbitrary, so reading could not resume between them.

    Args:
        name: The key's column.
        exact: A collation that tells all texts apart.
    """
    return ValueError(
        f"the collation of key {name!r} equates different texts; make a key in a "
        f"query: SELECT {name} COLLATE {exact} AS id, ..."
    )


class KeyCheck:
    """Checks that keys are unique, and drops the row that was already read.

    Args:
        name: The key's column.
        last: Key of the last row read; reading resumes at that row.
    """

    def __init__(self, name: str, last: Key | None) -> None:
        self._name = name
        self._is_again = last is not None
        self.last = last

    def restart(self) -> None:
        """Expect the last row once more."""
        self._is_again = self.last is not None

    def passed(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the new rows of a batch, which must not be empty.

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
            f"key {self._name!r} is not unique: {key!r} appears twice; choose a unique "
            "column, or make one in a query"
        )


def _plain(keys: "pa.Array") -> "pa.Array":
    return getattr(keys, "storage", keys)


def _repeated(keys: "pa.Array") -> int | None:
    """Return the index of a key that equals the next one; None if there is none."""
    from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

    if len(keys) < 2:
        return None
    same = compute.equal(keys[:-1], keys[1:])
    found: int = compute.index(same, True).as_py()
    return None if found < 0 else found
