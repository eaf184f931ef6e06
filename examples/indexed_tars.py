"""Shuffle tars in a bucket exactly, with single requests and with blocks of neighbors.

Run it with ``python examples/indexed_tars.py``, which serves a bucket with seven tars.
"""

import asyncio
from typing import Any

import torch
from moto_server import bucket
from recipe_parts import write_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import Decoder, IndexedDataset, TarDataset

PACK = "s3://digits/train.aioidx"


class Training:
    """A small network, and the numbers of the samples that it saw in this epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)
        self.model = nn.Sequential(nn.Flatten(), *layers)
        self.adam = torch.optim.Adam(self.model.parameters(), 3e-3)
        self.seen: list[int] = []
        self.right = 0

    async def run(self, loader: DataLoader[Any], name: str, steps: int = 0) -> None:
        """Train on the rest of an epoch, or for some steps of it."""
        async for batch in loader:
            scores, labels = self.model(batch["jpg"]), batch["cls"]
            self.adam.zero_grad()
            nn.functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
            self.adam.step()
            self.seen += map(int, batch["id"])
            self.right += int((scores.argmax(1) == labels).sum())
            steps -= 1
            if not steps:
                return
        count, is_exact = len(self.seen), sorted(self.seen) == [*range(len(self.seen))]
        accuracy = self.right / count
        print(f"{name}: {count}, each once: {is_exact}, accuracy {accuracy:.3f}")
        self.seen, self.right = [], 0


def make_loader(shards: IndexedDataset, **order: Any) -> DataLoader[Any]:
    """Return a loader with many requests in flight."""
    return DataLoader(shards, 64, transform=Decoder("torchl"), concurrency=256, **order)


async def main() -> None:
    """Index the tars, and train: with a full shuffle, with blocks, and resumed."""
    await write_digits("s3://digits")
    tars = TarDataset("s3://digits/train-*.tar")
    # TarWriter has written an index next to each tar; a pack is one index for all.
    await (await IndexedDataset.discover(tars)).save(PACK)
    shards = await IndexedDataset.discover(tars, pack=PACK)
    training = Training()
    await training.run(make_loader(shards, shuffle=True), "all shuffled")
    order = shards.shuffled(block=16, window=1024)
    await training.run(make_loader(shards, sampler=order), "by blocks")
    stopped = make_loader(shards, sampler=shards.shuffled(seed=1))
    await training.run(stopped, "stopped", steps=10)
    resumed = make_loader(shards, sampler=shards.shuffled(seed=1))
    resumed.load_state_dict(stopped.state_dict())
    await training.run(resumed, "resumed after 10 batches")


if __name__ == "__main__":
    with bucket("digits"):
        asyncio.run(main())
