"""PostgreSQL: many connections that read one snapshot, by COPY.

One connection exports its snapshot and keeps it alive; the others adopt it. Rows come
in the order of the key, streamed, in batches of about the requested size. A query with
parameters is read through a server-side cursor, which takes twice the time.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioloader.datasets._sql.connection import Connection, close_all
from aioloader.datasets._sql.failures import sqlstate_of
from aioloader.datasets._sql.keys import Key, KeyCheck, Span
from aioloader.datasets._sql.postgres_values import (
    FLAG,
    FLOATS,
    POINTS,
    Values,
    as_decimals,
    finite,
    infinite_error,
)
from aioloader.datasets._sql.session import Batches, Session
from aioloader.datasets._sql.source import Source, quoted, selection
from aioloader.datasets._stores.outlast import outlast

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._sql.address import Address
    from aioloader.errors import DatasetError

_LOG = logging.getLogger("aioloader")
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
# A scan takes as long as its consumer; and keys need one text format. As in pg_dump.
# The view pg_settings would compute all settings, for each connection.
_SETTINGS = """
SELECT set_config(name, '0', true) FROM (VALUES ('statement_timeout'),
('idle_in_transaction_session_timeout'), ('transaction_timeout')) AS s (name)
WHERE current_setting(name, true) IS NOT NULL
UNION ALL SELECT set_config('DateStyle', 'ISO, YMD', true)
"""
# COPY takes no parameters. A setting is bound like one, and is never part of the text.
_RANGE = (
    "SELECT set_config('aioloader.start', $1, true), "
    "set_config('aioloader.stop', $2, true)"
)
# The first fetch is of one row; later ones grow so fast, by the size of the rows seen.
_GROWTH, _MOST_FETCHED = 8, 1 << 16
_KEYS = frozenset({
    "int2", "int4", "int8", "text", "varchar", "bpchar", "name", "uuid", "date",
    "timestamp", "timestamptz", "bytea",
})  # fmt: skip
_TEXTS = frozenset({"text", "varchar", "bpchar"})
# Types without an Arrow type are read as one that has it.
_CASTS = FLOATS | {
    "oid": "{}::int8",
    "vector": "{}::real[]",
    "halfvec": "{}::real[]",
}
_EXACT_CASTS = {
    "numeric": "{}::text",
    "money": "{}::numeric::text",
    "_numeric": "{}::text[]",
}
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


class Postgres(Session):
    """One iteration over a source in a PostgreSQL server."""

    _sign = "$"

    def __init__(self, address: "Address", source: Source, values: Values) -> None:
        super().__init__(address, source, values)
        self._leader: Connection | None = None  # which exports the snapshot
        self._snapshot = ""
        self._renewing = asyncio.Lock()
        self._idle: list[Connection] = []
        self._decimals: list[str] = []  # columns of exact numbers, read as text
        self._has_flag = False  # infinite dates are looked for

    async def begin(self, partitions: int | Sequence[Key]) -> list[Span]:
        """Take a snapshot, and divide the source in it."""
        leader = await self._lead()
        # The first reader's connection is opened meanwhile: that takes as long.
        spare = asyncio.create_task(self._spare())
        try:
            return await leader.run(self._divided, leader, partitions)
        finally:
            await outlast(asyncio.gather(spare, return_exceptions=True))

    async def join(self) -> Connection:
        """Return a connection that reads the snapshot; a new one if it is lost."""
        return self._idle.pop() if self._idle else await self._new()

    async def leave(self, connection: Connection, *, is_sound: bool) -> None:
        """Return a connection; if ``is_sound``, it may be reused."""
        if is_sound and self._leader is not None:
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def is_lost(self, connection: Connection) -> bool:
        """Return whether a connection is lost, after a failure."""
        try:
            await connection.run(connection.fetch, "SELECT 1")
        except Exception as exc:  # noqa: BLE001  (the question is whether it does)
            return not sqlstate_of(exc)
        return False

    async def aclose(self) -> None:
        """Disconnect."""
        leader, self._leader = self._leader, None
        idle, self._idle = self._idle, []
        await close_all([*idle, leader] if leader else idle)

    async def _lead(self) -> Connection:
        """Connect, and export a snapshot."""
        leader = self._leader = Connection(self.address)
        await leader.open()
        self._snapshot = await leader.run(_export, leader)
        return leader

    async def _spare(self) -> None:
        self._idle.append(await self._new())

    async def _new(self) -> Connection:
        """Make a connection that reads the snapshot."""
        while self._leader is not None:
            snapshot = self._snapshot
            connection = Connection(self.address, like=self._leader)
            is_reading = False
            try:
                await connection.open()
                is_reading = await connection.run(_adopt, connection, snapshot)
            finally:
                if not is_reading:
                    await connection.aclose()
            if is_reading:
                return connection
            await self._renew(snapshot)
        raise RuntimeError("the iteration is over")

    async def _renew(self, lost: str) -> None:
        """Take a new snapshot, unless another reader has done so meanwhile."""
        async with self._renewing:
            if self._snapshot != lost or self._leader is None:
                return
            await self._leader.aclose()
            await self._lead()
            _LOG.warning(
                "the snapshot of %s was lost, because the server was restarted or hung "
                "up; reading continues with a new one: rows changed in between may be "
                "read in their new state",
                self.address.label,
            )

    # -- in the connection's thread -----------------------------------------------

    def scan(
        self, connection: Connection, span: Span, last: Key | None, batch_bytes: int
    ) -> Batches:
        """Yield the rows of a range."""
        check, rest = KeyCheck(self.source.key, last), span.since(last)
        connection.fetch(_RANGE, (self._bound(rest.start), self._bound(rest.stop)))
        bound = f"current_setting('aioloader.{{}}')::{self._key_type}"
        sql, parameters = self._statement(rest, bound), self.source.parameters
        with connection.cursor() as cursor:
            if parameters:
                batches = _fetched(cursor, sql, parameters, batch_bytes)
            else:
                batches = _copied(cursor, sql, batch_bytes)
            for batch in batches:
                if batch.num_rows and (new := check.passed(batch)).num_rows:
                    yield as_decimals(new, self._decimals)

    def failures(self, batch: "pa.RecordBatch") -> "dict[int, DatasetError]":
        """Return the rows of a batch that have infinite dates, with their errors."""
        if not self._has_flag:
            return {}
        flags, keys = batch.column(FLAG), batch.column(self.source.key)
        if flags.null_count == len(flags):
            return {}
        return {
            at: infinite_error(
                self.source, keys[at].as_py(), self.names[number], self.address.label
            )
            for at, number in enumerate(flags.to_pylist())
            if number is not None
        }

    def _bound(self, key: Key | None) -> str:
        return "" if key is None else str(key)

    def _plan(self, connection: Connection) -> None:
        source, key = self.source, self.source.key
        with connection.cursor() as cursor:
            sql = source.select("*")
            schema = cursor.adbc_execute_schema(sql, source.parameters or None)
        types = dict(zip(schema.names, _types(connection, schema), strict=True))
        self.names = source.names(schema.names)
        self._key_type = types[key]
        if self._key_type not in _KEYS:
            raise ValueError(
                f"key {key!r} is of type {self._key_type}, which cannot be a key; use "
                f"{', '.join(sorted(_KEYS))}"
            )
        casts = {
            name: self._cast(types[name], schema.field(name).type)
            for name in self._read
        }
        self._check_null(connection)
        if self._key_type in _TEXTS and self._is_loose(connection):
            raise self._collation_error('"C"')
        if self._key_type in POINTS:
            casts[key] = "{}"
            infinite = f"WHERE {self._key} IN ('infinity', '-infinity') LIMIT 1"
            if self._ask(connection, "1", infinite):
                raise ValueError(
                    f"key {key!r} is infinite in some rows; it must not be"
                )
        self._selected = selection(self._read, [*casts.values()])
        # Types read as text (ranges) keep their infinity.
        is_text = {name: cast.startswith("{}::text") for name, cast in casts.items()}
        dated = {n: "" if is_text[n] else types[n] for n in self.names}
        if flag := self._values.flag(dated):
            self._selected += f", {flag} AS {quoted(FLAG)}"
            self._has_flag = True
        is_decimal = self._values.is_decimal
        self._decimals = [name for name in self.names if is_decimal(types[name])]

    def _cast(self, name: str, kind: "pa.DataType") -> str:
        """Return the expression that reads a column of a type."""
        if self._values.is_decimal(name):
            return _EXACT_CASTS[name]
        if name in _CASTS:
            return _CASTS[name]
        if hasattr(kind, "vendor_name"):
            return "{}::text"
        if hasattr(getattr(kind, "value_type", None), "vendor_name"):
            return "{}::text[]"
        return finite(name) or "{}"

    def _is_loose(self, connection: Connection) -> bool:
        """Return whether the key's collation equates different texts."""
        named = f"pg_collation_for(max({self._key}))"
        sql = _LOOSE.format(key=self.source.select(named, "WHERE false"))
        return bool(connection.fetch(sql, self.source.parameters))

    def _cuts(self, connection: Connection, partitions: int) -> list[Key]:
        """Return the quantiles of the key.

        In a table, some hundred pages are sampled; in a view or query, all keys are
        read.
        """
        sample = ""
        if not self.source.is_query:
            found = connection.fetch(_SIZE, (self.source.table(),)) or [("v", 0)]
            ((kind, size),) = found
            if kind in {"r", "m", "p"}:
                share = min(100.0, 100.0 * _PAGES * _PAGE_BYTES / max(1, size or 0))
                sample = f"TABLESAMPLE SYSTEM ({share:.6f}) REPEATABLE (0)"
        # Slightly more, to get the first key of a part, not the last of the one before.
        shares = [f"{n / partitions + 1e-9:.12f}" for n in range(1, partitions)]
        quantiles = (
            f"percentile_disc(ARRAY[{', '.join(shares)}]::float8[]) "
            f"WITHIN GROUP (ORDER BY {self._key})"
        )
        ((cuts,),) = self._ask(connection, f"({quantiles})::text[]", sample)
        is_integer = self._key_type.startswith("int")
        return [int(cut) if is_integer else cut for cut in dict.fromkeys(cuts or ())]


