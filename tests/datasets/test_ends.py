"""The ends of shards, by format or length, and the places where they can be cut."""

import asyncio
import functools
import json
import lzma
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from aioloader._cli.main import main
from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    Requests,
    TarDataset,
    TextDataset,
)
from aioloader.errors import DatasetError, StateMismatchError, TruncatedReadError
from datasets.changing import ALWAYS, ChangingServer, Sender
from datasets.shards import bytes_of, check_resumes, names
from datasets.shards import read as read_on
from datasets.tar_archives import ZEROS, Member, archive, member
from datasets.test_lines import PACKERS as PACKS
from object_server import ObjectServer

QUICK = Requests(timeout=5.0, deadline=1.0, base_delay=0.001, max_delay=0.01)


async def read(stream: Any) -> tuple[list[Any], Exception | None]:
    """Return the samples, and the error that ended them."""
    samples: list[Any] = []
    async with aiter(stream) as iterator:
        try:
            async for sample in iterator:
                samples.append(sample)  # noqa: PERF401  (they stay after an error)
        except Exception as error:  # noqa: BLE001  (it is looked at)
            return samples, error
    return samples, None


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
@pytest.mark.parametrize("missing_end", ["error", "warn"])
async def test_a_tar_needs_one_block_of_zeros_at_its_end(
    blocks: int, missing_end: Any, tmp_path: Path
) -> None:
    """Without it the last sample may lack members: an error or a warning."""
    data = member(b"a.x", b"1") + member(b"b.x", b"2") + bytes(512 * blocks)
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    stream = TarDataset(str(path), missing_end=missing_end)
    if blocks:
        samples, error = await read(stream)
        assert [sample["x"] for sample in samples] == [b"1", b"2"]
    elif missing_end == "warn":
        with pytest.warns(UserWarning, match=r"a\.tar' stops at byte 2,048"):
            samples, error = await read(stream)
        assert len(samples) == 2
    else:
        samples, error = await read(stream)
        assert len(samples) == 1
        assert isinstance(error, TruncatedReadError)
        assert (error.received, error.expected) == (2048, 3072)
        assert "sample 'b' at byte 1,024 is lost" in str(error)
        return
    assert error is None


async def test_resuming_at_a_missing_end_warns_again(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member(b"a.x", b"1") + member(b"b.x", b"2"))
    stream = TarDataset(str(path), missing_end="warn")
    with pytest.warns(UserWarning, match="without the zeros"):
        async with aiter(stream) as iterator:
            await anext(iterator), await anext(iterator)
            state = iterator.state_dict()
    stream.load_state_dict(state)
    with pytest.warns(UserWarning, match="without the zeros"):
        assert await read(stream) == ([], None)


async def test_only_the_last_part_of_a_truncated_tar_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(archive([Member(f"{i}.x", b"1") for i in range(6)]))
    await asyncio.to_thread(main, ["index", "-q", str(path)])
    stream = TarDataset(str(path))
    for data in (path.read_bytes(), path.read_bytes()[: 6 * 1024]):
        path.write_bytes(data)
        parts = [await read(stream.shard(rank, 3)) for rank in range(3)]
        is_cut = len(data) == 6 * 1024
        assert sum(len(samples) for samples, _ in parts) == 6 - is_cut
        errors = [type(error) for _, error in parts if error is not None]
        assert errors == [TruncatedReadError] * is_cut


@pytest.mark.slow
async def test_an_arrow_stream_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    """Also between messages, where the last bytes may look like the end mark."""
    data = bytes_of(pa.table({"a": [1, 2, -1, 0]}), "arrows", 2)
    path = tmp_path / "a.arrow"
    whole, _ = await read(ArrowDataset(written(path, data)))
    for end in range(len(data)):
        samples, error = await read(ArrowDataset(written(path, data[:end])))
        assert samples == whole[: len(samples)]
        assert isinstance(error, TruncatedReadError)
        assert error.location == str(path)
    path.write_bytes(data[:-8])
    with pytest.warns(UserWarning, match="has no mark at its end"):
        samples, error = await read(ArrowDataset(str(path), missing_end="warn"))
    assert (len(samples), error) == (4, None)


