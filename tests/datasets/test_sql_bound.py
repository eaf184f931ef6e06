"""How much a reader of a database holds, and how soon it ends."""

import asyncio
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import SQLDataset, SQLRows
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets._sql.session import SQLReader
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.pg import Database, database, postgresql, server, sqlite
from datasets.sql_reads import opened

__all__ = ["database", "postgresql", "server", "sqlite"]

LARGE, COUNT = 200_000, 40
BUDGET = 1_600_000  # so a batch is of 400,000 bytes: two rows


def fill(database: Database, small: int = 0) -> None:
    blob = f"zeroblob({LARGE})"
    if database.kind == "postgresql":
        blob = f"decode(repeat('00', {LARGE}), 'hex')"
    numbers = "WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r WHERE"
    database.run(
        f"CREATE TABLE t AS {numbers} n < {small + COUNT - 1}) "
        f"SELECT n AS id, CASE WHEN n < {small} THEN NULL ELSE {blob} END AS b FROM r",
        "CREATE UNIQUE INDEX t_id ON t (id)",
    )


async def batches(reader: SQLReader) -> list[list[Any]]:
    """Return the rows of each batch; one is held while the next one is read."""
    found: list[list[Any]] = []
    while len(block := await reader.pull(10**9)):
        found.append(list(block))
    return found


def check_held(found: list[list[Any]]) -> None:
    """See that two batches in turn are within the budget, and have few rows."""
    assert sum(map(len, found)) == COUNT
    assert max(map(len, found)) <= 3
    sizes = [
        sum(
            len(value)
            for row in rows
            for value in row.values()
            if isinstance(value, (str, bytes))
        )
        for rows in found
    ]
    assert max(map(sum, pairwise([0, *sizes]))) <= BUDGET + 100 * COUNT


@pytest.mark.parametrize("has_parameters", [False, True])
async def test_large_rows_are_bounded_by_their_bytes(
    database: Database, has_parameters: bool
) -> None:
    fill(database)
    query = f"SELECT * FROM t WHERE id < {database.sign}" if has_parameters else "t"
    parameters = (10**6,) if has_parameters else ()
    made = SQLFormat(database.url, query, key="id", partitions=1, parameters=parameters)
    async with opened(made, BUDGET) as (reader,):
        check_held(await batches(reader))


async def test_large_rows_after_small_ones(sqlite: Database) -> None:
    """A range starts with one row: its own rows say how large they are."""
    fill(sqlite, small=2000)
    made = SQLFormat(sqlite.url, "t", key="id", partitions=[2000])
    async with opened(made, BUDGET) as (_, reader):
        check_held(await batches(reader))


async def test_small_rows_are_read_in_few_batches(database: Database) -> None:
    """They grow eightfold to their size."""
    database.fill("t", 20_000)
    made = SQLFormat(database.url, "t", key="id", partitions=1)
    async with opened(made) as (reader,):
        found = await batches(reader)
    assert sum(map(len, found)) == 20_000
    assert len(found) < 10


def counting(last: str = "") -> str:
    where = f"WHERE x < {last}" if last else ""
    rows = f"SELECT 1 UNION ALL SELECT x + 1 FROM c {where}"
    return f"(WITH RECURSIVE c(x) AS ({rows}) SELECT count(*) FROM c)"


async def test_a_lookup_that_never_ends_is_interrupted(sqlite: Database) -> None:
    sqlite.fill("t", 3)
    sqlite.run(f"CREATE VIEW slow AS SELECT id, {counting()} AS n FROM t")
    rows = SQLRows(sqlite.url, "slow", key="id", keys=[0])
    reading = asyncio.create_task(rows[0])
    await asyncio.sleep(0)
    await rows.aclose()
    with pytest.raises(DatasetError, match="interrupted"):
        await reading


_ENDLESS = """
import sys
from aioloader import DataLoader
from aioloader.datasets import SQLDataset
from aioloader.errors import BatchTimeoutError
with DataLoader(SQLDataset(sys.argv[1], "slow", key="id"), timeout=0.5) as loader:
    try:
        list(loader)
    except BatchTimeoutError:
        print("timed out")
"""


@pytest.mark.slow
def test_a_scan_that_never_ends_lets_the_process_end(sqlite: Database) -> None:
    sqlite.fill("t", 3)
    sqlite.run(f"CREATE VIEW slow AS SELECT id, {counting()} AS n FROM t")
    found = subprocess.run(
        [sys.executable, "-c", _ENDLESS, sqlite.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout == "timed out\n"
    assert "runs on in its thread" in found.stderr


@pytest.mark.parametrize("make", [SQLDataset, SQLRows])
def test_a_file_that_ends_within_a_page(make: Any, sqlite: Database) -> None:
    """SQLite takes the rest of it to be zeros, and so of rows there."""
    sqlite.fill("t", 3)
    path = Path(sqlite.url.removeprefix("sqlite:///"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TruncatedReadError, match="ends within a page of 4,096 bytes"):
        list(DataLoader(make(sqlite.url, "t", key="id")))
