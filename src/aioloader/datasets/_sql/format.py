"""Tables and queries of databases as shards: ranges of a key, in one snapshot.

The order is that of the key. Memory holds the read-ahead, bounded by the budget. ADBC
has a separate copy of SQLite, and two copies in one process do not see each other's
locks: to write a file with ``sqlite3`` while it is read here, use another process.
"""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioloader.datasets._sql.address import address_of
from aioloader.datasets._sql.failures import failure_of
from aioloader.datasets._sql.keys import Key, Span, encoded
from aioloader.datasets._sql.links import driver_of
from aioloader.datasets._sql.postgres import Postgres
from aioloader.datasets._sql.postgres_values import Infinity, Numeric, Values
from aioloader.datasets._sql.reader import SQLReader
from aioloader.datasets._sql.source import Source
from aioloader.datasets._sql.sqlite import SQLite
from aioloader.datasets._stores.redact import Sealed

if TYPE_CHECKING:
    from aioloader.datasets._streams.shards import Position, Summary


@dataclass(frozen=True)
class SQLShard:
    """A range of keys.

    Attributes:
        span: The range.
        session: Its iteration.
    """

    span: Span
    session: SQLite | Postgres


class SQLFormat:
    """Read a table or query in ranges of a key, in the order of the key.

    All ranges of an iteration read one snapshot. The key must be unique and not NULL,
    and should have an index. A state holds the keys where it was cut, and the last key
    read of each range: later rows are read from the snapshot of the resumed iteration.
    Steps that read ahead (windows of ``shuffle``, an async ``map``, ``readers``
    in turn) go back some rows and count: exact if nothing was written among those.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user@host/name``; for a Unix socket
            ``postgresql:///name?host=/directory``. May be sealed.
        query: A table, ``name`` or ``schema.name``, or a SELECT.
        key: A column of integers, text, UUIDs, dates, times or bytes.
        columns: The columns to read, in order; default: all.
        parameters: Values for the placeholders of a query, ``$1`` for PostgreSQL and
            ``?`` for SQLite.
        partitions: Number of ranges of the key; or the keys to cut at: the result of
            ``plan`` on one rank gives all ranks the same ranges, whatever is written
            before they start.
        deadline: Seconds in which a lost connection must be restored.
        numeric: Type for PostgreSQL's ``numeric``: ``"decimal"`` or ``"float"``.
        infinity: Treatment of its infinite dates: ``"error"`` or ``"null"``.

    Raises:
        ImportError: If the driver is not installed.
        ValueError: If an argument is wrong.
    """

    # A shard may have other rows when it is read again.
    changes = True

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        url: str | Sealed[str],
        query: str,
        *,
        key: str,
        columns: Iterable[str] | None = None,
        parameters: Sequence[Any] = (),
        partitions: int | Sequence[Any] = 8,
        deadline: float = 120.0,
        numeric: Numeric = "decimal",
        infinity: Infinity = "error",
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        if deadline < 0:
            raise ValueError(f"deadline must not be negative, got {deadline}")
        if isinstance(parameters, (str, bytes)) or not isinstance(parameters, Iterable):
            kind = type(parameters).__name__
            raise TypeError(f"parameters must be a list of values, got {kind}")
        wanted = None if columns is None else tuple(columns)
        self._address = address_of(url)
        self._source = Source(query, key, wanted, tuple(parameters))
        self._partitions = _checked(partitions)
        self._deadline = deadline
        self._values = Values(numeric, infinity)
        driver_of(self._address)

    async def shards(
        self, stack: AsyncExitStack, known: "Summary | None" = None
    ) -> list[SQLShard]:
        """Take a snapshot, and return its ranges.

        Args:
            stack: Closes the connections.
            known: The ``summary`` of an earlier run, whose ranges are reused.

        Raises:
            DatasetError: If the database cannot be reached, or read.
            ValueError: If the key is unsuitable, or a column does not exist.
        """
        known = known or {}
        partitions = known.get("cuts", self._partitions)
        session = self._new_session()
        stack.push_async_callback(session.aclose)
        try:
            spans = await session.begin(partitions)
        except ValueError as exc:
            raise ValueError(f"{self.label}: {exc}") from None
        except Exception as exc:  # noqa: BLE001  (reported without its traceback)
            failure = failure_of("open", self._source.label, self._address, exc)
        else:
            spans += [Span(is_void=True)] * (known.get("count", 0) - len(spans))
            return [SQLShard(span, session) for span in spans]
        raise failure

    def summary(self, shards: Sequence[SQLShard]) -> "Summary":
        """Return the number of ranges, and the keys they are cut at."""
        starts = [shard.span.start for shard in shards]
        cuts = [start for start in starts if start is not None]
        return {"count": len(shards), "cuts": cuts}

    def describe(self) -> dict[str, Any]:
        """Return what is selected; a digest of values and of long queries."""
        return {**self._source.describe(), **dataclasses.asdict(self._values)}

    async def plan(self) -> list[Key]:
        """Return the keys to cut at, for ``partitions`` of other ranks."""
        async with AsyncExitStack() as stack:
            cuts: list[Key] = self.summary(await self.shards(stack))["cuts"]
        return cuts

    def open(self, shard: SQLShard, position: "Position", budget: int) -> SQLReader:
        """Return a reader of a range after the key in ``position``."""
        last = position.get("key")
        return SQLReader(shard.session, shard.span, last, budget, self._deadline)

    @property
    def label(self) -> str:
        """The table or query and the database, without secrets."""
        return f"{self._source.label} of {self._address.label!r}"

    def _new_session(self) -> SQLite | Postgres:
        if self._address.is_sqlite:
            return SQLite(self._address, self._source)
        return Postgres(self._address, self._source, self._values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        driver_of(self._address)  # an import reads files, so not on an event loop

    def __repr__(self) -> str:
        return f"SQLFormat({self._address.label!r}, {self._source.label})"


def _checked(partitions: Any) -> int | list[Key]:
    """Return a number of ranges, or the keys to cut at.

    Raises:
        ValueError: If there would be no range.
    """
    if not hasattr(partitions, "__index__"):
        if isinstance(partitions, (str, bytes)) or not isinstance(partitions, Iterable):
            kind = type(partitions).__name__
            raise TypeError(
                f"partitions must be a number or a list of keys, got {kind}"
            )
        return [encoded(bound) for bound in partitions]
    if operator.index(partitions) < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    return operator.index(partitions)