TEXT = b"".join(b"line %d %d\n" % (i, i**5) for i in range(200))
PACKED: dict[str, Any] = {
    "txt": TextDataset,
    "jsonl": JSONLinesDataset,
    "tar": TarDataset,
    "csv": functools.partial(CSVDataset, column_names=["a"]),
}
MAKES = {**PACKED, "arrow": ArrowDataset, "parquet": ParquetDataset}
# Arrow's CSV has no xz.
PAIRS = [(e, p) for e in PACKED for p in PACKS if (e, p) != ("csv", "xz")]


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS)
async def test_truncated_packed_lines_fail(pack: str, tmp_path: Path) -> None:
    """Lines before the cut are delivered; both frames must be complete."""
    data = PACKS[pack](TEXT[:999]) + PACKS[pack](TEXT[999:])
    for end in {*range(0, len(data), 29), *range(len(data) - 9, len(data))}:
        if end == len(PACKS[pack](TEXT[:999])):
            continue
        path = written(tmp_path / f"a.txt.{pack}", data[:end])
        lines, error = await read(TextDataset(path))
        assert isinstance(error, TruncatedReadError)
        assert lines == TEXT.decode().split("\n")[: len(lines)]
        if ("csv", pack) in PAIRS:
            path = written(tmp_path / f"a.csv.{pack}", data[:end])
            rows, error = await read(PACKED["csv"](path))
            assert isinstance(error, TruncatedReadError)
            assert [row["a"] for row in rows] == lines


def zstd_stream(data: bytes) -> bytes:
    """Compress with a window of 256 MB; a known length would reduce it."""
    made = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=made).compressobj()
    return packer.compress(data) + packer.flush()


def xz_dictionary(data: bytes) -> bytes:
    """Compress with a dictionary of 192 MB."""
    chain = [{"id": lzma.FILTER_LZMA2, "dict_size": 192 << 20}]
    return lzma.compress(data, filters=chain)


@pytest.mark.parametrize(
    ("pack", "name"), [(zstd_stream, "a.zst"), (xz_dictionary, "a.xz")]
)
async def test_much_memory_to_unpack_must_be_allowed(
    pack: Any, name: str, tmp_path: Path
) -> None:
    """The error names the bytes to allow; the file is not damaged."""
    path = written(tmp_path / name, PACKS[name[2:]](b"first\n") + pack(TEXT))
    samples, error = await read(TextDataset(path))
    assert samples == ["first"]
    words = r"needs up to 268,435,456 bytes of memory to unpack.*unpack_bytes=268435456"
    assert re.search(words, str(error))
    samples, error = await read(TextDataset(path, unpack_bytes=1 << 28))
    assert (len(samples), error) == (201, None)


async def test_csv_with_a_large_window_is_refused(tmp_path: Path) -> None:
    """Arrow has no option to allow more memory."""
    samples, error = await read(
        PACKED["csv"](written(tmp_path / "a.csv.zst", zstd_stream(TEXT)))
    )
    assert samples == []
    assert "pack it again with a smaller window" in str(error)


async def test_garbage_after_csv_lines_is_an_error(tmp_path: Path) -> None:
    data = b"a,b\n" + b"1,x\n" * 9 + b"\x1f\x8b\x08\x00junk"
    samples, error = await read(CSVDataset(written(tmp_path / "a.csv", data)))
    assert (samples, type(error)) == ([{"a": 1, "b": "x"}] * 9, DatasetError)
    assert "the line at byte 40" in str(error)


