"""PostgreSQL sessions, whose connections read one snapshot in parallel by COPY.

One connection, the leader, exports its snapshot and keeps it alive; other connections
adopt it. Rows are streamed in key order. A query with parameters needs a server-side
cursor, which halves the speed. The driver would read an infinite date as an ordinary
day; here it becomes an error or NULL.
"""

import asyncio
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from aioloader._base.blocks import Block, FailedSample
from aioloader._base.cancellation import finish_despite_cancel
from aioloader.datasets._sql.address import (
    Infinity,
    Relation,
    column,
    quoted,
    sqlstate_of,
)
from aioloader.datasets._sql.session import (
    GROWTH,
    Connection,
    Key,
    KeyRange,
    Scan,
    Session,
    close_all,
    encoded,
    fitting,
)
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa


# An extra result column: the index of the first column whose date is infinite, or NULL.
FLAG = "aioloader: infinite"
# Casts from exact numbers to floats, by type.
FLOAT_CASTS = {
    "numeric": "{}::float8",
    "money": "{}::numeric::float8",
    "_numeric": "{}::float8[]",
    "_money": "{}::numeric[]::float8[]",
}
# SQL conditions that detect infinite dates, by type; they are not true for NULL.
_POINT = "NOT isfinite({0})"
_LIST = "('infinity' = ANY({0}) OR '-infinity' = ANY({0}))"
_INFINITE = {
    "_interval": "{0}::text LIKE '%infinity%'",  # no literal before version 17
    **dict.fromkeys(("date", "timestamp", "timestamptz", "interval"), _POINT),
    **dict.fromkeys(("_date", "_timestamp", "_timestamptz"), _LIST),
}
_FINITE = "array_replace(array_replace({0}, 'infinity', NULL), '-infinity', NULL)"
# Types that are cast or checked. The names of array types begin with "_".
HANDLED_TYPES = {"oid", "_oid", *FLOAT_CASTS, *_INFINITE}
# Finds nested types that drivers may misread, and "_numeric" in arrays of a domain.
# Versions before 14 have no column rngmultitypid, so to_jsonb looks it up.
_PARTS_QUERY = """
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
POINT_TYPES = frozenset(kind for kind, rule in _INFINITE.items() if rule is _POINT)
_LOG = logging.getLogger("aioloader")
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
# Timeouts are off, as in pg_dump, because consumers may be slow. Dates get one format.
# The view pg_settings is not used: it would compute all settings for each connection.
_SETTINGS = """
SELECT set_config(name, '0', true) FROM (VALUES ('statement_timeout'),
('idle_in_transaction_session_timeout'), ('transaction_timeout')) AS s (name)
WHERE current_setting(name, true) IS NOT NULL
UNION ALL SELECT set_config('DateStyle', 'ISO, YMD', true)
"""
# COPY accepts no parameters, so settings pass the bounds of a range.
_SET_RANGE = (
    "SELECT set_config('aioloader.start', $1, true), "
    "set_config('aioloader.stop', $2, true)"
)
_KEY_TYPES = frozenset({
    "int2", "int4", "int8", "text", "varchar", "bpchar", "name", "uuid", "date",
    "timestamp", "timestamptz", "bytea",
})  # fmt: skip
_TEXT_TYPES = frozenset({"text", "varchar", "bpchar"})
# Casts for types that have no Arrow type.
_CASTS = FLOAT_CASTS | {
    "oid": "{}::int8",
    "_oid": "{}::int8[]",
    "vector": "{}::real[]",
    "halfvec": "{}::real[]",
}
_EXACT_CASTS = {
    "numeric": "{}::text",
    "money": "{}::numeric::text",
    "_numeric": "{}::text[]",
    "_money": "{}::numeric[]::text[]",
}
# Finds a non-deterministic collation; such collations exist since version 12.
_LOOSE_COLLATION = """
SELECT 1 FROM pg_collation AS c JOIN pg_namespace AS n ON n.oid = c.collnamespace
WHERE to_jsonb(c) ->> 'collisdeterministic' = 'false' AND ({key}) COLLATE "C" IN
(quote_ident(c.collname), quote_ident(n.nspname) || '.' || quote_ident(c.collname))
"""
_TYPE_QUERY = "SELECT typname::text FROM pg_type WHERE oid = $1::oid"
# How many pages to sample (ranges then differ by about 10 %), and bytes of a page.
_PAGES, _PAGE_BYTES = 400, 8192
_SIZE_QUERY = """
SELECT c.relkind::text, CASE c.relkind WHEN 'p' THEN
(SELECT sum(pg_relation_size(relid))::int8 FROM pg_partition_tree(c.oid))
ELSE pg_relation_size(c.oid) END FROM pg_class AS c WHERE c.oid = to_regclass($1)
"""


def selection(columns: Mapping[str, tuple[str, str]], infinity: Infinity) -> str:
    """Return the select list, with a ``FLAG`` column if infinite dates are errors.

    ``columns`` maps a name to (type, expression), where ``{}`` is the column. With an
    empty expression, the column is selected as it is, with NULL for infinite dates.
    """
    parts: list[str] = []
    cases: list[str] = []
    for number, (name, (kind, cast)) in enumerate(columns.items()):
        expression, condition = cast or "{}", "" if cast else _INFINITE.get(kind, "")
        if condition:
            cases.append(f"WHEN {condition.format(column(name))} THEN {number}")
            expression = f"CASE WHEN {condition} THEN NULL ELSE {{0}} END"
            expression = _FINITE if condition is _LIST else expression
        parts.append(f"{expression.format(column(name))} AS {quoted(name)}")
    if cases and infinity == "error":
        parts.append(f"CASE {' '.join(cases)} END AS {quoted(FLAG)}")
    return ", ".join(parts)


def parts_query(relation: Relation, columns: Iterable[str]) -> str:
    """Return a query for nested types of columns; ``types_by_parts`` uses its rows."""
    nothing = "LIMIT 0"
    kinds = (
        f"({number}, pg_typeof(({relation.select(column(name), nothing)}))::oid)"
        for number, name in enumerate(columns)
    )
    return _PARTS_QUERY.format(kinds=", ".join(kinds))


def types_by_parts(
    columns: Sequence[str], rows: Iterable[tuple[int, str, str]]
) -> dict[str, str]:
    """Return {name: "_numeric"} for arrays whose elements are a domain over numeric.

    Raises a ValueError if a column has a nested type that drivers misread.
    """
    types: dict[str, str] = {}
    for number, kind, part in rows:
        name = columns[number]
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
    return DatasetError(
        f"the row of {relation.label} with {relation.key} = {key!r} has an infinite "
        f"date in column {name!r}, which neither Arrow nor Python can represent; read "
        "it as NULL (infinity='null'), or replace it in a query or a view",
        location=location,
    )


def as_decimals(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.RecordBatch":
    """Mark the text columns ``names`` as exact numbers, which become decimals."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    for name in names:
        index = batch.schema.get_field_index(name)
        array = batch.column(index)
        kind = pa.opaque(pa.string(), "numeric", "PostgreSQL")
        if pa.types.is_list(array.type):
            kind = pa.list_(kind)
        batch = batch.set_column(index, name, array.cast(kind))
    return batch


