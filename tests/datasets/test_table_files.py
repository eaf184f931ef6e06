"""Parquet and Arrow files: all rows, from any on; no damage in silence."""

import gzip
import pickle
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import feather
from pyarrow import parquet as pq

from aioloader._base.blocks import FailedSample
from aioloader.datasets._arrow import ipc
from aioloader.datasets._arrow.csv import CSVFormat, Dialect
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.memory import MemoryFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.projection import Projection
from aioloader.datasets._arrow.rows import Rows
from aioloader.errors import DatasetError, ObjectNotFoundError, TruncatedReadError
from datasets.shards import put
from datasets.tables import (
    PLACES,
    Format,
    Local,
    contents,
    every_type,
    expected,
    flip,
    outcome,
    plain,
    read_all,
    read_shard,
    shards,
    write,
)

KINDS = pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows"])
NUMBERED = pa.table({"n": range(50), "text": [f"{n}" for n in range(50)]})


def made(path: Any, *, is_remote: bool = False, **options: Any) -> Format:
    first = path if isinstance(path, str) else path[0]
    kind = ParquetFormat if first.endswith(".parquet") else ArrowFormat
    return kind(path, Local(is_remote=is_remote), **options)


@pytest.mark.slow
@PLACES
@KINDS
@pytest.mark.parametrize("budget", [1, 1 << 16, 1 << 26])
async def test_reads_what_pyarrow_reads(
    kind: str, is_remote: bool, budget: int, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.{kind}", every_type())
    form = made(path, is_remote=is_remote)
    parts = {"parquet": [[0], [1], [2]], "arrow": [[0, 3]], "arrows": [[0, 0]]}
    assert await shards(form) == [[path, *part] for part in parts[kind]]
    for limit in (1, 7, 64):
        rows = await read_all(form, budget=budget, limit=limit)
        assert plain(rows) == expected(every_type())


@pytest.mark.slow
@PLACES
@KINDS
async def test_begins_at_every_row(kind: str, is_remote: bool, tmp_path: Path) -> None:
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
    table = every_type().append_column("struct.a", pa.array(range(50)))
    path = write(tmp_path / f"a.{kind}", table)
    nulls = {"float64": -1, "text": "?", "category": "none"}
    names = ["struct", "category", "struct.a", "text", "float64"]
    form = made(path, is_remote=is_remote, columns=names, nulls=nulls)
    expected = table.select(names).to_pylist()
    for row in expected:
        row |= {name: one for name, one in nulls.items() if row[name] is None}
    rows = await read_all(form)
    assert plain(rows) == expected
    assert list(rows[0]) == names


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
    whole = contents(write(tmp_path / f"a.{kind}", NUMBERED))
    path = tmp_path / f"cut.{kind}"
    for length in [*range(0, len(whole), 61), len(whole) - 1, len(whole) - 8]:
        put(path, whole[:length])
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, TruncatedReadError)
        assert found.location == path.name
        assert kind != "parquet" or f"{length:,} bytes" in str(found)


@pytest.mark.slow
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
    options: Any = {"data_page_version": version} if kind == "parquet" else {}
    whole = contents(write(path, table, **options))
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
    texts = pa.array([b"good", b"\xff\xfe", None, b"also"]).view(pa.string())
    path = write(tmp_path / f"a.{kind}", pa.table({"n": range(4), "text": texts}))
    form = made(path, nulls={"text": "-"})
    one, two, three, four = await read_all(form, limit=3)
    assert [row["text"] for row in (one, three, four)] == ["good", "-", "also"]
    assert isinstance(two, FailedSample)
    assert re.search(r"'a\.\w+' cannot be read, row 1: .*Invalid UTF8", str(two.error))
    (shard,) = await shards(form)
    rows = await read_shard(form, shard, row=1)
    assert isinstance(rows[0], FailedSample)
    assert [row["n"] for row in rows[1:]] == [2, 3]


@KINDS
async def test_a_failed_reader_fails_again(kind: str, tmp_path: Path) -> None:
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
        (b"\xff\xff\xff\xff\x08\0\0\0nonsense", "is no Arrow stream, or damaged: "),
        (b"ARROW1\0\0" + bytes(50), "starts as .* was cut short at 58 bytes"),
        (b"ARROW1\0\0" + b"\xff\0\0\0ARROW1", "footer has 255 bytes, .*18"),
        (b"ARROW1\0\0" + bytes(9) + b"\x09\0\0\0ARROW1", "footer that cannot be read"),
        (b"ARROW1", "footer has -1 bytes"),
    ],
}


@PLACES
@pytest.mark.parametrize("kind", FOREIGN)
async def test_others_are_errors(kind: str, is_remote: bool, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    for data, message in FOREIGN[kind]:
        put(path, data)
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, DatasetError)
        assert re.search(message, str(found))


# -- Arrow files -------------------------------------------------------------------

IPC = pytest.mark.parametrize("kind", ["arrow", "arrows"])


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_SHARD_BYTES", 1)


