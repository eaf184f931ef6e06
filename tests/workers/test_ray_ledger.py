"""Who is given which batch: without Ray."""

from typing import Any

import pytest

from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.ray.actor import Begun
from aioloader._workers.ray.dispatcher import RayDispatcher, Seat

RUN: Any = object()


def make(
    seats: int = 2, at_once: int = 1, *, is_addressed: bool = False
) -> RayDispatcher:
    """Return a ledger with actors that are ready."""
    ledger = RayDispatcher(at_once, is_addressed=is_addressed)
    ledger.seats = [Seat(number, None, Begun(0, "")) for number in range(seats)]
    return ledger


def enter(ledger: RayDispatcher, count: int) -> None:
    """Have so many batches wait."""
    for _ in range(count):
        ledger.enter(RUN, BatchTask(ledger._next, ()))


def given(ledger: RayDispatcher) -> list[tuple[int, int]]:
    """Return who was given what."""
    return [(seat.number, ticket.task.number) for seat, ticket in ledger.assign()]


def test_the_free_come_first() -> None:
    """Each has one, then each one more; the rest waits."""
    ledger = make(3)
    enter(ledger, 7)
    assert given(ledger) == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]
    ledger.remove(ledger.seats[1].tickets.pop(0))
    assert given(ledger) == [(1, 6)]


def test_nothing_is_given_before_an_actor_is_ready() -> None:
    """Nor before it is known whether requests are for certain workers."""
    ledger = make(1)
    ledger.seats[0].begun = None
    enter(ledger, 1)
    assert given(ledger) == []
    ledger.seats[0].begun, ledger.is_addressed = Begun(0, ""), None
    assert given(ledger) == []
    ledger.is_addressed = False
    assert given(ledger) == [(0, 0)]


def test_addressed_batches_go_to_their_worker() -> None:
    """And nobody overtakes one that waits for its own."""
    ledger = make(2, is_addressed=True)
    enter(ledger, 6)
    assert given(ledger) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    ledger.remove(ledger.seats[1].tickets.pop(0))
    assert given(ledger) == [(1, 5)]


def test_what_is_queued_is_asked_back_for_the_idle() -> None:
    """Once, the latest of an actor that has two."""
    ledger = make(2)
    enter(ledger, 4)
    given(ledger)
    for ticket in ledger.seats[1].tickets:
        ledger.remove(ticket)
    ledger.seats[1].tickets.clear()
    ((seat, ticket),) = ledger.recall()
    assert (seat.number, ticket.task.number) == (0, 2)
    assert list(ledger.recall()) == []
    seat.tickets.remove(ticket)
    ledger.put_back(ticket)
    assert given(ledger) == [(1, 2)]


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_the_dead_had_waits_again_in_order(at_once: int) -> None:
    """The one that may have killed it gets an actor to itself."""
    ledger = make(2, at_once)
    enter(ledger, 7)
    given(ledger)
    dead = ledger.seats[0]
    had = [ticket.task.number for ticket in dead.tickets]
    assert ledger.recover(dead) == []
    assert [n for _, n in given(ledger)][:1] == had[:1]
    assert [n for _, n in given(ledger)] == []  # the other actor is not idle
    alone = ledger.tickets[had[0]]
    assert alone.is_alone
    assert alone.deaths == (at_once == 1)
    again = ledger.seats[0]
    assert again.tickets == [alone]
    condemned = ledger.recover(again)
    assert condemned == ([alone] if at_once == 1 else [])


def test_the_forgotten_are_struck_out() -> None:
    """A late answer is nobody's."""
    ledger = make(1)
    enter(ledger, 3)
    given(ledger)
    assert len(ledger.forget(RUN)) == 3
    assert not ledger.remove(ledger.seats[0].tickets[0])
    ledger.put_back(ledger.seats[0].tickets[0])
    ledger.seats[0].tickets.clear()
    assert given(ledger) == []