class Postgres(Session):
    _placeholder = "$"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._leader: Connection | None = None  # exports the snapshot
        self._snapshot = ""
        self._renewing = asyncio.Lock()
        self._idle: list[Connection] = []
        self._decimals: list[str] = []  # exact numbers, read as text

    async def begin(self, partitions: int | Sequence[Key]) -> list[KeyRange]:
        leader = await self._start_leader()
        # Planning takes as long as connecting, so open a reader's connection meanwhile.
        spare = asyncio.create_task(self._add_idle())
        try:
            return await leader.run(self._divide, leader, partitions)
        finally:
            await finish_despite_cancel(asyncio.gather(spare, return_exceptions=True))

    async def join(self) -> Connection:
        return self._idle.pop() if self._idle else await self._new()

    async def leave(self, connection: Connection, *, is_sound: bool) -> None:
        if is_sound and self._leader is not None:
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        leader, self._leader = self._leader, None
        idle, self._idle = self._idle, []
        await close_all([*idle, leader] if leader else idle)

    async def _start_leader(self) -> Connection:
        leader = self._leader = Connection(self.address)
        self._snapshot = await leader.run(_begin, leader)
        return leader

    async def _add_idle(self) -> None:
        self._idle.append(await self._new())

    async def _new(self) -> Connection:
        """Return a connection to the snapshot; if that was lost, to a new snapshot."""
        while self._leader is not None:
            snapshot, adopted = self._snapshot, ""
            connection = Connection(self.address, like=self._leader)
            try:
                adopted = await connection.run(_begin, connection, snapshot)
            finally:
                if not adopted:
                    await connection.aclose()
            if adopted:
                return connection
            await self._renew_snapshot(snapshot)
        raise RuntimeError("the iteration is over")

    async def _renew_snapshot(self, lost: str) -> None:
        """Replace the ``lost`` snapshot, unless another reader has already done so."""
        async with self._renewing:
            if self._snapshot != lost or self._leader is None:
                return
            await self._leader.aclose()
            await self._start_leader()
            _LOG.warning(
                "the snapshot of %s was lost, because the server was restarted or hung "
                "up; reading continues with a new one: rows changed in between may be "
                "read in their new state",
                self.address.label,
            )

    # -- in the connection's thread -----------------------------------------------

    def scan(
        self, connection: Connection, span: KeyRange, last: Key | None, batch_bytes: int
    ) -> Scan:
        rest, is_again = span.since(last), last is not None
        connection.fetch(_SET_RANGE, ["" if key is None else str(key) for key in rest])
        bound = f"current_setting('aioloader.{{}}')::{self._key_type}"
        sql, parameters = self._statement(rest, bound), self.relation.parameters
        if parameters:
            batches = _fetched(connection, sql, parameters, batch_bytes)
        else:
            size = {"adbc.postgresql.batch_size_hint_bytes": str(batch_bytes)}
            batches = connection.batches(sql, (), size)
        with closing(batches):
            for batch in batches:
                if rows := self._new_rows(batch, last, is_again=is_again):
                    yield rows
                    last = encoded(rows[0][-1].as_py())
                is_again = is_again and not batch.num_rows

    def _rows(self, batch: "pa.RecordBatch") -> Block:
        """Return a batch's rows; a row with an infinite date becomes a FailedSample."""
        rows = super()._rows(as_decimals(batch, self._decimals))
        if FLAG not in batch.schema.names:
            return rows
        flags, keys = batch.column(FLAG), batch.column(self.relation.key)
        if flags.null_count < len(flags):
            rows = list(rows)
            for index, number in enumerate(flags.to_pylist()):
                if number is not None:
                    key, name = keys[index].as_py(), self._columns[number]
                    label = self.address.label
                    rows[index] = FailedSample(
                        infinite_error(self.relation, key, name, label)
                    )
        return rows

    def _key_value(self, key: Key) -> str:
        return str(key)

    def _plan(self, connection: Connection) -> None:
        relation, key = self.relation, self.relation.key
        with connection.cursor() as cursor:
            sql = relation.select("*")
            schema = cursor.adbc_execute_schema(sql, relation.parameters or None)
        types = dict(zip(schema.names, _types(connection, schema), strict=True))
        self.names = relation.names(schema.names)
        self._key_type = types[key]
        if self._key_type not in _KEY_TYPES:
            raise ValueError(
                f"key {key!r} is of type {self._key_type}, which cannot be a key; use "
                f"{', '.join(sorted(_KEY_TYPES))}"
            )
        self._refuse_keys(connection, "IS NULL", "NULL")
        if self._key_type in _TEXT_TYPES:
            key_collation = f"pg_collation_for(max({self._key}))"
            collation = relation.select(key_collation, "WHERE false")
            if connection.fetch(
                _LOOSE_COLLATION.format(key=collation), relation.parameters
            ):
                self._refuse_collation('"C"')
        if self._key_type in POINT_TYPES:
            self._refuse_keys(connection, "IN ('infinity', '-infinity')", "infinite")
        unknown = [name for name in self._columns if types[name] not in HANDLED_TYPES]
        if nested := [n for n in unknown if _is_nested(schema.field(n).type)]:
            parts = connection.fetch(parts_query(relation, nested), relation.parameters)
            types |= types_by_parts(nested, parts)
        is_exact = relation.numeric == "decimal"
        casts = _CASTS | (_EXACT_CASTS if is_exact else FLOAT_CASTS)
        columns: dict[str, tuple[str, str]] = {}
        for name in self._columns:
            cast = casts.get(types[name]) or _text_cast(schema.field(name).type)
            columns[name] = types[name], cast or ("{}" if name == key else "")
        self._selected = selection(columns, relation.infinity)
        self._decimals = [n for n in self.names if is_exact and types[n] in FLOAT_CASTS]

    def _cuts(self, connection: Connection, partitions: int) -> list[Key]:
        """Return quantiles of the key; a table's are estimated from sampled pages."""
        sample = ""
        if not self.relation.is_query:
            tables = connection.fetch(_SIZE_QUERY, (self.relation.table(),))
            kind, size = tables[0] if tables else ("", 0)
            if kind in {"r", "m", "p"}:
                share = min(100.0, 100.0 * _PAGES * _PAGE_BYTES / max(1, size or 0))
                sample = f"TABLESAMPLE SYSTEM ({share:.6f}) REPEATABLE (0)"
        # Add 1e-9 to get the first key of a range, not the last of the previous one.
        shares = [f"{n / partitions + 1e-9:.12f}" for n in range(1, partitions)]
        quantiles = (
            f"percentile_disc(ARRAY[{', '.join(shares)}]::float8[]) "
            f"WITHIN GROUP (ORDER BY {self._key})"
        )
        (cuts,) = self._query_row(connection, f"({quantiles})::text[]", sample)
        is_integer = self._key_type.startswith("int")
        return [int(cut) if is_integer else cut for cut in dict.fromkeys(cuts or ())]


