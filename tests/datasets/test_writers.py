"""Written shards are whole, and are read by this package and by others."""

import asyncio
import gc
import json
import os
import resource
import shutil
import tarfile
import tracemalloc
from contextlib import nullcontext
from datetime import date, datetime
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore, S3Store

from aioloader.datasets import (
    ParquetDataset,
    ParquetWriter,
    TarDataset,
    TarWriter,
    TokenWriter,
    from_iterable,
    write_parquet,
)
from aioloader.datasets._write import sinks
from aioloader.errors import DatasetError, StateMismatchError
from datasets.killed_writing import LARGE_BYTES, LARGE_SAMPLES, SIGKILLED, run
from datasets.killed_writing import SAMPLES as KILLED_SAMPLES
from datasets.shards import pixels
from datasets.test_secrets import MARKER, everything_said

COUNT = 23
SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"cat/{number:04d}", "cls": number, "txt": f"ü{number}"}
    for number in range(COUNT)
]


async def write(
    destination: Any, *, until: int = COUNT, **options: Any
) -> tuple[int, list[str]]:
    """Write the samples to tars of six; return the first number, and the shards."""
    async with TarWriter(destination, shard_samples=6, **options) as writer:
        first = writer.next_sample
        for sample in SAMPLES[first:until]:
            await writer.write(sample)
    return first, writer.shards


async def labels(destination: Any) -> list[int]:
    stream = TarDataset("shard-*.tar", store=destination).decode()
    return [sample["cls"] async for sample in stream]


@pytest.mark.parametrize("kind", ["folder", "memory", "plain", "s3"])
async def test_written_shards_are_read_and_continued(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    s3_port: int,  # so that no test seems to leak the server
) -> None:
    destination: Any = {"folder": tmp_path / "new", "memory": MemoryStore()}.get(kind)
    if kind == "plain":  # it has no conditional writes
        destination = LocalStore(tmp_path)
    if kind == "s3":
        loop = request.node.callspec.id
        destination = request.getfixturevalue("s3") + f"-written-{loop}"
    first, shards = await write(destination, until=13)
    assert (first, shards) == (0, [f"shard-{n:06d}.tar" for n in range(3)])
    assert await labels(destination) == list(range(13))
    first, shards = await write(destination)
    assert (first, len(shards)) == (13, 5)
    assert await labels(destination) == list(range(COUNT))
    assert (await write(destination))[0] == COUNT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_written_shards(tmp_path: Path) -> None:
    picture, array = pixels(1, 3), np.arange(6).reshape(2, 3)
    sample = {"__key__": "a/b", "png": picture, "npy": array, "json": [1], "cls": 3}

    async def write_one() -> None:
        async with TarWriter(tmp_path) as writer:
            await writer.write(sample | {"pth": torch.ones(2), "x.txt": "grüße"})
            await writer.write({"bin": memoryview(b"1")})

    asyncio.run(write_one())
    data = wds.WebDataset(f"{tmp_path}/shard-000000.tar", shardshuffle=False)
    first, second = data.decode("rgb8")
    gc.collect()  # it leaves files open
    assert first["__key__"] == "a/b"
    assert np.array_equal(first["png"], picture)
    assert np.array_equal(first["npy"], array)
    assert (first["json"], first["cls"], first["x.txt"]) == ([1], 3, "grüße")
    assert torch.equal(first["pth"], torch.ones(2))
    assert (second["__key__"], second["bin"]) == ("000000001", b"1")


_PARTS = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=120)


