"""Arrow IPC: what pyarrow itself reads, from any row on, and no crash on damage."""

import re
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from aioloader.datasets._arrow import ipc
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.errors import DatasetError, ObjectNotFoundError
from datasets.tables import (
    Local,
    contents,
    every_type,
    expected,
    outcome,
    plain,
    put,
    read_all,
    read_shard,
    shards,
)
from datasets.tables import (
    write_arrow as write,
)

PLACES = pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])
KINDS = pytest.mark.parametrize("kind", ["arrow", "arrows"])


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
