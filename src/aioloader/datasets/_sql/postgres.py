"""PostgreSQL: many connections that read one snapshot, by COPY.

One connection exports its snapshot and keeps it alive; the others adopt it. Rows come
in the order of the key, streamed, in batches of about the requested size. A query with
parameters is read through a server-side cursor, which takes twice the time.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioloader.datasets._sql.failures import reason_of
from aioloader.datasets._sql.keys import Key, KeyCheck, Span
from aioloader.datasets._sql.links import (
    Batches,
    Connection,
    Link,
    close_all,
    close_scan,
    execute,
    fetch,
)
from aioloader.datasets._sql.postgres_plan import Plan, divided, planned
from aioloader.datasets._sql.postgres_values import (
    FLAG,
    Values,
    as_decimals,
    infinite_error,
)
from aioloader.datasets._sql.source import Source, column, select
from aioloader.datasets._stores.outlast import outlast
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._sql.address import Address

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
_RANGE = (
    "SELECT set_config('aioloader.start', $1, true), "
    "set_config('aioloader.stop', $2, true)"
)
# The first fetch is of one row; later ones grow so fast, by the size of the rows seen.
_GROWTH, _MOST_FETCHED = 8, 1 << 16


class Postgres:
    """One iteration over a source in a PostgreSQL server.

    Args:
        address: The server's address.
        source: The table or query.
        values: Conversion of values without an Arrow type.
    """

    def __init__(self, address: "Address", source: Source, values: Values) -> None:
        self.address = address
        self.source = source
        self._values = values
        self._leader: Link | None = None
        self._snapshot = ""
        self._renewing = asyncio.Lock()
        self._first: asyncio.Task[Link] | None = None
        self._idle: list[Link] = []
        self._plan: Plan | None = None

    async def begin(self, partitions: int | Sequence[Key]) -> list[Span]:
        """Take a snapshot, and divide the source in it."""
        leader = self._leader = Link(self.address)
        await leader.open()
        self._snapshot = await leader.run(_lead)
        # The first reader's connection is opened meanwhile: that takes as long.
        self._first = asyncio.create_task(self._new())
        self._plan = await leader.run(planned, self.source, self._values)
        return await leader.run(divided, self.source, self._plan, partitions)

    async def join(self) -> Link:
        """Return a connection that reads the snapshot; a new one if it is lost.

        Raises:
            RuntimeError: If the iteration is over.
        """
        first, self._first = self._first, None
        if first is not None:
            try:
                await asyncio.wait([first])
            except asyncio.CancelledError:
                self._first = first
                raise
            if first.exception() is None:
                return first.result()
        return self._idle.pop() if self._idle else await self._new()

    async def _new(self) -> Link:
        """Make a connection that reads the snapshot."""
        while self._leader is not None:
            snapshot = self._snapshot
            link = Link(self.address, like=self._leader)
            try:
                await link.open()
                if await link.run(_follow, snapshot):
                    return link
            except BaseException:
                await link.aclose()
                raise
            await link.aclose()
            await self._renew(snapshot)
        raise RuntimeError("the iteration is over")

    async def leave(
        self, link: Link, batches: "Batches | None", *, is_sound: bool
    ) -> None:
        """Stop a scan and return its connection; if ``is_sound``, it may be reused."""
        try:
            if not is_sound:
                await link.interrupt()
            if batches is not None:
                await link.run(close_scan, batches)
        finally:
            if is_sound and self._leader is not None:
                self._idle.append(link)
            else:
                await link.aclose()

    async def is_lost(self, link: Link) -> bool:
        """Return whether a connection is lost, after a failure."""
        try:
            await link.run(fetch, "SELECT 1")
        except Exception as exc:  # noqa: BLE001  (the question is whether it does)
            return not reason_of(self.address, exc).sqlstate
        return False

    def scan(
        self, connection: Connection, span: Span, last: Key | None, batch_bytes: int
    ) -> Batches:
        """Yield the rows of a range; in the connection's thread.

        Args:
            connection: Returned by ``join``.
            span: The range.
            last: Key of the last row read; None: start at the beginning.
            batch_bytes: Approximate size of a batch.
        """
        plan = self._plan
        assert plan is not None
        check = KeyCheck(self.source.key, last)
        rest = span if last is None else replace(span, start=last)
        fetch(connection, _RANGE, (_text(rest.start), _text(rest.stop)))
        sql = _statement(self.source, plan, rest)
        with connection.cursor() as cursor:
            if self.source.parameters:
                batches = _fetched(cursor, sql, self.source.parameters, batch_bytes)
            else:
                batches = _copied(cursor, sql, batch_bytes)
            for batch in batches:
                if batch.num_rows and (new := check.passed(batch)).num_rows:
                    yield as_decimals(new, plan.decimals)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to deliver."""
        assert self._plan is not None
        return self._plan.names

    def failures(self, batch: "pa.RecordBatch") -> dict[int, DatasetError]:
        """Return the rows of a batch that have infinite dates, with their errors."""
        plan = self._plan
        assert plan is not None
        if not plan.has_flag:
            return {}
        flags, keys = batch.column(FLAG), batch.column(self.source.key)
        if flags.null_count == len(flags):
            return {}
        return {
            at: infinite_error(
                self.source, keys[at].as_py(), plan.names[number], self.address.label
            )
            for at, number in enumerate(flags.to_pylist())
            if number is not None
        }

    async def aclose(self) -> None:
        """Disconnect."""
        leader, self._leader = self._leader, None
        links, self._idle = self._idle, []
        first, self._first = self._first, None
        links += [] if leader is None else [leader]
        try:
            if first is not None:
                first.cancel()
                found = await outlast(asyncio.gather(first, return_exceptions=True))
                links += [link for link in found if isinstance(link, Link)]
        finally:
            await close_all(links)

    async def _renew(self, lost: str) -> None:
        """Take a new snapshot, unless another reader has done so meanwhile."""
        async with self._renewing:
            if self._snapshot != lost or self._leader is None:
                return
            await self._leader.aclose()
            self._leader = Link(self.address)
            await self._leader.open()
            self._snapshot = await self._leader.run(_lead)
            _LOG.warning(
                "the snapshot of %s was lost, because the server was restarted or hung "
                "up; reading continues with a new one: rows changed in between may be "
                "read in their new state",
                self.address.label,
            )


