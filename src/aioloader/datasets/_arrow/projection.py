"""Selection of a table's columns and rows, and of values that replace NULLs.

The files of a listing form one table. They may differ in column order, in nullability,
and in types if these have a common type; a value that a safe cast rejects is an error.
Filters skip files by Hive-style names (``year=2024/``) and row groups by statistics,
and then test each row.
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

# Errors that pyarrow raises if a cast, fill value or condition does not fit.
MISFITS = (ValueError, TypeError, NotImplementedError)
# Column to value, from a file's name; None means NULL.
Partition: TypeAlias = dict[str, str | None]

# If NaNs in more columns may match, skip no row groups: each column doubles the work.
_MAX_NANS = 4
_NULL = "__HIVE_DEFAULT_PARTITION__"
# How many recent schemas each schema is compared with; most files have one of them.
RECENT_SCHEMAS = 8


class Partitions:
    """The columns in directory names (``year=2024/``), typed as in ``given``.

    Columns not in ``given`` are int32 if all values fit, else strings.
    """

    def __init__(
        self, names: Iterable[str] = (), given: Iterable[pa.Field] = ()
    ) -> None:
        values_by_key: dict[str, set[str | None]] = {}
        for name in names:
            for key, value in self.of(name).items():
                values_by_key.setdefault(key, set()).add(value)
        types = {field.name: field.type for field in given}
        self._columns = pa.schema([
            (key, types.get(key) or _type_of(values - {None}))
            for key, values in values_by_key.items()
        ])  # fmt: skip

    def __bool__(self) -> bool:
        return len(self._columns) > 0

    @staticmethod
    def of(name: str) -> Partition:
        """Return the column values that a file's name contains, as text."""
        folders = (part.partition("=") for part in name.split("/")[:-1])
        return {
            unquote(key): None if value == _NULL else unquote(value)
            for key, equals, value in folders
            if key and equals
        }

    def append_to(self, schema: pa.Schema, name: str) -> pa.Schema:
        keys = self.of(name)
        for field in self._columns:
            if field.name in keys and field.name not in schema.names:
                schema = schema.append(field)
        return schema

    def guarantee(self, name: str, own: pa.Schema) -> pc.Expression | None:
        """Return the condition that a file name implies for columns not in ``own``."""
        guarantee, values = None, self.of(name)
        for field in self._columns:
            if field.name not in values or field.name in own.names:
                continue
            value = values[field.name]
            try:
                scalar = pa.scalar(value, pa.string()).cast(field.type)
            except MISFITS:
                continue  # reading this file will raise the error
            column = pc.field(field.name)
            condition = column.is_null() if value is None else column == scalar
            guarantee = condition if guarantee is None else guarantee & condition
        return guarantee


def _type_of(values: "set[Any]") -> pa.DataType:
    try:
        pa.array(values, pa.string()).cast(pa.int32())
    except ValueError:
        return pa.string()
    return pa.int32() if values else pa.string()


