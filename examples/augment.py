"""Augment photographs in worker processes: the same crops for any number of workers.

Run it with ``python examples/augment.py``; it needs no ``if __name__ == "__main__"``.
"""

import asyncio
import io
import random
import time

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from aioloader import DataLoader, warm_up

CROPS, BATCH, SIDE = 512, 32, 96


def photographs() -> list[bytes]:
    """Return scikit-learn's two photographs, as JPEG files."""
    files = []
    for pixels in load_sample_images().images:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


class Crops:
    """Random crops of photographs, decoded again each time."""

    def __init__(self) -> None:
        self.files = photographs()

    def __len__(self) -> int:
        return CROPS

    def __getitem__(self, index: int) -> np.ndarray:
        picture = Image.open(io.BytesIO(self.files[index % len(self.files)]))
        left, top = random.randrange(picture.width // 2), random.randrange(200)
        box = (left, top, left + 200, top + 200)
        return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), box=box))


async def epoch(num_workers: int) -> torch.Tensor:
    """Return all crops of an epoch, made with ``num_workers`` workers."""
    loader = DataLoader(
        Crops(),
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
        rng="batch",
    )
    start = time.perf_counter()
    batches = [batch.clone() async for batch in loader]
    rate = CROPS / (time.perf_counter() - start)
    print(f"{num_workers} workers: {rate:,.0f} crops per second")
    return torch.cat(batches)


warm_up()  # import torch in the workers' parent, before the clock starts
one, two = asyncio.run(epoch(1)), asyncio.run(epoch(2))
print("the same crops:", torch.equal(one, two))
