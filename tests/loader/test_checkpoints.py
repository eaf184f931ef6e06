"""A loader's state in torch.distributed.checkpoint, which restores known keys only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import Dataset

from aioloader import DataLoader
from aioloader.datasets import from_iterable

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (unavailable|disabled)"
)


class Counting(Dataset[int]):
    """Its state has other keys with each sample, and a tensor."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.read[str(index)] = torch.tensor(index)
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def shuffled() -> Any:
    """Return a loader that draws from a generator."""
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(23), 3, shuffle=True, generator=generator)


def streamed() -> Any:
    """Return a loader of a stream that is shuffled."""
    return DataLoader(from_iterable(range(23)).shuffle(9), 3)


def counted() -> Any:
    """Return a loader of a dataset with a state, read in workers."""
    return DataLoader(Counting(), 3, num_workers=2)


def fresh() -> Any:
    """Return a loader whose order is drawn from no generator of ours."""
    return DataLoader(range(23), 3, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 4, 8, 9])
@pytest.mark.parametrize("make", [shuffled, streamed, counted, fresh])
def test_a_checkpoint(make: Any, taken: int, tmp_path: Path) -> None:
    """The loader is given as it is; the rest is the same, and so is the model."""
    loader, model = make(), nn.Linear(1, 1)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator, None)
    saved = {"model": model.state_dict(), "loader": loader}
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    rest = [batch.tolist() for batch in (iterator if taken < 9 else loader)]
    again, other = make(), nn.Linear(1, 1)
    load(
        {"model": other.state_dict(), "loader": again},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    is_drawn = make is fresh and taken in {0, 9}
    found = [batch.tolist() for batch in again]
    assert is_drawn or found == rest
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("make", [shuffled, streamed, counted])
def test_keys(make: Any) -> None:
    """They are the same at every moment."""
    loader = make()
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    states.append(loader.state_dict())
    found = [flatten_state_dict(state)[0].keys() for state in states]
    assert len(found) == 10
    assert all(keys == found[0] for keys in found)
