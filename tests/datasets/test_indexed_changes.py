"""A shard that changed unnoticed by its index is an error, never other samples."""

import asyncio
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioloader import DataLoader
from aioloader._cli.main import main
from aioloader.datasets import (
    ArrowDataset,
    IndexedDataset,
    MDSDataset,
    TarDataset,
    TextDataset,
)
from aioloader.errors import DatasetError, ShardChangedError, TruncatedReadError
from datasets.tar_archives import member
from object_server import ObjectServer

# As long as each other, and one index fits both.
OLD, NEW = b"red\ngreen\nblue\n", b"redgreen-blue.\n"
INDEX = struct.pack("<4Q", 0, 4, 10, 15)


def put(folder: Path, **files: bytes) -> str:
    """Write files, whose names are given without .txt; return a pattern for texts."""
    for name, data in files.items():
        path = folder / (name.replace("_", ".txt."))
        path = path if "_" in name else path.with_suffix(".txt")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (len(data), 1 if data == NEW else 2))
    return f"{folder}/*.txt"


def every(*args: Any, **options: Any) -> list[Any]:
    async def read() -> list[Any]:
        dataset = await IndexedDataset.discover(*args, **options)
        return [await dataset[index] for index in range(len(dataset))]

    return asyncio.run(read())


def test_an_epoch_compares_shards_with_the_first_epochs() -> None:
    """Though each epoch has an event loop of its own."""
    with ObjectServer({"0.txt": OLD, "0.txt.idx": INDEX}) as server:
        loader = DataLoader(IndexedDataset(TextDataset(f"{server.url}/0.txt")), 3)
        assert [*loader] == [["red", "green", "blue"]]
        server.replace("0.txt", NEW)
        with pytest.raises(ShardChangedError, match="another ETag or date"):
            list(loader)


def test_later_epochs_compare_local_shards_with_the_version_first_seen(
    tmp_path: Path,
) -> None:
    loader = DataLoader(IndexedDataset(TextDataset(put(tmp_path, a=OLD)), scan=True), 3)
    other = DataLoader(
        IndexedDataset(TextDataset(put(tmp_path, a=OLD, a_idx=INDEX))), 3
    )
    assert [*loader] == [*other] == [["red", "green", "blue"]]
    put(tmp_path, a=NEW)
    for changed in (loader, other):
        with pytest.raises(ShardChangedError, match="another ETag or date"):
            list(changed)


def test_a_scanned_shard_keeps_its_version_beside_an_indexed_one(
    tmp_path: Path,
) -> None:
    stream = TextDataset(put(tmp_path, a=OLD, a_idx=INDEX, b=OLD))
    dataset = IndexedDataset(stream, scan=True)
    put(tmp_path, b=NEW)
    with pytest.raises(ShardChangedError, match=r"b\.txt' has changed"):
        asyncio.run(dataset[5])
    with pytest.raises(ShardChangedError, match=r"b\.txt' has changed"):
        asyncio.run(dataset.save(tmp_path / "pack"))


def test_a_shard_that_was_empty_is_compared_when_the_dataset_is_made(
    tmp_path: Path,
) -> None:
    stream, pack = TextDataset(put(tmp_path, a=OLD, b=b"")), str(tmp_path / "pack")
    assert main(["index", "-q", f"{tmp_path}/*.txt"]) == 0
    asyncio.run(IndexedDataset(stream).save(pack))
    assert every(stream) == every(stream, pack=pack) == ["red", "green", "blue"]
    put(tmp_path, b=NEW)
    for options, change in (({}, "it had no samples, and has 1"), ({"pack": pack}, "")):
        with pytest.raises(ShardChangedError, match=rf"b\.txt' has changed.*{change}"):
            every(stream, **options)


def test_the_command_indexes_a_shard_that_was_moved_to_its_name(tmp_path: Path) -> None:
    """Though the new shard is older than the index of the old one."""
    stream, pack = TextDataset(put(tmp_path, a=OLD)), str(tmp_path / "pack")
    assert main(["index", "-q", f"{tmp_path}/*.txt"]) == 0
    put(tmp_path, a=NEW)
    assert main(["index", "-q", f"{tmp_path}/*.txt", "--pack", pack]) == 0
    assert every(stream, pack=pack) == ["redgreen-blue."]


def test_one_pack_serves_two_folders_but_not_two_queries(tmp_path: Path) -> None:
    streams = [TextDataset(put(tmp_path / name, a=OLD)) for name in ("train", "val")]
    both = TextDataset(f"{tmp_path}/*/*.txt")
    asyncio.run(IndexedDataset(both, scan=True).save(tmp_path / "pack"))
    for stream in streams:
        assert every(stream, pack=tmp_path / "pack") == ["red", "green", "blue"]
    with ObjectServer({"a": OLD}) as server:
        twice = TextDataset([f"{server.url}/a?id={number}" for number in range(2)])
        dataset = IndexedDataset(twice, scan=True)
        with pytest.raises(ValueError, match="two of the shards have the same name"):
            asyncio.run(dataset.save(tmp_path / "pack"))


@pytest.mark.parametrize("has_pack", [False, True])
def test_a_tar_that_ends_after_a_member_is_refused(
    has_pack: bool, tmp_path: Path
) -> None:
    """As by the stream: its last sample may lack members; not if that only warns."""
    tar, pack = tmp_path / "a.tar", str(tmp_path / "pack")
    tar.write_bytes(member(b"a.x", b"1") + member(b"b.x", b"2"))
    options = {"pack": pack} if has_pack else {}
    with pytest.warns(UserWarning, match="without the zeros"):
        assert (
            main(["index", "-q", str(tar), *(f"--pack={pack}" for _ in options)]) == 0
        )
    assert len(every(TarDataset(str(tar), missing_end="warn"), **options)) == 2
    with pytest.raises(TruncatedReadError, match="without the zeros"):
        every(TarDataset(str(tar)), **options)


def test_an_mds_head_whose_offsets_fall_is_refused(tmp_path: Path) -> None:
    data = struct.pack("<5I2sI", 2, 16, 1 << 31, 22, 2, b"ab", 0)
    (tmp_path / "a.mds").write_bytes(data)
    entry = {"format": "mds", "version": 2, "zip_data": None, "samples": 2}
    entry |= {"column_names": ["b"], "column_encodings": ["bytes"]}
    entry |= {"column_sizes": [None], "raw_data": {"basename": "a.mds", "bytes": 26}}
    (tmp_path / "index.json").write_text(json.dumps({"shards": [entry]}))
    with pytest.raises(DatasetError, match=r"a\.mds' is damaged.*do not rise"):
        IndexedDataset(MDSDataset(str(tmp_path)))


@pytest.mark.parametrize("cut", [8, 100])
def test_an_arrow_stream_that_was_cut_short_is_refused(
    cut: int, tmp_path: Path
) -> None:
    table = pa.table({"x": range(9)})
    with pa.ipc.new_stream(data := io.BytesIO(), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    (tmp_path / "a.arrows").write_bytes(data.getvalue()[:-cut])
    with pytest.raises(DatasetError, match=r"a\.arrows' was cut short"):
        IndexedDataset(ArrowDataset(f"{tmp_path}/a.arrows"))


def test_an_arrow_file_without_batches_has_no_samples(tmp_path: Path) -> None:
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema({"x": pa.int64()})):
        pass
    assert len(IndexedDataset(ArrowDataset(f"{tmp_path}/a.arrow"))) == 0
