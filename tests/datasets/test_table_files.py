"""Parquet and Arrow files: all rows, from any row on; no damage is silent."""

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

from aioloader.datasets._arrow import ipc
from aioloader.datasets._arrow.csv import CSVFormat, Dialect
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.memory import MemoryFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.projection import Projection
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
    listed = await shards(form)
    form = pickle.loads(pickle.dumps(form))
    assert repr(form) == f"{type(form).__name__}({path!r})"
    reader = form.open(tuple(listed[0]), {"row": 18}, 1 << 20)
    block: Any = await reader.pull(2)
    assert block.collate() == {"text": ["18", "19"], "n": pytest.approx([18, 19])}
    assert reader.position() == {"row": 20}
    await reader.aclose()


@PLACES
@KINDS
async def test_columns_are_selected_and_nulls_replaced(
    kind: str, is_remote: bool, tmp_path: Path
) -> None:
    table = every_type().append_column("struct.a", pa.array(range(50)))
    path = write(tmp_path / f"a.{kind}", table)
    nulls = {"float64": -1, "text": "?", "category": "none"}
    names = ["struct", "category", "struct.a", "text", "float64"]
    form = made(path, is_remote=is_remote, columns=names, nulls=nulls)
    expected = table.select(names).to_pylist()
    for row in expected:
        row |= {name: value for name, value in nulls.items() if row[name] is None}
    rows = await read_all(form)
    assert plain(rows) == expected
    assert list(rows[0]) == names


@PLACES
@KINDS
async def test_reads_wide_tables(kind: str, is_remote: bool, tmp_path: Path) -> None:
    """The footer or the schema is larger than a request."""
    table = pa.table({f"column {i}": [i, i] for i in range(1000)})
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
async def test_missing_and_other_columns_are_errors(
    columns: Any, message: str, kind: str, tmp_path: Path
) -> None:
    paths = [write(tmp_path / f"{name}.{kind}", NUMBERED) for name in "ab"]
    form = made(paths)
    expected = await shards(form)
    write(Path(paths[1]), pa.table(columns))
    for listed in (made(paths), form):
        with pytest.raises(DatasetError, match=message) as caught:
            await shards(listed)
        assert caught.value.location == f"b.{kind}"
    with pytest.raises(DatasetError, match=message):
        await read_shard(pickle.loads(pickle.dumps(form)), expected[-1])


# -- damage ------------------------------------------------------------------------


@PLACES
@KINDS
async def test_cut_files_are_errors(kind: str, is_remote: bool, tmp_path: Path) -> None:
    whole = contents(write(tmp_path / f"a.{kind}", NUMBERED))
    path = tmp_path / f"cut.{kind}"
    for length in [*range(0, len(whole), 61), len(whole) - 1, len(whole) - 8]:
        put(path, whole[:length])
        error = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(error, TruncatedReadError)
        assert error.location == path.name
        assert kind != "parquet" or f"{length:,} bytes" in str(error)


@pytest.mark.slow
@PLACES
@KINDS
@pytest.mark.parametrize("version", ["1.0", "2.0"])
async def test_flipped_bits_are_errors_or_harmless(
    version: str, kind: str, is_remote: bool, tmp_path: Path
) -> None:
    """With Parquet's checksums no row is wrong; Arrow has none."""
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
        result = await outcome(path, Local(is_remote=is_remote), columns=columns)
        is_error = isinstance(result, DatasetError)
        errors += is_error
        assert kind != "parquet" or is_error or plain(result) == expected(table)
    assert errors > (30 if kind == "parquet" else 5)


