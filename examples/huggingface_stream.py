"""Train on a stream of Hugging Face ``datasets``; stop in mid-epoch, resume exactly.

Run it with ``python examples/huggingface_stream.py``, which writes scanned digits as
Parquet first. It needs ``datasets`` and ``scikit-learn``.

``from_iterable`` calls the dataset's ``set_epoch`` with the number of each epoch. On
resume, it reads the epoch's earlier samples again, to refill the shuffle buffer.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from datasets import Dataset, disable_progress_bars, load_dataset


def noisy(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Convert a row to tensors, and add noise; runs in a worker process."""
    pixels = torch.tensor(row["pixels"]) / 16
    return pixels + torch.randn(64) / 10, row["label"]


def train(folder: str, path: Path, steps: int) -> list[float]:
    """Train from the checkpoint, if there is one; return the losses of all steps."""
    torch.manual_seed(0)
    files = f"{folder}/*.parquet"
    scans = load_dataset("parquet", data_files=files, split="train", streaming=True)
    scans = scans.shuffle(seed=0, buffer_size=500)
    loader: Any = DataLoader(
        from_iterable(scans), batch_size=64, transform=noisy, num_workers=2
    )
    model, losses = nn.Linear(64, 10), list[float]()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    if path.exists():
        *saved, losses = torch.load(path)
        for part, state in zip((model, adam, loader), saved, strict=True):
            part.load_state_dict(state)
        print(f"resumed after step {len(losses)}")
    while True:
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            losses.append(loss.item())
            if len(losses) % 20 == 0:
                print(f"step {len(losses)}, epoch {scans.epoch}: loss {losses[-1]:.3f}")
                states = [part.state_dict() for part in (model, adam, loader)]
                torch.save([*states, losses], path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)  # atomic
            if len(losses) == steps:
                return losses


if __name__ == "__main__":
    disable_progress_bars()
    pixels, labels = load_digits(return_X_y=True)
    scans = Dataset.from_dict({"pixels": pixels.astype("f4"), "label": labels})
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(8):
            scans.shard(8, shard).to_parquet(f"{folder}/{shard}.parquet")
        whole = train(folder, Path(folder, "whole.pt"), 80)
        train(folder, Path(folder, "stopped.pt"), 50)
        resumed = train(folder, Path(folder, "stopped.pt"), 80)
    print("the same losses after the stop:", whole == resumed)
