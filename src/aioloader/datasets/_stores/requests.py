"""Requests that may fail: retried by cause, within a deadline, or sent twice.

A stall is detected by a timeout for each request, because a hanging connection raises
no error. Errors that waiting cannot cure (no such object, no permission) are raised at
once.
"""

import asyncio
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from aioloader._base.outlast import cancel
from aioloader._base.retry import RETRIED, backoff
from aioloader.datasets._checks import check_is
from aioloader.datasets._stores.redact import redact_key
from aioloader.errors import DatasetError

_LOG = logging.getLogger("aioloader")
T = TypeVar("T")
Attempt: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

# A second request is sent after the slowest twentieth of the latest durations.
_REMEMBERED, _ENOUGH = 128, 20
# Seconds of retries for a host to which no request could be sent so far.
_PATIENCE = 5.0
_RETRYING = "%s; retrying for %g s (logged once for a store)"


@dataclass(frozen=True)
class Requests:
    """How a dataset treats requests that fail, stall or are slow.

    A request is retried after a delay uniform in ``[0, min(max_delay, base_delay *
    2**n)]`` seconds, until ``deadline``; for 5 seconds if requests cannot be sent, and
    the host never answered. obstore's own quick retries come first.
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
            check_is(getattr(self, name), int | float, name, "a number of seconds")
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


USUAL = Requests()


def policy_of(requests: Requests | None) -> Requests:
    words = "aioloader.datasets.Requests(timeout=..., deadline=...)"
    check_is(requests, Requests | None, "requests", words)
    return requests or USUAL


class RefusedError(Exception):
    """Wraps an error that waiting cannot cure, so that it is not retried."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class UnreachableError(RefusedError):
    """Wraps an error of a request that could not be sent.

    It is retried, but only for seconds if the server never answered.
    """

    error: DatasetError


class Server:
    """What is known of one server, shared by all requests to it.

    Attributes:
        has_answered: Whether it ever answered, if only with an error.
        is_refusing: Whether it never did, and the latest request could not be sent.
        has_warned: Whether a retry was logged.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.has_answered = self.is_refusing = self.has_warned = False

    def locate(self, key: str) -> str:
        """Return the address of ``key`` as it may be shown."""
        # The query of a signed URL, passed as a key, may put no signature into the log.
        key, label = redact_key(key), self.label
        return f"{label}{'' if label.endswith('/') else '/'}{key}" if key else label


class Tries:
    """Makes requests by a policy, for one dataset on one event loop."""

    def __init__(self, policy: Requests) -> None:
        self._policy = policy
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    async def make(
        self,
        attempt: Attempt[T],
        server: Server,
        key: str,
        *,
        began: float | None = None,
        sent: int = 0,
        may_hedge: bool = True,
    ) -> T:
        """Return the result of ``attempt``, retried until the deadline.

        Args:
            attempt: Makes one request. A ``DatasetError`` is retried; so is an
                ``UnreachableError``, for seconds only if the server never answered; a
                ``RefusedError`` is not.
            server: Who is asked.
            key: What is asked for.
            began: Start of the deadline, by the loop's clock; default: now.
            sent: Attempts that failed before, since ``began``.
            may_hedge: Whether two attempts may run at once.

        Raises:
            DatasetError: If no attempt succeeded.
        """
        policy, clock = self._policy, asyncio.get_running_loop().time
        attempt = partial(self._timed, attempt) if may_hedge else attempt
        began = clock() if began is None else began
        failed = said = None
        result: T | DatasetError | TimeoutError | None = None
        most, delays = policy.deadline, backoff(policy.base_delay, policy.max_delay)
        try:
            while True:
                seconds = min(policy.timeout, began + policy.deadline - clock())
                if seconds <= 0 and failed is not None:
                    break
                result = await _tried(attempt, server, seconds)
                if not isinstance(result, (DatasetError, TimeoutError)):
                    return result
                if isinstance(result, DatasetError):
                    failed = said = result
                elif said is None or seconds == policy.timeout:
                    failed = _unanswered(server.locate(key), seconds, said)
                else:  # cut short by the deadline: it says less than the one before
                    failed = said
                RETRIED[asyncio.current_task()] = failed
                sent += failed.attempts
                patience = _PATIENCE if server.is_refusing else math.inf
                most = min(policy.deadline, patience)
                delay = next(delays)
                if clock() + delay >= began + most:
                    break
                if not server.has_warned:  # hundreds of requests may be in flight
                    server.has_warned = True
                    _LOG.warning(_RETRYING, failed, most)
                await asyncio.sleep(delay)
            assert failed is not None
            failed.args = (f"{failed}; given up after {most:g} s, {sent} attempts",)
            failed.attempts = sent
            raise failed
        finally:
            if failed is not None:
                RETRIED.pop(asyncio.current_task(), None)
            failed = said = result = None

    async def _timed(self, attempt: Attempt[T]) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        hedges = self._policy.hedge and len(self._seconds) >= _ENOUGH
        result = await (self._hedged(attempt) if hedges else attempt())
        self._seconds.append(loop.time() - began)
        return result

    async def _hedged(self, attempt: Attempt[T]) -> T:
        """Send a slow request again; return the first result, or the last error."""
        delay = statistics.quantiles(self._seconds, n=20)[-1]
        waiting = {asyncio.create_task(attempt())}
        requests = set(waiting)
        try:
            done, _ = await asyncio.wait(waiting, timeout=delay)
            if not done:
                requests.add(asyncio.create_task(attempt()))
                waiting = set(requests)
            while True:
                done, waiting = await asyncio.wait(
                    waiting, return_when=asyncio.FIRST_COMPLETED
                )
                good = [request for request in done if request.exception() is None]
                if good or not waiting:
                    return (good or [*done])[0].result()
        finally:
            await cancel(requests)


async def _tried(
    attempt: Attempt[T], server: Server, seconds: float
) -> T | DatasetError | TimeoutError:
    """Return the result of one attempt, or its error if a retry may help."""
    try:
        result = await _within(seconds, attempt)
    except TimeoutError as late:
        server.is_refusing = False
        return late
    except UnreachableError as unreachable:
        server.is_refusing = not server.has_answered
        return unreachable.error
    except (RefusedError, DatasetError) as failure:
        server.has_answered, server.is_refusing = True, False
        if isinstance(failure, RefusedError):
            raise failure.error from failure.error.__cause__
        # Its frames refer to it: such a cycle would keep the user's iterator.
        return failure.with_traceback(None)
    server.has_answered = True
    return result


async def _within(seconds: float, attempt: Attempt[T]) -> T:
    """Return the result of ``attempt``; raise a TimeoutError if it takes too long.

    ``asyncio.timeout`` takes 4 to 8 us, and this 2.
    """
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    before = task.cancelling()
    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        return await attempt()
    except asyncio.CancelledError as cancelled:
        if is_late and task.cancelling() <= before + 1:
            raise TimeoutError from cancelled
        raise
    finally:
        timer.cancel()
        if is_late:
            task.uncancel()


def _unanswered(
    location: str, seconds: float, before: DatasetError | None
) -> DatasetError:
    """Return the error of an attempt that timed out; it names the last one before."""
    text = f"{location!r}: no answer within {max(seconds, 0):.3g} s"
    text += "" if before is None else f"; the last error before: {before}"
    error = DatasetError(text, location=location)
    error.__cause__ = before
    return error
