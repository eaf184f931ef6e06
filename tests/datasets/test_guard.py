"""One guard for every format: a shard is read at one version, and resumed at it."""

import itertools
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
from obstore.store import MemoryStore

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    ParquetDataset,
    Requests,
    TarDataset,
    TextDataset,
)
from aioloader.datasets._engine import ByteFormat
from aioloader.errors import DatasetError, ShardChangedError, TruncatedReadError
from datasets.changing import ChangingServer
from datasets.shards import bytes_of, read
from datasets.test_places import big_shard

QUICK = Requests(timeout=5.0, deadline=2.0, base_delay=0.001, max_delay=0.01)
# Many rows, for files that are not all read ahead, and few.
LONG, ROWS = 100_000, 2000
SMALL: dict[str, Any] = {"max_bytes": 1 << 16}


def table(start: int, rows: int = ROWS) -> pa.Table:
    """Return numbers that all have as many digits."""
    return pa.table({"a": pa.array(range(10**6 + start, 10**6 + start + rows))})


def lines(start: int, rows: int = ROWS) -> bytes:
    return "".join(f"{10**6 + start + at}\n" for at in range(rows)).encode()


def parquet(start: int, rows: int = ROWS) -> bytes:
    """Return small row groups, packed to the same length."""
    plain: Any = {"compression": "none", "use_dictionary": False}
    length = min(5000, -(-rows // 2))
    return bytes_of(table(start, rows), "parquet", length, **plain)


def tar(start: int, rows: int = ROWS) -> bytes:
    """Return an archive of fewer samples, which do not depend on the start."""
    return big_shard(rows // 20, 400)


Format: TypeAlias = tuple[Callable[..., Any], Callable[..., bytes]]
FORMATS: dict[str, Format] = {
    "tar": (TarDataset, tar),
    "txt": (TextDataset, lines),
    "jsonl": (JSONLinesDataset, lines),
    "csv": (CSVDataset, lambda *args: b"a\n" + lines(*args)),
    "parquet": (ParquetDataset, parquet),
    "arrow": (ArrowDataset, lambda *args: bytes_of(table(*args), "arrow")),
    "arrows": (ArrowDataset, lambda *args: bytes_of(table(*args), "arrows")),
}
later = itertools.count(1)


def put(path: Path, data: bytes) -> None:
    """Write a file in place, at a time of its own whatever the clock's steps are."""
    path.write_bytes(data)
    os.utime(path, (10**9 + next(later),) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
async def test_a_file_that_is_replaced_between_its_shards(
    ending: str, tmp_path: Path
) -> None:
    """Its metadata was read when shards were listed; another file is not read by it."""
    make, body = FORMATS[ending]
    for name in "ab":
        put(tmp_path / f"{name}.{ending}", body(0, LONG))
    stream = make(str(tmp_path / f"*.{ending}"), **SMALL)
    async with aiter(stream) as iterator:
        await anext(iterator)
        put(tmp_path / "new", body(5, LONG))
        (tmp_path / "new").rename(tmp_path / f"b.{ending}")
        with pytest.raises(DatasetError, match=r"b.* changed while being read"):
            _ = [sample async for sample in iterator]


@pytest.mark.slow
@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("where", ["file", "strong", "weak", "date"])
async def test_a_replacement_of_the_same_size(
    ending: str, where: str, tmp_path: Path
) -> None:
    make, body = FORMATS[ending]
    path = tmp_path / f"a.{ending}"
    with ChangingServer(body(0), tags=where) as server:
        address = str(path) if where == "file" else f"{server.url}/a.{ending}"
        put(path, body(0))
        stream = make(address, requests=QUICK)
        first, state = await read(stream, 70)
        rest, _ = await read(stream, state=state)
        server.replace(body(0))
        put(path, body(0))
        words = {"file": "modification time", "strong": "ETag", "weak": "ETag or date"}
        says = rf"since the state .* as before, but another {words.get(where, '')}"
        with pytest.raises(ShardChangedError, match=says + r".*strict=False"):
            await read(stream, state=state)
        stream.load_state_dict(state, strict=False)
        again, _ = await read(stream)
        assert again == rest
        assert len(first) == 70


@pytest.mark.slow
@pytest.mark.parametrize("ending", FORMATS)
async def test_copies(ending: str, tmp_path: Path) -> None:
    """A copy elsewhere has another time and is the same; so is one that keeps it."""
    make, body = FORMATS[ending]
    path, other = tmp_path / "one" / f"a.{ending}", tmp_path / "two" / f"a.{ending}"
    for place in (path, other):
        place.parent.mkdir()
        put(place, body(0))
    _, state = await read(make(str(path)), 70)
    rest, _ = await read(make(str(path)), state=state)
    found, state = await read(make(str(other)), 7, state)
    assert [*map(str, found)] == [
        str(row).replace("/one/", "/two/") for row in rest[:7]
    ]
    facts = other.stat()
    other.unlink()
    put(other, body(0))
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    found, _ = await read(make(str(other)), state=state)
    assert len(found) == len(rest) - 7


async def test_the_state_is_small(tmp_path: Path) -> None:
    for name in "abcdefgh":
        put(tmp_path / f"{name}.txt", lines(0))
    stream = TextDataset(str(tmp_path / "*.txt"), interleave=2)
    _, state = await read(stream, 0)
    assert "stamp" not in str(state)
    _, state = await read(stream, 3)
    lanes = state["streams"]["0"]["state"]["lanes"]
    assert [len(lane["at"]["stamp"]) for lane in lanes] == [17, 17]


def test_a_loader_resumes_or_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    put(path, lines(0))
    loader: Any = DataLoader(TextDataset(str(path)), 10, num_workers=1)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()
    put(path, lines(0))
    loader.load_state_dict(state)
    with pytest.raises(ShardChangedError, match="strict=False"):
        list(loader)
    loader.load_state_dict(state, strict=False)
    assert len(list(loader)) == ROWS // 10 - 1
    put(path, lines(0, ROWS + 10))
    loader.load_state_dict(state, strict=False)
    with pytest.raises(ShardChangedError, match="had 16,000 bytes and has 16,080"):
        list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", lines(0, 10)], ids=["empty", "shorter"])
@pytest.mark.parametrize("make", [TextDataset, CSVDataset])
async def test_the_listed_size(make: Any, body: bytes) -> None:
    """An object that has fewer bytes than were listed was cut short, or replaced."""
    store = MemoryStore()
    await store.put_async("a.csv", lines(0, LONG))
    await store.put_async("b.csv", lines(0, 20))
    stream = make("*.csv", store=store, **SMALL)
    found: list[Any] = []
    async with aiter(stream) as iterator:
        found.append(await anext(iterator))
        await store.put_async("b.csv", body)
        kind = TruncatedReadError if make is TextDataset else DatasetError
        with pytest.raises(kind, match=r"b\.csv' changed while being read"):
            found += [sample async for sample in iterator]


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        (ROWS, DatasetError, ""),
        (1900, TruncatedReadError, ".* had 16,000 bytes and has 15,200"),
    ],
)
async def test_parts_of_a_shard_are_of_one_version(
    rows: int, kind: Any, words: str, tmp_path: Path
) -> None:
    """Where it was cut depends on what it was."""
    path = tmp_path / "a.txt"
    put(path, lines(0))
    async with AsyncExitStack() as stack:
        made_by = TextDataset(str(path)).made_by
        assert isinstance(made_by, ByteFormat)
        parts = await made_by.cut(await made_by.shards(stack), 3)
        put(path, lines(0, rows))
        reader = made_by.open(parts[1], {}, 1 << 20)
        with pytest.raises(kind, match="changed while being read" + words):
            await reader.pull(1)
        await reader.aclose()
