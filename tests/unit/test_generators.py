"""Generators as text."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader._order.indices import packed, unpacked
from working import drawn_from


def assert_packs(generator: torch.Generator) -> None:
    """JSON brings it."""
    saved = packed(generator.get_state())
    assert list(saved) == ["seed", "state"]
    assert len(json.dumps(saved)) < 3600
    again = torch.Generator()
    again.set_state(unpacked(json.loads(json.dumps(saved))))
    assert torch.equal(again.get_state(), generator.get_state())
    assert again.initial_seed() == generator.initial_seed()
    assert drawn_from(again) == drawn_from(generator)


@given(
    seed=st.integers(-(2**63) + 1, 2**64 - 1),
    draws=st.lists(st.integers(0, 2000) | st.sampled_from([32, 256, 1 << 14])),
)
def test_any_state(seed: int, draws: list[int]) -> None:
    """Whatever was drawn, and however much."""
    generator = torch.Generator().manual_seed(seed)
    for count in draws:
        torch.randperm(count, generator=generator)
        assert_packs(generator)  # which draws two
    torch.randn(3, generator=generator)  # the fourth is kept in the state
    assert_packs(generator)
