"""Generators in a few bytes."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader._order import generators
from aioloader._order.generators import is_packed, packed, unpacked
from working import drawn_from


def drawn_words(generator: torch.Generator, words: int) -> None:
    """Draw as randperm does: a word for each but one."""
    torch.randperm(words + 1, generator=generator)


def assert_packs(generator: torch.Generator, form: str = "words") -> None:
    """JSON brings it, in the form that is asked for."""
    saved = packed(generator.get_state())
    assert list(saved) == ["seed", form]
    assert is_packed(saved)
    again = torch.Generator()
    again.set_state(unpacked(json.loads(json.dumps(saved))))
    assert torch.equal(again.get_state(), generator.get_state())
    assert again.initial_seed() == generator.initial_seed()
    assert drawn_from(again) == drawn_from(generator)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin without states that others have left."""
    monkeypatch.setattr(generators, "_KNOWN", {})


@given(
    seed=st.integers(-(2**63) + 1, 2**64 - 1),
    words=st.lists(st.integers(0, 2000) | st.sampled_from([32, 256, 1 << 14])),
)
def test_words(seed: int, words: list[int]) -> None:
    """A state is told by the words that were drawn, whoever drew them."""
    generator = torch.Generator().manual_seed(seed)
    for count in words:
        drawn_words(generator, count)
        assert_packs(generator)  # which draws two
    generator.manual_seed(seed)  # behind what is known of it
    assert_packs(generator)


def test_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is far away is packed whole, and searched for once."""
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)  # the fourth is kept in the state
    assert_packs(generator, "state")
    generator.manual_seed(5)
    drawn_words(generator, 1 << 20)
    monkeypatch.setattr(generators, "_SEARCHED", 1 << 19)
    state = generator.get_state()
    assert list(packed(state)) == ["seed", "state"]
    monkeypatch.undo()
    monkeypatch.setattr(generators, "_SEARCHED", 0)
    monkeypatch.setattr(generators, "_KNOWN", {5: [(1 << 20, state)]})
    assert_packs(generator)
    monkeypatch.setattr(generators, "_MOST", 1 << 19)
    generator.set_state(state)
    assert_packs(generator, "state")


def test_generators_of_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is searched for from where it was, however far the other one is."""
    monkeypatch.setattr(generators, "_SEARCHED", 1 << 13)
    one, other = (torch.Generator().manual_seed(0) for _ in "ab")
    for _ in range(9):
        drawn_words(one, 5000)
        drawn_words(other, 10)
        assert_packs(one)
        assert_packs(other)


def test_a_state_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not found."""
    generator = torch.Generator().manual_seed(5)
    drawn_words(generator, 5000)
    monkeypatch.setattr(generators, "_SEARCHED", 1 << 10)
    whole = packed(generator.get_state())
    monkeypatch.setattr(generators, "_Trail", None)
    assert packed(generator.get_state()) == whole


@pytest.mark.parametrize(
    "damage",
    [
        {"seed": 2**70},
        {"seed": True},
        {"words": -1},
        {"words": 2**40},
        {"words": 1.0},
        {"words": None},
        {"state": "AAAA"},
        {"state": None},
        {"seed": 6, "state": 0},
    ],
)
def test_damage(damage: dict[str, Any]) -> None:
    """It is told."""
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    saved = {"seed": 5, "words": 9}
    if damage.get("state") == 0:
        damage = {**damage, "state": packed(generator.get_state())["state"]}
    assert is_packed(saved)
    assert not is_packed({**saved, **damage})
