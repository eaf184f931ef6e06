"""Tables of databases: their rows by key, many at a time.

Order is the order of the keys, sorted. Memory holds the keys (8 bytes each if integers)
and the requested rows. One query reads the rows of a batch: from PostgreSQL, 1,024
narrow ones take 8 us each, against 185 with one query each; 64 of 100 KB take 71 us,
against 238.
"""

import asyncio
import pickle
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias, TypedDict, Unpack

import numpy as np
from anyio.from_thread import start_blocking_portal
from torch.utils.data import Dataset

from aioloader.datasets._checks import check_at_least, position_of
from aioloader.datasets._options import names_options
from aioloader.datasets._sql.address import Address
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets._sql.lookup import (
    Keys,
    Lookup,
    PostgresLookup,
    SQLiteLookup,
    compact,
    import_asyncpg,
)
from aioloader.datasets._sql.relation import Infinity, Numeric, Relation
from aioloader.datasets._stores.per_loop import LoopDataset, PerLoop
from aioloader.datasets._stores.redact import Sealed
from aioloader.errors import ObjectNotFoundError

if TYPE_CHECKING:
    import asyncpg

__all__ = ["SQLFormat", "SQLRows"]

Row: TypeAlias = dict[str, Any]


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
        self._address = Address(url if is_url else "postgresql:///")
        if self._pool is not None:
            self._address.label = "asyncpg.Pool"
        if not self._address.is_sqlite:
            import_asyncpg()
        self._options = connections, deadline
        self._readers: PerLoop[Lookup] = PerLoop(self._new_lookup)
        if keys is not None:
            self._keys: Keys = compact(keys)
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
    def keys(self) -> Keys:
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

    async def _release(self) -> None:
        await self.aclose()

    # -- how ----------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self._relation.label} of {self._address.label!r}"

    def _key(self, index: SupportsIndex) -> Any:
        key = self._keys[position_of(index, len(self._keys))]
        return int(key) if isinstance(key, np.integer) else key

    async def _list(self) -> Keys:
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