class Filters:
    """A condition that selects rows, made from an expression or lists of tuples."""

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
        """Return the condition as text, with a digest if pyarrow abbreviates it."""
        text = str(self.expression)
        if "..." not in text:
            return text
        _, (data, *_) = self.expression.__reduce__()
        return f"{text} {blake2b(data, digest_size=8).hexdigest()}"

    def names(self, schema: pa.Schema) -> list[str]:
        """Return the columns that the condition needs, found by leaving columns out."""
        table = schema.empty_table()
        try:
            table.filter(self.expression)
        except MISFITS as error:
            raise ValueError(
                f"filters={self.expression} do not fit the columns "
                f"{', '.join(schema.names[:20])}: {error}"
            ) from error
        return self._needed(table, schema.names)

    def _needed(self, table: pa.Table, candidates: Sequence[str]) -> list[str]:
        try:
            table.drop_columns(list(candidates)).filter(self.expression)
        except MISFITS:
            half = len(candidates) // 2
            if not half:
                return list(candidates)
            return [
                name
                for part in (candidates[:half], candidates[half:])
                for name in self._needed(table, part)
            ]
        return []

    def files(
        self, schema: pa.Schema, guarantees: Sequence[pc.Expression | None]
    ) -> list[int]:
        """Return the indices in ``guarantees`` of files that may have matching rows."""
        from pyarrow import dataset, fs  # noqa: PLC0415  (slow to import)

        parquet, local = dataset.ParquetFileFormat(), fs.LocalFileSystem()
        fragments = [  # their indices serve as paths; no file is opened
            parquet.make_fragment(str(number), local, guarantee)
            for number, guarantee in enumerate(guarantees)
        ]
        whole = dataset.FileSystemDataset(fragments, schema, parquet, local)
        return [int(part.path) for part in whole.get_fragments(self.expression)]

    def row_groups(
        self, size: int, tail: bytes, schema: pa.Schema, guarantee: pc.Expression | None
    ) -> set[int] | None:
        """Return the numbers of a file's row groups that may match; None means all.

        ``size``: the file's length. ``tail``: its end, starting with the footer.
        ``schema`` includes the file name's columns; ``guarantee``: see ``Partitions``.
        """
        from pyarrow import dataset  # noqa: PLC0415  (slow to import)

        first = size - len(tail)

        def read(start: int, stop: int) -> bytes:
            # pyarrow also reads bytes before the footer, but ignores them: use zeros.
            before = bytes(max(0, min(stop, first) - start))
            return before + tail[max(0, start - first) : max(0, stop - first)]

        numbers = set[int]()
        try:
            nans = self.nans(schema)
            if len(nans) > _MAX_NANS:
                return None
            for nan_columns in chain(
                *(combinations(nans, n) for n in range(len(nans) + 1))
            ):
                file = pa.PythonFile(RangeFile(size, read), mode="r")
                guarantees = (
                    nan_columns if guarantee is None else (guarantee, *nan_columns)
                )
                combined = reduce(and_, guarantees) if guarantees else None
                fragment = dataset.ParquetFileFormat().make_fragment(
                    file, None, combined
                )
                groups = fragment.subset(self.expression, schema=schema).row_groups
                numbers.update(group.id for group in groups)
        except (*MISFITS, OSError):
            # A column is missing or has another type: test the decoded rows instead.
            return None
        return numbers

    def nans(self, schema: pa.Schema) -> list[pc.Expression]:
        """Return an "is NaN" condition for each float column whose NaNs may match."""
        if schema not in self._nans:
            fields = [schema.field(name) for name in self.names(schema)]
            nans = [
                pc.field(*path) == pa.scalar(float("nan"), kind)
                for path, kind in _floats(fields)
            ]
            self._nans[schema] = [nans[number] for number in self.files(schema, nans)]
        return self._nans[schema]


