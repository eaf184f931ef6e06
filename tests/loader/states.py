"""What the tests of states share: saving, leaving an epoch, and resuming it."""

import json
from typing import Any

import pytest
import torch

REPEATED = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


def seeded(seed: int = 7) -> torch.Generator:
    """Return a generator of the user's."""
    return torch.Generator().manual_seed(seed)


def listed(batches: Any) -> list[Any]:
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


def saved(loader: Any) -> Any:
    """Return the state as a file restores it."""
    return json.loads(json.dumps(loader.state_dict()))


def begun(loader: Any, taken: int = 1) -> tuple[Any, Any]:
    """Return an iterator behind some batches, and the state there."""
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    return iterator, loader.state_dict()


def left_at(loader: Any, taken: int) -> Any:
    """Return the state after some batches of an epoch, as a file restores it."""
    iterator, state = begun(loader, taken)
    iterator.close()
    return json.loads(json.dumps(state))


def loaded(loader: Any, state: Any) -> Any:
    """Return a loader at a state."""
    loader.load_state_dict(state)
    return loader


def rest_of(loader: Any, state: Any) -> list[Any]:
    """Return what is left of an epoch."""
    return listed(loaded(loader, state))
