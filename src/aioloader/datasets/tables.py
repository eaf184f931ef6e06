"""Streams of tables: Parquet files, Arrow files and databases, in columns.

A row is a dict of column to value. A loader with the default collate function never
makes rows: each batch is cut from the columns, and becomes one tensor per column.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from aioloader._base.extras import imported
from aioloader.datasets._checks import check_word, names_options
from aioloader.datasets._sql.address import Infinity, Numeric
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.datasets.sharded import (
    Addresses,
    OrderOptions,
    ShardedStream,
    StoredStream,
    StreamOptions,
)

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


def _format(module: str, name: str) -> Any:
    why = "Parquet and Arrow files need pyarrow"
    imported("pyarrow", "arrow", why)
    made = imported(f"aioloader.datasets._arrow.{module}", "arrow", why)
    return getattr(made, name)


class ParquetDataset(StoredStream[Row]):
    """Streams rows from Parquet files; needs the extra ``arrow``.

    Its shards are row groups. Only the bytes of the wanted columns are requested from
    an object. The files are unified into one table like ``pyarrow.unify_schemas``: they
    may differ in the order of columns, in the width of strings, lists and numbers, and
    in columns that are all NULL. A missing column, a type incompatible with the others'
    and a value that would change are errors that name the files; smaller floats of
    ``schema`` are rounded, and infinite beyond their range, as in Arrow.

    Directories named ``key=value`` (``"year=2024/"``, as Hive, Spark and pyarrow write
    them) are columns, after those of the files: int32 if all values are, or text, or of
    the type in ``schema``. Files that ``filters`` on them leave out are not opened.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/{000..127}.parquet"``.
        columns: Names of the columns to read; default: those of ``schema``, or of the
            first file, with a warning if another has more.
        nulls: Column to the value that replaces NULL; in other columns a NULL is
            ``None``, which cannot be collated.
        schema: A ``pyarrow.Schema`` with the columns and types for all files; columns
            that a file lacks are NULL.
        filters: The rows to read, as in ``pyarrow.parquet``: an expression or a list
            such as ``[("year", ">", 2020)]``. Row groups are skipped by their
            statistics, then rows are tested exactly. ``nulls`` apply afterwards.
        options: ``store``, ``store_options``, ``shuffle``, ``interleave``, ``cache``
            and all others of ``StoredStream``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        columns: Iterable[str] | None = None,
        *,
        nulls: Mapping[str, Any] | None = None,
        schema: "pa.Schema | None" = None,
        filters: Any = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(
            _format("parquet", "ParquetFormat"),
            columns=columns,
            nulls=nulls,
            schema=schema,
            filters=filters,
        )
        super().__init__(addresses, made_by, **options)


