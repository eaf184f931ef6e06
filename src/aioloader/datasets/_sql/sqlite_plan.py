"""How to read an SQLite table or query: its columns' types, its key, where to cut it.

SQLite's values have types, its columns only preferences. A column has the type of its
first thousand rows; if these are all NULL, the declared type or that of later rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioloader.datasets._sql.keys import (
    Key,
    Span,
    as_bytes,
    collation_error,
    encoded,
    spans_of,
)
from aioloader.datasets._sql.links import Connection, execute, fetch
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

_ROW_IDS = frozenset({"rowid", "oid", "_rowid_"})
_VIEW = 'temp."aioloader view"'
_FIRST_ROWS = 1000
_KEY_TYPES = {"integer": "int64", "text": "string", "blob": "binary"}
# Without a cast, the type of a number among texts would depend on its position.
_CASTS = {"string": "CAST({} AS TEXT)", "binary": "CAST({} AS BLOB)"}
# Keys are even if no probe finds a density below this share of the highest.
_PROBES, _PROBE_ROWS, _EVEN = 32, 16, 0.5


@dataclass(frozen=True)
class Plan:
    """How to read the source.

    Attributes:
        selected: The list after SELECT.
        types: Names of Arrow types, by column.
        key_type: Storage class of the key.
        names: The columns to deliver; the key may be read in addition.
        row_bytes: Approximate size of a row.
        sorts: Whether each query sorts all rows: the key has no index.
    """

    selected: str
    types: dict[str, str]
    key_type: str
    names: tuple[str, ...]
    row_bytes: int
    sorts: bool

    def value_of(self, key: Key) -> int | str | bytes:
        """Return a key as SQLite compares it."""
        return as_bytes(key) if self.key_type == "blob" else key


def planned(connection: Connection, source: Source) -> Plan:
    """Find the columns and their types, and check the key.

    Raises:
        ValueError: If the key is unsuitable, or a column does not exist.
    """
    declared = _declared(connection, source)
    shown = [*declared]
    if not source.is_query and source.key.lower() in _ROW_IDS:
        declared.setdefault(source.key, "INTEGER")
    names = checked_names(source, shown, [*declared])
    read = names if source.key in names else (*names, source.key)
    types, row_bytes = _types(connection, source, {n: declared[n] for n in read})
    key_type = _key_type(connection, source)
    if key_type == "text" and _is_collated(connection, source):
        raise collation_error(source.key, "BINARY")
    types[source.key] = _KEY_TYPES[key_type]
    casts = [
        "{}" if name == source.key else _CASTS.get(types[name], "{}") for name in read
    ]
    selected = selection(read, casts)
    query = select(selected, source.relation(), "ORDER BY", column(source.key))
    steps = fetch(connection, f"EXPLAIN QUERY PLAN {query}", source.parameters)
    sorts = "FOR ORDER BY" in str(steps)
    return Plan(selected, types, key_type, names, row_bytes, sorts)


def _declared(connection: Connection, source: Source) -> dict[str, str]:
    """Return the columns and their declared types."""
    if source.parameters:  # a view cannot have parameters
        with connection.cursor() as cursor:
            sql = select("*", source.relation(), "LIMIT 0")
            cursor.execute(sql, source.parameters)
            return dict.fromkeys(cursor.fetch_record_batch().schema.names, "")
    rows = select("*", source.relation())
    execute(connection, f"CREATE TEMP VIEW {_VIEW[5:]} AS {rows}")
    try:
        found = fetch(connection, f"PRAGMA temp.table_info({_VIEW[5:]})")
    finally:
        execute(connection, f"DROP VIEW {_VIEW}")
    return {str(row[1]): str(row[2] or "").upper() for row in found}


def _types(
    connection: Connection, source: Source, declared: dict[str, str]
) -> tuple[dict[str, str], int]:
    """Return the columns' Arrow types, and the bytes of a row."""
    # Queried per row, so a blob's length does not require reading the blob.
    facts = ", ".join(
        f"typeof({column(name)}) AS t{at}, length({column(name)}) AS l{at}"
        for at, name in enumerate(declared)
    )
    first = select(facts, source.relation(), f"LIMIT {_FIRST_ROWS}")
    asked = ", ".join(
        f"group_concat(DISTINCT t{at}), avg(l{at})" for at in range(len(declared))
    )
    (row,) = fetch(connection, select(asked, f"({first})"), source.parameters)
    types = {
        name: _type_of(str(row[2 * at] or ""), declared[name])
        or _later_type(connection, source, name, declared[name])
        for at, name in enumerate(declared)
    }
    return types, int(sum(8 + float(mean or 0) for mean in row[1::2])) + 1


def _type_of(found: str, declared: str) -> str:
    """Return the type for the storage classes found; empty if only NULLs."""
    classes = set(found.split(",")) - {"null", ""}
    if "blob" in classes:
        return "binary"
    if "text" in classes:
        return "string"
    if "real" in classes:
        return "double"
    wishes = _affinity(declared)
    if classes:
        return "double" if wishes == "double" else "int64"
    return wishes


def _affinity(declared: str) -> str:
    """Return the type that a declaration prefers; empty if none."""
    for words, kind in (
        (("INT", "BOOL"), "int64"),
        (("CHAR", "CLOB", "TEXT"), "string"),
        (("REAL", "FLOA", "DOUB", "DEC", "NUM"), "double"),
    ):
        if any(word in declared for word in words):
            return kind
    return ""


def _later_type(
    connection: Connection, source: Source, name: str, declared: str
) -> str:
    """Return the type of a column's first value after NULLs."""
    there = f"WHERE {column(name)} IS NOT NULL LIMIT 1"
    sql = select(f"typeof({column(name)})", source.relation(), there)
    found = fetch(connection, sql, source.parameters)
    # A view declares untyped columns as BLOB: used only if there is no value.
    nothing = "binary" if "BLOB" in declared else "double"
    return _type_of(found[0][0], "") if found else nothing


