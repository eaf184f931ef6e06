"""Tables of databases: their rows by key, many at a time.

Order is the order of the keys, sorted. Memory holds the keys (8 bytes each if integers)
and the requested rows. One query reads the rows of a batch: from PostgreSQL, 1,024
narrow ones take 8 us each, against 185 with one query each; 64 of 100 KB take 71 us,
against 238.
"""

import abc
import asyncio
import pickle
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Self,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
)

import numpy as np
from anyio.from_thread import start_blocking_portal
from torch.utils.data import Dataset

from aioloader._base.cancellation import in_thread
from aioloader._base.extras import imported
from aioloader.datasets._checks import check_at_least, names_options, position_of
from aioloader.datasets._sql.address import (
    DatabaseURL,
    Infinity,
    LostError,
    Numeric,
    Relation,
    column,
    retried,
)
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets._sql.postgres import (
    FLAG,
    FLOAT_CASTS,
    HANDLED_TYPES,
    infinite_error,
    parts_query,
    selection,
    types_by_parts,
)
from aioloader.datasets._stores.per_loop import LoopDataset, PerLoop
from aioloader.datasets._stores.redact import Sealed
from aioloader.errors import DatasetError, ObjectNotFoundError

if TYPE_CHECKING:
    import asyncpg


RowKeys: TypeAlias = "np.ndarray[Any, Any] | list[Any]"
T = TypeVar("T")

# Keys that are decoded in one step of the event loop.
_PAGE = 2000
# Steps of SQLite's virtual machine between two looks at whether to stop.
_STEPS = 10_000
# A row of COPY's binary form with one int8, after a header; two bytes end it.
_COPIED = np.dtype([("fields", ">i2"), ("length", ">i4"), ("key", ">i8")])
_HEADER_BYTES, _TRAILER_BYTES = 19, 2
# asyncpg reads it as text, in the server's language.
_DECIMALS = {"money": "{}::numeric", "_money": "{}::numeric[]"}
__all__ = ["SQLFormat", "SQLRows"]

Row: TypeAlias = dict[str, Any]
RowMapping: TypeAlias = Mapping[str, Any]


class Lookup(abc.ABC):
    """Finds rows in one table, for one event loop; may be used again after closing.

    PostgreSQL is queried through a pool of asyncpg, on the loop; SQLite in threads.

    At most ``connections`` queries run at once, and a lost connection must be restored
    in ``deadline`` seconds. ``users`` counts how often the dataset was entered.
    """

    def __init__(
        self,
        address: "DatabaseURL",
        relation: "Relation",
        connections: int,
        deadline: float,
    ) -> None:
        self.users = 0
        self._address, self._relation = address, relation
        self._connections, self._deadline = connections, deadline
        self._key = relation.key_column
        wanted = ["q.*"] if relation.columns is None else map(column, relation.columns)
        self._selected = ", ".join((self._key, *wanted))

    async def list_keys(self) -> RowKeys:
        """Return all keys, sorted, if each is there once and none is NULL."""

        async def attempt() -> RowKeys:
            keys = await self._list()
            await in_thread(self._check_unique, keys)
            return keys

        doing = f"list the keys of {self._relation.label}"
        return await retried(attempt, doing, self._address)

    async def find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]:
        doing = f"read {len(keys)} rows of {self._relation.label}"
        find = partial(self._find, keys)
        return await retried(find, doing, self._address, self._deadline)

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    @abc.abstractmethod
    async def _list(self) -> RowKeys: ...

    @abc.abstractmethod
    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]: ...

    @property
    def _null(self) -> str:
        """Return the query for a row without a key."""
        return self._relation.select("1", f"WHERE {self._key} IS NULL LIMIT 1")

    def _listed(self, key: str) -> str:
        order = f"WHERE {self._key} IS NOT NULL ORDER BY {self._key}"
        return self._relation.select(key, order)

    def _check_unique(self, keys: RowKeys) -> None:
        twice: list[Any] = []
        if isinstance(keys, np.ndarray):
            twice = keys[1:][keys[1:] == keys[:-1]].tolist()
        # In a collation that ignores case, "a" may be between "A" and "A".
        elif len(set(keys)) < len(keys):
            twice = [Counter(keys).most_common(1)[0][0]]
        if twice:
            raise ValueError(
                f"key {self._relation.key!r} is not unique: {twice[0]!r} appears "
                "twice; choose a unique column, or make one in a view"
            )


