"""The loader's side of its worker processes: requests, results, deaths.

There is no thread: a waiting consumer reads the results that have arrived, sends the
requests that there is room for, and handles deaths. Meanwhile workers continue by
themselves, because they take requests from a queue in the kernel.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from aioloader._order.failures import Failure
from aioloader._order.forks import close_in_children, fork_safe
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.roles import LastingPool
from aioloader._transport.channel import Channel
from aioloader._transport.in_flight_table import (
    InFlight,
    InFlightTable,
    make_in_flight_table,
)
from aioloader._transport.slots import Locker
from aioloader._workers.kept import Tally
from aioloader._workers.process.batch_codec import slot_of, unpack
from aioloader._workers.process.dispatcher import Dispatcher, Worker
from aioloader._workers.process.launch import PATIENCE
from aioloader._workers.process.messages import (
    BATCH,
    FATAL,
    LEFT,
    READY,
    RESULT_HEAD,
    STAGES,
    UP,
)
from aioloader._workers.process.supervisor import Note
from aioloader._workers.remote_tasks import of_both, opened
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError, WorkerError, WorkerStartError

if TYPE_CHECKING:
    from aioloader._workers.process.launch import SupervisedLauncher
    from aioloader._workers.process.spawn import SpawnLauncher

_LOG = logging.getLogger("aioloader")

Launcher: TypeAlias = "SupervisedLauncher | SpawnLauncher"

# Limits on processes of one worker that end without taking a batch: before the first is
# ready, and in total, since an idle one may be killed too.
_STARTS, _STARTS_IN_ALL = 3, 10
# Seconds for spawned interpreters to import torch.
_SPAWNING = 60.0
# Batches that a consumer may hold, besides those in flight, before it gets copies.
_HELD = 4
# While results keep coming, deaths are checked for once in this many collections.
_SELDOM = 32


class ProcessPool(LastingPool):
    """Worker processes for one loader; used from any thread.

    Args:
        spec: What the workers do.
        launch: Makes the launcher of workers from the descriptors that they share.
        locker: Page-locks the memory that workers write batches to, or None.
        tally: Counts the deaths of workers.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        launch: Callable[[list[int]], Launcher],
        locker: Locker | None,
        tally: Tally,
    ) -> None:
        self._spec = spec
        self._tally = tally
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it too
        self._joining = fork_safe(threading.Lock())
        self._is_over = self._is_ended = False
        self._error: BaseException | None = None  # ended the pool, not yet raised
        self._is_up = False  # whether a process of a worker runs
        self._collections = 0
        with contextlib.ExitStack() as stack:
            self._dispatcher = Dispatcher(spec, stack, locker)
            self._results, self._far_results = Channel.pair()
            self._results.never_block()
            stack.callback(self._close_results)
            stack.callback(self._far_results.close)
            self._stacks, self._far_stacks = os.pipe()
            os.set_blocking(self._stacks, False)
            self._table_file = make_in_flight_table(spec.num_workers)
            for descriptor in (self._stacks, self._far_stacks, self._table_file):
                stack.callback(os.close, descriptor)
            self._table = InFlightTable(self._table_file, spec.num_workers)
            self._launcher = launch(self._common())
            self._stack = stack
            close_in_children(self._abandon)  # before workers are forked from here
            with contextlib.ExitStack() as launching:
                launching.callback(self._launcher.close)
                self._launcher.open()
                self._is_up = self._launcher.forks
                for worker in self._dispatcher.workers:
                    self._start(worker)
                launching.pop_all()
            self._stack = stack.pop_all()

    # -- for iterations -----------------------------------------------------------

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Take a task; its result arrives with ``collect``, in any thread."""
        with self._lock:
            if self._is_over:
                over = LoaderClosedError("the worker processes have ended")
                error, self._error = self._error or over, None
                pipeline.fail(error)
            else:
                self._dispatcher.submit(pipeline, task)

    def forget(self, pipeline: Pipeline) -> None:
        """Drop the requests of ``pipeline``."""
        with self._lock:
            if not self._is_over:
                self._dispatcher.forget(pipeline)

    def wait_up(self) -> None:
        """Wait until a worker process runs: ``timeout`` excludes its start.

        Raises:
            WorkerStartError: If none does within a minute.
        """
        until = time.monotonic() + _SPAWNING
        while not (self._is_up or self._is_over):
            poll = select.poll()
            for descriptor in self.descriptors():
                poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise WorkerStartError(
                    f"no worker process has started within {_SPAWNING:g} s"
                )
            self.collect()

    def descriptors(self) -> list[int]:
        """Return descriptors that are readable when ``collect`` has work."""
        if self._is_over:
            return []
        return [self._results.fileno(), *self._launcher.descriptors()]

    def collect(self, *, seldom: int = _SELDOM) -> None:
        """Deliver the results that have arrived and handle deaths; never block."""
        with self._lock:
            if self._is_over:
                return
            try:
                self._collections += 1
                has_results = self._collect_results()
                if not has_results or not self._collections % seldom:
                    while not self._is_over and (notes := self._launcher.notes()):
                        for note in notes:
                            self._handle(note)
                self._dispatcher.flush()
            except Exception as error:  # every iteration must learn of it
                self._fail(error)
            except BaseException:  # Ctrl-C: the frame that was just read is lost
                self._fail(
                    LoaderClosedError(
                        "the loader was interrupted; start a new iteration"
                    )
                )
                raise

    # -- results ------------------------------------------------------------------

    def _collect_results(self) -> bool:
        """Deliver the results that have arrived; return whether there were any."""
        has_results = False
        with contextlib.suppress(EOFError):
            while not self._is_over and (received := self._results.receive()):
                has_results = True
                self._take(received[0])
        return has_results

    def _take(self, frame: bytes | memoryview) -> None:
        kind, number, name, *made = RESULT_HEAD.unpack_from(frame)
        worker = self._dispatcher.workers[number]
        if kind in {READY, UP}:
            self._is_up = True
            worker.is_ready = worker.is_ready or kind == READY
            return
        if kind == FATAL:
            self._fail(unpack(frame, RESULT_HEAD.size, worker.arena).raisable())
            return
        worker.starts = 0
        ticket = self._dispatcher.tickets.pop(name, None)
        if ticket is None:  # its iteration has ended, or the batch was made twice
            slot = slot_of(frame, RESULT_HEAD.size)
            if slot is not None:
                worker.arena.free(slot)
            return
        result, failures = self._opened(kind, worker, frame, ticket.task)
        result.made, result.lane = of_both(ticket.task, made), number
        result = self._dispatcher.accept(worker, ticket, result)
        ticket.task.samples = []
        ticket.pipeline.receive(ticket.task, result, failures)

    def _opened(
        self, kind: int, worker: Worker, frame: bytes | memoryview, task: BatchTask
    ) -> tuple[BatchResult, list[Failure]]:
        """Return the result in a frame, and the samples that failed."""
        try:
            copy = (
                slot_of(frame, RESULT_HEAD.size) is not None and self._has_lent_much()
            )
            value = unpack(frame, RESULT_HEAD.size, worker.arena, copy=copy)
        except Exception as error:  # of a user's class
            number = worker.number
            text = f"a batch of worker {number} could not be unpickled: {error!r}"
            problem = WorkerError(text, worker=number)
            problem.__cause__ = error
            return BatchResult(error=problem), []
        return (BatchResult(value), []) if kind == BATCH else opened(value, task)

    def _has_lent_much(self) -> bool:
        lent = sum(one.arena.lent for one in self._dispatcher.workers)
        return lent >= self._spec.in_flight + _HELD

    # -- starts and deaths --------------------------------------------------------

    def _common(self) -> list[int]:
        """Return the descriptors that all workers share, as ``Ends.of`` takes them."""
        requests, samples = self._dispatcher.requests, self._dispatcher.samples
        far = [requests.far.fileno(), self._far_results.fileno()]
        memory = [] if samples is None else [samples.descriptor]
        return [*far, self._table_file, self._far_stacks, *memory]

    def _start(self, worker: Worker) -> None:
        worker.starts += 1
        own = [] if worker.own is None else [worker.own.far.fileno()]
        self._launcher.start(worker.number, [worker.arena.descriptor, *own])

    def _handle(self, note: Note) -> None:
        if self._is_over:
            return
        if note.word == "failed":
            assert note.error is not None
            self._fail(note.error.raisable())
        elif note.word == "born":
            self._dispatcher.workers[note.worker].pid = note.number
        elif note.word == "died":
            self._replace(self._dispatcher.workers[note.worker], note.number)

    def _replace(self, worker: Worker, exitcode: int) -> None:
        """Replace a dead process and recover its batches."""
        self._collect_results()  # sent before it died
        if self._is_over:  # a result reported that no worker can start
            return
        from aioloader._workers.process.recovery import Death, recover

        death = Death(worker, exitcode, self.stack())
        self._tally.deaths += 1
        died = f"worker {worker.number} (pid {worker.pid}) died, {death.cause}"
        if self._table.in_flight(worker.number):
            worker.starts = 0  # it had taken a batch, whose ticket counts deaths
        recover(self._dispatcher, self._table, death)
        if worker.starts >= (_STARTS_IN_ALL if worker.is_ready else _STARTS):
            _LOG.warning("%s; it is not replaced again", died)
            self._fail(death.before_a_batch())
            return
        _LOG.warning("%s; it is replaced, and its batches are made again", died)
        self._tally.restarts += 1
        arena, worker.arena = worker.arena, self._dispatcher.new_arena()
        arena.close()
        worker.pid, worker.is_ready = None, False
        self._start(worker)

    def _fail(self, error: BaseException) -> None:
        """End all iterations: no worker can make their batches."""
        pipelines = {one.pipeline for one in self._dispatcher.tickets.values()}
        for pipeline in pipelines:
            pipeline.fail(error)
        self._error = None if pipelines else error  # for the next pipeline that submits
        self.end()

    # -- when a batch does not come -----------------------------------------------

    def explain(self, task: BatchTask) -> str:
        """Say which workers have ``task``, since when, and where they are stuck."""
        holders = self._holders(task)
        if not holders:
            return "waits for a worker process that is free"
        from aioloader._workers.process.stacks import stack_of

        parts = []
        for worker, held in holders:
            parts.append(
                f"has been in stage {STAGES[held.stage]!r} of worker {worker.number} "
                f"(pid {worker.pid}) for {held.seconds:.2f} s"
            )
            if worker.pid is not None:
                parts.append(stack_of(worker.pid, self.stack))
        return "\n".join([*parts, *self._launcher.advice()])

    def restart(self, task: BatchTask) -> bool:
        """Kill the workers that have ``task``; their batches are made again."""
        holders = self._holders(task)
        with self._lock:
            for worker, _ in holders:
                if not self._is_over:
                    self._launcher.kill(worker.number)
        return bool(holders)

    def _holders(self, task: BatchTask) -> list[tuple[Worker, InFlight]]:
        tickets = self._dispatcher.tickets
        return [
            (worker, one)
            for worker in self._dispatcher.workers
            for one in self._table.in_flight(worker.number)
            if one.ticket in tickets and tickets[one.ticket].task is task
        ]

    def stack(self, seconds: float = 0) -> str:
        """Return the stacks that workers wrote on request or in a crash.

        Args:
            seconds: How long to wait for them.
        """
        if self._is_over:
            return ""
        found = b""
        poll = select.poll()
        poll.register(self._stacks, select.POLLIN)
        poll.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self._stacks, 1 << 16):
                found += part
        return found.decode(errors="replace")

    # -- the end ------------------------------------------------------------------

    def is_open(self) -> bool:
        """Tell whether it takes tasks; notices deaths of idle workers."""
        self.collect(seldom=1)
        return not self._is_over

    def end(self) -> None:
        """End the workers in the background, from any thread or finalizer."""
        if self._is_ended:
            return
        with self._lock:
            if self._is_ended:
                return
            self._is_over = True
            with contextlib.suppress(OSError):  # closed before the interrupt
                self._dispatcher.close()
            with contextlib.suppress(OSError):
                self._launcher.end()
            self._stack.close()
            self._is_ended = True  # last: an interrupt may come before

    def join(self) -> bool:
        """Wait, bounded, until the workers have ended; return whether they have.

        Raises:
            BaseException: What the dataset's lifespan has raised when one left it.
        """
        with self._joining:  # several threads may iterate and join together
            is_gone = self._launcher.join(PATIENCE)
            self._launcher.close()
            error = self._exit_error()
        if error is not None:
            raise error
        return is_gone

    def _exit_error(self) -> BaseException | None:
        """Return the first error of leaving a lifespan among the last results."""
        first: BaseException | None = None
        with contextlib.suppress(EOFError, OSError):
            while received := self._results.receive():
                kind, number, *_ = RESULT_HEAD.unpack_from(received[0])
                if kind == LEFT and first is None:
                    arena = self._dispatcher.workers[number].arena
                    sent = unpack(received[0], RESULT_HEAD.size, arena)
                    first = sent.raisable()
        self._results.close()
        return first

    def close(self) -> None:
        """Close what this process holds."""
        self.end()
        self._results.close()
        self._launcher.close()

    def _close_results(self) -> None:
        """Close the channel of results, unless ``join`` still reads it."""
        if not self._is_over:
            self._results.close()

    def _abandon(self) -> None:
        """Close a forked child's copies; the loader's process is unaffected."""
        self._is_over = self._is_ended = True
        self._stack.close()
        self._results.close()
        self._launcher.close()
