"""One snapshot for all ranges; what is held, what is closed; ranges as a stream."""

import asyncio
import os
import pickle
import subprocess
import sys
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import pytest

from aioloader import DataLoader
from aioloader.datasets import SQLDataset, SQLRows
from aioloader.datasets._sql.format import SQLFormat
from aioloader.datasets._sql.session import SQLReader
from aioloader.errors import DatasetError, TruncatedReadError
from beside import beside
from datasets.pg import Database, keys_of, opened, rest_of

# -- one snapshot -----------------------------------------------------------------


async def test_what_is_written_meanwhile_is_not_seen(database: Database) -> None:
    database.fill("t", 4000)
    async with opened(SQLFormat(database.url, "t", key="id", partitions=4)) as readers:
        rows = [*await readers[0].pull(10)]
        await beside(
            lambda: database.run(
                "DELETE FROM t WHERE id % 2 = 0",
                "UPDATE t SET value = -1",
                "INSERT INTO t VALUES (-5, 0, ''), (100000, 0, '')",
            )
        )
        for reader in readers:
            rows += await rest_of(reader)
    assert [row["id"] for row in rows] == [*range(4000)]
    assert [row["value"] for row in rows] == [n / 2 for n in range(4000)]
    assert len(await keys_of(SQLFormat(database.url, "t", key="id"))) == 2002


async def test_without_a_log_writers_wait(tmp_path: Path) -> None:
    """A rollback journal lets nobody write while the snapshot is read; then it does."""
    plain = Database(tmp_path / "plain.db")
    plain.fill("t", 2000)
    delete = "PRAGMA busy_timeout = 0", "DELETE FROM t WHERE id = 0"
    made = SQLFormat(plain.url, "t", key="id", partitions=3)
    async with opened(made) as readers:
        await readers[0].pull(1)
        with pytest.raises(AssertionError, match="locked"):
            await beside(lambda: plain.run(*delete))
        rows = [row for reader in readers for row in await rest_of(reader)]
        assert len(rows) == 1999
        for reader in readers:
            await reader.aclose()
    assert len(await keys_of(made)) == 2000
    await beside(lambda: plain.run(*delete))
    assert len(await keys_of(made)) == 1999


async def test_two_iterations_have_snapshots_of_their_own(database: Database) -> None:
    database.fill("t", 300)
    made = SQLFormat(database.url, "t", key="id", partitions=2)
    async with opened(made) as old:
        await old[0].pull(1)
        await beside(lambda: database.run("DELETE FROM t WHERE id >= 100"))
        async with opened(pickle.loads(pickle.dumps(made))) as new:
            for readers, count in ((new, 100), (old, 299)):
                rows = [row for reader in readers for row in await rest_of(reader)]
                assert len(rows) == count


# -- memory, and ends -------------------------------------------------------------


async def test_what_stops_reading_is_no_end(database: Database) -> None:
    database.fill("t", 2000)
    made = SQLFormat(database.url, "t", key="id", partitions=1)
    async with opened(made) as readers:
        before = asyncio.all_tasks()
        readers[0].begin()
        (task,) = asyncio.all_tasks() - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rest_of(readers[0])
    async with AsyncExitStack() as stack:
        shards = await made.shards(stack)
        reader = made.open(shards[0], {}, BUDGET)
    with pytest.raises(DatasetError, match="the iteration is over"):
        await rest_of(reader)
    await reader.aclose()


async def test_closing_stops_the_server_s_work(postgresql: Database) -> None:
    postgresql.fill("t", 3)
    slow = "(SELECT count(*) FROM generate_series(1, 1000000000 + t.id))"
    query = f"SELECT id, {slow} AS x FROM t"
    made = SQLFormat(postgresql.url, query, key="id", partitions=[])
    async with asyncio.timeout(20), opened(made) as readers:
        readers[0].begin()
        while not await beside(lambda: working(postgresql)):
            pass
    assert not await beside(lambda: working(postgresql))


def working(postgresql: Database) -> int:
    count: int = postgresql.run(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COPY%x%' "
        "AND state = 'active' AND datname = current_database() "
        "AND pid <> pg_backend_pid()"
    )[0][0]
    return count


# -- as a stream ------------------------------------------------------------------


async def test_one_driver_and_few_connections(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL's driver reads all types when it is loaded: once, for all ranges.

    One after the other, they take two connections: the leader's and a reader's.
    """
    postgresql.fill("t", 100)
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aioloader'"
    loaded: list[Any] = []
    driver = adbc_driver_postgresql.dbapi
    connect = driver.connect

    def counted(*args: Any, **options: Any) -> Any:
        loaded.append(args)
        return connect(*args, **options)

    monkeypatch.setattr(driver, "connect", counted)
    made = SQLFormat(postgresql.url, "t", key="id", partitions=4)
    async with opened(made) as readers:
        rows = [len(await rest_of(reader)) for reader in readers]
        assert (await beside(lambda: postgresql.run(count)))[0][0] == 2
    assert sum(rows) == 100
    assert len(loaded) == 1


# -- how much a reader of a database holds, and how soon it ends ----------------------

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


ENDLESS = (
    "CREATE VIEW slow AS SELECT id, (WITH RECURSIVE c(x) AS "
    "(SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c) AS n FROM t"
)


async def test_a_lookup_that_never_ends_is_interrupted(sqlite: Database) -> None:
    sqlite.fill("t", 3)
    sqlite.run(ENDLESS)
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
    sqlite.run(ENDLESS)
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
