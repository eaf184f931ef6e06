"""Kill a training run in mid-epoch and resume it: the losses are as if never killed.

Run it with ``python examples/resume.py``, which starts and kills the training itself.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from aioloader import DataLoader


def noisy(scan: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Add noise; runs in a worker process."""
    return scan[0].float() / 16 + torch.randn(64) / 10, scan[1]


def train(path: Path) -> None:
    """Train from the checkpoint, if there is one; print the number of each step."""
    torch.manual_seed(0)
    scans = TensorDataset(*map(torch.from_numpy, load_digits(return_X_y=True)))
    draws = torch.Generator()  # saved with the loader, so later epochs agree too
    loader: Any = DataLoader(
        scans, 64, shuffle=True, num_workers=2, generator=draws, transform=noisy
    )
    model = torch.nn.Linear(64, 10)
    adam, losses = torch.optim.Adam(model.parameters()), []
    if path.exists():
        *saved, losses = torch.load(path)
        for part, state in zip((model, adam, loader), saved, strict=True):
            part.load_state_dict(state)
    while loader.state_dict()["epoch"] < 3:
        for images, digits in loader:
            loss = torch.nn.functional.cross_entropy(model(images), digits)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            losses.append(loss.item())
            states = [part.state_dict() for part in (model, adam, loader)]
            torch.save([*states, losses], path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # atomic: a kill leaves a whole file
            print(len(losses), flush=True)


if sys.argv[1:]:
    sys.exit(train(Path(sys.argv[1])))  # type: ignore[func-returns-value]
curves = []
with tempfile.TemporaryDirectory() as folder:
    for name, last in ("whole", None), ("killed", 41), ("killed", None):
        command = [sys.executable, __file__, f"{folder}/{name}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for step in process.stdout or ():
                if int(step) == last:
                    process.kill()
        curves.append(torch.load(command[-1])[-1])
print(*map(len, curves), "losses saved; the same:", curves[0] == curves[2])
sys.exit(curves[0] != curves[2])