def _floats(
    fields: Iterable[pa.Field], *path: str
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield the path and type of each float column, including those in structs."""
    for field in fields:
        inner, kind = (*path, field.name), field.type
        if pa.types.is_struct(kind):
            yield from _floats(kind, *inner)
        elif pa.types.is_floating(kind):
            yield inner, kind


def _ordered(filters: Any) -> Any:
    """Return filters with sets sorted, because set order differs by process."""
    if isinstance(filters, (list, tuple)):
        ordered = map(_ordered, filters)
        return list(ordered) if isinstance(filters, list) else tuple(ordered)
    if isinstance(filters, (set, frozenset)):
        return sorted(filters, key=lambda value: (str(type(value)), repr(value)))
    return filters


class Projection:
    """The columns and rows to read, and the values that replace NULLs.

    A listing calls ``start`` with the first file, ``add`` with each file, and finally
    ``settle``. ``checked`` tests that a file opened later still fits. Errors name files
    by their ``location``. See ``ParquetDataset`` for the arguments.
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
        names = self._columns
        unknown = set(nulls or {}) - set(names or nulls or {})
        if unknown:
            raise ValueError(f"nulls= names {sorted(unknown)}, not in columns {names}")
        self.filters = None if filters is None else Filters(filters)
        self._nulls = dict(nulls or {})
        self.given = schema
        self.names: tuple[str, ...] = ()  # columns to read, including the filter's
        self._delivered: list[str] = []
        self._fields: dict[str, pa.Field] = {}  # those in ``given`` that are read
        self._not_null: list[str] = []  # delivered columns that are non-nullable
        # The type of each column, and the location of the file that decided it.
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._seen: deque[pa.Schema] = deque(maxlen=RECENT_SCHEMAS)
        self._schema: pa.Schema | None = None
        self._has_warned = False

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = pa.schema([(n, self._types[n][0]) for n in self.names])
        return self._schema

    def describe(self) -> dict[str, Any]:
        given = self.given
        return {
            "columns": self._columns,
            "nulls": {name: repr(null) for name, null in sorted(self._nulls.items())},
            "schema": given and [[field.name, str(field.type)] for field in given],
            "filters": None if self.filters is None else self.filters.describe(),
        }

    def start(self, first: pa.Schema, location: str) -> Self:
        """Start a listing with its first file; start a copy if ``self`` is in use."""
        given = self.given
        names = list(self._columns or first.names)
        read = list(names)
        if self.filters is not None:
            # Types in ``schema=`` override the file's types.
            named = {field.name: field for field in given or ()}
            plain = {f.name: f.with_type(without_view(f.type)) for f in first}
            among = pa.schema([*(named | plain | named).values()])
            read += [name for name in self.filters.names(among) if name not in names]
        for name in [] if given else self._nulls:
            _field_of(first, name, location)
        self.names, self._delivered = tuple(read), names
        # In a file that lacks one of these columns, it is NULL.
        self._fields = {f.name: f for f in given or () if f.name in read}
        self._types = {name: (field.type, "") for name, field in self._fields.items()}
        not_null = {name for name, field in self._fields.items() if not field.nullable}
        self._not_null = [name for name in names if name in not_null]
        self._schema, self._seen = None, deque(maxlen=RECENT_SCHEMAS)
        self.add(first, location)
        return self

    def add(self, schema: pa.Schema, location: str, *, is_late: bool = False) -> None:
        """Unify a file's columns with the table's; ``is_late`` forbids new types."""
        if any(schema is seen or schema.equals(seen) for seen in self._seen):
            return
        for name in self.names:
            given = self._fields.get(name)
            if given is None or not given.nullable or name in schema.names:
                field = _field_of(schema, name, location)
                self._merge(name, without_view(field.type), location, is_late=is_late)
        more = [name for name in schema.names if name not in self.names]
        if more and self._columns is None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{location!r} has columns {more} that the first file lacks, and they "
                "are not read: name the columns to read (columns=), or give their "
                "types, for NULLs where a file lacks them (schema=)"
            )
        self._seen.append(schema)

    def _merge(
        self, name: str, kind: pa.DataType, location: str, *, is_late: bool
    ) -> None:
        unified, origin = self._types.setdefault(name, (kind, location))
        if kind == unified:
            return
        if name in self._fields:
            if not _can_cast(kind, unified):
                raise _conflict(name, kind, location, f"schema= says {unified}")
            return
        common = promoted(unified, kind)
        if common is None:
            raise _conflict(name, kind, location, f"it is {unified} in {origin!r}")
        if common == unified:
            return
        if is_late:
            changed = f"all files were found to have {unified}; it was rewritten"
            raise _conflict(name, kind, location, changed)
        self._types[name], self._schema = (common, location), None

    def settle(self) -> Self:
        """Finish a listing; raise if ``nulls`` or ``filters`` do not fit columns."""
        for name, value in self._nulls.items():
            _fill(pa.nulls(1, self._types[name][0]), name, value, is_new=True)
        if self.filters is not None:
            self.filters.names(self.schema)
        return self

    def checked(self, schema: pa.Schema, location: str) -> Self:
        """Return ``self`` if a file fits; before any listing, return a started copy."""
        if not self.names:
            return copy.copy(self).start(schema, location).settle()
        self.add(schema, location, is_late=True)
        return self

    def present(self, schema: pa.Schema) -> list[str]:
        """Return the columns to read that ``schema`` contains, in reading order."""
        available = {*schema.names}
        return [name for name in self.names if name in available]

    def has(self, schema: pa.Schema, names: Iterable[str]) -> bool:
        """Return whether ``schema`` has all ``names``, with the table's types."""
        types = {field.name: field.type for field in schema}
        return all(types.get(name) == self._types[name][0] for name in names)

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(self.present(batch.schema))

    def rows_of(
        self, batch: pa.RecordBatch, location: str, partition: Partition | None = None
    ) -> pa.RecordBatch:
        """Return a batch's rows to deliver; ``partition``: values in the file name."""
        if not batch.schema.equals(self.schema):
            columns: list[pa.Array] = []
            for field in self.schema:
                index = batch.schema.get_field_index(field.name)
                if index < 0:
                    value = pa.scalar((partition or {}).get(field.name), pa.string())
                    column = pa.repeat(value, batch.num_rows)
                else:
                    column = batch.column(index)
                columns.append(_cast(column, field, location))
            batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if self.filters is not None:
            batch = batch.filter(self.filters.expression).select(self._delivered)
        for name, value in self._nulls.items():
            index = batch.schema.get_field_index(name)
            column = _fill(batch.column(index), name, value)
            batch = batch.set_column(index, name, column)
        for name in self._not_null:
            if count := batch.column(name).null_count:
                raise DatasetError(
                    f"column {name!r} of {location!r} has {count:,} NULLs, and schema= "
                    "says nullable=False; replace them (nulls=), or let it be nullable",
                    location=location,
                )
        return batch


