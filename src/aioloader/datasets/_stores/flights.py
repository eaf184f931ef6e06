"""Requests of obstore that are in flight on one event loop, and waiting for their end.

obstore runs requests on its own threads. Such a thread still needs the interpreter for
a moment after a request ended or was cancelled; if the interpreter is gone by then, the
process crashes: 6 of 40 that ended right after their last read did, and none of 240
that called ``drain``.
"""

import asyncio
import copy
import sys
from collections import deque
from collections.abc import Awaitable
from types import ModuleType
from typing import Any, TypeVar
from weakref import ref

from aioloader._base.extras import imported

T = TypeVar("T")

# How long obstore's threads may take to release a finished request: in practice 10 ms
# for 200 cancelled at once.
_LET_GO_SECONDS = 1.0


def import_obstore() -> ModuleType:
    """Import obstore, or raise an ImportError that says how to install it."""
    if sys.modules.get("obstore.store") is None:  # each request asks for it
        imported("obstore.store", "objects", "object stores and HTTP need obstore")
    return sys.modules["obstore"]


def obstore_errors() -> tuple[type[Exception], ...]:
    """Return obstore's exception types; their texts may hold secrets."""
    base: type[Exception] = import_obstore().exceptions.BaseError
    return base, NotImplementedError, OSError, TypeError, ValueError


class Flights:
    """Tracks requests from their start until obstore's threads have released them.

    All methods belong to the loop's thread.
    """

    def __init__(self) -> None:
        self._open: set[asyncio.Future[Any]] = set()
        self._ended: deque[ref[asyncio.Future[Any]]] = deque(maxlen=4096)

    async def follow(self, request: Awaitable[T]) -> T:
        """Await a request of obstore; cancelling stops the request itself.

        obstore's threads may keep the request, and so its exception, until the next
        call of obstore: a copy of it is raised, or the frames of its traceback would
        live as long, and with them the iterator that awaits the batch.
        """
        future = asyncio.ensure_future(request)
        self._open.add(future)
        try:
            return await future
        except Exception as exc:  # noqa: BLE001  (its copy is raised)
            failure = copy.copy(exc.with_traceback(None))
        finally:
            self._open.discard(future)
            self._ended.append(ref(future))
            # A frame kept by a traceback must not look like a reference of a thread.
            del future, request
        try:
            raise failure
        finally:
            del failure

    async def drain(self, seconds: float | None) -> None:
        """Wait until obstore has released all requests that ended."""
        if self._open and seconds is not None:
            # Only the late ones: a variable for the others would keep references.
            late = (await asyncio.wait(self._open, timeout=seconds))[1]
            while late:
                self._cancel(late.pop())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LET_GO_SECONDS
        # Rust drops its reference as its last act under the interpreter lock. A
        # callback from there would itself have to be waited for, so this polls.
        while self._is_held() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._ended.clear()

    def _cancel(self, future: "asyncio.Future[Any]") -> None:
        future.cancel()
        self._ended.append(ref(future))

    def _is_held(self) -> bool:
        if self._ended:
            # References dropped without the lock are subtracted in the next call.
            import_obstore().Bytes()
        return any(future() is not None for future in self._ended)
