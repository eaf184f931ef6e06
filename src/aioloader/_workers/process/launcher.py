"""Start and end workers through a supervisor, and receive the supervisor's reports.

``iter()`` forks the supervisor from this process (``ForkLauncher``), or the fork server
forks it (``ServedLauncher`` in ``fork_server``).
"""

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing import connection
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]
from typing import Any

from aioloader._base.forks import without_collector
from aioloader._transport.channel import Channel
from aioloader._workers.idle import IdleSupervisors, wait_or_kill
from aioloader._workers.process.supervisor import (
    ASKED,
    TERMINATED,
    UNKNOWN,
    SupervisorReport,
    be_forked,
)
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerDiedError, WorkerStartError

# Seconds for the supervisor to end all workers, and for the kernel to finish.
PATIENCE = ASKED + 2 * TERMINATED + 2.0
# Seconds for a supervisor to accept an instruction.
_ACCEPT_SECONDS = 1.0
# Seconds for a forked supervisor to start; seconds for the first one to take the locks;
# the factor by which each next one gets more time; seconds for all forks together.
_ALIVE_SECONDS, _UP_SECONDS, _LONGER, _FORK_SECONDS = 10.0, 0.3, 1.3, 30.0


class Launcher:
    """The loader's handle on a supervisor, which starts and watches workers."""

    _supervisors: IdleSupervisors  # waits for the supervisor to end
    control: Channel | None = None
    _supervisor = 0  # its pid, once known
    _process: Any = None  # if the supervisor is a child of this process
    _is_over = False
    _patience = PATIENCE

    def instruct(
        self, word: str, argument: Any = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send the supervisor the instruction ``word``, with its argument.

        ``"start"`` (a worker) needs the descriptors of the worker's arena and queue.
        After ``"kill"`` (a worker), a report says that the worker has died.

        Raises:
            OSError: If the supervisor is gone or accepts nothing for a second.
        """
        control, frame = self.control, pickle.dumps((word, argument), 5)
        if control is None or control.send_frame(frame, descriptors):
            return
        poll = select.poll()
        poll.register(control, select.POLLOUT)
        poll.poll(_ACCEPT_SECONDS * 1000)
        if not control.send_frame(frame, descriptors):
            raise BlockingIOError("the workers' supervisor accepts no instructions")

    def notes(self, timeout: float = 0.0) -> Iterator[SupervisorReport]:
        """Yield the reports that arrive within ``timeout`` seconds.

        If the supervisor dies early, yield "orphaned", then its successor's reports.
        """
        until = time.monotonic() + timeout
        while (control := self.control) is not None:
            try:
                received = control.receive_frame()
            except EOFError:
                if self._is_over:
                    self.hang_up()
                else:
                    yield SupervisorReport("orphaned")
                if self.control is control:
                    return
                continue
            if received is not None:
                note: SupervisorReport = pickle.loads(received[0])  # noqa: S301  (our own process)
                if note.word == "up":
                    self._supervisor = note.number
                yield note
            else:
                left = until - time.monotonic()
                if left <= 0 or not connection.wait([control], left):
                    return

    def end(self) -> None:
        """Tell the supervisor to end the workers; the pool then closes their queues."""
        self._is_over = True
        with contextlib.suppress(OSError):
            if self._supervisor:
                os.kill(self._supervisor, signal.SIGCONT)  # if it is stopped
            self.instruct("end")

    def hang_up(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None

    def abandon(self) -> None:
        """Close this forked child's copy of the channel."""
        self.hang_up()
        self._process = None

    def close(self) -> None:
        """Close the channel; the supervisor ends, and kills workers that still run."""
        control, self.control = self.control, None
        if control is not None:
            control.shutdown(socket.SHUT_WR)
            ending = control, self._supervisor, self._process, self._patience
            self._process = None
            self._supervisors.wait_later(partial(wait_or_kill, *ending))

    def advice(self) -> str:
        """Return a hint on why a worker may be stuck, or an empty string."""
        return ""


class ForkLauncher(Launcher):
    """A launcher that forks this process; the supervisor inherits ``spec``."""

    def __init__(
        self, spec: WorkerSpec, supervisors: IdleSupervisors, ends: Sequence[int]
    ) -> None:
        self._spec: WorkerSpec | None = spec
        self._supervisors = supervisors
        self._ends = ends

    def open(self) -> None:
        """Fork a supervisor; fork again if another thread held a lock at the fork.

        Such a lock stays locked in the child, which then never reports "up".

        Raises:
            WorkerStartError: If no supervisor comes up.
        """
        began, patience, count = time.monotonic(), _UP_SECONDS, 0
        while time.monotonic() - began < _FORK_SECONDS:
            count += 1
            self._fork()
            alive, up = (
                islice(self.notes(_ALIVE_SECONDS), 1),
                islice(self.notes(patience), 1),
            )
            if [report.word for report in (*alive, *up)] == ["alive", "up"]:
                self._spec = None
                return
            self.hang_up()
            self._process.kill()
            self._process.join()
            patience *= _LONGER
        raise WorkerStartError(
            f"the workers' supervisor was forked {count} times in {_FORK_SECONDS:g} s "
            "and was never ready: a lock that another thread of this process holds (of "
            "a random generator, of logging, or of a library) stays locked in a forked "
            "child; use multiprocessing_context='forkserver'"
        )

    def join(self, timeout: float) -> bool:
        """Wait for the supervisor to end, after its workers; return whether it has."""
        for _ in self.notes(timeout):
            pass
        if self.control is not None:
            self._patience = 0.0
        elif self._process is not None:
            self._process.join()
        return self.control is None

    def advice(self) -> str:
        loaded: list[str] = [
            name for name in ("obstore", "grpc") if name in sys.modules
        ]
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            loaded.append("CUDA")
        if not loaded:
            return ""
        return (
            f"this process has loaded {' and '.join(loaded)}: objects used before the "
            "fork hang in a forked worker; multiprocessing_context='forkserver' starts "
            "workers without forking this process"
        )

    def _fork(self) -> None:
        self.control, theirs = Channel.pair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            # Duplicates, because a forked child closes this process's pools.
            copies: list[int] = []
            for end in self._ends:
                copies.append(os.dup(end))
                stack.callback(os.close, copies[-1])
            loader = os.pidfd_open(os.getpid())
            stack.callback(os.close, loader)
            with _quiet_fork() as collects:
                process: Any = multiprocessing.get_context("fork").Process(
                    target=be_forked,
                    args=(theirs, loader, self._spec, copies),
                    kwargs={"collects": collects},
                    name="aioloader-supervisor",
                    daemon=True,  # ``multiprocessing`` ends it at exit
                )
                process.start()
                self._process, self._supervisor = process, process.pid
                # A pidfd replaces ``multiprocessing``'s pipes to the child. They would
                # stay open until the child is reaped, and every process forked
                # meanwhile would inherit one.
                popen = process._popen  # noqa: SLF001  (there is no public way)
                popen.finalizer()
                popen.sentinel = process._sentinel = os.pidfd_open(process.pid)  # noqa: SLF001
                popen.finalizer = Finalize(popen, close_fds, (popen.sentinel,))

    def reopen(self) -> None:
        """Raise ``WorkerDiedError``: this process must not be forked in mid-epoch."""
        from aioloader._workers.process.recovery import cause_of

        self._process.join()
        code = self._process.exitcode
        cause = cause_of(UNKNOWN if code is None else code)
        raise WorkerDiedError(
            f"the supervisor (pid {self._supervisor}) of the DataLoader worker "
            f"processes exited unexpectedly, {cause}, and its workers with it; start a "
            "new iteration",
            pid=self._supervisor,
            exitcode=code,
        )


@contextlib.contextmanager
def _quiet_fork() -> Iterator[bool]:
    """Prepare a fork; yield whether the garbage collector is on.

    The child starts with the collector off and Ctrl-C blocked. In the block, even a
    daemon of ``multiprocessing``, such as a worker of its ``Pool``, may fork.
    """
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  (as torch does, the other way round)
    with without_collector() as collects:  # and one fork at a time
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        daemon = config.get("daemon")
        try:
            config.pop("daemon", None)
            # A Ctrl-C that came just before is raised here, after the mask has changed.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            yield collects
        finally:
            if daemon is not None:
                config["daemon"] = daemon
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
