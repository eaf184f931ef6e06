"""Arrow IPC: what pyarrow itself reads, from any row on, and no crash on damage."""

import pickle
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from aioloader._order.blocks import Bad
from aioloader.datasets._arrow import ipc
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.rows import Rows
from aioloader.errors import DatasetError, ObjectNotFoundError, TruncatedReadError
from datasets.tables import (
    Local,
    contents,
    every_type,
    expected,
    flip,
    plain,
    put,
    read_all,
    read_shard,
    shards,
)

PLACES = pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])
KINDS = pytest.mark.parametrize("kind", ["arrow", "arrows"])


def write(path: Path, table: pa.Table, rows: int = 20) -> str:
    """Write record batches of so many rows; what it is, its ending tells."""
    make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, rows)
    return str(path)


@pytest.fixture
def table() -> pa.Table:
    """Return 50 rows, a number and a text."""
    return pa.table({"n": range(50), "text": [f"{n}" for n in range(50)]})


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each record batch a shard."""
    monkeypatch.setattr(ipc, "_SHARD", 1)


# -- what is read ------------------------------------------------------------------


@PLACES
@KINDS
@pytest.mark.parametrize("budget", [1, 1 << 26])
async def test_reads_what_pyarrow_reads(
    kind: str, is_remote: bool, budget: int, tmp_path: Path
) -> None:
    """Every type, whatever the budget and the limit."""
    table = every_type()
    path = write(tmp_path / f"a.{kind}", table)
    made = ArrowFormat(path, Local(is_remote=is_remote))
    assert await shards(made) == [[path, 0, 3 if kind == "arrow" else 0]]
    for limit in (1, 7, 64):
        rows = await read_all(made, budget=budget, limit=limit)
        assert plain(rows) == expected(table)


@PLACES
@pytest.mark.parametrize("codec", ["zstd", "lz4", "uncompressed"])
async def test_reads_feather(
    is_remote: bool, codec: str, tmp_path: Path, small_shards: None
) -> None:
    """Compressed or not; dictionaries are read for each shard."""
    path, table = str(tmp_path / "a.feather"), every_type()
    feather.write_feather(table, path, codec, chunksize=20)
    names = ["category", "text", "int8"]
    made = ArrowFormat(path, Local(is_remote=is_remote), columns=names)
    assert len(await shards(made)) == 3
    assert plain(await read_all(made)) == expected(table.select(names))


@PLACES
@KINDS
async def test_begins_at_every_row(
    kind: str, is_remote: bool, table: pa.Table, tmp_path: Path
) -> None:
    """And at the end, where nothing is left."""
    path = write(tmp_path / f"a.{kind}", table)
    made = ArrowFormat(path, Local(is_remote=is_remote))
    (shard,) = await shards(made)
    for row in range(51):
        rows = await read_shard(made, shard, row=row)
        assert [value["n"] for value in rows] == list(range(row, 50))
    with pytest.raises(DatasetError, match="has 50 rows and is to be read from row 51"):
        await read_shard(made, shard, row=51)


async def test_small_batches_are_read_together(
    table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to so many bytes; a larger one is alone."""
    path = write(tmp_path / "a.arrow", table, rows=10)
    made = ArrowFormat(path, Local())
    assert await shards(made) == [[path, 0, 5]]
    monkeypatch.setattr(ipc, "_SHARD", 1000)
    found = await shards(made)
    assert found == [[path, 0, 2], [path, 2, 4], [path, 4, 5]]
    rows = await read_shard(made, found[1])
    assert [row["n"] for row in rows] == list(range(20, 40))


async def test_rows_come_in_columns(table: pa.Table, tmp_path: Path) -> None:
    """Blocks are columns, which collate to tensors; a shard has no gaps."""
    path = write(tmp_path / "a.arrow", table)
    reader = ArrowFormat(path, Local()).open((path, 1, 3), {"row": 18}, 1 << 20)
    block = await reader.pull(10)
    assert isinstance(block, Rows)
    assert block.collate()["n"].tolist() == [38, 39]
    assert (await reader.pull(2))[0] == {"n": 40, "text": "40"}
    assert reader.position() == {"row": 22}
    await reader.aclose()


@KINDS
async def test_nothing_in_it(kind: str, table: pa.Table, tmp_path: Path) -> None:
    """No record batches, or one without rows."""
    for name, rows in (("none", table.slice(0, 0)), ("some", table)):
        write(tmp_path / f"{name}.{kind}", rows)
    with pa.ipc.new_file(tmp_path / "empty.arrow", table.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], table.schema))
    names = (f"none.{kind}", "empty.arrow", f"some.{kind}")
    for is_remote in (False, True):
        made = ArrowFormat(
            [str(tmp_path / name) for name in names], Local(is_remote=is_remote)
        )
        assert len(await read_all(made)) == 50


