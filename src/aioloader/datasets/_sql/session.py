"""The snapshot, connections and range readers of an iteration over a database.

``sqlite`` and ``postgres`` derive sessions from ``Session``. Sessions take snapshots,
find types, and cut and read ranges. A key is an int or text; bytes become hexadecimal.
"""

import abc
import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from aioloader._base.blocks import Block
from aioloader._base.cancellation import finish_despite_cancel, in_thread
from aioloader._base.cpu_threads import CpuThread, Job
from aioloader._base.extras import imported
from aioloader.datasets._sql.address import (
    DatabaseURL,
    LostError,
    Relation,
    retried,
    select,
    sqlstate_of,
)
from aioloader.datasets._streams.shards import (
    BlockReader,
    PositionedBlocks,
    ShardPosition,
)
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa


_LOG = logging.getLogger("aioloader")
# Seconds to wait for a running SQLite call to end.
_STOP_SECONDS = 1.0
T = TypeVar("T")
Key: TypeAlias = int | str
# Yields (keys, rows) of each batch.
Scan: TypeAlias = "Generator[tuple[pa.Array, Block], None, None]"

_MIN_BATCH, _MAX_BATCH = 1 << 16, 1 << 22  # bytes
_MAX_ROWS = 1 << 16
# A batch has up to 8 times the previous one's rows: later rows may be larger.
GROWTH = 8


def driver_of(address: DatabaseURL) -> Any:
    name = "adbc_driver_sqlite" if address.is_sqlite else "adbc_driver_postgresql"
    imported("pyarrow.compute", "sql", "databases need ADBC")
    return imported(f"{name}.dbapi", "sql", "databases need ADBC")


class Connection(CpuThread):
    """An ADBC connection and its daemon thread; the first call connects.

    Only one thread at a time may use ADBC's objects, and ADBC's calls in the main
    thread would intercept Ctrl-C. Call ``cursor``, ``fetch`` and ``batches`` in the
    connection's thread.

    ``like``: a connection whose driver state is cloned. A new PostgreSQL driver would
    load all types, which takes ten times as long as connecting.
    """

    def __init__(self, address: DatabaseURL, like: "Connection | None" = None) -> None:
        super().__init__("aioloader-sql")
        self._address = address
        self._like = like
        self._adbc: Any = None  # a Connection of adbc_driver_manager.dbapi
        self._is_closed = False
        self._clone_lock = threading.Lock()  # other threads may clone the connection
        self._pending: list[Job] = []

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the connection's thread, in order; return its result."""
        return await in_thread(function, *args, executor=self, abandon_on_cancel=True)

    def post(self, job: Job) -> bool:
        self._pending.append(job)
        return super().post(partial(self._do, job))

    def _do(self, job: Job) -> None:
        with contextlib.suppress(Exception):  # if the connection is lost
            job()
        self._pending.remove(job)

    async def is_lost(self) -> bool:
        """Return, after a failure, whether the connection to the server is lost."""
        if not self._address.is_sqlite:
            try:
                await self.run(self.fetch, "SELECT 1")
            except Exception as exc:  # noqa: BLE001  (only its kind matters)
                return not sqlstate_of(exc)
        return False

    async def aclose(self) -> None:
        """Stop the running call, disconnect, and join the thread, even if cancelled.

        SQLite's driver cannot stop a query: the thread disconnects when the query ends.
        """
        await in_thread(self._end)

    def _end(self) -> None:
        if self._pending:
            # The call may not have started, and SQLite's driver cannot cancel calls.
            with contextlib.suppress(Exception):
                self._adbc.adbc_cancel()
        self.stop(self._close)
        self.join(_STOP_SECONDS if self._address.is_sqlite else None)
        if self.is_alive():
            _LOG.warning(
                "a query of %r runs on in its thread after the iteration ended: "
                "SQLite's driver (ADBC) cannot interrupt it; an index on the key, "
                "or a table of the query's rows, makes it short",
                self._address.label,
            )

    # -- in the thread ------------------------------------------------------------

    def cursor(self) -> Any:
        if self._adbc is None:
            self._connect()
        return self._adbc.cursor()

    def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        with self.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            rows: list[Any] = cursor.fetchall()
            return rows

    def batches(
        self, sql: str, parameters: Any, options: Mapping[str, str]
    ) -> "Generator[pa.RecordBatch, None, None]":
        """Yield a query's record batches; ``options`` are set in the driver."""
        with self.cursor() as cursor:
            cursor.adbc_statement.set_options(**options)
            cursor.execute(sql, parameters or None)
            yield from cursor.fetch_record_batch()

    def _connect(self) -> None:
        like, self._like = self._like, None
        self._adbc = None if like is None else like.clone()
        if self._adbc is None:
            where = self._address.for_driver()
            self._adbc = driver_of(self._address).connect(where, autocommit=True)

    def clone(self) -> Any:
        """Clone the ADBC connection with its driver state; None if it is not open."""
        with self._clone_lock:
            if self._is_closed or self._adbc is None:
                return None
            adbc = self._adbc.adbc_clone()
            adbc.adbc_connection.set_autocommit(True)
            return adbc

    def _close(self) -> None:
        with self._clone_lock:
            self._is_closed = True
            if self._adbc is not None:
                with contextlib.suppress(Exception):  # it may have been lost
                    self._adbc.close()


