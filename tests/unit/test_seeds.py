"""Keys and seeds: the same everywhere, for ever."""

import contextlib
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader._workers.rng import Keyed, key_of, seed_all, states, swapped_in


def drawn() -> tuple[float, float, float]:
    """Draw from all three global generators."""
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_keys_do_not_change() -> None:
    """Runs of today are repeated by the releases of tomorrow."""
    places = [(0,), (0, 0), (0, 1), (1, 0), (1 << 62, 3, 1000)]
    assert [key_of(*place) for place in places] == PINNED


PINNED = [
    2981575634999029467,
    4099440686438224550,
    1056676140125623852,
    579802046646776932,
    3286280461368684429,
]


@given(st.integers(0, (1 << 63) - 1), st.lists(st.integers(0, 1 << 40), max_size=3))
def test_keys_are_seeds(base_seed: int, place: list[int]) -> None:
    """All generators take them; places that differ have keys that differ."""
    key = key_of(base_seed, *place)
    assert 0 <= key < 1 << 63
    assert key != key_of(base_seed, *place[:2], 1 << 41)
    assert Keyed(key).torch.initial_seed() == key


def test_swapping_leaves_no_trace() -> None:
    """The user's generators are where they were, also after an error."""
    seed_all(5)
    before, expected = states(), drawn()
    seed_all(5)
    for _ in range(2):
        with contextlib.suppress(KeyError), swapped_in(9):
            inside = drawn()
            raise KeyError
        seed_all(9)
        assert inside == drawn()
        seed_all(5)
    with swapped_in(9):
        np.random.normal()  # leaves a second number behind
        random.gauss()
    assert states() == before
    assert drawn() == expected
