"""Filters on rows: row groups are skipped by statistics, then rows are tested exactly.

A condition is pyarrow's: an expression, or a list of tuples as in ``pyarrow.parquet``.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aioloader.datasets._arrow.ranges import RangeFile

if TYPE_CHECKING:
    from pyarrow import dataset as ds

# What pyarrow raises where a condition does not fit the columns.
_MISFITS = (ValueError, TypeError, NotImplementedError)


class Filters:
    """A condition that rows meet.

    Args:
        filters: An expression of pyarrow, or ``[[(column, op, value), ...], ...]``:
            any of the lists, all tuples of a list.

    Raises:
        ValueError: If it is neither.
    """

    def __init__(self, filters: Any) -> None:
        from pyarrow import compute, parquet  # noqa: PLC0415  (slow to import)

        if not isinstance(filters, compute.Expression):
            try:
                filters = parquet.filters_to_expression(_ordered(filters))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"filters must be an expression of pyarrow or a list of (column, "
                    f"op, value), got {filters!r}: {error}"
                ) from error
        self.expression = filters

    def describe(self) -> str:
        """Return the condition as text, with a digest if pyarrow shortens a long list.

        The text is the same in all versions of pyarrow; the digest may not be.
        """
        text = str(self.expression)
        if "..." not in text:
            return text
        _, (data, *_) = self.expression.__reduce__()
        return f"{text} {blake2b(data, digest_size=8).hexdigest()}"

    def names(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that the condition uses.

        pyarrow does not report them: they are those without which it cannot be applied.

        Raises:
            ValueError: If it does not fit the columns.
        """
        table = schema.empty_table()
        try:
            table.filter(self.expression)
        except _MISFITS as error:
            raise ValueError(
                f"filters={self.expression} do not fit the columns "
                f"{', '.join(schema.names[:20])}: {error}"
            ) from error
        return self._needed(table, schema.names)

    def _needed(self, table: "pa.Table", among: Sequence[str]) -> list[str]:
        if not among:
            return []
        try:
            table.drop_columns(list(among)).filter(self.expression)
        except _MISFITS:
            if len(among) == 1:
                return list(among)
            half = len(among) // 2
            first, second = among[:half], among[half:]
            return self._needed(table, first) + self._needed(table, second)
        return []

    def passed(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the rows that meet the condition, in order."""
        return batch.filter(self.expression)

    def files(
        self, schema: "pa.Schema", known: "Sequence[ds.Expression | None]"
    ) -> list[int]:
        """Return which files may have matching rows.

        Args:
            schema: The columns of one of them.
            known: What is true of all rows of each.
        """
        from pyarrow import dataset, fs  # noqa: PLC0415  (slow to import)

        made, nowhere = dataset.ParquetFileFormat(), fs.LocalFileSystem()
        found = [
            made.make_fragment(str(number), nowhere, one)
            for number, one in enumerate(known)
        ]
        whole = dataset.FileSystemDataset(found, schema, made, nowhere)
        return [int(one.path) for one in whole.get_fragments(self.expression)]

    def row_groups(
        self,
        size: int,
        tail: bytes,
        schema: "pa.Schema",
        known: "ds.Expression | None",
    ) -> Iterable[int] | None:
        """Return the row groups of a Parquet file that may have matching rows.

        Args:
            size: Length of the file, in bytes.
            tail: Its footer, to the end.
            schema: Its columns, with those in its name.
            known: What is true of all its rows.

        Returns:
            Their numbers; None if all may.
        """
        from pyarrow import dataset  # noqa: PLC0415  (slow to import)

        first = size - len(tail)

        def read(start: int, stop: int) -> bytes:
            # pyarrow reads more than the footer, and does not look at it.
            before = bytes(max(0, min(stop, first) - start))
            return before + tail[max(0, start - first) : max(0, stop - first)]

        file = RangeFile(size, read)
        made = dataset.ParquetFileFormat().make_fragment(
            pa.PythonFile(file, mode="r"), None, known
        )
        try:
            found = made.subset(self.expression, schema=schema)
            return [group.id for group in found.row_groups]
        except (*_MISFITS, OSError):
            # A column is of another type here, or missing: rows will be tested.
            return None

    def __repr__(self) -> str:
        return str(self.expression)


def _ordered(filters: Any) -> Any:
    """Return filters with their sets sorted: their order differs by process."""
    if isinstance(filters, list):
        return [*map(_ordered, filters)]
    if isinstance(filters, tuple):
        return (*map(_ordered, filters),)
    if isinstance(filters, (set, frozenset)):
        return sorted(filters, key=lambda value: (str(type(value)), repr(value)))
    return filters
