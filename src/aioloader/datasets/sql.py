"""Random access to rows of database tables by key; one query reads a batch.

Rows are in the order of the given keys, or of the sorted keys of the table. Memory
holds the keys (8 bytes each if integers) and the requested rows. Batches save time:
from PostgreSQL, a narrow row takes 8 us in a query for 1,024 rows and 185 us alone; a
row of 100 KB takes 71 us in a query for 64 rows, and 238 us alone.
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

# Number of keys to fetch per step; they are decoded on the event loop.
_FETCH_ROWS = 2000
# Number of SQLite's virtual-machine steps between checks for a closed lookup.
_STEPS_PER_CHECK = 10_000
# COPY's binary format for rows with one int8, between a header and a trailer.
_COPY_ROW = np.dtype([("fields", ">i2"), ("length", ">i4"), ("key", ">i8")])
_HEADER_BYTES, _TRAILER_BYTES = 19, 2
# Casts of money, which asyncpg would read as text in the server's locale.
_MONEY_CASTS = {"money": "{}::numeric", "_money": "{}::numeric[]"}
__all__ = ["SQLFormat", "SQLRows"]

Row: TypeAlias = dict[str, Any]
RowMapping: TypeAlias = Mapping[str, Any]


class Lookup(abc.ABC):
    """Finds rows in one table, for one event loop; can be used again after closing.

    At most ``connections`` queries run at once, and a lost connection must be restored
    within ``deadline`` seconds. ``users`` counts the open uses of the dataset.
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
        """Return all keys, sorted; raise an error if one is NULL or not unique."""

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
        """Close the connections of this loop; later queries open new ones."""

    @abc.abstractmethod
    async def _list(self) -> RowKeys: ...

    @abc.abstractmethod
    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]: ...

    @property
    def _null_key_query(self) -> str:
        """Query that returns a row if a key is NULL."""
        return self._relation.select("1", f"WHERE {self._key} IS NULL LIMIT 1")

    def _keys_query(self, key: str) -> str:
        order = f"WHERE {self._key} IS NOT NULL ORDER BY {self._key}"
        return self._relation.select(key, order)

    def _check_unique(self, keys: RowKeys) -> None:
        twice: list[Any] = []
        if isinstance(keys, np.ndarray):
            twice = keys[1:][keys[1:] == keys[:-1]].tolist()
        # If the collation ignores case, equal texts may be apart: "A", "a", "A".
        elif len(set(keys)) < len(keys):
            twice = [Counter(keys).most_common(1)[0][0]]
        if twice:
            raise ValueError(
                f"key {self._relation.key!r} is not unique: {twice[0]!r} appears "
                "twice; choose a unique column, or make one in a view"
            )


