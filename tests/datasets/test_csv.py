"""CSV: pyarrow's rows, from any row on, cut anywhere; no wrong row is silent."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard
from pyarrow import compute as pc
from pyarrow import csv as pacsv
from pyarrow import dataset as ds

from aioloader import DataLoader
from aioloader.datasets import CSVDataset, from_arrow
from aioloader.datasets._arrow import csv as formats
from aioloader.datasets._arrow import memory
from aioloader.datasets._arrow.csv import CSVFormat, Dialect
from aioloader.errors import DatasetError, StateMismatchError
from datasets.shards import check_resumes, put, read
from datasets.tables import PLACES, Local, expected, plain, read_all, read_shard, shards


def made(paths: Any, *, is_remote: bool = False, **options: Any) -> CSVFormat:
    names = [name for name in Dialect.__dataclass_fields__ if name[0] != "_"]
    dialect = Dialect(**{n: options.pop(n) for n in names if n in options})
    return CSVFormat(paths, Local(is_remote=is_remote), dialect=dialect, **options)


PACKED: dict[str, Any] = {
    "gz": lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:]),
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}


def written(folder: Path, *texts: str, ending: str = "csv") -> list[str]:
    paths = [str(folder / f"{i}.{ending}") for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        put(path, PACKED.get(ending.rpartition(".")[2], bytes)(text.encode()))
    return paths


def numbered(first: int, stop: int) -> str:
    rows = [f'{n},{n / 4},"name, {n}"' for n in range(first, stop)]
    return "\n".join(["n,x,name", *rows, ""])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_RANGE_BYTES", 100)
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 64)


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize("ending", ["csv", "csv.gz", "csv.zst", "csv.bz2"])
@pytest.mark.usefixtures("small")
async def test_reads_what_pyarrow_reads(
    ending: str, is_remote: bool, tmp_path: Path
) -> None:
    paths = written(tmp_path, numbered(0, 30), numbered(30, 50), ending=ending)
    form = made(paths, is_remote=is_remote)
    listed = await shards(form)
    assert len(listed) == (2 if ending != "csv" else 10)
    rows = await read_all(form)
    table = pacsv.read_csv(io.BytesIO(numbered(0, 50).encode()))
    assert plain(rows) == expected(table)
    assert type(rows[0]["n"]) is np.int64
    whole = await read_shard(form, listed[1])
    for row in range(len(whole) + 1):
        assert await read_shard(form, listed[1], row=row) == whole[row:]
    await check_resumes(CSVDataset(paths), rows, range(51))


# -- types ---------------------------------------------------------------------------


async def test_all_files_have_the_same_column_types(tmp_path: Path) -> None:
    texts = "n,s\n1,\n2,\n", "s,n\na,0.5\n", "n,s\n,b\n"
    paths = written(tmp_path, *texts)
    rows = await read_all(made(paths))
    assert plain(rows) == [
        {"n": 1.0, "s": ""}, {"n": 2.0, "s": ""}, {"n": 0.5, "s": "a"},
        {"n": None, "s": "b"},
    ]  # fmt: skip
    types = {"n": "float32", "s": pa.large_string()}
    rows = await read_all(made(paths, column_types=types, columns=["s", "n"]))
    assert [*rows[0]] == ["s", "n"]
    assert type(rows[0]["n"]) is np.float32
    schema = pa.schema([("s", pa.string()), ("more", pa.int8())])
    rows = await read_all(made(paths, schema=schema, nulls={"more": 0}))
    assert rows[2] == {"s": "a", "more": 0}
    rows = await read_all(made(paths, column_types={"n": "string"}))
    assert [row["n"] for row in rows] == ["1", "2", "0.5", ""]
    paths = written(tmp_path, "n\n1\n", "n\nx\n")
    words = "'n' of '1.csv' is of type string, and it is int64 in '0.csv'.*schema="
    with pytest.raises(DatasetError, match=words):
        await shards(made(paths))


@pytest.mark.usefixtures("small")
async def test_a_malformed_line_fails_alone(tmp_path: Path) -> None:
    bad = {7: "seven,1,x", 20: "20,1", 21: "21,2,x,more"}
    text = "\n".join(["n,x,s", *(bad.get(n, f"{n},0.5,a") for n in range(40)), ""])
    form = made(written(tmp_path, text), column_types={"n": "int64"})
    rows: list[Any] = await read_all(form)
    failed = [row for row in rows if hasattr(row, "error")]
    assert [row["n"] for row in rows if not hasattr(row, "error")] == [
        n for n in range(40) if n not in bad
    ]
    for (_, line), row in zip(bad.items(), failed, strict=True):
        words = f"line at byte {text.index(line)} of '0.csv' cannot be read"
        assert words in str(row.error)
        assert repr(line) in str(row.error)
    assert "column 'n' has 'seven', which is not int64" in str(failed[0].error)


async def test_integers_above_int64_are_uint64(tmp_path: Path) -> None:
    ids = [2**63, 2**64 - 1, 7]
    lines = "".join(f"{n},0.5,{n}\n" for n in ids)
    (path,) = written(tmp_path, f"id,x,n\n{lines},.5,1\n")
    rows = await read_all(made(path, column_types={"n": "float64"}))
    assert [row["id"] for row in rows] == [*map(np.uint64, ids), None]
    assert [type(row["n"]) for row in rows] == [np.float64] * 4
    (batch,) = [b async for b in DataLoader(CSVDataset(path, ["id"]).take(3), 3)]
    assert batch["id"].dtype is torch.uint64


@pytest.mark.parametrize(("first", "later", "words"), [
    ("1", str(2**64), f"column 'id' has '{2**64}', which is not int64; "),
    ("1", "a", r"'a', which is not int64; .* column_types=\{'id': 'string'\}"),
    (str(2**64), "1", f"column 'id' has '{2**64}', which is not int64"),
    (str(2**63), "-1", "column 'id' has '-1', which is not uint64"),
    ("", "a", "'a' and no known type: its first values are empty; "),
], ids=str)  # fmt: skip
async def test_a_value_of_another_type_is_an_error(
    first: str, later: str, words: str, tmp_path: Path
) -> None:
    head, tail = f"0.5,{first}\n" * 20_000, f"0.5,{later}\n"
    (path,) = written(tmp_path, f"x,id\n{head}{tail}")
    with pytest.raises(DatasetError, match=words):
        await read(CSVDataset(path, ["id"]))


# -- how lines are written -----------------------------------------------------------


@pytest.mark.usefixtures("small")
async def test_options_set_the_dialect(tmp_path: Path) -> None:
    text = "\ufeff'a;b';1\r\nNA;2\r\n\r\n'it''s';"
    options: Any = {"delimiter": ";", "quote_char": "'", "column_names": ["s", "n"]}
    form = made(written(tmp_path, text), **options, null_values=["NA", ""])
    assert plain(await read_all(form)) == [
        {"s": "a;b", "n": 1}, {"s": "NA", "n": 2}, {"s": "it's", "n": None},
    ]  # fmt: skip
    form = made(written(tmp_path, "\n\ufeffa\t b\nx\\\ty\t2"), delimiter="\t",
                escape_char="\\", strings_can_be_null=True)  # fmt: skip
    assert plain(await read_all(form)) == [{"\ufeffa": "x\ty", " b": 2}]


@PLACES
@pytest.mark.usefixtures("small")
async def test_newlines_in_values_are_opt_in(is_remote: bool, tmp_path: Path) -> None:
    """Then a file is one shard; without the option, an open quote is an error."""
    value = "one\ntwo\r\n\nthree " * 5
    text = "n,s\n" + "".join(f'{n},"{value}"\n' for n in range(20))
    paths = written(tmp_path, text)
    form = made(paths, is_remote=is_remote, newlines_in_values=True)
    assert await shards(form) == [[paths[0], 0, 0]]
    assert plain(await read_all(form)) == [{"n": n, "s": value} for n in range(20)]
    with pytest.raises(DatasetError, match=r"within quotes.*newlines_in_values=True"):
        await read_all(made(paths, is_remote=is_remote))


async def test_a_missing_quote_is_an_error(tmp_path: Path) -> None:
    paths = written(tmp_path, 'n,s\n1,"a"\n2,"b\n3,c\n')
    for newlines in (False, True):
        with pytest.raises(DatasetError, match="line at byte 10 that ends wi"):
            await read_all(made(paths, newlines_in_values=newlines))
    # A quote within a value is a character.
    paths = written(tmp_path, 'n,s\n1,5" pipe\n2,x\n')
    assert [row["s"] for row in await read_all(made(paths))] == ['5" pipe', "x"]
    # With carriage returns alone, the whole file would be the first line.
    with pytest.raises(DatasetError, match="carriage returns without"):
        await read_all(made(written(tmp_path, "a,b\r1,2\r3,4\r")))


@PLACES
async def test_empty_files_need_column_names(is_remote: bool, tmp_path: Path) -> None:
    (path,) = written(tmp_path, "")
    with pytest.raises(DatasetError, match=r"has no first line.*column_names="):
        await shards(made(path, is_remote=is_remote))
    form = made(path, is_remote=is_remote, column_names=["a"])
    assert await read_all(form) == []
    for text in ("a,b", "a,b\n", "a,b\n\n\n"):
        assert await read_all(made(written(tmp_path, text), is_remote=is_remote)) == []


async def test_a_long_header_is_read_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(formats, "_MIN_HEAD", 16)
    names = [f"column {n}" for n in range(50)]
    text = ",".join(names) + "\n" + ",".join(["7"] * 50) + "\n"
    for is_remote in (False, True):
        rows = await read_all(made(written(tmp_path, text), is_remote=is_remote))
        assert rows == [dict.fromkeys(names, 7)]


async def test_cuts_before_the_first_row_change_no_row(tmp_path: Path) -> None:
    """Within empty lines or a header of several lines; the header is no row."""
    several = '"a\n1,2\n3,4",b\nx,y\n'
    for text, names in (("\n" * 40 + "a,b\nx,y\n", "ab"), (several, "")):
        (path,) = written(tmp_path, text)
        parts = [await read(CSVDataset(path).shard(rank, 4)) for rank in range(4)]
        rows = [row for part, _ in parts for row in part]
        assert [list(row.values()) for row in rows] == [["x", "y"]]
        assert not names or list(rows[0]) == list(names)


@pytest.mark.usefixtures("small")
async def test_a_state_of_a_file_that_grew_is_refused(tmp_path: Path) -> None:
    """Even if the file is cut into as many shards as before."""
    (path,) = written(tmp_path, "n\n" + "".join(f"{n:03}\n" for n in range(100)))
    stream = CSVDataset(path).shard(0, 100)
    _, state = await read(stream)
    put(Path(path), b"n\n" + b"".join(b"%03d\n" % n for n in range(104)))
    stream.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        await read(stream)


async def test_unsupported_compression_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a?.csv.xz"
    path.write_bytes(lzma.compress(b"a,b\n1,2\n"))
    with pytest.raises(DatasetError, match=r"compressed as \.xz.* use one of \.gz"):
        [row async for row in CSVDataset(str(path))]


# -- Arrow data of other libraries -----------------------------------------------------

TABLE = pa.table(
    {
        "n": range(100),
        "s": [None if n % 10 == 3 else f"t {n}" for n in range(100)],
        "year": [2020 + n // 50 for n in range(100)],
    }
)
Make = Callable[[Path], Any]


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
    """An object with Arrow's stream protocol only."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


