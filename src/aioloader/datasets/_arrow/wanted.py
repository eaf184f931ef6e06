"""The part of a table to read: which columns and rows, and the values for NULL.

The files of one listing are unified into one table before any is read; a file that is
inspected again later must still fit it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from aioloader.datasets._arrow.filters import Filters
from aioloader.datasets._arrow.hive import Values
from aioloader.datasets._arrow.unified import (
    Table,
    check_schema,
    described,
    field_of,
    without_view,
)

if TYPE_CHECKING:
    import pyarrow as pa


class Wanted:
    """The columns and rows to read, and the replacements of NULLs.

    Args:
        columns: Names, in the order of the rows' keys; None: those of ``schema``, or of
            the first file.
        nulls: Column to the value that replaces NULL.
        schema: Names and types of columns; None: those common to all files.
        filters: The rows to read, as in ``pyarrow.parquet``; None: all.

    Raises:
        ValueError: If there are no names, or duplicates, or arguments contradict.
    """

    def __init__(
        self,
        columns: Iterable[str] | None = None,
        nulls: Mapping[str, Any] | None = None,
        schema: "pa.Schema | None" = None,
        filters: Any = None,
    ) -> None:
        has_order = not isinstance(columns, str | AbstractSet)
        if not (has_order and isinstance(columns, Iterable | None)):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        names = None if columns is None else list(columns)
        if not all(isinstance(name, str) for name in names or ()):
            raise TypeError(f"columns must be a list of names, got {names}")
        if not isinstance(nulls, Mapping | None):
            kind = type(nulls).__name__
            raise TypeError(f"nulls must be a dict of column to value, got {kind}")
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(f"columns must be distinct names, got {names}")
        if schema is not None:
            check_schema(schema, names)
            names = names or schema.names
        unknown = set(nulls or {}) - set(names or nulls or {})
        if unknown:
            raise ValueError(f"nulls= names {sorted(unknown)}, not in columns {names}")
        self.filters = None if filters is None else Filters(filters)
        self._names = names
        self._nulls = dict(nulls or {})
        self.given = schema
        self._table: Table | None = None
        self._delivered: list[str] = []

    @property
    def table(self) -> Table:
        """The unified table of all files; known after the first file."""
        assert self._table is not None
        return self._table

    def describe(self) -> dict[str, Any]:
        """Return the arguments, JSON-serialisable."""
        nulls = {name: repr(value) for name, value in sorted(self._nulls.items())}
        return {
            "columns": self._names,
            "nulls": nulls,
            "schema": described(self.given),
            "filters": None if self.filters is None else self.filters.describe(),
        }

    def begin(
        self, first: "pa.Schema", location: str, *, in_names: bool = False
    ) -> None:
        """Start a table with the first file of a listing.

        Args:
            first: Its columns.
            location: Its address, for errors.
            in_names: Whether some of them are in the names of files.

        Raises:
            DatasetError: If it lacks a column.
        """
        names = self._names or first.names
        read = list(names)
        if self.filters is not None:
            among = _with_given(first, self.given)
            read += [name for name in self.filters.names(among) if name not in names]
        for name in [] if self.given else self._nulls:
            field_of(first, name, location)
        table = Table(read, self.given, in_names=in_names)
        table.add(first, location)
        self._delivered, self._table = list(names), table

    def settle(self) -> None:
        """End a listing: check that the columns fit the other arguments.

        Raises:
            ValueError: If a value of ``nulls`` or the filter does not fit its column.
        """
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        schema = self.table.schema
        for name, value in self._nulls.items():
            _fill(pa.nulls(1, schema.field(name).type), name, value)
        if self.filters is not None:
            self.filters.names(schema)

    def check(self, schema: "pa.Schema", location: str) -> None:
        """Check that a file fits the listing's table; without one, start here.

        Raises:
            DatasetError: If it does not.
        """
        if self._table is None:
            self.begin(schema, location)
            self.settle()
        self.table.add(schema, location, is_late=True)

    def of(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the wanted columns of a batch of a checked file."""
        return batch.select(self.table.present(batch.schema))

    def rows_of(
        self, batch: "pa.RecordBatch", location: str, in_name: Values | None = None
    ) -> "pa.RecordBatch":
        """Return the rows to deliver, from a batch returned by ``of``.

        ``in_name`` has the values in the file's name.

        Raises:
            DatasetError: If a value does not fit its column's type.
        """
        batch = self.table.unified(batch, location, in_name)
        if self.filters is not None:
            batch = self.filters.passed(batch).select(self._delivered)
        for name, value in self._nulls.items():
            place = batch.schema.get_field_index(name)
            column = _fill(batch.column(place), name, value)
            batch = batch.set_column(place, name, column)
        return batch


def checked(schema: "pa.Schema") -> "pa.Schema":
    """Return a schema, after checking that its names are valid text.

    Raises:
        UnicodeDecodeError: If a name is not.
    """
    for field in schema:
        str(field.name)
        _check_names(field.type)
    return schema


def _check_names(kind: "pa.DataType") -> None:
    for number in range(kind.num_fields):
        field = kind.field(number)
        str(field.name)
        _check_names(field.type)


def _with_given(first: "pa.Schema", given: "pa.Schema | None") -> "pa.Schema":
    """Return a file's columns, with the types in ``schema=`` where it has them."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    known = [*given] if given is not None else []
    names = {field.name for field in known}
    others = [field for field in first if field.name not in names]
    return pa.schema([
        *known, *(field.with_type(without_view(field.type)) for field in others),
    ])  # fmt: skip


def _fill(column: "pa.Array", name: str, value: Any) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.fill_null(pa.scalar(value, column.type))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"nulls={{{name!r}: {value!r}}} does not fit a column of type "
            f"{column.type}: {error}"
        ) from error
