"""Helpers of the tests of states: save, leave an epoch, resume it."""

import json
from typing import Any

import pytest
import torch

REPEATED = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def listed(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def begun(loader: Any, taken: int = 1) -> tuple[Any, Any]:
    """Return an iterator after ``taken`` batches, and the state there."""
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    return iterator, loader.state_dict()


def left_at(loader: Any, taken: int) -> Any:
    """Return the state after ``taken`` batches of an epoch, through JSON."""
    iterator, state = begun(loader, taken)
    iterator.close()
    return json.loads(json.dumps(state))


def loaded(loader: Any, state: Any) -> Any:
    """Return the loader, with a state loaded."""
    loader.load_state_dict(state)
    return loader


def rest_of(loader: Any, state: Any) -> list[Any]:
    """Return the remaining batches of an epoch."""
    return listed(loaded(loader, state))
