"""Hosts of pipelines: the caller's thread, a private thread, or an event loop.

All iterations of a loader in the same place share one host, so that the dataset's
lifespan is entered there once, before the first sample is read, and left when the last
iteration returns its lease.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader._observe.warnings import warn
from aioloader._order.forks import fork_safe
from aioloader._order.raising import raisable
from aioloader._pipeline.cpu import CpuThread, SharedThread, in_new_thread
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.waiting import Latch
from aioloader.errors import LoaderClosedError

if TYPE_CHECKING:
    from aioloader._pipeline.loop_watch import LoopWatch

# How long a close waits for user code that does not return, in seconds.
GRACE = 10.0
# A ``Pipeline``, which imports this module.
Pipeline: TypeAlias = Any


class Host:
    """A private thread, for datasets and functions that are all plain.

    Leases and waiting are the same for all hosts.

    Attributes:
        loop: The event loop, if the host has one.
        watch: Measures the lag of the loop.
        lifespan: What is entered here.
        cpu: The thread for plain code; starts with its first job, and enters first.
        opened: Set when the lifespan was entered, or failed.
        closed: Set when everything has ended.
        is_closing: Whether it has failed, or all leases were returned.
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
        self._pipelines: set[Pipeline] = set()
        self._leases = 1  # its maker's
        self._is_open = False
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

    def ending(self) -> list[Pipeline]:
        """Return the pipelines that were dismissed and have not ended."""
        with self._lock:
            return [one for one in self._pipelines if one.is_closing]

    def open(self) -> None:
        """Start entering the lifespan, once; ``opened`` is set when done."""
        with self._lock:
            if not self._is_open:
                self._is_open = self.cpu.post(self._open)

    def admit(self, pipeline: Pipeline) -> None:
        """Start running ``pipeline``, which holds a lease."""
        with self._lock:
            self._pipelines.add(pipeline)
            broken = self._broken
            self._broken = broken and again(broken)
        if broken is None:
            self._start(pipeline)
        else:
            pipeline.fail(broken)

    def dismiss(self, pipeline: Pipeline) -> None:
        """Start ending ``pipeline``, which returns its lease; safe in finalizers."""
        if not self.is_foreign():
            self._run(self._end, pipeline, pipeline.ended)

    def release(self) -> Latch:
        """Return a lease that no pipeline holds; the latch is set when done."""
        released = Latch()
        if not self.is_foreign():
            self._run(self._return, None, released)
        return released

    def failure(self) -> BaseException | None:
        """Wait until the lifespan was entered; return its error, if any."""
        self.opened.wait()
        return self._broken

    # -- waiting for the end ------------------------------------------------------

    def is_lost(self) -> bool:
        """Tell whether nothing runs here any more, so that a wait would never end."""
        return self.is_foreign()

    def give_up(self, returned: Latch, pipeline: Pipeline | None) -> None:
        """Take back a lease that a lost host cannot return."""

    def check_loop(self) -> None:
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

    # -- in the host's own thread ---------------------------------------------------

    def _open(self) -> None:
        try:
            self.lifespan.enter()
        except BaseException as error:  # handed to the consumers
            self._break(error)
        else:
            self.opened.set()

    def _run(
        self,
        step: Callable[[Any, Latch], None],
        pipeline: Pipeline | None,
        returned: Latch,
    ) -> None:
        """Take a step in the host's thread; from any thread, and finalizers."""
        self.cpu.post_nowait(partial(step, pipeline, returned))

    def _start(self, pipeline: Pipeline) -> None:  # noqa: ARG002  (it needs no more)
        self.open()

    def _end(self, pipeline: Pipeline, ended: Latch) -> None:
        pipeline.end()
        self._return(pipeline, ended)

    def _return(self, pipeline: Pipeline | None, returned: Latch) -> None:
        """Take back a lease; close after the last one."""
        if self._take_back(pipeline):
            self._close()
        returned.set()

    def _close(self) -> None:
        """Leave the lifespan, and end the thread."""
        try:
            self.lifespan.leave()
        except BaseException as error:  # raised where it is closed
            self.exit_error = error
        self.cpu.stop(self.closed.set)

    def _break(self, error: BaseException, *, is_known: bool = False) -> None:
        """Fail all pipelines, later ones too; the error itself is raised once."""
        with self._lock:
            pipelines = list(self._pipelines)
            is_known = is_known or bool(pipelines)
            self._broken = self._broken or (again(error) if is_known else error)
            self.is_closing = True
        self.opened.set()
        for pipeline in pipelines:
            pipeline.fail(error)

    def _take_back(self, pipeline: Pipeline | None) -> bool:
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
    """The caller's own thread; samples are read there, or in worker processes."""

    def open(self) -> None:
        """Enter the lifespan, once."""
        with self._lock:
            if not self.opened.is_set():
                self.lifespan.enter()
                self.opened.set()

    def _run(self, step: Any, pipeline: Pipeline | None, returned: Latch) -> None:
        step(pipeline, returned)

    def _close(self) -> None:
        self.cpu.stop(self.closed.set)
        self.lifespan.leave()


# -- waiting for the release ------------------------------------------------------


def wait_released(
    host: Host, returned: Latch, pipeline: Pipeline | None = None
) -> None:
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
    host: Host, returned: Latch, pipeline: Pipeline | None = None
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


def _raise_exit_errors(host: Host, pipeline: Pipeline | None) -> None:
    """Raise what went wrong while closing, once."""
    for holder in (pipeline, host):
        if holder is not None:
            error, holder.exit_error = holder.exit_error, None
            if error is not None:
                raise raisable(error, "closing the dataset")