class SQLiteLookup(Lookup):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._begin()

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(self._connections, "aioloader-sql")
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = threading.Event()

    async def aclose(self) -> None:
        """Interrupt running queries, disconnect, and join the threads."""
        pool, idle = self._pool, self._idle
        self._is_closed.set()
        self._begin()

        def close() -> None:
            pool.shutdown()
            while idle:
                idle.pop().close()

        await in_thread(close)

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

        return await in_thread(run, executor=self._pool, abandon_on_cancel=True)

    def _connected(self, is_closed: threading.Event) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._address.for_driver(),
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

    async def _list(self) -> RowKeys:
        def list_(connection: sqlite3.Connection) -> RowKeys:
            if connection.execute(self._null).fetchone():
                raise self._relation.key_error("NULL")
            found = connection.execute(self._listed(self._key))
            return compact(key for (key,) in found)

        return await self._run(list_)

    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]:
        def find(connection: sqlite3.Connection) -> dict[Any, RowMapping]:
            limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
            found: dict[Any, RowMapping] = {}
            for start in range(0, len(keys), limit):
                some = keys[start : start + limit]
                among = f"WHERE {self._key} IN ({', '.join('?' * len(some))})"
                sql = self._relation.select(self._selected, among)
                cursor = connection.execute(sql, some)
                _, *names = (entry[0] for entry in cursor.description)
                rows = cursor.fetchall()
                part = {k: dict(zip(names, v, strict=True)) for k, *v in rows}
                if len(part) < len(rows):
                    self._check_unique([key for key, *_ in rows])
                found |= part
            return found

        return await self._run(find)


class PostgresLookup(Lookup):
    """Rows of a server's table, through its own pool or a given one, left open."""

    def __init__(self, *given: Any, pool: "asyncpg.Pool | None" = None) -> None:
        super().__init__(*given)
        self._given = self._pool = pool
        self._sql: str | None = None

    async def aclose(self) -> None:
        """Disconnect, but leave a given pool open."""
        pool, self._pool = self._pool, self._given
        if pool is not None and pool is not self._given:
            await pool.close()

    async def _list(self) -> RowKeys:
        pool = await self._opened()
        async with pool.acquire() as connection, connection.transaction():
            if await connection.fetchval(self._null):
                raise self._relation.key_error("NULL")
            sql = self._listed(self._key)
            asked = await connection.prepare(sql, name="")
            if asked.get_attributes()[0].type.name in {"int2", "int4", "int8"}:
                return await self._copy(connection)
            keys: list[Any] = []
            await connection.execute(f"DECLARE aioloader NO SCROLL CURSOR FOR {sql}")
            while rows := await connection.fetch(f"FETCH {_PAGE} FROM aioloader"):
                keys += [row[0] for row in rows]
            return compact(keys)

    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]:
        try:
            pool = await self._opened()
            if self._sql is None:
                self._sql = await self._asked(pool)
            records = await pool.fetch(self._sql, keys)
        except OSError as exc:
            raise LostError(exc) from None
        except (ValueError, OverflowError) as exc:
            if self._sql is None or isinstance(exc, import_asyncpg().InterfaceError):
                raise  # a column or a key of the wrong type
            if half := len(keys) // 2:
                return await self._find(keys[:half]) | await self._find(keys[half:])
            raise DatasetError(
                f"the row of {self._relation.label} with {self._relation.key} = "
                f"{keys[0]!r} has a value that Python cannot represent: {exc} (dates "
                "are of the years 1 to 9999); write its column as text in a view, or "
                "read the table with SQLDataset",
                location=self._address.label,
            ) from None
        names = [*records[0].keys()][1:] if records else []
        if names[-1:] == [FLAG]:
            for key, *_, number in records:
                if number is not None:
                    name, label = names[number], self._address.label
                    raise infinite_error(self._relation, key, name, label)
            names.pop()
        found: dict[Any, RowMapping]
        found = {record[0]: dict(zip(names, record[1:])) for record in records}  # noqa: B905  (a flag may follow)
        if len(found) < len(records):
            self._check_unique([record[0] for record in records])
        return found

    async def _opened(self) -> "asyncpg.Pool":
        """Return the pool, which connects when it is used."""
        if self._pool is None:
            # Made without waiting, as it has no connection yet: so there is only one.
            # With a pooler, a named statement may be that of another client.
            self._pool = await import_asyncpg().create_pool(
                self._address.for_asyncpg(),
                min_size=0,
                max_size=self._connections,
                statement_cache_size=0,
            )
        return self._pool

    async def _asked(self, pool: "asyncpg.Pool") -> str:
        """Find the types of the columns, and return the query for rows by key."""
        among = f"WHERE {self._key} = ANY($1)"
        async with pool.acquire() as connection, connection.transaction():
            plain = self._relation.select(self._selected, among)
            try:
                asked = await connection.prepare(plain, name="")
            except import_asyncpg().UnsupportedClientFeatureError as exc:
                text = f"{exc}; write CAST(its column AS TEXT) in a view"
                raise ValueError(text) from None
            found = asked.get_attributes()[1:]
            types = {one.name: _short(one.type.name) for one in found}
            unknown = [one for one in found if types[one.name] not in HANDLED_TYPES]
            if nested := [one.name for one in unknown if one.type.kind != "scalar"]:
                parts = await connection.fetch(parts_query(self._relation, nested))
                types |= types_by_parts(nested, parts)
        exact = FLOAT_CASTS if self._relation.numeric == "float" else _DECIMALS
        columns = {name: (kind, exact.get(kind, "")) for name, kind in types.items()}
        selected = f"{self._key}, {selection(columns, self._relation.infinity)}"
        return self._relation.select(selected, among)

    async def _copy(self, connection: Any) -> RowKeys:
        """Return integer keys, copied as one block of bytes."""
        data = bytearray()

        async def add(piece: bytes) -> None:
            data.extend(piece)

        sql = self._listed(f"{self._key}::int8")
        await connection.copy_from_query(sql, output=add, format="binary")
        body = memoryview(data)[_HEADER_BYTES : len(data) - _TRAILER_BYTES]
        return np.frombuffer(body, _COPIED)["key"].astype(np.int64)


