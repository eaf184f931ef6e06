"""Shards in stores, through faults, dead servers and a cache."""

import asyncio
import gzip
import math
import ssl
import struct
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import own_format
import pyarrow as pa
import pytest
import trustme
from obstore.store import MemoryStore

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    ByteStream,
    CSVDataset,
    ParquetDataset,
    Requests,
    TarDataset,
    TextDataset,
)
from aioloader.datasets._stores import bytes as stored_bytes
from aioloader.errors import DatasetError, ObjectNotFoundError
from beside import beside
from datasets.changing import ChangingServer
from datasets.shards import NAMES, bytes_of, name_of, names, read, write_tar
from datasets.tar_archives import Member, archive
from object_server import Faults, ObjectServer

# obstore's own retries off, so that those of the dataset are seen.
AT_ONCE: dict[str, Any] = {"store_options": {"retry_config": {"max_retries": 0}}}
QUICK = Requests(timeout=0.5, deadline=20, base_delay=0.001)


def shards(folder: Path) -> dict[str, bytes]:
    write_tar(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def big_shard(samples: int, size: int) -> bytes:
    """Return a tar of samples of ``size`` bytes, each filled with its number."""
    return archive(
        Member(f"{number:06}.bin", number.to_bytes(8, "little") * (size // 8))
        for number in range(samples)
    )


async def test_https_certificates_are_checked(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ObjectServer(shards(tmp_path), ssl_context=context) as server:
        trusting = {"client_options": {"allow_invalid_certificates": True}}
        address = f"{server.url}/{{0..7}}.tar"
        stream = TarDataset(address, store_options=trusting)
        assert await names(stream) == NAMES
        stranger = TarDataset(
            f"{server.url}/0.tar", requests=Requests(deadline=0.1), **AT_ONCE
        )
        with pytest.raises(DatasetError):
            await names(stranger)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hedge", [False, True])
async def test_frequent_store_failures_lose_no_sample(seed: int, hedge: bool) -> None:
    objects = {f"{i}.tar": big_shard(150, 8000) for i in range(12)}
    faults = Faults(errors=0.05, resets=0.05, truncated=0.05, hangs=0.01, seed=seed)
    policy = Requests(timeout=0.5, deadline=20, base_delay=0.001, hedge=hedge)
    with ObjectServer(objects, faults=faults) as server:
        options: Any = {"store": server.url, "requests": policy, **AT_ONCE}
        stream = TarDataset("{0..11}.tar", interleave=4, max_bytes=1 << 20, **options)
        loader: Any = DataLoader(stream, 64, collate_fn=list)
        batches = await beside(lambda: list(loader))
        assert sum(server.injected().values()) > 5
    samples = [(s["__url__"], int(s["__key__"])) for b in batches for s in b]
    assert len(samples) == len(set(samples)) == 12 * 150
    for batch in batches:
        for sample in batch:
            body = int(sample["__key__"]).to_bytes(8, "little") * 1000
            assert sample["bin"] == body


async def test_missing_objects_are_not_retried() -> None:
    with ObjectServer({}) as server:
        stream = TarDataset("{a,b}.tar", store=server.url)
        iterator = aiter(stream)
        for name in ("a.tar", "b.tar"):
            with pytest.raises(ObjectNotFoundError) as caught:
                await anext(iterator)
            assert caught.value.location.endswith(name)
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
        assert server.counts("a.tar").requests == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_far", [True, False])
async def test_near_stores_are_read_less_far_ahead(
    is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the latency of this machine.
    monkeypatch.setattr(stored_bytes, "_FAR_SECONDS", 0.0 if is_far else math.inf)
    body = big_shard(1500, 8000)
    with ObjectServer({f"{i}.tar": body for i in range(4)}) as server:
        stream = TarDataset(
            "{0..3}.tar", store=server.url, interleave=4, max_bytes=4 << 20
        )
        async with aiter(stream) as iterator:
            await anext(iterator)
            idle = partial(server.wait_for, lambda: server.counts().in_flight == 0)
            await asyncio.to_thread(idle)
            assert server.counts().bytes <= 4 << 20
            [await anext(iterator) for _ in range(79)]  # beyond the first pieces

            def is_idle() -> bool:
                counts = server.counts()
                return counts.in_flight == 0 and (counts.bytes > 3 << 20) is is_far

            await asyncio.to_thread(server.wait_for, is_idle)
            assert server.counts().bytes <= 5 << 20  # with pieces that were cut
            assert len([sample async for sample in iterator]) == 6000 - 80


async def test_small_shards_are_requested_far_ahead() -> None:
    """One after another, each would cost the time of a request."""
    shards = {f"{i:02}.tar": big_shard(4, 100_000) for i in range(30)}
    budget = 8 << 20  # of which four are for what comes after the first shard
    with ObjectServer(shards) as server:
        stream = TarDataset("{00..29}.tar", store=server.url, max_bytes=budget)
        async with aiter(stream) as iterator:
            keys = [(await anext(iterator))["__key__"]]

            def are_requested() -> bool:
                return all(server.counts(f"0{i}.tar").requests for i in range(5))

            await asyncio.to_thread(server.wait_for, are_requested)
            assert server.counts().bytes <= budget
            keys += [sample["__key__"] async for sample in iterator]
    assert keys == [f"{i:06}" for i in range(4)] * 30


@pytest.mark.slow
@pytest.mark.parametrize("first", [50, 1])
async def test_large_shards_are_begun_one_by_one(first: int) -> None:
    size, each, budget = 100_000, 20, 4 << 20
    shards = {f"{i:02}.tar": big_shard(each, size) for i in range(20)}
    shards["00.tar"] = big_shard(first, size)
    with ObjectServer(shards) as server:
        stream = TarDataset("{00..19}.tar", store=server.url, max_bytes=budget)
        async with aiter(stream) as iterator:
            for taken in range(first + 3 * each):
                await anext(iterator)
                idle = partial(server.wait_for, lambda: server.counts().in_flight == 0)
                await asyncio.to_thread(idle)
                # Plus a piece of a quarter of the budget, cut but not delivered.
                held = server.counts().bytes - taken * size
                assert held <= 1.25 * budget, taken


# -- through a local cache: read once, and never something old ------------------------


def bodies(server: ObjectServer) -> int:
    """Return how many bytes were served, except one for each look at a version."""
    counts = server.counts()
    return counts.bytes - counts.requests


@pytest.mark.slow
async def test_a_cached_epoch_requests_only_versions(tmp_path: Path) -> None:
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


async def test_two_loops_share_a_cache(tmp_path: Path) -> None:
    with ObjectServer(shards(tmp_path)) as server:
        stream = TarDataset("{0..7}.tar", store=server.url).cache(tmp_path / "cache")
        thread = asyncio.to_thread(lambda: asyncio.run(names(stream)))
        results = await asyncio.gather(names(stream), thread)
    assert list(results) == [NAMES, NAMES]


async def test_a_cache_does_not_mix_up_stores_in_memory(tmp_path: Path) -> None:
    """All have the same name, and count their versions from zero."""
    for text in (b"one", b"two"):
        store = MemoryStore()
        store.put("a.txt", text)
        stream = TextDataset("a.txt", store=store, cache=tmp_path)
        assert (await read(stream))[0] == [text.decode()]


def table_bytes(rows: int, ending: str = "parquet") -> bytes:
    """Return a file of two row groups or batches, with four columns."""
    columns = {name: np.random.default_rng(0).random(rows) for name in "abcd"}
    return bytes_of(pa.table(columns), ending, rows // 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ParquetDataset, ArrowDataset])
async def test_a_cache_costs_tables_no_bytes(tmp_path: Path, make: Any) -> None:
    """No more is read than without it, and a warm epoch makes no request."""
    body = table_bytes(16_000, "parquet" if make is ParquetDataset else "arrow")
    with ObjectServer({f"{i}.x": body for i in range(2)}) as server:

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


async def test_a_changed_table_is_not_mixed_with_its_cache(tmp_path: Path) -> None:
    """The next iteration reads it again."""
    with ObjectServer({"a.x": table_bytes(100)}) as server:
        options: Any = {"store": server.url, "cache": tmp_path}
        await read(ParquetDataset("a.x", columns=["a"], **options))
        server.replace("a.x", table_bytes(200))
        with pytest.raises(DatasetError, match="changed while being read"):
            await read(ParquetDataset("a.x", columns=["c"], **options))
        assert len((await read(ParquetDataset("a.x", **options)))[0]) == 200


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (TextDataset, {"tags": "date"}, "sends no ETag, so changes would not"),
        (ParquetDataset, {"tags": "date"}, "sends no ETag, so changes would not"),
        (TextDataset, {"has_ranges": False}, "has no ranges"),
    ],
)
async def test_uncacheable_answers_warn_once(
    tmp_path: Path, options: Any, words: str, kind: Any
) -> None:
    body = b"a\n" * 9 if kind is TextDataset else table_bytes(9)
    with ChangingServer(body, **options) as server:
        stream = kind(["a", "b"], store=server.url, cache=tmp_path)
        with pytest.warns(RuntimeWarning, match=f"keeps nothing of .*{words}") as said:
            for _ in range(2):
                assert len((await read(stream))[0]) >= 16
    assert len(said) == 1


# -- a server that gives files only whole ---------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_tables_need_a_server_with_ranges(kind: str) -> None:
    """The error comes at once, and says what to do."""
    made: Any = ParquetDataset if kind == "parquet" else ArrowDataset
    body = bytes_of(pa.table({"n": range(50)}), kind, 20)
    with ChangingServer(body, tags="date", has_ranges=False) as server:
        with pytest.raises(DatasetError, match=r"0\.\w+'.*ranges.*: download it"):
            await read(made(f"{server.url}/{{0..2}}.{kind}"))
        assert server.requests <= 3


# -- what a resumed stream reads again, as docs/guides/shards.md has it ----------------

MB = 1 << 20
# Samples of a shard that takes several requests, and of one that takes one.
LARGE, SMALL = 2_400, 100
SAMPLE = 10_000


def lines(count: int) -> bytes:
    return (b"x" * (SAMPLE - 1) + b"\n") * count


def records(count: int) -> bytes:
    return (struct.pack("<I", SAMPLE) + b"x" * SAMPLE) * count


def tar(count: int) -> bytes:
    return archive(Member(f"{n:05}.bin", b"x" * SAMPLE) for n in range(count))


def packed(count: int) -> bytes:
    """Return lines that do not compress."""
    noise = np.random.default_rng(0)
    rows = (noise.bytes(SAMPLE // 2).hex().encode() + b"\n" for _ in range(count))
    return gzip.compress(b"".join(rows), 1)


def arrow(count: int, ending: str = "arrow") -> bytes:
    return bytes_of(pa.table({"body": [b"x" * SAMPLE] * count}), ending, 10)


def parquet(count: int) -> bytes:
    """Return four row groups."""
    table, plain = pa.table({"body": [b"x" * SAMPLE] * count}), {"compression": "none"}
    return bytes_of(table, "parquet", count // 4, use_dictionary=False, **plain)


def read_after_resuming(
    make: Callable[[str], Any], data: bytes, share: float, ending: str = ""
) -> tuple[int, int]:
    """Resume in the second of two shards; return bytes read of each."""
    names = [f"0{ending}", f"1{ending}"]
    objects = dict.fromkeys(names, data)

    def loader(server: ObjectServer) -> DataLoader[Any]:
        stream = make(f"{server.url}/{{0,1}}{ending}")
        return DataLoader(stream, 25, collate_fn=list)

    with ObjectServer(objects) as server, loader(server) as whole:
        batches = len([*whole])
    with ObjectServer(objects) as server, loader(server) as first:
        iterator = iter(first)
        for _ in islice(iterator, int(batches * (1 + share) / 2)):
            pass
        state = first.state_dict()
        iterator.close()
    with ObjectServer(objects) as server, loader(server) as resumed:
        resumed.load_state_dict(state)
        assert len([*resumed]) == batches - int(batches * (1 + share) / 2)
        return server.counts(names[0]).bytes, server.counts(names[1]).bytes


OWN: Any = partial(ByteStream, make=own_format.records)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.65, 0.95])
@pytest.mark.parametrize(
    ("stream", "make"),
    [(TextDataset, lines), (TarDataset, tar), (ArrowDataset, arrow), (OWN, records)],
)
def test_resuming_reads_at_most_8_mb_again(
    stream: Any, make: Callable[[int], bytes], share: float
) -> None:
    data = make(LARGE)
    before, current = read_after_resuming(stream, data, share)
    assert before < MB  # the footers of Arrow files
    assert current <= (1 - share) * len(data) + 8 * MB + 4 * SAMPLE


@pytest.mark.slow
def test_resuming_parquet_reads_a_row_group_again() -> None:
    data = parquet(LARGE)
    before, current = read_after_resuming(ParquetDataset, data, 0.6)
    assert before < MB
    assert len(data) / 2 < current < len(data) * 0.55


@pytest.mark.slow
@pytest.mark.parametrize(("least", "rest"), [(None, 0.41), (1000, 0.245)])
def test_resuming_csv_reads_a_block_again(least: int | None, rest: float) -> None:
    """Also if a filter drops rows."""
    data = b"n,s\n" + b"".join(b"%d,%s\n" % (n, b"x" * SAMPLE) for n in range(LARGE))
    filters = None if least is None else [("n", ">", least)]
    make = partial(CSVDataset, filters=filters)
    before, current = read_after_resuming(make, data, 0.6)
    assert before < MB
    assert current < rest * len(data) + 2 * 2**18  # one block, and the first lines


@pytest.mark.parametrize(
    ("stream", "make", "ending"),
    [(TextDataset, packed, ".gz"), (ArrowDataset, partial(arrow, ending="arrows"), "")],
    ids=["gzip", "arrow stream"],
)
def test_unseekable_shards_are_read_again_from_the_start(
    stream: Any, make: Callable[[int], bytes], ending: str
) -> None:
    data = make(SMALL)
    _, current = read_after_resuming(stream, data, 0.8, ending)
    assert current >= len(data)


@pytest.mark.slow
def test_resuming_a_shuffle_reads_its_window_again() -> None:
    """Of 2,000 samples: 2,400 of 4,800 come before it, and 600 of it were delivered."""

    def stream(address: str) -> Any:
        return TextDataset(address).shuffle(2_000)

    _, unshuffled = read_after_resuming(TextDataset, lines(LARGE), 0.6)
    before, current = read_after_resuming(stream, lines(LARGE), 0.6)
    again = before + current - unshuffled
    assert 0 < again <= 2_000 * SAMPLE + 8 * MB
