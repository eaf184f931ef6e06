"""Train a small CNN on real digit scans, streamed as PNG objects from a store."""

import argparse
import asyncio
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import StackDataset
from tqdm.asyncio import tqdm

from aioloader import DataLoader
from aioloader.datasets import ObjectDataset


async def write_once(url: str) -> None:
    """Write the 1,797 scans as PNG objects named by split, number and label."""
    store = obstore.store.from_url(url)
    if list(obstore.list(store, "test", chunk_size=1)):
        return
    for number, (scan, label) in enumerate(zip(*load_digits(return_X_y=True))):  # noqa: B905
        image, png = (
            Image.fromarray((scan.reshape(8, 8) * 15.9).astype("u1")),
            io.BytesIO(),
        )
        image.save(png, "PNG")
        split = "train" if number % 5 else "test"
        await obstore.put_async(
            store, f"{split}/{number:04d}-{label}.png", png.getvalue()
        )


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Turn one object into a float tensor of shape (1, 8, 8), and its label."""
    pixels = np.array(Image.open(io.BytesIO(sample["png"])), dtype=np.float32)
    return torch.from_numpy(pixels)[None] / 255, sample["label"]


async def make_loader(url: str, split: str, **options: Any) -> DataLoader[Any]:
    """Return batches of one split: the objects, and the labels in their names."""
    objects = await ObjectDataset.discover(url, prefix=split)
    labels = [int(key[-5]) for key in objects.keys]
    dataset = StackDataset(png=objects, label=labels)  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=64, transform=decode, **options)


def choose_device(wanted: str) -> str:
    """Return the wanted device, or print why the CPU is used instead."""
    kind = torch.device(wanted).type
    if kind == "cpu" or torch.get_device_module(kind).is_available():
        return wanted
    print(f"no {kind} device here: training on the CPU instead of {wanted!r}")
    return "cpu"


async def train(url: str, epochs: int, device: str = "cpu") -> float:
    """Train, print a line per epoch, and return the last test accuracy."""
    torch.manual_seed(0)
    await write_once(url)
    batches = await make_loader(url, "train", shuffle=True, device=device)
    tests = await make_loader(url, "test", device=device)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    accuracy = 0.0
    async with batches, tests:
        for epoch in range(epochs):
            began, samples, loss = time.perf_counter(), 0, torch.zeros(())
            bar = tqdm(
                aiter(batches),
                f"epoch {epoch}",
                len(batches),
                leave=False,
                disable=None,
            )
            async for images, labels in bar:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                samples += len(labels)
            seconds = time.perf_counter() - began
            right = [(model(x).argmax(1) == y).float() async for x, y in tests]
            accuracy = torch.cat(right).mean().item()
            print(
                f"epoch {epoch:2}  loss {loss.item():.4f}  test accuracy {accuracy:.4f}"
                f"  {samples / seconds:5.0f} samples/s"
                f"  waited for data {batches.stats().waited / seconds:.1%} of the time"
            )
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a store, such as s3://bucket/digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    options = parser.parse_args()
    local = Path(__file__).parent / "data" / "digits"
    local.mkdir(parents=True, exist_ok=True)
    device = choose_device(options.device)
    asyncio.run(train(options.url or local.as_uri(), options.epochs, device))