# -- columns -----------------------------------------------------------------------


@KINDS
async def test_columns_and_nulls(kind: str, tmp_path: Path) -> None:
    """As for Parquet: chosen, ordered, and NULLs replaced."""
    path = write(tmp_path / f"a.{kind}", every_type())
    names = ["text", "float64"]
    for is_remote in (False, True):
        local = Local(is_remote=is_remote)
        made = ArrowFormat(path, local, columns=names, nulls={"float64": -1})
        rows = await read_all(made)
        assert list(rows[0]) == names
        assert [row["float64"] for row in rows[:3]] == [0, -1, 2 / 3]


@KINDS
async def test_other_columns_are_errors(
    kind: str, table: pa.Table, tmp_path: Path
) -> None:
    """Missing, or of another type than in the first file."""
    first = write(tmp_path / f"a.{kind}", table)
    for columns, message in (
        (pa.table({"n": [1]}), "'b.arrows?' has no column 'text'; its columns are 'n'"),
        (
            pa.table({"n": ["x"], "text": ["a"]}),
            "'n' of 'b.arrows?' is of type string,",
        ),
    ):
        path = write(tmp_path / f"b.{kind}", columns)
        with pytest.raises(DatasetError, match=message):
            await shards(ArrowFormat([first, path], Local()))


@PLACES
@KINDS
async def test_wide_tables(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """A footer, or a schema, of more than a request."""
    table = pa.table({f"column {at}": [at, at] for at in range(1000)})
    path = write(tmp_path / f"a.{kind}", table)
    names = ["column 999", "column 7"]
    made = ArrowFormat(path, Local(is_remote=is_remote), columns=names)
    assert await read_all(made) == [{"column 999": 999, "column 7": 7}] * 2


async def test_only_wanted_batches_are_requested(tmp_path: Path) -> None:
    """And the end of the file, once for shards that follow each other."""
    values = np.random.default_rng(0).random((8, 100_000))
    table = pa.table({"x": values.ravel()})
    path = write(tmp_path / "a.arrow", table, rows=100_000)
    local = Local(is_remote=True)
    made = ArrowFormat(path, local)
    found = await shards(made)
    assert found == [[path, 0, 5], [path, 5, 8]]
    assert len(await read_shard(made, found[1], limit=1 << 20)) == 300_000
    requested = sum(stop - start for start, stop in local.spans)
    assert 2_400_000 < requested < 2_500_000


# -- damage ------------------------------------------------------------------------


async def outcome(path: Path, local: Local) -> list[Any] | DatasetError:
    """Return the rows, or the error."""
    try:
        return await read_all(ArrowFormat(str(path), local))
    except DatasetError as error:
        return error


@PLACES
@KINDS
async def test_cut_files_are_errors(
    kind: str, is_remote: bool, table: pa.Table, tmp_path: Path
) -> None:
    """Wherever they are cut, between two messages of a stream too."""
    path = tmp_path / f"a.{kind}"
    whole = contents(write(path, table))
    for length in [*range(0, len(whole), 61), len(whole) - 1, len(whole) - 8]:
        put(path, whole[:length])
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, TruncatedReadError)
        assert found.location == path.name


@PLACES
@KINDS
async def test_damage_is_an_error_or_read(
    kind: str, is_remote: bool, tmp_path: Path
) -> None:
    """Arrow has no checksums: what is told is what is not to be read at all."""
    rng = random.Random(1)
    path = tmp_path / f"a.{kind}"
    whole = contents(write(path, every_type()))
    errors = 0
    for _ in range(40):
        put(path, whole)
        for _ in range(rng.choice([1, 8])):
            flip(path, rng.randrange(len(whole)), rng.randrange(8))
        found = await outcome(path, Local(is_remote=is_remote))
        errors += isinstance(found, DatasetError)
    assert errors > 5


@KINDS
async def test_damage_names_its_place(
    kind: str, table: pa.Table, tmp_path: Path, small_shards: None
) -> None:
    """Offsets that lead out of the text, say."""
    path = write(tmp_path / f"a.{kind}", table)
    whole = contents(path)
    offsets = struct.pack("<20i", *range(0, 40, 2))  # of the texts "20" to "39"
    put(path, whole.replace(offsets, offsets[:-4] + struct.pack("<i", 1 << 30)))
    made = ArrowFormat(path, Local())
    where = "record batches 1 to 1 of " if kind == "arrow" else ""
    row = 0 if kind == "arrow" else 20
    with pytest.raises(
        DatasetError, match=rf"{where}'a.arrows?' cannot.* row {row} on"
    ):
        await read_all(made)


