"""Damaged states are refused, in words: never a part of one, never another's error."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from aioloader import DataLoader, merge_states
from aioloader.errors import StateMismatchError


class Numbers(IterableDataset[int]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def shuffled() -> Any:
    """Return a loader whose order is drawn from a seed."""
    return DataLoader(list(range(12)), 2, shuffle=True)


def generated() -> Any:
    """Return a loader whose order is drawn from a generator."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(list(range(12)), 2, shuffle=True, generator=generator)


def streamed() -> Any:
    """Return a loader of an iterable."""
    return DataLoader(Numbers(), 2)


MAKERS = {"seed": shuffled, "generator": generated, "stream": streamed}
# What any part may turn into; each is wrong wherever it stands.
WRONG = ["x", -1, 2.5, None, [], {}, float("nan"), 10**9, [[1]], {"a": 1}]
# These say nothing that is needed: they are not looked at.
FREE = {"default", "last", "length", "readers", "ranks", "batch_size", "beyond"}


def state_of(make: Any, batches: int) -> Any:
    """Return the state behind some batches, as JSON brings it back."""
    loader = make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def part(state: Any, path: tuple[Any, ...]) -> Any:
    """Return what holds the part at ``path``."""
    for key in path[:-1]:
        state = state[key]
    return state


@pytest.mark.filterwarnings("ignore:.*no state_dict")
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_wrong_is_refused_or_harmless(name: str) -> None:
    """Wherever it stands: a clear error, or the same batches as without."""
    make = MAKERS[name]
    whole = state_of(make, 2)
    expected = rest(make, whole)
    for path in list(places(whole)):
        for value in [*WRONG, "missing"]:
            state = copy.deepcopy(whole)
            if value == "missing":
                del part(state, path)[path[-1]]
            else:
                part(state, path)[path[-1]] = value
            try:
                found = rest(make, state)
            except StateMismatchError:
                continue
            is_number = type(value) is int and path[-1] in {"epoch", "seed"}
            assert found == expected or path[0] in FREE or is_number, (path, value)


def rest(make: Any, state: Any) -> list[Any]:
    """Return what a new loader delivers behind a state."""
    loader = make()
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "state", ["x", 5, [1], {"a": 1}, None, {"version": 7}], ids=repr
)
def test_what_is_no_state(state: Any) -> None:
    """Of ours, or at all."""
    with pytest.raises(StateMismatchError, match=r"no state of|version 7"):
        shuffled().load_state_dict(state)
    with pytest.raises(StateMismatchError):
        merge_states([state])


@pytest.mark.parametrize("epoch", ["3", 2.5, None, -1], ids=repr)
def test_epochs_are_counts(epoch: Any) -> None:
    """What is chosen by ``set_epoch`` goes into states."""
    with pytest.raises((TypeError, ValueError)):
        shuffled().set_epoch(epoch)
