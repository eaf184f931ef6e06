"""SQLite: a few connections that read one snapshot of a file, in batches.

Each has a read transaction, begun before anything is read and seen to have begun with
no commit in between. In WAL mode writers go on meanwhile; without it they wait until
the iteration ends. Types are those that rows have: the driver takes them from the
first rows of a batch, and here they must be those of the very first rows.
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

# Readers beyond share connections: two cores are busy with two.
_CONNECTIONS = 4
_TRIES = 20
_FEWEST, _MOST = 16, 1 << 16
# A writer without WAL locks readers out for the moment of its commit.
_LOCK_WAIT = "PRAGMA busy_timeout = 5000"


class SQLite:
    """One iteration over a source in a file of SQLite.

    Args:
        address: Where the file is.
        source: What is read.
    """

    def __init__(self, address: "Address", source: "Source") -> None:
        self.address = address
        self.source = source
        self._links: list[Link] = []
        self._users: dict[Link, int] = {}
        self._plan: Plan | None = None

    async def begin(self, partitions: int | Sequence[Key]) -> list[Span]:
        """Take a snapshot, and divide the source as it is there."""
        wanted = partitions if isinstance(partitions, int) else len(partitions) + 1
        self._links = [Link(self.address) for _ in range(min(wanted, _CONNECTIONS))]
        for link in self._links:
            await link.open()
            await link.run(execute, _LOCK_WAIT)
        await self._take_snapshot()
        self._users = dict.fromkeys(self._links, 0)
        first = self._links[0]
        self._plan = await first.run(planned, self.source)
        return await first.run(divided, self.source, self._plan, partitions)

    async def join(self) -> Link:
        """Return the connection that has the fewest users.

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
        is_sound: bool,  # noqa: ARG002  (it stays)
    ) -> None:
        """Stop a scan, and give its connection back."""
        self._users[link] -= 1
        if batches is not None:
            await link.run(close_scan, batches)

    async def is_lost(self, link: Link) -> bool:  # noqa: ARG002  (none can be)
        """Tell that a file is no server that may come back."""
        return False

    def scan(
        self, connection: Connection, span: Span, last: Key | None, batch_bytes: int
    ) -> Batches:
        """Yield the rows of a range; in the connection's thread.

        Args:
            connection: One that ``join`` gave.
            span: The range.
            last: Key of the last row that was read; None: begin at the beginning.
            batch_bytes: Size of a batch, about.
        """
        plan = self._plan
        assert plan is not None
        check = KeyCheck(self.source.key, last)
        row_bytes = plan.row_bytes
        while True:
            start = span.start if check.last is None else check.last
            statement = _statement(self.source, plan, start, span.stop)
            count = max(_FEWEST, min(batch_bytes // row_bytes, _MOST))
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
                            break
                    else:
                        return
                except OSError as exc:
                    # Its guess of a type held for a while: let it guess anew here.
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
        """Begin all transactions at one state of the file.

        Where commits come too thick for that, one connection is left, for all readers.
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


def _start(connection: Connection) -> None:
    """Begin a transaction; its snapshot is taken by the first read."""
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
    """Tell whether batches of ``rows`` have about the size wanted."""
    size = rows * row_bytes
    return (size <= 2 * batch_bytes or rows == _FEWEST) and (
        8 * size >= batch_bytes or rows == _MOST
    )
