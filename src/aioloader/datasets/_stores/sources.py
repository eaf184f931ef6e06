"""Sources of bytes: what a user's store must do, and how any store is asked.

``Source`` is public and small. ``Store`` is what all readers use: a source together
with what is known of its server, and the one judge of what it raises. obstore, file
systems of fsspec and users' sources are its three kinds.
"""

import abc
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from aioloader._base.raising import raisable
from aioloader.datasets._stores.failures import truncated
from aioloader.datasets._stores.redact import redact_text, redact_url
from aioloader.datasets._stores.requests import RefusedError, Server, UnreachableError
from aioloader.datasets._stores.versions import Piece, Version
from aioloader.errors import DatasetError, ObjectNotFoundError, ObjectPermissionError

if TYPE_CHECKING:
    from obstore import Bytes

T = TypeVar("T")
Sized: TypeAlias = Iterable[tuple[str, int]]

# Statuses that a retry will not change; 408 and 429 are worth one.
FINAL = frozenset(range(400, 500)) - {408, 425, 429}
_PAGE = 1000
# An object of unknown size is read in two steps if it is longer.
_FIRST = 1 << 20
_DEFECTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
    MemoryError, NameError, RuntimeError, StopAsyncIteration, TypeError, ValueError,
)  # fmt: skip


class Source(abc.ABC):
    """A store of your own, accepted wherever ``store=`` is.

    Derive from it, and implement ``get``; ``list`` too, if names are looked up. Around
    it are retries by ``Requests``, checks of lengths and versions, the cache, and
    reading ahead. Raise ``FileNotFoundError`` and ``PermissionError`` for errors that
    waiting cannot fix. Any other ``OSError``, and what an HTTP client raises, is
    retried; built-in exceptions that indicate a bug, such as ``TypeError``, are raised
    as they are.

    Several event loops may call it at once. Workers get it by pickle, so keep clients
    and secrets out of its state: read them from the environment.

    Attributes:
        label: Its address, for messages, without secrets. It names the bytes in a
            cache too: without one, nothing is cached.
    """

    label: str = ""

    @abc.abstractmethod
    async def get(self, key: str, start: int, stop: int) -> Piece:
        """Return the bytes of an object from ``start`` to ``stop``, and its version.

        Fewer at the end of the object, none beyond it. The caller owns the buffer.
        """

    def list(self, prefix: str) -> "AsyncIterable[tuple[str, int]] | Awaitable[Sized]":
        """Return keys that start with ``prefix``, and their sizes in bytes.

        An async generator, or a coroutine that returns a list; in any order. Keys that
        do not start with ``prefix`` are left out.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no list(): name the shards one by one, or pass "
            f"keys=; {prefix!r} cannot be looked up"
        )

    async def aclose(self) -> None:  # noqa: B027  (a default)
        """Release what belongs to the running loop, such as idle connections.

        Called after the last iteration on that loop; the source stays usable.
        """


class Store(Server, abc.ABC):
    """One store: a source, and what is known of its server.

    Attributes:
        cache_name: What names its bytes in a cache; None: they are not cached.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.cache_name: str | None = label

    @abc.abstractmethod
    async def get(
        self, key: str, start: int, stop: int, version: Version | None = None
    ) -> Piece:
        """Return a range, at a version if the server knows that condition."""

    @abc.abstractmethod
    def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sized]:
        """Return keys and sizes, page by page; only those after a key, if it is given.

        That key was the largest of pages that came in order.
        """

    @abc.abstractmethod
    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Return what to raise for an exception: to be retried, or a refusal."""

    async def head(self, _key: str) -> Version | None:
        """Return the version of a listed key; fail if no object has that key."""
        return None  # by default, all that is listed is an object

    async def whole(self, key: str, size: int) -> "Bytes | bytes | memoryview":
        """Return an object: a read-only buffer, owned by the caller."""
        # One byte more than listed, to notice an object that has grown.
        data, version = await self.get(key, 0, size + 1 if size else _FIRST)
        length = len(memoryview(data))
        if length < version.size:
            rest, now = await self.get(key, length, version.size)
            if now.is_of(version):
                data = b"".join((data, rest))
        if (length := len(memoryview(data))) != version.size:
            raise truncated(self.locate(key), version.size, length)
        return data if isinstance(data, bytes) else memoryview(data)

    async def ask(self, key: str, request: Awaitable[T], verb: str = "read") -> T:
        """Return the result of a request, or raise what ``failure`` makes of errors."""
        try:
            return await request
        except RefusedError:
            raise
        except Exception as exc:  # noqa: BLE001  (raised, as what it means)
            failure = self.failure(key, exc, verb)
        try:
            raise failure  # without a context, whose text may hold secrets
        finally:
            del failure

    async def drain(self, seconds: float | None = None) -> None:
        """Wait until nothing refers to this loop's requests any more."""

    async def aclose(self, seconds: float | None = None) -> None:
        """Drain, then release idle connections; the store stays usable."""
        await self.drain(seconds)


