"""Draws that are made again."""

import json
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler

from aioloader._order.generators import Draws
from working import drawn_from


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
    """It draws a new order itself; a saved one is drawn from a copy: it is past it."""
    own = torch.Generator().manual_seed(3)
    drawn_from(own)
    draws = Draws(RandomSampler(range(9), generator=own), {})
    assert draws.begin() is own
    first, past = drawn_from(own), torch.Generator()
    past.set_state(own.get_state())
    again = again_from(RandomSampler(range(9), generator=past), draws)
    assert drawn_from(again.begin()) == first
    assert torch.equal(own.get_state(), past.get_state())


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
