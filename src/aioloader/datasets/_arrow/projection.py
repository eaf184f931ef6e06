"""The part of a table to read: which columns and rows, and the values for NULL.

The files of one listing are unified into one table, as in Arrow: they may differ in the
order of columns, in nullability, in the width of strings, lists and numbers, and in
columns that are all NULL. Arrow's safe cast checks the values: one that does not fit is
an error, and so are types without a common one. A condition is pyarrow's: files are
skipped by their names (``year=2024/``, as Hive and Spark write them), row groups by
their statistics; then rows are tested exactly.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from hashlib import blake2b
from itertools import chain, combinations
from operator import and_
from typing import Any, Self, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import compute as pc

from aioloader._base.warnings import warn
from aioloader.datasets._arrow.ranges import RangeFile
from aioloader.datasets._checks import check_is
from aioloader.errors import DatasetError

# What pyarrow raises for a cast, a fill or a condition that does not fit.
MISFITS = (ValueError, TypeError, NotImplementedError)
# Column to value; None: NULL.
InName: TypeAlias = dict[str, str | None]

# Columns that may be NaN in a matching row; each doubles the work of skipping.
_MOST_NANS = 4
_NULL = "__HIVE_DEFAULT_PARTITION__"
# Recent schemas; most files have one of them.
_SEEN = 8


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


class Projection:
    """The columns and rows to read, and the replacements of NULLs.

    A listing starts a table with ``start``, unifies the other files by ``add``, and
    ends with ``settle``; a file that is read later must still fit: ``checked``. Errors
    name the file, by its ``location``. Arguments are those of ``ParquetDataset``.
    """

    def __init__(
        self,
        columns: Iterable[str] | None = None,
        nulls: Mapping[str, Any] | None = None,
        schema: pa.Schema | None = None,
        filters: Any = None,
    ) -> None:
        self._columns = _names_in(columns)
        check_is(nulls, Mapping | None, "nulls", "a dict of column to value")
        if schema is not None:
            _check_schema(schema, self._columns)
            self._columns = self._columns or schema.names
        known = self._columns
        unknown = set(nulls or {}) - set(known or nulls or {})
        if unknown:
            raise ValueError(f"nulls= names {sorted(unknown)}, not in columns {known}")
        self.filters = None if filters is None else Filters(filters)
        self._nulls = dict(nulls or {})
        self.given = schema
        self.names: tuple[str, ...] = ()  # the columns to read, with the filter's
        self._delivered: list[str] = []
        self._fields: dict[str, pa.Field] = {}  # those of ``given`` that are read
        self._full: list[str] = []  # those without NULLs that are delivered
        # The type of each column, and the file in which it was found.
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._seen: deque[pa.Schema] = deque(maxlen=_SEEN)
        self._schema: pa.Schema | None = None
        self._has_warned = False

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = pa.schema([(one, self._types[one][0]) for one in self.names])
        return self._schema

    def describe(self) -> dict[str, Any]:
        given = self.given
        return {
            "columns": self._columns,
            "nulls": {name: repr(one) for name, one in sorted(self._nulls.items())},
            "schema": given and [[one.name, str(one.type)] for one in given],
            "filters": None if self.filters is None else self.filters.describe(),
        }

    def start(self, first: pa.Schema, location: str) -> Self:
        """Start a table with a file; on a copy, while others are reading."""
        given = self.given
        names = list(self._columns or first.names)
        read = list(names)
        if self.filters is not None:
            # With the types in ``schema=`` where it has them.
            named = {field.name: field for field in given or ()}
            plain = {f.name: f.with_type(without_view(f.type)) for f in first}
            among = pa.schema([*(named | plain | named).values()])
            read += [name for name in self.filters.names(among) if name not in names]
        for name in [] if given else self._nulls:
            _field_of(first, name, location)
        self.names, self._delivered = tuple(read), names
        # Missing columns of chosen types are NULL.
        self._fields = {one.name: one for one in given or () if one.name in read}
        self._types = {name: (one.type, "") for name, one in self._fields.items()}
        full = {name for name, one in self._fields.items() if not one.nullable}
        self._full = [name for name in names if name in full]
        self._schema, self._seen = None, deque(maxlen=_SEEN)
        self.add(first, location)
        return self

    def add(self, schema: pa.Schema, location: str, *, is_late: bool = False) -> None:
        """Unify the columns of a file with those of the previous files.

        Where there are readers (``is_late``), the types are final.
        """
        if any(schema is one or schema.equals(one) for one in self._seen):
            return
        for name in self.names:
            given = self._fields.get(name)
            if given is None or not given.nullable or name in schema.names:
                field = _field_of(schema, name, location)
                self._add(name, without_view(field.type), location, is_late=is_late)
        more = [name for name in schema.names if name not in self.names]
        if more and self._columns is None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{location!r} has columns {more} that the first file lacks, and they "
                "are not read: name the columns to read (columns=), or give their "
                "types, for NULLs where a file lacks them (schema=)"
            )
        self._seen.append(schema)

    def _add(
        self, name: str, kind: pa.DataType, location: str, *, is_late: bool
    ) -> None:
        known, origin = self._types.setdefault(name, (kind, location))
        if kind == known:
            return
        if name in self._fields:
            if not _can_cast(kind, known):
                raise _conflict(name, kind, location, f"schema= says {known}")
            return
        common = promoted(known, kind)
        if common is None:
            raise _conflict(name, kind, location, f"it is {known} in {origin!r}")
        if common == known:
            return
        if is_late:
            changed = f"all files were found to have {known}; it was rewritten"
            raise _conflict(name, kind, location, changed)
        self._types[name], self._schema = (common, location), None

    def settle(self) -> Self:
        """End a listing: check that the columns fit ``nulls`` and the filter."""
        for name, value in self._nulls.items():
            _fill(pa.nulls(1, self._types[name][0]), name, value, is_new=True)
        if self.filters is not None:
            self.filters.names(self.schema)
        return self

    def checked(self, schema: pa.Schema, location: str) -> Self:
        """Check that a file fits the listing's table; without one, start here."""
        if not self.names:
            return copy.copy(self).start(schema, location).settle()
        self.add(schema, location, is_late=True)
        return self

    def present(self, schema: pa.Schema) -> list[str]:
        known = {*schema.names}
        return [name for name in self.names if name in known]

    def has(self, schema: pa.Schema, names: Iterable[str]) -> bool:
        types = {field.name: field.type for field in schema}
        return all(types.get(name) == self._types[name][0] for name in names)

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(self.present(batch.schema))

    def rows_of(
        self, batch: pa.RecordBatch, location: str, in_name: InName | None = None
    ) -> pa.RecordBatch:
        """Return the rows to deliver, from the columns of a file and of its name."""
        if not batch.schema.equals(self.schema):
            columns: list[pa.Array] = []
            for field in self.schema:
                place = batch.schema.get_field_index(field.name)
                if place < 0:
                    value = pa.scalar((in_name or {}).get(field.name), pa.string())
                    column = pa.repeat(value, batch.num_rows)
                else:
                    column = batch.column(place)
                columns.append(_cast(column, field, location))
            batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if self.filters is not None:
            batch = batch.filter(self.filters.expression).select(self._delivered)
        for name, value in self._nulls.items():
            place = batch.schema.get_field_index(name)
            column = _fill(batch.column(place), name, value)
            batch = batch.set_column(place, name, column)
        for name in self._full:
            if count := batch.column(name).null_count:
                raise DatasetError(
                    f"column {name!r} of {location!r} has {count:,} NULLs, and schema= "
                    "says nullable=False; replace them (nulls=), or let it be nullable",
                    location=location,
                )
        return batch


