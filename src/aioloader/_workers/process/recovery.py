"""After a death: what the worker had in hand is blamed, or made again; nothing is lost.

What a worker holds is read from the board, which outlives it. A map-style batch can be
made again by anybody. A stream that the worker was reading goes on in its successor if
it has a state of its own, and is over else.
"""

from aioloader._pipeline.batch_task import BatchResult
from aioloader._transport.in_flight_table import InFlightTable, InHand
from aioloader._workers.process.copies import Copies
from aioloader._workers.process.death_errors import died_with, died_with_stream
from aioloader._workers.process.dispatcher import Dispatcher, Worker

# A batch that has cost so many workers their lives is not tried again.
_LIVES = 2


def mend(
    dispatcher: Dispatcher,
    board: InFlightTable,
    dead: Worker,
    exitcode: int,
    stack: str,
) -> None:
    """See to what ``dead`` leaves behind; its results have been read before.

    Args:
        dispatcher: What is under way.
        board: What each worker had in hand.
        dead: The worker.
        exitcode: Its exit status, negative for a signal.
        stack: What it wrote when it crashed.
    """
    held = board.in_hand(dead.number)
    board.wipe(dead.number)
    dispatcher.free_answered(dead)
    if dispatcher.is_replicated:
        _bury_streams(dispatcher, dead, held, exitcode, stack)
    elif dispatcher.copies is not None:
        _restore_copy(dispatcher, dispatcher.copies, dead)
    for one in held:
        _blame(dispatcher, dead, one, len(held), exitcode, stack)
    _send_again(dispatcher, board, dead)


def _blame(
    dispatcher: Dispatcher,
    dead: Worker,
    one: InHand,
    count: int,
    exitcode: int,
    stack: str,
) -> None:
    """Count a death against a batch, if it was the only one that the worker had."""
    ticket = dispatcher.tickets.get(one.ticket)
    if ticket is None:
        return
    ticket.deaths += count == 1
    # If there were others in hand, nobody knows whose fault it was: the next time it
    # has a worker to itself.
    ticket.request = ticket.request._replace(is_alone=True)
    dispatcher.free_samples(one.ticket, ticket.slot)
    ticket.slot = None
    if ticket.deaths >= _LIVES:
        del dispatcher.tickets[one.ticket]
        error = died_with(ticket.task, one, dead.number, dead.pid, exitcode, stack)
        ticket.run.receive(ticket.task, BatchResult(error=error))


def _send_again(dispatcher: Dispatcher, board: InFlightTable, dead: Worker) -> None:
    """Send again what neither waits nor is in hand: the dead worker had it.

    A live one may have taken a request and not have noted it yet: that batch is then
    made twice, alike, and the later result is dropped.
    """
    queue = dead.own if dispatcher.is_addressed and dead.own else dispatcher.requests
    in_hand = {
        one.ticket
        for worker in dispatcher.workers
        for one in board.in_hand(worker.number)
    }
    dispatcher.take_back(queue)
    for name in sorted(set(dispatcher.tickets) - in_hand):
        if dispatcher.queue_of(name) is queue:
            queue.waiting.append(name)


def _restore_copy(dispatcher: Dispatcher, copies: Copies, dead: Worker) -> None:
    """Have the successor's dataset begin in the state of the dead worker's."""
    copies.lose(dead.number)
    for ticket in dispatcher.tickets.values():
        if ticket.worker is dead:
            resume = copies.lost_by(dead.number)
            ticket.request = ticket.request._replace(resume=resume)


def _bury_streams(
    dispatcher: Dispatcher, dead: Worker, held: list[InHand], exitcode: int, stack: str
) -> None:
    """End the streams that a dead replica had begun, but for those that can go on."""
    error = died_with_stream(dead.number, dead.pid, exitcode, stack)
    for one in held:
        if one.ticket in dispatcher.tickets:
            dispatcher.replicas.begin(dispatcher.tickets[one.ticket].run, dead.number)
    if not _is_last_straw(dispatcher, held):
        _restart_streams(dispatcher, dead)
    for run in dispatcher.replicas.lose(dead.number, error):
        for name, ticket in sorted(dispatcher.tickets.items()):
            if ticket.run is run and ticket.worker is dead:
                del dispatcher.tickets[name]
                early = dispatcher.replicas.result_of(run, dead.number)
                run.receive(
                    ticket.task, early or BatchResult(is_empty=True, has_ended=True)
                )


def _is_last_straw(dispatcher: Dispatcher, held: list[InHand]) -> bool:
    """Tell whether the dead worker had nothing in hand but what has cost one before."""
    tickets = [dispatcher.tickets.get(one.ticket) for one in held]
    deaths = [ticket.deaths for ticket in tickets if ticket is not None]
    return len(held) == len(deaths) == 1 and deaths[0] + 1 >= _LIVES


def _restart_streams(dispatcher: Dispatcher, dead: Worker) -> None:
    """Have the successor read on where the dead worker's streams were left."""
    for run in {ticket.run for ticket in dispatcher.tickets.values()}:
        if not dispatcher.replicas.restart(run, dead.number):
            continue
        state = dispatcher.replicas.resume_of(run, dead.number)
        for ticket in dispatcher.tickets.values():
            if ticket.run is run and ticket.worker is dead:
                seeds = run.maker.seeds(dead.number, len(dispatcher.workers))
                resume = None if state is None else (state, seeds)
                ticket.request = ticket.request._replace(resume=resume)
