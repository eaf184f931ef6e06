"""The batches that each worker has taken, readable by the loader after its death.

A shared page: every worker has a row of places, each with a ticket, a stage and the
time when it was taken. Stores of eight bytes need no lock and no message.
"""

import mmap
import os
import time
from typing import NamedTuple

PLACES = 32
_FIELDS = 3
_ROW = PLACES * _FIELDS


class InFlight(NamedTuple):
    """A ticket that a worker has taken, its stage, and how many seconds ago."""

    ticket: int
    stage: int
    seconds: float


class InFlightTable:
    """Rows of places, all empty at first.

    Args:
        descriptor: The result of ``make_in_flight_table``; closed by the caller.
        rows: Number of workers.
    """

    def __init__(self, descriptor: int, rows: int) -> None:
        self._memory = mmap.mmap(descriptor, _bytes(rows))
        self._cells = memoryview(self._memory).cast("q")

    def begin(self, row: int, place: int, ticket: int) -> None:
        """Note that the worker of ``row`` has taken ``ticket``."""
        cell = row * _ROW + place * _FIELDS
        self._cells[cell + 1] = 0
        self._cells[cell + 2] = time.monotonic_ns()
        self._cells[cell] = ticket + 1  # last: it makes the place valid

    def enter(self, row: int, place: int, stage: int) -> None:
        """Note that the ticket has reached ``stage``."""
        self._cells[row * _ROW + place * _FIELDS + 1] = stage

    def clear(self, row: int, place: int) -> None:
        """Note that the result has been sent."""
        self._cells[row * _ROW + place * _FIELDS] = 0

    def in_flight(self, row: int) -> list[InFlight]:
        """Return the tickets that the worker of ``row`` has, the oldest first."""
        cells, now = self._cells, time.monotonic_ns()
        start = row * _ROW
        return sorted(
            InFlight(cells[at] - 1, cells[at + 1], (now - cells[at + 2]) / 1e9)
            for at in range(start, start + _ROW, _FIELDS)
            if cells[at]
        )

    def wipe(self, row: int) -> None:
        """Empty the row of a worker that has ended."""
        for place in range(PLACES):
            self.clear(row, place)


def make_in_flight_table(rows: int) -> int:
    """Return the descriptor of an empty table; the caller owns it."""
    descriptor = os.memfd_create("aioloader-in-flight")
    os.ftruncate(descriptor, _bytes(rows))
    return descriptor


def _bytes(rows: int) -> int:
    return rows * _ROW * 8
