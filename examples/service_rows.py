"""Stream rows inside an async service, through its own connection pool.

Run it with ``python examples/service_rows.py postgresql://user@host/name``.
"""

import argparse
import asyncio
from typing import Any

import asyncpg

from aioloader import DataLoader
from aioloader.datasets import SQLRows


async def mean_score(pool: asyncpg.Pool, table: str = "scores") -> float:
    """Average a column: shuffled batches of rows, one query each, on the current loop.

    Other requests of the service continue, with connections of the same pool.
    """
    rows = await SQLRows.discover(pool, table, key="id", columns=["id", "score"])
    loader: Any = DataLoader(rows, batch_size=100, shuffle=True, loop="caller")
    total = seen = 0.0
    async for batch in loader:
        total += float(batch["score"].sum())
        seen += len(batch["score"])
    return total / seen


async def serve(url: str) -> None:
    """Compute the mean as for a request, and answer other requests meanwhile."""
    async with asyncpg.create_pool(url, min_size=2) as pool:
        await pool.execute(
            "CREATE TABLE IF NOT EXISTS scores (id INT PRIMARY KEY, score FLOAT8)"
        )
        await pool.execute(
            "INSERT INTO scores SELECT n, n / 10.0 FROM generate_series(1, 5000) n "
            "ON CONFLICT DO NOTHING"
        )
        mean = asyncio.create_task(mean_score(pool))
        answers = 0
        while not mean.done():
            await pool.fetchval("SELECT 1")
            answers += 1
        print(f"mean {await mean:.2f}; answered {answers} other requests meanwhile")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="postgresql://user@host/name")
    asyncio.run(serve(parser.parse_args().url))