def polars(_folder: Path) -> Any:
    return pytest.importorskip("polars").from_arrow(TABLE)


def duckdb(_folder: Path) -> Any:
    connection = pytest.importorskip("duckdb").connect()
    connection.register("t", TABLE)
    return connection.sql("SELECT * FROM t ORDER BY n")


IN_MEMORY = pa.concat_tables([TABLE[:33], TABLE[33:]])
SHARDED: list[Make] = [lambda _: IN_MEMORY, hive, feather]
STREAMED: list[Make] = [
    lambda _: reader, lambda _: batches, lambda _: Exported(), polars, duckdb
]  # fmt: skip
NAMES = ["table", "hive", "feather", "reader", "batches", "stream", "polars", "duckdb"]
EVERY = pytest.mark.parametrize("make", SHARDED + STREAMED, ids=NAMES)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SHARD_ROWS", 30)
    monkeypatch.setattr(memory, "BATCH_ROWS", 8)


@pytest.mark.slow
@EVERY
async def test_all_rows_are_read_once(make: Make, tmp_path: Path) -> None:
    source = make(tmp_path)
    stream = from_arrow(source, ["n", "s", "year"])
    for _ in range(2):
        assert plain((await read(stream))[0]) == TABLE.to_pylist()
    chosen = from_arrow(source, ["s"], nulls={"s": ""}, filters=pc.field("year") > 2020)
    expected = [{"s": row["s"] or ""} for row in TABLE[50:].to_pylist()]
    assert (await read(chosen))[0] == expected
    parts = [(await read(stream.shard(rank, 3)))[0] for rank in range(3)]
    assert all(parts)
    assert sorted(row["n"] for part in parts for row in part) == [*range(100)]


