"""Train on several ranks: each gets its share of every batch, and a mask for padding.

Run it with ``torchrun --nproc-per-node 2 examples/ddp.py``.
"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (loaded after init, it keeps the group)
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from aioloader import DataLoader

EPOCHS, BATCH = 4, 64


def train() -> None:
    """Train; check that all ranks together saw every scan once in each epoch."""
    torch.manual_seed(0)
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    scans = TensorDataset(pixels.float() / 16, labels, torch.arange(len(labels)))
    loader = DataLoader(scans, BATCH, shuffle=True, rank="auto", tail="pad")
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        seen, total = torch.zeros(len(scans), dtype=torch.int64), torch.zeros(())
        for (images, digits, numbers), mask in loader:
            losses = nn.functional.cross_entropy(
                model(images), digits, reduction="none"
            )
            loss = (losses * mask).sum() / BATCH  # ranks' gradients are averaged
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.bincount(numbers[mask], minlength=len(scans))
            total += loss.detach() * BATCH
        dist.all_reduce(seen)
        dist.all_reduce(total)
        if not torch.equal(seen, torch.ones_like(seen)):
            raise SystemExit("a scan was lost or repeated")
        if dist.get_rank() == 0:
            world = f"{seen.sum()} scans once, on {dist.get_world_size()} ranks"
            print(f"epoch {epoch}: {world}, loss {total / len(scans):.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        gc.collect()  # the model's reference cycles keep the group's threads alive
        dist.destroy_process_group()
