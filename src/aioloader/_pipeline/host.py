"""Where a loader lives while it is iterated: its threads, its loop, its lifespan.

All iterations of a loader that run in the same place share one host, so the lifespan of
the dataset is entered once, there, before the first of them reads, and left when the
last of them returns its lease.
"""

import abc
import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.abc

from aioloader._order.forks import fork_safe
from aioloader._pipeline.cpu import CpuThread, Job
from aioloader._pipeline.hosted import Hosted, Keeper
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.waiting import Latch, call_threadsafe, context_elsewhere
from aioloader.errors import LoaderClosedError

# How long a close waits for user code that does not return, in seconds.
GRACE = 10.0
_NAME = "aioloader pipeline"  # of an iteration's task


class Host(abc.ABC):
    """Leases, and what is common to all places.

    Attributes:
        lifespan: What is entered here.
        opened: Set when the lifespan was entered, or failed.
        closed: Set at the very end.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, lifespan: Lifespan) -> None:
        self.lifespan = lifespan
        self.opened = Latch()
        self.cpu = CpuThread("aioloader-cpu")
        self.closed = Latch()
        self.is_closing = False
        self.exit_error: BaseException | None = None
        self._broken: BaseException | None = None
        self._hosted_ones: set[Hosted] = set()
        self._held: list[Job] = []
        self._leases = 1  # of whoever makes it
        self._lock = fork_safe(threading.RLock())  # a finalizer may come in between
        self._pid = os.getpid()

    def lease(self) -> bool:
        """Take a share in this host; tell whether it is still open."""
        with self._lock:
            is_open = not self.is_closing and not self.is_foreign()
            self._leases += is_open
            return is_open

    def is_left(self) -> bool:
        """Tell whether all leases were returned: then it closes."""
        return not self._leases

    def is_foreign(self) -> bool:
        """Tell whether this is a forked child's copy, which has no threads."""
        return os.getpid() != self._pid

    @abc.abstractmethod
    def open(self) -> None:
        """Begin to enter the lifespan, once; ``opened`` tells when that is done."""

    def failure(self) -> BaseException | None:
        """Wait until the lifespan was entered; return what has failed, if anything."""
        self.opened.wait()
        return self._broken

    def post(self, job: Job) -> None:
        """Run ``job`` in the thread once the lifespan was entered, if it can be."""
        if not self.opened.is_set():
            with self._lock:
                if not self.opened.is_set():
                    self._held.append(job)
                    return
        if self._broken is None:
            self.cpu.post(job)

    def _entered(self) -> None:
        """Begin with the jobs that had to wait."""
        with self._lock:
            for job in self._held:
                self.cpu.post(job)
            self._held.clear()
            self.opened.set()

    @abc.abstractmethod
    def admit(self, hosted: Hosted) -> None:
        """Begin to host ``hosted``, which holds a lease."""

    @abc.abstractmethod
    def dismiss(self, hosted: Hosted) -> None:
        """Begin to end ``hosted``, which returns its lease; finalizers may call it."""

    def is_here(self) -> bool:
        """Tell whether waiting for this host, from here, would be in vain."""
        return self.is_foreign() or self.cpu.ident() == threading.get_ident()

    def join(self) -> None:
        """Wait for the threads to be gone, once ``closed`` is set."""
        self.cpu.join(GRACE)

    def _welcome(self, hosted: Hosted) -> bool:
        with self._lock:
            self._hosted_ones.add(hosted)
            broken = self._broken
            self._broken = broken and _again(broken)
        if broken is not None:
            hosted.fail(broken)
        return broken is None

    def _break(self, error: BaseException, *, is_told: bool = False) -> None:
        with self._lock:
            hosted_ones = list(self._hosted_ones)
            is_told = is_told or any(not isinstance(one, Keeper) for one in hosted_ones)
            self._broken = self._broken or (_again(error) if is_told else error)
            self.is_closing = True
            self._held.clear()
        self.opened.set()
        for hosted in hosted_ones:
            hosted.fail(error)

    def _returned(self, hosted: Hosted) -> bool:
        """Take back a lease, once; tell whether it was the last."""
        with self._lock:
            self._leases -= hosted in self._hosted_ones or isinstance(hosted, Keeper)
            self._hosted_ones.discard(hosted)
            self.is_closing = self.is_closing or self.is_left()
            return self.is_left()