def checked(schema: pa.Schema | pa.DataType) -> Any:
    """Return ``schema`` after decoding all names, which raises for invalid UTF-8."""
    for field in schema:
        str(field.name)
        if field.type.num_fields:
            checked([field.type.field(n) for n in range(field.type.num_fields)])
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
    indices = schema.get_all_field_indices(name)
    if len(indices) == 1:
        return schema.field(indices[0])
    number = f"{len(indices)} columns" if indices else "no column"
    shown = ", ".join(map(repr, schema.names[:20])) or "none"
    more = f" and {len(schema.names) - 20:,} more" if len(schema.names) > 20 else ""
    raise DatasetError(
        f"{location!r} has {number} {name!r}; its columns are {shown}{more}",
        location=location,
    )


def without_view(kind: pa.DataType) -> pa.DataType:
    """Replace a string or binary view by a large type: Arrow lacks view kernels."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def promoted(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return a type that represents all values of both types, or None."""
    schemas = [pa.schema([("", kind)]) for kind in (left, right)]
    try:
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (ValueError, TypeError):
        return None
    # Arrow would also cast text to bytes and decimals to floats, changing the values.
    return common if {_group(left), _group(right)} - {_group(common)} <= {0} else None


def _group(kind: pa.DataType) -> int:
    """Return 0 for null, 1 for binary, 2 for decimal, else 3; the maximum if nested."""
    types = pa.types
    if types.is_null(kind):
        return 0
    is_binary = types.is_binary(kind) or types.is_large_binary(kind)
    if is_binary or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return 1
    if kind.num_fields:
        return max(_group(kind.field(number).type) for number in range(kind.num_fields))
    return 2 if types.is_decimal(kind) else 3


def _can_cast(kind: pa.DataType, target: pa.DataType) -> bool:
    if _is_unchecked(kind, target):
        return False
    try:
        pa.nulls(0, kind).cast(target)
    except MISFITS:
        return False
    return True


def _is_unchecked(kind: pa.DataType, target: pa.DataType) -> bool:
    """Return whether a cast that Arrow calls safe may change values beyond rounding."""
    types = pa.types
    if types.is_struct(kind) and types.is_struct(target):
        names = {field.name for field in kind} & {field.name for field in target}
        pairs = [(kind.field(name), target.field(name)) for name in names]
        return any(_is_unchecked(before.type, after.type) for before, after in pairs)
    if kind.num_fields == target.num_fields == 1:
        return _is_unchecked(kind.field(0).type, target.field(0).type)
    if types.is_dictionary(kind):
        return _is_unchecked(kind.value_type, target)
    if types.is_timestamp(kind):
        return bool(types.is_date(target) or types.is_time(target))
    if types.is_floating(kind):
        return bool(types.is_boolean(target) or types.is_decimal(target))
    is_changed = types.is_boolean(target) or types.is_float16(target)
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
    """Raise if ``pa.scalar``, unlike a safe cast, would change ``value``."""
    is_struct = pa.types.is_struct(kind) and isinstance(value, Mapping)
    if is_struct and (unknown := {*value} - {field.name for field in kind}):
        raise ValueError(f"it has no {', '.join(map(repr, sorted(unknown)))}")
    if pa.types.is_map(kind):  # Arrow would not infer a map
        value, kind = [*dict(value).values()], pa.list_(kind.item_type)
    try:
        given = pa.array([value])
    except MISFITS:
        return  # Arrow needs the target type to convert it
    if _is_unchecked(given.type, kind):
        raise ValueError(f"it is of type {given.type}")
    if not pa.types.is_decimal(kind):  # pa.scalar checks these
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
