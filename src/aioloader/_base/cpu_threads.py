"""Threads that run a loader's plain code as jobs, in order and without losing any.

Each thread has a queue. A posted job has no future, so it stores its result itself.
Any thread may post, and so may finalizers, because ``SimpleQueue`` is reentrant.
"""

import asyncio
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

from aioloader._base.forks import fork_safe
from aioloader._base.waiting import call_threadsafe, context_elsewhere
from aioloader.errors import LoaderClosedError

_WAITING_MODULES = ("threading", "queue", "select", "socket", "os")
T = TypeVar("T")

Job: TypeAlias = Callable[[], object]

# How long the interpreter's exit waits for a thread to finish its job, in seconds.
_EXIT_GRACE = 2.0
# Maximum number of threads that all ``SharedThread`` objects of the process borrow.
_MAX_SHARED = 8

_LOG = logging.getLogger("aioloader")


def stack_of(ident: int | None) -> str:
    """Return the thread's 8 innermost Python frames as text; "" if it does not run."""
    frame = sys._current_frames().get(ident) if ident else None  # noqa: SLF001  (the only way)
    return "".join(traceback.format_stack(frame)[-8:]) if frame else ""


class CpuThread(Executor):
    """A serial worker thread, started by its first job."""

    # Set when the thread has ended, or may no longer delay the interpreter's exit.
    quiet: threading.Event
    is_over: bool = False  # whether the thread has run its last job
    _is_once = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._is_stopped = False
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it, too

    @classmethod
    def once(cls, name: str = "aioloader-once") -> Self:
        """Return a new thread for a single job, which no other job can delay."""
        thread = cls(name)
        thread._is_once = True
        return thread

    def post(self, job: Job) -> bool:
        """Queue ``job`` after earlier ones; return False if the thread was stopped.

        The job handles its own errors; an error that it raises is only logged.
        """
        with self._lock:
            if self._is_stopped:
                return False
            self._jobs.put(job)
            if self.thread is None:
                self._start()
            if self._is_once:
                self.stop(self.ident)
        return True

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` after earlier jobs; return a future on the running loop."""
        future = asyncio.get_running_loop().create_future()
        if not self.post(partial(_fulfil, future, partial(function, *args, **kwargs))):
            raise LoaderClosedError("the thread of the loader has ended; iterate again")
        return future

    def post_nowait(self, job: Job) -> None:
        """Post a job to a running thread without taking a lock, as finalizers must."""
        self._jobs.put(job)

    def stop(self, then: Job) -> None:
        """Run ``then`` after earlier jobs, and end the thread if one was started."""
        with self._lock:
            self._is_stopped = True
            is_running = self.thread is not None
            if is_running:
                self._jobs.put(then)
                self._jobs.put(None)
        if not is_running:
            then()

    def join(self, timeout: float | None) -> None:
        if self.thread not in {None, threading.current_thread()}:
            self.thread.join(timeout)

    def ident(self) -> int | None:
        """Return the thread's ``threading`` identifier; None if it has not started."""
        return self.thread.ident if self.thread else None

    def _start(self) -> None:
        run = partial(context_elsewhere().run, self._run)
        self.quiet = fork_safe(threading.Event())
        _STARTED.add(self)
        self.thread = _daemon(run, self._name)  # its owner stops and joins it
        start_thread(self.thread)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                _do(job, self._name)
                del job  # the job may hold a batch
        finally:
            self.is_over = True
            self.quiet.set()

    def is_alive(self) -> bool:
        """Tell whether the thread runs; in a forked child it does not."""
        return self.thread is not None and self.thread.is_alive()


class SharedThread(CpuThread):
    """A serial executor that borrows any free shared thread for each job.

    A service may have hundreds of loaders, and a thread for each would cost more than
    their jobs. All loaders share a few threads, which start on demand. The threads end
    when the last ``SharedThread`` stops.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._ended = fork_safe(threading.Event())
        self._waiting: deque[Job] = deque()
        self._ident: int | None = None
        self._is_used = self._is_queued = False

    def post(self, job: Job) -> bool:
        with self._lock:
            if self._is_stopped:
                return False
            self._waiting.append(job)
            if not self._is_used:
                self._is_used = True
                _SHARED.add_user()
            self._queue()
        return True

    def post_nowait(self, job: Job) -> None:
        self.post(job)

    def stop(self, then: Job) -> None:
        with self._lock:
            is_idle = not (self._is_queued or self._waiting)
            is_running = self._is_used and not (self._is_stopped and is_idle)
            self._is_stopped = True
            if is_running:
                self._waiting.append(then)
                self._queue()
        if not is_running:
            then()

    def join(self, timeout: float | None) -> None:
        if self._is_used and self._ident != threading.get_ident():
            self._ended.wait(timeout)

    def ident(self) -> int | None:
        """Return the identifier of the thread that runs a job now, or None."""
        return self._ident

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            _SHARED.post(self._run_waiting)

    def _run_waiting(self) -> None:
        """Run waiting jobs until none is left or other loaders need the thread."""
        self._ident = threading.get_ident()
        has_more = True
        while has_more:
            _do(self._waiting.popleft(), self._name)
            with self._lock:
                has_more = bool(self._waiting) and not _SHARED.is_busy()
                if not has_more:
                    self._ident, self._is_queued = None, False
                    is_over = self._is_stopped and not self._waiting
                    if self._waiting:
                        self._queue()
        if is_over:
            self._ended.set()
            _SHARED.remove_user()


class _SharedThreads:
    """The threads that all ``SharedThread`` objects borrow."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all threads, jobs and users, which do not exist in a forked child."""
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._users = self._threads = self._idle = 0
        self._here = threading.local()

    def add_user(self) -> None:
        """Count a ``SharedThread`` as a user of the threads, until ``remove_user``."""
        with self._lock:
            self._users += 1

    def remove_user(self) -> None:
        """Remove a user, in one of the threads; after the last, end all threads."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for _ in range(self._threads):
                    self._jobs.put(None)
                self._threads = self._idle = 0
                self._jobs = queue.SimpleQueue()

    def is_busy(self) -> bool:
        """Tell whether jobs wait for a thread."""
        return not self._jobs.empty()

    def post(self, job: Job) -> None:
        """Queue ``job``; start a thread if none is free, up to ``_MAX_SHARED``."""
        with self._lock:
            self._jobs.put(job)
            if self._idle:
                self._idle -= 1
            elif self._threads < _MAX_SHARED:
                self._threads += 1
                start_thread(_daemon(partial(self._run, self._jobs), "aioloader-cpu"))

    def end(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def is_here(self) -> bool:
        """Tell whether the caller runs in a shared thread.

        A job there that waits for another shared thread may deadlock.
        """
        return bool(getattr(self._here, "is_shared", False))

    def _run(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        self._here.is_shared = True
        while (job := jobs.get()) is not None:
            job()
            del job
            with self._lock:
                if jobs is self._jobs and jobs.empty():
                    self._idle += 1


_SHARED = _SharedThreads()
is_shared_thread = _SHARED.is_here
if hasattr(os, "register_at_fork"):  # a forked child has no threads
    os.register_at_fork(after_in_child=_SHARED.forget)


def _fulfil(future: "asyncio.Future[T]", job: Callable[[], T]) -> None:
    """Run a job and set its future's result, unless the future was cancelled."""
    if future.cancelled():
        return
    try:
        settle: Job = partial(future.set_result, job())
    except BaseException as error:  # raised where the future is awaited
        if isinstance(error, StopIteration):  # a future cannot hold one
            stop, error = error, RuntimeError(f"it raised {type(error).__name__}")
            error.__cause__ = stop
        settle = partial(future.set_exception, error)
    call_threadsafe(future.get_loop(), _settle, future, settle)
    del future, settle  # the traceback would keep the error in a reference cycle


def _settle(future: "asyncio.Future[T]", settle: Job) -> None:
    if not future.done():
        settle()


def _do(job: Job, name: str) -> None:
    try:
        job()
    except BaseException:  # a bug of ours: log it and keep the thread
        _LOG.exception("a job of %s failed", name)


def _daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """Return a daemon thread, so that a stuck read cannot block the program's exit."""
    return threading.Thread(target=run, name=name, daemon=True)


def refuse_gevent(*, unless: str = "") -> None:
    """Raise if gevent has patched modules that waiting threads or processes use.

    If the module ``unless`` is also patched, threads work, and nothing is raised.

    Raises:
        RuntimeError: If gevent's patches would make the program hang.
    """
    patched = [
        *filter(sys.modules["gevent.monkey"].is_module_patched, _WAITING_MODULES)
    ]
    if patched and unless not in patched:
        raise RuntimeError(
            f"gevent has patched {', '.join(patched)}, so that worker processes and "
            "the loader's event loop would hang: iterate in a process where "
            "gevent.monkey.patch_all() is not called, or here with a plain `for` over "
            "a plain map-style dataset, without workers"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; the interpreter's exit waits up to ``_EXIT_GRACE`` for it."""
    if "gevent.monkey" in sys.modules:
        refuse_gevent(unless="threading")  # then threads are gevent's, which work
    thread.start()
    for started in list(_THREADS):
        if not started.is_alive():
            _THREADS.discard(started)
    _THREADS.add(thread)


def _await_at_exit() -> None:
    """Let threads finish their jobs and end before the interpreter is finalized.

    Afterwards, a thread that runs torch's code without the GIL would abort the process.
    An idle thread may also abort the process when the thread frees thread-local data.
    """
    until = time.monotonic() + _EXIT_GRACE
    running = [cpu for cpu in list(_STARTED) if cpu.is_alive()]
    for cpu in running:
        cpu.post_nowait(cpu.quiet.set)
    _SHARED.end()
    for cpu in running:
        cpu.quiet.wait(max(0.0, until - time.monotonic()))
    staying = {cpu.thread for cpu in running if not cpu.is_over}
    for thread in _THREADS - staying:
        thread.join(max(0.0, until - time.monotonic()))


_STARTED: weakref.WeakSet[CpuThread] = weakref.WeakSet()
# Running threads; a CpuThread may be collected before its thread ends.
_THREADS: set[threading.Thread] = set()
# Runs at exit, after the finalizers of iterators, which are newer and may post jobs.
weakref.finalize(_STARTED, _await_at_exit)
