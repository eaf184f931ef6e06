"""The loader's handle on a supervisor: start workers, learn of deaths, end them.

``iter()`` forks a supervisor from this process (``ForkLauncher``), or the fork server
has one (``fork_server``).
"""

import _thread
import abc
import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]
from typing import Any

from aioloader._order.forks import without_collector
from aioloader._transport.channel import Channel
from aioloader._transport.codec import decode
from aioloader._workers.process.supervisor import (
    ASKED,
    TERMINATED,
    UNKNOWN,
    Note,
    be_forked,
)
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerDiedError, WorkerStartError

# Seconds for the supervisor to end everything, and then for the kernel.
PATIENCE = ASKED + 2 * TERMINATED + 2.0
# Seconds for a supervisor to accept an instruction.
_CONGESTED = 1.0
# Seconds for a forked supervisor to start; to take the locks, at the first fork; the
# factor by which each later fork has longer; and seconds for all forks together.
_ALIVE, _UP, _LONGER, _FORKING = 10.0, 0.3, 1.3, 30.0


class Launcher(abc.ABC):
    """Start workers, which share ``ends``, through a supervisor."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        self._control: Channel | None = None
        self._supervisor = 0  # pid, once known
        self._reap: Callable[[], object] = int  # does nothing: it is no child of ours
        self._pending: list[Note] = []
        self._is_over = False
        self._patience = PATIENCE
        self._pid = os.getpid()

    @abc.abstractmethod
    def open(self) -> None: ...

    @abc.abstractmethod
    def reopen(self, note: Note) -> None:
        """Get another one, after the last note of the first."""

    def advice(self) -> str:
        """Return what to try if a worker is stuck."""
        return ""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its queue of requests."""
        # ``notes`` finds that the supervisor has died.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._instruct("start", worker, descriptors)

    def descriptors(self) -> list[int]:
        return [] if self._control is None else [self._control.fileno()]

    def notes(self) -> list[Note]:
        """Return the notes since the last call; never block."""
        found, self._pending = self._pending, []
        try:
            while self._control is not None and (received := self._control.receive()):
                found.append(decode(received[0]))
                if found[-1].word == "threads":
                    break  # nothing follows
        except EOFError:
            self._hang_up()
            if not self._is_over:
                found.append(Note("orphaned"))
        return found

    def kill(self, worker: int) -> None:
        """Kill a worker; a note reports its death."""
        with contextlib.suppress(OSError):
            self._instruct("kill", worker)

    def end(self) -> None:
        """End the workers in the background; their queues are already closed."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._instruct("end")
        if self._supervisor:
            with contextlib.suppress(OSError):
                os.kill(self._supervisor, signal.SIGCONT)  # a stopped one

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor has ended the workers; return whether it has."""
        try:
            return self._await("ended", timeout) is not None or self._control is None
        except EOFError:
            self._hang_up()
            return True

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        control, self._control = self._control, None
        reap, self._reap = self._reap, int
        if control is None:
            return
        if os.getpid() != self._pid:  # a forked child's copy
            control.close()
            return
        control.finish()
        with contextlib.suppress(RuntimeError):  # at exit it sees the end of this
            # Not Thread: a finalizer may run while threading holds its own locks.
            what = control, self._supervisor, reap, self._patience
            _thread.start_new_thread(_see_off, what)

    def _await(self, word: str, timeout: float) -> Note | None:
        """Wait for a note, keeping earlier ones; return None on timeout.

        Raises:
            EOFError: If the supervisor is gone.
        """
        until = time.monotonic() + timeout
        while self._control is not None:
            while received := self._control.receive():
                note: Note = decode(received[0])
                if note.word == word:
                    return note
                self._pending.append(note)
            left = max(0.0, until - time.monotonic())
            if not connection.wait([self._control], left):  # type: ignore[list-item]
                break
        return None

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
        control, frame = self._control, pickle.dumps((word, argument), 5)
        if control is None or control.send(frame, descriptors):
            return
        poll = select.poll()
        poll.register(control.fileno(), select.POLLOUT)
        poll.poll(_CONGESTED * 1000)
        if not control.send(frame, descriptors):
            raise BlockingIOError("the workers' supervisor accepts no instructions")


