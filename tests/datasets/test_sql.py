"""Ranges of a key: each row once, in order, in one snapshot, resumed from any row."""

import asyncio
import json
import os
import sqlite3
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import DataLoader
from aioloader.datasets import ShardReader, SQLDataset, SQLRows
from aioloader.datasets._sql import sqlite as sqlite_files
from aioloader.datasets.sql import SQLFormat
from aioloader.errors import DatasetError, TruncatedReadError
from beside import beside
from datasets.pg import Database, keys_of, listed, opened, parts_of, rest_of, rows_of
from datasets.shards import read, source_state
from python_process import python

# The key of row n, its PostgreSQL type, and whether SQLite can have it.
KEYS = {
    "dense": ("n", "int8", True),
    "from below zero": ("n * 3 - 1500", "int8", True),
    "thick and thin": ("CASE WHEN n < 900 THEN n ELSE n * 1000000 END", "int8", True),
    "extreme": (
        f"CASE n WHEN 0 THEN {-(2**63) + 1} - 1 WHEN 1 THEN {2**63 - 1} ELSE n END",
        "int8",
        True,
    ),
    "small integers": ("n", "int2", True),
    "text": ("'k' || n || CASE n % 3 WHEN 0 THEN ' x''\"' WHEN 1 THEN 'é' ELSE '' END",
             "text", True),
    "varchar": ("'k' || n", "varchar(9)", False),
    "char": ("'k' || n", "char(9)", False),
    "uuid": ("md5(n::text)::uuid", "uuid", False),
    "date": ("DATE '1999-01-01' + n", "date", False),
    "timestamp": ("TIMESTAMP '1969-12-31' + n * INTERVAL '1 day 1 microsecond'",
                  "timestamp", False),
    "timestamptz": ("TIMESTAMPTZ '1969-12-31 00:00+02' + n * INTERVAL '7 hours'",
                    "timestamptz", False),
    "bytea": ("decode(md5(n::text), 'hex')", "bytea", False),
}  # fmt: skip
ROWS = 1000


def make(database: Database, name: str) -> None:
    expression, kind, has_sqlite = KEYS[name]
    if database.kind == "sqlite":
        if not has_sqlite:
            pytest.skip("SQLite has no such type")
        kind = {"text": "TEXT"}.get(kind, "INTEGER")
    database.run(
        f"CREATE TABLE t (id {kind} PRIMARY KEY, n INTEGER)",
        f"INSERT INTO t WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 "
        f"FROM r WHERE n < {ROWS - 1}) SELECT {expression}, n FROM r "
        "ORDER BY n * 7919 % 10007",
    )


def in_order(database: Database) -> list[int]:
    return [row[0] for row in database.run("SELECT n FROM t ORDER BY id")]


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
async def test_keys_of_any_kind_give_all_rows(database: Database, name: str) -> None:
    """Each once and in order: by ranges, by key, and cut again on resuming."""
    make(database, name)
    expected = in_order(database)
    for partitions in (1, 5):
        made = SQLFormat(database.url, "t", key="id", partitions=partitions)
        parts = await parts_of(made)
        assert [row["n"] for part in parts for row in part] == expected
        assert len(parts) == partitions
        assert max(map(len, parts)) <= 2 * ROWS // partitions
    async with listed(database) as rows:
        looked_up = await rows.__getitems__(range(ROWS))
        assert [row["n"] for row in looked_up] == expected
        assert isinstance(rows.keys, np.ndarray) is KEYS[name][1].startswith("int")
    stream: Any = SQLDataset(database.url, "t", key="id", columns=["n"])
    head, state = await read(stream, 400)
    await beside(lambda: database.run("DELETE FROM t WHERE n % 2 = 0"))
    rest, _ = await read(stream, state=state)
    numbers = [row["n"] for row in head + rest]
    assert numbers == expected[:400] + [n for n in expected[400:] if n % 2]


@pytest.mark.slow
async def test_large_tables_are_cut_into_even_parts(database: Database) -> None:
    """PostgreSQL looks at some pages only, SQLite at some keys."""
    database.fill("t", 100_000, key="1000 + n * 5")
    made = SQLFormat(database.url, "t", key="id", columns=["id"], partitions=8)
    sizes = [len(part) for part in await parts_of(made, 10_000)]
    assert sum(sizes) == 100_000
    assert max(sizes) < 1.3 * 100_000 / 8


