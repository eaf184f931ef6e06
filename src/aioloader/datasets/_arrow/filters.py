"""Which files and rows are read: conditions, and columns in the names of directories.

A condition is pyarrow's: an expression, or a list of tuples as in ``pyarrow.parquet``.
Files are skipped by their names, row groups by their statistics; then rows are tested
exactly. Directories have names as Hive and Spark write them: ``year=2024/``.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import chain, combinations
from operator import and_
from typing import Any, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import compute as pc

from aioloader.datasets._arrow.ranges import RangeFile

# What pyarrow raises for a cast, a fill or a condition that does not fit.
MISFITS = (ValueError, TypeError, NotImplementedError)
# Column to value; None: NULL.
InName: TypeAlias = dict[str, str | None]

# Columns that may be NaN in a matching row; each doubles the work of skipping.
_MOST_NANS = 4
_NULL = "__HIVE_DEFAULT_PARTITION__"


class Partitions:
    """The columns in the names of files.

    Those that are ``given`` have types that the user has chosen. Others are as in
    pyarrow: int32 where all values are such numbers, or else text.
    """

    def __init__(
        self, names: Iterable[str] = (), given: Iterable[pa.Field] = ()
    ) -> None:
        found: dict[str, set[str | None]] = {}
        for name in names:
            for key, value in self.of(name).items():
                found.setdefault(key, set()).add(value)
        types = {field.name: field.type for field in given}
        self._columns = pa.schema([
            (key, types.get(key) or _type_of(values - {None}))
            for key, values in found.items()
        ])  # fmt: skip

    def __bool__(self) -> bool:
        return len(self._columns) > 0

    @staticmethod
    def of(name: str) -> InName:
        """Return the columns in a file's name, and their values."""
        folders = (part.partition("=") for part in name.split("/")[:-1])
        return {
            unquote(key): None if value == _NULL else unquote(value)
            for key, equals, value in folders
            if key and equals
        }

    def added(self, schema: pa.Schema, name: str) -> pa.Schema:
        """Return the columns of a file, and those in its name."""
        keys = self.of(name)
        for field in self._columns:
            if field.name in keys and field.name not in schema.names:
                schema = schema.append(field)
        return schema

    def condition(self, name: str, own: pa.Schema) -> pc.Expression | None:
        """Return what a file's name says of all its rows; None: nothing.

        It says nothing about the columns that the file itself has (``own``).
        """
        known, values = None, self.of(name)
        for field in self._columns:
            if field.name not in values or field.name in own.names:
                continue
            value = values[field.name]
            try:
                scalar = pa.scalar(value, pa.string()).cast(field.type)
            except MISFITS:
                continue  # reading the file will tell
            column = pc.field(field.name)
            one = column.is_null() if value is None else column == scalar
            known = one if known is None else known & one
        return known


def _type_of(values: "set[Any]") -> pa.DataType:
    try:
        pa.array(values, pa.string()).cast(pa.int32())
    except ValueError:
        return pa.string()
    return pa.int32() if values else pa.string()