def _again(error: BaseException) -> LoaderClosedError:
    """Return what is raised by those who come later: the error itself is told once.

    An error that was raised has frames, which hold an iterator, which holds this host.
    """
    if isinstance(error, LoaderClosedError):
        return error
    return LoaderClosedError(f"the loader's lifespan has failed before: {error!r}")


class InlineHost(Host):
    """The caller's own thread, for a plain ``for`` loop."""

    def open(self) -> None:
        """Enter the lifespan, once."""
        with self._lock:
            if not self.opened.is_set():
                self.lifespan.enter()
                self.opened.set()

    def admit(self, hosted: Hosted) -> None:
        """Do nothing: an inline iteration drives itself."""

    def dismiss(self, hosted: Hosted) -> None:
        """Return a lease, and leave the lifespan with the last."""
        is_last = self._returned(hosted)
        hosted.ended.set()
        if is_last:
            self.closed.set()
            self.lifespan.leave()


class PoolHost(Host):
    """No place at all: worker processes enter the lifespan and do everything."""

    def open(self) -> None:
        """Do nothing: workers do."""
        self.opened.set()

    def admit(self, hosted: Hosted) -> None:
        """Begin to host ``hosted``: there is nothing to host."""
        if self._welcome(hosted):
            self.open()

    def dismiss(self, hosted: Hosted) -> None:
        """End ``hosted`` at once."""
        if self.is_foreign() or hosted.ended.is_set():
            return
        hosted.end()
        is_last = self._returned(hosted)
        if is_last:
            self.cpu.stop(self.closed.set)
        hosted.ended.set()


class ThreadHost(Host):
    """A plain thread, for datasets and functions that are all sync."""

    def __init__(self, lifespan: Lifespan) -> None:
        super().__init__(lifespan)
        self._is_open = False
        self.cpu.post(self.opened.is_set)  # finalizers post to a thread that runs

    def open(self) -> None:
        """Enter the lifespan in the thread, before what is posted later."""
        with self._lock:
            if not self._is_open:
                self._is_open = self.cpu.post(self._open)

    def admit(self, hosted: Hosted) -> None:
        """Begin to host ``hosted``: the thread is all it needs."""
        if self._welcome(hosted):
            self.open()

    def dismiss(self, hosted: Hosted) -> None:
        """End ``hosted`` after the job under way, in the thread."""
        if not self.is_foreign():
            self.cpu.post_nowait(lambda: self._dismiss(hosted))

    def _open(self) -> None:
        try:
            self.lifespan.enter()
        except BaseException as error:  # handed to the consumers
            self._break(error)
        else:
            self._entered()

    def _dismiss(self, hosted: Hosted) -> None:
        hosted.end()
        is_last = self._returned(hosted)
        if is_last:
            try:
                self.lifespan.leave()
            except BaseException as error:  # raised where it is closed
                self.exit_error = error
            self.cpu.stop(self.closed.set)
        hosted.ended.set()


