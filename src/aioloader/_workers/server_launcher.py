"""Workers below the fork server; a loader keeps its supervisor there between epochs."""

import _thread
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Sequence

from aioloader._transport.channel import Channel
from aioloader._workers.fork_server import fork_supervisor, warm_fork_server
from aioloader._workers.guard import close_in_children
from aioloader._workers.launch import PATIENCE, SupervisedLauncher, has_ended
from aioloader._workers.shipment import Surroundings
from aioloader._workers.supervisor import Note, Order


class Servers:
    """The supervisors below the fork server that a loader keeps between epochs."""

    def __init__(self) -> None:
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        # Whether unpickling has started threads: then each worker unpickles by itself.
        self.is_shared = True
        weakref.finalize(self, _close_all, self._idle)

    def take(self) -> Channel | None:
        """Return the channel to one that is idle, owned by the caller; or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, control: Channel) -> None:
        """Keep one that has ended its workers."""
        close_in_children(control.close)
        with self._lock:
            self._idle.append(control)

    def close(self) -> None:
        """End those that are idle."""
        with self._lock:
            _close_all(self._idle)


def _close_all(idle: list[Channel]) -> None:
    while idle:
        idle.pop().close()


class ServerLauncher(SupervisedLauncher):
    """Starts workers through a supervisor below the fork server.

    Args:
        servers: Where supervisors are kept between epochs.
        surroundings: Of this process when the iteration began.
        file: What ``ship`` wrote; owned from now on.
        ends: The descriptors that all workers share; not owned.
    """

    def __init__(
        self,
        servers: Servers,
        surroundings: Surroundings,
        file: int,
        ends: Sequence[int],
    ) -> None:
        super().__init__()
        self._servers = servers
        self._surroundings = surroundings
        self._file: int | None = file
        self._ends = tuple(ends)
        self._has_ended = False
        self._supervisor = 0  # its pid, once that is known
        self._has_forked = False

    def open(self) -> None:
        """Have a supervisor unpickle what the workers are to do.

        Raises:
            WorkerStartError: If there is no fork server.
        """
        control = self._servers.take()
        if control is None:
            warm_fork_server().wait()
            control = fork_supervisor()
        self._control = control
        order = Order(self._surroundings, self._servers.is_shared)
        assert self._file is not None
        try:
            self._instruct("begin", order, (self._file, *self._ends))
        except OSError:  # it died while it was idle
            self._hang_up()
            self.open()

    def end(self) -> None:
        """End the workers, in the background."""
        super().end()
        if self._supervisor and not self._has_forked:
            with contextlib.suppress(RuntimeError):  # at exit it sees the end of this
                _thread.start_new_thread(self._insist, (self._supervisor,))

    def _insist(self, supervisor: int) -> None:
        """Kill a supervisor that is stuck in what it unpickles: the user's code."""
        if not has_ended(supervisor, PATIENCE) and not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGKILL)

    def join(self, timeout: float) -> bool:
        """Wait until the workers have ended; the supervisor is kept."""
        if self._control is None:
            return True
        self._has_ended = super().join(timeout) and self._is_over
        return self._has_ended

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        if self._has_ended and self._control is not None:
            self._servers.give_back(self._control)
            self._control = None
        super().close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _heed(self, note: Note, found: list[Note]) -> None:
        if note.word == "threads":
            self._start_apart()
            return
        if note.word == "up":
            self._supervisor = note.number
        self._has_forked = self._has_forked or note.word == "born"
        super()._heed(note, found)

    def _start_apart(self) -> None:
        """Start over with workers that unpickle by themselves: threads do not fork."""
        self._servers.is_shared = False
        self._start_over()

    def _start_over(self) -> None:
        self._hang_up()
        self.open()
        for worker, descriptors in list(self._started.items()):
            self.start(worker, descriptors)

    def _bereaved(self) -> list[Note]:
        """Return the deaths that nobody is left to report, with a new supervisor."""
        died = super()._bereaved()
        self.open()
        return died