def checked(schema: pa.Schema | pa.DataType) -> Any:
    """Return a schema, or a nested type, after checking that its names are text."""
    for field in schema:
        str(field.name)
        if field.type.num_fields:
            checked([field.type.field(at) for at in range(field.type.num_fields)])
    return schema


def _names_in(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str | AbstractSet) or not isinstance(columns, Iterable):
        raise TypeError(f"columns must be a list of names, got {columns!r}")
    names = list(columns)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"columns must be a list of names, got {names}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns must be distinct names, got {names}")
    return names


def _check_schema(schema: Any, names: Iterable[str] | None) -> None:
    check_is(schema, pa.Schema, "schema", "a pyarrow.Schema")
    missing = [name for name in names or () if name not in schema.names]
    if missing:
        raise ValueError(f"columns= names {missing}, not in schema= {schema.names}")
    if not schema.names or len(set(schema.names)) < len(schema.names):
        raise ValueError(f"schema must not repeat columns, got {schema.names}")


def _field_of(schema: pa.Schema, name: str, location: str) -> pa.Field:
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


def without_view(kind: pa.DataType) -> pa.DataType:
    """Return the type that replaces views, which Arrow hardly supports yet."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def promoted(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return Arrow's type for all values of both; None if there is none."""
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    try:
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (ValueError, TypeError):
        return None
    # Arrow casts text to bytes, and exact numbers to floats: other values.
    return common if {_group(one), _group(other)} - {_group(common)} <= {0} else None