@pytest.mark.slow
@given(
    st.sets(st.integers(-(2**63), 2**63 - 1), max_size=60),
    st.integers(1, 9),
    st.integers(1, 70),
)
async def test_any_integer_keys_are_read_in_order(
    tmp_path_factory: Any, keys: set[int], partitions: int, limit: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO t VALUES (?)", [(key,) for key in keys])
    connection.commit()
    connection.close()
    made = SQLFormat(f"sqlite:///{path}", "t", key="id", partitions=partitions)
    rows = await rows_of(made, limit)
    assert [row["id"] for row in rows] == sorted(keys)


# -- what is read -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "SELECT id, value * 2 AS twice FROM t WHERE id >= 40",
        "  -- first\n select id, value * 2 AS twice FROM t WHERE id >= 40 ; \n",
        (
            "/* a */ WITH x AS (SELECT * FROM t WHERE id >= 40)\n"
            "SELECT id, value * 2 AS twice FROM x -- last"
        ),
        (
            "SELECT a.id, max(a.value) * 2 AS twice FROM t AS a\n"
            "JOIN t AS b ON a.id = b.id WHERE b.id >= 40 GROUP BY a.id"
        ),
    ],
)
async def test_queries_are_read_as_tables_are(database: Database, query: str) -> None:
    database.fill("t", 100)
    rows = await rows_of(SQLFormat(database.url, query, key="id", partitions=3))
    assert rows == [{"id": n, "twice": float(n)} for n in range(40, 100)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        "CREATE VIEW v AS SELECT id, n FROM t WHERE id > 9",
        "CREATE TABLE v AS SELECT id, n FROM t WHERE id > 9",
    ],
)
async def test_keys_need_no_index(database: Database, made: str) -> None:
    database.run("CREATE TABLE t (id INTEGER, n INTEGER)")
    database.run("INSERT INTO t VALUES (13, 0), (11, 1), (12, 2), (9, 3)", made)
    stream = SQLFormat(database.url, "v", key="id", partitions=2)
    assert await keys_of(stream) == [11, 12, 13]


async def test_sqlites_rowid_may_be_the_key(sqlite: Database) -> None:
    """It is not delivered unless asked for."""
    sqlite.run("CREATE TABLE t (n TEXT)", "INSERT INTO t VALUES ('a'), ('b'), ('c')")
    made = SQLFormat(sqlite.url, "t", key="rowid", partitions=2)
    assert await rows_of(made) == [{"n": "a"}, {"n": "b"}, {"n": "c"}]
    made = SQLFormat(sqlite.url, "t", key="rowid", columns=["rowid"])
    assert await keys_of(made, "rowid") == [1, 2, 3]


async def test_partitioned_tables_are_cut_evenly(postgresql: Database) -> None:
    postgresql.run(
        "CREATE TABLE t (id INT PRIMARY KEY, n INT) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (700)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (700) TO (2000)",
        "INSERT INTO t SELECT i, i FROM generate_series(0, 1999) AS i",
    )
    name = f"{postgresql.schema}.t"
    parts = await parts_of(SQLFormat(postgresql.url, name, key="id", partitions=4))
    assert [row["id"] for part in parts for row in part] == [*range(2000)]
    assert max(map(len, parts)) < 510


# -- cutting ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [[5, 3], [5, 5], [1, 7, 2]])
async def test_bounds_must_rise(database: Database, bounds: list[int]) -> None:
    database.fill("t", 10)
    made = SQLFormat(database.url, "t", key="id", partitions=bounds)
    words = "table 't' of .*bounds in partitions must rise"
    with pytest.raises(ValueError, match=words):
        await parts_of(made)


# -- streams of rows resume, whatever was written since -------------------------------

# Rows before and after every earlier row, and rows deleted everywhere.
WRITES = (
    "INSERT INTO t SELECT id + 3, value, name FROM t",
    "INSERT INTO t SELECT -1 - id, value, name FROM t",
    "INSERT INTO t SELECT id + 10000, value, name FROM t",
    "DELETE FROM t WHERE id % 7 = 0",
)


