"""The laws of formats and parsers hold for ours, and find what others do wrong."""

import asyncio
import doctest
import gzip
import json
import struct
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import own_format
import pytest

from aioloader.datasets import (
    ByteStream,
    Parser,
    ShardedStream,
    ShardFormat,
    ShardReader,
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
from datasets.shards import (
    Make,
    arrow,
    json_lines,
    names,
    own,
    parquet,
    sqlite,
    tar,
    tar_zstd,
    text,
)
from object_server import ObjectServer

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


class Rows(ShardFormat):
    """A format of the smallest kind: each shard is a list in a JSON file."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.json"))
        self.rows = {path.name: json.loads(path.read_text()) for path in files}
        self.reader: Any = RowsReader

    async def shards(self, _stack: AsyncExitStack, _known: Any = None, /) -> list[str]:
        return list(self.rows)

    def summary(self, shards: Any) -> dict[str, Any]:
        return {"count": len(shards), "names": list(shards)}

    def open(self, shard: str, position: dict[str, Any], _budget: int) -> ShardReader:
        reader: ShardReader = self.reader(self.rows[shard], position.get("at", 0))
        return reader


class RowsReader(ShardReader):
    def __init__(self, rows: list[int], at: int) -> None:
        self.rows, self.at = rows, at

    async def pull(self, limit: int) -> list[int]:
        await asyncio.sleep(0)
        found = self.rows[self.at : self.at + limit]
        self.at += len(found)
        return found

    def position(self) -> dict[str, Any]:
        return {"at": self.at}


class TooMany(RowsReader):
    async def pull(self, limit: int) -> list[int]:
        return await super().pull(limit + 1)


class LosesOne(RowsReader):
    def position(self) -> dict[str, Any]:
        return {"at": self.at + (self.at > 2)}


class ForgetsCancelled(RowsReader):
    async def pull(self, limit: int) -> list[int]:
        self.task = asyncio.create_task(self.slow(limit))
        return await asyncio.shield(self.task)

    async def slow(self, limit: int) -> list[int]:
        for _ in range(30):
            await asyncio.sleep(0)
        return await super().pull(limit)


class AfterTheEnd(RowsReader):
    async def pull(self, limit: int) -> list[int]:
        found = await super().pull(limit)
        self.at = self.at if found else 0
        return found


class Tuples(RowsReader):
    """Has a position that JSON changes."""

    def position(self) -> dict[str, Any]:
        return {"at": (self.at,)}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "a.json").write_text("[1, 2, 3, 4, 5]")
    (tmp_path / "b.json").write_text("[]")
    return Rows(tmp_path)


async def test_a_format_of_ones_own(rows: Rows) -> None:
    await check_shard_format(rows)
    assert await names(ShardedStream(rows)) == ["1", "2", "3", "4", "5"]


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
async def test_what_is_wrong_is_named(rows: Rows, reader: Any, words: str) -> None:
    rows.reader = reader
    with pytest.raises(AssertionError, match=words):
        await check_shard_format(rows)


async def test_a_summary_without_a_count_is_named(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are dealt by it."""
    monkeypatch.setattr(rows, "summary", lambda _shards: {})
    with pytest.raises(AssertionError, match="summary must have 'count'"):
        await check_shard_format(rows)


DATA = b"".join(struct.pack("<I", at) + bytes([at] * at) for at in range(9))


class RecordParser:
    mistake = ""

    def __init__(self, url: str, offset: int) -> None:
        self.offset = offset  # of the next record in the shard
        self.is_over = self._has_ended = False
        self._url, self._rest = url, b""
        self._kept: Any = b""

    def feed(self, piece: Any) -> None:
        """Add bytes; the piece is invalid after the next ``take``."""
        if self.mistake == "keeps":
            self._kept = piece
        else:
            self._rest += bytes(piece)

    def end(self) -> None:
        self._has_ended = True

    def take(self, limit: int) -> list[Any]:
        records, before, at = list[bytes](), self.offset, 0
        while len(records) < limit and at + 4 <= len(self._rest):
            stop = at + 4 + struct.unpack_from("<I", self._rest, at)[0]
            if stop > len(self._rest):
                break
            records.append(self._rest[at + 4 : stop])
            at = stop
            if self.mistake == "few":
                break
        self._rest, self.offset = self._rest[at:], self.offset + at
        if self._has_ended and self._rest and not records:
            raise ValueError(
                f"{self._url!r} ends within a record, byte {self.offset:,}"
            )
        if self.mistake == "offset":
            self.offset = before
        if not records:
            self._rest, self._kept = self._rest + bytes(self._kept), b""
        return records


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
