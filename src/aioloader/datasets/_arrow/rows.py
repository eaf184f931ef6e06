"""Rows of a table as one block, in columns until a row is requested.

The order is the table's. Slicing and joining copy nothing and keep the original memory
alive; ``pick`` and ``collate`` copy, and keep nothing. A pickle contains only the
selected rows.
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from aioloader.datasets._arrow.numbers import Numbers, copied, turns
from aioloader.datasets._arrow.values import (
    Column,
    collate_columns,
    column_of,
    join_columns,
    weave_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

# Rows converted at once when all are iterated.
_AT_ONCE = 1024
# Bytes and columns that are copied to tensors in a tenth of a millisecond.
_QUICK, _FEW = 1 << 18, 64


class Part(NamedTuple):
    """Some rows of columns of one length.

    Attributes:
        columns: The columns, which may have more rows.
        kinds: Kind of each column.
        start: The first row.
        stop: One past the last row.
    """

    columns: tuple[Column, ...]
    kinds: tuple[Any, ...]
    start: int
    stop: int


class Rows(Sequence[dict[str, Any]]):
    """A sequence of rows, each a dict of column name to value.

    A value is a numpy scalar of the column's width for a number or a boolean, a
    separate array for a list of numbers, a dict for a struct, ``str``, ``bytes``, a
    ``datetime`` object, a ``Decimal``, a ``UUID``, a list of such values, or None for
    NULL. Times in nanoseconds are numpy's, because Python has no type that precise.

    Attributes:
        names: The names of the columns, in order.
        parts: The pieces of memory that hold the rows.

    Args:
        table: A ``RecordBatch`` or ``Table`` of pyarrow.

    Raises:
        ValueError: If it has no columns, or two of the same name.
    """

    __slots__ = ("_length", "names", "parts")

    def __init__(self, table: "pa.RecordBatch | pa.Table") -> None:
        names = tuple(table.schema.names)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns must have distinct names, got {[*names]}")
        whole = hasattr(table, "to_batches")
        batches = (table.to_batches() or [_empty(table)]) if whole else [table]
        parts = [_part(map(column_of, one.columns), one.num_rows) for one in batches]
        self.__setstate__((names, parts))

    def __setstate__(self, state: "tuple[tuple[str, ...], Sequence[Part]]") -> None:
        self.names, self.parts = state
        self._length = sum(part.stop - part.start for part in self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = [
            ([column.cut(start, stop) for column in columns], stop - start)
            for columns, _, start, stop in self.parts
        ]
        return _restored, (self.names, parts)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice, /) -> "Rows": ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return one row, or for a slice the rows as a block."""
        if not isinstance(index, slice):
            return next(iter(self._at(operator.index(index))))
        start, stop, step = index.indices(self._length)
        if step != 1:
            return self.pick(range(start, stop, step))
        return self._cut(start, max(start, stop))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the rows, one by one."""
        names = self.names
        for columns, _, first, last in self.parts:
            for start in range(first, last, _AT_ONCE):
                stop = min(last, start + _AT_ONCE)
                values = [column.cut(start, stop).rows() for column in columns]
                for row in zip(*values, strict=True):
                    yield dict(zip(names, row, strict=True))

    def pick(self, indices: "Sequence[int] | npt.NDArray[np.int64]") -> "Rows":
        """Return the rows at ``indices``, in that order, copied.

        Raises:
            IndexError: If an index is not in ``range(len(self))``.
        """
        chosen = np.asarray(indices, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= self._length):
            raise IndexError(f"indices must be in range({self._length})")
        try:
            part = _part((one.take(chosen) for one in self._whole()), len(chosen))
        except (ValueError, NotImplementedError):
            # More than 2 GiB of strings, or a type without `take` in Arrow.
            singles = (self._at(at).parts for at in chosen.tolist())
            return _rows(self.names, [part for (part,) in singles])
        return _rows(self.names, [part])

    def joined(self, others: Sequence[Any]) -> "Rows | None":
        """Return these rows and ``others`` as one; None if their columns differ."""
        parts = list(self.parts)
        for other in others:
            if not isinstance(other, Rows) or not self._is_like(other):
                return None
            parts += other.parts
        return _rows(self.names, parts)

    def woven(self, others: Sequence[Any]) -> "Rows | None":
        """Return the rows interleaved with ``others``: all first rows, all second ones.

        Args:
            others: Blocks of the same length.

        Returns:
            The rows, copied; None if their columns differ.
        """
        joined = self.joined(others)
        if joined is None:
            return None
        lanes = 1 + len(others)
        if len(joined.parts) == lanes:
            parts = [
                [column.cut(start, stop) for column in columns]
                for columns, _, start, stop in joined.parts
            ]
            with contextlib.suppress(ValueError, NotImplementedError):  # as in pick
                part = _part(map(weave_columns, zip(*parts, strict=True)), len(joined))
                return _rows(self.names, [part])
        return joined.pick(turns(lanes, len(self)).tolist())

    def collate(self) -> dict[str, Any]:
        """Return the batch of all rows, as ``default_collate`` would.

        Numbers become tensors of the column's width, lists of numbers too if their
        lengths agree, and lists of tensors if not; structs become dicts of batches.
        Strings, bytes, and values without a tensor form stay lists.

        Returns:
            Column name to batch, in memory that the caller owns.

        Raises:
            TypeError: If there is a NULL in a tensor column.
        """
        if len(self.parts) > 1:
            return {
                name: collate_columns(self._column(place), name)
                for place, name in enumerate(self.names)
            }
        ((columns, _, start, stop),) = self.parts
        return {
            # The usual case, in half the time.
            name: copied(column.values[start:stop])
            if type(column) is Numbers and column.is_whole
            else collate_columns([column.cut(start, stop)], name)
            for name, column in zip(self.names, columns, strict=True)
        }

    @property
    def is_numeric(self) -> bool:
        """Whether all columns are numbers."""
        return all(type(column) is Numbers for column in self.parts[0].columns)

    @property
    def is_quick(self) -> bool:
        """Whether ``collate`` takes under a millisecond: few numbers, no NULLs."""
        if len(self.names) * len(self.parts) > _FEW:
            return False
        nbytes = 0
        for columns, _, start, stop in self.parts:
            for column in columns:
                if type(column) is not Numbers or not column.is_whole:
                    return False
                nbytes += column.values.strides[0] * (stop - start)
        return nbytes <= _QUICK

    def _column(self, place: int) -> list[Column]:
        return [part.columns[place].cut(part.start, part.stop) for part in self.parts]

    def _whole(self) -> Iterator[Column]:
        return (join_columns(self._column(at)) for at in range(len(self.names)))

    def _at(self, index: int) -> "Rows":
        """Return one row as a block."""
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} rows")
        return self._cut(place, place + 1)

    def _cut(self, start: int, stop: int) -> "Rows":
        parts: list[Part] = []
        for columns, kinds, first, last in self.parts:
            begin, end = max(first, first + start), min(last, first + stop)
            if begin < end:
                parts.append(Part(columns, kinds, begin, end))
            start -= last - first
            stop -= last - first
        return _rows(self.names, parts or [self.parts[0]._replace(stop=0, start=0)])

    def _is_like(self, other: "Rows") -> bool:
        ours, theirs = self.parts[0].kinds, other.parts[0].kinds
        return self.names == other.names and (ours is theirs or ours == theirs)

    def __repr__(self) -> str:
        return f"<{self._length:,} rows of {', '.join(self.names)}>"


def _part(columns: Iterable[Column], length: int) -> Part:
    columns = tuple(columns)
    return Part(columns, tuple(column.kind for column in columns), 0, length)


def _rows(names: tuple[str, ...], parts: Sequence[Part]) -> Rows:
    rows = Rows.__new__(Rows)
    rows.__setstate__((names, parts))
    return rows


def _restored(
    names: tuple[str, ...], parts: Sequence[tuple[Sequence[Column], int]]
) -> Rows:
    return _rows(names, [_part(columns, length) for columns, length in parts])


def _empty(table: "pa.Table") -> "pa.RecordBatch":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    none = [pa.nulls(0, field.type) for field in table.schema]
    return pa.RecordBatch.from_arrays(none, schema=table.schema)
