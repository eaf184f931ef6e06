"""Streams of tables: Parquet files, Arrow files and databases, in columns.

A row is a dict of column to value. A loader with the default collate function never
makes rows: each batch is cut out of the columns, and becomes one tensor per column.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from aioloader.datasets._arrow.files import TableFormat
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._options import OrderOptions, StreamOptions
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets.sharded import ShardedStream, StoredStream

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses

Row = dict[str, Any]


class _TableFiles(StoredStream[Row]):
    """What both kinds of files share."""

    _format: ClassVar[type[TableFormat[Any]]]

    def __init__(
        self,
        addresses: "Addresses",
        columns: Iterable[str] | None = None,
        *,
        nulls: Mapping[str, Any] | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(self._format, addresses, columns=columns, nulls=nulls)
        super().__init__(addresses, made_by, **options)


class ParquetDataset(_TableFiles):
    """Stream rows from Parquet files; needs the extra ``arrow``.

    Its shards are row groups. Of an object, only the bytes of the wanted columns are
    requested. A file that lacks a column of the first one, or has it in another type,
    is an error that names both.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/{000..127}.parquet"``.
        columns: Names of the columns to read; default: those of the first file.
        nulls: Column to the value that is read instead of NULL; elsewhere a NULL is
            ``None``, which cannot be collated.
        options: ``store``, ``store_options``, ``shuffle``, ``interleave``, ``cache``
            and all others of ``StoredStream``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    _format = ParquetFormat


class ArrowDataset(_TableFiles):
    """Stream rows from Arrow IPC files and streams; needs the extra ``arrow``.

    Its shards are record batches (of files) or whole files (of streams).

    Args:
        addresses: As for ``ParquetDataset``.
        columns: As for ``ParquetDataset``.
        nulls: As for ``ParquetDataset``.
        options: As for ``ParquetDataset``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    _format = ArrowFormat


class SQLDataset(ShardedStream[Row]):
    """Stream rows of a table or a query by ranges of a key; needs the extra ``sql``.

    Its shards are ranges of the key, read side by side inside one snapshot of the
    database. A state holds the last key, for a snapshot does not outlive its session: a
    run that is resumed sees the database as it is then.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user@host/name``; for a Unix socket
            ``postgresql:///name?host=/directory``.
        query: A table, ``name`` or ``schema.name``, or a SELECT.
        key: A unique column without NULLs, which should have an index.
        columns: The columns to read, in order; default: all.
        parameters: Values for the placeholders of a query, ``$1`` for PostgreSQL and
            ``?`` for SQLite.
        partitions: Into how many ranges the key is cut; or the keys to cut at, so that
            ranks and later runs have the same ranges whatever is written meanwhile.
        deadline: Seconds that a lost connection may take to come back.
        order: ``shuffle``, ``seed``, ``interleave``, ``deterministic`` and
            ``max_bytes`` of ``ShardedStream``.

    Raises:
        ImportError: If the driver is not installed.
        ValueError: If an argument is wrong.
    """

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        url: str,
        query: str,
        *,
        key: str,
        columns: Iterable[str] | None = None,
        parameters: Sequence[Any] = (),
        partitions: int | Sequence[Any] = 8,
        deadline: float = 120.0,
        **order: Unpack[OrderOptions],
    ) -> None:
        made_by = SQLFormat(
            url,
            query,
            key=key,
            columns=columns,
            parameters=parameters,
            partitions=partitions,
            deadline=deadline,
        )
        self._shown = repr(made_by)
        super().__init__(made_by, **order)

    def __repr__(self) -> str:
        return self._shown.replace("SQLFormat", "SQLDataset")
