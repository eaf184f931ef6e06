"""Connections of ADBC, each with the one thread that uses it.

ADBC's objects belong to one thread at a time, and in the main thread its calls take
over Ctrl-C. So every call runs in the connection's thread, in order.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from aioloader.datasets._stores.outlast import outlast

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow as pa

    from aioloader.datasets._sql.address import Address

_LOG = logging.getLogger("aioloader")
# Seconds for a call of SQLite to end.
_PATIENCE = 1.0
Connection: TypeAlias = Any  # of adbc_driver_manager.dbapi
Batches: TypeAlias = "Generator[pa.RecordBatch, None, None]"
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


class _Calls:
    """Makes calls in one thread, in order.

    It is a daemon, unlike an executor's: a query that cannot be stopped must not keep
    the process from ending.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Make a call after the others."""
        if self._thread is None:
            name = "aioloader-sql"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._waiting.put((future, call))
        return future

    def end(self) -> None:
        """End the thread after the calls."""
        self._waiting.put(None)

    def join(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  (raised where it waits)
                    future.set_exception(error)
            del waiting, future, call  # nothing is kept until the next call


class Link:
    """A connection and its thread.

    Args:
        address: The database's address.
        like: An open connection to the same database, whose driver state is shared:
            PostgreSQL's driver reads all types, which takes ten times as long as
            connecting.
    """

    def __init__(self, address: "Address", like: "Link | None" = None) -> None:
        self._address = address
        self._like = like
        self._calls = _Calls()
        self._connection: Connection = None
        self._works: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    async def open(self) -> None:
        """Connect."""
        await self._submit(self._connect)

    async def run(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Return ``function(connection, ...)``, called in the thread."""
        return await self._submit(lambda: function(self._connection, *args, **options))

    def post(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> None:
        """Call ``function(connection, ...)`` in the thread, without waiting."""
        self._calls.submit(lambda: function(self._connection, *args, **options))

    async def interrupt(self) -> None:
        """Stop the running call; SQLite's driver cannot."""
        if self._works:
            await asyncio.to_thread(self._interrupt)

    async def aclose(self) -> None:
        """Stop the running call, disconnect, and join the thread.

        A query of SQLite that cannot be stopped runs on in its thread, which then
        disconnects; the process may end before.
        """
        try:
            await self.interrupt()
        finally:
            closing = self._calls.submit(self._close)
            self._calls.end()
            if self._address.is_sqlite:
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_PATIENCE)
            if closing.done() or not self._address.is_sqlite:
                await asyncio.to_thread(self._calls.join)
            else:
                _LOG.warning(
                    "a query of %r runs on in its thread after the iteration ended: "
                    "SQLite's driver (ADBC) cannot interrupt it; an index on the key, "
                    "or a table of the query's rows, makes it short",
                    self._address.label,
                )

    async def _submit(self, call: Callable[[], T]) -> T:
        work = self._calls.submit(call)
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        return await asyncio.wrap_future(work)

    def _connect(self) -> None:
        driver, address = driver_of(self._address), self._address
        like, self._like = self._like, None
        if like is not None and (clone := like.cloned()) is not None:
            self._connection = clone
        elif address.is_sqlite:
            self._connection = driver.connect(address.for_sqlite(), autocommit=True)
        else:
            self._connection = driver.connect(address.for_libpq(), autocommit=True)

    def cloned(self) -> Connection:
        """Return another connection to the database; None if this one is closed."""
        with self._lock:  # closed by another thread
            if self._is_closed or self._connection is None:
                return None
            clone = self._connection.adbc_clone()
            clone.adbc_connection.set_autocommit(True)
            return clone

    def _interrupt(self) -> None:
        # The call may have ended or not started; or the driver cannot.
        with contextlib.suppress(Exception):
            self._connection.adbc_cancel()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()


async def close_all(links: Iterable[Link]) -> None:
    """Close connections in parallel; all of them, even if cancelled."""
    await outlast(asyncio.gather(*(link.aclose() for link in links)))


def execute(connection: Connection, sql: str, parameters: Any = ()) -> None:
    """Run a statement that returns no rows."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)


def fetch(connection: Connection, sql: str, parameters: Any = ()) -> list[Any]:
    """Return the rows of a small result."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        rows: list[Any] = cursor.fetchall()
        return rows


def close_scan(_connection: Connection, batches: "Batches") -> None:
    """Close a generator of batches, and with it its statement."""
    batches.close()
