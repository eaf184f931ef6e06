"""Assign batches to Ray actors: pure and synchronous.

A free actor gets the oldest waiting batch. An actor that makes one batch at a time gets
a second one in advance, so that it never waits; if another actor becomes idle, that
batch is recalled.
"""

import bisect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._workers.ray.actor import Begun

# A batch with which this many actors have died is not retried.
_MOST_DEATHS = 2


@dataclass(eq=False, slots=True)
class Ticket:
    """A batch in flight.

    Attributes:
        name: Its number among all requests.
        deaths: How many actors have died with this batch alone.
        losses: How often its result was lost on the way.
        is_alone: Whether it must not share an actor, since it may kill it.
        is_recalled: Whether its actor was asked to return it.
        since: When it was sent to its actor.
    """

    name: int
    pipeline: Pipeline
    task: BatchTask
    deaths: int = 0
    losses: int = 0
    is_alone: bool = False
    is_recalled: bool = False
    since: float = 0.0


@dataclass(eq=False)
class Seat:
    """The loader's view of a worker: the number stays, the actor may change.

    Attributes:
        begun: The actor's report that it is ready; None before.
        tickets: The batches that it has, the oldest first.
    """

    number: int
    actor: Any
    begun: Begun | None = None
    tickets: list[Ticket] = field(default_factory=list)


class RayDispatcher:
    """Tickets and seats of one pool.

    Args:
        at_once: Batches that an actor makes at once.
        is_addressed: Whether batch k is for worker k modulo their number; None: not
            known before an actor is ready.
    """

    def __init__(self, at_once: int, *, is_addressed: bool | None) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.seats: list[Seat] = []
        self.is_addressed = is_addressed
        self._is_serial = at_once == 1
        self._depth = 2 if self._is_serial else at_once
        self._waiting: list[int] = []  # sorted
        self._next = 0

    def enter(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Add a ticket; it waits for an actor."""
        ticket = Ticket(self._next, pipeline, task)
        self._next += 1
        self.tickets[ticket.name] = ticket
        self._waiting.append(ticket.name)

    def assign(self) -> Iterator[tuple[Seat, Ticket]]:
        """Assign waiting batches to actors that have room; yield the pairs."""
        free = (
            [] if self.is_addressed is None else [*filter(self._has_room, self.seats)]
        )
        at = 0
        while free and at < len(self._waiting):
            ticket = self.tickets[self._waiting[at]]
            assignable = self._assignable(ticket, free)
            able = [
                seat for seat in assignable if not (ticket.is_alone and seat.tickets)
            ]
            if not able:
                # No later batch may overtake it, or it might wait forever.
                free = [seat for seat in free if seat not in assignable]
                at += 1
                continue
            seat = min(able, key=lambda seat: len(seat.tickets))
            del self._waiting[at]
            ticket.since, ticket.is_recalled = time.monotonic(), False
            seat.tickets.append(ticket)
            if not self._has_room(seat):
                free.remove(seat)
            yield seat, ticket

    def recall(self) -> Iterator[tuple[Seat, Ticket]]:
        """Yield the batches to recall for idle actors."""
        if not self._is_serial or self.is_addressed or self._waiting:
            return
        idle = sum(seat.begun is not None and not seat.tickets for seat in self.seats)
        for seat in self.seats:
            if idle and len(seat.tickets) > 1 and not seat.tickets[-1].is_recalled:
                idle -= 1
                seat.tickets[-1].is_recalled = True
                yield seat, seat.tickets[-1]

    def put_back(self, ticket: Ticket) -> None:
        """Queue a ticket again, unless it was removed meanwhile."""
        if ticket.name in self.tickets and ticket.name not in self._waiting:
            bisect.insort(self._waiting, ticket.name)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; return whether it was still there."""
        is_wanted = self.tickets.pop(ticket.name, None) is not None
        if is_wanted and ticket.name in self._waiting:
            self._waiting.remove(ticket.name)
        return is_wanted

    def recover(self, seat: Seat) -> list[Ticket]:
        """Queue the batches of a dead actor again; return those given up.

        If it made several at once, the culprit is unknown: next time each has an actor
        to itself.
        """
        held, seat.tickets = seat.tickets, []
        suspects = held[:1] if self._is_serial else held
        for ticket in suspects:
            ticket.is_alone = True
            ticket.deaths += len(suspects) == 1
        for ticket in held:
            self.put_back(ticket)
        return [one for one in held if one.deaths >= _MOST_DEATHS and self.remove(one)]

    def forget(self, pipeline: Pipeline) -> list[Ticket]:
        """Remove and return the tickets of ``pipeline``."""
        found = [
            ticket for ticket in self.tickets.values() if ticket.pipeline is pipeline
        ]
        for ticket in found:
            self.remove(ticket)
        return found

    def find(self, task: BatchTask) -> tuple[Ticket | None, Seat | None]:
        """Return the ticket of ``task`` and its seat, from any thread."""
        for ticket in list(self.tickets.values()):
            if ticket.task is task:
                seats = [seat for seat in list(self.seats) if ticket in seat.tickets]
                return ticket, seats[0] if seats else None
        return None, None

    def _assignable(self, ticket: Ticket, seats: list[Seat]) -> list[Seat]:
        """Return the seats to which a ticket may be assigned."""
        if not self.is_addressed:
            return seats
        number = ticket.task.number % len(self.seats)
        return [seat for seat in seats if seat.number == number]

    def _has_room(self, seat: Seat) -> bool:
        is_shared = not any(ticket.is_alone for ticket in seat.tickets)
        return seat.begun is not None and is_shared and len(seat.tickets) < self._depth
