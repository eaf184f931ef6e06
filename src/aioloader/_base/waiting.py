"""Let Ctrl-C interrupt the waits of threads, and of tasks on any loop.

A signal that arrives just before the main thread sleeps does not wake the thread; the
signal's handler runs when the thread next runs. So a waiting thread wakes up every
second, and a loop on the main thread has a timer while tasks wait there.
"""

import asyncio
import contextlib
import contextvars
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from aioloader._base.forks import fork_safe

LOOK_UP: Final = 1.0  # seconds by which Ctrl-C may be late
_NOTHING: Final = contextlib.nullcontext()
# Returns this thread's running loop, or None; the public function raises instead.
running_loop: Final = asyncio._get_running_loop  # noqa: SLF001


class Waiters:
    """Threads and tasks that wait until ``wake`` is called, unless ``is_true()``.

    A subclass may define ``_is_true`` as a method instead.
    """

    _is_true: Callable[[], bool]

    def __init__(self, is_true: Callable[[], bool] | None = None) -> None:
        self.lock = fork_safe(threading.RLock())  # a finalizer may need it, too
        self._wakes: deque[Callable[[], object]] = deque()
        if is_true is not None:
            self._is_true = is_true

    def wake(self, count: int | None = None) -> None:
        """Wake ``count`` waiters, or all if None. Do not hold the lock when calling."""
        with self.lock:
            number = len(self._wakes) if count is None else min(count, len(self._wakes))
            wakes = [self._wakes.popleft() for _ in range(number)]
        for wake in wakes:
            wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until woken; return False if ``timeout`` seconds pass."""
        gate = threading.Lock()
        gate.acquire()
        if not self._enter(gate.release):
            return True
        try:
            left = math.inf if timeout is None else max(0.0, timeout)
            until = time.monotonic() + left
            while not gate.acquire(timeout=min(left, LOOK_UP)):
                left = until - time.monotonic()
                if left <= 0:
                    return not self._leave(gate.release)
        except BaseException:
            self._leave(gate.release)
            raise
        return True

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend this task until woken; return False if ``timeout`` seconds pass."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        wake = partial(call_threadsafe, loop, resolve, woken)
        if not self._enter(wake):
            return True
        try:
            with looking_up(loop):
                if timeout is None:
                    await woken
                else:
                    async with asyncio.timeout(timeout):
                        await woken
        except TimeoutError:
            return not self._leave(wake)
        except BaseException:
            self._leave(wake)
            raise
        return True

    def _enter(self, wake: Callable[[], object]) -> bool:
        with self.lock:
            if self._is_true():
                return False
            self._wakes.append(wake)
            return True

    def _leave(self, wake: Callable[[], object]) -> bool:
        """Stop waiting. If already woken, wake the next waiter and return False."""
        with self.lock:
            if wake in self._wakes:
                self._wakes.remove(wake)
                return True
        self.wake(1)
        return False


class Latch(Waiters):
    """A switch that is set once; threads and tasks can wait until it is set."""

    _is_set = False

    def is_set(self) -> bool:
        return self._is_set

    _is_true = is_set

    def set(self) -> None:
        """Set the latch, which cannot be unset, and wake all waiters."""
        self._is_set = True
        self.wake()


class _LookUp:
    """A context for waits on the main thread's loop; a timer wakes the loop."""

    _waits, _is_on = 0, False

    def __enter__(self) -> None:
        self._waits += 1
        if not self._is_on:
            self._tick()

    def __exit__(self, *_exc: object) -> None:
        self._waits -= 1

    def _tick(self) -> None:
        self._is_on = False  # first: Ctrl-C may interrupt the next lines
        if self._waits:
            asyncio.get_running_loop().call_later(LOOK_UP, self._tick)
            self._is_on = True


_LOOK_UPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LookUp]
_LOOK_UPS = weakref.WeakKeyDictionary()


def looking_up(loop: asyncio.AbstractEventLoop) -> AbstractContextManager[object]:
    """Return a context in which Ctrl-C interrupts a wait on this thread's ``loop``."""
    if threading.current_thread() is not threading.main_thread():
        return _NOTHING
    if (timer := _LOOK_UPS.get(loop)) is None:
        timer = _LOOK_UPS[loop] = _LookUp()
    return timer


def call_threadsafe(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> bool:
    """Schedule a callback from any thread; return False if ``loop`` is closed."""
    # On the loop's own thread no wake-up is needed, which saves a system call.
    call = loop.call_soon if running_loop() is loop else loop.call_soon_threadsafe
    try:
        call(callback, *args)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True


def context_elsewhere() -> contextvars.Context:
    """Return a copy of the current context for code that runs in another thread.

    In the copy, sniffio (used by anyio) does not report the caller's async library.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")
    library = getattr(sniffio, "current_async_library_cvar", None)
    if library is not None:  # sniffio is imported completely
        context.run(library.set, None)
    return context


def require_asyncio() -> None:
    """Raise ``RuntimeError`` unless the caller runs in an asyncio task."""
    with contextlib.suppress(RuntimeError):
        if asyncio.current_task() is not None:
            return
    raise RuntimeError(
        "`async for` over a DataLoader needs asyncio, and no asyncio task runs here "
        "(trio is not supported): start the program with asyncio.run(...) or "
        "anyio.run(..., backend='asyncio'), or iterate with a plain `for`, under trio "
        "in a thread (trio.to_thread.run_sync)"
    )


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
