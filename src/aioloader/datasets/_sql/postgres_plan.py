"""How to read a PostgreSQL table or query: its columns, its key, and where to cut it.

All queries run in the snapshot that is read later. A key is divided at its quantiles:
for a table those of some hundred pages, for a view or query those of all rows, which
costs about as much as reading the keys once more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioloader.datasets._sql.keys import Key, Span, collation_error, spans_of
from aioloader.datasets._sql.links import Connection, fetch
from aioloader.datasets._sql.postgres_values import FLAG, POINTS, Values, finite
from aioloader.datasets._sql.source import (
    Source,
    any_null,
    checked_names,
    column,
    quoted,
    rising,
    select,
    selection,
)

if TYPE_CHECKING:
    import pyarrow as pa

_KEYS = frozenset({
    "int2", "int4", "int8", "text", "varchar", "bpchar", "name", "uuid", "date",
    "timestamp", "timestamptz", "bytea",
})  # fmt: skip
# Types without an Arrow type are read as one that has it.
_CASTS = {
    "numeric": "{}::float8",
    "money": "{}::numeric::float8",
    "oid": "{}::int8",
    "_numeric": "{}::float8[]",
    "vector": "{}::real[]",
    "halfvec": "{}::real[]",
}
_EXACT_CASTS = {
    "numeric": "{}::text",
    "money": "{}::numeric::text",
    "_numeric": "{}::text[]",
}
_TEXTS = frozenset({"text", "varchar", "bpchar"})
# In versions before 12, all collations are deterministic, and there is no such column.
_LOOSE = """
SELECT 1 FROM pg_collation AS c JOIN pg_namespace AS n ON n.oid = c.collnamespace
WHERE to_jsonb(c) ->> 'collisdeterministic' = 'false' AND ({key}) COLLATE "C" IN
(quote_ident(c.collname), quote_ident(n.nspname) || '.' || quote_ident(c.collname))
"""
_TYPE = "SELECT typname::text FROM pg_type WHERE oid = $1::oid"
# Enough pages for shares within about a tenth of each other.
_PAGES, _PAGE_BYTES = 400, 8192
_SIZE = """
SELECT c.relkind::text, CASE c.relkind WHEN 'p' THEN
(SELECT sum(pg_relation_size(relid))::int8 FROM pg_partition_tree(c.oid))
ELSE pg_relation_size(c.oid) END FROM pg_class AS c WHERE c.oid = to_regclass($1)
"""


@dataclass(frozen=True)
class Plan:
    """How to read the source.

    Attributes:
        selected: The list after SELECT.
        key_type: The key's type, by PostgreSQL's name.
        names: The columns to deliver; the key may be read in addition.
        decimals: Columns of exact numbers, which are read as text.
        has_flag: Whether infinite dates are looked for.
    """

    selected: str
    key_type: str
    names: tuple[str, ...]
    decimals: tuple[str, ...] = ()
    has_flag: bool = False


def planned(connection: Connection, source: Source, values: Values) -> Plan:
    """Find the columns and their types, and check the key.

    Raises:
        ValueError: If the key is unsuitable, or a column does not exist.
    """
    with connection.cursor() as cursor:
        schema = cursor.adbc_execute_schema(
            select("*", source.relation()), source.parameters or None
        )
    types = dict(zip(schema.names, _types(connection, schema), strict=True))
    names = checked_names(source, schema.names)
    if types[source.key] not in _KEYS:
        raise ValueError(
            f"key {source.key!r} is of type {types[source.key]}, which cannot be a "
            f"key; use {', '.join(sorted(_KEYS))}"
        )
    read = names if source.key in names else (*names, source.key)
    casts = [_cast(types[name], schema.field(name).type, values) for name in read]
    if fetch(connection, any_null(source), source.parameters):
        raise ValueError(f"key {source.key!r} is NULL in some rows; it must not be")
    if types[source.key] in _TEXTS and _is_loose(connection, source):
        raise collation_error(source.key, '"C"')
    if types[source.key] in POINTS:
        casts[read.index(source.key)] = "{}"
        _refuse_infinite(connection, source)
    selected = selection(read, casts)
    # Types read as text (ranges) keep their infinity.
    asked = {name: types[name] for name in names}
    for name, cast in zip(read, casts, strict=True):
        if cast.startswith("{}::text"):
            asked[name] = ""
    flag = values.flag(asked)
    if flag:
        selected += f", {flag} AS {quoted(FLAG)}"
    decimals = tuple(name for name in names if values.is_decimal(types[name]))
    return Plan(selected, types[source.key], names, decimals, bool(flag))


def _is_loose(connection: Connection, source: Source) -> bool:
    """Return whether the key's collation equates different texts."""
    named = f"pg_collation_for(max({column(source.key)}))"
    key = select(named, source.relation(), "WHERE false")
    return bool(fetch(connection, _LOOSE.format(key=key), source.parameters))


