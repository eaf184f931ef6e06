"""Columns in the names of directories, as Hive and Spark write them: ``year=2024/``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import compute as pc

if TYPE_CHECKING:
    from pyarrow import dataset as ds

# Column to value; None: NULL.
Values: TypeAlias = dict[str, str | None]

_NULL = "__HIVE_DEFAULT_PARTITION__"


def values_of(name: str) -> Values:
    """Return the columns in a file's name, and their values."""
    folders = (part.partition("=") for part in name.split("/")[:-1])
    return {
        unquote(key): None if value == _NULL else unquote(value)
        for key, equals, value in folders
        if key and equals
    }


def columns_of(names: Iterable[str], known: "Iterable[pa.Field]") -> "pa.Schema":
    """Return the columns in the names of files.

    Args:
        names: The names of the files.
        known: Types that the user has chosen. Others are as in pyarrow: int32 where all
            values are such numbers, or else text.
    """
    found: dict[str, set[str | None]] = {}
    for name in names:
        for key, value in values_of(name).items():
            found.setdefault(key, set()).add(value)
    types = {field.name: field.type for field in known}
    return pa.schema([
        (key, types.get(key) or _type(values)) for key, values in found.items()
    ])  # fmt: skip


def with_columns(schema: "pa.Schema", columns: "pa.Schema", name: str) -> "pa.Schema":
    """Return the columns of a file with those of ``columns`` in its name."""
    keys = values_of(name) if len(columns) else {}
    for field in columns:
        if field.name in keys and field.name not in schema.names:
            schema = schema.append(field)
    return schema


def condition_of(
    name: str, columns: "pa.Schema", own: "pa.Schema"
) -> "ds.Expression | None":
    """Return what is true of all rows of a file; None: nothing is known.

    Args:
        name: The file's name.
        columns: The columns in the names of all files.
        own: The columns that a file itself has, whatever its name says.
    """
    known, values = None, values_of(name)
    for field in columns:
        if field.name not in values or field.name in own.names:
            continue
        value = values[field.name]
        try:
            scalar = pa.scalar(value, pa.string()).cast(field.type)
        except (ValueError, TypeError, NotImplementedError):
            continue  # reading the file will tell
        column = pc.field(field.name)
        one = column.is_null() if value is None else column == scalar
        known = one if known is None else known & one
    return known


def _type(values: Iterable[str | None]) -> "pa.DataType":
    numbers = [value for value in values if value is not None]
    try:
        pa.array(numbers, pa.string()).cast(pa.int32())
    except ValueError:
        return pa.string()
    return pa.int32() if numbers else pa.string()
