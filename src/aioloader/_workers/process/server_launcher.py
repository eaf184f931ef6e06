"""Workers from the fork server; a loader keeps its supervisor between epochs."""

import _thread
import contextlib
import os
import signal
import time
from collections.abc import Sequence

from aioloader._transport.channel import Channel
from aioloader._workers.kept import Servers
from aioloader._workers.process.fork_server import fork_supervisor, warm_fork_server
from aioloader._workers.process.launch import PATIENCE, SupervisedLauncher, has_ended
from aioloader._workers.process.supervisor import Note, Order, load_note
from aioloader._workers.worker_spec import Surroundings


class ServerLauncher(SupervisedLauncher):
    """Start workers through a supervisor of the fork server.

    Args:
        servers: Keeps supervisors between epochs.
        surroundings: This process's surroundings at the start of the iteration.
        file: The file that ``ship`` wrote; owned from now on.
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
        self._supervisor = 0  # pid, once known
        self._has_forked = False
        self._pid = os.getpid()

    def open(self) -> None:
        """Make a supervisor unpickle the ``WorkerSpec``.

        Raises:
            WorkerStartError: If there is no fork server.
        """
        assert self._file is not None
        order = Order(self._surroundings, self._servers.is_shared)
        while True:
            idle = self._servers.take()
            if idle is None:
                warm_fork_server().wait()
            self._control = fork_supervisor() if idle is None else idle
            try:
                self._instruct("begin", order, (self._file, *self._ends))
            except OSError:
                self._hang_up()
                if idle is None:
                    raise
            else:  # otherwise it died while idle
                return

    def end(self) -> None:
        """End the workers in the background."""
        super().end()
        with contextlib.suppress(EOFError):
            while self._control is not None and (got := self._control.receive()):
                self._record(load_note(got[0]), self._pending)
        if self._supervisor and not self._has_forked:
            with contextlib.suppress(RuntimeError):  # at exit it sees the end of this
                _thread.start_new_thread(self._kill_if_stuck, (self._supervisor,))

    def _kill_if_stuck(self, supervisor: int) -> None:
        """Kill a supervisor that is stuck in unpickling, which runs user code."""
        if not has_ended(supervisor, PATIENCE) and not self._has_ended:
            _kill(supervisor)

    def join(self, timeout: float) -> bool:
        """Wait until the workers have ended; the supervisor is kept."""
        if self._control is None or self._has_ended:
            return True
        self._has_ended = super().join(timeout) and self._is_over
        return self._has_ended

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        control, self._control = self._control, None
        if control is not None and self._has_ended:
            self._servers.give_back(control)
        elif control is not None and (self._has_forked or os.getpid() != self._pid):
            control.close()
        elif control is not None:
            with contextlib.suppress(RuntimeError):  # at exit it sees the end of this
                _thread.start_new_thread(_close_when_idle, (control, self._supervisor))
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _record(self, note: Note, found: list[Note]) -> None:
        if note.word == "threads":
            if not self._is_over:
                self._start_apart()
            return
        if note.word == "up":
            self._supervisor = note.number
        self._has_forked = self._has_forked or note.word == "born"
        self._has_ended = self._has_ended or note.word == "ended"
        super()._record(note, found)

    def _start_apart(self) -> None:
        """Start over with workers that each unpickle: threads do not survive a fork."""
        self._servers.is_shared = False
        self._hang_up()
        self.open()
        for worker, descriptors in list(self._started.items()):
            self.start(worker, descriptors)

    def _orphans(self) -> list[Note]:
        """Return the deaths of workers and start another supervisor."""
        died = super()._orphans()
        self.open()
        return died


def _close_when_idle(control: Channel, supervisor: int) -> None:
    """Close the channel to a supervisor that has not forked yet; kill it if stuck.

    Args:
        control: The channel; the supervisor ends when it is closed.
        supervisor: Its pid, or 0 if not yet known.
    """
    until = time.monotonic() + PATIENCE
    try:
        while (left := until - time.monotonic()) > 0:
            received = control.receive() if control.wait(left) else None
            note: Note = load_note(received[0]) if received else Note("nothing")
            if note.word in {"born", "ended", "failed", "threads"}:
                return
            supervisor = note.number if note.word == "up" else supervisor
        if supervisor:
            _kill(supervisor)
    except EOFError:
        pass
    finally:
        control.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
