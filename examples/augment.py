"""Augment images with Albumentations: the same crops for any number of workers.

Run it with ``python examples/augment.py``; it needs ``pip install albumentations``.
"""

import asyncio
import io
import tempfile
from pathlib import Path

import albumentations as A  # noqa: N812  (as everyone imports it)
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from sklearn.datasets import load_sample_images

from aioloader import DataLoader, get_worker_info
from aioloader.datasets import FileDataset

FILES, BATCH = 128, 32
AUGMENT = A.Compose(
    [
        A.RandomResizedCrop((96, 96), scale=(0.2, 1.0)),
        A.HorizontalFlip(),
        A.ColorJitter(),
        A.Normalize(),
        ToTensorV2(),
    ]
)


def write_images(folder: Path) -> None:
    """Write scikit-learn's two photographs many times, as small JPEG files."""
    images = [pixels[::2, ::2] for pixels in load_sample_images().images]
    for number in range(FILES):
        picture = Image.fromarray(images[number % 2])
        picture.save(folder / f"{number:03}.jpg", quality=90)


def augment(data: bytes) -> torch.Tensor:
    """Decode a file, and augment it with the random numbers of its sample."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    worker = get_worker_info()
    assert worker is not None  # this loader has workers
    AUGMENT.set_random_state(worker.rng.numpy, worker.rng.random)
    tensor: torch.Tensor = AUGMENT(image=pixels)["image"]
    return tensor


async def epoch(folder: str, num_workers: int) -> torch.Tensor:
    """Return all crops of an epoch, made with ``num_workers`` workers."""
    loader = DataLoader(
        FileDataset("*.jpg", root=folder),
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        transform=augment,
        generator=torch.Generator().manual_seed(0),
        rng="sample",
    )
    crops = torch.cat([batch.clone() async for batch in loader])
    print(f"{num_workers} workers: crops {tuple(crops.shape)}, mean {crops.mean():.6f}")
    return crops


with tempfile.TemporaryDirectory() as folder:
    write_images(Path(folder))
    one, two = (asyncio.run(epoch(folder, number)) for number in (1, 2))
    print("the same crops:", torch.equal(one, two))
