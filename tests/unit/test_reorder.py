"""Reordering."""

from hypothesis import given
from hypothesis import strategies as st

from aioloader._order.reorder import Reorder


@given(st.integers(0, 50).flatmap(lambda n: st.permutations(range(n))))
def test_sorts(numbers: list[int]) -> None:
    """Whatever the order of arrival, results leave by number, none lost."""
    reorder: Reorder[str] = Reorder()
    out = [item for number in numbers for item in reorder.accept(number, str(number))]
    assert out == [(number, str(number)) for number in range(len(numbers))]
    assert reorder.held_back() == 0


def test_holds_back_the_early() -> None:
    """A result that is ahead waits for those before it."""
    reorder: Reorder[str] = Reorder()
    assert reorder.accept(1, "b") == []
    assert reorder.held_back() == 1
    assert reorder.accept(0, "a") == [(0, "a"), (1, "b")]


@given(st.permutations(range(8)))
def test_unordered_passes_on(numbers: list[int]) -> None:
    """Unordered, everything leaves at once."""
    reorder: Reorder[int] = Reorder(in_order=False)
    for number in numbers:
        assert reorder.accept(number, number) == [(number, number)]
