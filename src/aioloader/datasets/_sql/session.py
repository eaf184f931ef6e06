"""One iteration over a table or query: a snapshot, and the readers of its ranges.

What both kinds of databases share; ``sqlite`` and ``postgres`` say how each connects,
finds types, cuts the key and reads a range. A key is a number, or its text as the
database reads it; bytes are hexadecimal.
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
# Seconds for a call of SQLite to end.
_PATIENCE = 1.0
T = TypeVar("T")
Key: TypeAlias = int | str
# The keys of some rows, and the rows.
Scan: TypeAlias = "Generator[tuple[pa.Array, Block], None, None]"

# Bounds of a batch's bytes, and most of its rows. Their number grows so fast from batch
# to batch, because later rows may be larger.
_SMALLEST, _LARGEST = 1 << 16, 1 << 22
_MOST = 1 << 16
GROWTH = 8


def driver_of(address: DatabaseURL) -> Any:
    name = "adbc_driver_sqlite" if address.is_sqlite else "adbc_driver_postgresql"
    imported("pyarrow.compute", "sql", "databases need ADBC")
    return imported(f"{name}.dbapi", "sql", "databases need ADBC")


class Connection(CpuThread):
    """A connection of ADBC, opened by its first call, and the one thread that uses it.

    ADBC's objects belong to one thread at a time, and in the main thread its calls take
    over Ctrl-C. A query that cannot be stopped does not keep the process from ending.
    ``cursor``, ``fetch`` and ``batches`` are for functions that run in the thread.

    ``like`` is an open connection to the same database, whose driver state is shared:
    PostgreSQL's driver reads all types, which takes ten times as long as connecting.
    """

    def __init__(self, address: DatabaseURL, like: "Connection | None" = None) -> None:
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
    await finish_despite_cancel(asyncio.gather(*(one.aclose() for one in connections)))


class KeyRange(NamedTuple):
    """The keys from ``start`` on and before ``stop``; None: no bound."""

    start: Key | None = None
    stop: Key | None = None

    def bounds(self) -> list[tuple[str, str, Key]]:
        both = (("start", ">=", self.start), ("stop", "<", self.stop))
        return [(name, sign, key) for name, sign, key in both if key is not None]

    def since(self, key: Key | None) -> "KeyRange":
        return self if key is None else KeyRange(key, self.stop)


class Session(abc.ABC):
    address: DatabaseURL
    relation: Relation
    deadline: float
    _sign: str  # of a numbered parameter

    def __init__(
        self, address: DatabaseURL, relation: Relation, deadline: float
    ) -> None:
        self.address, self.relation, self.deadline = address, relation, deadline
        self.names: Sequence[str] = ()  # the columns to deliver
        self._key = relation.key_column
        self._key_type = ""  # as in SQL
        self._selected = ""  # the list after SELECT

    @abc.abstractmethod
    async def begin(self, partitions: int | Sequence[Key]) -> list[KeyRange]:
        """Take a snapshot, and divide it; a ValueError if key or columns are wrong."""

    @abc.abstractmethod
    async def join(self) -> Connection:
        """Return a connection that reads the snapshot; a new one if it is lost."""

    @abc.abstractmethod
    async def leave(self, connection: Connection, *, is_sound: bool) -> None:
        """Return a connection; if ``is_sound``, its scan has ended."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    # -- in the connection's thread -----------------------------------------------

    @abc.abstractmethod
    def scan(
        self, connection: Connection, span: KeyRange, last: Key | None, batch_bytes: int
    ) -> Scan:
        """Yield the rows of a range, in order, after the last key that was read."""

    @abc.abstractmethod
    def _plan(self, connection: Connection) -> None:
        """Find the columns and their types, and check the key."""

    @abc.abstractmethod
    def _cuts(self, connection: Connection, partitions: int) -> list[Key]:
        """Return keys that cut the relation into parts with about equally many rows."""

    @abc.abstractmethod
    def _bound(self, key: Key) -> Any:
        """Return a key as a parameter."""

    def _divided(
        self, connection: Connection, partitions: int | Sequence[Key]
    ) -> list[KeyRange]:
        self._plan(connection)
        if isinstance(partitions, int):
            cuts = self._cuts(connection, partitions) if partitions > 1 else []
        else:
            cuts = self._risen(connection, partitions)
        return [KeyRange(*pair) for pair in pairwise([None, *cuts, None])]

    def _risen(self, connection: Connection, cuts: Sequence[Key]) -> list[Key]:
        # An empty part with the key itself provides its collation.
        nothing = self.relation.select(f"{self._key} AS k, 0 AS n", "WHERE 1 = 0")
        given = [
            f"SELECT CAST({self._sign}{n} AS {self._key_type}), {n}"
            for n, _ in enumerate(cuts, len(self.relation.parameters) + 1)
        ]
        bounds = " UNION ALL ".join((nothing, *given))
        pairs = select("k, lag(k) OVER (ORDER BY n) AS before", f"({bounds}) AS b")
        falls = select("count(*)", f"({pairs}) AS c", "WHERE k <= before")
        parameters = (*self.relation.parameters, *map(self._bound, cuts))
        if connection.fetch(falls, parameters) == [(0,)]:
            return list(cuts)
        raise ValueError("bounds in partitions must rise, in the order of the database")

    @property
    def _read(self) -> Sequence[str]:  # the columns to deliver, and the key
        has_key = self.relation.key in self.names
        return self.names if has_key else (*self.names, self.relation.key)

    def _ask(
        self, connection: Connection, what: str, more: str = "", *values: Any
    ) -> Any:
        """Return the first row of a SELECT from the relation; None: there is none."""
        sql = self.relation.select(what, more)
        rows = connection.fetch(sql, (*self.relation.parameters, *values))
        return rows[0] if rows else None

    def _refuse_keys(self, connection: Connection, rule: str, what: str) -> None:
        if self._ask(connection, "1", f"WHERE {self._key} {rule} LIMIT 1"):
            raise self.relation.key_error(what)

    def _refuse_collation(self, exact: str) -> None:
        # The order of equal texts is arbitrary: reading could not resume between them.
        name = self.relation.key
        raise ValueError(
            f"the collation of key {name!r} equates different texts; make a key in a "
            f"query: SELECT {name} COLLATE {exact} AS id, ..."
        )

    def _statement(self, span: KeyRange, bound: str) -> str:
        """Return the query for a range; a bound is an expression, ``{}`` its name."""
        bounds = [
            f"{self._key} {sign} {bound.format(name)}"
            for name, sign, _ in span.bounds()
        ]
        where = f"WHERE {' AND '.join(bounds)}" if bounds else ""
        return self.relation.select(self._selected, where, "ORDER BY", self._key)

    def _fresh(
        self, batch: "pa.RecordBatch", last: Key | None, *, is_again: bool
    ) -> "tuple[pa.Array, Block] | None":
        """Return the keys and rows of a batch after the ``last`` key; None if none is.

        A ValueError if a key comes twice. If ``is_again``, the query started at the
        last key, whose row, unless it was deleted, is dropped. Whole columns are
        compared: about a nanosecond per row.
        """
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        if not batch.num_rows:
            return None
        keys = batch.column(self.relation.key)
        is_last = encoded(keys[0].as_py()) == last
        plain = getattr(keys, "storage", keys)  # of an extension type, such as UUIDs
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
        found = new.column(self.relation.key), self._rows(new)
        return found if new.num_rows else None

    def _rows(self, batch: "pa.RecordBatch") -> Block:
        from aioloader.datasets._arrow.rows import Rows  # noqa: PLC0415  (needs pyarrow)

        return Rows(batch.select(list(self.names)))


