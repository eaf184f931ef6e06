"""Keys: their encoding in a state, ranges of them, and the check of their order.

A key is a number, or its text as the database reads it; bytes are hexadecimal. The
check works on whole columns: about a nanosecond per row.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, TypeAlias

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

    def since(self, key: Key | None) -> Self:
        """Return the part from a key on; None: all of it."""
        return self if key is None else replace(self, start=key)

    def bounds(self) -> list[tuple[str, str, Key]]:
        """Return name, sign and key of each bound that there is."""
        both = (("start", ">=", self.start), ("stop", "<", self.stop))
        return [(name, sign, key) for name, sign, key in both if key is not None]

    def words(self, key: str) -> str:
        """Return the description for errors."""
        bounds = [f"{key} {sign} {bound!r}" for _, sign, bound in self.bounds()]
        return " and ".join(bounds) or f"every {key}"


def spans_of(cuts: list[Key], count: int) -> list[Span]:
    """Return the ranges between ``cuts``, padded to ``count`` with empty ones."""
    spans = [Span(*pair) for pair in pairwise([None, *cuts, None])]
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


class KeyCheck:
    """Checks that keys are unique, and drops the row that was already read.

    Args:
        name: The key's column.
        last: Key of the last row read; reading resumes at that row.
    """

    def __init__(self, name: str, last: Key | None) -> None:
        self._name = name
        self.last = last
        self.restart()

    def restart(self) -> None:
        """Expect the last row once more."""
        self._is_again = self.last is not None

    def passed(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the new rows of a batch, which must not be empty.

        Raises:
            ValueError: If a key comes twice, or is NULL.
        """
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        keys = batch.column(self._name)
        first, before = encoded(keys[0].as_py()), self.last
        plain = getattr(keys, "storage", keys)  # of an extension type, such as UUIDs
        twice = compute.index(compute.equal(plain[:-1], plain[1:]), True).as_py()
        if twice < 0 and first == before and not self._is_again:
            twice = 0
        if twice >= 0:
            key = encoded(keys[twice].as_py())
            raise ValueError(
                f"key {self._name!r} is not unique: {key!r} appears twice; choose a "
                "unique column, or make one in a query"
            )
        start = int(first == before)
        self._is_again, self.last = False, encoded(keys[-1].as_py())
        return batch.slice(start)