@pytest.mark.slow
@given(
    st.lists(_PARTS, min_size=1, max_size=3).map("/".join),
    st.dictionaries(_PARTS, st.binary(max_size=600), max_size=3),
)
def test_any_sample_comes_back_or_is_refused(key: str, fields: dict[str, Any]) -> None:
    """No sample is written that would be read as another one."""
    store = MemoryStore()

    async def write_one() -> None:
        async with TarWriter(store) as writer:
            await writer.write({"__key__": key, **fields})

    async def read_all() -> list[Any]:
        return [sample async for sample in TarDataset("*.tar", store=store)]

    try:
        asyncio.run(write_one())
    except ValueError:
        return
    (sample,) = asyncio.run(read_all())
    expected = {name.lower(): data for name, data in fields.items() if name[:2] != "__"}
    assert sample == {"__key__": key, "__url__": sample["__url__"], **expected}


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"__key__": "a.b", "x": b""}, "cannot hold the key 'a.b' with 'x'"),
        ({"__key__": "/a", "x": b""}, "cannot hold the key '/a'"),
        ({"__key__": "__meta__/a", "x": b""}, "cannot hold the key '__meta__/a'"),
        ({"__key__": 17, "x": b""}, "cannot hold the key 17 of type int: .* '17'"),
        ({"__key__": "a", "../x": b""}, "cannot hold .* with '../x'"),
        ({"__key__": "a", "x\0": b""}, r"cannot hold the key 'a' with 'x\\x00'"),
        ({"__key__": "a"}, "sample 'a' has no members"),
        ({"__key__": "a", "JPG": b"", "jpg": b""}, "two members of the same .*JPG"),
        ({"__key__": "k", "x": b""}, "key 'k', like the one before"),
        ({"__key__": "a", "x": [1]}, "a list cannot be stored as 'x'"),
        ({"__key__": "a", "png": np.zeros(3)}, r"the shape \(3,\)"),
    ],
)
async def test_a_bad_sample_is_not_written(
    sample: dict[str, Any], words: str, tmp_path: Path
) -> None:
    async with TarWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="cannot hold the key ''"):  # like none
            await writer.write({"__key__": "", "x": b""})
        await writer.write({"__key__": "k", "cls": 0})
        with pytest.raises((TypeError, ValueError), match=words):
            await writer.write(sample)
        assert writer.next_sample == 1
        await writer.write({"cls": 1})
    assert await labels(tmp_path) == [0, 1]


async def test_only_whole_shards_appear(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with TarWriter(tmp_path, shard_samples=2) as writer:
            for _ in range(5):
                await writer.write({"bin": bytes(5 << 20)})
                whole = await asyncio.to_thread(members_of, tmp_path)
                assert all(count == 2 for count in whole)
            assert len(whole) == 2
            raise ZeroDivisionError
    left = await asyncio.to_thread(os.listdir, tmp_path)
    whole_ones = [f"shard-00000{n}.tar{end}" for n in (0, 1) for end in ("", ".idx")]
    assert sorted(left) == [*whole_ones, "shard-shards.json"]


def members_of(folder: Path) -> list[int]:
    counts = []
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            counts.append(len(tar.getnames()))
    return counts


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["folder", "memory"])
async def test_a_cancelled_writer_can_resume(kind: str, tmp_path: Path) -> None:
    for steps in range(0, 90, 6):
        destination: Any = tmp_path / f"{steps}" if kind == "folder" else MemoryStore()
        task = asyncio.create_task(write(destination))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await write(destination)
        assert await labels(destination) == list(range(COUNT))


