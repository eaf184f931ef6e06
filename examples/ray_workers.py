"""Augment scanned digits on Ray actors: the same batches as without workers.

Run it with ``python examples/ray_workers.py``, which starts a cluster on this machine,
or with the address of a cluster (``auto`` on one of its nodes).
"""

import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from aioloader import DataLoader, RayWorkers, get_worker_info


class Digits:
    """Scans of 8 x 8 pixels, enlarged, with a new shift and noise each time."""

    def __init__(self) -> None:
        self.images = load_digits().images.astype(np.float32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        large = np.kron(self.images[index], np.ones((8, 8), np.float32))
        shifted = np.roll(large, np.random.randint(-4, 5, 2), (0, 1))
        info = get_worker_info()
        who = "this process" if info is None else f"worker {info.id}"
        return shifted + np.random.normal(0, 0.5, shifted.shape), who


def epochs(count: int, **options: Any) -> list[torch.Tensor]:
    """Return all images of some epochs, and print which workers made them."""
    found = []
    generator = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(
        Digits(), batch_size=128, shuffle=True, generator=generator, **options
    )
    with loader:
        for epoch in range(count):
            batches = list(loader)
            makers = sorted({maker for _, makers in batches for maker in makers})
            found.append(torch.cat([images for images, _ in batches]))
            print(f"epoch {epoch}: {len(found[-1])} images by {', '.join(makers)}")
    return found


address = sys.argv[1] if len(sys.argv) > 1 else None
there = epochs(1, workers=RayWorkers(2, address=address))
here = epochs(1, rng="batch")
print("the same images:", torch.equal(there[0], here[0]))
