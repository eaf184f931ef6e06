"""Streams of rows go on where they were, whatever was written since."""

import json
from itertools import pairwise
from typing import Any

import pytest

from aioloader.datasets import SQLDataset
from aioloader.datasets._sql.format import SQLFormat
from beside import beside
from datasets.pg import Database, database, postgresql, server, sqlite
from datasets.shards import read, source_state
from datasets.test_sql import in_order, make

__all__ = ["database", "postgresql", "server", "sqlite"]

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
    database.run("CREATE TABLE t (id BIGINT PRIMARY KEY)", "INSERT INTO t VALUES (7)")
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
