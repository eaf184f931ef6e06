"""Parts that several recipes share: shards of digits, a model, and torchrun.

It is not run by itself: other examples import it.
"""

import os
import subprocess
import sys

import numpy as np
import torch
from torch import nn

from aioloader.datasets import TarWriter


async def write_digits(destination: str) -> None:
    """Write 1,797 scans as JPEGs, with labels and numbers, to seven shards."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (ranks do not need it)

    scans, labels = load_digits(return_X_y=True)
    async with TarWriter(destination, "train", shard_samples=257) as writer:
        for number in range(writer.next_sample, len(scans)):
            pixels = np.kron(scans[number].reshape(8, 8), np.full((4, 4), 15.9))
            sample = {"jpg": pixels.astype("u1"), "cls": labels[number], "id": number}
            await writer.write(sample)


class Residual(nn.Sequential):
    """Layers with a shortcut around them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape."""
        return torch.relu(x + super().forward(x))  # type: ignore[no-untyped-call]


def small_resnet() -> nn.Module:
    """Return a network of two residual blocks for images of one channel."""
    layers: list[nn.Module] = []
    for inputs, width in (1, 16), (16, 32):
        first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        block = Residual(first, nn.BatchNorm2d(width), nn.ReLU(), second)
        layers += [nn.Conv2d(inputs, width, 3, stride=2, padding=1), block]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*layers, *head)


def torchrun(ranks: int, *command: str, terminate_after: str = "") -> None:
    """Run a script on several ranks; terminate it after it prints a line, if given."""
    options = "--standalone", f"--nproc-per-node={ranks}"
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *command],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.strip() == terminate_after:
                process.terminate()  # SIGTERM, which torchrun sends to all ranks
    if process.returncode and not terminate_after:
        sys.exit(process.returncode)
