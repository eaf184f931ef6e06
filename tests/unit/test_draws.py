"""Generators in a few bytes, and draws that are made again."""

import json
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler

from aioloader._order.draws import Draws, packed, unpacked


def drawn_from(generator: torch.Generator) -> int:
    """Return the next number."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@pytest.mark.parametrize(("draws", "size"), [(0, 40), (1, 40), (2, 6000), (9, 6000)])
def test_packed(draws: int, size: int) -> None:
    """One that was only just seeded is told by its seed; JSON brings all of them."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(draws):
        drawn_from(generator)
    state = json.dumps(packed(generator.get_state()))
    assert len(state) < size
    again = torch.Generator()
    again.set_state(unpacked(json.loads(state)))
    assert torch.equal(again.get_state(), generator.get_state())
    assert again.initial_seed() == 5
    assert drawn_from(again) == drawn_from(generator)


def again_from(sampler: Any, draws: Draws) -> Draws:
    """Return the same draws in another process."""
    return Draws(sampler, json.loads(json.dumps(draws.state())))


def test_without_a_generator() -> None:
    """A seed is drawn where torch draws it, and kept; nothing is drawn again."""
    sampler = RandomSampler(range(9))
    draws = Draws(sampler, {})
    assert draws.state() == {}
    first = drawn_from(draws.begin())
    assert list(draws.state()) == ["seed"]
    again = again_from(sampler, draws)
    before = torch.get_rng_state()
    assert drawn_from(again.begin()) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_generator_moves() -> None:
    """It is set to where it was, and draws itself."""
    own = torch.Generator().manual_seed(3)
    drawn_from(own)
    sampler = RandomSampler(range(9), generator=own)
    draws = Draws(sampler, {})
    first = drawn_from(draws.begin())
    other = torch.Generator().manual_seed(3)
    sampler = RandomSampler(range(9), generator=other)
    again = again_from(sampler, draws)
    assert again.begin() is other
    assert drawn_from(other) == first
    assert torch.equal(own.get_state(), other.get_state())


def test_the_default_generator_is_left_alone() -> None:
    """Draws that were made from it are made again from another one."""
    sampler = SubsetRandomSampler(range(9))
    draws = Draws(sampler, {})
    assert draws.begin() is torch.default_generator
    first = drawn_from(torch.default_generator)
    again = again_from(sampler, draws).begin()
    before = torch.get_rng_state()
    assert drawn_from(again) == first
    assert torch.equal(torch.get_rng_state(), before)
