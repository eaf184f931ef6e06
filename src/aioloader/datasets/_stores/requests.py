"""Requests that may fail: retried by cause, within a deadline, or sent twice.

A stall is detected by a timeout for each request, because a hanging connection raises
no error. Errors that waiting cannot cure (no such object, no permission) are raised at
once.
"""

import asyncio
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.errors import DatasetError

T = TypeVar("T")
Attempt: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

# Statuses that a retry will not change; 408 and 429 are worth one.
_FINAL = frozenset(range(400, 500)) - {408, 425, 429}
_CHANGED = 412
# A second request is sent after the slowest twentieth of the latest durations.
_REMEMBERED, _ENOUGH = 128, 20


@dataclass(frozen=True)
class Requests:
    """How a dataset treats requests that fail, stall or are slow.

    A request is retried after a delay uniform in ``[0, min(max_delay, base_delay *
    2**n)]`` seconds, until ``deadline``. obstore's own quick retries come first.
    Source: Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015);
    Dean and Barroso, "The Tail at Scale" (CACM 2013) for hedging.

    Attributes:
        timeout: Seconds for one request; then it is cancelled and counts as failed.
        deadline: Seconds for one piece of data, including all retries.
        base_delay: Upper bound of the first delay, in seconds.
        max_delay: Upper bound of every delay, in seconds.
        hedge: Whether a request that takes longer than 95 % of the latest ones is sent
            a second time; the first answer counts. Costs up to 5 % more requests.
            Never for a shard on a server without ranges, which is one response.
    """

    timeout: float = 30.0
    deadline: float = 120.0
    base_delay: float = 0.1
    max_delay: float = 5.0
    hedge: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline", "base_delay", "max_delay"):
            if not isinstance(value := getattr(self, name), int | float):
                kind = type(value).__name__
                raise TypeError(f"{name} must be a number of seconds, got {kind}")
        if self.timeout <= 0 or self.deadline <= 0:
            raise ValueError(
                f"timeout and deadline must be above 0, got {self.timeout} and "
                f"{self.deadline}"
            )
        if self.base_delay < 0 or self.max_delay < 0:
            raise ValueError(
                f"delays must not be negative, got base_delay={self.base_delay}, "
                f"max_delay={self.max_delay}"
            )


def policy_of(requests: Requests | None) -> Requests:
    """Return the retry policy.

    Raises:
        TypeError: If it is not a ``Requests``.
    """
    if not isinstance(requests, Requests | None):
        raise TypeError(
            "requests must be aioloader.datasets.Requests(timeout=..., deadline=...), "
            f"got {type(requests).__name__}"
        )
    return requests or Requests()


class RefusedError(Exception):
    """Wraps an error that waiting cannot cure, so that it is not retried.

    Attributes:
        error: The error to raise.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Tries:
    """Makes requests by a policy, for one dataset on one event loop.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Requests) -> None:
        self._policy = policy
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._rng = random.Random()  # noqa: S311  (jitter, not a secret)

    async def make(
        self,
        attempt: Attempt[T],
        location: str,
        failed: DatasetError | None = None,
        *,
        may_hedge: bool = True,
    ) -> T:
        """Return the result of ``attempt``, retried until the deadline.

        Args:
            attempt: Makes one request. A ``DatasetError`` is retried, a
                ``RefusedError`` is not.
            location: Redacted address, for errors.
            failed: Error of a first attempt that was already made.
            may_hedge: Whether two attempts may run at once.

        Raises:
            DatasetError: If no attempt succeeded.
        """
        policy = self._policy
        attempt = partial(self._timed, attempt) if may_hedge else attempt
        loop = asyncio.get_running_loop()
        until = loop.time() + policy.deadline
        sent, error = 0, failed
        for number in itertools.count():
            if error is None:
                left = until - loop.time()
                result = await self._tried(attempt, location, left)
                if not isinstance(result, DatasetError):
                    return result
                # An attempt cut short by the deadline has a poorer error than the one
                # before.
                error = failed if failed and left < policy.timeout else result
            failed = error
            sent += error.attempts
            bound = min(policy.max_delay, policy.base_delay * 2.0**number)
            delay = self._rng.uniform(0.0, bound)
            if loop.time() + delay >= until:
                raise _given_up(error, sent, policy.deadline)
            await asyncio.sleep(delay)
            if loop.time() >= until:
                raise _given_up(error, sent, policy.deadline)
            error = None
        raise AssertionError

    async def _tried(
        self, attempt: Attempt[T], location: str, seconds: float
    ) -> T | DatasetError:
        """Return the result of one attempt, or its error if a retry may help."""
        timeout = self._policy.timeout
        try:
            async with asyncio.timeout(min(timeout, seconds)):
                return await attempt()
        except TimeoutError:
            text = f"{location!r}: no answer within {min(timeout, seconds):.3g} s"
            return DatasetError(text, location=location)
        except RefusedError as refused:
            raise refused.error from None
        except DatasetError as failure:
            return failure

    async def _timed(self, attempt: Attempt[T]) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        hedges = self._policy.hedge and len(self._seconds) >= _ENOUGH
        result = await (self._hedged(attempt) if hedges else attempt())
        self._seconds.append(loop.time() - began)
        return result

    async def _hedged(self, attempt: Attempt[T]) -> T:
        """Send a slow request again, and take the first good answer."""
        delay = statistics.quantiles(self._seconds, n=20)[-1]
        requests = {asyncio.create_task(attempt())}
        try:
            done, _ = await asyncio.wait(requests, timeout=delay)
            if not done:
                requests.add(asyncio.create_task(attempt()))
            return await _first_good(requests)
        finally:
            await _cancelled(requests)


async def _first_good(requests: "set[asyncio.Task[T]]") -> T:
    """Return the first result; the last one's error if all fail."""
    waiting = set(requests)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        good = [request for request in done if request.exception() is None]
        if good or not waiting:
            return (good or list(done))[0].result()


async def _cancelled(requests: "set[asyncio.Task[Any]]") -> None:
    """Cancel pending requests and wait for them to end."""
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


def _given_up(error: DatasetError, attempts: int, deadline: float) -> DatasetError:
    """Return the last attempt's error, with the number of attempts added."""
    error.args = (f"{error}; given up after {deadline:g} s, {attempts} attempts",)
    error.attempts = attempts
    return error


def read_failure(location: str, exc: Exception, reason: Reason) -> Exception:
    """Return the error to raise: one to retry, or a refusal."""
    failure = failure_of("read", location, exc)
    if type(exc).__name__ == "PreconditionError" or reason.status == _CHANGED:
        text = f"{location!r} changed while being read; write new shards instead"
        return RefusedError(DatasetError(text, location=location))
    # A wrong call stays wrong at the next try.
    wrong = (ValueError, TypeError, NotImplementedError)
    is_final = isinstance(failure, (FileNotFoundError, PermissionError))
    is_final |= isinstance(exc, wrong) or reason.is_bad_key
    if is_final or reason.status in _FINAL:
        return RefusedError(failure)
    return failure
