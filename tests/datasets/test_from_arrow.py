"""Arrow data of other libraries: all rows once, and exact resume where it can be."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import dataset as ds

from aioloader import DataLoader
from aioloader.datasets import from_arrow
from aioloader.datasets._arrow import memory
from aioloader.errors import DatasetError, StateMismatchError
from datasets.shards import check_resumes, read
from datasets.tables import plain

TABLE = pa.table(
    {
        "n": range(100),
        "s": [None if n % 10 == 3 else f"t {n}" for n in range(100)],
        "year": [2020 + n // 50 for n in range(100)],
    }
)
Make = Callable[[Path], Any]


def in_memory(_folder: Path) -> Any:
    return pa.concat_tables([TABLE[:33], TABLE[33:]])


def hive(folder: Path) -> Any:
    options = {"partitioning_flavor": "hive", "max_rows_per_group": 20,
               "max_rows_per_file": 40}  # fmt: skip
    ds.write_dataset(TABLE, folder / "hive", format="parquet", partitioning=["year"],
                     min_rows_per_group=1, **options)  # fmt: skip
    return ds.dataset(folder / "hive", partitioning="hive")


def feather(folder: Path) -> Any:
    ds.write_dataset(TABLE, folder / "ipc", format="ipc", max_rows_per_file=30,
                     max_rows_per_group=30)  # fmt: skip
    return ds.dataset(folder / "ipc", format="ipc")


def reader() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(
        TABLE.schema, iter(TABLE.to_batches(max_chunksize=17))
    )


def batches() -> Iterator[pa.RecordBatch]:
    yield from TABLE[:0].to_batches() + TABLE.to_batches(max_chunksize=23)


class Exported:
    """What has Arrow's protocol, and no more."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


def polars(_folder: Path) -> Any:
    return pytest.importorskip("polars").from_arrow(TABLE)


def duckdb(_folder: Path) -> Any:
    connection = pytest.importorskip("duckdb").connect()
    connection.register("t", TABLE)
    return connection.sql("SELECT * FROM t ORDER BY n")


SHARDED: list[Make] = [in_memory, hive, feather]
STREAMED: list[Make] = [
    lambda _: reader, lambda _: batches, lambda _: Exported(), polars, duckdb
]  # fmt: skip
NAMES = ["table", "hive", "feather", "reader", "batches", "stream", "polars", "duckdb"]
EVERY = pytest.mark.parametrize("make", SHARDED + STREAMED, ids=NAMES)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SHARD", 30)
    monkeypatch.setattr(memory, "_ROWS", 8)


@pytest.mark.slow
@EVERY
async def test_all_rows_once(make: Make, tmp_path: Path) -> None:
    source = make(tmp_path)
    stream = from_arrow(source, ["n", "s", "year"])
    for _ in range(2):
        assert plain((await read(stream))[0]) == TABLE.to_pylist()
    chosen = from_arrow(
        source, ["s"], nulls={"s": ""}, filters=(pc.field("year") > 2020)
    )
    expected = [{"s": row["s"] or ""} for row in TABLE[50:].to_pylist()]
    assert (await read(chosen))[0] == expected
    parts = [(await read(stream.shard(rank, 3)))[0] for rank in range(3)]
    assert all(parts)
    assert sorted(row["n"] for part in parts for row in part) == [*range(100)]


@pytest.mark.slow
@EVERY
async def test_resume_at_every_row(make: Make, tmp_path: Path) -> None:
    stream = from_arrow(make(tmp_path), ["n"])
    for one in (stream, stream.shard(1, 2)):
        one.set_epoch(0)
        whole = (await read(one))[0]
        await check_resumes(one, whole, range(0, len(whole) + 1, 13))


@EVERY
async def test_batches_are_columns(make: Make, tmp_path: Path) -> None:
    loader: Any = DataLoader(from_arrow(make(tmp_path), ["n"]), 32)
    found = [batch["n"] async for batch in loader]
    assert [len(one) for one in found] == [32, 32, 32, 4]
    assert np.concatenate(found).tolist() == [*range(100)]


async def test_shards_are_shuffled_and_interleaved() -> None:
    stream = from_arrow(TABLE, shuffle=True, interleave=2, seed=3)
    stream = pickle.loads(pickle.dumps(stream))
    numbers = [row["n"] for row in (await read(stream))[0]]
    assert sorted(numbers) == [*range(100)]
    assert numbers != [*range(100)]


