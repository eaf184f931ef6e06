"""Runs of batches: each batch of one can be resumed after, and the window is kept."""

import json
import time
from itertools import islice
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from datasets.shards import Make
from laws.chains import MAKES, made, upper

pytestmark = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


def named(samples: Any) -> list[str]:
    return [upper(sample) for sample in samples]


def loader_of(make: Make, **options: Any) -> Any:
    stream = made(make, ()).repeat(4)
    return DataLoader(stream, 3, collate_fn=named, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_state_after_each_batch(make: Make) -> None:
    """It is that of the batch, wherever the blocks and runs begin."""
    batches, states = list[Any](), list[str]()
    with loader_of(make) as loader:
        for batch in loader:
            batches.append(batch)
            states.append(json.dumps(loader.state_dict()))
    for number, state in enumerate(states[:40], 1):
        with loader_of(make) as loader:
            loader.load_state_dict(json.loads(state))
            assert list(islice(loader, 25)) == batches[number : number + 25], number


def counted(stream: Any, **options: Any) -> int:
    """Return how many batches were in flight at most."""
    most = 0
    with DataLoader(stream, 2, **options) as loader:
        for _ in loader:
            most = max(most, loader.stats().in_flight)
    return most


def test_a_window_is_exact_if_it_is_given() -> None:
    """Otherwise what is read quickly is read further ahead, up to a run of 256."""
    stream = from_iterable(range(2_000))
    assert counted(stream, prefetch_factor=2) <= 2
    assert 8 < counted(stream) <= 256 + 64
    numbers: Any = range(2_000)
    assert counted(numbers, num_workers=2, prefetch_factor=2) <= 4
    assert 8 < counted(numbers, num_workers=2) <= 256 + 4


class Heavy:
    """Batches that are long in the making, or large."""

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        if self.is_slow:
            time.sleep(0.002)
        return torch.full((1 if self.is_slow else 1 << 15,), index)


@pytest.mark.parametrize("is_slow", [False, True])
def test_workers_make_no_heavy_batches_further_ahead(*, is_slow: bool) -> None:
    """Only small ones that come quickly."""
    assert counted(Heavy(is_slow=is_slow), num_workers=2) <= 4
