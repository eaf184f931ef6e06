"""Base classes of stores (``Source`` is public), and retries of their requests.

All readers use a ``Store``, which tracks its server's state and classifies errors. The
cause of a failure decides whether the request is retried, within a deadline. Slow
requests may be sent twice. Each has a timeout: a hung connection raises no error.
"""

import abc
import asyncio
import logging
import math
import os
import socket
import statistics
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
)
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from aioloader._base.cancellation import cancel
from aioloader._base.raising import raisable
from aioloader._base.retry import RETRIED, backoff
from aioloader.datasets._checks import check_is
from aioloader.datasets._stores.failures import Piece, Version, truncated
from aioloader.datasets._stores.redact import redact_key, redact_text, redact_url
from aioloader.errors import DatasetError, ObjectNotFoundError, ObjectPermissionError

if TYPE_CHECKING:
    from obstore import Bytes

T = TypeVar("T")
Sized: TypeAlias = Iterable[tuple[str, int]]

# HTTP statuses that are not retried: client errors that another try would repeat.
FINAL = frozenset(range(400, 500)) - {408, 425, 429}
PAGE_KEYS = 1000
# Length of the first request for an object of unknown size.
_FIRST_BYTES = 1 << 20
_DEFECTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
    MemoryError, NameError, RuntimeError, StopAsyncIteration, TypeError, ValueError,
)  # fmt: skip
_LOG = logging.getLogger("aioloader")
Attempt: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

# How many durations are kept, and needed, to compute their 95th percentile.
_MAX_DURATIONS, _MIN_DURATIONS = 128, 20
# Seconds for which requests to a host that was never reached are retried.
_UNREACHED_SECONDS = 5.0
_RETRYING = "%s; retrying for %g s (logged once for a store)"


class Source(abc.ABC):
    """Base class for your own store, accepted by every ``store=`` argument.

    Subclasses implement ``get`` and, for patterns and listings, ``list``. The library
    adds retries by ``Requests``, checks of lengths and versions, the cache, and reading
    ahead. Raise ``FileNotFoundError`` or ``PermissionError`` for errors that retries
    cannot fix. Another ``OSError`` (except ``IsADirectoryError``) is retried, as is an
    HTTP client's exception, unless its status is final, such as 404. Exceptions that
    indicate a bug, such as ``TypeError``, are raised as they are.

    Several event loops may call a source at once. Workers get a pickle of the source:
    keep clients and secrets out of its state, and read secrets from the environment.

    Attributes:
        label: The address for messages, without secrets. It also identifies the source
            in a cache: without a label, nothing is cached.
    """

    label: str = ""

    @abc.abstractmethod
    async def get(self, key: str, start: int, stop: int) -> Piece:
        """Return an object's bytes from ``start`` to ``stop``, and its version.

        Return fewer bytes at the object's end, and none after. Callers own the data.
        """

    def list(self, prefix: str) -> "AsyncIterable[tuple[str, int]] | Awaitable[Sized]":
        """Return the keys below ``prefix``, a folder, and their sizes in bytes.

        Implement it as an async generator, or as a coroutine that returns a list, in
        any order. Keys other than ``prefix`` and those below it are ignored.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no list(): name the shards one by one, or pass "
            f"keys=; {prefix!r} cannot be looked up"
        )

    async def aclose(self) -> None:  # noqa: B027  (a default)
        """Release the running loop's resources, such as idle connections.

        Called after the last iteration on that loop; the source stays usable.
        """


class Store(abc.ABC):
    """Base class of stores; records whether the server answers requests.

    Attributes:
        cache_name: Prefix of the store's keys in a cache; None to cache nothing.
        has_answered: Whether the server ever answered, even with an error.
        is_refusing: Whether no request was ever answered and the latest was not sent.
        has_warned: Whether a retry was logged; only the first retry is logged.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.cache_name: str | None = label
        self.has_answered = self.is_refusing = self.has_warned = False

    def locate(self, key: str) -> str:
        """Return the address of ``key`` for messages, without secrets."""
        # A key may be a signed URL, whose signature must not be logged.
        key, label = redact_key(key), self.label
        return f"{label}{'' if label.endswith('/') else '/'}{key}" if key else label

    @abc.abstractmethod
    async def get(
        self, key: str, start: int, stop: int, version: Version | None = None
    ) -> Piece:
        """Return a byte range of an object; the server checks ``version`` if it can."""

    @abc.abstractmethod
    def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sized]:
        """Yield pages of (key, size); with ``after``, only keys that sort after it."""

    @abc.abstractmethod
    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Return the exception to raise for ``error``; its type decides on retries."""

    async def head(self, _key: str) -> Version | None:
        """Return a listed object's version, if known; raise if there is no object."""
        return None  # by default, every listed key is an object

    async def whole(self, key: str, size: int) -> "Bytes | bytes | memoryview":
        """Read a whole object into a read-only buffer, which the caller owns."""
        # Request one byte more than listed, to notice an object that has grown.
        data, version = await self.get(key, 0, size + 1 if size else _FIRST_BYTES)
        length = len(memoryview(data))
        if length < version.size:
            rest, current = await self.get(key, length, version.size)
            if current.is_of(version):
                data = b"".join((data, rest))
        if (length := len(memoryview(data))) != version.size:
            raise truncated(self.locate(key), version.size, length)
        return data if isinstance(data, bytes) else memoryview(data)

    async def ask(self, key: str, request: Awaitable[T], verb: str = "read") -> T:
        """Await a request; raise its errors as converted by ``failure``."""
        try:
            return await request
        except RefusedError:
            raise
        except Exception as exc:  # noqa: BLE001  (converted, and raised)
            failure = self.failure(key, exc, verb)
        try:
            raise failure  # outside `except`: a context's text may hold secrets
        finally:
            del failure

    async def drain(self, seconds: float | None = None) -> None:  # noqa: B027
        """Wait for the release of ended requests; cancel others after ``seconds``."""

    async def aclose(self, seconds: float | None = None) -> None:
        """Call ``drain``, then release connections; the store stays usable."""
        await self.drain(seconds)


