"""Have a dead worker's batches made again by other workers, or report their loss.

A worker's arena outlives the worker, and records which batches the worker has taken.
Any worker can make a map-style batch again. A stream that the worker was reading
continues in its successor if the stream has a state, and is lost otherwise. This module
also writes the texts about dead and stuck workers.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from aioloader._pipeline.batch_task import BatchResult, shorten
from aioloader._workers.process.dispatcher import Dispatcher, Worker
from aioloader._workers.process.messages import STAGES
from aioloader._workers.process.replicas import StreamReplicas
from aioloader._workers.process.supervisor import UNKNOWN, kill_group
from aioloader._workers.process.worker_main import STACK_SIGNAL
from aioloader.errors import WorkerDiedError

# A batch is not retried once this many workers have died while making it.
_MAX_DEATHS = 2
# Seconds to wait for the kernel to kill the workers of a dead supervisor.
_ORPHAN_SECONDS = 1.0
# Seconds to wait for a worker's stack, and then for each further part of it.
_STACK_SECONDS, _REST_SECONDS = 1.0, 0.05


class Death:
    """The unexpected end of a worker process: its cause, batches and last stack."""

    def __init__(self, worker: Worker, exitcode: int, stack: str) -> None:
        self.worker = worker
        self.pid = worker.pid
        self.exitcode = exitcode
        self.taken = worker.arena.in_flight()
        self.cause = cause_of(exitcode)
        if worker.is_stuck:
            self.cause = "by SIGKILL, from on_timeout='restart'"
        self._stack = f"\nIts Python stack:\n{stack}" if stack else ""

    def error(self, reason: str, batch: int | None = None) -> WorkerDiedError:
        """Return an error with torch's text, the cause of the death and ``reason``."""
        text = f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly"
        return WorkerDiedError(
            f"{text}, {self.cause}{reason}{self._stack}",
            worker=self.worker.number,
            pid=self.pid,
            exitcode=self.exitcode,
            batch=batch,
        )


def recover(dispatcher: Dispatcher, death: Death) -> None:
    """Queue a dead worker's batches again; fail batches that have killed two workers.

    Call this after the worker's results have been read: its arena is replaced here.
    """
    dead, tickets = death.worker, dispatcher.tickets
    dispatcher.renew(dead, [held.ticket for held in death.taken])
    if dispatcher.replicas is not None:
        _end_streams(dispatcher, dispatcher.replicas, death)
    for held in death.taken:
        ticket = tickets.get(held.ticket)
        if ticket is None:
            continue
        # If it had several, the culprit is unknown. Each is made alone from now on.
        ticket.deaths += len(death.taken) == 1
        ticket.request = ticket.request._replace(is_alone=True)
        if ticket.deaths >= _MAX_DEATHS:
            del tickets[held.ticket]
            task = ticket.task
            error = death.error(
                f", in stage {STAGES[held.stage]!r} of batch {task.number}, sample "
                f"indices {shorten(task.indices)}; it is not the first worker that "
                "this batch has cost",
                task.number,
            )
            ticket.pipeline.receive(task, BatchResult(error=error))
    # A live worker may have taken a request that it has not recorded yet. Its batch is
    # made twice, with equal results; the later result is dropped.
    workers = dispatcher.workers
    taken = {held.ticket for worker in workers for held in worker.arena.in_flight()}
    taken |= dead.queue.taken()
    dispatcher.take_back(dead.queue)
    for name, ticket in sorted(tickets.items()):
        if name not in taken and ticket.worker.queue is dead.queue:
            dead.queue.waiting.append(ticket.request)


def _end_streams(
    dispatcher: Dispatcher, replicas: StreamReplicas, death: Death
) -> None:
    """End a dead worker's streams, except those that its successor can continue."""
    dead, tickets = death.worker, dispatcher.tickets
    held = [tickets[taken.ticket] for taken in death.taken if taken.ticket in tickets]
    is_hopeless = (
        len(death.taken) == len(held) == 1 and held[0].deaths + 1 >= _MAX_DEATHS
    )  # the one batch that it had would kill the next worker, too
    error = death.error(
        "; its position in its iterable dataset is lost, and so is the data that it "
        "had not yet read: start a new iteration, or use a map-style dataset, whose "
        "batches any worker can make again"
    )
    pipelines = [ticket.pipeline for ticket in held]
    continued = replicas.restart(
        dead.number, pipelines, error, can_continue=not is_hopeless
    )
    for name, ticket in sorted(tickets.items()):
        if ticket.worker is not dead:
            continue
        result = replicas.result_of(ticket.pipeline, ticket.task, dead.number)
        if result is not None:
            del tickets[name]
            ticket.pipeline.receive(ticket.task, result)
        elif ticket.pipeline in continued:
            resume = replicas.resume_of(ticket.pipeline, dead.number)
            ticket.request = ticket.request._replace(resume=resume)


def await_orphan(pid: int | None) -> None:
    """Wait until the kernel has killed a worker whose supervisor has died.

    That takes microseconds, but until then the worker may take a request. This also
    kills the processes that the worker has started.
    """
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                connection.wait([process], _ORPHAN_SECONDS)
            finally:
                os.close(process)
        kill_group(pid)


def cause_of(exitcode: int) -> str:
    """Return the cause of a worker's death in words, given its exit status."""
    if exitcode == UNKNOWN:
        return "for an unknown reason: the process that watched it is gone too"
    if exitcode >= 0:
        return f"with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode == signal.SIGKILL:
        return f"by {name}, often the kernel's out-of-memory killer"
    return f"by {name}"


def stack_of(pid: int, read: Callable[[float], str]) -> str:
    """Return the Python stack of a worker as text; takes about a second at most.

    A stopped worker is continued briefly and stopped again. ``read(seconds)`` returns
    the stacks that workers write within that time.
    """
    is_stopped = _state(pid) == "T"
    read(0)  # discard old stacks
    try:
        os.kill(pid, STACK_SIGNAL)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        text = read(_STACK_SECONDS)
        while text and (more := read(_REST_SECONDS)):
            text += more
    except ProcessLookupError:
        return "it has ended"
    finally:
        if is_stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    stopped = "it is stopped (SIGSTOP); " if is_stopped else ""
    return stopped + (f"its Python stack:\n{text}" if text else "it does not answer")


def _state(pid: int) -> str:
    """Return a process's state from ``/proc``, such as R or T; '' if it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return ""
