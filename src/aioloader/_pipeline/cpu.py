"""One thread that runs plain code for a loader: jobs in, in order, none lost.

A queue per thread and no futures: a job puts its own result where it belongs. Posting
is safe from any thread, and from finalizers (``SimpleQueue`` is reentrant).
"""

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from aioloader._order.forks import fork_safe
from aioloader._pipeline.waiting import Latch, call_threadsafe, context_elsewhere
from aioloader.errors import LoaderClosedError

T = TypeVar("T")

Job: TypeAlias = Callable[[], object]

# How long the interpreter's exit waits for a thread to finish its job, in seconds.
_EXIT_GRACE = 2.0

_LOG = logging.getLogger("aioloader")


async def beside(job: Callable[[], T]) -> T:
    """Return what ``job`` returns, in a thread of its own: it may take long."""
    found: list[T] = []
    errors: list[BaseException] = []
    done = Latch()

    def do() -> None:
        try:
            found.append(job())
        except BaseException as error:  # raised by who waits
            errors.append(error)

    thread = CpuThread("aioloader-once")
    thread.post(do)
    thread.stop(done.set)
    await done.wait_async()
    if errors:
        raise errors.pop()
    return found.pop()


class CpuThread:
    """A serial worker thread, started by its first job.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._lock = fork_safe(threading.RLock())  # a finalizer may come in between
        self._ended = fork_safe(threading.Event())
        self._stopping = fork_safe(threading.Event())

    def post(self, job: Job) -> bool:
        """Run ``job`` after those posted before; tell whether the thread takes jobs.

        The job sees to its own errors.
        """
        with self._lock:
            if self._is_stopped:
                return False
            self._jobs.put(job)
            if self._thread is None:
                self._start()
        return True

    async def call(self, job: Callable[[], T]) -> T:
        """Return what ``job`` returns in the thread, after the jobs posted before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def do() -> None:
            try:
                found = job()
            except BaseException as error:  # raised by the caller
                call_threadsafe(loop, _fail, future, error)
            else:
                call_threadsafe(loop, _succeed, future, found)

        if not self.post(do):
            raise LoaderClosedError("the thread of the loader has ended")
        return await future

    def post_nowait(self, job: Job) -> None:
        """Post from a finalizer, to a thread that runs: takes no lock."""
        self._jobs.put(job)

    def stop(self, then: Job) -> None:
        """End the thread after the jobs posted so far, and call ``then`` at its end."""
        with self._lock:
            self._is_stopped = True
            self._stopping.set()
            is_running = self._thread is not None
            if is_running:
                self._jobs.put(then)
                self._jobs.put(None)
        if not is_running:
            then()

    def join(self, timeout: float) -> None:
        """Wait for the thread to be gone, at most ``timeout`` seconds."""
        if self._thread not in {None, threading.current_thread()}:
            self._thread.join(timeout)

    def ident(self) -> int | None:
        """Return the identifier of the thread, once it runs."""
        return self._thread.ident if self._thread else None

    def _start(self) -> None:
        # A daemon, so that a stuck read cannot keep the interpreter from ending; it is
        # the owner of this object that stops and joins it.
        context = context_elsewhere()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=self._name, daemon=True
        )
        weakref.finalize(self._thread, _await_at_exit, self._ended, self._stopping)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException:  # a defect of ours: said, and the thread lives on
                    _LOG.exception("a job of %s failed", self._name)
                del job  # it may hold a batch
        finally:
            self._ended.set()


def _succeed(future: "asyncio.Future[Any]", found: Any) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if isinstance(error, StopIteration):  # no future takes one
        error, cause = RuntimeError(f"it raised {type(error).__name__}"), error
        error.__cause__ = cause
    if not future.done():
        future.set_exception(error)


def _await_at_exit(ended: threading.Event, stopping: threading.Event) -> None:
    """Let a thread that was told to end do so, before the interpreter is dismantled.

    One that is in torch's code then, without the interpreter's lock, would end the
    process by an abort. Called when the thread is gone, or at exit.
    """
    if stopping.is_set():
        ended.wait(_EXIT_GRACE)
