"""A loader's state in torch.distributed.checkpoint, which restores known keys only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from aioloader.errors import StateMismatchError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (unavailable|disabled)"
)


class Training:
    """A model and a loader that are saved together, as README tells."""

    def __init__(self, loader: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: the loader's state as one value."""
        return {
            "model": self.model.state_dict(),
            "loader": json.dumps(self.loader.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.model.load_state_dict(state["model"])
        self.loader.load_state_dict(json.loads(state["loader"]))


def shuffled() -> Any:
    """Return a loader that draws from a generator."""
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(23), 3, shuffle=True, generator=generator)


def streamed() -> Any:
    """Return a loader of a stream that is shuffled."""
    return DataLoader(from_iterable(range(23)).shuffle(9), 3)


@pytest.mark.parametrize("make", [shuffled, streamed])
def test_a_checkpoint(make: Any, tmp_path: Path) -> None:
    """The rest is the same, and so is the model."""
    training = Training(make())
    iterator = iter(training.loader)
    for _ in range(4):
        next(iterator)
    save({"training": training}, checkpoint_id=tmp_path, no_dist=True)
    rest = [batch.tolist() for batch in iterator]
    again = Training(make())
    load({"training": again}, checkpoint_id=tmp_path, no_dist=True)
    assert [batch.tolist() for batch in again.loader] == rest
    assert torch.equal(again.model.weight, training.model.weight)


def test_a_part_of_a_state(tmp_path: Path) -> None:
    """Given as a mapping, only the keys of a fresh loader come back: refused."""
    one, other = (DataLoader(range(23), 3, shuffle=True) for _ in "ab")
    next(iter(one))
    save({"loader": one}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(StateMismatchError, match="only a part of it"):
        load({"loader": other}, checkpoint_id=tmp_path, no_dist=True)
