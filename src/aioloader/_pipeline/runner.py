"""Runners of pipelines, in the caller's thread, a private thread or an event loop.

All iterations of a loader in the same place share a runner. The runner enters the
dataset's lifespan before it reads the first sample, and exits the lifespan when the
last lease is returned. An iteration holds a lease on its runner until its end.
"""

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from aioloader._base.cancellation import in_thread, to_the_end
from aioloader._base.cpu_threads import (
    CpuThread,
    SharedThread,
    is_shared_thread,
    refuse_gevent,
    start_thread,
)
from aioloader._base.forks import fork_safe
from aioloader._base.raising import ends_task, iterator_closed, raisable
from aioloader._base.waiting import (
    Latch,
    call_threadsafe,
    context_elsewhere,
    running_loop,
)
from aioloader._base.warnings import warn
from aioloader._pipeline.lifespan import Lifespan, MakeLifespan, reads_on_loop
from aioloader.errors import LoaderClosedError
from aioloader.protocols import own_datasets

# For how many seconds a close waits for user code to return.
GRACE = 10.0
_NAME = "aioloader pipeline"  # of an iteration's task
_LOOP_ENDED = "the event loop of the loader has ended; iterate again"
# Acts on a pipeline, if any; sets the latch once the lease is returned.
RunnerStep: TypeAlias = Callable[[Any, Latch], None]
RunnerPlace: TypeAlias = (
    Literal["inline", "thread", "pool", "loop"] | asyncio.AbstractEventLoop
)


