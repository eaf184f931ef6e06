"""A connection of ADBC, with the one thread that uses it.

ADBC's objects belong to one thread at a time, and in the main thread its calls take
over Ctrl-C. So every call runs in the connection's thread, in order.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aioloader._base.cpu_threads import CpuThread, Job
from aioloader._base.extras import imported
from aioloader._base.outlast import in_thread, outlast
from aioloader.datasets._sql.address import sqlstate_of

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._sql.address import Address

_LOG = logging.getLogger("aioloader")
# Seconds for a call of SQLite to end.
_PATIENCE = 1.0
T = TypeVar("T")


def driver_of(address: "Address") -> Any:
    """Import the driver for an address; an ImportError says how to install it."""
    name = "adbc_driver_sqlite" if address.is_sqlite else "adbc_driver_postgresql"
    imported("pyarrow.compute", "sql", "databases need ADBC")
    return imported(f"{name}.dbapi", "sql", "databases need ADBC")


class Connection(CpuThread):
    """A connection, opened by its first call, and its thread.

    A query that cannot be stopped does not keep the process from ending. ``cursor``,
    ``fetch`` and ``batches`` are for functions that run in the thread.

    ``like`` is an open connection to the same database, whose driver state is shared:
    PostgreSQL's driver reads all types, which takes ten times as long as connecting.
    """

    def __init__(self, address: "Address", like: "Connection | None" = None) -> None:
        super().__init__("aioloader-sql")
        self._address = address
        self._like = like
        self._adbc: Any = None  # of adbc_driver_manager.dbapi
        self._is_closed = False
        self._cloning = threading.Lock()  # another thread may clone it
        self._pending: list[Job] = []

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a function, called in the thread after earlier ones."""
        return await in_thread(function, *args, executor=self, abandon_on_cancel=True)

    def post(self, job: Job) -> bool:
        self._pending.append(job)
        return super().post(partial(self._do, job))

    def _do(self, job: Job) -> None:
        with contextlib.suppress(Exception):  # of closing what has been lost
            job()
        self._pending.remove(job)

    async def is_lost(self) -> bool:
        """Return whether the server hung up, after a failure; a file never does."""
        if not self._address.is_sqlite:
            try:
                await self.run(self.fetch, "SELECT 1")
            except Exception as exc:  # noqa: BLE001  (the question is whether it does)
                return not sqlstate_of(exc)
        return False

    async def aclose(self) -> None:
        """Stop the running call, disconnect, and join the thread, even if cancelled.

        A query of SQLite that cannot be stopped runs on in its thread, which then
        disconnects; the process may end before.
        """
        await in_thread(self._end)

    def _end(self) -> None:
        if self._pending:
            # The call may have ended or not started; or the driver, SQLite's, cannot.
            with contextlib.suppress(Exception):
                self._adbc.adbc_cancel()
        self.stop(self._close)
        self.join(_PATIENCE if self._address.is_sqlite else None)
        if self.is_alive():
            _LOG.warning(
                "a query of %r runs on in its thread after the iteration ended: "
                "SQLite's driver (ADBC) cannot interrupt it; an index on the key, "
                "or a table of the query's rows, makes it short",
                self._address.label,
            )

    # -- in the thread ------------------------------------------------------------

    def cursor(self) -> Any:
        """Return a new cursor, a context manager."""
        if self._adbc is None:
            self._connect()
        return self._adbc.cursor()

    def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Return the rows of a small result."""
        with self.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            rows: list[Any] = cursor.fetchall()
            return rows

    def batches(
        self, sql: str, parameters: Any, options: Mapping[str, str]
    ) -> "Generator[pa.RecordBatch, None, None]":
        """Yield the rows of a result in columns, read with options of the driver."""
        with self.cursor() as cursor:
            cursor.adbc_statement.set_options(**options)
            cursor.execute(sql, parameters or None)
            yield from cursor.fetch_record_batch()

    def _connect(self) -> None:
        like, self._like = self._like, None
        self._adbc = None if like is None else like.cloned()
        if self._adbc is None:
            where = self._address.for_driver()
            self._adbc = driver_of(self._address).connect(where, autocommit=True)

    def cloned(self) -> Any:
        """Return another connection of ADBC to the database; None if this is closed."""
        with self._cloning:
            if self._is_closed or self._adbc is None:
                return None
            clone = self._adbc.adbc_clone()
            clone.adbc_connection.set_autocommit(True)
            return clone

    def _close(self) -> None:
        with self._cloning:
            self._is_closed = True
            if self._adbc is not None:
                with contextlib.suppress(Exception):  # it may have been lost
                    self._adbc.close()


async def close_all(connections: Iterable[Connection]) -> None:
    """Close connections in parallel; all of them, even if cancelled."""
    await outlast(asyncio.gather(*(one.aclose() for one in connections)))
