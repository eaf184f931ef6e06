"""Decide whether to retry a read, and after how long.

The code does no I/O. It only computes the delay; the reader waits.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from aioloader.errors import DatasetError, DecodeError

# Errors that waiting cannot fix.
_FINAL_ERRORS = (
    DecodeError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)

# This generator has no state, so forked workers do not repeat its numbers.
_RNG = random.SystemRandom()

# The reads of this process that are being retried, with their last errors.
RETRIED: dict[object, BaseException] = {}


@dataclass(frozen=True)
class Retry:
    """Retry reads with exponential backoff and full jitter.

    The delay before attempt ``k + 1`` is uniform in ``[0, min(max_delay, base_delay *
    2**(k - 1))]`` seconds, not drawn from the user's generators. Errors that waiting
    cannot fix (missing files, permissions) are final.
    Source: Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).

    Attributes:
        max_attempts: Maximum number of reads, including the first; at least 1.
        base_delay: Upper bound of the first delay, in seconds.
        max_delay: Upper bound of every delay, in seconds.
        on: Types of exceptions to retry after; ``TimeoutError`` is an ``OSError``.
    """

    max_attempts: int = 3
    base_delay: float = 0.1
    max_delay: float = 10.0
    on: tuple[type[Exception], ...] = (OSError, EOFError, DatasetError)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(
                f"max_attempts must be at least 1, got {self.max_attempts}"
            )
        if self.base_delay < 0 or self.max_delay < 0:
            raise ValueError(
                f"delays must not be negative, got base_delay={self.base_delay}, "
                f"max_delay={self.max_delay}"
            )

    def is_worth(self, error: BaseException) -> bool:
        """Tell whether a retry may succeed after ``error``."""
        return isinstance(error, self.on) and not isinstance(error, _FINAL_ERRORS)

    def delays(self, rng: random.Random | None = None) -> Iterator[float]:
        """Yield the seconds to wait before each retry: ``max_attempts - 1`` in all."""
        endless = backoff(self.base_delay, self.max_delay, rng or _RNG)
        return islice(endless, self.max_attempts - 1)


def backoff(
    base_delay: float, max_delay: float, rng: random.Random = _RNG
) -> Iterator[float]:
    """Yield the seconds to wait before each retry, without end, as in ``Retry``."""
    bound = min(max_delay, base_delay)
    while True:
        yield rng.uniform(0.0, bound)
        bound = min(max_delay, 2 * bound)


def last_error() -> str:
    """Return a text on reads being retried and their last error; "" if none are."""
    errors = list(RETRIED.values())
    if not errors:
        return ""
    is_one = len(errors) == 1
    reads = "one read is" if is_one else f"{len(errors)} reads are"
    return f"{reads} being retried after: {errors[-1]}"