def _export(connection: Connection) -> str:
    """Export a snapshot, and return its name."""
    connection.execute(_BEGIN)
    connection.fetch(_SETTINGS)
    ((name,),) = connection.fetch("SELECT pg_export_snapshot()")
    return str(name)


def _adopt(connection: Connection, snapshot: str) -> bool:
    """Adopt a snapshot; return whether it still exists."""
    connection.execute(_BEGIN)
    try:
        connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    except Exception as exc:
        # 42704 since about version 17; before, the name was called invalid.
        if sqlstate_of(exc) in {"42704", "22023"}:
            return False
        raise
    connection.fetch(_SETTINGS)
    return True


def _types(connection: Connection, schema: "pa.Schema") -> list[str]:
    """Return PostgreSQL's names of the columns' types."""
    said = [(field.metadata or {})[b"POSTGRESQL:type"].decode() for field in schema]
    # The driver knows types of extensions only by number.
    names: dict[str, str] = {}
    for name in {name for name in said if name.startswith("unnamed<oid:")}:
        number = name.removeprefix("unnamed<oid:").rstrip(">")
        names[name] = connection.fetch(_TYPE, (number,))[0][0]
    return [names.get(name, name) for name in said]


def _copied(cursor: Any, sql: str, batch_bytes: int) -> Batches:
    size = {"adbc.postgresql.batch_size_hint_bytes": str(batch_bytes)}
    cursor.adbc_statement.set_options(**size)
    cursor.execute(sql)
    yield from cursor.fetch_record_batch()


def _fetched(
    cursor: Any, sql: str, parameters: Sequence[Any], batch_bytes: int
) -> Batches:
    cursor.execute(f"DECLARE aioloader NO SCROLL CURSOR FOR {sql}", parameters)
    cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
    count = 1
    while True:
        cursor.execute(f"FETCH FORWARD {count} FROM aioloader")
        table = cursor.fetch_arrow_table().combine_chunks()
        if not table.num_rows:
            break
        yield from table.to_batches()
        row_bytes = max(1, table.nbytes // table.num_rows)
        count = min(batch_bytes // row_bytes, _GROWTH * count, _MOST_FETCHED)
        count = max(1, count)
    cursor.execute("CLOSE aioloader")