class OwnStore(Store):
    """A store that reads from a user's ``Source``."""

    def __init__(self, source: Source) -> None:
        label = str(source.label)
        if "://" in label:
            label = redact_url(label)
        super().__init__(label or type(source).__name__)
        self.cache_name = label or None
        self._source = source

    async def get(
        self, key: str, start: int, stop: int, _version: Version | None = None
    ) -> Piece:
        piece: Any = await self._source.get(key, start, stop)
        if not (isinstance(piece, Piece) and isinstance(piece.version, Version)) or (
            memoryview(piece.data).nbytes > stop - start
        ):
            raise TypeError(
                f"{type(self._source).__name__}.get() must return "
                f"Piece(data, Version(size, ...)) with at most {stop - start:,} bytes"
            )
        data = piece.data
        return (
            piece
            if isinstance(data, bytes)
            else piece._replace(data=memoryview(data).cast("B"))
        )

    async def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sized]:
        """List the source from its beginning; yield pages of keys after ``after``."""
        listed: Any = self._source.list(prefix)
        keys = aiter(listed if hasattr(listed, "__aiter__") else _each(await listed))
        below, page = f"{prefix}/" if prefix else "", list[tuple[str, int]]()
        try:
            async for key, size in keys:
                is_below = key == prefix or key.startswith(below)
                if is_below and (after is None or key > after):
                    page.append((key, int(size)))
                if len(page) >= PAGE_KEYS:
                    yield page
                    page = []
            if page:
                yield page
        finally:
            if close := getattr(keys, "aclose", None):
                await close()

    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Convert a source's exception, unless it indicates a bug; see ``Store``."""
        if is_defect(error):
            # A StopAsyncIteration would silently end the stream.
            defect: Any = raisable(error, f"{type(self._source).__name__}.get()")
            return defect  # type: ignore[no-any-return]
        words = f"{type(error).__name__}: {redact_text(str(error))}".rstrip(": ")
        failure = failure_of_source(verb, self.locate(key), error, words)
        raised = failure.error if isinstance(failure, RefusedError) else failure
        if raised is not error:
            # A traceback's frames would keep the user's iterator alive.
            raised.__cause__ = error.with_traceback(None)
        return failure

    async def aclose(self, _seconds: float | None = None) -> None:
        await self._source.aclose()


