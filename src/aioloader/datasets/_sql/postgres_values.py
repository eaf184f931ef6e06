"""PostgreSQL values without an Arrow type: exact numbers and infinite dates.

A ``numeric`` is a ``Decimal``, with all its digits, or a float if the user chooses
that. A driver would read an infinite date as an ordinary day; here it is an error that
names the row's key, or NULL if the user chooses that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioloader.datasets._sql.relation import Infinity, Relation, column, quoted
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

# Selected in addition: the number of the first infinite column, or NULL.
FLAG = "aioloader: infinite"
# Expressions for the nearest float of an exact number, by type.
FLOATS = {
    "numeric": "{}::float8",
    "money": "{}::numeric::float8",
    "_numeric": "{}::float8[]",
    "_money": "{}::numeric[]::float8[]",
}
# Conditions by type. None is true for NULL.
_POINT = "NOT isfinite({0})"
_LIST = "('infinity' = ANY({0}) OR '-infinity' = ANY({0}))"
_INFINITE = {
    "_interval": "{0}::text LIKE '%infinity%'",  # a literal only since version 17
    **dict.fromkeys(("date", "timestamp", "timestamptz", "interval"), _POINT),
    **dict.fromkeys(("_date", "_timestamp", "_timestamptz"), _LIST),
}
_FINITE = "array_replace(array_replace({0}, 'infinity', NULL), '-infinity', NULL)"
# Types with an expression that reads them; arrays begin with "_".
KNOWN = {"oid", "_oid", *FLOATS, *_INFINITE}
# The types in others that drivers may read as other values; and "_numeric" in an array
# of a domain. In versions before 14 there are no multiranges, and no such column.
_PARTS = """
WITH RECURSIVE part (at, kind, oid, path) AS (
SELECT at, format_type(oid, NULL), oid, '' FROM (VALUES {kinds}) AS given (at, oid)
UNION SELECT at, kind, inner_oid, path || mark FROM part JOIN pg_type AS t USING (oid),
LATERAL (SELECT t.typbasetype, '' UNION SELECT t.typelem, '_' UNION
SELECT rngsubtype, '?' FROM pg_range AS r
WHERE t.oid::text IN (rngtypid::text, to_jsonb(r) ->> 'rngmultitypid') UNION
SELECT atttypid, '?' FROM pg_attribute WHERE attrelid = t.typrelid AND attnum > 0
AND NOT attisdropped) AS parts (inner_oid, mark))
SELECT at, kind, path || typname FROM part JOIN pg_type USING (oid)
WHERE path || typname = '_numeric' OR typname IN
('date', 'timestamp', 'timestamptz', 'interval', 'money', 'oid')
"""
POINTS = frozenset(kind for kind, rule in _INFINITE.items() if rule is _POINT)


def selection(columns: Mapping[str, tuple[str, str]], infinity: Infinity) -> str:
    """Return the list after SELECT; if infinite dates are errors, with a ``FLAG``.

    Args:
        columns: For each, the type and the expression that reads it, with ``{}``
            for the column; empty: as it is, with NULL for infinite dates.
        infinity: As in ``Relation``.
    """
    parts: list[str] = []
    cases: list[str] = []
    for at, (name, (kind, cast)) in enumerate(columns.items()):
        read, rule = cast or "{}", "" if cast else _INFINITE.get(kind, "")
        if rule:
            cases.append(f"WHEN {rule.format(column(name))} THEN {at}")
            read = f"CASE WHEN {rule} THEN NULL ELSE {{0}} END"
            read = _FINITE if rule is _LIST else read
        parts.append(f"{read.format(column(name))} AS {quoted(name)}")
    if cases and infinity == "error":
        parts.append(f"CASE {' '.join(cases)} END AS {quoted(FLAG)}")
    return ", ".join(parts)


def parts_query(relation: Relation, columns: Iterable[str]) -> str:
    """Return the query for the parts of columns' types; see ``types_by_parts``."""
    nothing = "LIMIT 0"
    kinds = (
        f"({at}, pg_typeof(({relation.select(column(name), nothing)}))::oid)"
        for at, name in enumerate(columns)
    )
    return _PARTS.format(kinds=", ".join(kinds))


def types_by_parts(
    columns: Sequence[str], rows: Iterable[tuple[int, str, str]]
) -> dict[str, str]:
    """Return, by column, the types of arrays of a domain of exact numbers.

    A ValueError if a column has parts that drivers read as other values.
    """
    types: dict[str, str] = {}
    for at, kind, part in rows:
        name = columns[at]
        if part != "_numeric":
            raise ValueError(
                f"column {name!r} is of type {kind}, in which {part.lstrip('_?')} "
                f"may be read as another value; write CAST({quoted(name)} AS TEXT), or "
                "its parts, in a query or a view"
            )
        types[name] = part
    return types


def infinite_error(
    relation: Relation, key: Any, name: str, location: str
) -> DatasetError:
    """Return the error for a row with an infinite date in a column."""
    return DatasetError(
        f"the row of {relation.label} with {relation.key} = {key!r} has an infinite "
        f"date in column {name!r}, which neither Arrow nor Python can represent; read "
        "it as NULL (infinity='null'), or replace it in a query or a view",
        location=location,
    )


def as_decimals(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.RecordBatch":
    """Mark columns of text as exact numbers, so that their values become decimals."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    for name in names:
        place = batch.schema.get_field_index(name)
        array = batch.column(place)
        kind = pa.opaque(pa.string(), "numeric", "PostgreSQL")
        if pa.types.is_list(array.type):
            kind = pa.list_(kind)
        batch = batch.set_column(place, name, array.cast(kind))
    return batch
