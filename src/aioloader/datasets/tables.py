"""Streams of tables: Parquet, Arrow and CSV files, and databases.

A row is a dict of values by column. A loader with the default collate function creates
no rows: it slices batches from the columns, as one tensor per column.
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
    implementation = imported(f"aioloader.datasets._arrow.{module}", "arrow", why)
    return getattr(implementation, name)


class ParquetDataset(StoredStream[Row]):
    """Streams rows from Parquet files; needs the extra ``arrow``.

    Shards are row groups. From a store, only the bytes of the selected columns are
    read. Files are unified into one table, like ``pyarrow.unify_schemas``: they may
    differ in the order of columns, in the width of strings, lists and numbers, and in
    columns that are all NULL. A missing column, incompatible types, and values that
    would change are errors that name the files. Only a narrower float type in
    ``schema`` rounds values; those beyond its range become infinity, as in Arrow.

    Directories named ``key=value`` (``"year=2024/"``, as by Hive, Spark and pyarrow)
    add a column after the files' columns. Its type is the one in ``schema``; by
    default, int32 if all values fit, or else text. Files that ``filters`` exclude by
    directory are not opened.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/{000..127}.parquet"``.
        columns: Names of the columns to read. Default: those of ``schema``, or else of
            the first file; a warning tells if another file has more.
        nulls: Replacements for NULL, by column. In other columns, a NULL is ``None``,
            which cannot be collated.
        schema: A ``pyarrow.Schema`` with the columns and types of all files; columns
            that a file lacks are NULL.
        filters: Which rows to read, as in ``pyarrow.parquet``: an expression, or a list
            such as ``[("year", ">", 2020)]``. Row groups are skipped by their
            statistics; rows of other groups are tested. ``nulls`` apply afterwards.
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

    Shards are groups of record batches (up to 4 MiB, or one larger batch) of a file, or
    whole IPC streams. Directory names are columns, as for ``ParquetDataset``.

    Args:
        addresses: As for ``ParquetDataset``.
        columns: As for ``ParquetDataset``.
        nulls: As for ``ParquetDataset``.
        schema: As for ``ParquetDataset``.
        filters: As for ``ParquetDataset``, but without skipping by statistics.
        missing_end: As for ``TarDataset``, for IPC streams without their end marker.
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

    Shards are ranges of lines. A file that is compressed or may have newlines in values
    is one shard. Types that are not given are inferred from the first lines of all
    files. A line that cannot be parsed is one failed sample; its error gives the byte
    offset. Directory names are columns, as for ``ParquetDataset``.

    Args:
        addresses: Paths or URLs. Files whose names end in ``.gz``, ``.zst``, ``.bz2``
            or ``.lz4`` are decompressed.
        columns: As for ``ParquetDataset``.
        column_names: Names of the columns, for files without a header line.
        column_types: Types by column, such as ``pyarrow.int8()`` or ``"int8"``.
        schema: As for ``ParquetDataset``.
        nulls: As for ``ParquetDataset``.
        filters: As for ``ParquetDataset``, but without skipping by statistics.
        delimiter: Character between values; this and the next arguments are those of
            ``pyarrow.csv``.
        quote_char: Character around quoted values, or ``False``.
        escape_char: Character before a literal character, or ``False``.
        newlines_in_values: Whether quoted values may have newlines.
        null_values: Spellings of NULL; default: empty, ``NULL``, ``NaN``...
        strings_can_be_null: Whether ``null_values`` also apply to text columns.
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

    Shards are ranges of the key, read in parallel from one snapshot of the database. A
    resumed run continues after the last key read, from a new snapshot.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user@host/name``; for a Unix socket
            ``postgresql:///name?host=/directory``.
        query: A table, ``name`` or ``schema.name``, or a SELECT.
        key: A unique column without NULLs, which should have an index.
        columns: The columns to read, in order; default: all.
        parameters: Values for the placeholders of a query, ``$1`` for PostgreSQL and
            ``?`` for SQLite.
        partitions: Number of ranges of the key. Or the keys at which to split, so that
            ranks and later runs have the same ranges even if rows are inserted.
        deadline: Seconds within which a lost connection must be restored.
        numeric: Type for PostgreSQL's ``numeric`` and ``money``: ``"decimal"``, which
            keeps all digits but cannot become a tensor; or ``"float"``, which rounds.
        infinity: How to read PostgreSQL's infinite dates: ``"error"``, as a failed
            sample that names the row's key, or ``"null"``.
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