def _see_off(
    control: Channel, supervisor: int, reap: Callable[[], object], seconds: float
) -> None:
    """Wait until a supervisor has ended; kill one that is stuck in user code."""
    try:
        control.pause(seconds)
        if supervisor:
            os.kill(supervisor, signal.SIGKILL)
    except (EOFError, ProcessLookupError):
        pass
    finally:
        control.close()
    reap()


class ForkLauncher(Launcher):
    """Fork a supervisor, which inherits ``spec``, as ``multiprocessing`` does."""

    def __init__(self, spec: WorkerSpec, ends: Sequence[int]) -> None:
        super().__init__(ends)
        self._spec: WorkerSpec | None = spec
        self._process: Any = None

    def open(self) -> None:
        """Fork, and again if another thread held a lock at the time of the fork.

        Such a lock stays locked in the child and in every worker, so that supervisor
        never reports that it is up.

        Raises:
            WorkerStartError: If none comes up.
        """
        began, patience, count = time.monotonic(), _UP, 0
        while time.monotonic() - began < _FORKING:
            count += 1
            self._fork()
            with contextlib.suppress(EOFError):
                is_alive = self._await("alive", _ALIVE)
                if is_alive and self._await("up", patience):
                    self._spec = None
                    return
            self._hang_up()
            self._process.kill()
            self._process.join()
            patience *= _LONGER
        raise WorkerStartError(
            f"the workers' supervisor was forked {count} times in {_FORKING:g} s and "
            "was never ready: a lock that another thread of this process holds (of a "
            "random generator, of logging, or of a library) stays locked in a forked "
            "child; use multiprocessing_context='forkserver'"
        )

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor, which outlives the workers, has ended."""
        if super().join(timeout):
            self._reap()
            return True
        self._patience = 0.0
        return False

    def advice(self) -> str:
        found: list[str] = [one for one in ("obstore", "grpc") if one in sys.modules]
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            found.append("CUDA")
        if not found:
            return ""
        return (
            f"this process has loaded {' and '.join(found)}: objects used before the "
            "fork hang in a forked worker; multiprocessing_context='forkserver' starts "
            "workers without forking this process"
        )

    def _fork(self) -> None:
        self._control, theirs = Channel.pair()
        # Duplicates: a forked child closes all descriptors of this process's pools.
        copies = [os.dup(end) for end in self._ends]
        loader = os.pidfd_open(self._pid)
        try:
            with _quiet_fork() as collects:
                process = multiprocessing.get_context("fork").Process(
                    target=be_forked,
                    args=(theirs, loader, self._spec, copies),
                    kwargs={"collects": collects},
                    name="aioloader-supervisor",
                    daemon=True,  # at exit, ``multiprocessing`` ends it
                )
                process.start()
                self._process, self._supervisor = process, process.pid or 0
                self._reap = process.join
                _watch_by_pidfd(process)
        finally:
            theirs.close()
            for descriptor in (loader, *copies):
                os.close(descriptor)

    def reopen(self, note: Note) -> None:  # noqa: ARG002  (as the other kind)
        """Raise: this process is not forked again in mid-epoch."""
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

    Until it has set itself up, the child collects nothing and gets no Ctrl-C. A daemon
    of ``multiprocessing`` (a worker of its ``Pool``) may fork too.
    """
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  (as torch does, the other way round)
    with without_collector() as collects:  # and one fork at a time
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        daemon = config.get("daemon")
        try:
            config.pop("daemon", None)
            # A Ctrl-C of just before is raised here, when the mask has changed.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            yield collects
        finally:
            if daemon is not None:
                config["daemon"] = daemon
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_by_pidfd(process: Any) -> None:
    """Replace the pipes with which ``multiprocessing`` watches a child by a pidfd.

    The pipes would stay open until the child is reaped, and every process forked
    meanwhile would inherit one.
    """
    popen = process._popen  # noqa: SLF001  (there is no public way)
    popen.finalizer()
    popen.sentinel = process._sentinel = os.pidfd_open(process.pid)  # noqa: SLF001
    popen.finalizer = Finalize(popen, close_fds, (popen.sentinel,))