class RunnerTask(Protocol):
    """A ``Pipeline`` as its runner sees it; the pipeline owns a lease on the runner."""

    context: contextvars.Context
    ended: Latch  # set once the lease is returned
    exit_error: BaseException | None
    is_closing: bool

    async def main(self) -> None: ...
    def most_concurrency(self) -> int: ...
    def end(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def release_workers(self) -> None: ...
    def join(self) -> bool: ...
    def joins_at_once(self) -> bool: ...


class Runner:
    """A runner with a private thread, for plain datasets and functions.

    It is also the base class of the other runners, which share its leases and waits.
    """

    loop: asyncio.AbstractEventLoop | None = None
    is_callers: bool = False  # whether the loop is the caller's
    place: RunnerPlace | None = None  # the key in ``Runners``

    def __init__(
        self, lifespan: Lifespan | None, *, shares_threads: bool = False
    ) -> None:
        self.lifespan = lifespan
        self.opened: Latch = Latch()  # set once the lifespan was entered, or failed
        thread = SharedThread if shares_threads else CpuThread
        # For plain code; starts with its first job.
        self.cpu: CpuThread | SharedThread = thread("aioloader-cpu")
        self.closed: Latch = Latch()  # set when everything has ended
        self.is_closing: bool = False  # it has failed, or all leases were returned
        # Whether a close has timed out: until the next lease, other closes do not wait.
        self.is_stuck: bool = False
        # The lifespan's error on exit, raised by the close.
        self.exit_error: BaseException | None = None
        self._error: BaseException | None = None  # for later pipelines
        self._pipelines: set[RunnerTask] = set()
        self._leases = 1  # the caller's
        self._is_open = False
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it, too
        self._pid = os.getpid()

    # -- leases -------------------------------------------------------------------

    def lease(self) -> bool:
        """Take a lease if the runner is still open; return whether it was taken."""
        with self._lock:
            is_open = not self.is_closing and not self.is_foreign()
            self._leases += is_open
            self.is_stuck = False  # the new iteration may end in time
            return is_open

    def is_released(self) -> bool:
        """Tell whether all leases were returned, so that the runner closes."""
        return not self._leases

    def is_foreign(self) -> bool:
        """Tell whether this is a forked child's copy, which has no threads."""
        return os.getpid() != self._pid

    def ending(self) -> list[RunnerTask]:
        """Return the pipelines that were dismissed and have not ended."""
        with self._lock:
            return [pipeline for pipeline in self._pipelines if pipeline.is_closing]

    def open(self) -> None:
        """Start to enter the lifespan; ``opened`` is set when done. Idempotent."""
        with self._lock:
            if not self._is_open:
                self._is_open = self.cpu.post(self._open)

    def admit(self, pipeline: RunnerTask) -> None:
        """Start ``pipeline``, which holds a lease; fail it if the runner has failed."""
        with self._lock:
            self._pipelines.add(pipeline)
            error = self._error
            self._error = error and later_error(error)
        if error is None:
            self._start(pipeline)
        else:
            pipeline.fail(error)

    def dismiss(self, pipeline: RunnerTask) -> None:
        """Start to end ``pipeline`` and return its lease; safe in finalizers."""
        if not self.is_foreign():
            self._run(self._end, pipeline, pipeline.ended)

    def release(self) -> Latch:
        """Start to return a lease that has no pipeline; the latch is set when done."""
        released = Latch()
        if not self.is_foreign():
            self._run(self._return_lease, None, released)
        return released

    def failure(self) -> BaseException | None:
        """Wait until the lifespan is entered or fails; return its error, if any."""
        if self.lifespan is not None:
            self.opened.wait()
        return self._error

    # -- waiting for the end ------------------------------------------------------

    def grace(self) -> float:
        """Return how many seconds a close may wait; 0 once a close has timed out."""
        return 0.0 if self.is_stuck else GRACE

    def is_lost(self) -> bool:
        """Tell whether the thread or loop has stopped, so that a wait would not end."""
        return self.is_foreign()

    def force_return(self, returned: Latch, pipeline: RunnerTask | None) -> None:
        """Return a lease in the calling thread if the caller's loop has stopped."""

    def check_loop(self) -> None:
        """Fail the pipelines if the caller has closed their loop."""

    def is_own_thread(self) -> bool:
        """Tell whether the calling thread is the runner's, which cannot join itself."""
        return self.is_on_loop() or self.cpu.ident() == threading.get_ident()

    def is_on_loop(self) -> bool:
        """Tell whether the calling thread runs this runner's event loop."""
        return self.loop is not None and running_loop() is self.loop

    def join(self) -> None:
        """Wait for the threads to end, once ``closed`` is set."""
        self.cpu.join(GRACE)

    # -- in the runner's thread ---------------------------------------------------

    def _open(self) -> None:
        try:
            if self.lifespan is not None:
                self.lifespan.enter()
        except BaseException as error:  # handed to the consumers
            self._fail_all(error)
        else:
            self.opened.set()

    def _run(
        self, step: RunnerStep, pipeline: RunnerTask | None, returned: Latch
    ) -> None:
        """Post a step to the runner's thread; safe in any thread and finalizer."""
        self.cpu.post_nowait(partial(step, pipeline, returned))

    def _start(self, pipeline: RunnerTask) -> None:  # noqa: ARG002  (it needs no more)
        self.open()

    def _end(self, pipeline: RunnerTask, ended: Latch) -> None:
        pipeline.end()
        self._return_lease(pipeline, ended)

    def _return_lease(self, pipeline: RunnerTask | None, returned: Latch) -> None:
        """Return a lease; close the runner after the last one."""
        if self._drop_lease(pipeline):
            self._close()
        returned.set()

    def _close(self) -> None:
        try:
            if self.lifespan is not None:
                self.lifespan.leave()
        except BaseException as error:  # raised where it is closed
            self.exit_error = error
        self.cpu.stop(self.closed.set)

    def _fail_all(self, error: BaseException, *, is_known: bool = False) -> None:
        """Fail present and later pipelines; if ``is_known``, others raise ``error``."""
        with self._lock:
            pipelines = list(self._pipelines)
            is_known = is_known or bool(pipelines)
            self._error = self._error or (later_error(error) if is_known else error)
            self.is_closing = True
        self.opened.set()
        for pipeline in pipelines:
            pipeline.fail(error)

    def _drop_lease(self, pipeline: RunnerTask | None) -> bool:
        """Drop a lease (of a pipeline only once); return whether no lease is left."""
        with self._lock:
            self._leases -= pipeline is None or pipeline in self._pipelines
            if pipeline is not None:
                self._pipelines.discard(pipeline)
            self.is_closing = self.is_closing or not self._leases
            return not self._leases


def later_error(error: BaseException) -> LoaderClosedError:
    """Return the error for later pipelines, after ``error`` was raised once.

    Only a ``LoaderClosedError`` is raised again: other tracebacks may hold pipelines.
    """
    if isinstance(error, LoaderClosedError):
        return error
    return LoaderClosedError(
        f"the loader's lifespan has failed: {error!r}; fix it, and create a new loader"
    )


def loop_ended() -> LoaderClosedError:
    return LoaderClosedError(_LOOP_ENDED)


class CallerRunner(Runner):
    """A runner in the caller's thread; samples are read there, or by workers."""

    def open(self) -> None:
        with self._lock:
            if self.lifespan is not None and not self.opened.is_set():
                self.lifespan.enter()
                self.opened.set()

    def _run(
        self, step: RunnerStep, pipeline: RunnerTask | None, returned: Latch
    ) -> None:
        step(pipeline, returned)

    def _start(self, pipeline: RunnerTask) -> None:
        pass  # workers read its samples and enter the lifespan

    def _close(self) -> None:
        self.cpu.stop(self.closed.set)
        if self.lifespan is not None:
            self.lifespan.leave()


class LoopRunner(Runner):
    """A runner on the caller's event loop, or on its own loop in a private thread.

    Each pipeline is a task. A separate task enters and exits the lifespan.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        lifespan: Lifespan | None = None,
        caller: asyncio.AbstractEventLoop | None = None,
        *,
        shares_threads: bool = False,
    ) -> None:
        if caller is None and "gevent.monkey" in sys.modules:
            refuse_gevent()
        super().__init__(lifespan, shares_threads=shares_threads)
        self._waiting: list[RunnerTask] = []  # until the lifespan is entered
        self._tasks: set[asyncio.Task[None]] = set()
        self._entering: Any = None  # anyio's cancel scope
        self._must_enter = asyncio.Event()
        self._all_returned = asyncio.Event()
        self._own_thread: threading.Thread | None = None
        self._threads = ThreadPoolExecutor(1, "aioloader-call")
        # Latches of leases without a pipeline, whose return is posted to the loop. It
        # may never run again.
        self._returning: list[Latch] = []
        self._runner_task: asyncio.Task[None] | None = None
        self.is_callers = caller is not None
        if caller is None:
            context = context_elsewhere()
            runner = asyncio.Runner(loop_factory=new_event_loop)
            self.loop = context.run(runner.get_loop)  # the runner keeps the context
            self.loop.set_default_executor(self._threads)
            run = partial(context.run, self._run_loop, runner)
            self._own_thread = threading.Thread(
                target=run, name="aioloader-loop", daemon=True
            )
            return
        self.loop = caller
        if lifespan is not None:
            self._runner_task = caller.create_task(
                self._serve(), name="aioloader runner"
            )
            self._runner_task.add_done_callback(self._finish)

    def start(self) -> None:
        """Start the private thread, if there is one; called once."""
        if self._own_thread is not None:
            start_thread(self._own_thread)

    def allow(self, concurrency: int) -> None:
        """Raise the thread limit of a private loop's executor to ``concurrency``."""
        most = max(self._threads._max_workers, concurrency)  # noqa: SLF001
        self._threads._max_workers = most  # noqa: SLF001  (they start on demand)

    def open(self) -> None:
        if not call_threadsafe(self.loop, self._must_enter.set):
            self._finish()

    def is_lost(self) -> bool:
        """Tell whether the caller's loop has stopped, or this is a fork's copy."""
        is_stopped = self.is_callers and not self.loop.is_running()
        return is_stopped or super().is_lost()

    def check_loop(self) -> None:
        if self.is_callers and self.loop.is_closed():
            self._finish()

    def force_return(self, returned: Latch, pipeline: RunnerTask | None) -> None:
        if self.is_foreign() or returned.is_set():
            return
        if pipeline is not None:
            pipeline.release_workers()
        if self._drop_lease(pipeline) or self.loop.is_closed():
            self._all_returned.set()
            self._finish()
        returned.set()

    def join(self) -> None:
        super().join()
        if self._own_thread is not None:
            self._own_thread.join(GRACE)

    # -- in the private thread ----------------------------------------------------

    def _run_loop(self, runner: asyncio.Runner) -> None:
        """Run the private loop until the last lease is returned."""
        try:
            with runner:
                work = self._serve() if self.lifespan else self._all_returned.wait()
                runner.run(work)
        except BaseException as error:  # handed to the consumers
            self._fail_all(error)
        finally:
            self._finish()

    # -- on the loop --------------------------------------------------------------

    async def _serve(self) -> None:
        """Enter the lifespan, start pipelines, and exit it after the last lease."""
        import anyio

        assert self.lifespan is not None
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.lifespan.leave_async)
                stack.push_async_callback(self._end_all)
                with anyio.CancelScope() as self._entering:
                    await self._must_enter.wait()
                    if not self._all_returned.is_set():
                        await self.lifespan.enter_async(self.cpu)
                self.opened.set()
                while self._waiting:
                    pipeline = self._waiting.pop(0)
                    self._begin(pipeline, pipeline.ended)
                await self._all_returned.wait()
        except BaseException as error:  # handed to the consumers
            if ends_task(error):
                raise
            is_over = self._all_returned.is_set()
            if is_over:
                self.exit_error = error
            self._fail_all(error, is_known=is_over)

    async def _end_all(self) -> None:
        """Cancel pipelines still running, for example if this task is cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _run(
        self, step: RunnerStep, pipeline: RunnerTask | None, returned: Latch
    ) -> None:
        if pipeline is None:
            self._returning.append(returned)
        if not call_threadsafe(self.loop, step, pipeline, returned):
            self._finish()  # this has failed, or the caller has closed the loop
            if pipeline is not None:
                self._drop_lease(pipeline)
            returned.set()

    def _start(self, pipeline: RunnerTask) -> None:
        self._run(self._begin, pipeline, pipeline.ended)

    def _begin(self, pipeline: RunnerTask, ended: Latch) -> None:
        """Start a pipeline once the lifespan is entered; fail it if it cannot start."""
        if self._error is not None:  # the pipeline has failed with the others
            return
        if self.lifespan is not None and not self.opened.is_set():
            self._waiting.append(pipeline)
            self._must_enter.set()
            return
        self.allow(pipeline.most_concurrency())
        try:
            task: asyncio.Task[None] = self.loop.create_task(
                pipeline.main(), name=_NAME, context=pipeline.context.copy()
            )
        except Exception as error:  # handed to the consumer
            pipeline.fail(error)
            self._return_lease(pipeline, ended)
        else:
            self._tasks.add(task)
            task.add_done_callback(partial(self._task_done, pipeline))

    def _task_done(self, pipeline: RunnerTask, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before its first step, so nothing has run
            pipeline.release_workers()
        self._return_lease(pipeline, pipeline.ended)

    def _end(self, pipeline: RunnerTask, ended: Latch) -> None:
        """End a pipeline; its task, if it has started, returns the lease."""
        pipeline.end()
        if pipeline in self._waiting:  # it has not started
            self._waiting.remove(pipeline)
            pipeline.fail(iterator_closed())
            self._return_lease(pipeline, ended)

    def _return_lease(self, pipeline: RunnerTask | None, returned: Latch) -> None:
        with contextlib.suppress(ValueError):  # it has a pipeline
            self._returning.remove(returned)
        was_forced = returned.is_set()
        if not was_forced and self._drop_lease(pipeline):
            self._all_returned.set()
        if self._all_returned.is_set():
            self._close()
        returned.set()

    def _close(self) -> None:
        self._must_enter.set()
        if self._entering is not None:
            self._entering.cancel()  # a lifespan that is slow to enter
        if self.is_callers and self.lifespan is None:
            self._finish()

    def _finish(self, _task: asyncio.Task[None] | None = None) -> None:
        """Release everything after the end of loop, ``_serve`` or the last lease."""
        self._fail_all(LoaderClosedError(_LOOP_ENDED))
        self._waiting.clear()
        for pipeline in list(self._pipelines):
            pipeline.release_workers()
            self._drop_lease(pipeline)
            pipeline.ended.set()
        while self._returning:
            returned = self._returning.pop()
            if not returned.is_set():
                self._drop_lease(None)
                returned.set()
        self.cpu.stop(self.closed.set)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new uvloop, or asyncio's own loop where uvloop is not installed.

    If standard input, output or error is closed, return asyncio's loop, too: libuv
    aborts the process when it closes a descriptor that has one of their numbers.
    """
    try:
        for standard in range(3):
            os.fstat(standard)
        import uvloop
    except (ImportError, OSError):
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Runners:
    """A loader's runners, one per place; an entered loader keeps them open."""

    def __init__(self, dataset: Any, lifespan: MakeLifespan | None = None) -> None:
        self._dataset = dataset
        self.lifespan = lifespan
        self._runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._kept: list[Runner] = []
        self._entered = 0
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _release_all, self._kept)

    def lease(self, place: RunnerPlace) -> Runner:
        """Lease the runner at ``place`` to the caller; make one if none is open."""
        dataset, runner = self._dataset, None
        with self._lock:
            for runner in list(self._runners):
                if runner.place == place and runner.lease():
                    return runner
            is_loop = place == "loop" or not isinstance(place, str)
            enters = self.lifespan is not None or (is_loop and own_datasets(dataset))
            lifespan = None
            if enters and place != "pool":  # workers enter it where they read
                lifespan = Lifespan(dataset, self.lifespan)
            if not isinstance(place, str):
                # Loaders on callers' loops share threads if nothing is bound to one.
                shares = not (lifespan or is_shared_thread()) and reads_on_loop(dataset)
                runner = LoopRunner(lifespan, place, shares_threads=shares)
            elif place == "loop":
                runner = LoopRunner(lifespan)
            else:
                runner = (
                    Runner(lifespan) if place == "thread" else CallerRunner(lifespan)
                )
            try:
                runner.place = place
                if isinstance(runner, LoopRunner):
                    runner.start()
                self._runners.add(runner)
                if self._entered and runner.lease():
                    self._kept.append(runner)
            except BaseException:  # Ctrl-C: the caller does not get the lease
                runner.release()
                raise
            return runner

    def keep(self) -> None:
        """Keep new runners open between iterations; calls nest."""
        with self._lock:
            self._entered += 1

    def leave(self) -> bool:
        """Undo one ``keep``; return whether it was the last."""
        with self._lock:
            self._entered = max(0, self._entered - 1)
            return not self._entered

    def release(self) -> None:
        """Release the kept runners and wait until they are closed."""
        with contextlib.ExitStack() as stack:  # waits for all, even after an error
            for released in self._release_kept():
                stack.callback(wait_released, *released)

    async def release_async(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for released in self._release_kept():
                stack.push_async_callback(wait_released_async, *released)

    def _release_kept(self) -> list[tuple[Runner, Latch, RunnerTask | None]]:
        """Release the kept runners; return the arguments of ``wait_released``.

        The list includes dropped iterators' pipelines that are still ending.
        """
        with self._lock:
            kept = self._kept[:]
            self._kept.clear()
            runners = list(self._runners)
        ending: list[tuple[Runner, Latch, RunnerTask | None]] = [
            (runner, runner.release(), None) for runner in kept
        ]
        for runner in runners:
            ending += [(runner, task.ended, task) for task in runner.ending()]
        return ending


def _release_all(kept: list[Runner]) -> None:
    """Warn about a loader that was entered and never closed; release its runners."""
    if kept:
        warnings.warn(
            "a DataLoader was entered and never closed: call its close()",
            ResourceWarning,
            stacklevel=1,
        )
    for runner in kept:
        runner.release()


# -- waiting for the release ------------------------------------------------------


def wait_released(
    runner: Runner, returned: Latch, pipeline: RunnerTask | None = None
) -> None:
    """Wait for a lease's return, and for ``runner``'s end if the lease was the last.

    Each wait has a timeout. The pipeline's workers and stages are joined. Errors from
    closing the dataset or its iterator are raised.
    """
    if runner.is_lost():
        runner.force_return(returned, pipeline)
    elif not runner.is_own_thread():
        is_ended = returned.wait(runner.grace())
        if is_ended and runner.is_released():
            is_ended = runner.closed.wait(runner.grace())
        if not is_ended:
            _warn_stuck(runner)
        elif runner.is_released():
            runner.join()
        if pipeline is not None and not pipeline.join():
            _warn_stuck(runner)
    _raise_exit_errors(runner, pipeline)


async def wait_released_async(
    runner: Runner, returned: Latch, pipeline: RunnerTask | None = None
) -> None:
    """Wait like ``wait_released``, without blocking the event loop.

    Cancellation of the calling task is delayed until the wait has ended.
    """
    import anyio

    with anyio.CancelScope(shield=True):
        if runner.is_lost():
            runner.force_return(returned, pipeline)
        else:
            await to_the_end(partial(_wait_async, runner, returned, pipeline))
    _raise_exit_errors(runner, pipeline)


async def _wait_async(
    runner: Runner, returned: Latch, pipeline: RunnerTask | None
) -> None:
    is_ended = await returned.wait_async(runner.grace())
    if is_ended and runner.is_released():
        is_ended = await runner.closed.wait_async(runner.grace())
    if not is_ended:
        _warn_stuck(runner)
    if pipeline is None or pipeline.joins_at_once():
        return
    # This raises errors from exiting the lifespan in a worker.
    if not await in_thread(pipeline.join, executor=CpuThread.once()):
        _warn_stuck(runner)


def _warn_stuck(runner: Runner) -> None:
    """Warn once, until the next lease, that user code has not returned."""
    if runner.is_stuck:
        return
    runner.is_stuck = True
    warn(
        f"a DataLoader was closed, but code of its dataset or functions has not "
        f"returned for {GRACE:g} seconds, and its thread is still running: give its "
        "requests a timeout",
        ResourceWarning,
    )


def _raise_exit_errors(runner: Runner, pipeline: RunnerTask | None) -> None:
    """Raise the error from closing the pipeline or runner, if any, and forget it."""
    for holder in (pipeline, runner):
        if holder is not None:
            error, holder.exit_error = holder.exit_error, None
            if error is not None:
                raise raisable(error, "closing the dataset")