def stream_of(database: Database, **options: Any) -> Any:
    return SQLDataset(database.url, "t", key="id", columns=["id"], **options)


async def keys(
    stream: Any, count: int | None = None, state: Any = None
) -> tuple[list[int], Any]:
    rows, state = await read(stream, count, state)
    return [row["id"] for row in rows], state


def check(state: Any, seen: list[int], rest: list[int], now: list[int]) -> None:
    """Check that each range resumes after its last key, or was over and has no rows.

    Rows were the tens before they were written.
    """
    cuts = source_state(state)["shards"]["cuts"]
    assert len({*rest}) == len(rest)
    for start, stop in pairwise([-(2**63), *cuts, 2**63]):
        last = max((key for key in seen if start <= key < stop), default=start - 1)
        resumed = sorted(key for key in rest if start <= key < stop)
        following = {key for key in now if start <= key < stop and key > last}
        was_over = not any(key % 10 == 0 and key < 10000 for key in following)
        assert resumed == sorted(following) or (was_over and not resumed)


async def written(database: Database) -> list[int]:
    rows = await beside(lambda: database.run(*WRITES, "SELECT id FROM t ORDER BY id"))
    return [row[0] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 100, 333, 800])
@pytest.mark.parametrize("interleave", [1, 3])
async def test_resuming_reads_the_rest_as_it_is_now(
    database: Database, interleave: int, count: int
) -> None:
    database.fill("t", 1000, key="n * 10")
    options: dict[str, Any] = {"shuffle": True, "interleave": interleave}
    head, state = await keys(stream_of(database, **options), count)
    now = await written(database)
    rest, _ = await keys(stream_of(database, **options), state=state)
    assert len(source_state(state)["shards"]["cuts"]) == 7
    check(state, head, rest, now)


@pytest.mark.slow
async def test_resuming_works_after_any_row(sqlite: Database) -> None:
    """Also within a block, within batches, and from a state of a resumed stream."""
    sqlite.fill("t", 60, key="n * 10")
    states = [await keys(stream_of(sqlite, interleave=3), n) for n in range(0, 61, 4)]
    (batch, *_), batched = await read(stream_of(sqlite, interleave=3).batch(8), 1)
    now = await written(sqlite)
    for head, state in [*states, ([row["id"] for row in batch], batched)]:
        inner = source_state(state)
        state["streams"]["0"]["state"] = inner.get("up", inner)
        again = stream_of(sqlite, interleave=3)
        state["stream"] = again.describe()
        again.load_position(state)
        middle, later = await keys(again, 5)
        rest, _ = await keys(again, state=later)
        check(later, head, middle + rest, now)


@pytest.mark.slow
async def test_a_new_iteration_cuts_the_table_again(database: Database) -> None:
    database.fill("t", 400)
    stream = stream_of(database)
    _, state = await keys(stream, 10)
    await beside(lambda: database.run("DELETE FROM t WHERE id < 350"))
    assert (await keys(stream, state=state))[0] == [*range(350, 400)]
    rows, after = await keys(stream)
    assert rows == [*range(350, 400)]
    cuts = [source_state(saved)["shards"]["cuts"] for saved in (state, after)]
    assert max(cuts[0][:6]) < 350 <= min(cuts[1])


@pytest.mark.slow
async def test_ranks_resume_with_their_own_ranges(database: Database) -> None:
    database.fill("t", 1000, key="n * 10")
    bounds = await SQLFormat(database.url, "t", key="id").plan()
    seen: list[int] = []
    states: list[Any] = []
    options: dict[str, Any] = {"partitions": bounds, "interleave": 4, "shuffle": True}
    for rank in range(3):
        part = stream_of(database, **options).shard(rank, 3)
        rows, state = await keys(part, 50 + 90 * rank)
        seen += rows
        states.append(state)
    now = await written(database)
    rest: list[int] = []
    for rank, state in enumerate(states):
        # The table would be cut into other ranges now.
        part = stream_of(database, interleave=4, shuffle=True).shard(rank, 3)
        rest += (await keys(part, state=state))[0]
    assert source_state(states[0])["shards"]["cuts"] == bounds
    check(states[0], seen, rest, now)


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [3, 20, [17]])
async def test_a_state_keeps_its_ranges(database: Database, partitions: Any) -> None:
    database.fill("t", 100)
    head, state = await keys(stream_of(database, partitions=5), 30)
    rest, _ = await keys(stream_of(database, partitions=partitions), state=state)
    assert head + rest == [*range(100)]


