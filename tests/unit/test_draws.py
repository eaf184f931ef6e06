"""Generators in a few bytes, and draws that are made again."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler

from aioloader._order.draws import Draws, packed, unpacked


def drawn_from(generator: torch.Generator) -> int:
    """Return the next number."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def drawn_words(generator: torch.Generator, words: int) -> None:
    """Draw as randperm does: a word for each but one."""
    torch.randperm(words + 1, generator=generator)


def assert_packs(generator: torch.Generator, size: int) -> None:
    """JSON brings it, in fewer characters."""
    state = json.dumps(packed(generator.get_state()))
    assert len(state) < size
    again = torch.Generator()
    again.set_state(unpacked(json.loads(state)))
    assert torch.equal(again.get_state(), generator.get_state())
    assert again.initial_seed() == generator.initial_seed()
    assert drawn_from(again) == drawn_from(generator)


@given(
    seed=st.integers(0, 2**63),
    words=st.lists(st.integers(0, 2000) | st.sampled_from([32, 256, 1 << 14])),
)
def test_words(seed: int, words: list[int]) -> None:
    """A state is told by the words that were drawn, whoever drew them."""
    generator = torch.Generator().manual_seed(seed)
    for count in words:
        drawn_words(generator, count)
        assert_packs(generator, 60)  # which draws two
    if words:
        generator.manual_seed(seed)  # behind what is known of it
        assert_packs(generator, 60)


def test_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is far away is packed whole; so is one that is not drawn."""
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    assert_packs(generator, 6000)
    generator.manual_seed(5)
    drawn_words(generator, 1 << 20)
    monkeypatch.setattr("aioloader._order.draws._MANY", 1 << 19)
    assert_packs(generator, 6000)
    monkeypatch.undo()
    assert_packs(generator, 60)
    monkeypatch.setattr("aioloader._order.draws._MOST", 1 << 19)
    assert_packs(generator, 6000)


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
