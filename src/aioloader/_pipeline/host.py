"""Hosts of pipelines: the caller's thread, a private thread, or an event loop.

All iterations of a loader in the same place share one host, so that the dataset's
lifespan is entered there once, before the first sample is read, and left when the last
iteration returns its lease.
"""

import abc
import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioloader._observe.warnings import warn
from aioloader._order.forks import fork_safe
from aioloader._order.raising import raisable
from aioloader._pipeline.cpu import CpuThread, Job, SharedThread, in_new_thread
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.waiting import Latch
from aioloader.errors import LoaderClosedError

if TYPE_CHECKING:
    from aioloader._pipeline.loop_watch import LoopWatch

# How long a close waits for user code that does not return, in seconds.
GRACE = 10.0


class Hosted(Protocol):
    """What a host runs: the pipeline of one iteration, which holds a lease.

    Attributes:
        ended: Set when it has ended.
        exit_error: The error while it ended, raised by its close.
    """

    ended: Latch
    exit_error: BaseException | None

    async def main(self) -> None:
        """Run on the host's loop until closed."""

    def end(self) -> None:
        """Release what the iteration holds; called on the host's thread."""

    def fail(self, error: BaseException) -> None:
        """Make every wait of the consumer raise ``error``."""

    def join(self) -> bool:
        """Wait, bounded, for workers and stages; return whether they have ended."""

    def joins_at_once(self) -> bool:
        """Tell whether ``join`` has nothing to wait for."""

    def is_dismissed(self) -> bool:
        """Tell whether it is ending or has ended."""

    def release_workers(self) -> None:
        """Release its workers; for a loop that has stopped and cannot do so."""


class Host(abc.ABC):
    """Leases and waiting, the same for all hosts.

    Attributes:
        loop: The event loop, if the host has one.
        watch: Measures the lag of the loop.
        lifespan: What is entered here.
        cpu: The thread for plain code; starts with its first job.
        opened: Set when the lifespan was entered, or failed.
        closed: Set when everything has ended.
        exit_error: What the lifespan raised on exit, raised by the host's close.
    """

    loop: asyncio.AbstractEventLoop | None = None
    watch: "LoopWatch | None" = None

    def __init__(self, lifespan: Lifespan, *, shares_threads: bool = False) -> None:
        self.lifespan = lifespan
        self.opened: Latch = Latch()
        thread = SharedThread if shares_threads else CpuThread
        self.cpu: CpuThread | SharedThread = thread("aioloader-cpu")
        self.closed: Latch = Latch()
        self.is_closing: bool = False
        self.exit_error: BaseException | None = None
        self._broken: BaseException | None = None
        self._pipelines: set[Hosted] = set()
        self._held: list[Job] = []
        self._leases = 1  # its maker's
        self._lock = fork_safe(threading.RLock())  # a finalizer may run in between
        self._pid = os.getpid()

    # -- leases -------------------------------------------------------------------

    def lease(self) -> bool:
        """Take a lease; return whether the host was still open."""
        with self._lock:
            is_open = not self.is_closing and not self.is_foreign()
            self._leases += is_open
            return is_open

    def is_left(self) -> bool:
        """Tell whether all leases were returned, so that it closes."""
        return not self._leases

    def is_foreign(self) -> bool:
        """Tell whether this is a forked child's copy, which has no threads."""
        return os.getpid() != self._pid

    def ending(self) -> list[Hosted]:
        """Return the pipelines that were dismissed and have not ended."""
        with self._lock:
            return [one for one in self._pipelines if one.is_dismissed()]

    @abc.abstractmethod
    def open(self) -> None:
        """Start entering the lifespan, once; ``opened`` is set when done."""

    @abc.abstractmethod
    def admit(self, pipeline: Hosted) -> None:
        """Start running ``pipeline``, which holds a lease."""

    @abc.abstractmethod
    def dismiss(self, pipeline: Hosted) -> None:
        """Start ending ``pipeline``, which returns its lease; safe in finalizers."""

    @abc.abstractmethod
    def release(self) -> Latch:
        """Return a lease that no pipeline holds; the latch is set when done."""

    def failure(self) -> BaseException | None:
        """Wait until the lifespan was entered; return its error, if any."""
        self.opened.wait()
        return self._broken

    def post(self, job: Job) -> None:
        """Run ``job`` in the thread once the lifespan is entered; drop it on error."""
        if not self.opened.is_set():
            with self._lock:
                if not self.opened.is_set():
                    self._held.append(job)
                    return
        if self._broken is None:
            self.cpu.post(job)

    # -- waiting for the end ------------------------------------------------------

    def is_lost(self) -> bool:
        """Tell whether nothing runs here any more, so that a wait would never end."""
        return self.is_foreign()

    def give_up(  # noqa: B027  (threads are lost with their process only)
        self, returned: Latch, pipeline: Hosted | None
    ) -> None:
        """Take back a lease that a lost host cannot return."""

    def check_loop(self) -> None:  # noqa: B027  (of hosts that run on a loop)
        """Fail the pipelines if the loop that they run on was closed."""

    def is_here(self) -> bool:
        """Tell whether the calling thread is the host's, which cannot join itself."""
        return self.cpu.ident() == threading.get_ident()

    def is_on_loop(self) -> bool:
        """Tell whether the calling thread runs this host's event loop."""
        return False

    def join(self) -> None:
        """Wait for the threads to end, once ``closed`` is set."""
        self.cpu.join(GRACE)

    # -- for the subclasses -------------------------------------------------------

    def _entered(self) -> None:
        """Run the jobs that waited for the lifespan."""
        with self._lock:
            for job in self._held:
                self.cpu.post(job)
            self._held.clear()
            self.opened.set()

    def _add(self, pipeline: Hosted) -> bool:
        with self._lock:
            self._pipelines.add(pipeline)
            broken = self._broken
            self._broken = broken and again(broken)
        if broken is not None:
            pipeline.fail(broken)
        return broken is None

    def _break(self, error: BaseException, *, is_known: bool = False) -> None:
        """Fail all pipelines, later ones too; the error itself is raised once."""
        with self._lock:
            pipelines = list(self._pipelines)
            is_known = is_known or bool(pipelines)
            self._broken = self._broken or (again(error) if is_known else error)
            self.is_closing = True
            self._held.clear()
        self.opened.set()
        for pipeline in pipelines:
            pipeline.fail(error)

    def _take_back(self, pipeline: Hosted | None) -> bool:
        """Take back a lease, a pipeline's only once; return whether it was the last."""
        with self._lock:
            self._leases -= pipeline is None or pipeline in self._pipelines
            if pipeline is not None:
                self._pipelines.discard(pipeline)
            self.is_closing = self.is_closing or self.is_left()
            return self.is_left()


