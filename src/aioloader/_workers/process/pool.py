"""The loader's side of its worker processes: requests, results and deaths.

A ``ProcessPool`` has no thread: a waiting consumer reads the results that have arrived,
sends requests while there is room, and handles deaths. Workers do not wait for the
consumer while the kernel's queue has requests.
"""

import abc
import contextlib
import io
import logging
import os
import sys
import threading
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from aioloader._base.cpu_threads import refuse_gevent
from aioloader._base.forks import close_in_children, fork_safe
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.lasting_pool import LastingPool
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.arena import ArenaReader, InFlight
from aioloader._transport.channel import Channel, read_small
from aioloader._transport.slots import Locker
from aioloader._workers.idle import IdleSupervisors
from aioloader._workers.process.dispatcher import Dispatcher, KernelQueue, Worker
from aioloader._workers.process.launcher import PATIENCE, ForkLauncher
from aioloader._workers.process.messages import (
    LEFT,
    RESULT_HEAD,
    STAGES,
    unpack,
)
from aioloader._workers.process.supervisor import UNKNOWN, SupervisorReport
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError

if TYPE_CHECKING:
    from aioloader._workers.process.fork_server import ServedLauncher

_LOG = logging.getLogger("aioloader")

# How many processes of one worker may die in a row without taking a batch: if the last
# was not ready, and if it was. The second is larger: idle workers may be killed, too.
_MAX_STARTS, _MAX_STARTS_IN_ALL = 3, 10


class WorkerPool(LastingPool):
    """The worker processes of one loader; may be used from any thread."""

    _dispatcher: Dispatcher

    def __init__(self, supervisors: IdleSupervisors) -> None:
        if "gevent.monkey" in sys.modules:
            refuse_gevent()
        self._supervisors = supervisors
        self._lock = fork_safe(threading.RLock())  # reentrant: a finalizer may need it
        self._is_over = self._is_ended = False
        self._left: BaseException | None = None  # from leaving a lifespan
        self._error: BaseException | None = None  # ended the pool, not raised yet

    @abc.abstractmethod
    def _start(self, worker: Worker) -> None:
        """Start a process for ``worker``; ``_replace`` is called when it dies."""

    @abc.abstractmethod
    def _wait(self) -> bool:
        """Wait, with a timeout, for the workers to end; return whether they have."""

    @abc.abstractmethod
    def _kill(self, worker: Worker) -> None:
        """Kill a worker's process; raise ``OSError`` if that fails."""

    @abc.abstractmethod
    def _stack_of(self, worker: Worker) -> str:
        """Return a worker's Python stack as text; takes about a second at most."""

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        with self._lock:
            if self._is_over:
                over = LoaderClosedError(
                    "the worker processes have ended; iterate again"
                )
                error, self._error = self._error or over, None
                pipeline.fail(error)
            elif not pipeline.is_closing:  # a closing pipeline needs no batches
                self._dispatcher.submit(pipeline, task)

    def forget(self, pipeline: Pipeline) -> None:
        with self._lock:
            if not self._is_over:
                self._dispatcher.forget(pipeline)

    def _replace(self, worker: Worker, exitcode: int, stack: str) -> None:
        """Recover a dead process's batches; replace it, or end the pool if many died.

        ``stack`` is the text that the process wrote in a crash; it may be empty.
        """
        from aioloader._workers.process.recovery import Death, recover

        death = Death(worker, exitcode, stack)
        with self._supervisors.counting:
            self._supervisors.deaths += 1
        if death.taken:
            worker.starts = 0  # it took a batch, whose ticket counts the deaths
        died = f"worker {worker.number} (pid {worker.pid}) died, {death.cause}"
        has_been_ready = worker.is_ready
        recover(self._dispatcher, death)
        if worker.starts >= (_MAX_STARTS_IN_ALL if has_been_ready else _MAX_STARTS):
            _LOG.warning("%s; it is not replaced again", died)
            reason = (
                f"; {worker.starts} processes in a row have died without making a "
                "batch; see what they printed"
            )
            self._fail(death.error(reason))
            return
        _LOG.warning("%s; it is replaced, and its batches are made again", died)
        with self._supervisors.counting:
            self._supervisors.restarts += 1
        self._start(worker)

    def _fail(self, error: BaseException) -> None:
        """End the pool; iterations that wait for its batches raise ``error``."""
        pipelines = {ticket.pipeline for ticket in self._dispatcher.tickets.values()}
        for pipeline in pipelines:
            pipeline.fail(error)
        self._error = None if pipelines else error  # for the next pipeline that submits
        self.end()

    def _keep_left(self, frame: bytes | memoryview) -> None:
        if self._left is None:
            arena = self._dispatcher.workers[RESULT_HEAD.unpack_from(frame)[1]].arena
            self._left = unpack(frame, RESULT_HEAD.size, arena).raisable()

    def join(self) -> bool:
        """Wait, with a timeout, for the workers to end; return whether they have.

        If a worker failed to leave the dataset's lifespan, its error is raised here.
        """
        is_gone = self._wait()
        left, self._left = self._left, None
        if left is not None:
            raise left
        return is_gone

    def explain(self, task: BatchTask) -> str:
        """Return text on the workers that hold ``task``: stages, times and stacks."""
        holders = self._holders(task)
        if not holders:
            return "waits for a worker process that is free"
        parts = []
        for worker, held in holders:
            parts.append(
                f"has been in stage {STAGES[held.stage]!r} of worker {worker.number} "
                f"(pid {worker.pid}) for {held.seconds:.2f} s"
            )
            if worker.pid is not None:
                parts.append(self._stack_of(worker))
        return "\n".join(parts)

    def restart(self, task: BatchTask) -> bool:
        holders = self._holders(task)
        with self._lock:
            for worker, _ in holders:
                if not self._is_over:
                    with contextlib.suppress(OSError):
                        self._kill(worker)
                        worker.is_stuck = True
        return bool(holders)

    def _holders(self, task: BatchTask) -> list[tuple[Worker, InFlight]]:
        tickets = self._dispatcher.tickets
        return [
            (worker, held)
            for worker in self._dispatcher.workers
            for held in worker.arena.in_flight()
            if held.ticket in tickets and tickets[held.ticket].task is task
        ]

    def is_open(self) -> bool:
        """Tell whether the pool takes tasks; first handle deaths of idle workers."""
        self.collect()
        return not self._is_over