class ArrowDataset(StoredStream[Row]):
    """Streams rows from Arrow IPC files and streams; needs the extra ``arrow``.

    Its shards are record batches (of files) or whole files (of streams). Names of
    directories are columns as for ``ParquetDataset``.

    Args:
        addresses: As for ``ParquetDataset``.
        columns: As for ``ParquetDataset``.
        nulls: As for ``ParquetDataset``.
        schema: As for ``ParquetDataset``.
        filters: As for ``ParquetDataset``, but nothing is skipped.
        missing_end: As for ``TarDataset``: of streams, whose end has a mark.
        options: As for ``ParquetDataset``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        columns: Iterable[str] | None = None,
        *,
        nulls: Mapping[str, Any] | None = None,
        schema: "pa.Schema | None" = None,
        filters: Any = None,
        missing_end: MissingEnd = "error",
        **options: Unpack[StreamOptions],
    ) -> None:
        check_word(missing_end, MissingEnd, "missing_end")
        made_by = partial(
            _format("ipc", "ArrowFormat"),
            missing_end=missing_end,
            columns=columns,
            nulls=nulls,
            schema=schema,
            filters=filters,
        )
        super().__init__(addresses, made_by, **options)


class CSVDataset(StoredStream[Row]):
    """Streams rows from CSV files; needs the extra ``arrow``.

    Its shards are ranges of lines, or whole files that are compressed or may have
    newlines in values. Types not given are inferred from the first lines of all files;
    a line that cannot be read is one failed sample, which names its offset. Names of
    directories are columns as for ``ParquetDataset``.

    Args:
        addresses: Paths or URLs. Names that end in ``.gz``, ``.zst``, ``.bz2`` or
            ``.lz4`` are decompressed.
        columns: As for ``ParquetDataset``.
        column_names: Names of the columns, for files whose first line has none.
        column_types: Column to type: ``pyarrow.int8()``, or ``"int8"``.
        schema: As for ``ParquetDataset``.
        nulls: As for ``ParquetDataset``.
        filters: As for ``ParquetDataset``, but nothing is skipped.
        delimiter: Separates values; for this and the following see ``pyarrow.csv``.
        quote_char: Encloses values, or ``False``.
        escape_char: Precedes a literal character, or ``False``.
        newlines_in_values: Whether quoted values may have newlines.
        null_values: Spellings of NULL; default: the empty value, ``NULL``, ``NaN`` and
            such.
        strings_can_be_null: Whether they apply to text columns too.
        options: As for ``ParquetDataset``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    @names_options
    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        addresses: Addresses,
        columns: Iterable[str] | None = None,
        *,
        column_names: Sequence[str] | None = None,
        column_types: Mapping[str, Any] | None = None,
        schema: "pa.Schema | None" = None,
        nulls: Mapping[str, Any] | None = None,
        filters: Any = None,
        delimiter: str = ",",
        quote_char: str | bool = '"',
        escape_char: str | bool = False,
        newlines_in_values: bool = False,
        null_values: Sequence[str] | None = None,
        strings_can_be_null: bool = False,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(
            _format("csv", "CSVFormat"),
            dialect=_format("csv", "Dialect")(
                delimiter,
                quote_char,
                escape_char,
                newlines_in_values,
                null_values,
                strings_can_be_null,
            ),
            column_names=column_names,
            column_types=column_types,
            columns=columns,
            nulls=nulls,
            schema=schema,
            filters=filters,
        )
        super().__init__(addresses, made_by, **options)


class SQLDataset(ShardedStream[Row]):
    """Streams rows of a table or query by ranges of a key; needs the extra ``sql``.

    Its shards are ranges of the key, read in parallel in one snapshot of the database.
    A state holds the last key, because a snapshot does not outlive its session: a
    resumed run sees the database as it is then.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user@host/name``; for a Unix socket
            ``postgresql:///name?host=/directory``.
        query: A table, ``name`` or ``schema.name``, or a SELECT.
        key: A unique column without NULLs, which should have an index.
        columns: The columns to read, in order; default: all.
        parameters: Values for the placeholders of a query, ``$1`` for PostgreSQL and
            ``?`` for SQLite.
        partitions: Number of ranges of the key; or the keys to split at, so that ranks
            and later runs have the same ranges even if rows are written in between.
        deadline: Seconds in which a lost connection must be restored.
        numeric: Type for PostgreSQL's ``numeric`` and ``money``: ``"decimal"``, with
            all digits, which has no tensor form; or ``"float"``, the nearest one.
        infinity: Treatment of its infinite dates: ``"error"``, a failed sample that
            names the row's key, or ``"null"``.
        order: ``shuffle``, ``seed``, ``interleave``, ``deterministic`` and
            ``max_bytes`` of ``ShardedStream``.

    Raises:
        ImportError: If the driver is not installed.
        ValueError: If an argument is wrong.
    """

    @names_options
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
        numeric: Numeric = "decimal",
        infinity: Infinity = "error",
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
            numeric=numeric,
            infinity=infinity,
        )
        super().__init__(made_by, **order)

    def __repr__(self) -> str:
        return repr(self.made_by).replace("SQLFormat", "SQLDataset")