@pytest.mark.parametrize(("data", "message"), [
    (b"", "is not an Arrow file or stream"),
    (b"nothing of that kind", "is not an Arrow file or stream"),
    (b"\xff\xff\xff\xff\x08\0\0\0nonsense", "is not an Arrow stream, or is damaged"),
    (b"ARROW1\0\0" + bytes(50), "starts as .* was cut short at 58 bytes"),
    (b"ARROW1\0\0" + b"\xff\0\0\0ARROW1", "footer has 255 bytes, the whole .*18"),
    (b"ARROW1\0\0" + bytes(9) + b"\x09\0\0\0ARROW1", "footer that cannot be read"),
    (b"ARROW1", "footer has -1 bytes"),
], ids=range(7))  # fmt: skip
async def test_what_is_not_arrow_is_an_error(
    data: bytes, message: str, tmp_path: Path
) -> None:
    """It says what was found."""
    path = tmp_path / "x.arrow"
    put(path, data)
    for is_remote in (False, True):
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, DatasetError)
        assert re.search(message, str(found))


async def test_batches_outside_of_the_file_are_an_error(
    table: pa.Table, tmp_path: Path
) -> None:
    """A footer with offsets that lead nowhere."""
    path = tmp_path / "a.arrow"
    whole = contents(write(path, table))
    with pa.ipc.open_file(path) as reader:
        assert reader.num_record_batches == 3
    # The blocks: offset, length of metadata, padding, length of body.
    (at,) = [
        found.start()
        for found in re.finditer(
            rb"(?=(.{8})(.{4})\0{4}(.{8}).{24}.{24})", whole, re.DOTALL
        )
        if len(whole) - 300 < found.start() and _is_block(found.groups(), whole)
    ][:1]
    put(path, whole[:at] + struct.pack("<q", 1 << 40) + whole[at + 8 :])
    found = await outcome(path, Local())
    assert isinstance(found, DatasetError)
    assert "a message is outside the file's" in str(found)


def _is_block(fields: tuple[bytes, ...], whole: bytes) -> bool:
    offset, metadata, body = (int.from_bytes(field, "little") for field in fields)
    return offset >= 8 and metadata > 0 and offset + metadata + body < len(whole)


async def test_bytes_behind_a_stream_are_an_error(
    table: pa.Table, tmp_path: Path
) -> None:
    """Two streams in one file, say: not half of it is read in silence."""
    path = tmp_path / "a.arrows"
    whole = contents(write(path, table))
    put(path, whole + whole)
    for is_remote in (False, True):
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, DatasetError)
        assert f"ends at byte {len(whole):,} of {2 * len(whole):,}" in str(found)


@KINDS
async def test_text_that_is_none_costs_its_row_alone(kind: str, tmp_path: Path) -> None:
    """The rows beside it are read."""
    texts = pa.array([b"good", b"\xff\xfe", b"also"]).view(pa.string())
    path = write(tmp_path / f"a.{kind}", pa.table({"text": texts}))
    one, two, three = await read_all(ArrowFormat(path, Local()))
    assert (one, three) == ({"text": "good"}, {"text": "also"})
    assert isinstance(two, Bad)
    assert "row 1: " in str(two.error)


async def test_another_file_under_the_same_name(
    table: pa.Table, tmp_path: Path
) -> None:
    """With fewer batches, or a stream where there was a file."""
    path = write(tmp_path / "a.arrow", table)
    stream = contents(write(tmp_path / "a.arrows", table))
    with pytest.raises(DatasetError, match="has 3 record batches, of which 2 to 4 are"):
        await read_shard(ArrowFormat(path, Local()), (path, 2, 4))
    put(path, stream)
    with pytest.raises(DatasetError, match="was rewritten meanwhile"):
        await read_shard(ArrowFormat(path, Local()), (path, 0, 1))
    with pytest.raises(ObjectNotFoundError):
        await read_shard(ArrowFormat(path, Local()), (path + "2", 0, 1))


async def test_pickles(table: pa.Table, tmp_path: Path) -> None:
    """To be read in a worker."""
    path = write(tmp_path / "a.arrow", table)
    made = ArrowFormat(path, Local(), columns=["n"])
    await shards(made)
    copy = pickle.loads(pickle.dumps(made))
    assert await read_shard(copy, (path, 2, 3)) == [{"n": n} for n in range(40, 50)]
    assert repr(copy) == f"ArrowFormat({path!r})"
