"""Ways to read a database: range by range, and by key."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aioloader.datasets import SQLDataset
from aioloader.datasets._sql.session import SQLReader
from aioloader.datasets.sql import SQLFormat, SQLRows
from datasets.pg import Database

BUDGET = 1 << 20


@asynccontextmanager
async def opened(
    made: SQLFormat, budget: int = BUDGET, known: dict[str, Any] | None = None
) -> AsyncIterator[list[SQLReader]]:
    async with AsyncExitStack() as stack:
        shards = await made.shards(stack, known)
        readers = [made.open(shard, {}, budget) for shard in shards]
        for reader in readers:
            stack.push_async_callback(reader.aclose)
        yield readers


async def rest_of(reader: SQLReader, limit: int = 100) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(block := await reader.pull(limit)):
        assert len(block) <= limit
        rows.extend(block)
    return rows


async def parts_of(made: SQLFormat, limit: int = 100) -> list[list[dict[str, Any]]]:
    parts: list[list[dict[str, Any]]] = []
    async with AsyncExitStack() as stack:
        for shard in await made.shards(stack):
            reader = made.open(shard, {}, BUDGET)
            parts.append(await rest_of(reader, limit))
            assert reader.is_draining()
            await reader.aclose()
    return parts


async def rows_of(made: SQLFormat, limit: int = 100) -> list[dict[str, Any]]:
    return [row for part in await parts_of(made, limit) for row in part]


async def read(make: Any, url: str, table: str, **options: Any) -> list[Any]:
    options = {"key": "id", **options}
    if make is SQLDataset:
        stream: Any = SQLDataset(url, table, **options)
        async with aiter(stream) as iterator:
            return [row async for row in iterator]
    async with await SQLRows.discover(url, table, **options) as rows:
        return await rows.__getitems__(range(len(rows)))


async def keys_of(made: SQLFormat, key: str = "id") -> list[Any]:
    return [row[key] for row in await rows_of(made)]


async def resumed(made: SQLFormat, number: int, count: int) -> list[dict[str, Any]]:
    """Return one range's rows, read in two iterations: ``count``, then the rest."""
    first: list[dict[str, Any]] = []
    async with opened(made) as readers:
        while len(first) < count:
            first += await readers[number].pull(count - len(first))
        state = json.loads(json.dumps(readers[number].position()))
    async with AsyncExitStack() as stack:
        reader = made.open((await made.shards(stack))[number], state, BUDGET)
        first += await rest_of(reader)
        await reader.aclose()
    return first


@asynccontextmanager
async def listed(
    database: Database, table: str = "t", **options: Any
) -> AsyncIterator[SQLRows]:
    made = await SQLRows.discover(database.url, table, **{"key": "id", **options})
    async with made:
        yield made
