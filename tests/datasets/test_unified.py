"""Files of different schemas are one table, also with columns in directory names."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from obstore.store import LocalStore
from pyarrow import compute as pc
from pyarrow import dataset as ds
from pyarrow import parquet as pq

from aioloader import DataLoader
from aioloader.datasets import ArrowDataset, CSVDataset, ParquetDataset
from aioloader.errors import DatasetError
from datasets.shards import items
from datasets.tables import expected, plain, write
from object_server import ObjectServer

Columns = dict[str, pa.Array]


def written(folder: Path, *files: Columns, names: str = "abcdef") -> list[str]:
    folder.mkdir(exist_ok=True)
    return [
        write(folder / f"{name}.parquet", pa.table(columns))
        for name, columns in zip(names, files, strict=False)
    ]


def one_table(paths: list[str], columns: Any = None) -> list[dict[str, Any]]:
    schemas = [pq.read_schema(path) for path in paths]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    table = ds.dataset(paths, schema=schema).to_table(columns)
    return expected(table)


async def test_compatible_types_are_unified(tmp_path: Path) -> None:
    first = {
        "s": pa.array(["a", "b"]),
        "n": pa.array([1, 2], pa.int32()),
        "x": pa.nulls(2),
        "l": pa.array([[1], []], pa.list_(pa.int16())),
    }
    second = {
        "l": pa.array([[2], [3]], pa.large_list(pa.int16())),
        "x": pa.array([0.5, None]),
        "n": pa.array([2**40, None]),
        "s": pa.array(["c", None], pa.large_string()),
    }
    paths = written(tmp_path, first, second)
    fields = [
        pa.field("s", pa.string(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        ("x", pa.null()),
        ("l", pa.list_(pa.int16())),
    ]
    third = pa.table(first).cast(pa.schema(fields))
    paths.append(write(tmp_path / "c.parquet", third))
    for order in (paths, paths[::-1]):
        rows = await items(ParquetDataset(order))
        assert plain(rows) == one_table(order, [*rows[0]])
        assert {type(row["n"]) for row in rows} == {np.int64, type(None)}


@pytest.mark.parametrize(("columns", "words"), [
    # Also where Arrow would convert values: numbers to floats, text to bytes.
    *(
        ([pa.array([0.5]), pa.array(values)],
         "'n' of '.*b.parquet' is of .*, and it is double in '.*a.parquet'; .*sch")
        for values in (["1"], [decimal.Decimal("1.5")], [[1]], [True], [{"a": 1}])
    ),
    ([pa.array(["a"]), pa.array([b"a"])],
     "'n' of '.*b.parquet' is of .*, and it is string in '.*a.parquet'; .*sch"),
    # The second file sets the type: the column of the first is all NULL.
    ([pa.nulls(1), pa.array([1]), pa.array(["x"])],
     "c.parquet' is of type string, and it is int64 in '.*b.parquet'"),
    # No float has the value 2**53 + 1.
    ([pa.array([0.5]), pa.array([2**53 + 1])],
     "'n' of '.*b.parquet' is of .* int64 and has values that do not fit double.*sch"),
], ids=lambda x: x if isinstance(x, str) else str(x[-1].type))  # fmt: skip
async def test_conflicting_types_are_an_error(
    columns: Any, words: str, tmp_path: Path
) -> None:
    paths = written(tmp_path, *({"n": column} for column in columns))
    with pytest.raises(DatasetError, match=words):
        await items(ParquetDataset(paths))


# -- schema= -------------------------------------------------------------------------


async def test_a_schema_decides_columns_and_types(tmp_path: Path) -> None:
    paths = written(
        tmp_path,
        {"n": pa.array([1]), "s": pa.array(["a"]), "more": pa.array([0])},
        {"s": pa.array(["b"], pa.large_string())},
    )
    schema = pa.schema([("s", pa.string()), ("n", pa.float32())])
    names = ["a.parquet", "b.parquet"]
    for store in (tmp_path, LocalStore(tmp_path)):
        rows = await items(ParquetDataset(names, schema=schema, store=store))
        assert rows == [{"s": "a", "n": 1.0}, {"s": "b", "n": None}]
        assert type(rows[0]["n"]) is np.float32
    made = ParquetDataset(paths, columns=["n"], schema=schema, nulls={"n": -1})
    assert await items(made) == [{"n": 1.0}, {"n": -1.0}]
    only = pa.schema([("z", pa.int8())])
    made = ParquetDataset(paths, schema=only)
    assert await items(made) == [{"z": None}] * 2


async def test_columns_that_do_not_fit_a_schema_fail(tmp_path: Path) -> None:
    first = {"n": pa.array([300]), "k": pa.nulls(1)}
    paths = written(tmp_path, first, {"n": pa.array([[1]])})
    schema = pa.schema([("n", pa.int8())])
    words = r"b.parquet' is of type list.*schema= says i"
    with pytest.raises(DatasetError, match=words):
        await items(ParquetDataset(paths, schema=schema))
    made = ParquetDataset(paths[:1], schema=schema)
    with pytest.raises(DatasetError, match=r"'n' of '.*a.parquet' .* do not fit int8"):
        await items(made)
    schema = pa.schema([pa.field("m", pa.int8(), nullable=False)])
    with pytest.raises(DatasetError, match=r"a.parquet' has no column 'm'"):
        await items(ParquetDataset(paths, schema=schema))
    schema = pa.schema([pa.field("k", pa.int8(), nullable=False)])
    made = ParquetDataset(paths[:1], schema=schema)
    with pytest.raises(DatasetError, match=r"'k' of '.*a.*' has 1 NULLs, .*\(nulls=\)"):
        await items(made)
    made = ParquetDataset(paths[:1], schema=schema, nulls={"k": 7})
    assert await items(made) == [{"k": 7}]


# A type, values that it keeps, and values that it would change.
MIDNIGHT = datetime.datetime(2020, 1, 1)
CHANGED: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.int32(), [1.0], [-0.5]),
    (pa.int32(), [decimal.Decimal(1)], [decimal.Decimal("1.5")]),
    (pa.float64(), [1], [2**53 + 1]),
    (pa.timestamp("s"), [MIDNIGHT], [MIDNIGHT.replace(microsecond=5)]),
    (pa.list_(pa.int64()), [[1.0]], [[1.5]]),
    (pa.struct({"a": pa.int64()}), [{"a": 1.0}], [{"a": 1.5}, {"b": 1}]),
]


@pytest.mark.parametrize(("kind", "kept", "changed"), CHANGED, ids=str)
async def test_values_that_a_cast_would_change_are_refused(
    kind: pa.DataType, kept: list[Any], changed: list[Any], tmp_path: Path
) -> None:
    options: Any = {"schema": pa.schema([("n", kind)])}
    good, bad = written(tmp_path, {"n": pa.array(kept)}, {"n": pa.array(changed[:1])})
    assert len(await items(ParquetDataset([good], **options))) == len(kept)
    with pytest.raises(DatasetError, match=r"'n' of '.*b.parquet' .* do not fit .*sch"):
        await items(ParquetDataset([bad], **options))
    for value in changed:
        with pytest.raises(ValueError, match=r"nulls=.* does not fit a column of type"):
            await items(ParquetDataset([good], nulls={"n": value}, **options))


# A type, and a value of a type that Arrow would cast to it without a check.
UNCHECKED: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), 1),
    (pa.date32(), MIDNIGHT),
    (pa.time64("us"), MIDNIGHT),
    (pa.float16(), 1),
    (pa.decimal128(4, 1), 0.5),
    (pa.list_(pa.bool_()), [1]),
    (pa.struct({"a": pa.date32()}), {"a": MIDNIGHT}),
]


@pytest.mark.parametrize(("kind", "value"), UNCHECKED, ids=str)
async def test_casts_that_arrow_does_not_check_are_refused(
    kind: pa.DataType, value: Any, tmp_path: Path
) -> None:
    schema = pa.schema([("n", kind)])
    paths = written(tmp_path, {"n": pa.array([value])}, {"n": pa.nulls(1, kind)})
    with pytest.raises(
        DatasetError, match=r"'n' of '.*a.parquet' .* schema= says .*sch"
    ):
        await items(ParquetDataset(paths[:1], schema=schema))
    made = ParquetDataset(paths[1:], schema=schema, nulls={"n": value})
    with pytest.raises(ValueError, match=r"nulls=.* does not fit a column of type"):
        await items(made)


async def test_maps_keep_their_values(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    (path,) = written(tmp_path, {"n": pa.nulls(1, kind)})
    for value in ({"a": 1}, [("a", 1.0)]):
        rows = await items(ParquetDataset([path], nulls={"n": value}))
        assert rows == [{"n": [("a", 1)]}]
    with pytest.raises(ValueError, match=r"nulls=.* does not fit a column of type map"):
        await items(ParquetDataset([path], nulls={"n": {"a": 1.5}}))


async def test_a_state_is_bound_to_schema_and_filters(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {"n": pa.array([1])})
    schema = pa.schema([("n", pa.int8())])
    made = ParquetDataset(path, schema=schema, filters=[("n", ">", 0)])
    known = json.loads(json.dumps(made.describe()))
    assert (known["schema"], known["filters"]) == ([["n", "int8"]], "(n > 0)")
    a, b = (CSVDataset("x", column_types={"a": k}) for k in ("int8", "int16"))
    assert json.loads(json.dumps(a.describe())) == a.describe() != b.describe()
    assert a.describe()["delimiter"] == ","
    # Wrong schemas.
    with pytest.raises(TypeError, match=r"must be a pyarrow\.Schema, got dict"):
        ParquetDataset("x", schema={"n": "int8"})
    with pytest.raises(ValueError, match=r"columns= names \['x'\], not in schema="):
        ArrowDataset("x", ["n", "x"], schema=schema)


# -- columns in the names of directories -----------------------------------------------

ROWS = 48
PATTERN = "h/**/*.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return files of three years and three towns, one of which is NULL."""
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
def test_hive_partitions_are_read_as_pyarrow_reads_them(
    filters: Any, columns: Any, num_workers: int, folder: Path
) -> None:
    expression = pq.filters_to_expression(filters) if type(filters) is list else filters
    stream = ParquetDataset(PATTERN, columns, filters=filters, store=folder)
    expected = theirs(folder, columns=columns, filter=expression)
    assert ours(stream, num_workers=num_workers) == expected