class OwnStore(Store):
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
        """Return what the source lists; from its start, but only the missing pages."""
        found: Any = self._source.list(prefix)
        keys = aiter(found if hasattr(found, "__aiter__") else _each(await found))
        below, page = f"{prefix}/" if prefix else "", list[tuple[str, int]]()
        try:
            async for key, size in keys:
                is_below = key == prefix or key.startswith(below)
                if is_below and (after is None or key > after):
                    page.append((key, int(size)))
                if len(page) >= _PAGE:
                    yield page
                    page = []
            if page:
                yield page
        finally:
            if close := getattr(keys, "aclose", None):
                await close()

    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Return what to raise; its cause is the user's exception."""
        if is_defect(error):
            # A StopAsyncIteration would end the stream.
            loud: Any = raisable(error, f"{type(self._source).__name__}.get()")
            return loud  # type: ignore[no-any-return]
        said = f"{type(error).__name__}: {redact_text(str(error))}".rstrip(": ")
        failure = failure_of_source(verb, self.locate(key), error, said)
        raised = failure.error if isinstance(failure, RefusedError) else failure
        if raised is not error:
            # Frames of its traceback would keep the user's iterator.
            raised.__cause__ = error.with_traceback(None)
        return failure

    async def aclose(self, _seconds: float | None = None) -> None:
        await self._source.aclose()


async def _each(found: Sized) -> AsyncIterator[tuple[str, int]]:
    for pair in found:
        yield pair


def failure_of_source(
    verb: str, location: str, error: Exception, said: str, hint: str = ""
) -> Exception:
    """Return what to raise for an exception of a client: to retry, or a refusal."""
    if isinstance(error, DatasetError):
        is_final = isinstance(error, (FileNotFoundError, PermissionError))
        return RefusedError(error) if is_final else error
    kind = type(error).__name__
    if status := _status_of(error):
        said = f"HTTP {status} ({kind})"
    is_missing = "NotFound" in kind or isinstance(error, FileNotFoundError)
    if not is_missing and (status in {401, 403} or isinstance(error, PermissionError)):
        text = f"may not {verb} {location!r}: {said}"
        return RefusedError(ObjectPermissionError(text, location=location))
    if status in {401, 404} or is_missing:
        none = f"no such file: {location!r} ({kind if status else said}){hint}"
        return RefusedError(ObjectNotFoundError(none, location=location))
    failure = DatasetError(f"cannot {verb} {location!r}: {said}", location=location)
    if not status and _is_unreachable(error):
        return UnreachableError(failure)
    is_final = isinstance(error, IsADirectoryError) or is_defect(error)
    return RefusedError(failure) if is_final or status in FINAL else failure


def is_defect(error: Exception) -> bool:
    """Return whether an exception means wrong code, and no request that failed."""
    return isinstance(error, _DEFECTS) and not isinstance(error, (OSError, EOFError))


def words_of(error: Exception) -> str:
    """Return what may be shown of an exception whose text may hold secrets."""
    code = getattr(error, "errno", None)
    reason = f": {os.strerror(code)}" if isinstance(code, int) else ""
    return f"{type(error).__name__}{reason}"


def _status_of(error: Exception) -> int:
    """Return the HTTP status in an exception of a client; 0 if there is none."""
    answer = getattr(error, "response", None)
    for one in (answer, error):
        for name in ("status_code", "status"):
            if isinstance(status := getattr(one, name, None), int):
                return status
    return 0


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether a refused connection or an unknown host caused ``error``."""
    while error is not None:
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False