def again(error: BaseException) -> LoaderClosedError:
    """Return the error of later pipelines: the original is raised only once.

    A raised error has frames, which may hold this host's pipelines.
    """
    if isinstance(error, LoaderClosedError):
        return error
    return LoaderClosedError(f"the loader's lifespan has failed before: {error!r}")


class CallerHost(Host):
    """The caller's own thread; samples are read there, or in worker processes.

    Args:
        lifespan: What is entered here.
        reads: Whether samples are read here, so that the lifespan is entered.
    """

    def __init__(self, lifespan: Lifespan, *, reads: bool) -> None:
        super().__init__(lifespan)
        self._reads = reads

    def open(self) -> None:
        """Enter the lifespan, once."""
        with self._lock:
            if not self.opened.is_set():
                if self._reads:
                    self.lifespan.enter()
                self.opened.set()

    def admit(self, pipeline: Hosted) -> None:
        """Add ``pipeline``: its consumer drives it."""
        if self._add(pipeline):
            self.open()

    def dismiss(self, pipeline: Hosted) -> None:
        """End ``pipeline`` at once."""
        if self.is_foreign() or pipeline.ended.is_set():
            return
        pipeline.end()
        if self._take_back(pipeline):
            self._close()
        pipeline.ended.set()

    def release(self) -> Latch:
        """Return a lease; leave the lifespan with the last."""
        if self._take_back(None):
            self._close()
        return self.opened

    def _close(self) -> None:
        self.cpu.stop(self.closed.set)
        if self._reads:
            self.lifespan.leave()