class SQLiteLookup(Lookup):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reset()

    def _reset(self) -> None:
        self._pool = ThreadPoolExecutor(self._connections, "aioloader-sql")
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = threading.Event()

    async def aclose(self) -> None:
        """Interrupt running queries, disconnect, and join the threads."""
        pool, idle = self._pool, self._idle
        self._is_closed.set()
        self._reset()

        def close() -> None:
            pool.shutdown()
            while idle:
                idle.pop().close()

        await in_thread(close)

    async def _run_in_thread(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call ``function`` with an idle or new connection, in a thread."""
        idle, is_closed = self._idle, self._is_closed

        def run() -> T:
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._connect(is_closed)
            try:
                return function(connection)
            finally:
                idle.append(connection)

        return await in_thread(run, executor=self._pool, abandon_on_cancel=True)

    def _connect(self, is_closed: threading.Event) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._address.for_driver(),
            uri=True,
            isolation_level=None,
            check_same_thread=False,  # one thread uses it at a time
        )
        # The handler stops a query within a millisecond after `aclose`.
        connection.set_progress_handler(is_closed.is_set, _STEPS_PER_CHECK)
        try:
            connection.execute("PRAGMA schema_version")  # fails for other files
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            self._address.check_pages(page)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _list(self) -> RowKeys:
        def list_(connection: sqlite3.Connection) -> RowKeys:
            if connection.execute(self._null_key_query).fetchone():
                raise self._relation.key_error("NULL")
            rows = connection.execute(self._keys_query(self._key))
            return compact(key for (key,) in rows)

        return await self._run_in_thread(list_)

    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]:
        def find(connection: sqlite3.Connection) -> dict[Any, RowMapping]:
            limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
            rows: dict[Any, RowMapping] = {}
            for start in range(0, len(keys), limit):
                chunk = keys[start : start + limit]
                condition = f"WHERE {self._key} IN ({', '.join('?' * len(chunk))})"
                sql = self._relation.select(self._selected, condition)
                cursor = connection.execute(sql, chunk)
                _, *names = (entry[0] for entry in cursor.description)
                fetched = cursor.fetchall()
                part = {k: dict(zip(names, v, strict=True)) for k, *v in fetched}
                if len(part) < len(fetched):
                    self._check_unique([key for key, *_ in fetched])
                rows |= part
            return rows

        return await self._run_in_thread(find)


class PostgresLookup(Lookup):
    """Finds rows of a PostgreSQL table, through a new pool or the caller's."""

    def __init__(self, *args: Any, pool: "asyncpg.Pool | None" = None) -> None:
        super().__init__(*args)
        self._given_pool = self._pool = pool
        self._sql: str | None = None

    async def aclose(self) -> None:
        """Close the pool, unless it is the caller's."""
        pool, self._pool = self._pool, self._given_pool
        if pool is not None and pool is not self._given_pool:
            await pool.close()

    async def _list(self) -> RowKeys:
        pool = await self._get_pool()
        async with pool.acquire() as connection, connection.transaction():
            if await connection.fetchval(self._null_key_query):
                raise self._relation.key_error("NULL")
            sql = self._keys_query(self._key)
            statement = await connection.prepare(sql, name="")
            if statement.get_attributes()[0].type.name in {"int2", "int4", "int8"}:
                return await self._copy(connection)
            keys: list[Any] = []
            await connection.execute(f"DECLARE aioloader NO SCROLL CURSOR FOR {sql}")
            while rows := await connection.fetch(f"FETCH {_FETCH_ROWS} FROM aioloader"):
                keys += [row[0] for row in rows]
            return compact(keys)

    async def _find(self, keys: Sequence[Any]) -> dict[Any, RowMapping]:
        try:
            pool = await self._get_pool()
            if self._sql is None:
                self._sql = await self._prepare_query(pool)
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
        rows: dict[Any, RowMapping]
        rows = {record[0]: dict(zip(names, record[1:])) for record in records}  # noqa: B905  (a flag may follow)
        if len(rows) < len(records):
            self._check_unique([record[0] for record in records])
        return rows

    async def _get_pool(self) -> "asyncpg.Pool":
        """Return the pool; a new pool connects at the first query."""
        if self._pool is None:
            # Without connections `create_pool` never waits, so no second pool is made.
            # No cache: with a pooler, named statements may be another client's.
            self._pool = await import_asyncpg().create_pool(
                self._address.for_asyncpg(),
                min_size=0,
                max_size=self._connections,
                statement_cache_size=0,
            )
        return self._pool

    async def _prepare_query(self, pool: "asyncpg.Pool") -> str:
        """Return the query for rows by key, with casts for the columns' types."""
        condition = f"WHERE {self._key} = ANY($1)"
        async with pool.acquire() as connection, connection.transaction():
            plain = self._relation.select(self._selected, condition)
            try:
                statement = await connection.prepare(plain, name="")
            except import_asyncpg().UnsupportedClientFeatureError as exc:
                text = f"{exc}; write CAST(its column AS TEXT) in a view"
                raise ValueError(text) from None
            cols = statement.get_attributes()[1:]
            types = {col.name: _internal_name(col.type.name) for col in cols}
            unknown = [col for col in cols if types[col.name] not in HANDLED_TYPES]
            if nested := [col.name for col in unknown if col.type.kind != "scalar"]:
                parts = await connection.fetch(parts_query(self._relation, nested))
                types |= types_by_parts(nested, parts)
        casts = FLOAT_CASTS if self._relation.numeric == "float" else _MONEY_CASTS
        columns = {name: (kind, casts.get(kind, "")) for name, kind in types.items()}
        selected = f"{self._key}, {selection(columns, self._relation.infinity)}"
        return self._relation.select(selected, condition)

    async def _copy(self, connection: Any) -> RowKeys:
        """Return integer keys, read as one block of bytes by COPY."""
        data = bytearray()

        async def add(piece: bytes) -> None:
            data.extend(piece)

        sql = self._keys_query(f"{self._key}::int8")
        await connection.copy_from_query(sql, output=add, format="binary")
        body = memoryview(data)[_HEADER_BYTES : len(data) - _TRAILER_BYTES]
        return np.frombuffer(body, _COPY_ROW)["key"].astype(np.int64)


def import_asyncpg() -> Any:
    return imported("asyncpg", "sql", "SQLRows of PostgreSQL needs asyncpg")


def compact(keys: Iterable[Any]) -> RowKeys:
    """Return keys as an int64 array if all are integers that fit, or else as a list."""
    keys = list(keys)
    is_whole = all(isinstance(key, (int, np.integer)) for key in keys)
    try:
        return np.array(keys, np.int64) if is_whole else keys
    except OverflowError:  # an integer beyond 64 bits
        return keys


def _internal_name(name: str) -> str:
    """Return PostgreSQL's internal name of a type, such as ``_int4`` for ``int4[]``."""
    return f"_{name[:-2]}" if name.endswith("[]") else name


class _RowsOptions(TypedDict, total=False):
    columns: Iterable[str] | None
    connections: int
    deadline: float
    numeric: Numeric
    infinity: Infinity


class SQLRows(Dataset[Coroutine[Any, Any, Row]], LoopDataset):
    """Reads rows of a table by key, with one query per batch; ``__getitem__`` is async.

    A row is a dict of Python values by column. Several event loops can read one dataset
    at once, each with its own connections; a loader closes them (``aclose``). A dataset
    of a URL without a password can be pickled. Rows are not read from a snapshot: each
    row has its values at the time of the query.

    Args:
        url: ``sqlite:///path``, ``postgresql://user@host/name``, or an asyncpg pool of
            the caller, which needs a loader with ``loop="caller"``.
        table: ``name`` or ``schema.name``.
        key: A unique column without NULLs, which should have an index.
        columns: The columns to read, in order; default: all.
        keys: Keys of the rows to read, in order. Default: list all now, sorted, which
            blocks; on an event loop use ``await SQLRows.discover(...)``.
        connections: Maximum number of concurrent queries.
        deadline: Seconds within which a lost connection must be restored.
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
        """Create a dataset without blocking the loop; arguments as for the class."""
        dataset = cls(url, table, key=key, keys=(), **options)
        dataset._keys = await dataset._list()
        return dataset

    @property
    def keys(self) -> RowKeys:
        """The rows' keys in order, as an int64 array or a list."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    async def __getitem__(self, index: SupportsIndex) -> Row:
        """Read one row.

        Args:
            index: Position in ``keys``; negative ones count from the end.

        Returns:
            A dict of values by column, owned by the caller.

        Raises:
            IndexError: If ``index`` is out of range.
            ObjectNotFoundError: If no row has the key.
            DatasetError: If the row cannot be read.
        """
        (row,) = await self.__getitems__([index])
        return row

    async def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Row]:
        """Read rows in the order of ``indices``, which may have duplicates."""
        keys = [self._key(index) for index in indices]
        self._check_loop()
        rows = await self._readers.here().find(list(dict.fromkeys(keys)))
        try:
            return [dict(rows[key]) for key in keys]
        except KeyError:
            missing = [key for key in dict.fromkeys(keys) if key not in rows]
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
        args = self._address, self._relation, *self._options
        if self._address.is_sqlite:
            return SQLiteLookup(*args)
        return PostgresLookup(*args, pool=self._pool)

    def _check_loop(self) -> None:
        """Raise a RuntimeError if the caller's pool belongs to another loop."""
        if self._pool is None:
            return
        pool_loop = getattr(self._pool, "_loop", None)
        if pool_loop not in {None, asyncio.get_running_loop()}:
            raise RuntimeError(
                "the asyncpg pool belongs to another event loop; pass loop='caller' to "
                "the loader, or a URL instead of the pool; list keys with discover()"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle a pool; ``DatabaseURL`` refuses to pickle a password."""
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