async def close_all(connections: Iterable[Connection]) -> None:
    """Close all connections in parallel, even if cancelled."""
    closing = [connection.aclose() for connection in connections]
    await finish_despite_cancel(asyncio.gather(*closing))


class KeyRange(NamedTuple):
    """The keys from ``start`` to ``stop`` (exclusive); None means no bound."""

    start: Key | None = None
    stop: Key | None = None

    def bounds(self) -> list[tuple[str, str, Key]]:
        both = (("start", ">=", self.start), ("stop", "<", self.stop))
        return [(name, sign, key) for name, sign, key in both if key is not None]

    def since(self, key: Key | None) -> "KeyRange":
        return self if key is None else KeyRange(key, self.stop)


class Session(abc.ABC):
    """Base class for the snapshot and the connections of one iteration."""

    address: DatabaseURL
    relation: Relation
    deadline: float
    _placeholder: str  # precedes the number of a query parameter

    def __init__(
        self, address: DatabaseURL, relation: Relation, deadline: float
    ) -> None:
        self.address, self.relation, self.deadline = address, relation, deadline
        self.names: Sequence[str] = ()  # columns to deliver
        self._key = relation.key_column
        self._key_type = ""  # the key's type, as the database names it
        self._selected = ""  # the select list

    @abc.abstractmethod
    async def begin(self, partitions: int | Sequence[Key]) -> list[KeyRange]:
        """Take a snapshot, and divide it into ranges; may raise a ValueError."""

    @abc.abstractmethod
    async def join(self) -> Connection:
        """Lend a connection to a reader; take a new snapshot if the old one is lost."""

    @abc.abstractmethod
    async def leave(self, connection: Connection, *, is_sound: bool) -> None:
        """Take back a lent connection; ``is_sound``: its scan has ended normally."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close all connections."""

    # -- in the connection's thread -----------------------------------------------

    @abc.abstractmethod
    def scan(
        self, connection: Connection, span: KeyRange, last: Key | None, batch_bytes: int
    ) -> Scan:
        """Yield (keys, rows) of a range's batches, in order, after the key ``last``."""

    @abc.abstractmethod
    def _plan(self, connection: Connection) -> None:
        """Find the columns and their types, and check the key."""

    @abc.abstractmethod
    def _cuts(self, connection: Connection, partitions: int) -> list[Key]:
        """Return keys that cut the rows into at most ``partitions`` similar ranges."""

    @abc.abstractmethod
    def _key_value(self, key: Key) -> Any:
        """Convert a key to a value that the driver accepts as a parameter."""

    def _divide(
        self, connection: Connection, partitions: int | Sequence[Key]
    ) -> list[KeyRange]:
        self._plan(connection)
        if isinstance(partitions, int):
            cuts = self._cuts(connection, partitions) if partitions > 1 else []
        else:
            cuts = self._checked_cuts(connection, partitions)
        return [KeyRange(*pair) for pair in pairwise([None, *cuts, None])]

    def _checked_cuts(self, connection: Connection, cuts: Sequence[Key]) -> list[Key]:
        # Through the empty SELECT, the comparison uses the key's collation.
        nothing = self.relation.select(f"{self._key} AS k, 0 AS n", "WHERE 1 = 0")
        given = [
            f"SELECT CAST({self._placeholder}{n} AS {self._key_type}), {n}"
            for n, _ in enumerate(cuts, len(self.relation.parameters) + 1)
        ]
        bounds = " UNION ALL ".join((nothing, *given))
        pairs = select("k, lag(k) OVER (ORDER BY n) AS before", f"({bounds}) AS b")
        falls = select("count(*)", f"({pairs}) AS c", "WHERE k <= before")
        parameters = (*self.relation.parameters, *map(self._key_value, cuts))
        if connection.fetch(falls, parameters) == [(0,)]:
            return list(cuts)
        raise ValueError("bounds in partitions must rise, in the order of the database")

    @property
    def _columns(self) -> Sequence[str]:
        """The columns to read, which are the columns to deliver and the key."""
        has_key = self.relation.key in self.names
        return self.names if has_key else (*self.names, self.relation.key)

    def _query_row(
        self, connection: Connection, columns: str, more: str = "", *values: Any
    ) -> Any:
        """Return the first row of a SELECT from the relation, or None."""
        sql = self.relation.select(columns, more)
        rows = connection.fetch(sql, (*self.relation.parameters, *values))
        return rows[0] if rows else None

    def _refuse_keys(
        self, connection: Connection, condition: str, problem: str
    ) -> None:
        if self._query_row(connection, "1", f"WHERE {self._key} {condition} LIMIT 1"):
            raise self.relation.key_error(problem)

    def _refuse_collation(self, exact: str) -> None:
        # Texts that compare equal have no defined order, so reading could not resume.
        name = self.relation.key
        raise ValueError(
            f"the collation of key {name!r} equates different texts; make a key in a "
            f"query: SELECT {name} COLLATE {exact} AS id, ..."
        )

    def _statement(self, span: KeyRange, bound: str) -> str:
        """Return a range's query; in ``bound`` (SQL), ``{}`` becomes start or stop."""
        bounds = [
            f"{self._key} {sign} {bound.format(name)}"
            for name, sign, _ in span.bounds()
        ]
        where = f"WHERE {' AND '.join(bounds)}" if bounds else ""
        return self.relation.select(self._selected, where, "ORDER BY", self._key)

    def _new_rows(
        self, batch: "pa.RecordBatch", last: Key | None, *, is_again: bool
    ) -> "tuple[pa.Array, Block] | None":
        """Return a batch's keys and rows after the key ``last``, or None without rows.

        Raises a ValueError if a key repeats. ``is_again``: the query started at
        ``last``, so a first row with that key was read before, and is dropped.
        """
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        if not batch.num_rows:
            return None
        keys = batch.column(self.relation.key)
        is_last = encoded(keys[0].as_py()) == last
        plain = getattr(keys, "storage", keys)  # UUIDs are an extension type
        twice = compute.index(compute.equal(plain[:-1], plain[1:]), True).as_py()
        if twice < 0 and is_last and not is_again:
            twice = 0
        if twice >= 0:
            key = encoded(keys[twice].as_py())
            raise ValueError(
                f"key {self.relation.key!r} is not unique: {key!r} appears twice; "
                "choose a unique column, or make one in a query"
            )
        new = batch.slice(int(is_last))
        scanned = new.column(self.relation.key), self._rows(new)
        return scanned if new.num_rows else None

    def _rows(self, batch: "pa.RecordBatch") -> Block:
        from aioloader.datasets._arrow.rows import Rows  # noqa: PLC0415  (needs pyarrow)

        return Rows(batch.select(list(self.names)))


