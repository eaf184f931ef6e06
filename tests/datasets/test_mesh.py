"""Ranks in real processes, and peers of a mesh, read one list and end together.

Peers differ only in other dimensions of the mesh, and deliver the same batches.
"""

import contextlib
import itertools
import pickle
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from aioloader import DataLoader
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import DatasetError
from datasets.rank_process import RankProcess, ranks
from datasets.shards import write_lines

pytestmark = pytest.mark.slow

dist: Any = torch.distributed
TAILS = pytest.mark.parametrize("tail", ["drop", "wrap", "pad", "uneven"])
LENGTHS = (7, 3, 11, 1, 5, 9, 2)


@pytest.fixture(scope="module")
def two() -> Iterator[list[RankProcess]]:
    with ranks() as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[list[RankProcess]]:
    """Return a mesh of two data ranks, each of two peers: 0, 0, 1, 1."""
    with ranks(4) as processes:
        assert met(processes, 2, 2) == [[0, 2], [0, 2], [1, 2], [1, 2]]
        yield processes


def met(processes: list[RankProcess], *shape: int) -> list[Any]:
    for process in processes:
        process.send(do="meet", shape=shape)
    return [process.answer() for process in processes]


def table(path: Path, count: int) -> dict[str, Any]:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode=WAL")  # so that readers do not lock it
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
    insert(path, 0, count)
    rows = {"query": "t", "key": "id", "partitions": 4}
    return {"kind": "SQLDataset", "url": f"sqlite:///{path}", **rows}


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


# -- what is asked for ----------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Return a function that makes a mesh in a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield lambda *places: DeviceMesh(
            "cpu",
            torch.tensor(places),
            mesh_dim_names=("dp", "tp")[: torch.tensor(places).ndim],
            _init_backend=False,
        )
    finally:
        dist.destroy_process_group()


