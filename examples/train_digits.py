"""Train a small CNN on real digit scans, streamed as PNG objects from a store.

Run it with ``make demo``, or with ``--url s3://bucket/digits`` on a real store.
"""

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

from aioloader import DataLoader, progress
from aioloader.datasets import ObjectDataset


async def write_once(url: str) -> None:
    """Write the 1,797 scans as PNG objects named by split, number and label."""
    store = obstore.store.from_url(url)
    if list(obstore.list(store, "test", chunk_size=1)):
        return
    scans, labels = load_digits(return_X_y=True)
    for number, (scan, label) in enumerate(zip(scans, labels, strict=True)):
        png = io.BytesIO()
        Image.fromarray((scan.reshape(8, 8) * 15.9).astype("u1")).save(png, "PNG")
        split = "train" if number % 5 else "test"
        key = f"{split}/{number:04d}-{label}.png"
        await obstore.put_async(store, key, png.getvalue())


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Turn one object into a float tensor of shape (1, 8, 8), and its label."""
    pixels = np.array(Image.open(io.BytesIO(sample["png"])), dtype=np.float32)
    return torch.from_numpy(pixels)[None] / 255, sample["label"]


async def make_loader(url: str, split: str, **options: Any) -> DataLoader[Any]:
    """Return a loader of one split: the objects, with the labels from their names."""
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


def draw(losses: list[float], path: Path) -> None:
    """Draw the loss of each step as a line in an SVG file."""
    top, last = max(losses), len(losses) - 1
    points = (
        f"{600 * i / last:.1f},{300 - 300 * y / top:.1f}" for i, y in enumerate(losses)
    )
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-60 -40 680 380">'
        '<rect x="-60" y="-40" width="680" height="380" fill="white"/>'
        '<path d="M0 0V300H600" fill="none" stroke="gray"/>'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="steelblue"/>'
        f'<text x="-8" y="5" text-anchor="end">{top:.2f}</text>'
        '<text x="-8" y="305" text-anchor="end">0</text>'
        f'<text x="600" y="320" text-anchor="end">step {last}</text>'
        '<text x="300" y="-15" text-anchor="middle">training loss</text></svg>'
    )


async def train(url: str, epochs: int, picture: Path, device: str = "cpu") -> float:
    """Train, print a line per epoch and the verdict; return the last test accuracy."""
    torch.manual_seed(0)
    await write_once(url)
    batches = await make_loader(url, "train", shuffle=True, device=device)
    tests = await make_loader(url, "test", device=device)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    accuracy, losses = 0.0, []
    async with batches, tests:
        for epoch in range(epochs):
            began, samples = time.perf_counter(), 0
            bar = progress(batches, desc=f"epoch {epoch}", leave=False)
            async for images, labels in bar:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())
                samples += len(labels)
            seconds = time.perf_counter() - began
            right = [(model(x).argmax(1) == y).float() async for x, y in tests]
            accuracy = torch.cat(right).mean().item()
            print(
                f"epoch {epoch:2}  loss {losses[-1]:.4f}  test accuracy {accuracy:.4f}"
                f"  {samples / seconds:5.0f} samples/s"
                f"  waited for data {batches.stats().waited / seconds:.1%} of the time"
            )
        print(batches.report())
    draw(torch.stack(losses).tolist(), picture)
    print("the loss curve:", picture)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a store, such as s3://bucket/digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    options = parser.parse_args()
    data = Path(__file__).parent / "data"  # git ignores it
    (data / "digits").mkdir(parents=True, exist_ok=True)
    url = options.url or (data / "digits").as_uri()
    device = choose_device(options.device)
    asyncio.run(train(url, options.epochs, data / "loss.svg", device))