class SQLReader(BlockReader):
    """Reads one range a batch ahead, across lost connections, after the ``last`` key.

    A batch is read in a connection's thread while the previous one is consumed; it is
    a quarter of the budget, but at least 64 KiB. The mark of a block is the column of
    its keys.
    """

    is_ahead = True

    def __init__(
        self, session: Session, span: KeyRange | None, last: Key | None, budget: int
    ) -> None:
        super().__init__(session.address.label, None)
        self.is_over: bool = span is None
        self._session = session
        self._span = span or KeyRange()
        self._batch_bytes = max(_SMALLEST, min(budget // 4, _LARGEST))
        self._start = self._last_read = last
        self._pulled = 0  # rows of the last pull
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
        """Read a batch; what waiting cannot cure ends the range."""
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
            found = await connection.run(next, scan, None)
        except Exception as exc:
            is_lost = await connection.is_lost()
            await self.release()
            if is_lost:
                raise LostError(exc) from None
            raise
        if found is None:
            self.is_over = True
            await self.release(is_sound=True)
            return []
        self._last_read = encoded(found[0][-1].as_py())
        return [found]

    async def release(self, *, is_sound: bool = False) -> None:
        """Return the connection; if ``is_sound``, its scan has ended."""
        opened, self._open = self._open, None
        if opened is not None:
            connection, scan = opened
            connection.post(scan.close)
            await self._session.leave(connection, is_sound=is_sound)


def encoded(value: Any) -> Key:
    """Return a key's value as encoded in a state and passed to the database."""
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
    """Return how many rows of a size make a batch."""
    return max(1, min(int(batch_bytes / max(1.0, row_bytes)), _MOST))
