"""A format whose shards are key ranges of a database table or query.

Rows come in key order. The budget limits the memory for rows read ahead. ADBC bundles
its own copy of SQLite, and two copies in one process ignore each other's locks: to
write a file with ``sqlite3`` while it is read here, use another process.
"""

import operator
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from aioloader.datasets._checks import check_at_least
from aioloader.datasets._sql.address import (
    DatabaseURL,
    Infinity,
    Numeric,
    Relation,
    is_list,
    retried,
)
from aioloader.datasets._sql.postgres import Postgres
from aioloader.datasets._sql.session import (
    Key,
    KeyRange,
    Session,
    SQLReader,
    driver_of,
    encoded,
)
from aioloader.datasets._sql.sqlite import SQLite
from aioloader.datasets._stores.redact import Sealed
from aioloader.datasets._streams.shards import ShardFormat, ShardPosition, Summary

# A key range (None for an empty shard), and the session that reads it.
SQLShard: TypeAlias = tuple[KeyRange | None, Session]


class SQLFormat(ShardFormat[SQLShard]):
    """A format for a table or query, read in ranges of a unique key, in key order.

    All ranges of an iteration read one snapshot. A state contains the keys between
    ranges, and each range's last delivered key. A resumed iteration reads later rows
    from a new snapshot. Steps that read ahead (``shuffle``, async ``map``, ``readers``)
    rewind by counting rows, which is exact unless the counted rows have changed.

    See ``SQLDataset`` for the arguments. The URL may be sealed. ``partitions`` may be
    the result of ``plan`` on another rank, so that all ranks have the same ranges.
    """

    changes = True

    def __init__(  # noqa: PLR0913  (keywords)
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
        if deadline < 0:
            raise ValueError(f"deadline must not be negative, got {deadline}")
        self._address = DatabaseURL(url)
        self._relation = Relation(query, key, columns, parameters, numeric, infinity)
        self._partitions = _checked(partitions)
        self._deadline = deadline
        driver_of(self._address)

    async def shards(
        self, stack: AsyncExitStack, known: Summary | None = None
    ) -> list[SQLShard]:
        """Take a snapshot, and return its key ranges, cut as in ``known`` if given."""
        known = known or {}
        kind = SQLite if self._address.is_sqlite else Postgres
        session = kind(self._address, self._relation, self._deadline)
        stack.push_async_callback(session.aclose)
        cuts = known.get("cuts", self._partitions)

        async def begin() -> list[KeyRange] | ValueError:
            try:
                return await session.begin(cuts)
            except ValueError as exc:
                return ValueError(f"{self.label}: {exc}")

        spans = await retried(begin, f"open {self._relation.label}", self._address)
        if isinstance(spans, ValueError):
            raise spans
        count = known.get("count", cuts if isinstance(cuts, int) else 0)
        rest = [None] * (count - len(spans))
        return [(span, session) for span in (*spans, *rest)]

    def summary(self, shards: Sequence[SQLShard]) -> Summary:
        """Return how many ranges there are, and the keys between them."""
        starts = [span.start for span, _ in shards if span is not None]
        cuts = [start for start in starts if start is not None]
        return {"count": len(shards), "cuts": cuts}

    def describe(self) -> dict[str, Any]:
        return self._relation.describe()

    async def plan(self) -> list[Key]:
        """Return the keys between ranges, to pass as ``partitions`` on other ranks."""
        async with AsyncExitStack() as stack:
            cuts: list[Key] = self.summary(await self.shards(stack))["cuts"]
        return cuts

    def open(self, shard: SQLShard, position: ShardPosition, budget: int) -> SQLReader:
        """Return a reader of a range; it starts after the key in ``position``."""
        span, session = shard
        return SQLReader(session, span, position.get("key"), budget)

    @property
    def label(self) -> str:
        """The table or query and its database, for messages, without secrets."""
        return f"{self._relation.label} of {self._address.label!r}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        driver_of(self._address)  # import it now: on a loop, an import would block

    def __repr__(self) -> str:
        return f"SQLFormat({self._address.label!r}, {self._relation.label})"


def _checked(partitions: Any) -> int | list[Key]:
    """Check ``partitions``; return the number of ranges, or the keys between them."""
    if hasattr(partitions, "__index__"):
        check_at_least(partitions, 1, "partitions")
        return operator.index(partitions)
    if not is_list(partitions):
        kind = type(partitions).__name__
        raise TypeError(f"partitions must be a number or a list of keys, got {kind}")
    return [encoded(bound) for bound in partitions]