@pytest.mark.parametrize("name", ["shards", "tokens.bin"])
async def test_a_full_disk_names_the_destination(name: str, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"shards": TarWriter, "tokens.bin": TokenWriter}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / name}'"):
            async with kinds[name](tmp_path / name, "int64") as writer:
                data = np.arange(10_000)
                await writer.write({"npy": data} if name == "shards" else data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_failed_writer_can_be_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    writer = TarWriter(folder, shard_samples=6)
    with pytest.raises(FileNotFoundError):
        async with writer:
            await asyncio.to_thread(shutil.rmtree, folder)
            for sample in SAMPLES:
                await writer.write(sample)
    with pytest.raises(RuntimeError, match=r"is not open: .*open another one"):
        await writer.write(SAMPLES[0])
    async with writer:  # as well as another one
        for sample in SAMPLES[writer.next_sample :]:
            await writer.write(sample)
    assert await labels(folder) == list(range(COUNT))


@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_aborted_uploads_leave_no_parts(how: str, s3: str, s3_port: int) -> None:
    """The store would charge for them. Also if cancelled while aborting."""

    async def begin(begun: asyncio.Event) -> None:
        async with TarWriter(f"{s3}-given-up") as writer:
            for _ in range(3):
                await writer.write({"bin": bytes(10 << 20)})
            begun.set()
            if how == "error":
                raise ZeroDivisionError
            await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.create_task(begin(begun))
    await begun.wait()
    task.cancel()  # while it aborts, after an error
    (error,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, ZeroDivisionError | asyncio.CancelledError)
    assert b"given-up" not in await asyncio.to_thread(uploads_of, s3_port)
    assert not await asyncio.to_thread(keys_of, "train/given-up", ".tar")


def uploads_of(port: int) -> bytes:
    with urlopen(f"http://127.0.0.1:{port}/bucket?uploads") as answer:
        body: bytes = answer.read()
    return body


def keys_of(prefix: str, ending: str) -> list[str]:
    store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
    keys = [meta["path"] for page in obstore.list(store, prefix) for meta in page]
    return [key for key in keys if key.endswith(ending)]


async def test_a_refusing_store_shows_no_secret(unused_port: int) -> None:
    url = f"http://user:{MARKER}@127.0.0.1:{unused_port}/x?sig={MARKER}"
    options = {"retry_config": {"max_retries": 0}}
    writer = TarWriter(url, store_options=options)
    assert f"127.0.0.1:{unused_port}/x" in repr(writer)
    with pytest.raises(DatasetError, match=r"cannot list 'http://127\.0\.") as raised:
        await writer.__aenter__()
    assert MARKER not in everything_said(raised.value) + repr(writer)


OTHER = '{"version": 9, "format": 0, "metadata": 0, "schema": 0, "shards": []}'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("000001.tar", None, "'shard-000001.tar' .* is gone"),
        ("000001.tar", "1", "has 1 bytes"),
        ("000009.tar", "", "does not name 'shard-000009.tar'"),
        ("shards.json", None, "'shard-000000.tar', which is"),
        ("shards.json", "{}", "not a writer's list of shards"),
        ("shards.json", OTHER, "of version 9"),
    ],
)
async def test_a_changed_destination_is_refused(
    name: str, text: str | None, words: str, tmp_path: Path
) -> None:
    await write(tmp_path)
    await asyncio.to_thread((tmp_path / f"shard-{name}").write_text, text or "")
    if text is None:
        await asyncio.to_thread((tmp_path / f"shard-{name}").unlink)
    with pytest.raises(StateMismatchError, match=words):
        await write(tmp_path)


async def test_other_metadata_or_formats_are_refused(tmp_path: Path) -> None:
    await write(tmp_path, until=8, metadata={"seed": 1})
    with pytest.raises(StateMismatchError, match="another metadata") as raised:
        await write(tmp_path, metadata={"seed": 2})
    assert (raised.value.expected, raised.value.found) == ({"seed": 1}, {"seed": 2})
    with pytest.raises(StateMismatchError, match="another format"):
        await write_parquet([], tmp_path, "shard", metadata={"seed": 1})
    await write(tmp_path, metadata={"seed": 1})
    assert await labels(tmp_path) == list(range(COUNT))


