"""Train from tar shards in an S3 bucket: interleaved, shuffled, decoded in workers."""

import argparse
import io
import tarfile
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from moto_server import bucket
from obstore.store import S3Store
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import TarDataset

SHARDS, BUCKET = 8, "digits"


def write_shards(store: S3Store) -> None:
    """Write the 1,797 scans as PNG members of eight shards, in WebDataset's layout."""
    scans, labels = load_digits(return_X_y=True)
    for shard in range(SHARDS):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for number in range(shard, len(scans), SHARDS):
                png = io.BytesIO()
                pixels = (scans[number].reshape(8, 8) * 15.9).astype("u1")
                Image.fromarray(pixels).save(png, "PNG")
                fields = {"png": png.getvalue(), "cls": str(labels[number]).encode()}
                for field, body in fields.items():
                    member = tarfile.TarInfo(f"{number:04d}.{field}")
                    member.size = len(body)
                    tar.addfile(member, io.BytesIO(body))
        store.put(f"train-{shard:03d}.tar", data.getvalue())


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Turn a sample's members into a float tensor of shape (1, 8, 8) and a label."""
    pixels = np.array(Image.open(io.BytesIO(sample["png"])), dtype=np.float32)
    return torch.from_numpy(pixels)[None] / 255, int(sample["cls"])


def train(epochs: int, access: dict[str, Any]) -> float:
    """Train on all shards, print a line per epoch, and return the last accuracy."""
    torch.manual_seed(0)
    addresses = f"s3://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar"
    shards = TarDataset(addresses, store_options=access, shuffle=True, interleave=4)
    loader: Any = DataLoader(
        shards.shuffle(512),
        batch_size=64,
        transform=decode,
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
            for images, labels in loader:
                scores = model(images)
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
        access: dict[str, Any] = {"endpoint": endpoint, "region": "us-east-1"}
        write_shards(S3Store(BUCKET, client_options={"allow_http": True}, **access))
        train(arguments.epochs, access)


if __name__ == "__main__":
    main()
