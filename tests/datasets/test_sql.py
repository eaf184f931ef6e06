"""Ranges of a key: every row once, in order, in one snapshot, from any place on."""

import json
import sqlite3
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets import SQLDataset
from aioloader.datasets._sql.format import SQLFormat
from beside import beside
from datasets.pg import Database, keys_of, parts_of, rows_of
from datasets.shards import read, source_state

# By what row n has for a key; PostgreSQL's type; whether SQLite can have it.
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
async def test_every_row_once_and_in_order(database: Database, name: str) -> None:
    make(database, name)
    expected = in_order(database)
    for partitions in (1, 5):
        made = SQLFormat(database.url, "t", key="id", partitions=partitions)
        parts = await parts_of(made)
        assert [row["n"] for part in parts for row in part] == expected
        assert len(parts) == partitions
        assert max(map(len, parts)) <= 2 * ROWS // partitions


@pytest.mark.slow
async def test_large_tables_are_cut_by_looking_at_little(database: Database) -> None:
    """PostgreSQL looks at some pages, SQLite at some keys: about equal parts."""
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
async def test_any_integers(
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
async def test_queries(database: Database, query: str) -> None:
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
async def test_views_and_keys_without_an_index(database: Database, made: str) -> None:
    database.run("CREATE TABLE t (id INTEGER, n INTEGER)")
    database.run("INSERT INTO t VALUES (13, 0), (11, 1), (12, 2), (9, 3)", made)
    stream = SQLFormat(database.url, "v", key="id", partitions=2)
    assert await keys_of(stream) == [11, 12, 13]


async def test_sqlite_s_own_row_number(sqlite: Database) -> None:
    """A table without a key has one, which is not delivered unless asked for."""
    sqlite.run("CREATE TABLE t (n TEXT)", "INSERT INTO t VALUES ('a'), ('b'), ('c')")
    made = SQLFormat(sqlite.url, "t", key="rowid", partitions=2)
    assert await rows_of(made) == [{"n": "a"}, {"n": "b"}, {"n": "c"}]
    made = SQLFormat(sqlite.url, "t", key="rowid", columns=["rowid"])
    assert await keys_of(made, "rowid") == [1, 2, 3]


async def test_partitioned_tables_and_schemas(postgresql: Database) -> None:
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
    with pytest.raises(
        ValueError, match=r"table 't' of .*bounds in partitions must rise"
    ):
        await parts_of(made)


# -- streams of rows go on where they were, whatever was written since ----------------

# Before and behind every row that there was, and rows gone from everywhere.
WRITES = (
    "INSERT INTO t SELECT id + 3, value, name FROM t",
    "INSERT INTO t SELECT -1 - id, value, name FROM t",
    "INSERT INTO t SELECT id + 10000, value, name FROM t",
    "DELETE FROM t WHERE id % 7 = 0",
)


def stream_of(database: Database, **options: Any) -> Any:
    return SQLDataset(database.url, "t", key="id", columns=["id"], **options)


async def keys(stream: Any, count: int | None = None) -> tuple[list[int], Any]:
    rows, state = await read(stream, count)
    return [row["id"] for row in rows], state


def check(state: Any, seen: list[int], rest: list[int], now: list[int]) -> None:
    """See that of each range all is read behind its last key; if it was over, nothing.

    Rows were the tens before they were written.
    """
    cuts = source_state(state)["shards"]["cuts"]
    assert len({*rest}) == len(rest)
    for start, stop in pairwise([-(2**63), *cuts, 2**63]):
        last = max((key for key in seen if start <= key < stop), default=start - 1)
        found = sorted(key for key in rest if start <= key < stop)
        following = {key for key in now if start <= key < stop and key > last}
        was_over = not any(key % 10 == 0 and key < 10000 for key in following)
        assert found == sorted(following) or (was_over and not found)


async def written(database: Database) -> list[int]:
    found = await beside(lambda: database.run(*WRITES, "SELECT id FROM t ORDER BY id"))
    return [row[0] for row in found]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 100, 333, 800])
