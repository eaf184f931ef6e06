"""The columns that are read: those of the first file, in name and type, of all files.

A file is compared with the first one before it is read. NULLs are replaced batch by
batch.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa


class Wanted:
    """The columns that are read, and what stands for NULL in them.

    Args:
        columns: Names, in the order of the rows' keys; None: those of the first file.
        nulls: Column to the value that is read instead of NULL.

    Raises:
        ValueError: If there are no names, or one twice.
    """

    def __init__(
        self, columns: Iterable[str] | None, nulls: Mapping[str, Any] | None
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        names = None if columns is None else list(columns)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(f"columns must be names, each of them once, got {names}")
        unknown = set(nulls or {}) - set(names or nulls or {})
        if unknown:
            raise ValueError(f"nulls= names {sorted(unknown)}, not in columns {names}")
        self._names = names
        self._nulls = dict(nulls or {})
        self._schema: pa.Schema | None = None

    def names(self) -> list[str]:
        """Return the names; known once a file was checked."""
        assert self._schema is not None
        names: list[str] = self._schema.names
        return names

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, ready for JSON."""
        nulls = {name: repr(value) for name, value in sorted(self._nulls.items())}
        return {"columns": self._names, "nulls": nulls}

    def check(self, schema: "pa.Schema", location: str) -> None:
        """Compare the columns of a file with those of the first one that was checked.

        Raises:
            DatasetError: If one is missing, or of another type.
            ValueError: If a value of ``nulls`` does not suit its column.
        """
        first = self._schema
        names = self._names or (schema.names if first is None else first.names)
        fields = [_field(schema, name, location) for name in names]
        if first is not None:
            for field in fields:
                expected = first.field(field.name).type
                if field.type != expected:
                    raise DatasetError(
                        f"column {field.name!r} of {location!r} is of type "
                        f"{field.type}, and of type {expected} in the files before; "
                        "write them alike, or leave it out (columns=)",
                        location=location,
                    )
            return
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        chosen = pa.schema(fields)
        for name, value in self._nulls.items():
            _fill(pa.nulls(1, _field(chosen, name, location).type), name, value)
        self._schema = chosen

    def of(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the columns of a batch of a file that was checked."""
        return batch.select(self.names())

    def fill(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Replace NULLs in a batch of these columns."""
        for name, value in self._nulls.items():
            place = batch.schema.get_field_index(name)
            column = _fill(batch.column(place), name, value)
            batch = batch.set_column(place, name, column)
        return batch


def checked(schema: "pa.Schema") -> "pa.Schema":
    """Return a schema whose names are text all through.

    Raises:
        UnicodeDecodeError: If a name is none.
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


def _field(schema: "pa.Schema", name: str, location: str) -> "pa.Field":
    places = schema.get_all_field_indices(name)
    if len(places) == 1:
        return schema.field(places[0])
    what = f"{len(places)} columns" if places else "no column"
    known = ", ".join(map(repr, schema.names[:20])) or "none"
    more = f" and {len(schema.names) - 20:,} more" if len(schema.names) > 20 else ""
    raise DatasetError(
        f"{location!r} has {what} {name!r}; its columns are {known}{more}",
        location=location,
    )


def _fill(column: "pa.Array", name: str, value: Any) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.fill_null(pa.scalar(value, column.type))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"nulls={{{name!r}: {value!r}}} does not suit a column of type "
            f"{column.type}: {error}"
        ) from error
