"""Parquet and Arrow files alike: all rows, from any on, and no damage in silence."""

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioloader._order.blocks import Bad
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.rows import Rows
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.tables import (
    Format,
    Local,
    contents,
    every_type,
    expected,
    flip,
    outcome,
    plain,
    put,
    read_all,
    read_shard,
    shards,
    write_arrow,
    write_parquet,
)

PLACES = pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])
KINDS = pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows"])
NUMBERED = pa.table({"n": range(50), "text": [f"{n}" for n in range(50)]})


def write(path: Path, table: pa.Table) -> str:
    """Write parts of 20 rows."""
    return (write_parquet if path.suffix == ".parquet" else write_arrow)(path, table)


def made(path: Any, *, is_remote: bool = False, **options: Any) -> Format:
    """Return the format of a file, or of several of one kind."""
    first = path if isinstance(path, str) else path[0]
    kind = ParquetFormat if first.endswith(".parquet") else ArrowFormat
    return kind(path, Local(is_remote=is_remote), **options)


@PLACES
@KINDS
@pytest.mark.parametrize("budget", [1, 1 << 16, 1 << 26])
async def test_reads_what_pyarrow_reads(
    kind: str, is_remote: bool, budget: int, tmp_path: Path
) -> None:
    """Every type, whatever the budget and the limit."""
    path = write(tmp_path / f"a.{kind}", every_type())
    form = made(path, is_remote=is_remote)
    parts = {"parquet": [[0], [1], [2]], "arrow": [[0, 3]], "arrows": [[0, 0]]}
    assert await shards(form) == [[path, *part] for part in parts[kind]]
    for limit in (1, 7, 64):
        rows = await read_all(form, budget=budget, limit=limit)
        assert plain(rows) == expected(every_type())