@PLACES
@pytest.mark.parametrize("codec", ["zstd", "lz4", "uncompressed"])
async def test_reads_feather(
    is_remote: bool, codec: str, tmp_path: Path, small_shards: None
) -> None:
    path, table = str(tmp_path / "a.feather"), every_type()
    feather.write_feather(table, path, codec, chunksize=20)
    names = ["category", "text", "int8"]
    made = ArrowFormat(path, Local(is_remote=is_remote), columns=names)
    assert len(await shards(made)) == 3
    assert plain(await read_all(made)) == expected(table.select(names))


@KINDS
async def test_nothing_in_it(kind: str, tmp_path: Path) -> None:
    """No row groups and no record batches, or one without rows."""
    make: Any = {"parquet": pq.ParquetWriter, "arrow": pa.ipc.new_file}
    make = make.get(kind, pa.ipc.new_stream)
    paths = [str(tmp_path / f"{name}.{kind}") for name in ("none", "empty", "some")]
    make(paths[0], NUMBERED.schema).close()
    with make(paths[1], NUMBERED.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], NUMBERED.schema))
    write(Path(paths[2]), NUMBERED)
    for is_remote in (False, True):
        form = made(paths, is_remote=is_remote)
        assert [row["n"] for row in await read_all(form)] == [*range(50)]
        found = [shard[0] for shard in await shards(form)]
        assert kind != "parquet" or paths[0] not in found


async def test_only_wanted_batches_are_requested(tmp_path: Path) -> None:
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


@IPC
async def test_damage_names_its_place(
    kind: str, tmp_path: Path, small_shards: None
) -> None:
    path = write(tmp_path / f"a.{kind}", NUMBERED)
    whole = contents(path)
    offsets = struct.pack("<20i", *range(0, 40, 2))  # of the texts "20" to "39"
    put(path, whole.replace(offsets, offsets[:-4] + struct.pack("<i", 1 << 30)))
    made = ArrowFormat(path, Local())
    where = "record batches 1 to 1 of " if kind == "arrow" else ""
    row = 0 if kind == "arrow" else 20
    words = rf"{where}'a.arrows?' cannot.* row {row} on"
    with pytest.raises(DatasetError, match=words):
        await read_all(made)


@PLACES
async def test_messages_that_do_not_fit(is_remote: bool, tmp_path: Path) -> None:
    """Batches outside of a file, bytes after a stream."""
    whole = contents(write(tmp_path / "a.arrow", NUMBERED))
    (schema,) = struct.unpack_from("<i", whole, 12)
    at = whole.rindex(struct.pack("<q", 16 + schema))  # where the first batch is
    outside = whole[:at] + struct.pack("<q", 1 << 40) + whole[at + 8 :]
    stream = contents(write(tmp_path / "a.arrows", NUMBERED))
    after = f"ends at byte {len(stream):,} of {2 * len(stream):,}"
    for path, data, words in (
        (tmp_path / "a.arrow", outside, "a message is outside the file's"),
        (tmp_path / "a.arrows", stream + stream, after),
    ):
        put(path, data)
        found = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(found, DatasetError)
        assert words in str(found)


async def test_another_file_under_the_same_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", NUMBERED)
    stream = contents(write(tmp_path / "a.arrows", NUMBERED))
    with pytest.raises(DatasetError, match="has 3 record batches, of which 2 to 4 are"):
        await read_shard(ArrowFormat(path, Local()), (path, 2, 4))
    put(path, stream)
    with pytest.raises(DatasetError, match="was rewritten; start again"):
        await read_shard(ArrowFormat(path, Local()), (path, 0, 1))
    with pytest.raises(ObjectNotFoundError):
        await read_shard(ArrowFormat(path, Local()), (path + "2", 0, 1))


# -- fewer shards than readers ------------------------------------------------------


def parquet(folder: Path, **options: Any) -> Any:
    path = write(folder / "a.parquet", NUMBERED)
    return ParquetFormat(path, Local(is_remote=True), **options)


def arrow(folder: Path, **options: Any) -> Any:
    return ArrowFormat(write(folder / "a.arrow", NUMBERED, 8), Local(), **options)


def lines(folder: Path, **options: Any) -> Any:
    text = "n,text\n" + "".join(f"{n},{n}\n" for n in range(50))
    put(folder / "a.csv", text.encode())
    return CSVFormat(str(folder / "a.csv"), Local(), dialect=Dialect(), **options)


def memory(_folder: Path, **options: Any) -> Any:
    return MemoryFormat(NUMBERED, Projection(**options))


EVERY = pytest.mark.parametrize("make", [parquet, arrow, lines, memory])


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("filters", [None, pc.field("n") < 33], ids=["all", "some"])
async def test_all_rows_once_in_order(make: Any, filters: Any, tmp_path: Path) -> None:
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


async def test_what_cannot_be_cut(tmp_path: Path) -> None:
    stream = ArrowFormat(write(tmp_path / "a.arrows", NUMBERED), Local())
    with pytest.raises(ValueError, match=r"'a\.arrows' is a stream.*as an Arrow file"):
        await stream.cut(await shards(stream), 2)
    put(tmp_path / "a.csv.gz", gzip.compress(b"n\n1\n2\n"))
    packed = CSVFormat(str(tmp_path / "a.csv.gz"), Local(), dialect=Dialect())
    words = r"'a\.csv\.gz' is compressed, or .*more files"
    with pytest.raises(ValueError, match=words):
        await packed.cut(await shards(packed), 2)
