"""Frameworks move batches themselves, but not those already on the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = """
from device import fake_accelerator
fake_accelerator.begin()
import torch
from accelerate.utils import send_to_device
from lightning.fabric.utilities import move_data_to_device
from aioloader import DataLoader

class Pictures:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        picture = torch.full((3, 200, 200), index, dtype=torch.uint8)
        return {"picture": picture, "index": index}

device = torch.device("fake", 0)
for number, batch in enumerate(DataLoader(Pictures(), 4, device=device)):
    sent = send_to_device(batch, device, non_blocking=True)
    moved = move_data_to_device(batch, device)
    for name, tensor in batch.items():
        assert tensor.device == device
        assert sent[name] is tensor and moved[name] is tensor
print(number)
"""


def test_frameworks_do_not_move_batches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate and Lightning return the same tensors."""
    monkeypatch.syspath_prepend(TESTS)
    from device import fake_accelerator

    if missing := fake_accelerator.missing():
        pytest.skip(missing)
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
