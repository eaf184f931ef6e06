"""What becomes of failed samples."""

import pickle
from typing import Any

import pytest

from aioloader import SKIP, Failure, Skip
from aioloader._order.failures import FailurePolicy, parts_of
from aioloader.errors import FailureBudgetError


def failure() -> Failure:
    """Return a failure of sample 7."""
    error = ValueError("bad pixel")
    return Failure("fetch", epoch=1, batch=2, position=0, index=7, error=error)


def test_count_budget() -> None:
    """One failure more than allowed ends the epoch, caused by the last one."""
    policy = FailurePolicy(Skip(at_most=2))
    policy.begin(100)
    policy.resolve(failure())
    policy.resolve(failure())
    with pytest.raises(FailureBudgetError, match="3 of 100 samples failed") as caught:
        policy.resolve(failure())
    assert (caught.value.failures, caught.value.attempted) == (3, 100)
    assert isinstance(caught.value.__cause__, ValueError)


def test_fraction_budget_grows_with_what_was_tried() -> None:
    """A fraction always allows one, then its share."""
    policy = FailurePolicy(Skip(at_most=0.1))
    policy.begin(5)
    policy.resolve(failure())
    with pytest.raises(FailureBudgetError):
        policy.resolve(failure())
    policy.begin(45)
    policy.resolve(failure())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at_most": -1}, ValueError, "got -1"),
        ({"at_most": 1.5}, ValueError, "got 1.5"),
        ({"at_most": float("nan")}, ValueError, "got nan"),
        ({"at_most": 1.0}, ValueError, "pass 1, a share below 1.0, or None"),
        ({"at_most": True}, TypeError, "got True"),
        ({"at_most": "2"}, TypeError, "got '2'"),
        ({"instead": 3}, TypeError, "must be callable, got 3"),
    ],
)
def test_skips_are_checked(options: Any, error: type[Exception], words: str) -> None:
    """Wrong ones raise, with the value in the message."""
    with pytest.raises(error, match=words):
        Skip(**options)


def test_skips_are_values() -> None:
    """They are equal if their parts are, show them, and can be sent to processes."""
    skip = Skip(at_most=0.01, instead=abs)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(skip)) == skip
    assert repr(skip) == "Skip(at_most=0.01, instead=<built-in function abs>)"
    assert parts_of(skip) == (skip.instead, 0.01)
    assert parts_of(Skip()) == ("skip", None)


def test_skip_is_one_object() -> None:
    """The marker survives a pickle as itself."""
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
