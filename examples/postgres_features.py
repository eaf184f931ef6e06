"""Turn rows of PostgreSQL into features: arrays, JSONB and vectors of pgvector.

Run it with ``python examples/postgres_features.py postgresql://user@host/name``, which
makes a table; it stops after some batches, and a second loader resumes there.
"""

import argparse
import asyncio
import json
from typing import Any

import asyncpg
import torch

from aioloader import DataLoader
from aioloader.datasets import SQLDataset

TABLE = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE IF NOT EXISTS products (
    id INT PRIMARY KEY, prices FLOAT4[], details JSONB, embedding vector(8)
);
INSERT INTO products
SELECT n, ARRAY(SELECT n + day FROM generate_series(1, 1 + n % 7) day),
    jsonb_build_object('stars', n % 5, 'tags', jsonb_build_array('red', 'new')),
    array_fill(n, ARRAY[8])::vector
FROM generate_series(1, 5000) n ON CONFLICT DO NOTHING;
"""
DAYS, TAGS = 7, ["new", "red", "sale"]


def features(row: dict[str, Any]) -> dict[str, Any]:
    """Convert one row to tensors: padded prices, tags as zeros and ones."""
    prices = torch.as_tensor(row["prices"])
    details = json.loads(row["details"])
    return {
        "id": row["id"],
        "prices": torch.nn.functional.pad(prices, (0, DAYS - len(prices))),
        "stars": float(details["stars"]),
        "tags": torch.tensor([float(tag in details["tags"]) for tag in TAGS]),
        "embedding": torch.as_tensor(row["embedding"]),
    }


def make_loader(url: str) -> DataLoader[Any]:
    """Stream the whole table, shuffled, in one snapshot."""
    rows = SQLDataset(url, "products", key="id", shuffle=True, interleave=4)
    return DataLoader(rows.shuffle(512), batch_size=64, transform=features)


async def main(url: str) -> None:
    """Read a part of the table, save the position, and read the rest."""
    connection = await asyncpg.connect(url)
    await connection.execute(TABLE)
    await connection.close()
    seen: list[int] = []
    state: dict[str, Any] = {}
    async with make_loader(url) as loader:
        async for batch in loader:
            seen += batch["id"].tolist()
            if len(seen) == 1280:
                state = loader.state_dict()
                break
    print({name: tuple(column.shape) for name, column in batch.items()})
    async with make_loader(url) as loader:
        loader.load_state_dict(state)
        async for batch in loader:
            seen += batch["id"].tolist()
    print(f"{len(seen)} rows, {len(set(seen))} of them different")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="postgresql://user@host/name")
    asyncio.run(main(parser.parse_args().url))
