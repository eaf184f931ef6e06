"""Train from a database, SQLite or PostgreSQL, in one snapshot.

Run it with ``python examples/stream_sql.py``, which makes a SQLite file, or with
``--url postgresql://user@host/name``.
"""

import argparse
import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import SQLDataset

FEATURES = [f"p{number}" for number in range(64)]


def write_table(path: Path) -> None:
    """Write the 1,797 scans, a column for each pixel."""
    pixels, labels = load_digits(return_X_y=True)
    columns = ", ".join(f"{name} REAL" for name in FEATURES)
    marks = ", ".join("?" * 66)
    rows = [[n, int(labels[n]), *pixels[n]] for n in range(len(labels))]
    with closing(sqlite3.connect(path)) as database:
        table = f"digits (id INTEGER PRIMARY KEY, y INT, {columns})"
        database.execute(f"CREATE TABLE {table}")
        database.executemany(f"INSERT INTO digits VALUES ({marks})", rows)
        database.commit()


async def train(url: str, epochs: int) -> float:
    """Train on the table, print a line per epoch, and return the accuracy."""
    torch.manual_seed(0)
    rows = SQLDataset(url, "digits", key="id", shuffle=True, interleave=4)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    async with DataLoader(rows.shuffle(512), batch_size=64) as loader:
        for epoch in range(epochs):
            right = seen = 0
            async for batch in loader:
                pixels = torch.stack([batch[name] for name in FEATURES], 1).float()
                scores = model(pixels / 16)
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, batch["y"]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                right += int((scores.argmax(1) == batch["y"]).sum())
                seen += len(scores)
            accuracy = right / seen
            print(f"epoch {epoch}: {seen} rows, accuracy {accuracy:.3f}")
    return accuracy


def main() -> None:
    """Train on your own database, or on one in a temporary file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="URL of a database with a table 'digits'")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.db"
        if not arguments.url:
            write_table(path)
        url = arguments.url or f"sqlite:///{path}"
        asyncio.run(train(url, arguments.epochs))


if __name__ == "__main__":
    main()
