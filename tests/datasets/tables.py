"""Tables of every type, the files they are written to, and faulty places."""

import asyncio
import datetime
import decimal
import json
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
import torch

from aioloader.datasets._arrow.csv import CSVFormat
from aioloader.datasets._arrow.ipc import ArrowFormat
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._stores.bytes import FileBytes
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.sources import Requests
from aioloader.datasets._stores.storage import SizedListing, Storage
from aioloader.errors import DatasetError
from datasets.shards import bytes_of, put

Format = ParquetFormat | ArrowFormat | CSVFormat
PLACES = pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])


class Local(Storage):
    """Local files; if ``is_remote``, they are read by ranges as objects are.

    Reads are noted in ``spans``. Read number ``fail_at`` fails, one of ``short_at``
    bytes less comes short; with ``gate`` reads wait for it.
    """

    def __init__(self, *, is_remote: bool = False) -> None:
        super().__init__(None, {}, Requests())
        self.is_remote = is_remote
        self.spans: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        self.short_at: int | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.in_flight = 0
        self.closed = 0

    async def expand(self, patterns: str | Iterable[str]) -> SizedListing:
        return SizedListing([patterns] if isinstance(patterns, str) else patterns)

    def cached(self, _cache: object) -> Self:
        return self

    def label(self, address: str) -> str:
        return address.rpartition("/")[2]

    def name(self, address: str) -> str:
        return address

    def path(self, address: str) -> str | None:
        """Return the path, or None to be read by ranges."""
        return None if self.is_remote else address

    def open(self, address: str, start: int, budget: int, *_: Any) -> FileBytes:
        return FileBytes(address, start, budget)

    async def version(self, address: str) -> Version:
        """Return a version with only the length of the file."""
        return Version(len(await asyncio.to_thread(contents, address)))

    async def read(
        self, address: str, start: int, stop: int, version: Version
    ) -> bytes:
        number = len(self.spans)
        self.spans.append((start, stop))
        if self.gate is not None:
            self.in_flight += 1
            self.entered.set()
            try:
                await self.gate.wait()
            finally:
                self.in_flight -= 1
        if number == self.fail_at:
            raise DatasetError("the store is on fire", location=self.label(address))
        data = (await asyncio.to_thread(contents, address))[start:stop]
        return data[:-1] if number == self.short_at else data

    async def aclose(self) -> None:
        self.closed += 1


def every_type(rows: int = 50) -> pa.Table:
    """Return a table with a column of every type of files, and some NULLs."""
    index = np.arange(rows)
    epoch = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    moments = [epoch + datetime.timedelta(hours=int(n)) for n in index]
    texts = [None if n % 7 == 3 else f"t\xebxt {n % 5}" for n in index]
    prices = [decimal.Decimal(int(n)) / 4 for n in index]
    columns: dict[str, Any] = {
        f"{sign}int{bits}": pa.array(index % 100, pa.type_for_alias(f"{sign}int{bits}"))
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    }
    columns |= {
        "half": pa.array((index / 8).astype(np.float16)),
        "float32": pa.array(index / 3, pa.float32()),
        "float64": pa.array([None if n % 9 == 1 else n / 3 for n in index]),
        "bool": pa.array(index % 3 == 0),
        "text": pa.array(texts),
        "large": pa.array(texts, pa.large_string()),
        "bytes": pa.array([b"\xff" * (n % 4) for n in index], pa.binary()),
        "key": pa.array([bytes([n % 256]) * 3 for n in index], pa.binary(3)),
        "category": pa.array(texts).dictionary_encode(),
        "date": pa.array([moment.date() for moment in moments]),
        "moment": pa.array(moments, pa.timestamp("us", "Europe/Berlin")),
        "nanos": pa.array(index, pa.timestamp("ns")),
        "time": pa.array([moment.time() for moment in moments], pa.time64("us")),
        "decimal": pa.array(prices, pa.decimal128(9, 2)),
        "pair": pa.array([[n, n + 1] for n in index], pa.list_(pa.int16(), 2)),
        "list": pa.array([None if n == 2 else [n] * (n % 4) for n in index]),
        "texts": pa.array([["a"] * (n % 3) for n in index]),
        "struct": pa.array([{"a": n, "b": {"c": f"{n}"}} for n in index]),
        "structs": pa.array([[{"a": n}] * (n % 2) for n in index]),
        "map": pa.array([[("k", n)] for n in index], pa.map_(pa.string(), pa.int8())),
    }
    return pa.table(columns)


def plain(value: Any) -> Any:
    """Return a row as ``to_pylist`` has it: numpy's values are Python's."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, np.datetime64):
        return value
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def expected(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows as pyarrow has them; nanoseconds are numpy's."""
    columns = {
        name: table[name].to_numpy() if name == "nanos" else table[name].to_pylist()
        for name in table.column_names
    }
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def contents(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def flip(path: str | Path, offset: int, bit: int = 0) -> None:
    data = bytearray(contents(path))
    data[offset] ^= 1 << bit
    put(path, data)


def rows_of(kind: Any, values: Any) -> Rows:
    return Rows(pa.record_batch({"x": pa.array(values, kind)}))


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype is second.dtype
        assert first.shape == second.shape
        assert torch.equal(first.nan_to_num(7.25), second.nan_to_num(7.25))
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key, value in first.items():
            assert_same(value, second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for inner, twin in zip(first, second, strict=True):
            assert_same(inner, twin)
    else:
        assert first == second or (first != first and second != second)  # noqa: PLR0124


def write(path: Path, table: pa.Table, rows: int = 20, **options: Any) -> str:
    """Write a table in parts of ``rows``, in the format of the path's ending."""
    if path.suffix == ".parquet":
        options = {"write_page_checksum": True, **options}
    put(path, bytes_of(table, path.suffix, rows, **options))
    return str(path)


async def shards(made: Format) -> list[Any]:
    """Return the shards as JSON has them, as in a saved state."""
    async with AsyncExitStack() as stack:
        listed = await made.shards(stack)
        return json.loads(json.dumps(listed))  # type: ignore[no-any-return]


async def read_shard(
    made: Format, shard: Any, *, row: int = 0, budget: int = 1 << 20, limit: int = 7
) -> list[Any]:
    """Return the rows of one shard, and check the positions on the way."""
    reader = made.open(shard, {"row": row} if row else {}, budget)
    rows: list[Any] = []
    try:
        while True:
            assert reader.position()["row"] == row + len(rows)
            block = await reader.pull(limit)
            if not len(block):
                assert reader.is_draining()
                return rows
            assert len(block) <= limit
            rows += list(block)
    finally:
        await reader.aclose()


async def outcome(
    path: str | Path, local: Local, **options: Any
) -> list[Any] | DatasetError:
    made = ParquetFormat if str(path).endswith(".parquet") else ArrowFormat
    try:
        return await read_all(made(str(path), local, **options))
    except DatasetError as error:
        return error


async def read_all(made: Format, **options: Any) -> list[Any]:
    rows: list[Any] = []
    for shard in await shards(made):
        rows += await read_shard(made, shard, **options)
    return rows
