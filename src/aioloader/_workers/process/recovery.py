"""Recovery after the death of a worker process: no batch is lost.

The in-flight table outlives the worker and records which batches it had taken. Any
other worker can make a map-style batch again. A stream that the worker was reading
continues in its successor if it has a state, and is lost otherwise.
"""

import signal

from aioloader._pipeline.batch_task import BatchResult, shorten
from aioloader._transport.in_flight_table import InFlight, InFlightTable
from aioloader._workers.process.dispatcher import Dispatcher, Ticket, Worker
from aioloader._workers.process.messages import STAGES
from aioloader._workers.process.replicas import Replicas
from aioloader._workers.process.supervisor import UNKNOWN
from aioloader.errors import WorkerDiedError

# A batch with which this many workers have died is not retried.
_MOST_DEATHS = 2


class Death:
    """The unexpected end of a worker process.

    Args:
        worker: The worker.
        exitcode: Its exit status, negative for a signal.
        stack: What it wrote when it crashed.
    """

    def __init__(self, worker: Worker, exitcode: int, stack: str) -> None:
        self.worker = worker
        self.exitcode = exitcode
        self.cause = cause_of(exitcode)
        self._stack = f"\nIts Python stack:\n{stack}" if stack else ""

    def error(self, reason: str, batch: int | None = None) -> WorkerDiedError:
        """Return an error that starts with torch's words, followed by ``reason``."""
        pid = self.worker.pid
        text = f"DataLoader worker (pid(s) {pid}) exited unexpectedly, {self.cause}"
        return WorkerDiedError(
            f"{text}{reason}{self._stack}",
            worker=self.worker.number,
            pid=pid,
            exitcode=self.exitcode,
            batch=batch,
        )

    def before_a_batch(self) -> WorkerDiedError:
        """Return the error for processes that die before they take a batch."""
        return self.error(
            f"; {self.worker.starts} processes in a row have died without making a "
            "batch; see what they printed"
        )


def recover(dispatcher: Dispatcher, table: InFlightTable, death: Death) -> None:
    """Recover the batches of a dead worker, after its results have been read."""
    dead = death.worker
    taken = table.in_flight(dead.number)
    table.wipe(dead.number)
    dispatcher.free_answered(dead)
    dispatcher.lose_copy(dead)
    if dispatcher.replicas is not None:
        _end_streams(dispatcher, dispatcher.replicas, death, taken)
    for one in taken:
        ticket = dispatcher.tickets.get(one.ticket)
        if ticket is not None:
            _count_death(dispatcher, death, ticket, one, is_only=len(taken) == 1)
    _send_again(dispatcher, table, dead)


def _count_death(
    dispatcher: Dispatcher,
    death: Death,
    ticket: Ticket,
    one: InFlight,
    *,
    is_only: bool,
) -> None:
    """Count a death against a batch, if it was the only one that the worker had.

    If there were others, the culprit is unknown: next time each has a worker to itself.
    """
    ticket.deaths += is_only
    ticket.request = ticket.request._replace(is_alone=True)
    dispatcher.free_samples(one.ticket, ticket.slot)
    ticket.slot = None
    if ticket.deaths >= _MOST_DEATHS:
        del dispatcher.tickets[one.ticket]
        task = ticket.task
        error = death.error(
            f", in stage {STAGES[one.stage]!r} of batch {task.number}, sample indices "
            f"{shorten(task.indices)}; it is not the first worker that this batch has "
            "cost",
            task.number,
        )
        ticket.pipeline.receive(task, BatchResult(error=error))


def _send_again(dispatcher: Dispatcher, table: InFlightTable, dead: Worker) -> None:
    """Resend the requests that neither wait nor are with a live worker.

    A live worker may have taken a request without having noted it yet: that batch is
    made twice, with equal results, and the later one is dropped.
    """
    queue = dead.own or dispatcher.requests
    taken = {
        one.ticket
        for worker in dispatcher.workers
        for one in table.in_flight(worker.number)
    }
    dispatcher.take_back(queue)
    for name, ticket in sorted(dispatcher.tickets.items()):
        if name not in taken and (ticket.worker.own or dispatcher.requests) is queue:
            queue.waiting.append(name)


def _end_streams(
    dispatcher: Dispatcher, replicas: Replicas, death: Death, taken: list[InFlight]
) -> None:
    """End the streams that a dead worker was reading, unless they can continue."""
    dead, tickets = death.worker, dispatcher.tickets
    held = [tickets[one.ticket] for one in taken if one.ticket in tickets]
    for ticket in held:
        replicas.begin(ticket.pipeline, dead.number)
    is_hopeless = (
        len(taken) == len(held) == 1 and held[0].deaths + 1 >= _MOST_DEATHS
    )  # the batch that killed it would kill the next one
    if not is_hopeless:
        _continue_streams(dispatcher, replicas, dead)
    error = death.error(
        "; its position in its iterable dataset is lost, and so is the data that it "
        "had not yet read: start a new iteration, or use a map-style dataset, whose "
        "batches any worker can make again"
    )
    for pipeline in replicas.lose(dead.number, error):
        for name, ticket in sorted(tickets.items()):
            if ticket.pipeline is pipeline and ticket.worker is dead:
                del tickets[name]
                early = replicas.result_of(pipeline, dead.number)
                over = BatchResult(is_empty=True, has_ended=True)
                pipeline.receive(ticket.task, early or over)


def _continue_streams(dispatcher: Dispatcher, replicas: Replicas, dead: Worker) -> None:
    """Continue each stream in the successor, from its last known state."""
    tickets = dispatcher.tickets.values()
    for pipeline in {ticket.pipeline for ticket in tickets}:
        if not replicas.restart(pipeline, dead.number):
            continue
        state, resume = replicas.resume_of(pipeline, dead.number), None
        if state is not None:
            resume = state, pipeline.maker.seeds(dead.number, len(dispatcher.workers))
        for ticket in tickets:
            if ticket.pipeline is pipeline and ticket.worker is dead:
                ticket.request = ticket.request._replace(resume=resume)


def cause_of(exitcode: int) -> str:
    """Return an exit status in words."""
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
