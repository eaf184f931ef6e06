"""SQLite: a few connections that read one snapshot of a file, in batches.

Each holds a read transaction, started before any read, and checked to have started with
no commit in between. In WAL mode writers continue meanwhile; without it they wait until
the iteration ends. Types are those of the rows: the driver takes them from the first
rows of a batch, and they must match those of the very first rows.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from aioloader.datasets._sql.source import column, select
from aioloader.datasets._sql.sqlite_plan import Plan, conformed, divided, planned

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._sql.address import Address
    from aioloader.datasets._sql.source import Source
    from aioloader.errors import DatasetError

# More readers share connections: two keep two cores busy.
_CONNECTIONS = 4
_TRIES = 20
_MOST = 1 << 16
# Batches start with one row, and grow so fast: later rows may be larger.
_GROWTH = 8
# Without WAL, a writer locks readers out during its commit.
_LOCK_WAIT = "PRAGMA busy_timeout = 5000"


class SQLite:
    """One iteration over a source in an SQLite file.

    Args:
        address: The file's address.
        source: The table or query.
    """

    def __init__(self, address: "Address", source: "Source") -> None:
        self.address = address
        self.source = source
        self._links: list[Link] = []
        self._users: dict[Link, int] = {}
        self._plan: Plan | None = None

    async def begin(self, partitions: int | Sequence[Key]) -> list[Span]:
        """Take a snapshot, and divide the source in it."""
        wanted = partitions if isinstance(partitions, int) else len(partitions) + 1
        self._links = [Link(self.address) for _ in range(min(wanted, _CONNECTIONS))]
        for link in self._links:
            await link.open()
            await link.run(execute, _LOCK_WAIT)
        await self._take_snapshot()
        await self._links[0].run(_check_pages, self.address)
        self._users = dict.fromkeys(self._links, 0)
        first = self._links[0]
        self._plan = await first.run(planned, self.source)
        return await first.run(divided, self.source, self._plan, partitions)

    async def join(self) -> Link:
        """Return the connection with the fewest users.

        Raises:
            RuntimeError: If the iteration is over.
        """
        if not self._links:
            raise RuntimeError("the iteration is over")
        link = min(self._users, key=self._users.__getitem__)
        self._users[link] += 1
        return link

    async def leave(
        self,
        link: Link,
        batches: "Batches | None",
        *,
        is_sound: bool,
    ) -> None:
        """Stop a scan, and give its connection back; a query may run on there."""
        self._users[link] -= 1
        if batches is not None and is_sound:
            await link.run(close_scan, batches)
        elif batches is not None:
            link.post(close_scan, batches)

    async def is_lost(self, link: Link) -> bool:  # noqa: ARG002  (none can be)
        """Return False: a file has no connection to lose."""
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
        # A query that sorts its rows starts with what the first rows suggest.
        count = batch_bytes // plan.row_bytes if plan.sorts else 1
        while True:
            start = span.start if check.last is None else check.last
            statement = _statement(self.source, plan, start, span.stop)
            count = max(1, min(count, _MOST))
            batches = _batches(connection, statement, count)
            with contextlib.closing(batches):
                before = check.last
                try:
                    for batch in batches:
                        new = check.passed(conformed(plan, batch))
                        if new.num_rows:
                            yield new
                        row_bytes = max(1, batch.nbytes // batch.num_rows)
                        if not _fits(count, row_bytes, batch_bytes):
                            most = _MOST if plan.sorts else _GROWTH * count
                            count = min(batch_bytes // row_bytes, most)
                            break
                    else:
                        return
                except OSError as exc:
                    # The guessed type ended here: let the driver guess again.
                    if "Type mismatch" not in str(exc) or check.last == before:
                        raise
            check.restart()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to deliver."""
        assert self._plan is not None
        return self._plan.names

    def failures(
        self,
        batch: "pa.RecordBatch",  # noqa: ARG002  (none can be)
    ) -> "dict[int, DatasetError]":
        """Return the rows of a batch that cannot be read, with their errors."""
        return {}

    async def aclose(self) -> None:
        """Disconnect."""
        links, self._links = self._links, []
        await close_all(links)

    async def _take_snapshot(self) -> None:
        """Start all transactions in one state of the file.

        If commits are too frequent for that, all readers share one connection.
        """
        witness = Link(self.address)
        try:
            await witness.open()
            for _ in range(_TRIES):
                version = await witness.run(fetch, "PRAGMA data_version")
                await asyncio.gather(*(link.run(_start) for link in self._links))
                if await witness.run(fetch, "PRAGMA data_version") == version:
                    return
                for link in self._links:
                    await link.run(execute, "ROLLBACK")
        finally:
            await witness.aclose()
        only, *others = self._links
        self._links = [only]
        await only.run(_start)
        await close_all(others)


# -- in the connection's thread ---------------------------------------------------


def _check_pages(connection: Connection, address: "Address") -> None:
    ((page,),) = fetch(connection, "PRAGMA page_size")
    address.check_pages(page)


def _start(connection: Connection) -> None:
    """Start a transaction; the first read takes its snapshot."""
    execute(connection, "BEGIN")
    fetch(connection, "SELECT 1 FROM sqlite_master LIMIT 1")


def _statement(
    source: "Source", plan: Plan, start: Key | None, stop: Key | None
) -> tuple[str, tuple[Any, ...]]:
    """Return the query for a range, and its parameters."""
    key = column(source.key)
    bounds = [
        (f"{key} {sign} ?", bound) for sign, bound in ((">=", start), ("<", stop))
    ]
    bounds = [(text, bound) for text, bound in bounds if bound is not None]
    where = f"WHERE {' AND '.join(text for text, _ in bounds)}" if bounds else ""
    sql = select(plan.selected, source.relation(), where, "ORDER BY", key)
    values = [plan.value_of(bound) for _, bound in bounds if bound is not None]
    return sql, (*source.parameters, *values)


def _batches(
    connection: Connection, statement: tuple[str, tuple[Any, ...]], rows: int
) -> Batches:
    sql, parameters = statement
    with connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(rows)})
        cursor.execute(sql, parameters or None)
        yield from cursor.fetch_record_batch()


def _fits(rows: int, row_bytes: int, batch_bytes: int) -> bool:
    """Return whether batches of ``rows`` have about the wanted size."""
    size = rows * row_bytes
    return (size <= 2 * batch_bytes or rows == 1) and (
        8 * size >= batch_bytes or rows == _MOST
    )
