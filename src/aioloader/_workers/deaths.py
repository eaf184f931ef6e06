"""After a death: what the worker had in hand is blamed, or made again; nothing is lost.

What a worker holds is read from the board, which outlives it. A map-style batch can be
made again by anybody. A stream that the worker was reading goes on in its successor if
it has a state of its own, and is over else.
"""

from aioloader._pipeline.work import Outcome
from aioloader._transport.board import Board, InHand
from aioloader._workers.copies import Copies
from aioloader._workers.ledger import Ledger, Worker
from aioloader._workers.obituary import died_with, died_with_stream

# A batch that has cost so many workers their lives is not tried again.
_LIVES = 2


def mend(ledger: Ledger, board: Board, dead: Worker, exitcode: int, stack: str) -> None:
    """See to what ``dead`` leaves behind; its results have been read before.

    Args:
        ledger: What is under way.
        board: What each worker had in hand.
        dead: The worker.
        exitcode: Its exit status, negative for a signal.
        stack: What it wrote when it crashed.
    """
    held = board.in_hand(dead.number)
    board.wipe(dead.number)
    ledger.free_answered(dead)
    if ledger.is_replicated:
        _bury_streams(ledger, dead, held, exitcode, stack)
    elif ledger.copies is not None:
        _restore_copy(ledger, ledger.copies, dead)
    for one in held:
        _blame(ledger, dead, one, len(held), exitcode, stack)
    _send_again(ledger, board, dead)


def _blame(
    ledger: Ledger, dead: Worker, one: InHand, count: int, exitcode: int, stack: str
) -> None:
    """Count a death against a batch, if it was the only one that the worker had."""
    ticket = ledger.tickets.get(one.ticket)
    if ticket is None:
        return
    ticket.deaths += count == 1
    # If there were others in hand, nobody knows whose fault it was: the next time it
    # has a worker to itself.
    ticket.request = ticket.request._replace(is_alone=True)
    ledger.free_samples(one.ticket, ticket.slot)
    ticket.slot = None
    if ticket.deaths >= _LIVES:
        del ledger.tickets[one.ticket]
        error = died_with(ticket.work, one, dead.number, dead.pid, exitcode, stack)
        ticket.run.receive(ticket.work, Outcome(error=error))


def _send_again(ledger: Ledger, board: Board, dead: Worker) -> None:
    """Send again what neither waits nor is in hand: the dead worker had it.

    A live one may have taken a request and not have noted it yet: that batch is then
    made twice, alike, and the later result is dropped.
    """
    queue = dead.own if ledger.is_addressed and dead.own else ledger.requests
    in_hand = {
        one.ticket for worker in ledger.workers for one in board.in_hand(worker.number)
    }
    ledger.take_back(queue)
    for name in sorted(set(ledger.tickets) - in_hand):
        if ledger.queue_of(name) is queue:
            queue.waiting.append(name)


def _restore_copy(ledger: Ledger, copies: Copies, dead: Worker) -> None:
    """Have the successor's dataset begin in the state of the dead worker's."""
    copies.lose(dead.number)
    for ticket in ledger.tickets.values():
        if ticket.worker is dead:
            resume = copies.lost_by(dead.number)
            ticket.request = ticket.request._replace(resume=resume)


def _bury_streams(
    ledger: Ledger, dead: Worker, held: list[InHand], exitcode: int, stack: str
) -> None:
    """End the streams that a dead replica had begun, but for those that can go on."""
    error = died_with_stream(dead.number, dead.pid, exitcode, stack)
    for one in held:
        if one.ticket in ledger.tickets:
            ledger.replicas.begin(ledger.tickets[one.ticket].run, dead.number)
    if not _is_last_straw(ledger, held):
        _restart_streams(ledger, dead)
    for run in ledger.replicas.lose(dead.number, error):
        for name, ticket in sorted(ledger.tickets.items()):
            if ticket.run is run and ticket.worker is dead:
                del ledger.tickets[name]
                early = ledger.replicas.outcome_of(run, dead.number)
                run.receive(
                    ticket.work, early or Outcome(is_empty=True, has_ended=True)
                )


def _is_last_straw(ledger: Ledger, held: list[InHand]) -> bool:
    """Tell whether the dead worker had nothing in hand but what has cost one before."""
    tickets = [ledger.tickets.get(one.ticket) for one in held]
    deaths = [ticket.deaths for ticket in tickets if ticket is not None]
    return len(held) == len(deaths) == 1 and deaths[0] + 1 >= _LIVES


def _restart_streams(ledger: Ledger, dead: Worker) -> None:
    """Have the successor read on where the dead worker's streams were left."""
    for run in {ticket.run for ticket in ledger.tickets.values()}:
        if not ledger.replicas.restart(run, dead.number):
            continue
        state = ledger.replicas.resume_of(run, dead.number)
        for ticket in ledger.tickets.values():
            if ticket.run is run and ticket.worker is dead:
                seeds = run.recipe.seeds(dead.number, len(ledger.workers))
                resume = None if state is None else (state, seeds)
                ticket.request = ticket.request._replace(resume=resume)