@pytest.mark.parametrize("interleave", [1, 3])
async def test_what_is_behind_is_read_as_it_is_now(
    database: Database, interleave: int, count: int
) -> None:
    database.fill("t", 1000, key="n * 10")
    options: dict[str, Any] = {"shuffle": True, "interleave": interleave}
    head, state = await keys(stream_of(database, **options), count)
    now = await written(database)
    again = stream_of(database, **options)
    again.load_state_dict(state)
    rest, _ = await keys(again)
    assert len(source_state(state)["shards"]["cuts"]) == 7
    check(state, head, rest, now)


@pytest.mark.slow
async def test_it_holds_at_each_row(sqlite: Database) -> None:
    """Also where a block was passed on in part; in batches too, a state of a state."""
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
        again.load_state_dict(later)
        rest, _ = await keys(again)
        check(later, head, middle + rest, now)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["extreme", "text", "char", "uuid", "timestamptz"])
async def test_keys_of_all_kinds_cut_again(database: Database, name: str) -> None:
    make(database, name)
    expected = in_order(database)
    stream: Any = SQLDataset(database.url, "t", key="id", columns=["n"])
    head, state = await read(stream, 400)
    await beside(lambda: database.run("DELETE FROM t WHERE n % 2 = 0"))
    stream.load_state_dict(state)
    rest, _ = await read(stream)
    found = [row["n"] for row in head + rest]
    assert found == expected[:400] + [n for n in expected[400:] if n % 2]


@pytest.mark.slow
async def test_a_new_iteration_cuts_anew(database: Database) -> None:
    database.fill("t", 400)
    stream = stream_of(database)
    _, state = await keys(stream, 10)
    await beside(lambda: database.run("DELETE FROM t WHERE id < 350"))
    stream.load_state_dict(state)
    assert (await keys(stream))[0] == [*range(350, 400)]
    found, after = await keys(stream)
    assert found == [*range(350, 400)]
    cuts = [source_state(one)["shards"]["cuts"] for one in (state, after)]
    assert max(cuts[0][:6]) < 350 <= min(cuts[1])


@pytest.mark.slow
async def test_ranks_go_on_each_with_its_own(database: Database) -> None:
    database.fill("t", 1000, key="n * 10")
    bounds = await SQLFormat(database.url, "t", key="id").plan()
    seen: list[int] = []
    states: list[Any] = []
    options: dict[str, Any] = {"partitions": bounds, "interleave": 4, "shuffle": True}
    for rank in range(3):
        part = stream_of(database, **options).shard(rank, 3)
        found, state = await keys(part, 50 + 90 * rank)
        seen += found
        states.append(state)
    now = await written(database)
    rest: list[int] = []
    for rank, state in enumerate(states):
        # Whatever the ranges would be now.
        part = stream_of(database, interleave=4, shuffle=True).shard(rank, 3)
        part.load_state_dict(state)
        rest += (await keys(part))[0]
    assert source_state(states[0])["shards"]["cuts"] == bounds
    check(states[0], seen, rest, now)


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [3, 20, [17]])
async def test_the_state_says_how_it_was_cut(
    database: Database, partitions: Any
) -> None:
    database.fill("t", 100)
    head, state = await keys(stream_of(database, partitions=5), 30)
    again = stream_of(database, partitions=partitions)
    again.load_state_dict(state)
    assert head + (await keys(again))[0] == [*range(100)]


async def test_ranges_that_were_empty(database: Database) -> None:
    database.run("CREATE TABLE t (id BIGINT PRIMARY KEY)")
    assert (await keys(stream_of(database)))[0] == []
    await beside(lambda: database.run("INSERT INTO t VALUES (7)"))
    head, state = await keys(stream_of(database, interleave=2), 1)
    assert head == [7]
    assert source_state(state)["shards"]["count"] == 8
    await beside(lambda: database.run("INSERT INTO t VALUES (1), (8), (9), (10)"))
    again = stream_of(database, interleave=2)
    again.load_state_dict(state)
    assert (await keys(again))[0] == [8, 9, 10]


async def test_a_state_is_small(database: Database) -> None:
    """Some hundred bytes, though much was read ahead; more only for more ranges."""
    database.fill("t", 5000)
    _, state = await keys(stream_of(database, interleave=3), 1000)
    del state["stream"]  # which does not grow
    assert len(json.dumps(state)) < 500