class ThreadHost(Host):
    """A private thread, for datasets and functions that are all plain."""

    def __init__(self, lifespan: Lifespan) -> None:
        super().__init__(lifespan)
        self._is_open = False
        self.cpu.post(self.opened.is_set)  # finalizers post to a thread that runs

    def open(self) -> None:
        """Enter the lifespan in the thread, before later jobs."""
        with self._lock:
            if not self._is_open:
                self._is_open = self.cpu.post(self._open)

    def admit(self, pipeline: Hosted) -> None:
        """Start ``pipeline``, which needs nothing but the thread."""
        if self._add(pipeline):
            self.open()

    def dismiss(self, pipeline: Hosted) -> None:
        """End ``pipeline`` in the thread, after the current job."""
        if not self.is_foreign():
            self.cpu.post_nowait(lambda: self._end(pipeline))

    def release(self) -> Latch:
        """Return a lease; with the last one leave the lifespan, in the thread."""
        released = Latch()
        if not self.is_foreign():
            self.cpu.post_nowait(lambda: self._return(released))
        return released

    def _return(self, released: Latch) -> None:
        if self._take_back(None):
            self._close()
        released.set()

    def _open(self) -> None:
        try:
            self.lifespan.enter()
        except BaseException as error:  # handed to the consumers
            self._break(error)
        else:
            self._entered()

    def _end(self, pipeline: Hosted) -> None:
        pipeline.end()
        if self._take_back(pipeline):
            self._close()
        pipeline.ended.set()

    def _close(self) -> None:
        try:
            self.lifespan.leave()
        except BaseException as error:  # raised where it is closed
            self.exit_error = error
        self.cpu.stop(self.closed.set)


# -- waiting for the release ------------------------------------------------------


def wait_released(host: Host, returned: Latch, pipeline: Hosted | None = None) -> None:
    """Wait for a lease's return, and for ``host`` if it was the last; bounded.

    Args:
        host: The host that granted it.
        returned: Set when it is returned.
        pipeline: The pipeline that held it, if any: its workers and stages are then
            joined.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    if host.is_lost():
        host.give_up(returned, pipeline)
    elif not host.is_here():
        is_ended = returned.wait(GRACE)
        if is_ended and host.is_left():
            is_ended = host.closed.wait(GRACE)
        if not is_ended:
            _warn_stuck()
        elif host.is_left():
            host.join()
        if pipeline is not None and not pipeline.join():
            _warn_stuck()
    _raise_exit_errors(host, pipeline)


async def wait_released_async(
    host: Host, returned: Latch, pipeline: Hosted | None = None
) -> None:
    """Wait as ``wait_released`` does, without blocking the loop.

    The wait is completed even if the calling task is cancelled, once or more.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    cancelled: asyncio.CancelledError | None = None
    joining: asyncio.Future[bool] | None = None
    import anyio

    with anyio.CancelScope(shield=True):
        if host.is_lost():
            host.give_up(returned, pipeline)
        else:
            cancelled = await _outlast(partial(_released, host, returned))
            if pipeline is not None and not pipeline.joins_at_once():
                joining = asyncio.ensure_future(in_new_thread(pipeline.join))
                cancelled = (
                    await _outlast(partial(asyncio.wait, [joining])) or cancelled
                )
                if joining.exception() is None and not joining.result():
                    _warn_stuck()
    if cancelled is not None:
        raise cancelled
    if joining is not None:
        joining.result()  # an error of leaving the lifespan in a worker
    _raise_exit_errors(host, pipeline)


async def _outlast(
    wait: Callable[[], Coroutine[Any, Any, object]],
) -> asyncio.CancelledError | None:
    """Await to the end despite cancellations of this task; return the last one."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await wait()
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            return cancelled


async def _released(host: Host, returned: Latch) -> None:
    """Wait for a lease's return, and for ``host`` if it was the last."""
    is_ended = await returned.wait_async(GRACE)
    if is_ended and host.is_left():
        is_ended = await host.closed.wait_async(GRACE)
    if not is_ended:
        _warn_stuck()


def _warn_stuck() -> None:
    warn(
        f"a DataLoader was closed, but code of its dataset or functions has not "
        f"returned for {GRACE:g} seconds; its thread is still running",
        ResourceWarning,
    )


def _raise_exit_errors(host: Host, pipeline: Hosted | None) -> None:
    """Raise what went wrong while closing, once."""
    for holder in (pipeline, host):
        if holder is not None:
            error, holder.exit_error = holder.exit_error, None
            if error is not None:
                raise raisable(error, "closing the dataset")