@PLACES
@KINDS
async def test_begins_at_every_row(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """And at the end, where nothing is left; not after it."""
    path = write(tmp_path / f"a.{kind}", NUMBERED)
    form = made(path, is_remote=is_remote)
    shard = (await shards(form))[0]
    stop = 20 if kind == "parquet" else 50
    for row in range(stop + 1):
        rows = await read_shard(form, shard, row=row)
        assert [value["n"] for value in rows] == list(range(row, stop))
    words = f"has {stop} rows and is to be read from row {stop + 1}"
    with pytest.raises(DatasetError, match=words):
        await read_shard(form, shard, row=stop + 1)


@KINDS
async def test_rows_come_in_columns(kind: str, tmp_path: Path) -> None:
    """Blocks are columns, which collate to tensors; the format can be pickled."""
    path = write(tmp_path / f"a.{kind}", NUMBERED)
    form = made(path, columns=["text", "n"])
    found = await shards(form)
    form = pickle.loads(pickle.dumps(form))
    assert repr(form) == f"{type(form).__name__}({path!r})"
    reader = form.open(tuple(found[0]), {"row": 18}, 1 << 20)
    block = await reader.pull(2)
    assert isinstance(block, Rows)
    assert block.collate() == {"text": ["18", "19"], "n": pytest.approx([18, 19])}
    assert reader.position() == {"row": 20}
    await reader.aclose()


@PLACES
@KINDS
async def test_columns_and_nulls(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """Columns are chosen and ordered, and NULLs replaced; a struct comes whole."""
    path = write(tmp_path / f"a.{kind}", every_type())
    nulls = {"float64": -1, "text": "?", "category": "none"}
    names = ["struct", "category", "text", "float64"]
    form = made(path, is_remote=is_remote, columns=names, nulls=nulls)
    table = every_type().select(names).to_pylist()
    for row in table:
        row |= {name: one for name, one in nulls.items() if row[name] is None}
    assert plain(await read_all(form)) == table


@PLACES
@KINDS
async def test_wide_tables(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """A footer, or a schema, of more than a request, and columns found in it."""
    table = pa.table({f"column {at}": [at, at] for at in range(1000)})
    path = write(tmp_path / f"a.{kind}", table)
    names = ["column 999", "column 7"]
    form = made(path, is_remote=is_remote, columns=names)
    assert await read_all(form) == [{"column 999": 999, "column 7": 7}] * 2


@KINDS
@pytest.mark.parametrize(("columns", "message"), [
    ({"n": ["1"], "text": ["1"]},
     r"'n' of 'b\.\w+' is of type string, and it is int64 in 'a\."),
    ({"text": ["1"]}, r"'b\.\w+' has no column 'n'; its columns are 'text'"),
])  # fmt: skip
async def test_missing_and_other_columns_are_named(
    columns: Any, message: str, kind: str, tmp_path: Path
) -> None:
    """Before anything is read; and when a file has changed meanwhile."""
    paths = [write(tmp_path / f"{name}.{kind}", NUMBERED) for name in "ab"]
    form = made(paths)
    found = await shards(form)
    write(Path(paths[1]), pa.table(columns))
    for listed in (made(paths), form):
        with pytest.raises(DatasetError, match=message) as caught:
            await shards(listed)
        assert caught.value.location == f"b.{kind}"
    with pytest.raises(DatasetError, match=message):
        await read_shard(pickle.loads(pickle.dumps(form)), found[-1])


# -- damage ------------------------------------------------------------------------


@PLACES
@KINDS
async def test_cut_files_are_errors(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """Wherever they are cut, between two messages of a stream too."""
    whole = contents(write(tmp_path / f"a.{kind}", NUMBERED))
    path = tmp_path / f"cut.{kind}"
    for length in [*range(0, len(whole), 61), len(whole) - 1, len(whole) - 8]:
        put(path, whole[:length])
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, TruncatedReadError)
        assert found.location == path.name
        assert kind != "parquet" or f"{length:,} bytes" in str(found)


@PLACES
@KINDS
@pytest.mark.parametrize("version", ["1.0", "2.0"])
async def test_flipped_bits_are_errors_or_harmless(
    version: str, kind: str, is_remote: bool, tmp_path: Path
) -> None:
    """Wherever they are: with Parquet's checksums no row is wrong.

    Arrow has none: damage is an error where the data could not be read at all.
    """
    rng = random.Random(1)
    table = NUMBERED if kind == "parquet" else every_type()
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        whole = contents(write_parquet(path, NUMBERED, data_page_version=version))
    else:
        whole = contents(write_arrow(path, table))
    errors = 0
    for _ in range(50):
        put(path, whole)
        flip(path, rng.randrange(len(whole)), rng.randrange(8))
        columns = table.column_names  # a footer has no checksum, so names may differ
        found = await outcome(path, Local(is_remote=is_remote), columns=columns)
        is_error = isinstance(found, DatasetError)
        errors += is_error
        assert kind != "parquet" or is_error or plain(found) == expected(table)
    assert errors > (30 if kind == "parquet" else 5)


@KINDS
async def test_text_that_is_none_costs_its_row_alone(kind: str, tmp_path: Path) -> None:
    """The rows beside it are read, and NULLs in them replaced."""
    texts = pa.array([b"good", b"\xff\xfe", None, b"also"]).view(pa.string())
    path = write(tmp_path / f"a.{kind}", pa.table({"n": range(4), "text": texts}))
    form = made(path, nulls={"text": "-"})
    one, two, three, four = await read_all(form, limit=3)
    assert [row["text"] for row in (one, three, four)] == ["good", "-", "also"]
    assert isinstance(two, Bad)
    assert re.search(r"'a\.\w+' cannot be read, row 1: .*Invalid UTF8", str(two.error))
    (shard,) = await shards(form)
    rows = await read_shard(form, shard, row=1)
    assert isinstance(rows[0], Bad)
    assert [row["n"] for row in rows[1:]] == [2, 3]


@KINDS
async def test_a_failed_reader_fails_again(kind: str, tmp_path: Path) -> None:
    """It does not look as if the shard had ended."""
    path = write(tmp_path / f"a.{kind}", NUMBERED)
    form = made(path)
    (shard, *_) = await shards(form)
    put(path, contents(path)[:100])
    reader = form.open(tuple(shard), {}, 1 << 20)
    for _ in range(2):
        with pytest.raises(DatasetError):
            await reader.pull(5)
    await reader.aclose()


FOREIGN = {
    "parquet": [
        (b"", "does not end like a Parquet file: .* cut short at 0 bytes"),
        (b"PAR1" + bytes(50), "does not end like a Parquet file"),
        (b"PAR1" + bytes(50) + b"\xff\0\0\0PAR1", "footer has 263 bytes, .* 62"),
        (b"PAR1" + bytes(50) + b"\x05\0\0\0PAR1", "a footer that cannot be read"),
        (b"PARE" + bytes(50) + b"\x05\0\0\0PARE", "is an encrypted Parquet file"),
    ],
    "arrow": [
        (b"", "is not an Arrow file or stream"),
        (b"nothing of that kind", "is not an Arrow file or stream"),
        (b"\xff\xff\xff\xff\x08\0\0\0nonsense", "is not an Arrow stream, or is dama"),
        (b"ARROW1\0\0" + bytes(50), "starts as .* was cut short at 58 bytes"),
        (b"ARROW1\0\0" + b"\xff\0\0\0ARROW1", "footer has 255 bytes, .*18"),
        (b"ARROW1\0\0" + bytes(9) + b"\x09\0\0\0ARROW1", "footer that cannot be read"),
        (b"ARROW1", "footer has -1 bytes"),
    ],
}


@PLACES
@pytest.mark.parametrize("kind", FOREIGN)
async def test_other_files_are_errors(
    kind: str, is_remote: bool, tmp_path: Path
) -> None:
    """They say what was found."""
    path = tmp_path / f"x.{kind}"
    for data, message in FOREIGN[kind]:
        put(path, data)
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, DatasetError)
        assert re.search(message, str(found))
