"""Train from tar shards in an S3 bucket: interleaved, shuffled, decoded in workers.

Run it with ``python examples/stream_tar.py``, which starts moto's server, or with
``--endpoint`` of a store that has the bucket ``digits``.
"""

import argparse
import asyncio
from contextlib import ExitStack
from typing import Any

import torch
from moto_server import bucket
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import Decoder, TarDataset, TarWriter

BUCKET = "digits"


async def write_shards(access: dict[str, Any]) -> None:
    """Write the 1,797 scans as PNG members of eight shards, in WebDataset's layout."""
    scans, labels = load_digits(return_X_y=True)
    async with TarWriter(
        f"s3://{BUCKET}", "train", shard_samples=225, store_options=access
    ) as writer:
        for number in range(writer.next_sample, len(scans)):
            pixels = (scans[number].reshape(8, 8) * 15.9).astype("u1")
            await writer.write({"png": pixels, "cls": labels[number]})


def train(epochs: int, access: dict[str, Any]) -> float:
    """Train on all shards, print a line per epoch, and return the last accuracy."""
    torch.manual_seed(0)
    addresses = f"s3://{BUCKET}/train-{{000000..000007}}.tar"
    shards = TarDataset(addresses, store_options=access, shuffle=True, interleave=4)
    loader: Any = DataLoader(
        shards.shuffle(512),
        batch_size=64,
        transform=Decoder("torchl"),
        num_workers=2,
        persistent_workers=True,
    )
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    with loader:
        for epoch in range(epochs):
            right = seen = 0
            for batch in loader:
                scores, labels = model(batch["png"]), batch["cls"]
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                right += int((scores.argmax(1) == labels).sum())
                seen += len(labels)
            accuracy = right / seen
            print(f"epoch {epoch}: {seen} samples, accuracy {accuracy:.3f}")
    return accuracy


def main() -> None:
    """Use the bucket of an endpoint, or of a server started here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="default: moto's server, on loopback")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        endpoint = arguments.endpoint or stack.enter_context(bucket(BUCKET))
        access = {"endpoint": endpoint, "region": "us-east-1"}
        asyncio.run(write_shards(access))
        train(arguments.epochs, access)


if __name__ == "__main__":
    main()
