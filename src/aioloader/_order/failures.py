"""The policy for samples that failed: raise, skip or replace, within a budget.

Pure and synchronous; one policy per iteration, shared by the threads that read.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from aioloader._order.forks import fork_safe
from aioloader.errors import FailureBudgetError

_KEPT = 1000


class _Skip:
    """The type of ``SKIP``."""

    def __repr__(self) -> str:
        return "SKIP"

    def __reduce__(self) -> str:
        return "SKIP"


SKIP: Final = _Skip()
"""Return this from an ``on_error`` callable to leave the sample out."""


@dataclass(frozen=True)
class Failure:
    """Where a sample failed, and why.

    Attributes:
        stage: ``"fetch"`` or ``"transform"``.
        epoch: Epoch number, from 0.
        batch: Batch number in the epoch, from 0.
        position: Position in the batch, from 0.
        index: The sampler's index; for an iterable, the position in its stream.
        error: The exception.
    """

    stage: str
    epoch: int
    batch: int
    position: int
    index: Any
    error: Exception

    def describe(self) -> str:
        """Return where it failed, as in the notes of exceptions."""
        return (
            f"in stage {self.stage!r} of epoch {self.epoch}, batch {self.batch}, "
            f"sample index {self.index!r}"
        )


OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Failure], Any]


class FailurePolicy:
    """Decide what to do about failed samples, and keep a list of them.

    Args:
        on_error: ``"raise"``, ``"skip"``, or a callable that takes a ``Failure`` and
            returns a sample to use instead, or ``SKIP``, or raises.
        max_failures: Failed samples allowed per epoch: a count, or a fraction of the
            samples tried (of which one failure is always allowed); ``None``: no limit.

    Attributes:
        attempted: Samples that were tried.
        count: Samples that failed and were skipped or replaced.
        retries: How often a read was retried.
        latest: The latest failures.
    """

    def __init__(
        self, on_error: OnError = "raise", max_failures: float | None = None
    ) -> None:
        self.on_error = on_error
        self.max_failures = max_failures
        self.attempted: int = 0
        self.count: int = 0
        self.retries: int = 0
        self.latest: deque[Failure] = deque(maxlen=_KEPT)
        self._lock = fork_safe(threading.Lock())

    def begin(self, samples: int) -> None:
        """Count ``samples`` more that are about to be tried."""
        with self._lock:
            self.attempted += samples

    def take_back(self, samples: int) -> None:
        """Count ``samples`` fewer: a stream had ended before them.

        Raises:
            FailureBudgetError: If too many of the others have failed.
        """
        with self._lock:
            self.attempted -= samples
            count, latest = self.count, list(self.latest)[-1:]
        for failure in latest:
            self._spend(failure, count)

    def count_retries(self, count: int) -> None:
        """Count retried reads, made here or in a worker."""
        with self._lock:
            self.retries += count

    def take_retries(self) -> int:
        """Return the number of retries since the last call, for the loader to count."""
        with self._lock:
            count, self.retries = self.retries, 0
        return count

    def resolve(self, failure: Failure) -> Any:
        """Return a sample to use instead, or ``SKIP``; or raise.

        Raises:
            BaseException: The user's error with a note, if the policy is to raise, or
                if it is not an ``Exception``; or what ``on_error`` raises.
            FailureBudgetError: If the budget is exceeded.
        """
        if self.on_error == "raise" or not isinstance(failure.error, Exception):
            raise noted(failure.error, failure.describe())
        self.count_in(failure)
        replacement = SKIP
        if callable(self.on_error):
            try:
                replacement = self.on_error(failure)
            except BaseException as error:
                noted(error, f"in on_error, for a failure {failure.describe()}")
                raise
        # The list must not keep the traceback's frames alive, which hold batches.
        failure.error.__traceback__ = None
        return replacement

    def count_in(self, failure: Failure) -> None:
        """Count a failure that is skipped or replaced, here or in a worker.

        Raises:
            FailureBudgetError: If the budget is exceeded.
        """
        with self._lock:
            self.count += 1
            self.latest.append(failure)
            count = self.count
        self._spend(failure, count)

    def _spend(self, failure: Failure, count: int) -> None:
        limit, attempted = self.max_failures, self.attempted
        if limit is None:
            return
        allowed = max(1.0, limit * attempted) if isinstance(limit, float) else limit
        if count > allowed:
            raise FailureBudgetError(
                f"{count} of {attempted} samples failed in epoch {failure.epoch}, more "
                f"than max_failures={limit} allows; the last one {failure.describe()}: "
                f"{failure.error!r}",
                failures=count,
                attempted=attempted,
            ) from failure.error


def noted(error: BaseException, where: str) -> BaseException:
    """Add a note on where ``error`` was raised, once, and return it."""
    note = f"aioloader: {where}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def check_failure_options(on_error: object, max_failures: object) -> None:
    """Check a loader's arguments ``on_error`` and ``max_failures``.

    Raises:
        ValueError: If ``on_error`` is another word, or the budget is negative.
        TypeError: If the budget is not a number.
    """
    if not callable(on_error) and on_error not in {"raise", "skip"}:
        raise ValueError(
            f"on_error must be 'raise', 'skip' or a callable, got {on_error!r}"
        )
    if max_failures is None:
        return
    if isinstance(max_failures, bool) or not isinstance(max_failures, (int, float)):
        raise TypeError(
            f"max_failures must be a count, a fraction or None, got {max_failures!r}"
        )
    if isinstance(max_failures, float) and max_failures == 1.0:
        raise ValueError(
            "max_failures=1.0 would allow every sample to fail, and 1 allows one: pass "
            "1, a fraction below 1.0, or None for no limit"
        )
    most = 1.0 if isinstance(max_failures, float) else math.inf
    if not 0 <= max_failures <= most:  # nor is NaN
        raise ValueError(
            "max_failures must be a count of at least 0 or a fraction below 1.0, got "
            f"{max_failures!r}"
        )