def _refuse_infinite(connection: Connection, source: Source) -> None:
    """Check that no key is an infinite date.

    Raises:
        ValueError: If a key is infinite.
    """
    among = f"WHERE {column(source.key)} IN ('infinity', '-infinity') LIMIT 1"
    if fetch(connection, select("1", source.relation(), among), source.parameters):
        raise ValueError(f"key {source.key!r} is infinite in some rows; it must not be")


def _types(connection: Connection, schema: "pa.Schema") -> list[str]:
    """Return PostgreSQL's names of the columns' types."""
    said = [(field.metadata or {})[b"POSTGRESQL:type"].decode() for field in schema]
    # The driver knows types of extensions only by number.
    names: dict[str, str] = {}
    for name in {name for name in said if name.startswith("unnamed<oid:")}:
        number = name.removeprefix("unnamed<oid:").rstrip(">")
        names[name] = fetch(connection, _TYPE, (number,))[0][0]
    return [names.get(name, name) for name in said]


def _cast(name: str, kind: "pa.DataType", values: Values) -> str:
    """Return the expression that reads a column of a type."""
    if values.is_decimal(name):
        return _EXACT_CASTS[name]
    if name in _CASTS:
        return _CASTS[name]
    if hasattr(kind, "vendor_name"):
        return "{}::text"
    if hasattr(getattr(kind, "value_type", None), "vendor_name"):
        return "{}::text[]"
    return finite(name) or "{}"


def divided(
    connection: Connection,
    source: Source,
    plan: Plan,
    partitions: int | Sequence[Key],
) -> list[Span]:
    """Return ranges with about equal numbers of rows.

    In a table, some hundred pages are sampled; in a view or query, all keys are read.

    Raises:
        ValueError: If bounds were given that do not rise in the order of the database.
    """
    if not isinstance(partitions, int):
        _check_order(connection, source, plan, partitions)
        return spans_of(list(partitions), len(partitions) + 1)
    if partitions == 1:
        return [Span()]
    where = source.relation()
    if not source.is_query:
        ((kind, size),) = fetch(connection, _SIZE, (source.table(),)) or [("v", 0)]
        if kind in {"r", "m", "p"}:
            share = min(100.0, 100.0 * _PAGES * _PAGE_BYTES / max(1, size or 0))
            where += f" TABLESAMPLE SYSTEM ({share:.6f}) REPEATABLE (0)"
    key = column(source.key)
    # Slightly more, to get the first key of a part, not the last of the previous part.
    shares = ", ".join(f"{n / partitions + 1e-9:.12f}" for n in range(1, partitions))
    order = f"percentile_disc(ARRAY[{shares}]::float8[]) WITHIN GROUP (ORDER BY {key})"
    found = fetch(connection, select(f"({order})::text[]", where), source.parameters)
    ((cuts,),) = found
    return spans_of(_as_keys(dict.fromkeys(cuts or ()), plan), partitions)


def _as_keys(texts: Iterable[str], plan: Plan) -> list[Key]:
    return [int(text) if plan.key_type.startswith("int") else text for text in texts]


def _check_order(
    connection: Connection, source: Source, plan: Plan, bounds: Sequence[Key]
) -> None:
    """Check that bounds rise, in the key's own order."""
    sql = rising(source, plan.key_type, len(bounds), "$")
    falls = fetch(connection, sql, (*source.parameters, *map(str, bounds)))
    if falls != [(0,)]:
        raise ValueError("bounds in partitions must rise, in the order of the database")
