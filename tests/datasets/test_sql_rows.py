"""Rows by key: many in one query, in the given order, despite lost connections."""

import asyncio
import pickle
import uuid
from typing import Any

import asyncpg
import pytest
import torch

from aioloader import DataLoader
from aioloader.datasets.sql import SQLRows
from aioloader.errors import DatasetError, ObjectNotFoundError
from beside import beside
from datasets.pg import Database, listed

pytestmark = pytest.mark.slow


async def test_a_batch_has_its_rows_in_the_given_order(database: Database) -> None:
    database.fill("t", 3000)
    async with listed(database, columns=["name", "value"]) as rows:
        indices = [2999, 0, 17, 0, *range(100, 2100)]
        batch = await rows.__getitems__(indices)
        assert [row["name"] for row in batch] == [f"row {n}" for n in indices]
        assert [*batch[0]] == ["name", "value"]
        assert batch[1] == batch[3]
        assert batch[1] is not batch[3]
        assert await rows.__getitems__([]) == []


async def test_exact_numbers_may_be_keys(postgresql: Database) -> None:
    """``test_sql`` has the other kinds."""
    postgresql.run(
        "CREATE TABLE t (id numeric PRIMARY KEY, n INT)",
        "INSERT INTO t SELECT n / 4.0, n FROM generate_series(0, 99) AS n",
    )
    async with listed(postgresql) as rows:
        batch = await rows.__getitems__(range(100))
        assert [row["n"] for row in batch] == [*range(100)]


TWICE = "is not unique: {} appears twice"


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("INTEGER", "(2), (1), (1)", TWICE.format(1)),
        ("TEXT", "('b'), ('a'), ('b')", TWICE.format("'b'")),
        ("INTEGER UNIQUE", "(NULL), (5), (NULL)", "is NULL in some rows"),
    ],
)
async def test_null_or_repeated_keys_are_refused(
    database: Database, kind: str, values: str, words: str
) -> None:
    database.run(f"CREATE TABLE t (id {kind})", f"INSERT INTO t VALUES {values}")
    text = f"list the keys of table 't' of .*: key 'id' {words}"
    with pytest.raises(DatasetError, match=text):
        await SQLRows.discover(database.url, "t", key="id")
    with pytest.raises(DatasetError, match=text):
        await asyncio.to_thread(SQLRows, database.url, "t", key="id")
    if "twice" in words:
        async with SQLRows(database.url, "t", key="id", keys=[*eval(values)]) as rows:
            with pytest.raises(DatasetError, match=f"read 2 rows .* 'id' {words}"):
                await rows.__getitems__(range(3))
    database.run("DELETE FROM t")
    async with listed(database) as rows:
        assert len(rows) == 0
    if database.kind == "sqlite":
        async with SQLRows(database.url, "t", key="id", keys=[2**70]) as rows:
            with pytest.raises(DatasetError, match="too large"):
                await rows[0]


async def test_keys_equal_in_their_collation_are_distinct(sqlite: Database) -> None:
    """Their bytes differ."""
    sqlite.run("CREATE TABLE t (id TEXT COLLATE NOCASE, n INT)")
    sqlite.run("INSERT INTO t VALUES ('A', 1), ('a', 2), ('b', 3)")
    async with listed(sqlite) as rows:
        batch = [await rows[i] for i in range(3)]
        assert {row["id"]: row["n"] for row in batch} == {"A": 1, "a": 2, "b": 3}
    sqlite.run("INSERT INTO t VALUES ('A', 4)")
    with pytest.raises(DatasetError, match="not unique: 'A' appears twice"):
        await SQLRows.discover(sqlite.url, "t", key="id")


async def test_given_keys_are_kept_in_their_order(database: Database) -> None:
    database.fill("t", 10)
    async with SQLRows(database.url, "t", key="id", keys=[7, 3, 99, 3, 77]) as rows:
        assert len(rows) == 5
        assert [row["id"] for row in await rows.__getitems__([0, 1, 3])] == [7, 3, 3]
        words = r"table 't' of .* has no row with id = 99 \(nor 1 others\)"
        with pytest.raises(ObjectNotFoundError, match=words):
            await rows.__getitems__([*range(5)])
        with pytest.raises(ObjectNotFoundError, match=r"no row with id = 77$"):
            await rows[4]
    uuids = [uuid.UUID(int=2), uuid.UUID(int=1)]
    assert SQLRows(database.url, "t", key="id", keys=uuids).keys == uuids


async def test_rows_are_read_as_they_are_now(database: Database) -> None:
    database.fill("t", 3)
    async with listed(database) as rows:
        await beside(
            lambda: database.run(
                "UPDATE t SET value = NULL WHERE id = 1", "DELETE FROM t WHERE id = 2"
            )
        )
        assert await rows[1] == {"id": 1, "value": None, "name": "row 1"}
        with pytest.raises(ObjectNotFoundError, match="no row with id = 2"):
            await rows[2]


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_batches_of_rows_are_tensors(
    database: Database, num_workers: int
) -> None:
    database.fill("t", 100)
    rows = SQLRows(
        database.url, "t", key="id", columns=["id", "value"], keys=range(100)
    )
    loader: Any = DataLoader(rows, 16, num_workers=num_workers)
    batches = [batch async for batch in loader]
    assert torch.equal(torch.cat([b["id"] for b in batches]), torch.arange(100))
    assert torch.equal(
        torch.cat([b["value"] for b in batches]),
        torch.arange(100, dtype=torch.float64) / 2,
    )


async def test_a_given_pool_reads_a_batch_in_one_query(postgresql: Database) -> None:
    postgresql.fill("t", 50)
    asked: list[str] = []

    async def watch(connection: Any) -> None:
        connection.add_query_logger(lambda record: asked.append(record.query))

    async with asyncpg.create_pool(
        postgresql.url, min_size=3, max_size=3, init=watch
    ) as pool:
        rows = await SQLRows.discover(pool, "t", key="id", columns=["id"])
        loader: Any = DataLoader(rows, 10, loop="caller", shuffle=True)
        for _ in range(2):
            batches = [batch["id"] async for batch in loader]
            assert sorted(torch.cat(batches).tolist()) == [*range(50)]
        assert sum('WHERE q."id" = ANY($1)' in query for query in asked) == 10
        assert await pool.fetchval("SELECT 1") == 1
        assert "asyncpg.Pool" in repr(rows)
        with pytest.raises(pickle.PicklingError, match="pass a URL instead"):
            pickle.dumps(rows)
        loader = DataLoader(rows, 10)  # the pool belongs to another loop
        with pytest.raises(RuntimeError, match="pass loop='caller' to the loader"):
            [batch async for batch in loader]


async def test_statements_have_no_names(postgresql: Database) -> None:
    """With a pooler, another client's statement may have the same name."""
    postgresql.run(
        "CREATE VIEW t AS SELECT n::text AS id, "
        "(SELECT count(*) FROM pg_prepared_statements) AS named "
        "FROM generate_series(0, 9) AS n"
    )
    async with listed(postgresql, connections=1) as rows:
        for _ in range(2):
            batch = await rows.__getitems__(range(10))
            assert {row["named"] for row in batch} == {0}
