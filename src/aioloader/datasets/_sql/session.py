"""One iteration over a table or query: a snapshot, and connections that read it.

What both kinds of databases share; ``sqlite`` and ``postgres`` say how each connects,
finds types, cuts the key and reads a range.
"""

import abc
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader.datasets._sql.keys import Key, Span, spans_of
from aioloader.datasets._sql.source import Source, column, select

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._sql.address import Address
    from aioloader.datasets._sql.connection import Connection
    from aioloader.datasets._sql.postgres_values import Values
    from aioloader.errors import DatasetError

Batches: TypeAlias = "Generator[pa.RecordBatch, None, None]"


class Session(abc.ABC):
    """One iteration.

    Args:
        address: The database.
        source: The table or query.
        values: Conversion of values without an Arrow type.

    Attributes:
        names: The columns to deliver, after ``begin``.
    """

    # The sign of a numbered parameter.
    _sign: str

    def __init__(self, address: "Address", source: Source, values: "Values") -> None:
        self.address = address
        self.source = source
        self.names: Sequence[str] = ()
        self._values = values
        self._selected = ""  # the list after SELECT
        self._key_type = ""  # as in SQL

    @abc.abstractmethod
    async def begin(self, partitions: int | Sequence[Key]) -> list[Span]:
        """Take a snapshot, and divide the source in it.

        Raises:
            ValueError: If the key is unsuitable, or a column does not exist.
        """

    @abc.abstractmethod
    async def join(self) -> "Connection":
        """Return a connection that reads the snapshot; a new one if it is lost.

        Raises:
            RuntimeError: If the iteration is over.
        """

    @abc.abstractmethod
    async def leave(self, connection: "Connection", *, is_sound: bool) -> None:
        """Return a connection; if ``is_sound``, its scan has ended."""

    async def is_lost(self, connection: "Connection") -> bool:  # noqa: ARG002
        """Return whether a connection is lost, after a failure; to a file none is."""
        return False

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    # -- in the connection's thread -----------------------------------------------

    @abc.abstractmethod
    def scan(
        self, connection: "Connection", span: Span, last: Key | None, batch_bytes: int
    ) -> Batches:
        """Yield the rows of a range, in order.

        Args:
            connection: Returned by ``join``.
            span: The range.
            last: Key of the last row read; None: start at the beginning.
            batch_bytes: Approximate size of a batch.
        """

    def failures(self, batch: "pa.RecordBatch") -> "dict[int, DatasetError]":  # noqa: ARG002
        """Return the rows of a batch that cannot be read, with their errors."""
        return {}

    @abc.abstractmethod
    def _plan(self, connection: "Connection") -> None:
        """Find the columns and their types, and check the key."""

    @abc.abstractmethod
    def _cuts(self, connection: "Connection", partitions: int) -> list[Key]:
        """Return keys that cut the source into parts with about equally many rows."""

    @abc.abstractmethod
    def _bound(self, key: Key) -> Any:
        """Return a key as a parameter."""

    def _divided(
        self, connection: "Connection", partitions: int | Sequence[Key]
    ) -> list[Span]:
        """Plan, and return the ranges.

        Raises:
            ValueError: If bounds were given that do not rise in the order of the key.
        """
        self._plan(connection)
        if isinstance(partitions, int):
            cuts = self._cuts(connection, partitions) if partitions > 1 else []
            return spans_of(cuts, partitions)
        # An empty part with the key itself provides its collation.
        first = len(self.source.parameters) + 1
        nothing = self.source.select(f"{self._key} AS k, 0 AS n", "WHERE 1 = 0")
        given = [
            f"SELECT CAST({self._sign}{first + n} AS {self._key_type}), {n}"
            for n in range(len(partitions))
        ]
        bounds = " UNION ALL ".join((nothing, *given))
        pairs = select("k, lag(k) OVER (ORDER BY n) AS before", f"({bounds}) AS b")
        falls = select("count(*)", f"({pairs}) AS c", "WHERE k <= before")
        parameters = (*self.source.parameters, *map(self._bound, partitions))
        if connection.fetch(falls, parameters) != [(0,)]:
            raise ValueError(
                "bounds in partitions must rise, in the order of the database"
            )
        return spans_of(list(partitions), len(partitions) + 1)

    @property
    def _key(self) -> str:
        return column(self.source.key)

    @property
    def _read(self) -> Sequence[str]:  # the columns to deliver, and the key
        has_key = self.source.key in self.names
        return self.names if has_key else (*self.names, self.source.key)

    def _ask(
        self,
        connection: "Connection",
        what: str,
        *more: str,
        values: Sequence[Any] = (),
    ) -> list[Any]:
        """Return the rows of a SELECT from the source, with values for its signs."""
        sql = self.source.select(what, *more)
        return connection.fetch(sql, (*self.source.parameters, *values))

    def _check_null(self, connection: "Connection") -> None:
        """Check that no key is NULL.

        Raises:
            ValueError: If one is.
        """
        if self._ask(connection, "1", f"WHERE {self._key} IS NULL LIMIT 1"):
            name = self.source.key
            raise ValueError(f"key {name!r} is NULL in some rows; it must not be")

    def _collation_error(self, exact: str) -> ValueError:
        """Return the error for a key whose collation equates different texts.

        Their order is arbitrary, so reading could not resume between them.

        Args:
            exact: A collation that tells all texts apart.
        """
        name = self.source.key
        return ValueError(
            f"the collation of key {name!r} equates different texts; make a key in a "
            f"query: SELECT {name} COLLATE {exact} AS id, ..."
        )

    def _statement(self, span: Span, bound: str) -> str:
        """Return the query for a range.

        Args:
            span: The range.
            bound: The expression for a bound, with ``{}`` for its name.
        """
        bounds = [
            f"{self._key} {sign} {bound.format(name)}"
            for name, sign, _ in span.bounds()
        ]
        where = f"WHERE {' AND '.join(bounds)}" if bounds else ""
        return self.source.select(self._selected, where, "ORDER BY", self._key)
