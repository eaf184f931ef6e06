"""Rows of a table as one block, in columns until a row is requested.

The order is the table's. Slicing and joining copy nothing and keep the original memory
alive; ``pick`` and ``collate`` copy, and keep nothing. A pickle contains only the
selected rows.
"""

import contextlib
import operator
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aioloader.datasets._arrow.values import (
    Column,
    arrow_of,
    collate_columns,
    column_of,
    copied,
    join_columns,
    turns,
    values_of,
    weave_columns,
)

# Rows converted at once when all are iterated.
_AT_ONCE = 1024
# Bytes and columns that are copied to tensors in a tenth of a millisecond.
_QUICK, _FEW = 1 << 18, 64


class Part(NamedTuple):
    """Rows from ``start`` to before ``stop`` of columns of one length."""

    columns: tuple[Column, ...]
    start: int
    stop: int

    def cut(self) -> list[Column]:
        """Return the columns with these rows alone, as views."""
        return [column[self.start : self.stop] for column in self.columns]


class Rows(Sequence[dict[str, Any]]):
    """A sequence of rows, each a dict of column name to value.

    A value is a numpy scalar of the column's width for a number or a boolean, a
    separate array for a list of numbers, a dict for a struct, ``str``, ``bytes``, a
    ``datetime`` object, a ``Decimal``, a ``UUID``, a list of such values, or None for
    NULL. Times in nanoseconds, and 24:00, are numpy's, because Python has no type for
    them.

    Attributes:
        names: The names of the columns, in order.
        kinds: Their Arrow types, of plain encoding.
        parts: The pieces of memory that hold the rows.

    Args:
        table: A ``RecordBatch`` or ``Table`` of pyarrow.

    Raises:
        ValueError: If it has no columns, or two of the same name.
    """

    __slots__ = ("_length", "kinds", "names", "parts")

    def __init__(self, table: pa.RecordBatch | pa.Table) -> None:
        names = tuple(table.schema.names)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns must have distinct names, got {[*names]}")
        batches = [table]
        if isinstance(table, pa.Table):
            batches = table.to_batches() or [_empty(table.schema)]
        parts: list[Part] = []
        for batch in batches:
            columns, kinds = zip(*map(column_of, batch.columns), strict=True)
            parts.append(Part(columns, 0, batch.num_rows))
        self.__setstate__((names, kinds, parts))

    def __setstate__(self, state: tuple[Any, Any, Sequence[Part]]) -> None:
        self.names, self.kinds, self.parts = state
        self._length = sum(stop - start for _, start, stop in self.parts)

    def _of(self, parts: Sequence[Part]) -> "Rows":
        rows = Rows.__new__(Rows)
        rows.__setstate__((self.names, self.kinds, parts))
        return rows

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Arrow's own pickles include the whole buffers of a slice.
        schema = pa.schema(zip(self.names, self.kinds, strict=True))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for part in self.parts:
                columns = map(arrow_of, part.cut(), self.kinds)
                writer.write_batch(pa.record_batch([*columns], schema=schema))
        data = sink.getvalue()
        is_apart = protocol > 4
        return _restored, (pickle.PickleBuffer(data) if is_apart else bytes(data),)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice, /) -> "Rows": ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return one row, or for a slice the rows as a block."""
        if not isinstance(index, slice):
            place = at = operator.index(index)
            if at < 0:
                at += self._length
            if not 0 <= at < self._length:
                raise IndexError(
                    f"index {place} is out of range for {self._length} rows"
                )
            return next(iter(self[at : at + 1]))
        start, stop, step = index.indices(self._length)
        if step != 1:
            return self.pick(range(start, stop, step))
        parts: list[Part] = []
        for columns, first, last in self.parts:
            begin, end = max(first, first + start), min(last, first + stop)
            if begin < end:
                parts.append(Part(columns, begin, end))
            start -= last - first
            stop -= last - first
        return self._of(parts or [self.parts[0]._replace(stop=0, start=0)])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = self.names
        for columns, first, last in self.parts:
            for start in range(first, last, _AT_ONCE):
                part = Part(columns, start, min(last, start + _AT_ONCE)).cut()
                for row in zip(*map(values_of, part), strict=True):
                    yield dict(zip(names, row, strict=True))

    def column(self, name: str) -> list[Any] | None:
        """Return the values of a column, as in rows; None if there is no such one."""
        if name not in self.names:
            return None
        at = self.names.index(name)
        cuts = (columns[at][start:stop] for columns, start, stop in self.parts)
        return [value for cut in cuts for value in values_of(cut)]

    def pick(self, indices: "Sequence[int] | npt.NDArray[np.int64]") -> "Rows":
        """Return the rows at ``indices``, in that order, copied."""
        chosen = np.asarray(indices, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= self._length):
            raise IndexError(f"indices must be in range({self._length})")
        try:
            joined = map(join_columns, _columns_of(self.parts), self.kinds)
            columns = tuple(_taken(column, chosen) for column in joined)
        except (ValueError, NotImplementedError):
            # More than 2 GiB of strings, or a type without `take` in Arrow.
            return self._of([self[at : at + 1].parts[0] for at in chosen.tolist()])
        return self._of([Part(columns, 0, len(chosen))])

    def joined(self, others: Sequence[Any]) -> "Rows | None":
        """Return these rows and ``others`` as one; None if their columns differ."""
        parts = list(self.parts)
        for other in others:
            if not isinstance(other, Rows) or self.names != other.names:
                return None
            if self.kinds is not other.kinds and self.kinds != other.kinds:
                return None
            parts += other.parts
        return self._of(parts)

    def woven(self, others: Sequence[Any]) -> "Rows | None":
        """Return the rows interleaved with ``others`` of the same length, copied.

        The first row of each comes first. None if their columns differ.
        """
        joined, lanes = self.joined(others), 1 + len(others)
        if joined is None:
            return None
        if len(joined.parts) == lanes:
            with contextlib.suppress(ValueError, NotImplementedError):  # as in pick
                woven = tuple(map(weave_columns, _columns_of(joined.parts), self.kinds))
                return self._of([Part(woven, 0, len(joined))])
        return joined.pick(turns(lanes, len(self)))

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
        columns = zip(self.names, self.kinds, _columns_of(self.parts), strict=True)
        return {
            # The usual case, in half the time.
            name: copied(parts[0])
            if len(parts) == 1 and isinstance(parts[0], np.ndarray)
            else collate_columns(parts, kind, name)
            for name, kind, parts in columns
        }

    @property
    def is_numeric(self) -> bool:
        """Whether all columns are numbers without NULLs."""
        return all(
            isinstance(one, np.ndarray) for part in self.parts for one in part.columns
        )

    @property
    def is_quick(self) -> bool:
        """Whether ``collate`` takes under a millisecond: few numbers, no NULLs."""
        if len(self.names) * len(self.parts) > _FEW or not self.is_numeric:
            return False
        sizes = (
            (stop - start) * sum(column.strides[0] for column in columns)
            for columns, start, stop in self.parts
        )
        return sum(sizes) <= _QUICK

    def __repr__(self) -> str:
        return f"<{self._length:,} rows of {', '.join(self.names)}>"


def _columns_of(parts: Iterable[Part]) -> Iterable[tuple[Column, ...]]:
    """Return the parts of each column, as views."""
    return zip(*map(Part.cut, parts), strict=True)


def _taken(column: Column, indices: npt.NDArray[np.int64]) -> Column:
    if isinstance(column, np.ndarray):
        return column.take(indices, axis=0)
    return column.take(indices)


def _restored(data: Any) -> Rows:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return Rows(reader.read_all())


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    none = [pa.nulls(0, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(none, schema=schema)
