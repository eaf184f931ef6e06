"""Rows of a table by key, many with one query; and the list of all keys.

PostgreSQL is queried through a pool of asyncpg, on the event loop; SQLite in threads.
A lookup belongs to one event loop.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from aioloader.datasets._sql.address import Address
from aioloader.datasets._sql.keys import NotUniqueError
from aioloader.datasets._sql.postgres_values import (
    FLAG,
    Values,
    finite,
    infinite_error,
)
from aioloader.datasets._sql.source import Source, column, quoted, select, selection

if TYPE_CHECKING:
    from types import ModuleType

    import asyncpg

Row: TypeAlias = Mapping[str, Any]
Keys: TypeAlias = "np.ndarray[Any, Any] | list[Any]"

# Keys that are decoded in one step of the event loop.
_PAGE = 2000
# Steps of SQLite's virtual machine between two looks at whether to stop.
_STEPS = 10_000
# A row of COPY's binary form with one int8, after a header; two bytes end it.
_COPIED = np.dtype([("fields", ">i2"), ("length", ">i4"), ("key", ">i8")])
_HEADER_BYTES, _TRAILER_BYTES = 19, 2
_FLOATS = {
    "numeric": "{}::float8",
    "money": "{}::numeric::float8",
    "_numeric": "{}::float8[]",
}
# asyncpg reads it as text, in the server's language.
_DECIMALS = {"money": "{}::numeric"}


class Lookup(Protocol):
    """Find rows in one table."""

    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""

    async def find(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Return the rows that exist, by key."""

    async def aclose(self) -> None:
        """Disconnect."""


def import_asyncpg() -> "ModuleType":
    """Import asyncpg, or raise an error that says how to install it.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import asyncpg  # noqa: PLC0415  (an optional dependency)
    except ImportError as exc:
        raise ImportError(
            'SQLRows of PostgreSQL needs asyncpg: pip install "aioloader[sql]"'
        ) from exc
    module: ModuleType = asyncpg
    return module


def _selected(source: Source) -> str:
    """Return the columns to select: the key, then the wanted columns."""
    key = column(source.key)
    if source.columns is None:
        return f"{key}, q.*"
    return ", ".join((key, *map(column, source.columns)))


def _listed(source: Source, key: str) -> str:
    """Return the query for all keys in order."""
    there = f"{column(source.key)} IS NOT NULL"
    return select(
        key, source.relation(), "WHERE", there, "ORDER BY", column(source.key)
    )


class SQLiteLookup:
    """Rows of a file.

    Args:
        address: The file's address.
        source: Its table.
        connections: Number of threads that query at once.
    """

    def __init__(self, address: Address, source: Source, connections: int) -> None:
        self._address = address
        self._source = source
        self._pool = ThreadPoolExecutor(connections, "aioloader-sql")
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = False

    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""
        keys: Keys = await self._run(self._list)
        return keys

    async def find(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Return the rows that exist, by key."""
        found: dict[Any, Row] = await self._run(
            lambda connection: self._find(connection, keys)
        )
        return found

    async def aclose(self) -> None:
        """Interrupt running queries, disconnect, and join the threads."""
        self._is_closed = True
        await asyncio.to_thread(self._close)

    async def _run(self, function: Callable[[sqlite3.Connection], Any]) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._with_idle, function)

    def _with_idle(self, function: Callable[[sqlite3.Connection], Any]) -> Any:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        try:
            return function(connection)
        finally:
            self._idle.append(connection)

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._address.for_sqlite(),
            uri=True,
            isolation_level=None,
            check_same_thread=False,  # one thread at a time; the last closes
        )
        # A query ends within a millisecond after the closing.
        connection.set_progress_handler(lambda: self._is_closed, _STEPS)
        try:
            connection.execute("PRAGMA schema_version")  # is it a database at all?
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            self._address.check_pages(page)
        except BaseException:
            connection.close()
            raise
        return connection

    def _list(self, connection: sqlite3.Connection) -> Keys:
        cursor = connection.execute(_listed(self._source, column(self._source.key)))
        pages = iter(lambda: [row[0] for row in cursor.fetchmany(_PAGE)], [])
        return compact(list(pages))

    def _find(
        self, connection: sqlite3.Connection, keys: Sequence[Any]
    ) -> dict[Any, Row]:
        limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        found: dict[Any, Row] = {}
        for start in range(0, len(keys), limit):
            found.update(self._ask(connection, keys[start : start + limit]))
        return found

    def _ask(
        self, connection: sqlite3.Connection, keys: Sequence[Any]
    ) -> Iterator[tuple[Any, Row]]:
        source = self._source
        places = ", ".join("?" * len(keys))
        among = f"{column(source.key)} IN ({places})"
        sql = select(_selected(source), source.relation(), "WHERE", among)
        cursor = connection.execute(sql, keys)
        names = [entry[0] for entry in cursor.description][1:]
        for key, *values in cursor:
            yield key, dict(zip(names, values, strict=True))

    def _close(self) -> None:
        self._pool.shutdown()
        while self._idle:
            self._idle.pop().close()


class _Asked(NamedTuple):
    """The query for rows by key.

    Attributes:
        sql: The key, the columns, and a flag.
        has_flag: Whether it selects a flag.
    """

    sql: str
    has_flag: bool


