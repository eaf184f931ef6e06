"""What each worker has in hand, written where its parent can read it after its death.

A shared page: every worker has a row of places, each with a ticket, a stage and the
time since when. Stores of eight bytes: no lock, no message.
"""

import mmap
import os
import time
from typing import NamedTuple

PLACES = 32
_FIELDS = 3
_ROW = PLACES * _FIELDS


class InHand(NamedTuple):
    """A ticket that a worker holds, its stage, and for how many seconds it has it."""

    ticket: int
    stage: int
    seconds: float


class InFlightTable:
    """Rows of places, all empty at first.

    Args:
        descriptor: What ``make_board`` returned; closed by the caller.
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
        """Note the stage that the ticket has come to."""
        self._cells[row * _ROW + place * _FIELDS + 1] = stage

    def clear(self, row: int, place: int) -> None:
        """Note that the result has been sent."""
        self._cells[row * _ROW + place * _FIELDS] = 0

    def in_hand(self, row: int) -> list[InHand]:
        """Return what the worker of ``row`` holds, the oldest ticket first."""
        cells, now = self._cells, time.monotonic_ns()
        start = row * _ROW
        return sorted(
            InHand(cells[at] - 1, cells[at + 1], (now - cells[at + 2]) / 1e9)
            for at in range(start, start + _ROW, _FIELDS)
            if cells[at]
        )

    def wipe(self, row: int) -> None:
        """Empty the row of a worker that is gone."""
        for place in range(PLACES):
            self.clear(row, place)


def make_board(rows: int) -> int:
    """Return the descriptor of an empty board; the caller owns it."""
    descriptor = os.memfd_create("aioloader-board")
    os.ftruncate(descriptor, _bytes(rows))
    return descriptor


def _bytes(rows: int) -> int:
    return rows * _ROW * 8
