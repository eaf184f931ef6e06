"""Ranks in real processes read one list of shards, whatever changes meanwhile."""

import contextlib
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from aioloader.datasets import TextDataset
from aioloader.errors import DatasetError
from datasets.rank_process import RankProcess, ranks

pytestmark = pytest.mark.slow

dist: Any = torch.distributed


@pytest.fixture(scope="module")
def two() -> Iterator[list[RankProcess]]:
    with ranks() as found:
        yield found


def table(path: Path, count: int) -> dict[str, Any]:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode=WAL")  # so that readers do not lock it
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
    insert(path, 0, count)
    return {
        "kind": "SQLDataset",
        "url": f"sqlite:///{path}",
        "query": "t",
        "key": "id",
        "partitions": 4,
    }


def insert(path: Path, start: int, stop: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        rows = ((number, f"row {number}") for number in range(start, stop))
        db.executemany("INSERT INTO t VALUES (?, ?)", rows)


def shards(folder: Path, start: int, stop: int) -> dict[str, Any]:
    for shard in range(start, stop):
        lines = "".join(f"{shard * 10 + line}\n" for line in range(10))
        (folder / f"{shard:03}.txt").write_text(lines)
    return {"kind": "TextDataset", "addresses": str(folder / "*.txt")}


def keys(rows: list[dict[str, Any]]) -> list[int]:
    assert all(isinstance(row, dict) for row in rows), "".join(map(str, rows))
    return [row["id"] for row in rows]


def test_both_at_once(two: list[RankProcess], tmp_path: Path) -> None:
    stream = table(tmp_path / "db", 500)
    for rank in two:
        rank.send(do="open", **stream)
    found = [row for rank in two for row in rank.answer()]
    for rank in two:
        found += rank.do(do="rest")
    assert sorted(keys(found)) == [*range(500)]


def test_a_rank_that_iterates_alone(two: list[RankProcess], tmp_path: Path) -> None:
    stream = shards(tmp_path, 0, 4)
    for count in (1, 2):
        assert two[0].do(do="open", **stream) == ["0"]
        shards(tmp_path, 4, 4 + count)
    assert two[0].do(do="open", **stream) == ["0"]


def test_a_store_that_is_gone(two: list[RankProcess], tmp_path: Path) -> None:
    stream = shards(tmp_path, 0, 4)
    (tmp_path / "away").mkdir()
    store = {"store": str(tmp_path / "away" / "ranks"), "gone": str(tmp_path / "away")}
    error = two[0].do(do="open", **store, **stream)
    assert "could not compare its shards with those of the other ranks" in error
    assert "with agree()" in error


async def test_a_store_that_workers_cannot_reach(tmp_path: Path) -> None:
    stream = TextDataset(str(tmp_path / "*.txt")).shard(0, 2)
    with pytest.raises(pickle.PicklingError, match="HashStore cannot be reached from"):
        pickle.dumps(stream.agree(dist.HashStore()))
    store = dist.PrefixStore("a", dist.FileStore(str(tmp_path / "store")))
    sent = pickle.loads(pickle.dumps(stream.agree(store, timeout=3)))
    assert repr(sent.rank_store) == f"FileStore({str(tmp_path / 'store')!r})"
    assert pickle.loads(pickle.dumps(stream)).rank_store.found() is None


async def test_what_is_compared(tmp_path: Path) -> None:
    """Each time and each stream for itself; steps and order do not count."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    shards(tmp_path / "a", 0, 4), shards(tmp_path / "b", 0, 5)
    store = dist.HashStore()

    async def begin(rank: int, folder: str) -> None:
        stream = TextDataset("*.txt", store=tmp_path / folder).take(3)
        iterator = aiter(stream.agree(store).shard(rank, 2))
        await anext(iterator)
        await iterator.aclose()

    for rank, folder in ((0, "a"), (1, "b"), (0, "b"), (1, "a"), (0, "a")):
        await begin(rank, folder)
    shards(tmp_path / "a", 4, 6)
    with pytest.raises(DatasetError, match=r"found 6 shards .* rank 0, before, 4 sh"):
        await begin(1, "a")
    await begin(1, "a")
    await begin(0, "a")