class PostgresLookup:
    """Rows of a server's table.

    Args:
        make_pool: Makes the pool at the first query; it is closed here.
        source: The table.
        values: Conversion of values without a Python type.
        location: The database, for errors.
    """

    def __init__(
        self,
        make_pool: "Callable[[], Awaitable[asyncpg.Pool]]",
        source: Source,
        values: Values,
        location: str,
    ) -> None:
        self._make_pool = make_pool
        self._source = source
        self._values = values
        self._location = location
        self._pool: asyncio.Future[asyncpg.Pool] | None = None
        self._asked: _Asked | None = None

    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""
        pool = await self._open()
        async with pool.acquire() as connection, connection.transaction():
            key = column(self._source.key)
            sql = _listed(self._source, key)
            asked = await connection.prepare(sql)
            if asked.get_attributes()[0].type.name in {"int2", "int4", "int8"}:
                return await self._copy(connection)
            pages: list[list[Any]] = []
            cursor = await connection.cursor(sql)
            while rows := await cursor.fetch(_PAGE):
                pages.append([row[0] for row in rows])
            return compact(pages)

    async def find(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Return the rows that exist, by key."""
        pool = await self._open()
        if self._asked is None:
            self._asked = await self._ask(pool)
        asked = self._asked
        records = await pool.fetch(asked.sql, keys)
        names = [*records[0].keys()][1:] if records else []
        if asked.has_flag:
            names.pop()
            for record in records:
                if record[-1] is not None:
                    key, name = record[0], names[record[-1]]
                    raise infinite_error(self._source, key, name, self._location)
        return {record[0]: dict(zip(names, record[1:])) for record in records}  # noqa: B905  (a flag may follow)

    async def aclose(self) -> None:
        """Disconnect."""
        opening, self._pool = self._pool, None
        if opening is not None:
            await asyncio.wait([opening])
            if not _has_failed(opening):
                await opening.result().close()

    async def _ask(self, pool: "asyncpg.Pool") -> "_Asked":
        """Find the types of the columns, and return the query."""
        source, values = self._source, self._values
        among = f"{column(source.key)} = ANY($1)"
        plain = select(_selected(source), source.relation(), "WHERE", among)
        async with pool.acquire() as connection, connection.transaction():
            found = (await connection.prepare(plain)).get_attributes()[1:]
        types = {one.name: _short(one.type) for one in found}
        exact = _FLOATS if values.numeric == "float" else _DECIMALS
        casts = [exact.get(kind) or finite(kind) or "{}" for kind in types.values()]
        flag = values.flag(types)
        if not flag and casts.count("{}") == len(casts):
            return _Asked(plain, has_flag=False)
        selected = f"{column(source.key)}, {selection([*types], casts)}"
        if flag:
            selected += f", {flag} AS {quoted(FLAG)}"
        sql = select(selected, source.relation(), "WHERE", among)
        return _Asked(sql, has_flag=bool(flag))

    async def _open(self) -> "asyncpg.Pool":
        """Return the pool; the first caller opens it, and all wait for it."""
        opening = self._pool
        if opening is None or (opening.done() and _has_failed(opening)):
            opening = self._pool = asyncio.ensure_future(self._make_pool())
        return await asyncio.shield(opening)

    async def _copy(self, connection: Any) -> Keys:
        """Return integer keys, copied as one block of bytes."""
        data = bytearray()

        async def add(piece: bytes) -> None:
            data.extend(piece)

        sql = _listed(self._source, f"{column(self._source.key)}::int8")
        await connection.copy_from_query(sql, output=add, format="binary")
        body = memoryview(data)[_HEADER_BYTES : len(data) - _TRAILER_BYTES]
        return np.frombuffer(body, _COPIED)["key"].astype(np.int64)


class GivenPool(PostgresLookup):
    """Rows read through a pool of the caller's, which stays open."""

    async def aclose(self) -> None:
        """Leave the pool open."""


def _short(kind: "asyncpg.Type") -> str:
    """Return PostgreSQL's own name of a type; names of arrays start with "_"."""
    name: str = kind.name
    return f"_{name[:-2]}" if name.endswith("[]") else name


def _has_failed(done: "asyncio.Future[Any]") -> bool:
    return done.cancelled() or done.exception() is not None


def check_unique(keys: Keys, name: str) -> None:
    """Check that each of the listed keys is there once.

    Args:
        keys: All keys, as ``list_keys`` returns them.
        name: Their column.

    Raises:
        NotUniqueError: If one appears twice.
    """
    if isinstance(keys, np.ndarray):
        twice = keys[1:][keys[1:] == keys[:-1]].tolist()
    # In a collation that ignores case, "a" may be between "A" and "A".
    elif len(set(keys)) < len(keys):
        twice = [Counter(keys).most_common(1)[0][0]]
    else:
        twice = []
    if twice:
        raise NotUniqueError(
            f"key {name!r} is not unique: {twice[0]!r} appears twice; choose a unique "
            "column, or make one in a view"
        )


def compact(pages: Sequence[Sequence[Any]]) -> Keys:
    """Return keys as an array of int64 if all are integers, else as a list."""
    keys = [key for page in pages for key in page]
    is_whole = all(isinstance(key, (int, np.integer)) for key in keys)
    return np.array(keys, np.int64) if is_whole else keys