@pytest.mark.slow
@EVERY
async def test_reading_resumes_after_any_row(make: Make, tmp_path: Path) -> None:
    stream = from_arrow(make(tmp_path), ["n"])
    for part in (stream, stream.shard(1, 2)):
        part.set_epoch(0)
        whole = (await read(part))[0]
        await check_resumes(part, whole, range(0, len(whole) + 1, 13))


@EVERY
async def test_batches_are_columns(make: Make, tmp_path: Path) -> None:
    loader: Any = DataLoader(from_arrow(make(tmp_path), ["n"]), 32)
    columns = [batch["n"] async for batch in loader]
    assert [len(column) for column in columns] == [32, 32, 32, 4]
    assert np.concatenate(columns).tolist() == [*range(100)]


async def test_filters_skip_files_and_row_groups(tmp_path: Path) -> None:
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
async def test_fragments_are_cut_for_more_ranks(
    make: Make, filters: Any, tmp_path: Path
) -> None:
    stream = from_arrow(make(tmp_path), ["n"], filters=filters)
    whole = [row["n"] for row in (await read(stream))[0]]
    parts = [(await read(stream.shard(rank, 9)))[0] for rank in range(9)]
    assert [row["n"] for part in parts for row in part] == whole
    assert max(map(len, parts)) <= 20
    assert make is not hive or min(map(len, parts)) > 0
    await check_resumes(stream.shard(4, 9), parts[4], range(len(parts[4]) + 1))