async def _each(pairs: Sized) -> AsyncIterator[tuple[str, int]]:
    for pair in pairs:
        yield pair


def failure_of_source(
    verb: str, location: str, error: Exception, words: str, hint: str = ""
) -> Exception:
    """Return the exception to raise for a client's exception; see ``Store.failure``."""
    if isinstance(error, DatasetError):
        is_final = isinstance(error, (FileNotFoundError, PermissionError))
        return RefusedError(error) if is_final else error
    kind = type(error).__name__
    if status := _status_of(error):
        words = f"HTTP {status} ({kind})"
    is_missing = "NotFound" in kind or isinstance(error, FileNotFoundError)
    if not is_missing and (status in {401, 403} or isinstance(error, PermissionError)):
        text = f"may not {verb} {location!r}: {words}"
        return RefusedError(ObjectPermissionError(text, location=location))
    if status in {401, 404} or is_missing:
        none = f"no such file: {location!r} ({kind if status else words}){hint}"
        return RefusedError(ObjectNotFoundError(none, location=location))
    failure = DatasetError(f"cannot {verb} {location!r}: {words}", location=location)
    if not status and _is_unreachable(error):
        return UnreachableError(failure)
    is_final = isinstance(error, IsADirectoryError) or is_defect(error)
    return RefusedError(failure) if is_final or status in FINAL else failure


def is_defect(error: Exception) -> bool:
    """Return whether an exception indicates a bug, not a failed request."""
    return isinstance(error, _DEFECTS) and not isinstance(error, (OSError, EOFError))


def words_of(error: Exception) -> str:
    """Return an exception's type and errno message; its own text may hold secrets."""
    code = getattr(error, "errno", None)
    reason = f": {os.strerror(code)}" if isinstance(code, int) else ""
    return f"{type(error).__name__}{reason}"


