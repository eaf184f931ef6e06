"""The laws of formats and parsers hold for ours, and find what others do wrong."""

import asyncio
import doctest
import gzip
import json
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import own_format
import pytest

from aioloader import DataLoader
from aioloader._order.blocks import Block
from aioloader._order.raising import STOPS
from aioloader.datasets import (
    ByteStream,
    Parser,
    ShardedStream,
    TarDataset,
    TextDataset,
    decoders,
    files,
    named,
    objects,
    writers,
)
from aioloader.datasets._stores import cache_dir
from aioloader.testing import check_parser, check_shard_format
from beside import beside
from datasets.shards import (
    Make,
    arrow,
    json_lines,
    names,
    own,
    parquet,
    read,
    sqlite,
    tar,
    tar_zstd,
    text,
)
from datasets.test_interleave import Memory, Reader
from object_server import Faults, ObjectServer

ALL: list[Make] = [text, json_lines, tar, tar_zstd, own, parquet, arrow, sqlite]


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
async def test_every_format_keeps_the_laws(make: Make, tmp_path: Path) -> None:
    await check_shard_format(make(tmp_path).made_by, samples=12)


STORED: dict[str, tuple[Make, Any]] = {
    "txt": (text, TextDataset),
    "tar": (tar, TarDataset),
    "rec": (own, partial(ByteStream, make=own_format.records)),
}


@pytest.mark.parametrize("ending", STORED)
async def test_the_laws_hold_in_a_store(ending: str, tmp_path: Path) -> None:
    write, dataset = STORED[ending]
    write(tmp_path)
    data = (tmp_path / f"0.{ending}").read_bytes()
    objects = {f"0.{ending}": data, f"1.{ending}.gz": gzip.compress(data)}
    with ObjectServer(objects) as server:
        stream = dataset([*objects], store=server.url)
        await check_shard_format(stream.made_by, samples=3)


class Rows(Memory):
    """Two shards, one of them empty, and readers that may be wrong."""

    reader: Any = Reader

    def __init__(self) -> None:
        super().__init__(list, made=[[1, 2, 3, 4, 5], []])

    def open(self, shard: Any, position: dict[str, Any], budget: int) -> Reader:
        reader: Reader = self.reader(shard, position.get("at", 0), 1000, list)
        return reader


class TooMany(Reader):
    async def pull(self, limit: int) -> Block:
        return await super().pull(limit + 1)


class LosesOne(Reader):
    def position(self) -> dict[str, Any]:
        return {"at": self._at + (self._at > 2)}


class ForgetsCancelled(Reader):
    async def pull(self, limit: int) -> Block:
        self.task = asyncio.create_task(self.slow(limit))
        return await asyncio.shield(self.task)

    async def slow(self, limit: int) -> Block:
        for _ in range(30):
            await asyncio.sleep(0)
        return await super().pull(limit)


class AfterTheEnd(Reader):
    async def pull(self, limit: int) -> Block:
        found = await super().pull(limit)
        self._at = self._at if len(found) else 0
        return found


class Tuples(Reader):
    """Has a position that JSON changes."""

    def position(self) -> dict[str, Any]:
        return {"at": (self._at,)}


async def test_a_format_of_ones_own() -> None:
    await check_shard_format(Rows())
    assert await names(ShardedStream(Rows())) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (TooMany, r"pull\(1\) gave 2 samples|pull\(2\) gave 3 samples"),
        (LosesOne, r"after \d samples, from {'at': 4}: sample 0 is"),
        (ForgetsCancelled, "a reader leaves|tasks are left"),
        (AfterTheEnd, "there are samples after the end"),
        (Tuples, "a position must be JSON"),
    ],
)
async def test_what_is_wrong_is_named(reader: Any, words: str) -> None:
    rows = Rows()
    rows.reader = reader
    with pytest.raises(AssertionError, match=words):
        await check_shard_format(rows)


async def test_a_summary_without_a_count_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes are dealt by it."""
    rows = Rows()
    monkeypatch.setattr(rows, "summary", lambda _shards: {})
    with pytest.raises(AssertionError, match="summary must have 'count'"):
        await check_shard_format(rows)


DATA = bytes(range(36))


class RecordParser:
    """Records of four bytes."""

    mistake = ""

    def __init__(self, _url: str, offset: int) -> None:
        self.offset = offset  # of the next record in the shard
        self.is_over = False
        self._rest, self._kept = b"", list[Any]()

    def feed(self, piece: Any) -> None:
        """Add bytes; the piece is invalid after the next ``take``."""
        self._kept.append(piece if self.mistake == "keeps" else bytes(piece))

    def end(self) -> None: ...

    def take(self, limit: int) -> list[bytes]:
        if self.mistake != "keeps" or len(self._kept) > 1:
            self._rest += b"".join(self._kept)
            self._kept = []
        count = min(limit, len(self._rest) // 4, 1 if self.mistake == "few" else 99)
        found = [self._rest[at : at + 4] for at in range(0, 4 * count, 4)]
        self._rest = self._rest[4 * count :]
        self.offset += 0 if self.mistake == "offset" else 4 * count
        return found


def test_every_format_of_ones_own() -> None:
    check_parser(RecordParser, DATA)
    own_format.main()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("few", "and there were more"),
        ("offset", "from offset 0, before sample 1"),
        ("keeps", r"\w"),
    ],
)
def test_what_is_wrong_with_a_parser_is_named(mistake: str, words: str) -> None:
    """Each by the law that it breaks; a piece that was kept has other bytes then."""

    def make(url: str, offset: int) -> Parser:
        parser = RecordParser(url, offset)
        parser.mistake = mistake
        return parser

    with pytest.raises((AssertionError, ValueError), match=words):
        check_parser(make, DATA)


# -- the examples in the docstrings run -----------------------------------------------


MODULES = [cache_dir, decoders, files, named, objects, writers]


@pytest.mark.parametrize("module", MODULES)
def test_example(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted
    assert not result.failed


# -- a generator of samples over a file ------------------------------------------------

WRITTEN = b"".join(struct.pack("<I", 5) + b"%05d" % at for at in range(3000))
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
    with ObjectServer(dict.fromkeys(map(str, range(40)), WRITTEN)) as server:
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