async def test_errors_of_a_source_are_raised() -> None:
    def fails() -> Iterator[pa.RecordBatch]:
        yield from TABLE[:5].to_batches()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await read(from_arrow(fails))
    with pytest.raises(TypeError, match="'int' is not Arrow data"):
        await read(from_arrow(lambda: iter([1])))
    with pytest.raises(DatasetError, match="has no column 'z'"):
        await read(from_arrow(batches, ["z"]))


def test_wrong_sources_are_refused() -> None:
    for source in (reader(), batches()):
        with pytest.raises(TypeError, match="can be read only once; pass the function"):
            from_arrow(source)
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
    """The part of Ray Data's iterator that is used."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def iter_batches(self, *, batch_format: str, batch_size: int | None) -> Any:
        assert (batch_format, batch_size) == ("pyarrow", None)
        for start in range(10 * self.rank, 100, 10 * self.ranks):
            yield TABLE[start : start + 10]


async def test_each_rank_reads_its_ray_split() -> None:
    stream = from_arrow([Split(rank, 3) for rank in range(3)], ["n"])
    for _ in range(2):
        parts = [(await read(stream.shard(rank, 3)))[0] for rank in range(3)]
        assert [row["n"] for row in parts[1][:11]] == [*range(10, 20), 40]
        assert sorted(row["n"] for part in parts for row in part) == [*range(100)]


async def test_ray_splits_must_match_the_readers() -> None:
    stream = from_arrow(Split(0, 2))
    assert len((await read(stream))[0]) == 50
    with pytest.raises(ValueError, match="1 iterators of Ray Data for 2 readers"):
        await read(stream.shard(0, 2))


async def test_ray_data_cannot_resume_within_an_epoch() -> None:
    """Its order is not the same twice."""
    stream = from_arrow(Split(0, 1))
    for count in (1, 7):
        stream.set_epoch(0)
        _, state = await read(stream, count)
        stream.load_state_dict(state)
        words = "cannot resume after row .*: Ray Data returns rows in another order"
        with pytest.raises(StateMismatchError, match=words):
            await read(stream)