# -- in the connection's thread ---------------------------------------------------


def _lead(connection: Connection) -> str:
    """Export a snapshot, and return its name."""
    execute(connection, _BEGIN)
    fetch(connection, _SETTINGS)
    ((name,),) = fetch(connection, "SELECT pg_export_snapshot()")
    return str(name)


def _follow(connection: Connection, snapshot: str) -> bool:
    """Adopt a snapshot; return whether it still exists."""
    execute(connection, _BEGIN)
    try:
        execute(connection, f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    except Exception as exc:
        # 42704 since about version 17; before, the name was called invalid.
        if getattr(exc, "sqlstate", "") in {"42704", "22023"}:
            return False
        raise
    fetch(connection, _SETTINGS)
    return True


def _statement(source: Source, plan: Plan, span: Span) -> str:
    """Return the query for a range, whose bounds are settings of the transaction.

    COPY takes no parameters; a setting is bound like one, and is never part of the
    text.
    """
    key = column(source.key)
    bounds = [
        f"{key} {sign} current_setting('aioloader.{name}')::{plan.key_type}"
        for sign, name, bound in (
            (">=", "start", span.start),
            ("<", "stop", span.stop),
        )
        if bound is not None
    ]
    where = f"WHERE {' AND '.join(bounds)}" if bounds else ""
    return select(plan.selected, source.relation(), where, "ORDER BY", key)


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


def _text(key: Key | None) -> str:
    return "" if key is None else str(key)
