"""A host with an event loop: one in a private thread, or the caller's."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio

from aioloader._order.raising import ends_task
from aioloader._pipeline.cpu import start_thread
from aioloader._pipeline.host import GRACE, Host, Pipeline
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.loop_watch import watch_of
from aioloader._pipeline.waiting import (
    Latch,
    call_threadsafe,
    context_elsewhere,
    running_loop,
)
from aioloader.errors import LoaderClosedError

_NAME = "aioloader pipeline"  # of an iteration's task


class LoopHost(Host):
    """An event loop: the loader's own in a private thread, or the caller's.

    Each pipeline is a task. A host task enters and leaves the lifespan; where there is
    none, the caller's loop needs no such task.
    """

    def __init__(
        self,
        lifespan: Lifespan,
        caller: asyncio.AbstractEventLoop | None,
        *,
        shares_threads: bool = False,
    ) -> None:
        super().__init__(lifespan, shares_threads=shares_threads)
        self._waiting: list[Pipeline] = []  # for the lifespan
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: anyio.CancelScope | None = None
        self._wanted = asyncio.Event()
        self._over = asyncio.Event()
        self._own_thread: threading.Thread | None = None
        self._host_task: asyncio.Task[None] | None = None
        self.loop = caller or new_event_loop()
        self.watch = watch_of(self.loop, is_callers=caller is not None)
        if caller is None:
            run = partial(context_elsewhere().run, self._host)
            self._own_thread = threading.Thread(
                target=run, name="aioloader-loop", daemon=True
            )
            start_thread(self._own_thread)
        elif lifespan:
            self._host_task = caller.create_task(self._serve(), name="aioloader host")
            self._host_task.add_done_callback(self._finish)
        else:
            self.opened.set()

    def open(self) -> None:
        """Enter the lifespan on the loop."""
        self._on_loop(self._wanted.set)

    def is_lost(self) -> bool:
        """Tell whether the caller's loop has stopped.

        Posted callbacks run when it runs again, if ever.
        """
        loop = self.loop
        is_stopped = bool(self._own_thread is None and loop and not loop.is_running())
        return is_stopped or super().is_lost()

    def check_loop(self) -> None:
        """Fail the pipelines if the caller has closed its loop: they never end."""
        if self._own_thread is None and self.loop and self.loop.is_closed():
            self._finish()

    def give_up(self, returned: Latch, pipeline: Pipeline | None) -> None:
        """Take back a lease in this thread, whether or not the loop runs again."""
        if self.is_foreign() or returned.is_set():
            return
        if pipeline is not None:
            pipeline.release_workers()
        if self._take_back(pipeline) or (self.loop and self.loop.is_closed()):
            self._over.set()
            self._finish()
        returned.set()

    def is_on_loop(self) -> bool:
        """Tell whether the calling thread runs the loop."""
        return running_loop() is self.loop

    def is_here(self) -> bool:
        """Tell whether the calling thread is one of the host's."""
        return self.is_on_loop() or super().is_here()

    def join(self) -> None:
        """Wait for both threads to end, once ``closed`` is set."""
        super().join()
        if self._own_thread is not None:
            self._own_thread.join(GRACE)

    # -- on the loop --------------------------------------------------------------

    def _run(self, step: Any, pipeline: Pipeline | None, returned: Latch) -> None:
        if not self._on_loop(step, pipeline, returned):
            self._take_back(pipeline)
            returned.set()

    def _start(self, pipeline: Pipeline) -> None:
        self._on_loop(self._begin, pipeline)

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
        """Enter the lifespan, run pipelines until the last has ended, leave it."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.lifespan.leave_async, self.cpu)
                stack.push_async_callback(self._end_all)
                with anyio.CancelScope() as self._opening:
                    await self._wanted.wait()
                    if not self._over.is_set():
                        await self.lifespan.enter_async(self.cpu)
                self.opened.set()
                while self._waiting:
                    self._go(self._waiting.pop(0))
                await self._over.wait()
        except BaseException as error:  # handed to the consumers
            if ends_task(error):
                raise
            is_over = self._over.is_set()
            if is_over:
                self.exit_error = error
            self._break(error, is_known=is_over)

    async def _end_all(self) -> None:
        """Cancel the remaining pipelines when the host task is cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, pipeline: Pipeline) -> None:
        if self._broken is not None:  # it has failed with the others
            return
        if self.opened.is_set():
            self._go(pipeline)
        else:
            self._waiting.append(pipeline)
            self._wanted.set()

    def _go(self, pipeline: Pipeline) -> None:
        """Start a pipeline; if it cannot start, fail it and take back its lease."""
        loop = asyncio.get_running_loop()
        try:
            start = partial(loop.create_task, pipeline.main(), name=_NAME)
            task: asyncio.Task[None] = pipeline.run_in_context(start)
        except Exception as error:  # handed to the consumer
            pipeline.fail(error)
            self._return(pipeline, pipeline.ended)
        else:
            self._tasks.add(task)
            task.add_done_callback(partial(self._left, pipeline))

    def _left(self, pipeline: Pipeline, task: asyncio.Task[None]) -> None:
        """Take back the lease of a pipeline whose task has ended."""
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before its first step, so nothing has run
            pipeline.release_workers()
        self._return(pipeline, pipeline.ended)

    def _end(self, pipeline: Pipeline, ended: Latch) -> None:
        """End a pipeline; its lease ends with its task."""
        pipeline.end()
        if pipeline in self._waiting:  # it has not started
            self._waiting.remove(pipeline)
            pipeline.fail(LoaderClosedError("the iterator was closed"))
            self._return(pipeline, ended)

    def _return(self, pipeline: Pipeline | None, returned: Latch) -> None:
        is_given_up = returned.is_set()
        if not is_given_up and self._take_back(pipeline):
            self._over.set()
        if self._over.is_set():
            self._close()
        returned.set()

    def _close(self) -> None:
        self._wanted.set()
        if self._opening is not None:
            self._opening.cancel()  # a lifespan that is slow to enter
        if self._own_thread is None and self._host_task is None:
            self._finish()

    def _finish(self, _task: asyncio.Task[None] | None = None) -> None:
        """Release the rest once the host task has ended, however it ended."""
        self._break(LoaderClosedError("the event loop of the loader has ended"))
        self._waiting.clear()
        for pipeline in list(self._pipelines):
            pipeline.release_workers()
            self._take_back(pipeline)
            pipeline.ended.set()
        self.cpu.stop(self.closed.set)

    def _on_loop(self, callback: Callable[..., None], *args: Any) -> bool:
        """Call on the loop; return whether it is still open."""
        if self.loop is not None and call_threadsafe(self.loop, callback, *args):
            return True
        self._finish()  # it failed, or the caller closed its loop
        return False


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new uvloop, or asyncio's own loop where uvloop is not installed.

    Also where standard input, output or error is closed: libuv aborts the process as it
    closes a descriptor that has taken the place of one of them.
    """
    try:
        for standard in range(3):
            os.fstat(standard)
        import uvloop
    except (ImportError, OSError):
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
