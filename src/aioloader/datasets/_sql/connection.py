"""A connection of ADBC, with the one thread that uses it.

ADBC's objects belong to one thread at a time, and in the main thread its calls take
over Ctrl-C. So every call runs in the connection's thread, in order.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from aioloader.datasets._stores.outlast import outlast

if TYPE_CHECKING:
    from types import ModuleType

    from aioloader.datasets._sql.address import Address

_LOG = logging.getLogger("aioloader")
# Seconds for a call of SQLite to end.
_PATIENCE = 1.0
P = ParamSpec("P")
T = TypeVar("T")


def driver_of(address: "Address") -> "ModuleType":
    """Import the driver for an address.

    Raises:
        ImportError: If it is not installed.
    """
    name = "adbc_driver_sqlite" if address.is_sqlite else "adbc_driver_postgresql"
    try:
        import_module("pyarrow.compute")
        return import_module(f"{name}.dbapi")
    except ImportError as exc:
        raise ImportError('databases need ADBC: pip install "aioloader[sql]"') from exc


class Connection:
    """A connection and its thread.

    The thread is a daemon: a query that cannot be stopped must not keep the process
    from ending. ``cursor``, ``execute`` and ``fetch`` are for functions that run in it.

    Args:
        address: The database's address.
        like: An open connection to the same database, whose driver state is shared:
            PostgreSQL's driver reads all types, which takes ten times as long as
            connecting.
    """

    def __init__(self, address: "Address", like: "Connection | None" = None) -> None:
        self._address = address
        self._like = like
        self._adbc: Any = None  # of adbc_driver_manager.dbapi
        self._is_closed = False
        self._lock = threading.Lock()  # another thread may clone it
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._thread = threading.Thread(
            target=self._serve, name="aioloader-sql", daemon=True
        )
        self._thread.start()

    async def open(self) -> None:
        """Connect."""
        await self.run(self._connect)

    async def run(
        self, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Return the result of a function, called in the thread after earlier ones."""
        return await asyncio.wrap_future(self.post(lambda: function(*args, **options)))

    def post(self, call: Callable[[], T]) -> "Future[T]":
        """Call a function in the thread after earlier ones, without waiting."""
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put((future, call))
        return future

    async def aclose(self) -> None:
        """Stop the running call, disconnect, and join the thread.

        A query of SQLite that cannot be stopped runs on in its thread, which then
        disconnects; the process may end before.
        """
        try:
            if self._pending:
                await asyncio.to_thread(self._interrupt)
        finally:
            self.post(self._close)
            self._calls.put(None)
            patience = _PATIENCE if self._address.is_sqlite else None
            await asyncio.to_thread(self._thread.join, patience)
        if self._thread.is_alive():
            _LOG.warning(
                "a query of %r runs on in its thread after the iteration ended: "
                "SQLite's driver (ADBC) cannot interrupt it; an index on the key, "
                "or a table of the query's rows, makes it short",
                self._address.label,
            )

    # -- in the thread ------------------------------------------------------------

    def cursor(self) -> Any:
        """Return a new cursor, a context manager."""
        return self._adbc.cursor()

    def execute(self, sql: str, parameters: Any = ()) -> None:
        """Run a statement that returns no rows."""
        with self.cursor() as cursor:
            cursor.execute(sql, parameters or None)

    def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Return the rows of a small result."""
        with self.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            rows: list[Any] = cursor.fetchall()
            return rows

    def _serve(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  (raised where it waits)
                    future.set_exception(error)
            del waiting, future, call  # nothing is kept until the next call

    def _connect(self) -> None:
        driver, address = driver_of(self._address), self._address
        like, self._like = self._like, None
        self._adbc = None if like is None else like.cloned()
        if self._adbc is None:
            where = address.for_sqlite() if address.is_sqlite else address.for_libpq()
            self._adbc = driver.connect(where, autocommit=True)

    def cloned(self) -> Any:
        """Return another connection of ADBC to the database; None if this is closed."""
        with self._lock:
            if self._is_closed or self._adbc is None:
                return None
            clone = self._adbc.adbc_clone()
            clone.adbc_connection.set_autocommit(True)
            return clone

    def _interrupt(self) -> None:
        # The call may have ended or not started; or the driver, SQLite's, cannot.
        with contextlib.suppress(Exception):
            self._adbc.adbc_cancel()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._adbc is not None:
                self._adbc.close()


async def close_all(connections: Iterable[Connection]) -> None:
    """Close connections in parallel; all of them, even if cancelled."""
    await outlast(asyncio.gather(*(one.aclose() for one in connections)))
