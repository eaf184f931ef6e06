"""One table of files that differ slightly, unified as in Arrow.

Files may differ in the order of columns, in nullability, in the width of strings, lists
and numbers, and in columns that are all NULL. No value changes: a value that does not
fit is an error, and so are types without a common one.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aioloader.datasets._arrow.hive import Values
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

# Recent schemas; most files have one of them.
_SEEN = 8


class Table:
    """The columns to read from all files, and their types.

    Args:
        names: The columns.
        given: Types that the user has chosen; missing columns of these are NULL.
        in_names: Whether some are in the names of files.
    """

    def __init__(
        self, names: Sequence[str], given: "pa.Schema | None", *, in_names: bool = False
    ) -> None:
        self.names = tuple(names)
        self._is_partial = given is not None or in_names
        self._given: dict[str, pa.Field] = {}
        if given is not None:
            self._given = {field.name: field for field in given if field.name in names}
        self._types = {name: field.type for name, field in self._given.items()}
        self._origins: dict[str, str] = {}  # file in which each type was found
        self._seen: deque[pa.Schema] = deque(maxlen=_SEEN)
        self._schema: pa.Schema | None = None

    @property
    def schema(self) -> "pa.Schema":
        """The columns as read; known after the first ``add``."""
        if self._schema is None:
            import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

            self._schema = pa.schema([(name, self._types[name]) for name in self.names])
        return self._schema

    def add(self, schema: "pa.Schema", location: str, *, is_late: bool = False) -> None:
        """Unify the columns of a file with those of the previous files.

        Args:
            schema: All columns of the file.
            location: The file, for errors.
            is_late: Whether the types are final, because there are readers.

        Raises:
            DatasetError: If a column is missing, or its type has no common type with
                that of the previous files.
        """
        if any(schema is one or schema.equals(one) for one in self._seen):
            return
        for name in self.names:
            field = self._field(schema, name, location)
            if field is not None:
                self._add(field, location, is_late=is_late)
        if not is_late:
            self._schema = None
        self._seen.append(schema)

    def present(self, schema: "pa.Schema") -> list[str]:
        """Return which of the columns a file itself has."""
        if self._is_partial:
            known = {*schema.names}
            return [name for name in self.names if name in known]
        return list(self.names)

    def has(self, schema: "pa.Schema", names: Iterable[str]) -> bool:
        """Return whether a file's columns have the table's types."""
        types = {field.name: field.type for field in schema}
        return all(types.get(name) == self._types[name] for name in names)

    def unified(
        self, batch: "pa.RecordBatch", location: str, in_name: Values | None = None
    ) -> "pa.RecordBatch":
        """Return a batch of an added file as a batch of the table.

        Args:
            batch: The columns that the file has.
            location: The file, for errors.
            in_name: The values in its name.

        Raises:
            DatasetError: If a value does not fit the type.
        """
        schema = self.schema
        if batch.schema.equals(schema):
            return batch
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        columns: list[pa.Array] = []
        for field in schema:
            place = batch.schema.get_field_index(field.name)
            if place < 0:
                value = pa.scalar((in_name or {}).get(field.name), pa.string())
                column = pa.repeat(value, batch.num_rows)
                columns.append(_cast(column, field, location))
            else:
                columns.append(_cast(batch.column(place), field, location))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _add(self, field: "pa.Field", location: str, *, is_late: bool) -> None:
        name, known = field.name, self._types.get(field.name)
        field = field.with_type(without_view(field.type))
        if known is None:
            self._types[name], self._origins[name] = field.type, location
            return
        if field.type == known:
            return
        if name in self._given:
            if not _can_cast(field.type, known):
                raise _conflict(field, location, f"schema= says {known}")
            return
        common = promoted(known, field.type)
        if common is None:
            before = f"it is {known} in {self._origins[name]!r}"
            raise _conflict(field, location, before)
        if common == known:
            return
        if is_late:
            changed = f"all files were found to have {known}; it was rewritten"
            raise _conflict(field, location, changed)
        self._types[name], self._origins[name] = common, location

    def _field(
        self, schema: "pa.Schema", name: str, location: str
    ) -> "pa.Field | None":
        given = self._given.get(name)
        if given is not None and given.nullable and name not in schema.names:
            return None
        return field_of(schema, name, location)


def without_view(kind: "pa.DataType") -> "pa.DataType":
    """Return the type that replaces views, which Arrow hardly supports yet."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def promoted(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType | None":
    """Return Arrow's type for all values of both; None if there is none."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    try:
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (ValueError, TypeError):
        return None
    # Arrow casts text to bytes, and exact numbers to floats: other values.
    return common if {_group(one), _group(other)} - {_group(common)} <= {0} else None


def _group(kind: "pa.DataType") -> int:
    """Return a number shared by all types of one class of values."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    if types.is_null(kind):
        return 0
    is_binary = types.is_binary(kind) or types.is_large_binary(kind)
    if is_binary or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return 1
    if kind.num_fields:
        return max(_group(kind.field(at).type) for at in range(kind.num_fields))
    return 2 if types.is_decimal(kind) else 3


def field_of(schema: "pa.Schema", name: str, location: str) -> "pa.Field":
    """Return a column of a file.

    Raises:
        DatasetError: If there is none, or there are two.
    """
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


def _conflict(field: "pa.Field", location: str, before: str) -> DatasetError:
    return DatasetError(
        f"column {field.name!r} of {location!r} is of type {field.type}, and {before}; "
        "write the files alike, leave the column out (columns=), or set its type "
        "(schema=)",
        location=location,
    )


def _can_cast(kind: "pa.DataType", wanted: "pa.DataType") -> bool:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    try:
        pa.nulls(0, kind).cast(wanted)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


def _cast(array: "pa.Array", field: "pa.Field", location: str) -> "pa.Array":
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise DatasetError(
            f"column {field.name!r} of {location!r} is of type {array.type} and has "
            f"values that do not fit {field.type}, its type in all files: "
            f"{error}; set the type (schema=)",
            location=location,
        ) from error


def described(schema: Any) -> list[list[str]] | None:
    """Return names and types, JSON-serialisable."""
    return None if schema is None else [[one.name, str(one.type)] for one in schema]


def check_schema(schema: Any, names: Iterable[str] | None) -> None:
    """Check that ``schema=`` is a schema and has the wanted columns.

    Raises:
        TypeError: If it is not a schema.
        ValueError: If it lacks a column, or has one twice.
    """
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if not isinstance(schema, pa.Schema):
        raise TypeError(f"schema must be a pyarrow.Schema, got {type(schema).__name__}")
    missing = [name for name in names or () if name not in schema.names]
    if missing:
        raise ValueError(f"columns= names {missing}, not in schema= {schema.names}")
    if not schema.names or len(set(schema.names)) < len(schema.names):
        raise ValueError(f"schema must not repeat columns, got {schema.names}")