@pytest.mark.parametrize(("ending", "pack"), PAIRS)
async def test_a_compressed_file_of_no_bytes_is_truncated(
    ending: str, pack: str, tmp_path: Path
) -> None:
    """A compressed empty text has bytes, and is an empty shard."""
    path, make = tmp_path / f"a.{ending}.{pack}", PACKED[ending]
    samples, error = await read(make(written(path, b"")))
    assert (samples, type(error)) == ([], TruncatedReadError)
    data = PACKS[pack](ZEROS if ending == "tar" else b"")
    assert await read(make(written(path, data))) == ([], None)


@pytest.mark.parametrize("ending", ["tar", "arrow", "parquet", "txt"])
async def test_only_text_files_may_be_empty(ending: str, tmp_path: Path) -> None:
    samples, error = await read(MAKES[ending](written(tmp_path / f"a.{ending}", b"")))
    assert (samples, isinstance(error, TruncatedReadError)) == ([], ending != "txt")


def empty(to: Sender, _start: int, _stop: int) -> None:
    to.answer(416 if to.served.has_ranges else 200, b"")


@pytest.mark.slow
@pytest.mark.parametrize("has_ranges", [True, False], ids=["416", "200"])
@pytest.mark.parametrize("ending", ["txt", "tar", "parquet", "csv"])
async def test_empty_answers_are_verified(ending: str, *, has_ranges: bool) -> None:
    """A second request must confirm that there are no bytes."""
    options: Any = {"bad": empty, "when": ALWAYS, "has_ranges": has_ranges}
    with ChangingServer(TEXT, **options) as server:
        address = f"{server.url}/a.{ending}"
        samples, error = await read(MAKES[ending](address, requests=QUICK))
        needs_ranges = ending in {"parquet", "csv"} and not has_ranges
        is_truncated = isinstance(error, TruncatedReadError)
        assert (samples, is_truncated) == ([], not needs_ranges)
        assert ("must be read by ranges" in str(error)) == needs_ranges
        if ending == "txt":
            server.body = b""
            assert await read(TextDataset(address, requests=QUICK)) == ([], None)


async def test_an_empty_object_must_be_confirmed() -> None:
    options: Any = {"bad": empty, "when": ALWAYS, "has_ranges": False}
    with ChangingServer(TEXT, **options) as server:
        async with ObjectDataset(server.url, ["a.txt"], requests=QUICK) as objects:
            with pytest.raises(TruncatedReadError, match="gave 0 of 3,"):
                await objects[0]
            server.body = b""
            assert bytes(await objects[0]) == b""


# Some are empty, alone or side by side, and the last one of a shard too.
LINES = [f"line {i} {'x' * (i * 37 % 90)}" * (i % 9 < 7) for i in range(200)]
TAR = [Member(f"{i:03}.txt", b"%d" % i * (i % 700)) for i in range(60)]