def _begin(connection: Connection, snapshot: str = "") -> str:
    """Start a transaction in ``snapshot``; if that is empty, export a new snapshot.

    Returns the snapshot's name; empty if the given snapshot is lost.
    """
    connection.fetch(_BEGIN)
    try:
        if snapshot:
            connection.fetch(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    except Exception as exc:
        # "Undefined object" since about version 17, "invalid value" in earlier ones.
        if sqlstate_of(exc) in {"42704", "22023"}:
            return ""
        raise
    connection.fetch(_SETTINGS)
    return snapshot or str(connection.fetch("SELECT pg_export_snapshot()")[0][0])


def _types(connection: Connection, schema: "pa.Schema") -> list[str]:
    """Return PostgreSQL's name of each column's type."""
    given = [(field.metadata or {})[b"POSTGRESQL:type"].decode() for field in schema]
    # The driver identifies types from extensions only by number.
    names: dict[str, str] = {}
    for name in {name for name in given if name.startswith("unnamed<oid:")}:
        number = name.removeprefix("unnamed<oid:").rstrip(">")
        names[name] = connection.fetch(_TYPE_QUERY, (number,))[0][0]
    return [names.get(name, name) for name in given]


def _is_nested(kind: "pa.DataType") -> bool:
    """Return whether a type may contain others, such as an array or a range."""
    return bool(kind.num_fields) or hasattr(kind, "vendor_name")


def _text_cast(kind: "pa.DataType") -> str:
    """Return the cast to text if Arrow lacks the type, else an empty string."""
    if hasattr(kind, "vendor_name"):
        return "{}::text"
    is_list = hasattr(getattr(kind, "value_type", None), "vendor_name")
    return "{}::text[]" if is_list else ""


def _fetched(
    connection: Connection, sql: str, parameters: Sequence[Any], batch_bytes: int
) -> "Generator[pa.RecordBatch, None, None]":
    """Yield the rows of a query by a server-side cursor, in growing batches."""
    with connection.cursor() as cursor:
        cursor.execute(f"DECLARE aioloader NO SCROLL CURSOR FOR {sql}", parameters)
        cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
        count = 1
        while True:
            cursor.execute(f"FETCH FORWARD {count} FROM aioloader")
            table = cursor.fetch_arrow_table().combine_chunks()
            if not table.num_rows:
                break
            yield from table.to_batches()
            fits = fitting(table.nbytes / table.num_rows, batch_bytes)
            count = min(fits, GROWTH * count)
        cursor.execute("CLOSE aioloader")
