"""Pack a folder of images with ``aioloader pack``, and train from the shards.

Run it with ``python examples/pack_pictures.py``, which writes the images first.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from image_folder import write_folders
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import TarDataset


def pack(pictures: Path, shards: Path) -> None:
    """Run the command; a second run resumes after the last complete shard."""
    command = [sys.executable, "-m", "aioloader", "pack", str(pictures), str(shards)]
    options = ["--class-folders", "--shuffle", "0", "--shard-size", "512KB"]
    subprocess.run([*command, *options], check=True)


def train(shards: Path, epochs: int) -> float:
    """Train on all shards, print a line per epoch, and return the last accuracy."""
    torch.manual_seed(0)
    samples = TarDataset(f"{shards}/shard-*.tar", shuffle=True, interleave=4)
    loader: Any = DataLoader(samples.shuffle(512).decode("torchl"), batch_size=64)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
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
    """Write the images to a directory, pack and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures, shards = Path(folder, "pictures"), Path(folder, "shards")
        write_folders(pictures)
        pack(pictures, shards)
        train(shards, arguments.epochs)


if __name__ == "__main__":
    main()
