"""Rows of a table by key, many with one query; and the list of all keys.

PostgreSQL is queried through a pool of asyncpg, on the event loop; SQLite in threads.
"""

import abc
import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from aioloader.datasets._sql.postgres_values import (
    FLAG,
    FLOATS,
    finite,
    infinite_error,
)
from aioloader.datasets._sql.source import column, quoted, selection

if TYPE_CHECKING:
    from types import ModuleType

    import asyncpg

    from aioloader.datasets._sql.address import Address
    from aioloader.datasets._sql.postgres_values import Values
    from aioloader.datasets._sql.source import Source

Row: TypeAlias = Mapping[str, Any]
Keys: TypeAlias = "np.ndarray[Any, Any] | list[Any]"
T = TypeVar("T")

# Keys that are decoded in one step of the event loop.
_PAGE = 2000
# Steps of SQLite's virtual machine between two looks at whether to stop.
_STEPS = 10_000
# A row of COPY's binary form with one int8, after a header; two bytes end it.
_COPIED = np.dtype([("fields", ">i2"), ("length", ">i4"), ("key", ">i8")])
_HEADER_BYTES, _TRAILER_BYTES = 19, 2
# asyncpg reads it as text, in the server's language.
_DECIMALS = {"money": "{}::numeric"}


class Lookup(abc.ABC):
    """Finds rows in one table, for one event loop; may be used again after closing.

    Args:
        address: The database.
        source: The table.
        values: Conversion of values without a Python type.
        connections: How many queries run at once.

    Attributes:
        users: How often the dataset was entered.
    """

    def __init__(
        self, address: "Address", source: "Source", values: "Values", connections: int
    ) -> None:
        self.users = 0
        self._address = address
        self._source = source
        self._values = values
        self._connections = connections

    @abc.abstractmethod
    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""

    @abc.abstractmethod
    async def find(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Return the rows that exist, by key."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    @property
    def _key(self) -> str:
        return column(self._source.key)

    def _selected(self) -> str:
        """Return the columns to select: the key, then the wanted columns."""
        wanted = self._source.columns
        names = ["q.*"] if wanted is None else map(column, wanted)
        return ", ".join((self._key, *names))

    def _listed(self, key: str) -> str:
        """Return the query for all keys in order, with an expression for the key."""
        order = f"WHERE {self._key} IS NOT NULL ORDER BY {self._key}"
        return self._source.select(key, order)


class SQLiteLookup(Lookup):
    """Rows of a file."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._begin()

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(self._connections, "aioloader-sql")
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = threading.Event()

    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""
        return await self._run(self._list)

    async def find(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Return the rows that exist, by key."""
        return await self._run(partial(self._find, keys))

    async def aclose(self) -> None:
        """Interrupt running queries, disconnect, and join the threads."""
        pool, idle = self._pool, self._idle
        self._is_closed.set()
        self._begin()

        def close() -> None:
            pool.shutdown()
            while idle:
                idle.pop().close()

        await asyncio.to_thread(close)

    async def _run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of a function of an idle connection, in a thread."""
        idle, is_closed = self._idle, self._is_closed

        def run() -> T:
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._connected(is_closed)
            try:
                return function(connection)
            finally:
                idle.append(connection)

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    def _connected(self, is_closed: threading.Event) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._address.for_sqlite(),
            uri=True,
            isolation_level=None,
            check_same_thread=False,  # one thread at a time; the last closes
        )
        # A query ends within a millisecond after the closing.
        connection.set_progress_handler(is_closed.is_set, _STEPS)
        try:
            connection.execute("PRAGMA schema_version")  # is it a database at all?
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            self._address.check_pages(page)
        except BaseException:
            connection.close()
            raise
        return connection

    def _list(self, connection: sqlite3.Connection) -> Keys:
        cursor = connection.execute(self._listed(self._key))
        pages = iter(lambda: [row[0] for row in cursor.fetchmany(_PAGE)], [])
        return compact(list(pages))

    def _find(
        self, keys: Sequence[Any], connection: sqlite3.Connection
    ) -> dict[Any, Row]:
        limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        found: dict[Any, Row] = {}
        for start in range(0, len(keys), limit):
            some = keys[start : start + limit]
            among = f"WHERE {self._key} IN ({', '.join('?' * len(some))})"
            sql = self._source.select(self._selected(), among)
            cursor = connection.execute(sql, some)
            names = [entry[0] for entry in cursor.description][1:]
            for key, *values in cursor:
                found[key] = dict(zip(names, values, strict=True))
        return found


class PostgresLookup(Lookup):
    """Rows of a server's table.

    Args:
        given: Arguments of ``Lookup``.
        pool: The caller's pool, which stays open; default: make one at the first query.
    """

    def __init__(self, *given: Any, pool: "asyncpg.Pool | None" = None) -> None:
        super().__init__(*given)
        self._given = pool
        self._pool: asyncio.Future[asyncpg.Pool] | None = None
        self._asked: tuple[str, bool] | None = None

    async def list_keys(self) -> Keys:
        """Return all keys, sorted."""
        pool = await self._open()
        async with pool.acquire() as connection, connection.transaction():
            sql = self._listed(self._key)
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
        sql, has_flag = self._asked
        records = await pool.fetch(sql, keys)
        names = [*records[0].keys()][1:] if records else []
        if has_flag:
            names.pop()
            for record in records:
                if record[-1] is not None:
                    key, name = record[0], names[record[-1]]
                    where = self._address.label
                    raise infinite_error(self._source, key, name, where)
        return {record[0]: dict(zip(names, record[1:])) for record in records}  # noqa: B905  (a flag may follow)

    async def aclose(self) -> None:
        """Disconnect, but leave a given pool open."""
        opening, self._pool = self._pool, None
        if opening is not None:
            await asyncio.wait([opening])
            if not _has_failed(opening):
                await opening.result().close()

    async def _ask(self, pool: "asyncpg.Pool") -> tuple[str, bool]:
        """Find the types of the columns.

        Returns:
            The query for rows by key, and whether it ends with a flag.
        """
        source, values = self._source, self._values
        among = f"WHERE {self._key} = ANY($1)"
        plain = source.select(self._selected(), among)
        async with pool.acquire() as connection, connection.transaction():
            found = (await connection.prepare(plain)).get_attributes()[1:]
        types = {one.name: _short(one.type.name) for one in found}
        exact = FLOATS if values.numeric == "float" else _DECIMALS
        casts = [exact.get(kind) or finite(kind) or "{}" for kind in types.values()]
        flag = values.flag(types)
        if not flag and casts.count("{}") == len(casts):
            return plain, False
        selected = f"{self._key}, {selection([*types], casts)}"
        if flag:
            selected += f", {flag} AS {quoted(FLAG)}"
        return source.select(selected, among), bool(flag)

    async def _open(self) -> "asyncpg.Pool":
        """Return the pool; the first caller opens it, and all wait for it."""
        if self._given is not None:
            return self._given
        opening = self._pool
        if opening is None or (opening.done() and _has_failed(opening)):
            opening = self._pool = asyncio.ensure_future(self._make_pool())
        return await asyncio.shield(opening)

    async def _make_pool(self) -> "asyncpg.Pool":
        return await import_asyncpg().create_pool(
            self._address.for_asyncpg(), min_size=1, max_size=self._connections
        )

    async def _copy(self, connection: Any) -> Keys:
        """Return integer keys, copied as one block of bytes."""
        data = bytearray()

        async def add(piece: bytes) -> None:
            data.extend(piece)

        sql = self._listed(f"{self._key}::int8")
        await connection.copy_from_query(sql, output=add, format="binary")
        body = memoryview(data)[_HEADER_BYTES : len(data) - _TRAILER_BYTES]
        return np.frombuffer(body, _COPIED)["key"].astype(np.int64)


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


def check_unique(keys: Keys, name: str) -> None:
    """Check that each of the listed keys is there once.

    Args:
        keys: All keys, as ``list_keys`` returns them.
        name: Their column.

    Raises:
        ValueError: If one appears twice.
    """
    if isinstance(keys, np.ndarray):
        twice = keys[1:][keys[1:] == keys[:-1]].tolist()
    # In a collation that ignores case, "a" may be between "A" and "A".
    elif len(set(keys)) < len(keys):
        twice = [Counter(keys).most_common(1)[0][0]]
    else:
        twice = []
    if twice:
        raise ValueError(
            f"key {name!r} is not unique: {twice[0]!r} appears twice; choose a unique "
            "column, or make one in a view"
        )


def compact(pages: Sequence[Sequence[Any]]) -> Keys:
    """Return keys as an array of int64 if all are integers, else as a list."""
    keys = [key for page in pages for key in page]
    is_whole = all(isinstance(key, (int, np.integer)) for key in keys)
    return np.array(keys, np.int64) if is_whole else keys


def _short(name: str) -> str:
    """Return PostgreSQL's own name of a type; names of arrays start with "_"."""
    return f"_{name[:-2]}" if name.endswith("[]") else name


def _has_failed(done: "asyncio.Future[Any]") -> bool:
    return done.cancelled() or done.exception() is not None
