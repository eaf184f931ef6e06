"""Columns in the names of directories: as in pyarrow, and files skipped by filters."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import compute as pc

from aioloader import DataLoader
from aioloader.datasets import ArrowDataset, CSVDataset, ParquetDataset
from aioloader.errors import DatasetError
from datasets.tables import write
from object_server import ObjectServer

ROWS = 48
PATTERN = "h/**/*.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of three years and three towns, of one of which the name is NULL."""
    towns = ["São Paulo/SP", None, "Rome"]
    table = pa.table({
        "number": range(ROWS),
        "year": [2022 + number % 3 for number in range(ROWS)],
        "town": [towns[number // 3 % 3] for number in range(ROWS)],
    })  # fmt: skip
    pq.write_to_dataset(table, tmp_path / "h", partition_cols=["year", "town"])
    return tmp_path


def theirs(folder: Path, **options: Any) -> list[dict[str, Any]]:
    whole = ds.dataset(folder / "h", partitioning="hive")
    return in_order(whole.to_table(**options).to_pylist())


def in_order(rows: Any) -> list[dict[str, Any]]:
    plain = json.dumps([*rows], default=lambda number: number.item())
    return sorted(json.loads(plain), key=json.dumps)


def ours(stream: Any, **options: Any) -> list[dict[str, Any]]:
    with DataLoader(stream, batch_size=None, collate_fn=dict, **options) as loader:
        return in_order(loader)


FILTERS = [
    pc.field("year") > 2022,
    [("year", "=", 2024), ("number", ">", 20)],
    [[("year", "=", 2024)], [("number", "<", 5)]],
    [("town", "in", ["Rome", "São Paulo/SP"])],
    pc.field("town").is_null(),
    pc.field("year") == 1999,
]


@pytest.mark.slow
@pytest.mark.parametrize("filters", [None, *FILTERS], ids=str)
@pytest.mark.parametrize("columns", [None, ["town", "number"], ["year"]], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_as_pyarrow(filters: Any, columns: Any, num_workers: int, folder: Path) -> None:
    expression = pq.filters_to_expression(filters) if type(filters) is list else filters
    stream = ParquetDataset(PATTERN, columns, filters=filters, store=folder)
    expected = theirs(folder, columns=columns, filter=expression)
    assert ours(stream, num_workers=num_workers) == expected


def test_types(folder: Path) -> None:
    stream = ParquetDataset(PATTERN, ["year", "number"], store=folder)
    (batch,) = DataLoader(stream, ROWS)
    assert batch["year"].dtype.itemsize == 4
    assert set(batch["year"].tolist()) == {2022, 2023, 2024}
    schema = pa.schema([("year", pa.string()), ("number", pa.int16())])
    (batch,) = DataLoader(ParquetDataset(PATTERN, store=folder, schema=schema), ROWS)
    assert set(batch["year"]) == {"2022", "2023", "2024"}


def test_nulls(folder: Path) -> None:
    stream = ParquetDataset(PATTERN, ["town"], nulls={"town": "?"}, store=folder)
    assert {row["town"] for row in ours(stream)} == {"São Paulo/SP", "?", "Rome"}


def test_dates(tmp_path: Path) -> None:
    for day in ("2026-01-31", "2026-02-30"):
        place = tmp_path / f"day={day}"
        place.mkdir()
        pq.write_table(pa.table({"number": [1]}), place / "0.parquet")
    schema = pa.schema([("number", pa.int64()), ("day", pa.date32())])

    def read(pattern: str) -> Any:
        stream = ParquetDataset(pattern, schema=schema, store=tmp_path)
        return [*DataLoader(stream, batch_size=None, collate_fn=dict)]

    assert read("*-01-*/*")[0]["day"] == datetime.date(2026, 1, 31)
    with pytest.raises(DatasetError, match=r"day.*2026-02-30/0.parquet.*date32"):
        read("*/*")


@pytest.mark.slow
def test_files_of_other_partitions_are_not_read(folder: Path) -> None:
    """Only the end of the first file is, which decides the columns."""
    objects = {
        str(one.relative_to(folder)): one.read_bytes()
        for one in sorted((folder / "h").rglob("*.parquet"))
    }
    with ObjectServer(objects) as server:
        sent = []
        for filters in ([("year", "=", 2024)], None):
            stream = ParquetDataset([*objects], filters=filters, store=server.url)
            loader = DataLoader(stream, 8, collate_fn=list)
            for _ in range(2):
                before = server.counts().requests
                assert sum(map(len, loader)) == (ROWS // 3 if filters else ROWS)
                sent.append(server.counts().requests - before)
    assert sent == [4 * 2 + 3, 4 + 3, 9 * 2 + 9, 9 + 9]


def test_a_file_without_the_column(folder: Path) -> None:
    pq.write_table(pa.table({"number": [99]}), folder / "h" / "year=2022" / "x.parquet")
    for filters in (None, [("town", "=", "Rome")]):
        stream = ParquetDataset(PATTERN, filters=filters, store=folder)
        with pytest.raises(DatasetError, match=r"x.parquet' has no column 'town'"):
            ours(stream)
    found = ours(ParquetDataset(PATTERN, ["number", "year"], store=folder))
    assert {"number": 99, "year": 2022} in found
    assert len(found) == ROWS + 1


def test_a_column_of_the_file_comes_first(tmp_path: Path) -> None:
    """Some writers keep it there too."""
    place = tmp_path / "h" / "year=2022"
    place.mkdir(parents=True)
    pq.write_table(pa.table({"year": [7]}), place / "x.parquet")
    other = tmp_path / "h" / "year=2023"
    other.mkdir()
    pq.write_table(pa.table({"year": [8]}), other / "x.parquet")
    assert ours(ParquetDataset(PATTERN, store=tmp_path)) == [{"year": 7}, {"year": 8}]
    for filters in ([("year", "=", 8)], [("year", "=", 2023)]):
        stream = ParquetDataset(PATTERN, filters=filters, store=tmp_path)
        assert ours(stream) == [{"year": 8}] * (filters[0][2] == 8)


@pytest.mark.parametrize("columns", [None, ["year"]])
def test_other_formats(columns: Any, tmp_path: Path) -> None:
    for year in (2022, 2023):
        place = tmp_path / f"year={year}"
        place.mkdir()
        write(place / "x.arrow", pa.table({"number": [1, 2]}))
        (place / "x.csv").write_text("number\n1\n2\n")
    expected = [
        {key: row[key] for key in columns or row}
        for row in (
            {"number": number, "year": year}
            for number in (1, 2)
            for year in (2022, 2023)
        )
    ]
    for made in (
        ArrowDataset("**/*.arrow", columns, store=tmp_path),
        CSVDataset("**/*.csv", columns, store=tmp_path),
    ):
        assert ours(made) == in_order(expected)