def test_a_loader_keeps_no_mesh(mesh: Any) -> None:
    """Only rank and world_size, so it can be pickled."""
    loader: Any = DataLoader(range(3), rank=mesh(0), tail="pad")
    assert (loader.rank, loader.world_size) == (0, 1)
    again = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch, _ in again] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("places", "options", "message"),
    [
        ([[0]], {}, r"rank must be .* of one dimension, got 2: .* mesh\['dp'\]"),
        ([5], {}, "rank is a DeviceMesh without this rank"),
        ([0], {"world_size": 1}, "DeviceMesh as rank excludes world_size.* got .*=1"),
    ],
)
def test_unsuitable_meshes_are_refused(
    mesh: Any, places: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(range(3), rank=mesh(*places), **options)


# -- one list of shards ---------------------------------------------------------------


def test_a_rank_that_iterates_alone_compares_nothing(
    two: list[RankProcess], tmp_path: Path
) -> None:
    stream = shards(tmp_path, 0, 4)
    for count in (1, 2):
        assert two[0].do(do="open", **stream) == ["0"]
        shards(tmp_path, 4, 4 + count)
    assert two[0].do(do="open", **stream) == ["0"]


def test_a_lost_rank_store_is_an_error(two: list[RankProcess], tmp_path: Path) -> None:
    stream = shards(tmp_path, 0, 4)
    (tmp_path / "away").mkdir()
    store = {"store": str(tmp_path / "away" / "ranks"), "gone": str(tmp_path / "away")}
    error = two[0].do(do="open", **store, **stream)
    assert "could not compare its shards with those of the other ranks" in error
    assert "with agree()" in error


async def test_a_store_in_memory_cannot_be_pickled(tmp_path: Path) -> None:
    stream = TextDataset(str(tmp_path / "*.txt")).shard(0, 2)
    with pytest.raises(pickle.PicklingError, match="HashStore cannot be reached from"):
        pickle.dumps(stream.agree(dist.HashStore()))
    store = dist.PrefixStore("a", dist.FileStore(str(tmp_path / "store")))
    sent = pickle.loads(pickle.dumps(stream.agree(store, timeout=3)))
    assert repr(sent.rank_store) == f"FileStore({str(tmp_path / 'store')!r})"
    assert pickle.loads(pickle.dumps(stream)).rank_store.resolved() is None


async def test_ranks_compare_each_iteration_of_a_stream(tmp_path: Path) -> None:
    """Steps of the stream and the order of the ranks do not matter."""
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


def test_shards_added_between_peers_are_an_error(
    four: list[RankProcess], tmp_path: Path
) -> None:
    stream = shards(tmp_path, 0, 8)
    assert four[0].do(do="open", **stream) == ["0"]
    shards(tmp_path, 8, 9)
    said = "found 9 shards (digest "
    errors = [process.do(do="open", **stream) for process in four[1:]]
    assert all(said in error for error in errors)
    assert "and a peer of rank 0, before, 8 shards (digest " in errors[0]
    assert "and rank 0, before, 8 shards (digest " in errors[1]
    four[0].do(do="rest")
    # All ranks iterate again, and find the same shards.
    first = [process.do(do="open", **stream) for process in four]
    assert first == [["0"], ["0"], ["10"], ["10"]]
    rest = [process.do(do="rest") for process in four]
    assert rest[::2] == rest[1::2]
    assert sorted(map(int, rest[0] + rest[2])) == sorted({*range(90)} - {0, 10})


def test_peers_cut_a_table_alike(four: list[RankProcess], tmp_path: Path) -> None:
    """Even if it has grown before the second peer reads it."""
    stream = table(tmp_path / "db", 1000)
    rows = [four[0].do(do="open", **stream)]
    insert(tmp_path / "db", 1000, 5000)
    rows += [process.do(do="open", **stream) for process in four[1:]]
    for place, process in enumerate(four):
        rows[place] += process.do(do="rest")
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    ids = sorted(keys(rows[0] + rows[2]))
    assert ids[:1000] == [*range(1000)]
    assert len(set(ids)) == len(ids)


def test_workers_of_peers_compare_shards(tmp_path: Path) -> None:
    """They use the group's store or the user's, and count as their process."""
    (tmp_path / "more").mkdir()
    with ranks(4) as four:  # new processes, because these start workers
        met(four, 2, 2)
        for folder, store in ((tmp_path, None), (tmp_path / "more", "ranks")):
            stream = shards(folder, 0, 8)
            if store is not None:
                stream["store"] = str(tmp_path / store)
            for process in four:
                process.send(do="load", workers=1, **stream)
            rows = [process.answer() for process in four]
            assert rows[::2] == rows[1::2]
            assert sorted(map(int, rows[0] + rows[2])) == [*range(80)]
            four[0].do(do="load", workers=1, **stream)
            shards(folder, 8, 10)
            error = four[1].do(do="load", workers=1, **stream)
            assert "rank 0 found 10 shards" in error
            assert "a peer of rank 0, before, 8 shards" in error
            error = four[2].do(do="load", workers=1, **stream)
            assert "and rank 0, before, 8 shards" in error


def test_peers_of_a_single_rank_compare_shards(tmp_path: Path) -> None:
    """A mesh says that there are peers."""
    stream = {**shards(tmp_path, 0, 4), "tail": None, "batch_size": 40}
    with ranks(2) as two:
        assert met(two, 1, 2) == [[0, 1], [0, 1]]
        first, second = (process.do(do="deliver", **stream) for process in two)
        assert first == second
        two[0].do(do="deliver", **stream)
        shards(tmp_path, 4, 5)
        error = two[1].do(do="deliver", **stream)
        assert "rank 0 found 5 shards" in error
        assert "a peer of rank 0, before, 4 shards" in error


def test_workers_are_named_by_their_rank(tmp_path: Path) -> None:
    """Not by their number among the workers of all ranks."""
    store = dist.FileStore(str(tmp_path / "ranks"))

    def load(rank: int) -> None:
        stream = TextDataset("*.txt", store=tmp_path).agree(store, timeout=5)
        options: Any = {"num_workers": 2, "fetch": "workers", "tail": "uneven"}
        with DataLoader(stream, 4, rank=rank, world_size=2, **options) as loader:
            list(loader)

    shards(tmp_path, 0, 8)
    load(1)
    shards(tmp_path, 8, 9)
    words = r"rank 0 \(worker 0\) found 9 .*, and rank 1 \(worker [01]\), before, 8 sh"
    with pytest.raises(DatasetError, match=words):
        load(0)


async def test_a_single_rank_without_peers_compares_nothing(tmp_path: Path) -> None:
    store = dist.HashStore()

    async def begin(process: str, **options: Any) -> None:
        stream = TextDataset("*.txt", store=tmp_path).agree(store)
        stream.rank_store._process = process
        iterator = aiter(stream.shard(0, 1, **options))
        await anext(iterator)
        await iterator.aclose()

    shards(tmp_path, 0, 4)
    await begin("a", has_peers=True)
    shards(tmp_path, 4, 5)
    await begin("b")
    with pytest.raises(DatasetError, match=r"found 5 shards .* a peer of rank 0"):
        await begin("b", has_peers=True)
    await begin("a", has_peers=True)
    await begin("b", has_peers=True)


def test_a_rank_store_names_the_process_it_was_made_in(tmp_path: Path) -> None:
    """Without a process group; pickling does not change it."""
    stream = from_iterable(range(3)).agree(dist.FileStore(str(tmp_path / "store")))
    process = stream.rank_store.process
    assert process == from_iterable(range(3)).agree(dist.HashStore()).rank_store.process
    sent = pickle.loads(pickle.dumps(stream)).rank_store
    assert sent.process == process
    assert pickle.loads(pickle.dumps(sent)).process == process


# -- one end --------------------------------------------------------------------------


def lines(folder: Path) -> dict[str, Any]:
    write_lines(folder, LENGTHS)
    return {"kind": "TextDataset", "addresses": str(folder / "*.txt"), "batch_size": 2}


def samples(batches: list[Any], tail: str) -> list[str]:
    """Return the samples without padding."""
    if tail != "pad":
        return [*itertools.chain(*batches)]
    return [n for batch, mask in batches for n in itertools.compress(batch, mask)]


def check(by_rank: list[Any], tail: str) -> None:
    """Check that ranks have equally many batches, and that each sample comes once."""
    every = [name for rank in by_rank for name in samples(rank, tail)]
    assert len(set(every)) == (sum(LENGTHS) if tail != "drop" else len(every))
    assert len(set(map(len, by_rank))) == 1 + (tail == "uneven")
    if tail != "wrap":
        assert len(every) == len(set(every))


@TAILS
def test_peers_end_together(four: list[RankProcess], tmp_path: Path, tail: str) -> None:
    """In each of two epochs."""
    asked = {"do": "deliver", "tail": tail, "epochs": 2, **lines(tmp_path)}
    for process in four:
        process.send(**asked)
    epochs = [process.answer() for process in four]
    assert epochs[::2] == epochs[1::2]
    for epoch in range(2):
        check([epochs[0][epoch], epochs[2][epoch]], tail)


def test_one_process_of_each_rank_is_enough(
    four: list[RankProcess], tmp_path: Path
) -> None:
    """Any of them: their peers may read later."""
    asked = {"do": "deliver", "tail": "pad", **lines(tmp_path)}
    batches: list[Any] = [None] * 4
    for circle in ((0, 3), (2, 1)):
        for place in circle:
            four[place].send(**asked)
        for place in circle:
            batches[place] = four[place].answer()
    assert batches[::2] == batches[1::2]
    check([batches[0][0], batches[2][0]], "pad")


# -- the slowest one ------------------------------------------------------------------

SLOWEST = r"Rank 2 of 3 waits longest for data: \d+\.?\d* ms a batch; the median rank "
MISSING = "Not reported yet in epoch {}: rank{}."


def test_the_slowest_rank_is_reported() -> None:
    """No rank waits for another, and an earlier epoch does not count."""
    with ranks(3) as (first, second, third):
        assert first.do(do="report", seconds=0)[1:] == [MISSING.format(0, "s 1, 2")]
        slowest, missing = third.do(do="report", seconds=0.05)
        assert re.match(SLOWEST, slowest)
        assert missing == MISSING.format(0, " 1")
        (slowest,) = second.do(do="report", seconds=0)
        assert re.match(SLOWEST, slowest)
        _, missing = second.do(do="report", seconds=0, epoch=1)
        assert missing == MISSING.format(1, "s 0, 2")