class Filters:
    """A condition that rows meet.

    It is an expression of pyarrow, or ``[[(column, op, value), ...], ...]``: any of the
    lists, all tuples of a list. Anything else is a ValueError.
    """

    def __init__(self, filters: Any) -> None:
        from pyarrow import parquet  # noqa: PLC0415  (slow to import)

        if not isinstance(filters, pc.Expression):
            try:
                filters = parquet.filters_to_expression(_ordered(filters))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"filters must be an expression of pyarrow or a list of (column, "
                    f"op, value), got {filters!r}: {error}"
                ) from error
        self.expression = filters
        self._nans: dict[pa.Schema, list[pc.Expression]] = {}

    def describe(self) -> str:
        """Return the condition as text, with a digest if pyarrow shortens a long list.

        The text is the same in all versions of pyarrow; the digest may not be.
        """
        text = str(self.expression)
        if "..." not in text:
            return text
        _, (data, *_) = self.expression.__reduce__()
        return f"{text} {blake2b(data, digest_size=8).hexdigest()}"

    def names(self, schema: pa.Schema) -> list[str]:
        """Return the columns that the condition uses.

        pyarrow does not report them: they are those without which it cannot be applied.
        """
        table = schema.empty_table()
        try:
            table.filter(self.expression)
        except MISFITS as error:
            raise ValueError(
                f"filters={self.expression} do not fit the columns "
                f"{', '.join(schema.names[:20])}: {error}"
            ) from error
        return self._needed(table, schema.names)

    def _needed(self, table: pa.Table, among: Sequence[str]) -> list[str]:
        try:
            table.drop_columns(list(among)).filter(self.expression)
        except MISFITS:
            half = len(among) // 2
            if not half:
                return list(among)
            return [
                name
                for part in (among[:half], among[half:])
                for name in self._needed(table, part)
            ]
        return []

    def files(
        self, schema: pa.Schema, known: Sequence[pc.Expression | None]
    ) -> list[int]:
        """Return which files may have matching rows, by what is known of each."""
        from pyarrow import dataset, fs  # noqa: PLC0415  (slow to import)

        made, nowhere = dataset.ParquetFileFormat(), fs.LocalFileSystem()
        found = [
            made.make_fragment(str(number), nowhere, one)
            for number, one in enumerate(known)
        ]
        whole = dataset.FileSystemDataset(found, schema, made, nowhere)
        return [int(one.path) for one in whole.get_fragments(self.expression)]

    def row_groups(
        self, size: int, tail: bytes, schema: pa.Schema, known: pc.Expression | None
    ) -> set[int] | None:
        """Return the row groups of a Parquet file that may have wanted rows; None: all.

        Given are its size, its footer (to the end), its columns with those in its name,
        and what is ``known`` of all its rows.
        """
        from pyarrow import dataset  # noqa: PLC0415  (slow to import)

        first = size - len(tail)

        def read(start: int, stop: int) -> bytes:
            # pyarrow reads more than the footer, and does not look at it.
            before = bytes(max(0, min(stop, first) - start))
            return before + tail[max(0, start - first) : max(0, stop - first)]

        found = set[int]()
        try:
            nans = self.nans(schema)
            if len(nans) > _MOST_NANS:
                return None
            for some in chain(*(combinations(nans, n) for n in range(len(nans) + 1))):
                file = pa.PythonFile(RangeFile(size, read), mode="r")
                facts = some if known is None else (known, *some)
                fact = reduce(and_, facts) if facts else None
                made = dataset.ParquetFileFormat().make_fragment(file, None, fact)
                groups = made.subset(self.expression, schema=schema).row_groups
                found.update(group.id for group in groups)
        except (*MISFITS, OSError):
            # A column is of another type here, or missing: rows will be tested.
            return None
        return found

    def nans(self, schema: pa.Schema) -> list[pc.Expression]:
        """Return the floating columns that may be NaN in a matching row, as conditions.

        Statistics leave NaN out: with those alone, nothing is known of such columns.
        """
        if schema not in self._nans:
            fields = [schema.field(name) for name in self.names(schema)]
            nans = [
                pc.field(*path) == pa.scalar(float("nan"), kind)
                for path, kind in _floats(fields)
            ]
            self._nans[schema] = [nans[at] for at in self.files(schema, nans)]
        return self._nans[schema]


def _floats(
    fields: Iterable[pa.Field], *path: str
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of the floating columns, and of those in structs."""
    for field in fields:
        inner, kind = (*path, field.name), field.type
        if pa.types.is_struct(kind):
            yield from _floats(kind, *inner)
        elif pa.types.is_floating(kind):
            yield inner, kind


def _ordered(filters: Any) -> Any:
    """Return filters with their sets sorted: their order differs by process."""
    if isinstance(filters, (list, tuple)):
        found = map(_ordered, filters)
        return list(found) if isinstance(filters, list) else tuple(found)
    if isinstance(filters, (set, frozenset)):
        return sorted(filters, key=lambda value: (str(type(value)), repr(value)))
    return filters