def import_asyncpg() -> Any:
    return imported("asyncpg", "sql", "SQLRows of PostgreSQL needs asyncpg")


def compact(keys: Iterable[Any]) -> RowKeys:
    """Return keys as an array of int64 if all are integers, else as a list."""
    keys = list(keys)
    is_whole = all(isinstance(key, (int, np.integer)) for key in keys)
    try:
        return np.array(keys, np.int64) if is_whole else keys
    except OverflowError:  # a number may be larger
        return keys


def _short(name: str) -> str:
    """Return PostgreSQL's own name of a type; names of arrays start with "_"."""
    return f"_{name[:-2]}" if name.endswith("[]") else name


class _RowsOptions(TypedDict, total=False):
    columns: Iterable[str] | None
    connections: int
    deadline: float
    numeric: Numeric
    infinity: Infinity


class SQLRows(Dataset[Coroutine[Any, Any, Row]], LoopDataset):
    """Reads rows of a table by key, by ``async def __getitem__``, one query per batch.

    A row is a dict of column name to Python value. Several event loops may read one
    dataset at once, each with its own connections; a loader closes them (``aclose``).
    It may be pickled if the URL has no password. There is no snapshot: each row is read
    as it is at that moment.

    Args:
        url: ``sqlite:///path``, ``postgresql://user@host/name``, or the caller's own
            pool of asyncpg, with which the loader needs ``loop="caller"``.
        table: ``name`` or ``schema.name``.
        key: A unique column without NULLs, which should have an index.
        columns: The columns to read, in order; default: all.
        keys: The rows of the dataset, in order. Default: list them now, sorted, which
            blocks; on an event loop use ``await SQLRows.discover(...)``.
        connections: How many queries run at once.
        deadline: Seconds in which a lost connection must be restored.
        numeric: As for ``SQLDataset``: ``"decimal"`` or ``"float"``.
        infinity: As for ``SQLDataset``: ``"error"`` or ``"null"``.

    Raises:
        ImportError: If asyncpg is not installed, for PostgreSQL.
        ValueError: If an argument is wrong.
        DatasetError: If the keys cannot be listed, or are NULL or not unique.
    """

    @names_options
    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        url: "str | asyncpg.Pool",
        table: str,
        *,
        key: str,
        columns: Iterable[str] | None = None,
        keys: Iterable[Any] | None = None,
        connections: int = 4,
        deadline: float = 120.0,
        numeric: Numeric = "decimal",
        infinity: Infinity = "error",
    ) -> None:
        check_at_least(connections, 1, "connections")
        self._relation = Relation(table, key, columns, (), numeric, infinity)
        if self._relation.is_query:
            raise ValueError("table must be a table: name a query by creating a view")
        is_url = isinstance(url, (str, Sealed))
        self._pool: asyncpg.Pool | None = None if is_url else url
        if self._pool is not None and not hasattr(url, "acquire"):
            kind = type(url).__name__
            raise TypeError(f"url must be a URL or a pool of asyncpg, got {kind}")
        self._address = DatabaseURL(url if is_url else "postgresql:///")
        if self._pool is not None:
            self._address.label = "asyncpg.Pool"
        if not self._address.is_sqlite:
            import_asyncpg()
        self._options = connections, deadline
        self._readers: PerLoop[Lookup] = PerLoop(self._new_lookup)
        if keys is not None:
            self._keys: RowKeys = compact(keys)
        else:
            with start_blocking_portal() as portal:
                self._keys = portal.call(self._list)

    @classmethod
    @names_options
    async def discover(
        cls,
        url: "str | asyncpg.Pool",
        table: str,
        *,
        key: str,
        **options: Unpack[_RowsOptions],
    ) -> Self:
        """List a table without blocking the event loop, and return its dataset.

        Arguments and errors are those of the class.
        """
        made = cls(url, table, key=key, keys=(), **options)
        made._keys = await made._list()
        return made

    @property
    def keys(self) -> RowKeys:
        """The keys by index: an array of int64, or a list."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    async def __getitem__(self, index: SupportsIndex) -> Row:
        """Read one row.

        Args:
            index: Position in ``keys``; negative ones count from the end.

        Returns:
            Column name to value, owned by the caller.

        Raises:
            IndexError: If ``index`` is out of range.
            ObjectNotFoundError: If the row was deleted.
            DatasetError: If it cannot be read.
        """
        (row,) = await self.__getitems__([index])
        return row

    async def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Row]:
        """Read rows by one query, in the order of ``indices``, which may repeat.

        Errors are those of ``__getitem__``.
        """
        keys = [self._key(index) for index in indices]
        self._check_loop()
        found = await self._readers.here().find(list(dict.fromkeys(keys)))
        try:
            return [dict(found[key]) for key in keys]
        except KeyError:
            missing = [key for key in dict.fromkeys(keys) if key not in found]
        more = f" (nor {len(missing) - 1:,} others)" if len(missing) > 1 else ""
        raise ObjectNotFoundError(
            f"{self._label} has no row with {self._relation.key} = {missing[0]!r}"
            f"{more}",
            location=self._address.label,
        )

    async def aclose(self) -> None:
        """Close this loop's connections; the dataset stays usable."""
        await self._readers.here().aclose()

    @property
    def _label(self) -> str:
        return f"{self._relation.label} of {self._address.label!r}"

    def _key(self, index: SupportsIndex) -> Any:
        key = self._keys[position_of(index, len(self._keys))]
        return int(key) if isinstance(key, np.integer) else key

    async def _list(self) -> RowKeys:
        self._check_loop()
        lookup = self._new_lookup()
        try:
            return await lookup.list_keys()
        finally:
            await lookup.aclose()

    def _new_lookup(self) -> Lookup:
        given = self._address, self._relation, *self._options
        if self._address.is_sqlite:
            return SQLiteLookup(*given)
        return PostgresLookup(*given, pool=self._pool)

    def _check_loop(self) -> None:
        """Check that a pool is used only on its own loop."""
        if self._pool is None:
            return
        theirs = getattr(self._pool, "_loop", None)
        if theirs not in {None, asyncio.get_running_loop()}:
            raise RuntimeError(
                "the asyncpg pool belongs to another event loop; pass loop='caller' to "
                "the loader, or a URL instead of the pool; list keys with discover()"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle a pool; a password in the URL is refused by itself."""
        if self._pool is not None:
            raise pickle.PicklingError(
                "SQLRows of an asyncpg pool belongs to its process; pass a URL instead"
            )
        return {**self.__dict__, "_readers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._readers = PerLoop(self._new_lookup)
        if not self._address.is_sqlite:
            import_asyncpg()

    def __repr__(self) -> str:
        return f"SQLRows({self._label}, {len(self):,} rows)"
