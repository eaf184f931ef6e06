"""What becomes of failed samples."""

import pickle
from typing import Any

import pytest

from aioloader import SKIP, Failure
from aioloader._order.failures import FailurePolicy, check_failure_options
from aioloader.errors import FailureBudgetError


def failure(position: int = 0) -> Failure:
    """Return a failure of sample 7."""
    error = ValueError("bad pixel")
    return Failure("fetch", epoch=1, batch=2, position=position, index=7, error=error)


def test_raise_keeps_the_type_and_notes_the_place() -> None:
    """The user's exception comes out as it is, with one note."""
    policy = FailurePolicy()
    bad = failure()
    for _ in range(2):
        with pytest.raises(ValueError, match="bad pixel") as caught:
            policy.resolve(bad)
    assert caught.value.__notes__ == [
        "aioloader: in stage 'fetch' of epoch 1, batch 2, sample index 7"
    ]


def test_skip_counts_and_remembers() -> None:
    """Skipped samples are listed."""
    policy = FailurePolicy("skip")
    assert policy.resolve(failure()) is SKIP
    assert policy.count == 1
    assert [item.index for item in policy.latest] == [7]


def test_callable_replaces() -> None:
    """A callable sees the failure and gives the sample."""
    seen: list[Failure] = []

    def replace(bad: Failure) -> str:
        seen.append(bad)
        return "grey"

    assert FailurePolicy(replace).resolve(failure()) == "grey"
    assert seen[0].stage == "fetch"


def test_count_budget() -> None:
    """One failure more than allowed ends the epoch, caused by the last one."""
    policy = FailurePolicy("skip", max_failures=2)
    policy.begin(100)
    policy.resolve(failure())
    policy.resolve(failure())
    with pytest.raises(FailureBudgetError, match="3 of 100 samples failed") as caught:
        policy.resolve(failure())
    assert (caught.value.failures, caught.value.attempted) == (3, 100)
    assert isinstance(caught.value.__cause__, ValueError)


def test_fraction_budget_grows_with_what_was_tried() -> None:
    """A fraction always allows one, then its share."""
    policy = FailurePolicy("skip", max_failures=0.1)
    policy.begin(5)
    policy.resolve(failure())
    with pytest.raises(FailureBudgetError):
        policy.resolve(failure())
    policy.begin(45)
    policy.resolve(failure())


@pytest.mark.parametrize(
    ("on_error", "max_failures", "error"),
    [
        ("ignore", None, ValueError),
        ("skip", -1, ValueError),
        ("skip", 1.5, ValueError),
        ("skip", True, TypeError),
        ("skip", "2", TypeError),
    ],
)
def test_options_are_checked(
    on_error: Any, max_failures: Any, error: type[Exception]
) -> None:
    """Wrong options raise, with the value in the message."""
    with pytest.raises(error, match="got"):
        check_failure_options(on_error, max_failures)


def test_skip_is_one_object() -> None:
    """The marker survives a pickle as itself."""
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
