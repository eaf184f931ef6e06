"""On request, ``report()`` says which rank waits longest for data."""

import re

import pytest

from aioloader import DataLoader
from datasets.rank_process import ranks

SLOWEST = r"Rank 2 of 3 waits longest for data: \d+\.?\d* ms a batch; the median rank "
MISSING = "Not reported yet in epoch {}: rank{}."


@pytest.mark.slow
def test_the_slowest_of_three_ranks() -> None:
    """No rank waits for another, and an earlier epoch does not count."""
    with ranks(3) as (first, second, third):
        assert first.do(do="report", seconds=0)[1:] == [MISSING.format(0, "s 1, 2")]
        slowest, missing = third.do(do="report", seconds=0.05)
        assert re.match(SLOWEST, slowest)
        assert missing == MISSING.format(0, " 1")
        (slowest,) = second.do(do="report", seconds=0)
        assert re.match(SLOWEST, slowest)
        _, missing = second.do(do="report", seconds=0, epoch=1)
        assert missing == MISSING.format(1, "s 0, 2")


def test_without_a_process_group() -> None:
    loader = DataLoader([1, 2])
    assert len(list(loader)) == 2
    (said,) = loader.report(ranks="train").remarks
    assert said == "Ranks are not compared: there is no process group."