class SQLReader(BlockReader):
    """Reads one range after the key ``last``, one batch ahead; reconnects if needed.

    A connection's thread reads a batch while the previous one is consumed. A batch is a
    quarter of the budget, from 64 KiB to 4 MiB. A block's mark is its key column.
    """

    is_ahead = True

    def __init__(
        self, session: Session, span: KeyRange | None, last: Key | None, budget: int
    ) -> None:
        super().__init__(session.address.label, None)
        self.is_over: bool = span is None
        self._session = session
        self._span = span or KeyRange()
        self._batch_bytes = max(_MIN_BATCH, min(budget // 4, _MAX_BATCH))
        self._start = self._last_read = last
        self._pulled = 0  # rows that the latest pull returned
        self._open: tuple[Connection, Scan] | None = None

    def begin(self) -> None:
        self.start()

    async def pull(self, limit: int) -> Block:
        block = await super().pull(limit)
        self._pulled = len(block)
        return block

    def position(self) -> ShardPosition:
        if self.mark is not None:
            return self.positions()(self._pulled)
        return {} if self._start is None else {"key": self._start}

    def positions(self) -> Callable[[int], ShardPosition]:
        keys, before = self.mark, self.taken - self._pulled
        return lambda count: {"key": encoded(keys[before + count - 1].as_py())}

    def is_draining(self) -> bool:
        return self.is_over

    async def make(self) -> PositionedBlocks:
        """Read a batch, with retries; an error that remains ends the range."""
        session, key = self._session, self._session.relation.key
        bounds = [f"{key} {sign} {bound!r}" for _, sign, bound in self._span.bounds()]
        place = " and ".join(bounds) or f"every {key}"
        if self._last_read is not None:
            place += f", after {self._last_read!r}"
        doing = f"read {session.relation.label} ({place})"
        try:
            return await retried(
                self._batch, doing, session.address, session.deadline, warns=True
            )
        except DatasetError as error:
            self._failure, self.is_over = error, True
            return []

    async def _batch(self) -> PositionedBlocks:
        session, last = self._session, self._last_read
        if self._open is None:
            connection = await session.join()
            scan = session.scan(connection, self._span, last, self._batch_bytes)
            self._open = connection, scan
        connection, scan = self._open
        try:
            scanned = await connection.run(next, scan, None)
        except Exception as exc:
            is_lost = await connection.is_lost()
            await self.release()
            if is_lost:
                raise LostError(exc) from None
            raise
        if scanned is None:
            self.is_over = True
            await self.release(is_sound=True)
            return []
        self._last_read = encoded(scanned[0][-1].as_py())
        return [scanned]

    async def release(self, *, is_sound: bool = False) -> None:
        """Return the connection to the session; ``is_sound``: its scan has ended."""
        opened, self._open = self._open, None
        if opened is not None:
            connection, scan = opened
            connection.post(scan.close)
            await self._session.leave(connection, is_sound=is_sound)


def encoded(value: Any) -> Key:
    """Convert a key to the int or text of states and queries; raise if it is NULL."""
    match value:
        case None:
            raise ValueError("it is NULL")
        case int():
            return int(value)
        case bytes():
            return f"\\x{value.hex()}"
        case _:
            return str(value)


def fitting(row_bytes: float, batch_bytes: int) -> int:
    """Return how many rows of ``row_bytes`` make a batch, from 1 to ``_MAX_ROWS``."""
    return max(1, min(int(batch_bytes / max(1.0, row_bytes)), _MAX_ROWS))