async def test_a_dataset_skips_what_it_can(tmp_path: Path) -> None:
    source = hive(tmp_path)
    stream = from_arrow(source, filters=[("year", "=", 2021), ("n", ">=", 80)])
    shards = await stream.made_by.shards(None)  # type: ignore[attr-defined]
    assert len(shards) == 2
    assert [row["n"] for row in (await read(stream))[0]] == [*range(80, 100)]
    nothing = from_arrow(source, filters=[("n", "<", 0)])
    assert (await read(nothing))[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [hive, feather])
@pytest.mark.parametrize("filters", [None, pc.field("n") >= 60], ids=["all", "some"])
async def test_fragments_are_cut(make: Make, filters: Any, tmp_path: Path) -> None:
    stream = from_arrow(make(tmp_path), ["n"], filters=filters)
    whole = [row["n"] for row in (await read(stream))[0]]
    found = [(await read(stream.shard(rank, 9)))[0] for rank in range(9)]
    assert [row["n"] for part in found for row in part] == whole
    assert max(map(len, found)) <= 20
    assert make is not hive or min(map(len, found)) > 0
    await check_resumes(stream.shard(4, 9), found[4], range(len(found[4]) + 1))


async def test_errors_stay_the_users() -> None:
    def fails() -> Iterator[pa.RecordBatch]:
        yield from TABLE[:5].to_batches()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await read(from_arrow(fails))
    with pytest.raises(TypeError, match="'int' is not Arrow data"):
        await read(from_arrow(lambda: iter([1])))
    with pytest.raises(DatasetError, match="has no column 'z'"):
        await read(from_arrow(batches, ["z"]))


def test_wrong_sources_are_errors() -> None:
    for one in (reader(), batches()):
        with pytest.raises(TypeError, match="can be read only once; pass the function"):
            from_arrow(one)
    with pytest.raises(TypeError, match="needs Arrow data, got 'int'"):
        from_arrow(3)
    with pytest.raises(TypeError, match=r"of from_arrow apply to .*\.shuffle\("):
        from_arrow(batches, shuffle=True)
    with pytest.raises(DatasetError, match="has no column 'z'"):
        from_arrow(TABLE, ["z"])
    for name, nearest in (("shufle", "shuffle"), ("filter", "filters")):
        said = rf"^from_arrow\(\) got an unknown option '{name}': .* '{nearest}'"
        with pytest.raises(TypeError, match=said):
            from_arrow(TABLE, **{name: True})  # type: ignore[arg-type]


# -- Ray Data ------------------------------------------------------------------------


class Split:
    """An iterator of Ray Data, as far as it is used."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def iter_batches(self, *, batch_format: str, batch_size: int | None) -> Any:
        assert (batch_format, batch_size) == ("pyarrow", None)
        for start in range(10 * self.rank, 100, 10 * self.ranks):
            yield TABLE[start : start + 10]


async def test_splits_of_ray() -> None:
    stream = from_arrow([Split(rank, 3) for rank in range(3)], ["n"])
    for _ in range(2):
        parts = [(await read(stream.shard(rank, 3)))[0] for rank in range(3)]
        assert [row["n"] for row in parts[1][:11]] == [*range(10, 20), 40]
        assert sorted(row["n"] for part in parts for row in part) == [*range(100)]


async def test_splits_for_other_readers() -> None:
    stream = from_arrow(Split(0, 2))
    assert len((await read(stream))[0]) == 50
    with pytest.raises(ValueError, match="1 iterators of Ray Data for 2 readers"):
        await read(stream.shard(0, 2))


async def test_a_state_amid_an_epoch_of_ray() -> None:
    """Is refused in words, for its order is not the same twice."""
    stream = from_arrow(Split(0, 1))
    for count in (1, 7):
        stream.set_epoch(0)
        _, state = await read(stream, count)
        stream.load_state_dict(state)
        words = "cannot resume after row .*: Ray Data returns rows in another order"
        with pytest.raises(StateMismatchError, match=words):
            await read(stream)


RAY = """
import asyncio, ray, ray.data, pyarrow
from aioloader.datasets import from_arrow
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
table = pyarrow.table({"n": range(100)})
splits = ray.data.from_arrow([table[:40], table[40:]]).streaming_split(2)
stream = from_arrow(splits, ["n"])
async def rows(one):
    return [int(row["n"]) async for row in one]
async def both():
    return await asyncio.gather(*(rows(stream.shard(rank, 2)) for rank in range(2)))
for epoch in range(2):
    found = asyncio.run(both())
    assert sorted(sum(found, [])) == [*range(100)], found
print("all", len(found))
"""


@pytest.mark.fuzz
def test_ray_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RAY],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("all 2\n"), done.stderr
