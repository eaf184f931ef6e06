"""The policy for samples that failed: raise, skip or replace, within a budget.

The code does no I/O. Each iteration has one policy, which its reading threads share.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from aioloader._base.forks import fork_safe
from aioloader.errors import FailureBudgetError

_MAX_FAILURES = 1000  # how many failures a policy keeps
# In an epoch of unknown length, a share is applied before the end only from this many
# samples on, and with this many standard deviations of failures added.
_ENOUGH_SAMPLES, _DEVIATIONS = 1000, 5


class _SkipType:
    """The type of ``SKIP``, which unpickles as the same object."""

    def __repr__(self) -> str:
        return "SKIP"

    def __reduce__(self) -> str:
        return "SKIP"


SKIP: Final = _SkipType()
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
        """Return where the sample failed, as text for error notes."""
        return (
            f"in stage {self.stage!r} of epoch {self.epoch}, batch {self.batch}, "
            f"sample index {self.index!r}"
        )


@dataclass(frozen=True)
class Skip:
    """Leave out or replace samples that fail: ``on_error=Skip(at_most=0.01)``.

    ``on_error="skip"`` is short for ``Skip()``, and ``on_error=function`` for
    ``Skip(instead=function)``. Neither has a limit.

    Example:
        >>> Skip(at_most=10)
        Skip(at_most=10, instead=None)

    Args:
        at_most: Limit on failed samples per epoch and rank: a count such as ``10``, or
            a share such as ``0.01``, which allows at least one; ``None``: no
            limit. A share refers to the rank's samples in an epoch. If their number is
            unknown, the share refers to the samples tried, and applies at the end, or
            from 1,000 samples on if chance cannot explain the failures. A resumed epoch
            counts failures from where it resumes.
        instead: Function that returns a replacement for a ``Failure``, or ``SKIP``; it
            may raise. ``None``: failed samples are left out, so batches are smaller.

    Raises:
        ValueError: If ``at_most`` is negative, or a float that is not below 1.0.
        TypeError: If ``at_most`` is not a number, or ``instead`` is not callable.
    """

    at_most: float | None = None
    instead: Callable[[Failure], Any] | None = None

    def __post_init__(self) -> None:
        limit, instead = self.at_most, self.instead
        if instead is not None and not callable(instead):
            raise TypeError(f"Skip.instead must be callable, got {instead!r}")
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(
                f"Skip.at_most must be a count, a share or None, got {limit!r}"
            )
        if isinstance(limit, float) and limit == 1.0:
            raise ValueError(
                "Skip.at_most=1.0 would allow every sample to fail, and 1 allows one: "
                "pass 1, a share below 1.0, or None for no limit"
            )
        most = 1.0 if isinstance(limit, float) else math.inf
        if not 0 <= limit <= most:  # NaN fails this, too
            raise ValueError(
                "Skip.at_most must be a count of at least 0 or a share below 1.0, got "
                f"{limit!r}"
            )


OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Failure], Any]


def parts_of(on_error: OnError | Skip) -> tuple[OnError, float | None]:
    """Return the action for failed samples and the limit on failures, if any.

    Raises:
        ValueError: If ``on_error`` is neither a known word, a ``Skip`` nor a callable.
    """
    if isinstance(on_error, Skip):
        return on_error.instead or "skip", on_error.at_most
    given: Any = on_error
    if given is Skip or (not callable(given) and given not in {"raise", "skip"}):
        raise ValueError(
            "on_error must be 'raise', 'skip', aioloader.Skip(...) or a callable, got "
            f"{on_error!r}"
        )
    return on_error, None


class FailurePolicy:
    """Decide what happens to failed samples, and keep the latest failures."""

    def __init__(
        self,
        on_error: OnError,
        at_most: float | None = None,
        *,
        total: int | None = None,
        before: int = 0,
    ) -> None:
        self.on_error = on_error
        self.at_most = at_most
        self._total = total  # number of samples in the epoch, if known
        self._before = before  # of these, how many an earlier run has tried
        self.attempted: int = 0  # how many samples were tried so far
        self.count: int = 0  # of these, how many failed and were skipped or replaced
        self.retries: int = 0  # number of repeated reads; `take_retries` resets it
        self.latest: deque[Failure] = deque(maxlen=_MAX_FAILURES)
        self._lock = fork_safe(threading.Lock())

    def begin(self, samples: int) -> None:
        """Add ``samples``, which may be negative, to the count of samples tried."""
        with self._lock:
            self.attempted += samples

    def end(self) -> None:
        """Apply a share as the limit at the end of an epoch of unknown length.

        Raises:
            FailureBudgetError: If more samples have failed than the share allows.
        """
        with self._lock:
            count, latest = self.count, list(self.latest)[-1:]
        if isinstance(self.at_most, float) and self._total is None:
            self._total = 0
            for failure in latest:
                self._spend(failure, count)

    def count_retries(self, count: int) -> None:
        with self._lock:
            self.retries += count

    def take_retries(self) -> int:
        """Return a worker's retries since the last call, for the loader to count."""
        with self._lock:
            count, self.retries = self.retries, 0
        return count

    def resolve(self, failure: Failure) -> Any:
        """Return the sample that replaces a failed one, or ``SKIP``.

        Raises:
            BaseException: The user's error with a note, if the policy is to raise or
                it is not an ``Exception``. Also any error that ``on_error`` raises.
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
        # `latest` must not keep the traceback's frames alive, which hold batches.
        failure.error.__traceback__ = None
        return replacement

    def count_in(self, failure: Failure) -> None:
        """Count a sample that was skipped or replaced, here or in a worker.

        Raises:
            FailureBudgetError: If the budget is exceeded.
        """
        with self._lock:
            self.count += 1
            self.latest.append(failure)
            count = self.count
        self._spend(failure, count)

    def _spend(self, failure: Failure, count: int) -> None:
        limit, attempted = self.at_most, self.attempted
        if limit is None:
            return
        allowed, of = limit, ""
        if isinstance(limit, float):
            total = max(self._total or 0, self._before + attempted)
            allowed, of = max(1.0, round(limit * total, 6)), f" of {total:,}"
            if self._total is None:
                enough = total >= _ENOUGH_SAMPLES
                allowed += _DEVIATIONS * math.sqrt(allowed) if enough else math.inf
        if count > allowed:
            raise FailureBudgetError(
                f"{count} of {attempted} samples failed in epoch {failure.epoch}, more "
                f"than Skip(at_most={limit}) allows{of}; `loader.skipped` has them, "
                f"the last one {failure.describe()}: {failure.error!r}",
                failures=count,
                attempted=attempted,
            ) from failure.error


def noted(error: BaseException, where: str) -> BaseException:
    """Return ``error`` with a note that says where it was raised, added only once."""
    note = f"aioloader: {where}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
