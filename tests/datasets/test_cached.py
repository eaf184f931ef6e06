"""Streams through a local cache: read once from the store, and never something old."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from obstore.store import MemoryStore

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    ParquetDataset,
    TarDataset,
    TextDataset,
    from_iterable,
)
from aioloader.datasets._arrow import copies
from aioloader.errors import DatasetError
from beside import beside
from datasets.changing import ChangingServer
from datasets.shards import NAMES, bytes_of, name_of, names, read
from datasets.test_places import QUICK, big_shard, shards
from object_server import Faults, ObjectServer


def bodies(server: ObjectServer) -> int:
    """Return how many bytes were served, but for the looks at versions."""
    counts = server.counts()
    return counts.bytes - counts.requests


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
async def test_the_second_epoch_is_local(tmp_path: Path) -> None:
    with ObjectServer(shards(tmp_path)) as server:
        cache = tmp_path / "cache"

        def make() -> Any:
            return TarDataset("{0..7}.tar", store=server.url, cache=cache)

        assert await names(make()) == NAMES
        served = bodies(server)
        assert served > 8 * 1024
        assert await names(make().cache(cache)) == NAMES
        head, state = await read(make().shuffle(4), 9)
        rest = make().shuffle(4)
        rest.load_state_dict(state)
        assert sorted([*map(name_of, head), *(await names(rest))]) == sorted(NAMES)
        loader: Any = DataLoader(
            make(), 4, num_workers=2, fetch="workers", collate_fn=list
        )
        batches = await beside(lambda: list(loader))
        assert sorted(name_of(s) for b in batches for s in b) == sorted(NAMES)
        assert bodies(server) <= served + 8


async def test_a_changed_object_is_read_anew(tmp_path: Path) -> None:
    """Its version is part of what it is kept under."""
    with ObjectServer({"a.tar": big_shard(30, 800)}) as server:
        stream = TarDataset("a.tar", store=server.url).cache(tmp_path)
        assert len((await read(stream))[0]) == 30
        server.replace("a.tar", big_shard(20, 800))
        assert len((await read(stream))[0]) == 20


@pytest.mark.slow
async def test_big_objects_and_faults(tmp_path: Path) -> None:
    faults = Faults(errors=0.1, resets=0.1, truncated=0.1, seed=2)
    objects = {f"{at}.tar": big_shard(1200, 8000) for at in range(3)}
    with ObjectServer(objects, faults=faults) as server:
        stream = TarDataset(
            "{0..2}.tar", store=server.url, interleave=3, requests=QUICK
        ).cache(tmp_path)
        found, _ = await read(stream)
        served = bodies(server)
        again, _ = await read(stream)
        assert bodies(server) < served + 100
    assert [s["__key__"] for s in found] == [s["__key__"] for s in again]
    assert len(found) == 3600


@pytest.mark.slow
async def test_no_room_for_all(tmp_path: Path) -> None:
    with ObjectServer({f"{at}.tar": big_shard(700, 8000) for at in range(3)}) as server:
        stream = TarDataset("{0..2}.tar", store=server.url).cache(tmp_path, 6 << 20)
        for _ in range(2):
            assert len((await read(stream))[0]) == 2100
    assert kept_bytes(tmp_path) < 12 << 20


async def test_two_loops_at_once(tmp_path: Path) -> None:
    with ObjectServer(shards(tmp_path)) as server:
        stream = TarDataset("{0..7}.tar", store=server.url).cache(tmp_path / "cache")
        other = asyncio.to_thread(lambda: asyncio.run(names(stream)))
        found = await asyncio.gather(names(stream), other)
    assert list(found) == [NAMES, NAMES]


def test_what_has_no_shards_has_no_cache(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no shards that could be cached"):
        from_iterable([1]).map(abs).cache(tmp_path)


async def test_stores_in_memory_are_not_mixed_up(tmp_path: Path) -> None:
    """They all have the same name, and count their versions from zero."""
    for text in (b"one", b"two"):
        store = MemoryStore()
        store.put("a.txt", text)
        stream = TextDataset("a.txt", store=store, cache=tmp_path)
        assert (await read(stream))[0] == [text.decode()]


def table_bytes(rows: int, ending: str = "parquet") -> bytes:
    """Return a file of two parts and four columns."""
    columns = {name: np.random.default_rng(0).random(rows) for name in "abcd"}
    return bytes_of(pa.table(columns), ending, rows // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ending"), [(ParquetDataset, "parquet"), (ArrowDataset, "arrow")]
)
async def test_tables_through_a_cache(tmp_path: Path, make: Any, ending: str) -> None:
    """No more is read than without it, and in a warm epoch nothing is asked for."""
    with ObjectServer(
        {f"{at}.x": table_bytes(16_000, ending) for at in range(2)}
    ) as server:

        async def epoch(**options: Any) -> int:
            stream = make("{0..1}.x", store=server.url, columns=["b"], **options)
            assert len((await read(stream))[0]) == 32_000
            return server.counts().bytes

        plain = await epoch()
        cold = await epoch(cache=tmp_path) - plain
        requests = server.counts().requests
        assert cold <= plain
        await epoch(cache=tmp_path)
        await epoch(cache=tmp_path)
        assert server.counts().requests == requests


async def test_a_table_that_changes_behind_its_cache(tmp_path: Path) -> None:
    """What is not kept is not mixed with what is; then it is read anew."""
    with ObjectServer({"a.x": table_bytes(100)}) as server:
        options: Any = {"store": server.url, "cache": tmp_path}
        await read(ParquetDataset("a.x", columns=["a"], **options))
        server.replace("a.x", table_bytes(200))
        with pytest.raises(DatasetError, match="changed while being read"):
            await read(ParquetDataset("a.x", columns=["c"], **options))
        assert len((await read(ParquetDataset("a.x", **options)))[0]) == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tags": "date"}, "sends no ETag, so changes would not be noticed"),
        ({"has_ranges": False}, "has no ranges"),
    ],
)
@pytest.mark.parametrize("kind", [TextDataset, ParquetDataset])
async def test_what_cannot_be_kept(
    tmp_path: Path, options: Any, words: str, kind: Any
) -> None:
    body = b"a\n" * 9 if kind is TextDataset else table_bytes(9)
    with ChangingServer(body, **options) as server:
        stream = kind(["a", "b"], store=server.url, cache=tmp_path)
        with pytest.warns(RuntimeWarning, match=f"keeps nothing of .*{words}") as said:
            for _ in range(2):
                assert len((await read(stream))[0]) >= 16
    assert len(said) == 1


# -- tables on a server that gives files only whole -----------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_files_without_ranges(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows, each file asked for once; and nothing is left on disk."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made: Any = ParquetDataset if kind == "parquet" else ArrowDataset
    body = bytes_of(pa.table({"n": range(50)}), kind, 20)
    with ChangingServer(body, tags="date", has_ranges=False) as server:
        dataset = made(f"{server.url}/{{0..2}}.{kind}", interleave=2)
        rows, _ = await read(dataset)
        assert sorted(row["n"] for row in rows) == sorted([*range(50)] * 3)
        assert not any(temporary.iterdir())
        loader: Any = DataLoader(dataset, 10)
        batches = [batch async for batch in loader]
        assert sum(len(batch["n"]) for batch in batches) == 150
        # Two in vain, for ranges; and one for the whole file.
        assert server.requests <= 2 * 3 * 3
    assert not any(temporary.iterdir())


async def test_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MOST_BYTES", 0)
    monkeypatch.setattr(copies, "_LEAST_COPIES", 1)
    body = bytes_of(pa.table({"n": [7]}), "parquet")
    with ChangingServer(body, tags="date", has_ranges=False) as server:
        rows, _ = await read(ParquetDataset(f"{server.url}/{{0..3}}.parquet"))
        assert [row["n"] for row in rows] == [7] * 4
        assert server.requests >= 8
