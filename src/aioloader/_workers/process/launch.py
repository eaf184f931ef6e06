"""The loader's handle on a supervisor: start workers, learn of deaths, end them.

The base of both kinds: ``fork_launcher`` forks a supervisor from this process,
``server_launcher`` uses one forked by the fork server. ``spawn`` has the same methods.
"""

import abc
import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioloader._workers.process.supervisor import (
    ASKED,
    TERMINATED,
    UNKNOWN,
    Note,
    dump_instruction,
    load_note,
)

if TYPE_CHECKING:
    from aioloader._transport.channel import Channel

# Seconds for the supervisor to end everything, and then for the kernel.
PATIENCE = ASKED + 2 * TERMINATED + 2.0
# Seconds for the kernel to kill the workers of a supervisor that has died.
ORPHANED = 1.0
# Seconds for a supervisor to accept an instruction.
_CONGESTED = 1.0
# Errors of sending to a process that has ended.
_GONE = (BrokenPipeError, ConnectionResetError)


class SupervisedLauncher(abc.ABC):
    """Start workers through a supervisor.

    Attributes:
        forks: Whether workers are forked, and so run soon.
    """

    forks = True

    def __init__(self) -> None:
        self._control: Channel | None = None
        self._started: dict[int, tuple[int, ...]] = {}
        self._pids: dict[int, int] = {}
        self._pending: list[Note] = []
        self._is_over = False

    def advice(self) -> list[str]:
        """Return sentences for a worker that is stuck."""
        return []

    @abc.abstractmethod
    def open(self) -> None:
        """Prepare to start workers."""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its own queue."""
        self._started[worker] = tuple(descriptors)
        with contextlib.suppress(*_GONE):  # ``notes`` finds that the supervisor died
            self._instruct("start", worker, descriptors)

    def descriptors(self) -> list[int]:
        """Return descriptors that are readable when there are notes."""
        return [] if self._control is None else [self._control.fileno()]

    def notes(self) -> list[Note]:
        """Return the notes since the last call; never block.

        Raises:
            WorkerError: If workers can no longer be started.
        """
        found, self._pending = self._pending, []
        is_gone = False
        try:
            while self._control is not None and (received := self._control.receive()):
                self._record(load_note(received[0]), found)
        except EOFError:
            self._hang_up()
            is_gone = not self._is_over
        return [*found, *self._orphans()] if is_gone else found

    def kill(self, worker: int) -> None:
        """Kill a worker; a note reports its death."""
        with contextlib.suppress(OSError):
            self._instruct("kill", worker)

    def end(self) -> None:
        """End the workers in the background; their queues are already closed."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._instruct("end")

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor has ended the workers; return whether it has."""
        try:
            note = self._await("ended", timeout)
        except EOFError:
            return True
        return note is not None or self._control is None

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        self._hang_up()

    def _record(self, note: Note, found: list[Note]) -> None:
        """Record ``note`` and append it to those for the pool."""
        if note.word == "born":
            self._pids[note.worker] = note.number
        elif note.word == "died":
            self._forget(note.worker)
        elif note.word == "failed":
            self._is_over = True
        found.append(note)

    def _await(self, word: str, timeout: float) -> Note | None:
        """Wait for a note, keeping earlier ones; return None on timeout.

        Raises:
            EOFError: If the supervisor is gone.
        """
        until = time.monotonic() + timeout
        while self._control is not None:
            while received := self._control.receive():
                note: Note = load_note(received[0])
                if note.word == word:
                    return note
                self._record(note, self._pending)
                if note.word == "failed":
                    return None
            if not self._control.wait(max(0.0, until - time.monotonic())):
                break
        return None

    def _forget(self, worker: int) -> None:
        self._started.pop(worker, None)
        self._pids.pop(worker, None)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _instruct(
        self, word: str, argument: Any = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send an instruction.

        Raises:
            OSError: If the supervisor is gone or accepts nothing for a second.
        """
        control, frame = self._control, dump_instruction(word, argument)
        if control is None or control.send(frame, descriptors):
            return
        poll = select.poll()
        poll.register(control.fileno(), select.POLLOUT)
        poll.poll(_CONGESTED * 1000)
        if not control.send(frame, descriptors):
            raise BlockingIOError("the workers' supervisor accepts no instructions")

    def _orphans(self) -> list[Note]:
        """Return the deaths of workers whose supervisor has died."""
        workers = list(self._started)
        for worker in workers:
            if worker in self._pids:
                _await_end(self._pids[worker])
            self._forget(worker)
        return [Note("died", worker, UNKNOWN) for worker in workers]


def _await_end(pid: int) -> None:
    """Wait until the kernel has killed a worker whose supervisor has died.

    This takes microseconds, but until then the worker may still take a request. The
    processes that it has started end with it.
    """
    has_ended(pid, ORPHANED)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int, timeout: float) -> bool:
    """Wait for a process to end; return whether it has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(process)