def _key_type(connection: Connection, source: Source) -> str:
    """Return the storage class of all keys.

    Raises:
        ValueError: If there is none, or it cannot be a key.
    """
    if fetch(connection, any_null(source), source.parameters):
        raise ValueError(f"key {source.key!r} is NULL in some rows; it must not be")
    key = column(source.key)
    # Classes are sorted one after the other, so both ends show all of them.
    ends = [
        fetch(
            connection,
            select(
                f"typeof({key})", source.relation(), f"ORDER BY {key} {way} LIMIT 1"
            ),
            source.parameters,
        )
        for way in ("ASC", "DESC")
    ]
    found = {row[0] for rows in ends for row in rows} or {"integer"}
    if len(found) > 1 or not found <= _KEY_TYPES.keys():
        raise ValueError(
            f"key {source.key!r} is {' and '.join(sorted(found))}; all must be "
            "integer, all text or all blob"
        )
    return str(found.pop())


def _is_collated(connection: Connection, source: Source) -> bool:
    """Return whether the key's collation ignores case, or spaces at the end.

    An empty part with the key itself provides it.
    """
    none = select(f"{column(source.key)} AS k", source.relation(), "WHERE 1 = 0")
    texts = " UNION ".join((none, "SELECT 'a'", "SELECT 'A'", "SELECT 'a '"))
    count = select("count(*)", f"({texts})")
    return fetch(connection, count, source.parameters) != [(3,)]


def conformed(plan: Plan, batch: "pa.RecordBatch") -> "pa.RecordBatch":
    """Return a batch with the plan's types.

    Raises:
        ValueError: If a column has values of another type.
    """
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    schema = pa.schema(
        [(name, pa.type_for_alias(plan.types[name])) for name in batch.schema.names]
    )
    if batch.schema == schema:
        return batch
    columns = [
        _conformed(array, field)
        for array, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _conformed(array: "pa.Array", field: "pa.Field") -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if array.type == field.type:
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), field.type)
    if array.type == pa.int64() and field.type == pa.float64():
        return array.cast(field.type, safe=False)  # as SQLite itself does
    raise ValueError(
        f"column {field.name!r} is {field.type} in its first rows and {array.type} "
        f"later; write CAST({quoted(field.name)} AS ...) in a query"
    )


# -- cutting ----------------------------------------------------------------------


def divided(
    connection: Connection,
    source: Source,
    plan: Plan,
    partitions: int | Sequence[Key],
) -> list[Span]:
    """Return ranges with about equal numbers of rows.

    Integer keys that a few probes find evenly dense are cut at even distances. Others
    are counted, which reads all keys twice.

    Raises:
        ValueError: If bounds were given that do not rise in the order of the database.
    """
    if not isinstance(partitions, int):
        values = [plan.value_of(bound) for bound in partitions]
        kind = {"integer": "INTEGER", "text": "TEXT", "blob": "BLOB"}[plan.key_type]
        sql = rising(source, kind, len(values), "?")
        if fetch(connection, sql, (*source.parameters, *values)) != [(0,)]:
            raise ValueError(
                "bounds in partitions must rise, in the order of the database"
            )
        return spans_of(list(partitions), len(partitions) + 1)
    if partitions == 1:
        return [Span()]
    cuts = None
    if plan.key_type == "integer" and not source.is_query:
        cuts = _even_cuts(connection, source, partitions)
    if cuts is None:
        cuts = _counted_cuts(connection, source, partitions)
    return spans_of(cuts, partitions)


def _even_cuts(
    connection: Connection, source: Source, partitions: int
) -> list[Key] | None:
    """Return cuts at even distances; None if the keys are not that even."""
    key = column(source.key)
    # Queried one by one: for both together, SQLite reads all rows instead of two.
    first, last = (
        fetch(connection, select(f"{end}({key})", source.relation()))[0][0]
        for end in ("min", "max")
    )
    if first is None or last - first < partitions * _PROBES * _PROBE_ROWS:
        return None
    after = select(
        key, source.relation(), f"WHERE {key} >= ? ORDER BY {key} LIMIT 1 OFFSET ?"
    )
    widths: list[int] = []
    for n in range(_PROBES):
        at = first + (last - first) * n // _PROBES
        found = fetch(connection, after, (at, _PROBE_ROWS - 1))
        widths.append(found[0][0] - at + 1 if found else last - at + 1)
    if min(widths) < _EVEN * max(widths):
        return None
    return [first + (last - first + 1) * n // partitions for n in range(1, partitions)]


def _counted_cuts(connection: Connection, source: Source, partitions: int) -> list[Key]:
    """Return the keys at even ranks."""
    key = column(source.key)
    count = select("count(*)", source.relation())
    ((rows,),) = fetch(connection, count, source.parameters)
    following = f"WHERE {key} >= ? ORDER BY {key} LIMIT 1 OFFSET ?"
    leading = f"ORDER BY {key} LIMIT 1 OFFSET ?"
    cuts: list[Any] = []
    ranks = sorted({rows * n // partitions for n in range(1, partitions)} - {0})
    for before, rank in zip([0, *ranks], ranks, strict=False):
        bounds = (cuts[-1], rank - before) if cuts else (rank,)
        sql = select(key, source.relation(), following if cuts else leading)
        cuts += [
            row[0] for row in fetch(connection, sql, (*source.parameters, *bounds))
        ]
    return _distinct(cuts)


def _distinct(cuts: Iterable[Any]) -> list[Key]:
    return [encoded(cut) for cut in dict.fromkeys(cuts)]
