"""Which batch is with which Ray actor: pure and synchronous.

An actor that is free is given the oldest batch that waits. Where an actor makes one
batch at a time it is given one more, so that it never waits for the next; when another
actor is idle, that one is asked back.
"""

import bisect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._workers.ray.actor import Begun

# A batch that has cost so many actors their lives is not tried again.
_LIVES = 2


@dataclass(eq=False, slots=True)
class Ticket:
    """A batch under way.

    Attributes:
        name: Its place among all that were asked for.
        deaths: How many actors have died with it in hand.
        losses: How often its result was lost on the way.
        is_alone: Whether it must not share an actor: it may be the one that kills.
        is_recalled: Whether its actor was asked to give it back.
        since: When it was given to its actor.
    """

    name: int
    run: Pipeline
    task: BatchTask
    deaths: int = 0
    losses: int = 0
    is_alone: bool = False
    is_recalled: bool = False
    since: float = 0.0


@dataclass(eq=False)
class Seat:
    """A worker as the loader knows it: the number stays, the actor may change.

    Attributes:
        begun: What the actor said when it was ready; None before.
        in_hand: What it was given, the oldest first.
    """

    number: int
    actor: Any
    begun: Begun | None = None
    in_hand: list[Ticket] = field(default_factory=list)


class RayDispatcher:
    """Tickets and seats of one pool.

    Args:
        at_once: Batches that an actor makes at once.
        is_addressed: Whether batch k is for worker k modulo their number; None: the
            first actor tells.
    """

    def __init__(self, at_once: int, *, is_addressed: bool | None) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.seats: list[Seat] = []
        self.is_addressed = is_addressed
        self._is_serial = at_once == 1
        self._depth = 2 if self._is_serial else at_once
        self._waiting: list[int] = []  # sorted
        self._next = 0

    def enter(self, run: Pipeline, task: BatchTask) -> None:
        """Write a ticket; it waits for an actor."""
        ticket = Ticket(self._next, run, task)
        self._next += 1
        self.tickets[ticket.name] = ticket
        self._waiting.append(ticket.name)

    def assign(self) -> Iterator[tuple[Seat, Ticket]]:
        """Give what waits to actors that have room; yield who was given what."""
        free = (
            [] if self.is_addressed is None else [*filter(self._has_room, self.seats)]
        )
        at = 0
        while free and at < len(self._waiting):
            ticket = self.tickets[self._waiting[at]]
            meant = self._meant(ticket, free)
            able = [seat for seat in meant if not (ticket.is_alone and seat.in_hand)]
            if not able:
                # Nothing may overtake it, or it would wait for ever.
                free = [seat for seat in free if seat not in meant]
                at += 1
                continue
            seat = min(able, key=lambda seat: len(seat.in_hand))
            del self._waiting[at]
            ticket.since, ticket.is_recalled = time.monotonic(), False
            seat.in_hand.append(ticket)
            if not self._has_room(seat):
                free.remove(seat)
            yield seat, ticket

    def recall(self) -> Iterator[tuple[Seat, Ticket]]:
        """Yield what should be asked back, for actors that are idle."""
        if not self._is_serial or self.is_addressed or self._waiting:
            return
        idle = sum(seat.begun is not None and not seat.in_hand for seat in self.seats)
        for seat in self.seats:
            if idle and len(seat.in_hand) > 1 and not seat.in_hand[-1].is_recalled:
                idle -= 1
                seat.in_hand[-1].is_recalled = True
                yield seat, seat.in_hand[-1]

    def put_back(self, ticket: Ticket) -> None:
        """Let a ticket wait again, unless nobody wants it any more."""
        if ticket.name in self.tickets and ticket.name not in self._waiting:
            bisect.insort(self._waiting, ticket.name)

    def strike(self, ticket: Ticket) -> bool:
        """Strike out a ticket; tell whether somebody still wanted it."""
        is_wanted = self.tickets.pop(ticket.name, None) is not None
        if is_wanted and ticket.name in self._waiting:
            self._waiting.remove(ticket.name)
        return is_wanted

    def bury(self, seat: Seat) -> list[Ticket]:
        """Let what a dead actor had wait again; return what is not to be tried again.

        If it made several at once, nobody knows whose fault it was: the next time each
        has an actor to itself.
        """
        held, seat.in_hand = seat.in_hand, []
        blamed = held[:1] if self._is_serial else held
        for ticket in blamed:
            ticket.is_alone = True
            ticket.deaths += len(blamed) == 1
        for ticket in held:
            self.put_back(ticket)
        return [one for one in held if one.deaths >= _LIVES and self.strike(one)]

    def forget(self, run: Pipeline) -> list[Ticket]:
        """Strike out what ``run`` still waits for; return it."""
        found = [ticket for ticket in self.tickets.values() if ticket.run is run]
        for ticket in found:
            self.strike(ticket)
        return found

    def find(self, task: BatchTask) -> tuple[Ticket | None, Seat | None]:
        """Return the ticket of ``task``, and who has it; from any thread."""
        for ticket in list(self.tickets.values()):
            if ticket.task is task:
                seats = [seat for seat in list(self.seats) if ticket in seat.in_hand]
                return ticket, seats[0] if seats else None
        return None, None

    def _meant(self, ticket: Ticket, seats: list[Seat]) -> list[Seat]:
        """Return those of ``seats`` that may be given a ticket."""
        if not self.is_addressed:
            return seats
        number = ticket.task.number % len(self.seats)
        return [seat for seat in seats if seat.number == number]

    def _has_room(self, seat: Seat) -> bool:
        is_shared = not any(ticket.is_alone for ticket in seat.in_hand)
        return seat.begun is not None and is_shared and len(seat.in_hand) < self._depth
