"""Keys and seeds: the same everywhere, for ever."""

import contextlib
import random
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader._workers.rng import (
    Keyed,
    key_of,
    seed_all,
    seed_worker,
    states,
    swapped_in,
)


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


def test_states_tell_of_any_seeding() -> None:
    """Each generator counts."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        before = states()
        seed(12345)
        assert states() != before


def test_worker_seeds_are_torchs() -> None:
    """torch's own function for numpy gives the same words."""
    from torch.utils.data._utils.worker import _generate_state  # noqa: PLC0415

    for base_seed, worker in ((0, 0), (7, 3), ((1 << 62) + 5, 11)):
        with torch.random.fork_rng(devices=[]):
            assert seed_worker(base_seed, worker) == base_seed + worker
            assert torch.initial_seed() == base_seed + worker
            found = float(np.random.random()), random.random()
        state: Any = _generate_state(base_seed, worker)  # type: ignore[no-untyped-call]
        np.random.seed(state)
        random.seed(base_seed + worker)
        assert found == (float(np.random.random()), random.random())


def test_keyed_generators_are_apart_from_the_global_ones() -> None:
    """And alike wherever they are made."""
    before, keyed = states(), Keyed(3)
    found = [keyed.torch.get_state().sum(), keyed.numpy.random(), keyed.random.random()]
    twin = Keyed(3)
    assert found == [
        twin.torch.get_state().sum(),
        twin.numpy.random(),
        twin.random.random(),
    ]
    assert states() == before
