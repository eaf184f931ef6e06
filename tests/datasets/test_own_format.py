"""A generator of samples over a file: where it runs, waits, ends and fails."""

import asyncio
import json
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from aioloader import DataLoader
from aioloader._order.raising import STOPS
from aioloader.datasets import ByteStream
from beside import beside
from datasets.shards import read
from object_server import Faults, ObjectServer

DATA = b"".join(struct.pack("<I", 5) + b"%05d" % at for at in range(3000))
RECORDS = [b"%05d" % at for at in range(3000)]


class Threads:
    def __init__(self) -> None:
        self.ran = set[int]()
        self.closed: int | None = None

    def __call__(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            for line in file:
                self.ran.add(threading.get_ident())
                yield line
        finally:
            self.closed = threading.get_ident()


@pytest.mark.parametrize("count", [1, 300, None])
async def test_it_is_closed_in_the_thread_that_runs_it(
    count: int | None, tmp_path: Path
) -> None:
    """Which is none of the loop's; objects of one thread may be used in it."""
    (tmp_path / "a").write_bytes(b"line\n" * 9000)
    noted = Threads()
    await read(ByteStream(str(tmp_path / "a"), noted), count)
    assert noted.ran == {noted.closed}
    assert threading.get_ident() not in noted.ran


async def test_many_wait_at_once() -> None:
    """More than a loop has threads, which stay free; and closing ends the waiting."""
    noted = Threads()
    with ObjectServer(dict.fromkeys(map(str, range(40)), DATA)) as server:
        server.faults = Faults(hangs=1)
        stream: Any = ByteStream("{0..39}", noted, store=server.url, interleave=40)
        iterator: Any = aiter(stream.readers(40))
        pull = asyncio.create_task(iterator.pull(10))
        waits = partial(server.wait_for, lambda: server.counts().in_flight == 40)
        await asyncio.to_thread(waits)
        pull.cancel()
        await asyncio.wait([pull])
        await iterator.aclose()
    assert noted.closed


def lines(file: BinaryIO) -> Iterator[str]:
    """Yield values; the third of four fails."""
    for line in file:
        yield json.loads(line)


async def test_what_it_raises_comes_after_the_samples_before(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n{\n4\n")
    (tmp_path / "b").write_text("5\n")
    loader: Any = DataLoader(
        ByteStream(f"{tmp_path}/*", lines), 1, on_error="skip", collate_fn=list
    )
    assert await beside(lambda: [*loader]) == [[1], [2], [5]]


@pytest.mark.parametrize("kind", STOPS)
async def test_what_would_end_a_loop_is_loud(
    kind: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("1\n")

    def stops(file: BinaryIO) -> Iterator[bytes]:
        yield file.readline()
        raise kind("the generator's")

    async with aiter(ByteStream[bytes](str(tmp_path / "a"), stops)) as iterator:
        assert await anext(iterator) == b"1\n"
        with pytest.raises(RuntimeError):
            await anext(iterator)


async def test_a_file_goes_forward(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(300_000) + b"end")
    seen: list[Any] = []

    def skips(file: BinaryIO) -> Iterator[bytes]:
        seen.append(file.name)
        with pytest.raises(OSError, match="forward only"):
            file.seek(0, 2)
        file.seek(300_000)
        with pytest.raises(OSError, match="forward only"):
            file.seek(7)
        yield file.read()

    path = str(tmp_path / "a")
    assert (await read(ByteStream(path, skips)))[0] == [b"end"]
    assert seen == [path]