def write(folder: Path) -> dict[str, Any]:
    """Write two shards of each kind; return their datasets and samples."""
    for shard in range(2):
        lines = LINES[shard * 100 : (shard + 1) * 100]
        (folder / f"{shard}.txt").write_text("\n".join(lines))
        rows = [json.dumps({"name": line}) + "\n" for line in lines]
        (folder / f"{shard}.jsonl").write_text("".join(rows))
        data = archive(TAR[shard * 30 : (shard + 1) * 30], "pax" if shard else "gnu")
        (folder / f"{shard}.tar").write_bytes(data)
        assert main(["index", "-q", str(folder / f"{shard}.tar")]) == 0
    return {
        "txt": (TextDataset, LINES),
        "jsonl": (JSONLinesDataset, LINES),
        "tar": (TarDataset, [member.body.decode() for member in TAR]),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("ending", ["", "\n"])
async def test_a_byte_order_mark_is_not_part_of_the_first_line(
    ending: str, readers: int, tmp_path: Path
) -> None:
    """Wherever a file is cut and resumed."""
    rows = [f'"{i}"' for i in range(9)]
    for shard, lines in enumerate((rows[:5], rows[5:], [])):
        text = "\ufeff" + "\n".join(lines) + ending * bool(lines)
        (tmp_path / str(shard)).write_text(text)
    for kind in (TextDataset, JSONLinesDataset):
        expected = rows if kind is TextDataset else [json.loads(row) for row in rows]
        stream: Any = kind(str(tmp_path / "?"))
        parts = [stream.shard(rank, readers) for rank in range(readers)]
        assert sum([(await read_on(part))[0] for part in parts], []) == expected  # noqa: RUF017
        await check_resumes(stream, expected, range(len(rows)))


KINDS = pytest.mark.parametrize("kind", ["txt", "jsonl", "tar"])


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("readers", [2, 3, 7])
async def test_ranks_share_the_samples_of_each_file(
    kind: str, readers: int, tmp_path: Path
) -> None:
    dataset, expected = (await asyncio.to_thread(write, tmp_path))[kind]
    objects = await asyncio.to_thread(contents, tmp_path)
    with ObjectServer(objects) as server:
        for root in (str(tmp_path), server.url):
            stream = dataset(f"{{0..1}}.{kind}", store=root)
            parts = [await names(stream.shard(r, readers)) for r in range(readers)]
            assert [name for part in parts for name in part] == expected
            assert all(parts)


@KINDS
async def test_parts_resume_after_any_sample(kind: str, tmp_path: Path) -> None:
    dataset, _ = (await asyncio.to_thread(write, tmp_path))[kind]
    stream = dataset(f"{tmp_path}/0.{kind}").shard(1, 3)
    whole, state = await read_on(stream)
    await check_resumes(stream, whole, range(len(whole) + 1))
    path = tmp_path / f"0.{kind}"
    if kind != "tar":
        path.write_bytes(path.read_bytes()[:-900])
        stream.load_state_dict(state)
        with pytest.raises(StateMismatchError):
            await names(stream)


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_a_tar_index_has_sample_starts_and_the_end(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Energon's has; a damaged tar gets no index."""
    members = [Member(f"{n}/{'d' * 90}/{n}.{x}", b"x") for n in (1, 2) for x in "ab"]
    path = tmp_path / "a.tar"
    path.write_bytes(archive(members, form))
    assert main(["index", "-q", str(path)]) == 0
    data = (tmp_path / "a.tar.idx").read_bytes()
    with tarfile.open(path) as tar:
        infos = tar.getmembers()
        end = infos[-1].offset_data + 512
    starts = (infos[0].offset, infos[2].offset, end)
    assert struct.unpack("<3Q", data) == starts
    assert len(list(tmp_path.iterdir())) == 2
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(archive(TAR)[:50_100])
    assert main(["index", str(damaged)]) == 1
    assert "ends within" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 3


async def test_errors_say_why_a_shard_cannot_be_cut(tmp_path: Path) -> None:
    await asyncio.to_thread(write, tmp_path)
    await asyncio.to_thread((tmp_path / "1.tar.idx").unlink)
    (tmp_path / "a.txt.gz").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"one line")
    for name, words in (
        ("1.tar", r"2 readers .*1\.tar' has no index, .*1\.tar\.idx'.* `aioloader in"),
        ("a.txt.gz", "is compressed: unpack or split it; or use fewer readers"),
        ("b.txt", "cut into 1 parts only, but there are 2 readers .* too few samples"),
    ):
        dataset: Any = TarDataset if "tar" in name else TextDataset
        with pytest.raises(ValueError, match=words):
            await names(dataset(f"{tmp_path}/{name}").shard(0, 2))
    for index in (struct.pack("<2Q", 0, 1 << 30), b""):
        (tmp_path / "0.tar.idx").write_bytes(index)
        with pytest.raises(DatasetError, match=r"is not the index of .*write it again"):
            await names(TarDataset(f"{tmp_path}/0.tar").shard(0, 2))
