"""The loader's handle on a nursery: start workers, hear of them, let them go."""

import contextlib
import os
import pickle
import select
from collections.abc import Sequence
from typing import Protocol

from aioloader._transport.channel import Channel
from aioloader._workers.nursery import (
    ASKED,
    TERMINATED,
    UNKNOWN,
    Note,
    Order,
    dump_instruction,
    load_note,
)
from aioloader._workers.shipment import Surroundings
from aioloader._workers.template import warm_template

# For the nursery to see to everything, and then for the kernel.
PATIENCE = ASKED + 2 * TERMINATED + 2.0
# For the kernel to kill the workers of a nursery that has died.
_ORPHANED = 1.0


class Launcher(Protocol):
    """What starts and reaps the workers of a pool."""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its own queue."""

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there are notes."""

    def notes(self) -> list[Note]:
        """Return what has happened since the last call; never block."""

    def kill(self, worker: int) -> None:
        """Kill a worker; a note will tell that it died."""

    def end(self) -> None:
        """Let the workers end, in the background; they were asked already."""

    def join(self, timeout: float) -> bool:
        """Wait until all are gone; tell whether they are."""

    def close(self) -> None:
        """Close what this process holds."""


class NurseryLauncher:
    """Starts workers through the template.

    Args:
        surroundings: Of this process when the iteration began.
        shipment: The file that ``ship`` wrote; owned from now on.
        ends: The descriptors that all workers share; not owned.
    """

    def __init__(
        self, surroundings: Surroundings, shipment: int, ends: Sequence[int]
    ) -> None:
        self._surroundings = surroundings
        self._shipment: int | None = shipment
        self._ends = tuple(ends)
        self._is_shared = True
        self._started: dict[int, tuple[int, ...]] = {}
        self._control: Channel | None = None
        self._pids: dict[int, int] = {}
        self._pending: list[Note] = []
        self._is_over = False

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start worker number ``worker``.

        Raises:
            WorkerStartError: If there is no template.
        """
        try:
            self._instruct("start", worker, descriptors)
        except OSError:  # the nursery died, and nobody has read of it yet
            self._pending += self._read()
            self._instruct("start", worker, descriptors)
        self._started[worker] = tuple(descriptors)

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there are notes."""
        return [] if self._control is None else [self._control.fileno()]

    def notes(self) -> list[Note]:
        """Return what has happened since the last call."""
        found, self._pending = self._pending, []
        return found + self._read()

    def kill(self, worker: int) -> None:
        """Kill a worker; a note will tell that it died."""
        with contextlib.suppress(OSError):
            self._instruct("kill", worker)

    def end(self) -> None:
        """Let the workers end, in the background."""
        self._is_over = True
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._instruct("end")

    def join(self, timeout: float) -> bool:
        """Wait until the nursery, which outlives the workers, is gone."""
        control = self._control
        while control is not None and control.wait(timeout):
            try:
                control.receive()
            except EOFError:
                return True
        return control is None

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        self._hang_up()
        if self._shipment is not None:
            os.close(self._shipment)
            self._shipment = None

    def _read(self) -> list[Note]:
        found: list[Note] = []
        try:
            while self._control is not None and (got := self._control.receive()):
                note: Note = load_note(got[0])
                if note.word == "threads":
                    self._start_apart()
                    continue
                found.append(note)
                if note.word == "failed":
                    self._is_over = True
                elif note.word == "born":
                    self._pids[note.worker] = note.number
                else:
                    self._forget(note.worker)
        except EOFError:
            found += self._bereaved()
        return found

    def _forget(self, worker: int) -> None:
        self._started.pop(worker, None)
        self._pids.pop(worker, None)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _instruct(
        self, word: str, worker: int = -1, descriptors: Sequence[int] = ()
    ) -> None:
        if self._control is None:
            self._begin()
        assert self._control is not None
        self._control.send(dump_instruction(word, worker), descriptors)

    def _begin(self) -> None:
        """Have a new nursery forked."""
        self._hang_up()
        self._control, theirs = Channel.pair()
        self._control.never_block()
        assert self._shipment is not None
        order = pickle.dumps(Order(self._surroundings, self._is_shared), 5)
        try:
            given = (theirs.fileno(), self._shipment, *self._ends)
            try:
                warm_template().ask(order, given)
            except OSError:  # it died just now
                warm_template().ask(order, given)
        finally:
            theirs.close()

    def _start_apart(self) -> None:
        """Start over with workers that unpickle by themselves: threads do not fork."""
        self._is_shared = False
        self._begin()
        with contextlib.suppress(OSError):  # it died at once: its end will be read
            for worker, descriptors in self._started.items():
                self._instruct("start", worker, descriptors)

    def _bereaved(self) -> list[Note]:
        """Return the deaths that nobody is left to tell of."""
        self._hang_up()
        if self._is_over:
            return []
        workers = list(self._started)
        for worker in workers:
            if worker in self._pids:
                _await_end(self._pids[worker])
            self._forget(worker)
        return [Note("died", worker, UNKNOWN) for worker in workers]


def _await_end(pid: int) -> None:
    """Wait until the kernel has killed a worker whose nursery has died.

    That is a matter of microseconds, but until then it may take a request with it.
    """
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll(_ORPHANED * 1000)
        finally:
            os.close(process)