async def test_a_state_of_a_table_is_small(database: Database) -> None:
    """Some hundred bytes, although much was read in advance."""
    database.fill("t", 5000)
    _, state = await keys(stream_of(database, interleave=3), 1000)
    del state["stream"]  # which does not grow
    assert len(json.dumps(state)) < 500


# -- one snapshot -----------------------------------------------------------------


async def test_an_iteration_sees_one_snapshot(database: Database) -> None:
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


@pytest.mark.slow
async def test_ranges_agree_while_others_write(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits come between all starts, so the ranges share one connection."""
    start = sqlite_files._start

    def started(connection: Any) -> None:
        start(connection)
        sqlite.run("UPDATE t SET value = value + 1")

    sqlite.fill("t", 200)
    monkeypatch.setattr(sqlite_files, "_start", started)
    monkeypatch.setattr(sqlite_files, "_TRIES", 2)
    rows = await rows_of(SQLFormat(sqlite.url, "t", key="id", partitions=4))
    assert [row["id"] for row in rows] == [*range(200)]
    assert len({row["value"] - row["id"] / 2 for row in rows}) == 1


async def test_without_a_wal_writers_wait(tmp_path: Path) -> None:
    """A rollback journal blocks writers while the snapshot is read."""
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


# -- memory, and ends -------------------------------------------------------------


async def test_a_cancelled_reader_is_not_at_its_end(database: Database) -> None:
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


async def test_closing_stops_the_query_on_the_server(postgresql: Database) -> None:
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


async def batches(reader: ShardReader) -> list[list[Any]]:
    """Return the rows of each batch, which is held while the next one is read."""
    batches: list[list[Any]] = []
    while len(block := await reader.pull(10**9)):
        batches.append(list(block))
    return batches


def check_held(batches: list[list[Any]]) -> None:
    """Check that two successive batches are within the budget, and have few rows."""
    assert sum(map(len, batches)) == COUNT
    assert max(map(len, batches)) <= 3
    sizes = [
        sum(
            len(value)
            for row in rows
            for value in row.values()
            if isinstance(value, (str, bytes))
        )
        for rows in batches
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
    # A range starts with one row, to learn the size of its rows.
    if database.kind == "sqlite" and not has_parameters:
        database.run("DROP TABLE t")
        fill(database, small=2000)
        made = SQLFormat(database.url, "t", key="id", partitions=[2000])
        async with opened(made, BUDGET) as (_, reader):
            check_held(await batches(reader))


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
import sys, threading
from adbc_driver_manager.dbapi import Cursor
from aioloader import DataLoader
from aioloader.datasets import SQLDataset
from aioloader.errors import BatchTimeoutError
begun, execute = threading.Event(), Cursor.execute
def noted(cursor, query, *arguments):
    if "typeof" in query: begun.set()  # the first query that reads rows
    return execute(cursor, query, *arguments)
Cursor.execute = noted
with DataLoader(SQLDataset(sys.argv[1], "slow", key="id"), timeout=0.5) as loader:
    iterator = iter(loader)
    while not begun.is_set():
        try:
            next(iterator)
        except BatchTimeoutError:
            print("timed out")
"""


@pytest.mark.slow
def test_an_endless_scan_does_not_block_the_exit(sqlite: Database) -> None:
    sqlite.fill("t", 3)
    sqlite.run(ENDLESS)
    ended = python("-c", _ENDLESS, sqlite.url, check=True)
    assert {*ended.stdout.splitlines()} == {"timed out"}
    assert "runs on in its thread" in ended.stderr


@pytest.mark.parametrize("make", [SQLDataset, SQLRows])
def test_a_file_cut_within_a_page_is_truncated(make: Any, sqlite: Database) -> None:
    """SQLite would take the missing bytes for zeros, and so for rows."""
    sqlite.fill("t", 3)
    path = Path(sqlite.url.removeprefix("sqlite:///"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TruncatedReadError, match="ends within a page of 4,096 bytes"):
        list(DataLoader(make(sqlite.url, "t", key="id")))