def _status_of(error: Exception) -> int:
    """Return the HTTP status in a client's exception, or 0."""
    for owner in (getattr(error, "response", None), error):
        for name in ("status_code", "status"):
            if isinstance(status := getattr(owner, name, None), int):
                return status
    return 0


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether a refused connection or an unknown host caused ``error``."""
    while error is not None:
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Requests:
    """The rules of a dataset for requests that fail, stall or are slow.

    A failed request is retried until ``deadline``, or for 5 seconds if the host was
    never reached. Delay ``n`` is random in ``[0, min(max_delay, base_delay * 2**n)]``
    seconds, ``n`` from 0. obstore's own quick retries come first.
    Source: Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015);
    Dean and Barroso, "The Tail at Scale" (CACM 2013) for hedging.

    Attributes:
        timeout: Seconds after which a request is cancelled and counts as failed.
        deadline: Seconds for one piece of data, including all retries.
        base_delay: Upper bound of the first delay, in seconds.
        max_delay: Upper bound of every delay, in seconds.
        hedge: Whether to send a request a second time if it takes longer than 95 % of
            recent ones; the first success is used. Hedging costs up to 5 % more
            requests. It does not apply to servers without ranges.
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
    """Wraps an error that must not be retried."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class UnreachableError(RefusedError):
    """Wraps the error of a request that could not be sent; it is retried briefly."""

    error: DatasetError


class Tries:
    """Makes one dataset's requests on one loop, with timeouts, retries and hedging."""

    def __init__(self, policy: Requests) -> None:
        self._policy = policy
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)

    async def make(
        self,
        attempt: Attempt[T],
        server: Store,
        key: str,
        *,
        began: float | None = None,
        sent: int = 0,
        may_hedge: bool = True,
    ) -> T:
        """Return the result of ``attempt``, retried until the deadline.

        A ``DatasetError`` or timeout is retried; so is an ``UnreachableError``, but
        only for 5 seconds if the server never answered. Other errors are not retried.

        Args:
            attempt: Makes one request.
            server: The store that receives the request.
            key: The key, for messages.
            began: When the deadline started, by the loop's clock; the default is now.
            sent: How many attempts were already made since ``began``.
            may_hedge: Whether two attempts may run at once.
        """
        policy, clock = self._policy, asyncio.get_running_loop().time
        attempt = partial(self._timed, attempt) if may_hedge else attempt
        began = clock() if began is None else began
        failed = answer = None
        result: T | DatasetError | TimeoutError | None = None
        limit, delays = policy.deadline, backoff(policy.base_delay, policy.max_delay)
        try:
            while True:
                seconds = min(policy.timeout, began + policy.deadline - clock())
                if seconds <= 0 and failed is not None:
                    break
                result = await _tried(attempt, server, seconds)
                if not isinstance(result, (DatasetError, TimeoutError)):
                    return result
                if isinstance(result, DatasetError):
                    failed = answer = result
                elif answer is None or seconds == policy.timeout:
                    failed = _unanswered(server.locate(key), seconds, answer)
                else:  # the deadline cut it short: the previous error is clearer
                    failed = answer
                RETRIED[asyncio.current_task()] = failed
                sent += failed.attempts
                patience = _UNREACHED_SECONDS if server.is_refusing else math.inf
                limit = min(policy.deadline, patience)
                delay = next(delays)
                if clock() + delay >= began + limit:
                    break
                if not server.has_warned:  # hundreds of requests may be in flight
                    server.has_warned = True
                    _LOG.warning(_RETRYING, failed, limit)
                await asyncio.sleep(delay)
            assert failed is not None
            failed.args = (f"{failed}; given up after {limit:g} s, {sent} attempts",)
            failed.attempts = sent
            raise failed
        finally:
            if failed is not None:
                RETRIED.pop(asyncio.current_task(), None)
            failed = answer = result = None

    async def _timed(self, attempt: Attempt[T]) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        hedges = self._policy.hedge and len(self._durations) >= _MIN_DURATIONS
        result = await (self._hedged(attempt) if hedges else attempt())
        self._durations.append(loop.time() - began)
        return result

    async def _hedged(self, attempt: Attempt[T]) -> T:
        """Make a second attempt if the first is slow; return the earlier success."""
        delay = statistics.quantiles(self._durations, n=20)[-1]
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
    attempt: Attempt[T], server: Store, seconds: float
) -> T | DatasetError | TimeoutError:
    """Make one attempt; return its result, or an error that may be retried."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    # A timer takes 2 us per attempt, `asyncio.timeout` 4 to 8.
    before = task.cancelling()
    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        result = await attempt()
    except asyncio.CancelledError:
        if not is_late or task.cancelling() > before + 1:
            raise
        server.is_refusing = False
        return TimeoutError()
    except UnreachableError as unreachable:
        server.is_refusing = not server.has_answered
        return unreachable.error
    except (RefusedError, DatasetError) as failure:
        server.has_answered, server.is_refusing = True, False
        if isinstance(failure, RefusedError):
            raise failure.error from failure.error.__cause__
        # A traceback would form a cycle, which keeps the user's iterator alive.
        return failure.with_traceback(None)
    finally:
        timer.cancel()
        if is_late:
            task.uncancel()
    server.has_answered = True
    return result


def _unanswered(
    location: str, seconds: float, before: DatasetError | None
) -> DatasetError:
    text = f"{location!r}: no answer within {max(seconds, 0):.3g} s"
    text += "" if before is None else f"; the last error before: {before}"
    error = DatasetError(text, location=location)
    error.__cause__ = before
    return error