class LoopHost(Host):
    """An event loop: one of its own in a private thread, or the caller's.

    One host task alone holds the task group of the pipelines, and touches it: what
    happens elsewhere is noted in ``_waiting``, and the host task is woken.
    """

    def __init__(
        self, lifespan: Lifespan, caller: asyncio.AbstractEventLoop | None
    ) -> None:
        super().__init__(lifespan)
        self._waiting: dict[Hosted, contextvars.Context] = {}
        self._opening: anyio.CancelScope | None = None
        self._wanted = asyncio.Event()
        self._wake = asyncio.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        if caller is not None:
            self.loop = caller
            self._task = caller.create_task(self._serve(), name="aioloader host")
            self._task.add_done_callback(self._finish)
        else:
            self.loop = new_event_loop()
            context = context_elsewhere()
            self._thread = threading.Thread(
                target=context.run,
                args=(self._host,),
                name="aioloader-loop",
                daemon=True,
            )
            self._thread.start()

    def open(self) -> None:
        """Enter the lifespan on the loop."""
        self._on_loop(self._wanted.set)

    def admit(self, hosted: Hosted) -> None:
        """Begin to host ``hosted`` on the loop, as soon as the lifespan was entered."""
        if self._welcome(hosted):
            self.open()
            self._on_loop(self._begin, hosted, context_elsewhere())

    def dismiss(self, hosted: Hosted) -> None:
        """End ``hosted`` on the loop; its lease ends with its tasks."""
        if not self.is_foreign() and not self._on_loop(self._dismiss, hosted):
            self._returned(hosted)
            hosted.ended.set()

    def is_here(self) -> bool:
        """Tell whether the caller is on the loop, or the loop does not run."""
        if self._thread is None and self.loop and not self.loop.is_running():
            return True
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self.loop:
                return True
        return super().is_here() or threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for both threads to be gone, once ``closed`` is set."""
        super().join()
        if self._thread is not None:
            self._thread.join(GRACE)

    # -- on the loop --------------------------------------------------------------

    def _host(self) -> None:
        """Run the host task in the private thread."""
        options = {"loop_factory": lambda: self.loop}
        try:
            anyio.run(self._serve, backend="asyncio", backend_options=options)
        except BaseException as error:  # handed to the consumers
            self._break(error)
        finally:
            self._finish()

    async def _serve(self) -> None:
        """Enter the lifespan, host hosted_ones until the last has left, leave it."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.lifespan.leave_async, self.cpu)
                with anyio.CancelScope() as self._opening:
                    await self._wanted.wait()
                    if not self._is_over:
                        await self.lifespan.enter_async(self.cpu)
                self._entered()
                async with anyio.create_task_group() as group:
                    while not self._is_over:
                        await self._wake.wait()
                        self._wake.clear()
                        self._start_waiting(group)
        except Exception as error:  # handed to the consumers
            if self._is_over:
                self.exit_error = error
            self._break(error, is_told=self._is_over)

    def _begin(self, hosted: Hosted, context: contextvars.Context) -> None:
        self._waiting[hosted] = context
        self._wake.set()

    def _start_waiting(self, group: anyio.abc.TaskGroup) -> None:
        """Start the hosted_ones that wait; one that cannot start fails, and leaves."""
        while self._waiting:
            hosted = next(iter(self._waiting))
            context = self._waiting.pop(hosted)
            try:
                context.run(partial(group.start_soon, self._live, hosted, name=_NAME))
            except Exception as error:  # handed to the consumer
                hosted.fail(error)
                self._return(hosted)

    async def _live(self, hosted: Hosted) -> None:
        """Run ``hosted`` to its end, and take back its lease."""
        try:
            await hosted.main()
        finally:
            self._return(hosted)

    def _dismiss(self, hosted: Hosted) -> None:
        hosted.end()
        if self._waiting.pop(hosted, None) is not None:  # it has not started
            hosted.fail(LoaderClosedError("the iterator was closed"))
            self._return(hosted)
        elif isinstance(hosted, Keeper):
            self._return(hosted)

    def _return(self, hosted: Hosted) -> None:
        if self._returned(hosted):
            self._is_over = True
            self._wanted.set()
            self._wake.set()
            if self._opening is not None:
                self._opening.cancel()  # a lifespan that is slow to enter
        hosted.ended.set()

    def _finish(self, _task: asyncio.Task[None] | None = None) -> None:
        """See to what is left when the host task is gone, however it ended."""
        self._break(LoaderClosedError("the event loop of the loader has ended"))
        for hosted in list(self._hosted_ones):
            self._returned(hosted)
            hosted.ended.set()
        self.cpu.stop(self.closed.set)

    def _on_loop(self, callback: Callable[..., None], *args: Any) -> bool:
        """Call on the loop; tell whether there still is one."""
        if self.loop is not None and call_threadsafe(self.loop, callback, *args):
            return True
        self._finish()  # it has failed, or the caller closed its loop
        return False


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new uvloop, or asyncio's own loop where uvloop is not installed."""
    try:
        import uvloop  # noqa: PLC0415  (no such package on Windows)
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