async def test_writers_share_a_folder_under_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one name is the beginning of the other."""
    async with TarWriter(tmp_path, "train-1") as earlier:
        await earlier.write({"bin": bytes(5 << 20)})  # begun, when the next is opened
        for name in ("train", "train-1-000000.tar"):
            async with TarWriter(tmp_path, name) as writer:
                await writer.write({"cls": 1})
        entries = [*os.scandir(tmp_path)]  # including a temporary file
    for name in ("train-1", "train"):
        async with TarWriter(tmp_path, name) as writer:
            assert writer.next_sample == 1
        monkeypatch.setattr("os.scandir", lambda _: nullcontext(entries))


@pytest.mark.one_loop
async def test_writing_takes_bounded_memory(tmp_path: Path) -> None:
    body = bytes(1 << 20)
    async with TarWriter(tmp_path) as writer:
        await writer.write({"bin": body})
        tracemalloc.start()
        try:
            for _ in range(60):
                await writer.write({"bin": body})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16 << 20


async def test_each_shard_has_its_index(tmp_path: Path) -> None:
    """64-bit offsets of the samples, and of the end of the last one."""
    async with TarWriter(tmp_path) as writer:
        for name in ("a", "b" * 200, "c"):  # the second has a long name
            await writer.write({"__key__": name, "bin": bytes(600), "x": b""})
    offsets = np.fromfile(tmp_path / "shard-000000.tar.idx", "<u8").tolist()
    size = (tmp_path / "shard-000000.tar").stat().st_size
    # Headers and bodies of 512 bytes: 4 a sample, and 2 more for each long name.
    assert offsets == [512 * n for n in (0, 4, 12, 16)]
    assert size == offsets[-1] + 1024


async def test_concurrent_writes_keep_their_order(tmp_path: Path) -> None:
    async with TarWriter(tmp_path, shard_samples=6) as writer:
        jobs = (
            writer.write({"cls": n, "json": [n] if n % 3 else n, "bin": bytes(1 << 18)})
            for n in range(COUNT)
        )
        await asyncio.gather(*jobs)
    assert await labels(tmp_path) == list(range(COUNT))


# -- two writers at one place ---------------------------------------------------------


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("kind", ["memory", "s3"])
async def test_one_of_two_racing_writers_wins(
    kind: str,
    before: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    s3_port: int,
) -> None:
    """Even if both have seen the same list of shards."""
    destination: Any = MemoryStore()
    if kind == "s3":
        loop = request.node.callspec.id
        destination = request.getfixturevalue("s3") + f"-meeting-{loop}"
    pair: list[Any] = [sinks.make_sink(destination, {}) for _ in range(2)]
    if before is not None:
        await pair[0].put("list.json", before)
    barrier, version = asyncio.Barrier(2), sinks.StoreSink._version
    is_one_over = asyncio.Event()

    async def both_have_seen(sink: Any, file: str) -> Any:
        seen = await version(sink, file)
        # One after another: the test's server compares and writes in two steps.
        if await barrier.wait():
            await is_one_over.wait()
        return seen

    async def swap(number: int) -> bool:
        done: bool = await pair[number].swap("list.json", before, b"%d" % number)
        is_one_over.set()
        return done

    with monkeypatch.context() as patched:
        patched.setattr(sinks.StoreSink, "_version", both_have_seen)
        done = await asyncio.gather(swap(0), swap(1))
    assert sum(done) == 1
    assert await pair[0].read("list.json") == b"%d" % done.index(True)
    for sink in pair:
        await sink.aclose()


async def test_a_second_writer_of_a_shard_is_refused(tmp_path: Path) -> None:
    first, second = (TarWriter(tmp_path, shard_bytes=size) for size in (3_000, 6_000))
    rows = [{"bin": bytes(512) + bytes([n])} for n in range(9)]
    async with first:
        await second.__aenter__()
        for writer in (first, second):
            await writer.write(rows[0])
            await writer._send()
        for row in rows[1:3]:
            await first.write(row)
        index = tmp_path / "shard-000000.tar.idx"
        before = await asyncio.to_thread(index.read_bytes)
        assert first.shards
        words = "another writer has written.*; run one writer at a time, or give each"
        with pytest.raises(StateMismatchError, match=words):
            for row in rows[1:]:
                await second.write(row)
        lost = "an error in 'write' closed .* the 4 samples .* resumes at sample 0"
        with pytest.raises(RuntimeError, match=lost):
            await second.__aexit__(None, None, None)
    stream = TarDataset(f"{tmp_path}/*.tar")
    bodies = [sample["bin"] async for sample in stream]
    assert bodies == [row["bin"] for row in rows[:3]]
    assert await asyncio.to_thread(index.read_bytes) == before
    assert not await asyncio.to_thread(lambda: [*tmp_path.glob(".*")])


# -- rows that are written to Parquet are read ----------------------------------------


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "text": f"ü{number}" if number % 3 else None,
            "data": bytes([number % 256]) * 40,
            "vector": torch.full((3,), float(number)),
        }
        for number in range(count)
    ]


async def test_written_parquet_is_read(tmp_path: Path) -> None:
    options: Any = {"shard_bytes": 9_000, "row_group_bytes": 2_000}
    shards = await write_parquet(rows(300), tmp_path, compression="none", **options)
    assert len(shards) > 2
    ids = [row["id"] async for row in ParquetDataset(f"{tmp_path}/part-*.parquet")]
    assert ids == list(range(300))
    tables = [pq.read_table(tmp_path / shard) for shard in shards]
    table = pa.concat_tables(tables)  # one schema
    assert table["text"].to_pylist()[:3] == [None, "ü1", "ü2"]
    assert table["vector"].to_pylist()[2] == [2.0, 2.0, 2.0]
    assert pq.ParquetFile(tmp_path / shards[0]).num_row_groups > 2


@pytest.mark.parametrize("kind", ["list", "generator", "async", "stream", "function"])
async def test_rows_may_come_from_any_iterable(kind: str, tmp_path: Path) -> None:
    every = [{"id": number} for number in range(20)]
    asked: list[int] = []

    async def stream() -> Any:
        for row in every:
            yield row

    def function(first: int) -> Any:
        asked.append(first)
        return every[first:]

    given: Any = {
        "list": every,
        "generator": (row for row in every),
        "async": stream(),
        "stream": from_iterable(every),
        "function": function,
    }
    await write_parquet(every[:7], tmp_path)
    await write_parquet(given[kind], tmp_path)
    stream_ = ParquetDataset(f"{tmp_path}/*.parquet")
    assert [row["id"] async for row in stream_] == list(range(20))
    assert asked == ([7] if kind == "function" else [])
    with pytest.raises(ValueError, match=r"20 rows are in .* has 15 fewer: write"):
        await write_parquet(every[:5], tmp_path)


DAY, NOON = date(2020, 1, 1), datetime(2020, 1, 1, 12)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (None, 1, 0.75),
        (None, 1, "z"),
        (None, np.arange(2), [0.5, 1]),
        (None, [[1]], [[0.5]]),
        (None, {"a": 1}, {"a": 2, "b": 3}),
        (None, np.float16(0.1), 0.1),
        (None, DAY, NOON),
        (pa.int32(), 1.0, Decimal("1.5")),
        (pa.float32(), 0.1, 1e300),
        (pa.list_(pa.float32()), np.array([0.1, np.nan]), np.array([1e300])),
        (pa.struct({"a": pa.float32()}), {"a": 0.1}, {"a": 1e300}),
        (pa.date32(), datetime(2020, 1, 1), NOON),
        (pa.timestamp("s"), NOON, NOON.replace(microsecond=5)),
        (pa.map_(pa.string(), pa.int32()), [("a", 1)], {"a": 1.5}),
        (pa.field("x", pa.int32(), nullable=False), 1, None),
    ],
)
async def test_values_that_would_change_are_refused(
    kind: Any, good: Any, bad: Any, tmp_path: Path
) -> None:
    """When their row group is full; other rows are written."""
    field = kind if isinstance(kind, pa.Field) else kind and pa.field("x", kind)
    options: Any = {"schema": field and pa.schema([field])}
    await write_parquet([{"x": good}], tmp_path, **options)
    words = r"^column 'x' cannot be written as .*: row 2: .*; pass a schema that"
    async with ParquetWriter(tmp_path, row_group_bytes=25, **options) as writer:
        with pytest.raises(ValueError, match=words):
            for value in (good, bad, good, good, good):
                await writer.write({"x": value})
        count = writer.next_sample
    tables = [pq.read_table(tmp_path / shard) for shard in writer.shards]
    assert [table.num_rows for table in tables] == [1, count - 1]


async def test_the_schema_cannot_change(tmp_path: Path) -> None:
    await write_parquet([{"a": 1, "b": "x"}], tmp_path)
    with pytest.raises(ValueError, match="row 1 has columns that the schema lacks: c"):
        await write_parquet([{}, {"c": 1}], tmp_path)
    with pytest.raises(StateMismatchError, match="another schema"):
        await write_parquet([], tmp_path, schema=pa.schema({"a": pa.int8()}))
    with pytest.raises(TypeError, match="row 1 must be a dict of columns, got int"):
        await write_parquet([{}, 3], tmp_path)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="column 'x' cannot be written as one type"):
        await write_parquet([{"x": 1}, {"x": b""}], tmp_path / "new")
    await write_parquet([{}, {"b": "y"}], tmp_path)
    table = pq.read_table(tmp_path / "part-000001.parquet")
    assert table.to_pylist() == [{"a": None, "b": "y"}]


async def test_rows_are_copied_when_written(tmp_path: Path) -> None:
    """Arrays keep their type in later row groups, too."""
    array, tensor, several = np.zeros((2, 2), np.float32), torch.tensor(0.0), [0]
    async with ParquetWriter(tmp_path, row_group_bytes=50) as writer:
        for number in range(3):
            array[:], several[0] = number, number
            inner = {"t": [tensor.fill_(number).reshape(1)], "l": (several,)}
            await writer.write({"a": array, "t": tensor, "l": several, "i": inner})
    table = pq.read_table(tmp_path / "part-000000.parquet")
    assert table.to_pylist() == [
        {"a": [[n, n]] * 2, "t": n, "l": [n], "i": {"t": [[n]], "l": [[n]]}}
        for n in (0.0, 1.0, 2.0)
    ]
    kinds = [str(table[name].type) for name in "at"]
    assert kinds == ["list<element: list<element: float>>", "float"]


async def test_an_error_keeps_the_rows_of_full_shards(tmp_path: Path) -> None:
    closed: list[str] = []

    async def failing() -> Any:
        try:
            for number in range(5):
                yield {"id": number}
            raise ZeroDivisionError
        finally:
            closed.append("closed")

    with pytest.raises(ZeroDivisionError):
        await write_parquet(failing(), tmp_path, shard_samples=2)
    assert closed == ["closed"]
    manifest = json.loads((tmp_path / "part-shards.json").read_text())
    assert [entry["samples"] for entry in manifest["shards"]] == [2, 2]
    async with ParquetWriter(tmp_path) as writer:
        assert writer.next_sample == 4


# -- writers that are killed before any operation, and run again ---------------------


def texts(kind: str, data: bytes) -> list[str]:
    if kind == "parquet":
        column: list[str] = pq.read_table(BytesIO(data))["txt"].to_pylist()
        return column
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        members: list[Any] = [
            tar.extractfile(member) for member in tar if member.name.endswith("txt")
        ]
        assert data.endswith(bytes(1024))
        return [member.read().decode() for member in members]


def seen(kind: str, folder: Path) -> list[str]:
    shards = sorted(folder.glob(f"*.{kind}"))
    return [text for shard in shards for text in texts(kind, shard.read_bytes())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        # Operations at the beginning, of one shard, and after the end.
        pytest.param([2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 24], id="some"),
        pytest.param(range(26), marks=pytest.mark.fuzz, id="all"),
    ],
)
def test_killed_writers_resume_exactly(tmp_path: Path, numbers: list[int]) -> None:
    """Readers see whole shards; the next process writes the rest, to the same bytes."""
    expected = [str(number) for number in range(KILLED_SAMPLES)]
    jobs = [
        (kind, str(tmp_path / f"{kind}-{number}"), number)
        for kind in ("tar", "parquet")
        for number in numbers
        if kind == "tar" or number % 4 == 0
    ]
    ended = run("kill", jobs)
    killed = [job for job, end in zip(jobs, ended, strict=True) if end == SIGKILLED]
    assert set(ended) == {SIGKILLED, 0}  # the last ones had no operation left
    counts = set()
    for kind, folder, _ in killed:
        texts = seen(kind, Path(folder))
        assert texts == expected[: len(texts)]
        counts.add(len(texts))
    assert counts == {0, 6, 12, 18}
    assert set(run("write", jobs)) == {0}
    files: dict[str, list[Any]] = {}
    for kind, folder, _ in jobs:
        assert seen(kind, Path(folder)) == expected
        content = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        files.setdefault(kind, []).append(content)
    assert all(content == every[0] for every in files.values() for content in every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [[7, 13], pytest.param([3, 5, 6, 7, 8, 10, 12, 13], marks=pytest.mark.fuzz)],
    ids=["some", "all"],
)
def test_uploads_of_killed_writers_are_not_seen(
    s3: str, s3_port: int, numbers: list[int]
) -> None:
    """A store shows no part of an upload; in the end, each sample is there once."""
    base = f"{s3}-killed-{len(numbers)}"
    jobs = [("tar", f"{base}-{number}", number) for number in numbers]
    assert set(run("kill", jobs)) == {SIGKILLED}
    store = S3Store("bucket", client_options={"allow_http": True})

    def shards() -> dict[str, list[str]]:
        content: dict[str, list[str]] = {job[1]: [] for job in jobs}
        keys = [meta["path"] for page in obstore.list(store) for meta in page]
        for key in sorted(keys):
            folder, _, file = f"s3://bucket/{key}".rpartition("/")
            if folder in content and file.endswith("tar"):
                data = bytes(obstore.get(store, key).bytes())
                content[folder] += texts("tar", data)
                assert len(data) > 2 * LARGE_BYTES
        return content

    counts = [len(content) for content in shards().values()]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)
    assert set(run("write", jobs)) == {0}
    expected = [str(number) for number in range(LARGE_SAMPLES)]
    assert all(content == expected for content in shards().values())
