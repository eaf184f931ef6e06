"""Fewer shards than readers: row groups, record batches and lines are cut."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import compute as pc

from aioloader.datasets._arrow.csv import CSVFormat
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.lines import Dialect
from aioloader.datasets._arrow.memory import MemoryFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.wanted import Wanted
from datasets.tables import Local, put, read_shard, shards
from datasets.tables import write_parquet as write

TABLE = pa.table({"n": range(50), "s": [f"row {n}" for n in range(50)]})


def parquet(folder: Path, **options: Any) -> Any:
    """Return three row groups."""
    path = write(folder / "a.parquet", TABLE)
    return ParquetFormat(path, Local(is_remote=True), **options)


def arrow(folder: Path, **options: Any) -> Any:
    """Return seven record batches, which are one shard."""
    with pa.ipc.new_file(str(folder / "a.arrow"), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=8)
    return ArrowFormat(str(folder / "a.arrow"), Local(), **options)


def lines(folder: Path, **options: Any) -> Any:
    """Return a file."""
    text = "n,s\n" + "".join(f"{n},row {n}\n" for n in range(50))
    put(folder / "a.csv", text.encode())
    return CSVFormat(str(folder / "a.csv"), Local(), dialect=Dialect(), **options)


def memory(_folder: Path, **options: Any) -> Any:
    """Return a table."""
    return MemoryFormat(TABLE, Wanted(**options))


EVERY = pytest.mark.parametrize("make", [parquet, arrow, lines, memory])


@EVERY
@pytest.mark.parametrize("filters", [None, pc.field("n") < 33], ids=["all", "some"])
async def test_all_rows_once_in_order(make: Any, filters: Any, tmp_path: Path) -> None:
    """Whatever their number, from every row on."""
    made = make(tmp_path, filters=filters)
    found = await shards(made)
    stop = 50 if filters is None else 33
    for count in range(len(found) + 1, 60, 7):
        cuts = await made.cut(found, count)
        assert len(cuts) == count
        parts = [await read_shard(made, shard) for shard in cuts]
        assert [row["n"] for part in parts for row in part] == [*range(stop)]
        assert max(map(len, parts)) <= 2 * 50 / len(found)
    one = cuts[0]
    whole = await read_shard(made, one)
    for row in range(len(whole) + 1):
        assert await read_shard(made, one, row=row) == whole[row:]


async def test_what_is_skipped_is_not_cut(tmp_path: Path) -> None:
    """Not even if it is all."""
    made = parquet(tmp_path, filters=pc.field("n") >= 40)
    cuts = await made.cut(await shards(made), 5)
    assert [shard[2] for shard in cuts] == [0, 1, 2, 3, 4]  # each reader has some
    made = parquet(tmp_path, filters=pc.field("n") < 0)
    cuts = await made.cut(await shards(made), 5)
    assert [shard[2] for shard in cuts] == ["skipped"] * 5


async def test_what_cannot_be_cut(tmp_path: Path) -> None:
    """An error that says what to do."""
    with pa.ipc.new_stream(str(tmp_path / "a.arrows"), TABLE.schema) as file:
        file.write_table(TABLE)
    stream = ArrowFormat(str(tmp_path / "a.arrows"), Local())
    with pytest.raises(ValueError, match=r"'a\.arrows' is a stream.*as an Arrow file"):
        await stream.cut(await shards(stream), 2)
    put(tmp_path / "a.csv.gz", gzip.compress(b"n\n1\n2\n"))
    packed = CSVFormat(str(tmp_path / "a.csv.gz"), Local(), dialect=Dialect())
    with pytest.raises(
        ValueError, match=r"'a\.csv\.gz' is compressed, or .*more files"
    ):
        await packed.cut(await shards(packed), 2)
