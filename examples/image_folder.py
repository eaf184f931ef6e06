"""Train on images in a folder per class, decoded in worker processes.

Run it with ``python examples/image_folder.py``, which writes the images first.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import Decoder, FileDataset


def write_folders(root: Path) -> None:
    """Write the 1,797 scans as PNG files, in a folder for each digit."""
    scans, labels = load_digits(return_X_y=True)
    for number, (scan, label) in enumerate(zip(scans, labels, strict=True)):
        path = root / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan.reshape(8, 8) * 15.9).astype("u1")).save(path)


def train(root: Path, epochs: int) -> float:
    """Train on all images, print a line per epoch, and return the last accuracy."""
    torch.manual_seed(0)
    pictures = FileDataset("**/*", root=root).class_folders()
    loader: Any = DataLoader(
        pictures,  # (bytes, label), in torchvision's ImageFolder order
        batch_size=64,
        shuffle=True,
        transform=Decoder("torchl"),
        num_workers=2,
        persistent_workers=True,
    )
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, len(pictures.classes))
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    with loader:
        for epoch in range(epochs):
            right = 0
            for images, labels in loader:
                scores = model(images)
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                right += int((scores.argmax(1) == labels).sum())
            accuracy = right / len(pictures)
            print(f"epoch {epoch}: {len(pictures)} samples, accuracy {accuracy:.3f}")
    return accuracy


def main() -> None:
    """Write the images to a directory, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        write_folders(Path(folder))
        train(Path(folder), parser.parse_args().epochs)


if __name__ == "__main__":
    main()
