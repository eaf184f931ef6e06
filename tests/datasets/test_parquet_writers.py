"""Rows that are written to Parquet are read: by this package and by pyarrow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aioloader.datasets import (
    ParquetDataset,
    ParquetWriter,
    from_iterable,
    write_parquet,
)
from aioloader.errors import StateMismatchError


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "text": f"ü{number}" if number % 3 else None,
            "data": bytes([number % 256]) * 40,
            "vector": torch.full((3,), float(number)),
        }
        for number in range(count)
    ]


async def test_parquet_is_read(tmp_path: Path) -> None:
    options: Any = {"shard_bytes": 9_000, "row_group_bytes": 2_000}
    shards = await write_parquet(rows(300), tmp_path, compression="none", **options)
    assert len(shards) > 2
    ids = [row["id"] async for row in ParquetDataset(f"{tmp_path}/part-*.parquet")]
    assert ids == list(range(300))
    tables = [pq.read_table(tmp_path / shard) for shard in shards]
    table = pa.concat_tables(tables)  # one schema
    assert table["text"].to_pylist()[:3] == [None, "ü1", "ü2"]
    assert table["vector"].to_pylist()[2] == [2.0, 2.0, 2.0]
    assert pq.ParquetFile(tmp_path / shards[0]).num_row_groups > 2


@pytest.mark.parametrize("kind", ["list", "generator", "async", "stream", "function"])
async def test_rows_of_any_kind(kind: str, tmp_path: Path) -> None:
    every = [{"id": number} for number in range(20)]
    asked: list[int] = []

    async def stream() -> Any:
        for row in every:
            yield row

    def function(first: int) -> Any:
        asked.append(first)
        return every[first:]

    given: Any = {
        "list": every,
        "generator": (row for row in every),
        "async": stream(),
        "stream": from_iterable(every),
        "function": function,
    }
    await write_parquet(every[:7], tmp_path)
    await write_parquet(given[kind], tmp_path)
    stream_ = ParquetDataset(f"{tmp_path}/*.parquet")
    assert [row["id"] async for row in stream_] == list(range(20))
    assert asked == ([7] if kind == "function" else [])
    with pytest.raises(ValueError, match=r"20 rows are in .* there are 15 fewer"):
        await write_parquet(every[:5], tmp_path)


async def test_the_schema_stays(tmp_path: Path) -> None:
    await write_parquet([{"a": 1, "b": "x"}], tmp_path)
    with pytest.raises(ValueError, match=r"column 'a' cannot be .* int64: .*'z'"):
        await write_parquet([{}, {"a": "z"}], tmp_path)
    with pytest.raises(ValueError, match="row 1 has columns that the schema lacks: c"):
        await write_parquet([{}, {"c": 1}], tmp_path)
    with pytest.raises(StateMismatchError, match="another schema"):
        await write_parquet([], tmp_path, schema=pa.schema({"a": pa.int8()}))
    with pytest.raises(TypeError, match="row 1 must be a dict of columns, got int"):
        await write_parquet([{}, 3], tmp_path)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="column 'x' cannot be written as one type"):
        await write_parquet([{"x": 1}, {"x": b""}], tmp_path / "new")
    await write_parquet([{}, {"b": "y"}], tmp_path)
    table = pq.read_table(tmp_path / "part-000001.parquet")
    assert table.to_pylist() == [{"a": None, "b": "y"}]


async def test_columns_of_later_rows(tmp_path: Path) -> None:
    """Those of all rows of the first row group, not of the first row only."""
    schema = pa.schema({"a": pa.int16(), "b": pa.list_(pa.float32())})
    await write_parquet([{"a": 1}, {"b": "x"}], tmp_path / "found")
    (found,) = (tmp_path / "found").glob("*.parquet")
    assert pq.read_table(found).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
    ]
    given: list[Any] = [{"a": 1}, {"b": np.ones(2, np.float32)}]
    await write_parquet(given, tmp_path / "given", schema=schema)
    (found,) = (tmp_path / "given").glob("*.parquet")
    assert pq.read_schema(found).equals(schema)


async def test_rows_are_copied(tmp_path: Path) -> None:
    array, tensor, several = np.zeros((2, 2)), torch.zeros(2), [0]
    async with ParquetWriter(tmp_path) as writer:
        for number in range(3):
            array[:], tensor[:], several[0] = number, number, number
            await writer.write({"a": array, "t": tensor, "l": several})
    rows = pq.read_table(tmp_path / "part-000000.parquet").to_pylist()
    assert rows == [
        {"a": [[n, n], [n, n]], "t": [n, n], "l": [n]} for n in (0.0, 1.0, 2.0)
    ]


async def test_parquet_that_ends_early(tmp_path: Path) -> None:
    closed: list[str] = []

    async def failing() -> Any:
        try:
            for number in range(5):
                yield {"id": number}
            raise ZeroDivisionError
        finally:
            closed.append("closed")

    with pytest.raises(ZeroDivisionError):
        await write_parquet(failing(), tmp_path, shard_samples=2)
    assert closed == ["closed"]
    manifest = json.loads((tmp_path / "part-shards.json").read_text())
    assert [entry["samples"] for entry in manifest["shards"]] == [2, 2]
    async with ParquetWriter(tmp_path) as writer:
        assert writer.next_sample == 4