class ProcessPool(WorkerPool):
    """A pool of worker processes connected by Linux sockets and pipes, without threads.

    ``method`` is ``"fork"`` or ``"forkserver"``, as in ``multiprocessing``. ``locker``
    page-locks the memory of batches; if it is None, nothing is locked.
    """

    has_result_reader = True
    _launcher: "ForkLauncher | ServedLauncher"

    def __init__(
        self,
        spec: WorkerSpec,
        method: str,
        supervisors: IdleSupervisors,
        locker: Locker | None,
    ) -> None:
        super().__init__(supervisors)
        self._joining = fork_safe(threading.Lock())
        self._rest = b""  # the start of an incomplete small result
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as starting:
            self._stack = stack
            are_forks = method == "fork"
            make_arena = partial(ArenaReader, locker=locker)
            self._dispatcher = Dispatcher(
                spec, stack, KernelQueue, make_arena, are_forks=are_forks
            )
            self._results, far_results = Channel.pair()
            starting.callback(self._results.close)  # else ``join`` reads it later
            stack.callback(far_results.close)
            small, far_small = os.pipe()
            self._small = stack.enter_context(io.FileIO(small))
            stack.callback(os.close, far_small)
            stacks, far_stacks = os.pipe()
            self._stacks = stack.enter_context(io.FileIO(stacks))
            stack.callback(os.close, far_stacks)
            for end in (small, far_small, stacks, far_stacks):
                os.set_blocking(end, False)
            shared = [far_results.fileno(), far_small, far_stacks]
            if self._dispatcher.samples is not None:
                shared.append(self._dispatcher.samples.descriptor)
            if are_forks:
                self._launcher = ForkLauncher(spec, supervisors, shared)
            else:
                from aioloader._workers.process.fork_server import ServedLauncher

                self._launcher = ServedLauncher(spec, supervisors, shared, stack)
            starting.callback(self._launcher.close)
            close_in_children(self._abandon)  # before workers are forked from here
            self._launcher.open()
            for worker in self._dispatcher.workers:
                self._start(worker)
            starting.pop_all()
            self._stack = stack.pop_all()

    def descriptors(self) -> list[int]:
        ends = self._small, self._results, self._launcher.control
        with contextlib.suppress(ValueError):  # another thread has closed them
            numbers = [end.fileno() for end in ends if end is not None]
            return [number for number in numbers if number >= 0]
        return []

    def collect(self) -> None:
        """Deliver arrived results, handle deaths and send waiting requests."""
        with self._lock:
            if self._is_over:
                return
            try:
                self._collect_results()
                notes = self._launcher.notes()
                while not self._is_over and (note := next(notes, None)):
                    self._handle(note)
                self._dispatcher.flush()
            except Exception as error:  # every iteration must raise it
                self._fail(error)
            except BaseException:  # Ctrl-C: a frame that was read may be lost
                text = "the loader was interrupted; start a new iteration"
                self._fail(LoaderClosedError(text))
                raise

    def _collect_results(self) -> None:
        with contextlib.suppress(EOFError):
            while not self._is_over:
                frames: Any  # all small results that have arrived, or else a large one
                frames, self._rest = read_small(self._small, self._rest)
                frames = frames or (self._results.receive_frame() or ())[:1]
                if not frames:
                    break
                for frame in frames:
                    if error := self._dispatcher.accept(frame):
                        self._fail(error)

    def _start(self, worker: Worker) -> None:
        worker.starts += 1
        ends = [worker.arena.descriptor, worker.queue.ends[1].fileno()]
        # If the supervisor has died, ``notes`` reports it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._launcher.instruct("start", worker.number, ends)

    def _kill(self, worker: Worker) -> None:
        self._launcher.instruct("kill", worker.number)

    def _stack_of(self, worker: Worker) -> str:
        from aioloader._workers.process.recovery import stack_of

        assert worker.pid is not None
        text = stack_of(worker.pid, self.stack)
        return "\n".join(filter(None, [text, self._launcher.advice()]))

    def _handle(self, note: SupervisorReport) -> None:
        if note.word == "failed":
            assert note.error is not None
            self._fail(note.error.raisable())
        elif note.word == "born":
            self._dispatcher.workers[note.worker].pid = note.number
        elif note.word == "died":
            self._died(self._dispatcher.workers[note.worker], note.number)
        elif note.word == "threads":
            self._supervisors.is_shared = False  # each worker will unpickle the spec
            self._launcher.reopen()
            for worker in self._dispatcher.workers:
                worker.starts = 0
                self._start(worker)
        elif note.word == "orphaned":
            from aioloader._workers.process.recovery import await_orphan

            for worker in self._dispatcher.workers:
                await_orphan(worker.pid)
            self._launcher.reopen()
            for worker in self._dispatcher.workers:
                self._died(worker, UNKNOWN)

    def _died(self, worker: Worker, exitcode: int) -> None:
        self._collect_results()  # results that it sent before
        if not self._is_over:  # else a result said that no worker can start
            self._replace(worker, exitcode, self.stack())

    def stack(self, seconds: float = 0) -> str:
        """Return the stacks that workers have written; wait up to ``seconds``."""
        if self._is_over:
            return ""
        stacks = b""  # workers write them line by line
        with contextlib.suppress(OSError, ValueError):  # another thread has closed it
            connection.wait([self._stacks.fileno()], seconds)
            while part := self._stacks.read(1 << 16):
                stacks += part
        return stacks.decode(errors="replace")

    def end(self) -> None:
        if self._is_ended:
            return
        with self._lock:
            if self._is_ended:
                return
            self._is_over = True
            with contextlib.suppress(OSError):  # an interrupted ``end`` has closed it
                self._dispatcher.close()
            with contextlib.suppress(OSError):
                self._launcher.end()
            self._stack.close()
            self._is_ended = True  # last: an interrupt may come before

    def _wait(self) -> bool:
        with self._joining:  # several threads may iterate, and join at once
            is_gone = self._launcher.join(PATIENCE)
            self._launcher.close()
            with contextlib.suppress(EOFError, OSError):
                while received := self._results.receive_frame():
                    if RESULT_HEAD.unpack_from(received[0])[0] == LEFT:
                        self._keep_left(received[0])
            self._results.close()
        return is_gone

    def close(self) -> None:
        self.end()
        self._results.close()
        self._launcher.close()

    def _abandon(self) -> None:
        """Close this forked child's copies of the loader's descriptors."""
        self._is_over = self._is_ended = True
        self._stack.close()
        self._results.close()
        self._launcher.abandon()