def test_partition_columns_have_types_and_nulls(folder: Path) -> None:
    stream = ParquetDataset(PATTERN, ["year", "number"], store=folder)
    (batch,) = DataLoader(stream, ROWS)
    assert batch["year"].dtype.itemsize == 4
    assert set(batch["year"].tolist()) == {2022, 2023, 2024}
    schema = pa.schema([("year", pa.string()), ("number", pa.int16())])
    (batch,) = DataLoader(ParquetDataset(PATTERN, store=folder, schema=schema), ROWS)
    assert set(batch["year"]) == {"2022", "2023", "2024"}
    stream = ParquetDataset(PATTERN, ["town"], nulls={"town": "?"}, store=folder)
    assert {row["town"] for row in ours(stream)} == {"São Paulo/SP", "?", "Rome"}


def test_partition_columns_may_be_dates(tmp_path: Path) -> None:
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
    """Except the end of the first file, which decides the columns."""
    objects = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "h").rglob("*.parquet"))
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


def test_a_file_outside_of_a_partition_fails(folder: Path) -> None:
    pq.write_table(pa.table({"number": [99]}), folder / "h" / "year=2022" / "x.parquet")
    for filters in (None, [("town", "=", "Rome")]):
        stream = ParquetDataset(PATTERN, filters=filters, store=folder)
        with pytest.raises(DatasetError, match=r"x.parquet' has no column 'town'"):
            ours(stream)
    rows = ours(ParquetDataset(PATTERN, ["number", "year"], store=folder))
    assert {"number": 99, "year": 2022} in rows
    assert len(rows) == ROWS + 1


def test_a_column_of_the_file_takes_precedence(tmp_path: Path) -> None:
    for year, value in ((2022, 7), (2023, 8)):
        place = tmp_path / "h" / f"year={year}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"year": [value]}), place / "x.parquet")
    assert ours(ParquetDataset(PATTERN, store=tmp_path)) == [{"year": 7}, {"year": 8}]
    for filters in ([("year", "=", 8)], [("year", "=", 2023)]):
        stream = ParquetDataset(PATTERN, filters=filters, store=tmp_path)
        assert ours(stream) == [{"year": 8}] * (filters[0][2] == 8)