def _group(kind: pa.DataType) -> int:
    """Return a number shared by all types of one class of values."""
    types = pa.types
    if types.is_null(kind):
        return 0
    is_binary = types.is_binary(kind) or types.is_large_binary(kind)
    if is_binary or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return 1
    if kind.num_fields:
        return max(_group(kind.field(at).type) for at in range(kind.num_fields))
    return 2 if types.is_decimal(kind) else 3


def _can_cast(kind: pa.DataType, wanted: pa.DataType) -> bool:
    if _is_unchecked(kind, wanted):
        return False
    try:
        pa.nulls(0, kind).cast(wanted)
    except MISFITS:
        return False
    return True


def _is_unchecked(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether Arrow's safe cast may change values without an error.

    Smaller floats are as in Arrow: rounded, and infinite beyond the range.
    """
    types = pa.types
    if types.is_struct(kind) and types.is_struct(wanted):
        names = {field.name for field in kind} & {field.name for field in wanted}
        pairs = [(kind.field(name), wanted.field(name)) for name in names]
        return any(_is_unchecked(before.type, after.type) for before, after in pairs)
    if kind.num_fields == wanted.num_fields == 1:
        return _is_unchecked(kind.field(0).type, wanted.field(0).type)
    if types.is_dictionary(kind):
        return _is_unchecked(kind.value_type, wanted)
    if types.is_timestamp(kind):
        return bool(types.is_date(wanted) or types.is_time(wanted))
    if types.is_floating(kind):
        return bool(types.is_boolean(wanted) or types.is_decimal(wanted))
    is_changed = types.is_boolean(wanted) or types.is_float16(wanted)
    return bool(is_changed and types.is_integer(kind))


def _cast(array: pa.Array, field: pa.Field, location: str) -> pa.Array:
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except MISFITS as error:
        raise DatasetError(
            f"column {field.name!r} of {location!r} is of type {array.type} and has "
            f"values that do not fit {field.type}, its type in all files: "
            f"{error}; set the type (schema=)",
            location=location,
        ) from error


def _conflict(name: str, kind: pa.DataType, location: str, before: str) -> DatasetError:
    return DatasetError(
        f"column {name!r} of {location!r} is of type {kind}, and {before}; write the "
        "files alike, leave the column out (columns=), or set its type (schema=)",
        location=location,
    )


def _check_filled(value: Any, kind: pa.DataType) -> None:
    """Check by a safe cast a value that Arrow converts to a type without one."""
    is_struct = pa.types.is_struct(kind) and isinstance(value, Mapping)
    if is_struct and (unknown := {*value} - {field.name for field in kind}):
        raise ValueError(f"it has no {', '.join(map(repr, sorted(unknown)))}")
    if pa.types.is_map(kind):  # values of other types are no map without its type
        value, kind = [*dict(value).values()], pa.list_(kind.item_type)
    try:
        given = pa.array([value])
    except MISFITS:
        return  # of no other type
    if _is_unchecked(given.type, kind):
        raise ValueError(f"it is of type {given.type}")
    if not pa.types.is_decimal(kind):  # which Arrow checks, and integers do not cast to
        given.cast(kind)


def _fill(column: pa.Array, name: str, value: Any, *, is_new: bool = False) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        scalar = pa.scalar(value, column.type)
        if is_new:
            _check_filled(value, column.type)
        return column.fill_null(scalar)
    except MISFITS as error:
        raise ValueError(
            f"nulls={{{name!r}: {value!r}}} does not fit a column of type "
            f"{column.type}: {error}"
        ) from error
