"""Shards in stores: S3, HTTP and HTTPS, through faults, changes and dead servers."""

import asyncio
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
import trustme

from aioloader import DataLoader
from aioloader.datasets import Requests, TarDataset
from aioloader.datasets._stores.bytes import ObjectBytes
from aioloader.datasets._stores.file_bytes import FileBytes
from aioloader.datasets._stores.versions import Piece, Version
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
)
from beside import beside
from datasets.shards import NAMES, names, write_tar
from datasets.tar_archives import Member, archive
from object_server import Faults, ObjectServer

# obstore's own retries off, so that those of the dataset are seen.
AT_ONCE: dict[str, Any] = {"store_options": {"retry_config": {"max_retries": 0}}}
QUICK = Requests(timeout=0.5, deadline=20, base_delay=0.001)


def shards(folder: Path) -> dict[str, bytes]:
    write_tar(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def big_shard(samples: int, size: int) -> bytes:
    """Return a tar of samples of that many bytes, each with its number in it."""
    return archive(
        Member(f"{number:06}.bin", number.to_bytes(8, "little") * (size // 8))
        for number in range(samples)
    )


async def test_https(tmp_path: Path) -> None:
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
async def test_a_store_that_fails_often(seed: int, hedge: bool) -> None:
    objects = {f"{at}.tar": big_shard(150, 8000) for at in range(12)}
    faults = Faults(errors=0.05, resets=0.05, truncated=0.05, hangs=0.01, seed=seed)
    policy = Requests(timeout=0.5, deadline=20, base_delay=0.001, hedge=hedge)
    with ObjectServer(objects, faults=faults) as server:
        stream = TarDataset(
            "{0..11}.tar",
            store=server.url,
            interleave=4,
            max_bytes=1 << 20,
            requests=policy,
            **AT_ONCE,
        )
        loader: Any = DataLoader(stream, 64, collate_fn=list)
        batches = await beside(lambda: list(loader))
        assert sum(server.injected().values()) > 5
    found = [(s["__url__"], int(s["__key__"])) for b in batches for s in b]
    assert len(found) == len(set(found)) == 12 * 150
    for batch in batches:
        for sample in batch:
            body = int(sample["__key__"]).to_bytes(8, "little") * 1000
            assert sample["bin"] == body


async def test_what_is_not_there_is_told_at_once() -> None:
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
async def test_no_more_is_in_flight_than_the_budget(tmp_path: Path) -> None:
    body = big_shard(1500, 8000)
    with ObjectServer({f"{at}.tar": body for at in range(4)}) as server:
        stream = TarDataset(
            "{0..3}.tar", store=server.url, interleave=4, max_bytes=4 << 20
        )
        async with aiter(stream) as iterator:
            await anext(iterator)
            await asyncio.to_thread(
                server.wait_for, lambda: server.counts().in_flight == 0
            )
            assert server.counts().bytes <= 4 << 20
            count = 1
            async for _ in iterator:
                count += 1
    assert count == 6000


async def test_small_shards_are_requested_far_ahead() -> None:
    """One after the other they would cost the time of a request each."""
    shards = {f"{at:02}.tar": big_shard(4, 100_000) for at in range(30)}
    budget = 8 << 20  # of which four are for what comes after the first shard
    with ObjectServer(shards) as server:
        stream = TarDataset("{00..29}.tar", store=server.url, max_bytes=budget)
        async with aiter(stream) as iterator:
            found = [(await anext(iterator))["__key__"]]

            def are_requested() -> bool:
                return all(server.counts(f"0{at}.tar").requests for at in range(5))

            await asyncio.to_thread(server.wait_for, are_requested)
            assert server.counts().bytes <= budget
            found += [sample["__key__"] async for sample in iterator]
    assert found == [f"{at:06}" for at in range(4)] * 30


@pytest.mark.slow
@pytest.mark.parametrize("first", [50, 1])
async def test_large_shards_are_begun_one_by_one(first: int) -> None:
    size, each, budget = 100_000, 20, 4 << 20
    shards = {f"{at:02}.tar": big_shard(each, size) for at in range(20)}
    shards["00.tar"] = big_shard(first, size)
    with ObjectServer(shards) as server:
        stream = TarDataset("{00..19}.tar", store=server.url, max_bytes=budget)
        async with aiter(stream) as iterator:
            for taken in range(first + 3 * each):
                await anext(iterator)
                await asyncio.to_thread(
                    server.wait_for, lambda: server.counts().in_flight == 0
                )
                # A piece of a quarter of the budget has been cut, and is not yet taken.
                held = server.counts().bytes - taken * size
                assert held <= 1.25 * budget, taken


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_pieces_grow_and_end_where_blocks_do() -> None:
    """Few are asked for before anybody reads, and never more than the budget."""
    size, budget = (20 << 20) + 5, 16 << 20
    asked: list[tuple[int, int]] = []

    class Object:
        location, block = "x", 0

        async def fetch(self, start: int, stop: int, _version: Any) -> Piece:
            asked.append((start, stop))
            await asyncio.sleep(0)
            return Piece(bytes(stop - start), Version(size))

    one: Any = Object()
    found = ObjectBytes(one, 1000, budget)
    found.begin()
    await settled()
    assert asked[0] == (1000, 1 << 16)
    assert asked[-1][1] == budget // 8
    assert found.bytes_ahead() == budget // 8 - 1000
    assert not found.is_draining()
    received = 1000
    while length := len(memoryview(await found.read())):
        await settled()
        received += length
        ahead = asked[-1][1] - received
        assert ahead <= budget
        assert found.is_draining() == (asked[-1][1] == size and ahead <= budget // 2)
    assert received == size
    assert [start for start, _ in asked[1:]] == [stop for _, stop in asked[:-1]]
    lengths = [stop - start for start, stop in asked[1:-1]]
    assert lengths[:4] == [1 << 16, 1 << 17, 1 << 18, 1 << 19]
    assert set(lengths[4:]) == {1 << 20}
    await found.aclose()


async def test_a_thread_that_reads_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    file = FileBytes(str(tmp_path / "a"), 0, 1 << 20)
    entered, release = threading.Event(), threading.Event()

    def use(read: Any) -> bytes:
        entered.set()
        release.wait()
        return bytes(read())

    task = asyncio.create_task(file.use(use))
    await asyncio.to_thread(entered.wait)
    for _ in range(2):
        task.cancel()
        await settled()
    was_done = task.done()
    release.set()
    await asyncio.wait([task])
    assert (was_done, task.cancelled()) == (False, True)
    assert await file.read() == b""
    await file.aclose()


async def test_a_refusal_is_a_permission_error(loopback: Any) -> None:
    with pytest.raises(ObjectPermissionError):
        await names(TarDataset(f"{loopback.url('403')}/a.tar", requests=QUICK))
    assert len(loopback.heads) == 1
