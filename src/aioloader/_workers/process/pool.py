"""The loader's side of its worker processes: requests out, results in, deaths mended.

There is no thread: whoever waits for a batch reads what has come, sends what there is
room for, and learns of deaths. Workers go on by themselves meanwhile, for they pull
requests from a queue that lies in the kernel.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aioloader._order.failures import Failure
from aioloader._order.forks import close_in_children, fork_safe
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.channel import Channel
from aioloader._transport.in_flight_table import InFlightTable, InHand, make_board
from aioloader._transport.locked import Locker
from aioloader._workers.process.batch_codec import slot_of, unpack
from aioloader._workers.process.death_errors import cause_of, died_too_early
from aioloader._workers.process.dispatcher import Dispatcher, Worker
from aioloader._workers.process.fork_launcher import ForkLauncher
from aioloader._workers.process.launch import PATIENCE, Launcher
from aioloader._workers.process.messages import RESULT_HEAD, Kind, opened
from aioloader._workers.process.recovery import mend
from aioloader._workers.process.spawn import SpawnLauncher
from aioloader._workers.process.supervisor import Note
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError, WorkerError, WorkerStartError

_LOG = logging.getLogger("aioloader")

# So many processes may one worker cost without beginning a batch: while it does not
# come so far as to take one, and in all, for it may be killed while it is idle.
_STARTS, _STARTS_IN_ALL = 3, 10
# Seconds for spawned interpreters to import torch.
_SPAWNING = 60.0
# Batches that a consumer may hold, beside those in flight, before it gets copies.
_HELD = 4


@dataclass
class Tally:
    """What has become of a loader's worker processes, over all epochs.

    Attributes:
        deaths: Processes that died and were not asked to.
        restarts: Processes that were started in their place.
    """

    deaths: int = 0
    restarts: int = 0


class ProcessPool:
    """Worker processes for one loader; used from any thread.

    Args:
        spec: What the workers are to do.
        launch: Makes what starts workers, given the descriptors that they share.
        locker: Page-locks what workers write batches into, or None.
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
        self._lock = fork_safe(threading.RLock())  # a finalizer may come in between
        self._joining = fork_safe(threading.Lock())
        self._is_over = False
        self._error: BaseException | None = None  # that ended it, and nobody was told
        self._is_up = False  # whether a process of a worker runs
        with contextlib.ExitStack() as stack:
            self._dispatcher = Dispatcher(spec, stack, locker)
            self._results, self._far_results = Channel.pair()
            self._results.never_block()
            stack.callback(self._results.close)
            stack.callback(self._far_results.close)
            self._stacks, self._far_stacks = os.pipe()
            os.set_blocking(self._stacks, False)
            self._board_file = make_board(spec.num_workers)
            for descriptor in (self._stacks, self._far_stacks, self._board_file):
                stack.callback(os.close, descriptor)
            self._board = InFlightTable(self._board_file, spec.num_workers)
            self._launcher = launch(self._common())
            self._stack = stack
            close_in_children(self._abandon)  # before workers are forked from here
            with contextlib.ExitStack() as launching:
                launching.callback(self._launcher.close)
                self._launcher.open()
                self._is_up = not isinstance(self._launcher, SpawnLauncher)
                self.is_forked = isinstance(self._launcher, ForkLauncher)
                for worker in self._dispatcher.workers:
                    self._start(worker)
                launching.pop_all()
            self._stack = stack.pop_all()

    # -- for iterations -----------------------------------------------------------

    def submit(self, run: Pipeline, task: BatchTask) -> None:
        """Take a task; its result comes by ``collect``, in whatever thread."""
        with self._lock:
            if self._is_over:
                over = LoaderClosedError("the worker processes have ended")
                error, self._error = self._error or over, None
                run.fail(error)
                return
            dispatcher = self._dispatcher
            name = dispatcher.enter(run, task)
            worker = dispatcher.tickets[name].worker
            early = dispatcher.replicas.result_of(run, worker.number)
            if early is not None:
                del dispatcher.tickets[name]
                run.receive(task, early)
                return
            dispatcher.queue_of(name).waiting.append(name)
            dispatcher.flush()

    def forget(self, run: Pipeline) -> None:
        """Drop what ``run`` still waits for."""
        with self._lock:
            if not self._is_over:
                self._dispatcher.forget(run)

    def wait_up(self) -> None:
        """Wait until a worker process runs: none of the time counts as the user's.

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
        """Return what becomes readable when ``collect`` has something to do."""
        if self._is_over:
            return []
        return [self._results.fileno(), *self._launcher.descriptors()]

    def collect(self) -> None:
        """Take what has come, without blocking; deliver it, and see to the dead."""
        with self._lock:
            if self._is_over:
                return
            try:
                self._collect_results()
                while not self._is_over and (notes := self._launcher.notes()):
                    for note in notes:
                        self._heed(note)
                self._dispatcher.flush()
            except Exception as error:  # every iteration must learn of it
                self._fail(error)
            except BaseException:  # Ctrl-C: what was just read is lost
                self._fail(LoaderClosedError("the loader was interrupted; begin anew"))
                raise

    # -- results ------------------------------------------------------------------

    def _collect_results(self) -> None:
        with contextlib.suppress(EOFError):
            while not self._is_over and (received := self._results.receive()):
                self._take(received[0])

    def _take(self, frame: bytes) -> None:
        kind, number, name = RESULT_HEAD.unpack_from(frame)
        worker = self._dispatcher.workers[number]
        at = RESULT_HEAD.size
        if kind in {Kind.READY, Kind.UP}:
            self._is_up = True
            worker.is_ready = worker.is_ready or kind == Kind.READY
            return
        if kind == Kind.FATAL:
            self._fail(unpack(frame, at, worker.arena).raisable())
            return
        worker.starts = 0
        ticket = self._dispatcher.tickets.pop(name, None)
        if ticket is None:  # of an iteration that has ended, or made twice
            slot = slot_of(frame, at)
            if slot is not None:
                worker.arena.free(slot)
            return
        result, failures = self._opened(kind, worker, frame)
        worker.answered.append((name, ticket.slot))
        result = self._dispatcher.replicas.passed(
            ticket.run, worker.number, result, ticket.request.number
        )
        if self._dispatcher.copies is not None:
            self._dispatcher.copies.note(worker.number, result.dataset)
        ticket.task.samples = []
        ticket.run.receive(ticket.task, result, failures)

    def _opened(
        self, kind: int, worker: Worker, frame: bytes
    ) -> tuple[BatchResult, list[Failure]]:
        """Return what is in a frame: the result, and the failures on the way."""
        lent = sum(one.arena.lent for one in self._dispatcher.workers)
        is_much = lent >= self._spec.in_flight + _HELD
        try:
            value = unpack(frame, RESULT_HEAD.size, worker.arena, copy=is_much)
        except Exception as error:  # of a user's class
            number = worker.number
            text = f"a batch of worker {number} could not be unpickled: {error!r}"
            problem = WorkerError(text, worker=number)
            problem.__cause__ = error
            return BatchResult(error=problem), []
        return (BatchResult(value), []) if kind == Kind.BATCH else opened(value)

    # -- births and deaths --------------------------------------------------------

    def _common(self) -> list[int]:
        dispatcher = self._dispatcher
        far = [dispatcher.requests.far.fileno(), self._far_results.fileno()]
        ends = [*far, self._board_file, self._far_stacks]
        return (
            ends
            if dispatcher.samples is None
            else [*ends, dispatcher.samples.descriptor]
        )

    def _start(self, worker: Worker) -> None:
        worker.starts += 1
        own = [] if worker.own is None else [worker.own.far.fileno()]
        self._launcher.start(worker.number, [worker.arena.descriptor, *own])

    def _heed(self, note: Note) -> None:
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
        """Start another process in place of a dead one, and see to its batches."""
        self._collect_results()  # what it had sent before it died
        if self._is_over:  # one of these said that there is no use
            return
        stack = self.stack()
        self._tally.deaths += 1
        died = f"worker {worker.number} (pid {worker.pid}) died, {cause_of(exitcode)}"
        if self._board.in_hand(worker.number):
            worker.starts = 0  # it had begun: a batch that kills has its own count
        mend(self._dispatcher, self._board, worker, exitcode, stack)
        if worker.starts >= (_STARTS_IN_ALL if worker.is_ready else _STARTS):
            _LOG.warning("%s; it is not replaced again", died)
            number, pid = worker.number, worker.pid
            self._fail(died_too_early(number, pid, exitcode, stack, worker.starts))
            return
        _LOG.warning("%s; it is replaced, and its batches are made again", died)
        self._tally.restarts += 1
        arena, worker.arena = worker.arena, self._dispatcher.new_arena()
        arena.close()
        worker.pid, worker.is_ready = None, False
        self._start(worker)

    def _fail(self, error: BaseException) -> None:
        """End all iterations: no worker can do the task."""
        runs = {
            id(ticket.run): ticket.run for ticket in self._dispatcher.tickets.values()
        }
        for run in runs.values():
            run.fail(error)
        self._error = None if runs else error  # for who submits next
        self.end()

    # -- when a batch does not come -----------------------------------------------

    def holders(self, task: BatchTask) -> list[tuple[int, int | None, InHand]]:
        """Return who has ``task`` in hand: worker, pid, stage and seconds."""
        tickets = self._dispatcher.tickets
        return [
            (worker.number, worker.pid, one)
            for worker in self._dispatcher.workers
            for one in self._board.in_hand(worker.number)
            if one.ticket in tickets and tickets[one.ticket].task is task
        ]

    def kill(self, worker: int) -> None:
        """Kill a worker; it will be replaced, and its batches made again."""
        with self._lock:
            if not self._is_over:
                self._launcher.kill(worker)

    def stack(self, seconds: float = 0) -> str:
        """Return what workers wrote when they were asked for it, or crashed.

        Args:
            seconds: How long to wait for it.
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
        """Tell whether it takes tasks; who died in idleness is noticed here."""
        self.collect()
        return not self._is_over

    def end(self) -> None:
        """Let the workers end, in the background; from any thread, and finalizers."""
        if self._is_over:
            return  # in a forked child, nobody is left to release the lock
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._dispatcher.close()
            self._launcher.end()
            self._stack.close()

    def join(self) -> bool:
        """Wait until the workers are gone, bounded; tell whether they are."""
        with self._joining:  # threads that iterate together end together
            is_gone = self._launcher.join(PATIENCE)
            self._launcher.close()
        return is_gone

    def close(self) -> None:
        """Close what this process holds."""
        self.end()
        self._launcher.close()

    def _abandon(self) -> None:
        """Close a forked child's copies; the loader's process goes on."""
        self._is_over = True
        self._stack.close()
        self._launcher.close()