@KINDS
async def test_invalid_text_fails_its_row_alone(kind: str, tmp_path: Path) -> None:
    texts = pa.array([b"good", b"\xff\xfe", None, b"also"]).view(pa.string())
    path = write(tmp_path / f"a.{kind}", pa.table({"n": range(4), "text": texts}))
    form = made(path, nulls={"text": "-"})
    good, bad, null, last = await read_all(form, limit=3)
    assert [row["text"] for row in (good, null, last)] == ["good", "-", "also"]
    assert re.search(r"'a\.\w+' cannot be read, row 1: .*Invalid UTF8", str(bad.error))
    (shard,) = await shards(form)
    rows = await read_shard(form, shard, row=1)
    assert "Invalid UTF8" in str(rows[0].error)
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
async def test_files_of_other_formats_are_refused(
    kind: str, is_remote: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{kind}"
    for data, message in FOREIGN[kind]:
        put(path, data)
        error = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(error, DatasetError)
        assert re.search(message, str(error))


# -- Arrow files -------------------------------------------------------------------

IPC = pytest.mark.parametrize("kind", ["arrow", "arrows"])


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_SHARD_BYTES", 1)


@PLACES
@pytest.mark.parametrize("codec", ["zstd", "lz4", "uncompressed"])
async def test_feather_files_are_read(
    is_remote: bool, codec: str, tmp_path: Path, small_shards: None
) -> None:
    path, table = str(tmp_path / "a.feather"), every_type()
    feather.write_feather(table, path, codec, chunksize=20)
    names = ["category", "text", "int8"]
    made = ArrowFormat(path, Local(is_remote=is_remote), columns=names)
    assert len(await shards(made)) == 3
    assert plain(await read_all(made)) == expected(table.select(names))


@KINDS
async def test_files_without_rows_are_read(kind: str, tmp_path: Path) -> None:
    """Without row groups or record batches, or with one that has no rows."""
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
        listed = [shard[0] for shard in await shards(form)]
        assert kind != "parquet" or paths[0] not in listed


async def test_only_wanted_batches_are_requested(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((8, 100_000))
    table = pa.table({"x": values.ravel()})
    path = write(tmp_path / "a.arrow", table, rows=100_000)
    local = Local(is_remote=True)
    made = ArrowFormat(path, local)
    listed = await shards(made)
    assert listed == [[path, 0, 5], [path, 5, 8]]
    assert len(await read_shard(made, listed[1], limit=1 << 20)) == 300_000
    requested = sum(stop - start for start, stop in local.spans)
    assert 2_400_000 < requested < 2_500_000


# -- damage ------------------------------------------------------------------------


@IPC
async def test_damage_names_batches_and_row(
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
async def test_misplaced_messages_are_errors(is_remote: bool, tmp_path: Path) -> None:
    """Batches outside of a file, bytes after a stream."""
    whole = contents(write(tmp_path / "a.arrow", NUMBERED))
    (schema,) = struct.unpack_from("<i", whole, 12)
    place = whole.rindex(struct.pack("<q", 16 + schema))  # where the first batch is
    outside = whole[:place] + struct.pack("<q", 1 << 40) + whole[place + 8 :]
    stream = contents(write(tmp_path / "a.arrows", NUMBERED))
    after = f"ends at byte {len(stream):,} of {2 * len(stream):,}"
    for path, data, words in (
        (tmp_path / "a.arrow", outside, "a message is outside the file's"),
        (tmp_path / "a.arrows", stream + stream, after),
    ):
        put(path, data)
        error = await outcome(path, Local(is_remote=is_remote))
        assert isinstance(error, DatasetError)
        assert words in str(error)


async def test_a_rewritten_file_is_an_error(tmp_path: Path) -> None:
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
async def test_cuts_keep_every_row(make: Any, filters: Any, tmp_path: Path) -> None:
    made = make(tmp_path, filters=filters)
    listed = await shards(made)
    stop = 50 if filters is None else 33
    for count in range(len(listed) + 1, 60, 7):
        cuts = await made.cut(listed, count)
        assert len(cuts) == count
        parts = [await read_shard(made, shard) for shard in cuts]
        assert [row["n"] for part in parts for row in part] == [*range(stop)]
        assert max(map(len, parts)) <= 2 * 50 / len(listed)
    cut = cuts[0]
    whole = await read_shard(made, cut)
    for row in range(len(whole) + 1):
        assert await read_shard(made, cut, row=row) == whole[row:]


async def test_streams_and_packed_files_are_not_cut(tmp_path: Path) -> None:
    stream = ArrowFormat(write(tmp_path / "a.arrows", NUMBERED), Local())
    with pytest.raises(ValueError, match=r"'a\.arrows' is a stream.*as an Arrow file"):
        await stream.cut(await shards(stream), 2)
    put(tmp_path / "a.csv.gz", gzip.compress(b"n\n1\n2\n"))
    packed = CSVFormat(str(tmp_path / "a.csv.gz"), Local(), dialect=Dialect())
    words = r"'a\.csv\.gz' is compressed, or .*more files"
    with pytest.raises(ValueError, match=words):
        await packed.cut(await shards(packed), 2)
