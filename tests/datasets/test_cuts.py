"""Fewer shards than readers: lines are cut by ranges, tar by an index."""

import asyncio
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import JSONLinesDataset, TarDataset, TextDataset
from aioloader.datasets._cuts import cut_shards
from aioloader.datasets._stores.places import Places
from aioloader.datasets._stores.requests import Requests
from aioloader.datasets._stores.versions import Version
from aioloader.datasets.tar import write_index
from aioloader.errors import DatasetError, StateMismatchError
from datasets.shards import check_resumes, names, read
from datasets.tar_archives import Member, archive
from object_server import ObjectServer

# Some are empty, alone or side by side, and the last one of a shard too.
LINES = [f"line {at} {'x' * (at * 37 % 90)}" * (at % 9 < 7) for at in range(200)]
TAR = [Member(f"{at:03}.txt", b"%d" % at * (at % 700)) for at in range(60)]


def write(folder: Path) -> dict[str, Any]:
    """Write two shards of each kind; return what reads them, and their samples."""
    for shard in range(2):
        lines = LINES[shard * 100 : (shard + 1) * 100]
        (folder / f"{shard}.txt").write_text("\n".join(lines))
        rows = [json.dumps({"name": line}) + "\n" for line in lines]
        (folder / f"{shard}.jsonl").write_text("".join(rows))
        data = archive(TAR[shard * 30 : (shard + 1) * 30], "pax" if shard else "gnu")
        (folder / f"{shard}.tar").write_bytes(data)
        assert write_index(folder / f"{shard}.tar") == 30
    return {
        "txt": (TextDataset, LINES),
        "jsonl": (JSONLinesDataset, LINES),
        "tar": (TarDataset, [member.body.decode() for member in TAR]),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("ending", ["", "\n"])
async def test_a_byte_order_mark(ending: str, readers: int, tmp_path: Path) -> None:
    """It is no part of the first line, wherever a file is cut and resumed."""
    rows = [f'"{at}"' for at in range(9)]
    for shard, lines in enumerate((rows[:5], rows[5:], [])):
        text = "\ufeff" + "\n".join(lines) + ending * bool(lines)
        (tmp_path / str(shard)).write_text(text)
    for kind in (TextDataset, JSONLinesDataset):
        expected = rows if kind is TextDataset else [json.loads(row) for row in rows]
        stream: Any = kind(str(tmp_path / "?"))
        parts = [stream.shard(rank, readers) for rank in range(readers)]
        assert sum([(await read(one))[0] for one in parts], []) == expected  # noqa: RUF017
        await check_resumes(stream, expected, range(len(rows)))


KINDS = pytest.mark.parametrize("kind", ["txt", "jsonl", "tar"])


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("readers", [2, 3, 7])
async def test_ranks_share_what_is_cut(kind: str, readers: int, tmp_path: Path) -> None:
    dataset, expected = (await asyncio.to_thread(write, tmp_path))[kind]
    objects = await asyncio.to_thread(contents, tmp_path)
    with ObjectServer(objects) as server:
        for root in (str(tmp_path), server.url):
            stream = dataset(f"{{0..1}}.{kind}", store=root)
            parts = [await names(stream.shard(at, readers)) for at in range(readers)]
            assert [name for part in parts for name in part] == expected
            assert all(parts)


@KINDS
async def test_a_state_at_any_sample_of_a_part(kind: str, tmp_path: Path) -> None:
    dataset, _ = (await asyncio.to_thread(write, tmp_path))[kind]
    stream = dataset(f"{tmp_path}/0.{kind}").shard(1, 3)
    whole, state = await read(stream)
    await check_resumes(stream, whole, range(len(whole) + 1))
    path = tmp_path / f"0.{kind}"
    if kind != "tar":
        path.write_bytes(path.read_bytes()[:-900])
        stream.load_state_dict(state)
        with pytest.raises(StateMismatchError):
            await names(stream)


async def test_sizes_and_cuts_are_asked_together() -> None:
    """Not shard by shard: each answer of a distant store takes long."""
    places, shards = Places(None, {}, Requests()), ["a", "b", "c"]
    sizes, cuts = asyncio.Barrier(3), asyncio.Barrier(3)

    async def version(address: Any) -> Version:
        await sizes.wait()
        return Version(10)

    async def halves(*_: Any, **__: Any) -> list[int]:
        await cuts.wait()
        return [5]

    places.version = version  # type: ignore[method-assign]
    parts = await asyncio.wait_for(cut_shards(places, shards, 6, halves), 10)
    assert [(part.address, part.start, part.stop) for part in parts] == [
        (shard, start, start + 5) for shard in shards for start in (0, 5)
    ]


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_an_index_names_the_first_headers(form: str, tmp_path: Path) -> None:
    """Of each sample, and at last the end: as Energon's does."""
    members = [Member(f"{at}/{'d' * 90}/{at}.{x}", b"x") for at in (1, 2) for x in "ab"]
    path = tmp_path / "a.tar"
    path.write_bytes(archive(members, form))
    assert write_index(path) == 2
    data = (tmp_path / "a.tar.idx").read_bytes()
    with tarfile.open(path) as tar:
        found = tar.getmembers()
        end = found[-1].offset_data + 512
    starts = (found[0].offset, found[2].offset, end)
    assert struct.unpack("<3Q", data) == starts
    assert len(list(tmp_path.iterdir())) == 2


def test_no_index_of_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(archive(TAR)[:50_100])
    with pytest.raises(DatasetError, match="ends within"):
        write_index(path)
    assert [one.name for one in tmp_path.iterdir()] == ["a.tar"]


async def test_what_cannot_be_cut_says_what_to_do(tmp_path: Path) -> None:
    await asyncio.to_thread(write, tmp_path)
    await asyncio.to_thread((tmp_path / "1.tar.idx").unlink)
    (tmp_path / "a.txt.gz").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"one line")
    for name, words in (
        (
            "1.tar",
            r"2 readers .*1\.tar' has no index, .*1\.tar\.idx'.* `aioloader index",
        ),
        ("a.txt.gz", "is compressed: unpack or split it; or use fewer readers"),
        ("b.txt", "cut into 1 parts only, but there are 2 readers .* too few samples"),
    ):
        dataset: Any = TarDataset if "tar" in name else TextDataset
        with pytest.raises(ValueError, match=words):
            await names(dataset(f"{tmp_path}/{name}").shard(0, 2))
    (tmp_path / "0.tar.idx").write_bytes(struct.pack("<2Q", 0, 1 << 30))
    with pytest.raises(DatasetError, match=r"is not the index of .*write it again"):
        await names(TarDataset(f"{tmp_path}/0.tar").shard(0, 2))
