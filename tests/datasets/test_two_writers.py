"""Two writers at one place: neither damages what the other one has written."""

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from aioloader.datasets import TarDataset, TarWriter
from aioloader.datasets._write import sinks
from aioloader.errors import StateMismatchError
from datasets.test_writers import COUNT, SAMPLES, labels, write


async def test_two_writers_at_once(tmp_path: Path) -> None:
    first = TarWriter(tmp_path, shard_samples=2)
    with pytest.raises(StateMismatchError, match="another writer has written"):
        async with first:
            await first.write(SAMPLES[0])
            await write(tmp_path)
            await first.write(SAMPLES[1])
    assert await labels(tmp_path) == list(range(COUNT))


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kind", ["memory", "s3"])
async def test_two_writers_in_the_same_moment(
    kind: str,
    is_resumed: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    s3_port: int,
) -> None:
    """One of them succeeds, also if both have seen the same manifest."""
    destination: Any = MemoryStore()
    if kind == "s3":
        loop = request.node.callspec.id
        destination = request.getfixturevalue("s3") + f"-meeting-{loop}"
    if is_resumed:
        await write(destination, until=6)
    barrier, version = asyncio.Barrier(2), sinks.StoreSink._version
    calls, is_one_over = itertools.count(), asyncio.Event()

    async def both_have_seen(sink: Any, file: str) -> Any:
        found = await version(sink, file)
        # One after the other: the test's server compares and writes in two steps.
        if next(calls) < 2 and await barrier.wait():
            await is_one_over.wait()
        return found

    async def run(job: Any) -> None:
        try:
            await job
        finally:
            is_one_over.set()

    pair: list[Any] = [TarWriter(destination, shard_samples=6) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        if is_resumed:
            for writer in pair:
                await stack.enter_async_context(writer)
                for sample in SAMPLES[6:11]:
                    await writer.write(sample)
            monkeypatch.setattr(sinks.StoreSink, "_version", both_have_seen)
            jobs: list[Any] = [writer.write(SAMPLES[11]) for writer in pair]
        else:
            monkeypatch.setattr(sinks.StoreSink, "_version", both_have_seen)
            jobs = [stack.enter_async_context(writer) for writer in pair]
        ended = await asyncio.gather(*map(run, jobs), return_exceptions=True)
        lost = [one for one in ended if isinstance(one, BaseException)]
        assert [type(one) for one in lost] == [StateMismatchError]
        assert "run one writer at a time, or give each a different name" in str(lost[0])


@pytest.mark.parametrize("before", [None, b"old"])
def test_one_file_is_swapped_once(before: bytes | None, tmp_path: Path) -> None:
    if before is not None:
        (tmp_path / "list.json").write_bytes(before)
    sink = sinks.FolderSink(str(tmp_path))
    barrier = threading.Barrier(8)

    def swap(number: int) -> bool:
        barrier.wait(10)
        return asyncio.run(sink.swap("list.json", before, b"%d" % number))

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(swap, range(8)))
    assert sum(done) == 1
    assert (tmp_path / "list.json").read_bytes() == b"%d" % done.index(True)


async def test_two_writers_of_one_shard_at_once(tmp_path: Path) -> None:
    first, second = (TarWriter(tmp_path, shard_bytes=size) for size in (3_000, 6_000))
    rows = [{"bin": bytes(512) + bytes([at])} for at in range(9)]
    async with contextlib.AsyncExitStack() as stack:
        for writer in (first, second):
            await stack.enter_async_context(writer)
        for writer in (first, second):
            await writer.write(rows[0])
            await writer._send()
        for row in rows[1:3]:
            await first.write(row)
        index = tmp_path / "shard-000000.tar.idx"
        before = await asyncio.to_thread(index.read_bytes)
        assert first.shards
        with pytest.raises(StateMismatchError, match="another writer has written"):
            for row in rows[1:]:
                await second.write(row)
    stream = TarDataset(f"{tmp_path}/*.tar")
    assert [sample["bin"] async for sample in stream] == [
        one["bin"] for one in rows[:3]
    ]
    assert await asyncio.to_thread(index.read_bytes) == before
    assert not await asyncio.to_thread(lambda: [*tmp_path.glob(".*")])
