"""`Retry`: its delays, and the errors that it retries."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import Retry
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)


@given(st.integers(1, 12), st.floats(0, 5), st.floats(0, 60), st.integers())
def test_retry_delays_stay_within_bounds(
    attempts: int, base: float, most: float, seed: int
) -> None:
    """One delay fewer than attempts, each under its exponential bound and the cap."""
    retry = Retry(max_attempts=attempts, base_delay=base, max_delay=most)
    delays = list(retry.delays(random.Random(seed)))
    assert len(delays) == attempts - 1
    for attempt, delay in enumerate(delays):
        assert 0 <= delay <= min(most, base * 2**attempt)


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(), True),
        (DatasetError("503", location="s3://b/k"), True),
        (TruncatedReadError("cut", location="k", expected=2, received=1), True),
        (ObjectNotFoundError("gone", location="s3://b/k"), False),
        (ObjectPermissionError("no", location="s3://b/k"), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_only_transient_errors_are_retried(error: BaseException, worth: bool) -> None:
    """Missing files and wrong values do not go away by waiting."""
    assert Retry().is_worth(error) is worth


@pytest.mark.parametrize(
    "wrong", [{"max_attempts": 0}, {"base_delay": -1.0}, {"max_delay": -0.1}]
)
def test_wrong_retry_numbers_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Retry(**wrong)
