"""How far a consumer is: batches may come in any order, and some raise."""

import random

from hypothesis import given
from hypothesis import strategies as st

from aioloader._order.epoch import Bookmark, Progress


@given(st.permutations(range(12)), st.integers(0, 12), st.integers(1, 3))
def test_any_order(numbers: list[int], stop: int, readers: int) -> None:
    """What was delivered is told exactly, and states are those below ``done``."""
    progress = Progress(Bookmark(), readers=readers)
    for number in numbers[:stop]:
        progress.take(number, f"behind {number}")
    bookmark = progress.bookmark()
    assert {*range(bookmark.done), *bookmark.beyond} == set(numbers[:stop])
    assert bookmark.done not in bookmark.beyond
    assert bookmark.states == {
        number % readers: f"behind {number}" for number in range(bookmark.done)
    }


@given(st.permutations(range(10)), st.integers(0, 10))
def test_goes_on(numbers: list[int], stop: int) -> None:
    """A bookmark is all that is needed; what is beyond it is passed again."""
    first = Progress(Bookmark())
    for number in numbers[:stop]:
        first.take(number)
    second = Progress(first.bookmark())
    rest = [*numbers[stop:], *first.bookmark().beyond]
    random.Random(stop).shuffle(rest)
    for number in rest:
        second.take(number)
    assert second.bookmark() == Bookmark(10)


def test_a_batch_that_raised_counts_with_the_next() -> None:
    """So that it is tried again where it was the last thing that happened."""
    progress = Progress(Bookmark())
    progress.take(0)
    progress.fail(1, "state")
    assert progress.bookmark() == Bookmark(1)
    progress.take(2)
    assert progress.bookmark() == Bookmark(3, states={0: "state"})


def test_no_state_keeps_the_latest() -> None:
    """A batch that tells none leaves what is known."""
    progress = Progress(Bookmark())
    progress.take(0, "known")
    progress.take(1)
    assert progress.bookmark() == Bookmark(2, states={0: "known"})
