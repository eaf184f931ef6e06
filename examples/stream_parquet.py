"""Train from Parquet: columns become tensors, without creating rows in Python.

Run it with ``python examples/stream_parquet.py``, which writes the files first.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import ParquetDataset


def write_files(folder: Path) -> None:
    """Write the 1,797 scans: 64 pixels in one column, the label in another."""
    pixels, labels = load_digits(return_X_y=True)
    column = pa.FixedSizeListArray.from_arrays(pixels.astype("f4").ravel(), 64)
    table = pa.table({"pixels": column, "label": labels, "note": ["-"] * len(labels)})
    for number, start in enumerate(range(0, len(labels), 300)):
        part = table.slice(start, 300)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=100)


async def train(folder: Path, epochs: int) -> float:
    """Train on all row groups, print a line per epoch, and return the accuracy."""
    torch.manual_seed(0)
    rows = ParquetDataset(
        f"{folder}/*.parquet", ["pixels", "label"], shuffle=True, interleave=4
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    async with DataLoader(rows.shuffle(512), batch_size=64) as loader:
        for epoch in range(epochs):
            right = seen = 0
            async for batch in loader:
                scores = model(batch["pixels"] / 16)
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, batch["label"]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                right += int((scores.argmax(1) == batch["label"]).sum())
                seen += len(scores)
            accuracy = right / seen
            print(f"epoch {epoch}: {seen} rows, accuracy {accuracy:.3f}")
    return accuracy


def main() -> None:
    """Train on files in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        asyncio.run(train(Path(folder), parser.parse_args().epochs))


if __name__ == "__main__":
    main()
