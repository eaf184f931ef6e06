"""The loader's handle on a supervisor: start workers, learn of deaths, end them.

``ForkLauncher`` forks a supervisor from this process. ``ServerLauncher`` uses one below
the fork server, which the loader keeps from epoch to epoch.
"""

import _thread
import abc
import contextlib
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from aioloader._transport.channel import Channel
from aioloader._workers.fork_server import fork_supervisor, warm_fork_server
from aioloader._workers.guard import close_in_children
from aioloader._workers.obituary import cause_of
from aioloader._workers.shipment import Shipment, Surroundings
from aioloader._workers.supervisor import (
    ASKED,
    TERMINATED,
    UNKNOWN,
    Note,
    Order,
    be_forked,
    dump_instruction,
    load_note,
)
from aioloader.errors import WorkerDiedError, WorkerStartError

# For the supervisor to see to everything, and then for the kernel.
PATIENCE = ASKED + 2 * TERMINATED + 2.0
# Seconds for a forked supervisor to run at all; to take the locks of generators, at the
# first fork and at later ones, each so many times longer; and for all forks together.
_ALIVE, _UP, _LONGER, _FORKING = 10.0, 0.3, 1.3, 30.0
# Seconds for the kernel to kill the workers of a supervisor that has died.
_ORPHANED = 1.0


class Launcher(Protocol):
    """What starts and reaps the workers of a pool."""

    def open(self) -> None:
        """Make ready to start workers."""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its own queue."""

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there are notes."""

    def notes(self) -> list[Note]:
        """Return what has happened since the last call; never block.

        Raises:
            WorkerError: If there is nothing left that could start workers.
        """

    def kill(self, worker: int) -> None:
        """Kill a worker; a note will tell that it died."""

    def end(self) -> None:
        """End the workers, in the background; they were asked already."""

    def join(self, timeout: float) -> bool:
        """Wait until all are gone; tell whether they are."""

    def close(self) -> None:
        """Close what this process holds."""


class _SupervisedLauncher(abc.ABC):
    """What both kinds of supervisors have in common."""

    def __init__(self) -> None:
        self._control: Channel | None = None
        self._started: dict[int, tuple[int, ...]] = {}
        self._pids: dict[int, int] = {}
        self._pending: list[Note] = []
        self._is_over = False

    @abc.abstractmethod
    def open(self) -> None:
        """Make ready to start workers."""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start worker number ``worker``."""
        self._started[worker] = tuple(descriptors)
        with contextlib.suppress(OSError):  # its supervisor died: that will be read
            self._instruct("start", worker, descriptors)

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there are notes."""
        return [] if self._control is None else [self._control.fileno()]

    def notes(self) -> list[Note]:
        """Return what has happened since the last call."""
        found, self._pending = self._pending, []
        is_gone = False
        try:
            while self._control is not None and (got := self._control.receive()):
                self._heed(load_note(got[0]), found)
        except EOFError:
            self._hang_up()
            is_gone = not self._is_over
        return [*found, *self._bereaved()] if is_gone else found

    def kill(self, worker: int) -> None:
        """Kill a worker; a note will tell that it died."""
        with contextlib.suppress(OSError):
            self._instruct("kill", worker)

    def end(self) -> None:
        """End the workers, in the background."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._instruct("end")

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor has ended the workers."""
        try:
            note = self._await("ended", timeout)
        except EOFError:
            return True
        return note is not None or self._control is None

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        self._hang_up()

    def _heed(self, note: Note, found: list[Note]) -> None:
        """Take notice of ``note``, and append it to what the pool is to see."""
        if note.word == "born":
            self._pids[note.worker] = note.number
        elif note.word == "died":
            self._forget(note.worker)
        elif note.word == "failed":
            self._is_over = True
        found.append(note)

    def _await(self, word: str, timeout: float) -> Note | None:
        """Wait for a note; others that come before are kept. None: it did not come.

        Raises:
            EOFError: If the supervisor is gone.
        """
        until = time.monotonic() + timeout
        while self._control is not None:
            while received := self._control.receive():
                note: Note = load_note(received[0])
                if note.word == word:
                    return note
                self._heed(note, self._pending)
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
        if self._control is not None:
            self._control.send(dump_instruction(word, argument), descriptors)

    def _bereaved(self) -> list[Note]:
        """Return the deaths that nobody is left to report."""
        workers = list(self._started)
        for worker in workers:
            if worker in self._pids:
                _await_end(self._pids[worker])
            self._forget(worker)
        return [Note("died", worker, UNKNOWN) for worker in workers]


class ForkLauncher(_SupervisedLauncher):
    """Forks a supervisor from this process, as ``multiprocessing`` forks.

    Args:
        shipment: What the workers are to do; they inherit it.
        ends: The descriptors that all workers share; not owned.
    """

    def __init__(self, shipment: Shipment, ends: Sequence[int]) -> None:
        super().__init__()
        self._shipment: Shipment | None = shipment
        self._ends = ends
        self._process: Any = None
        self._pid = os.getpid()

    def open(self) -> None:
        """Fork; again if a lock was held by another thread at the moment of the fork.

        A lock that is locked in the child stays so, in every worker: no such supervisor
        reports that it is up.

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
                    self._shipment = None
                    return
            self._dispose()
            patience *= _LONGER
        raise WorkerStartError(
            f"the workers' supervisor was forked {count} times in {_FORKING:g} s, and "
            "was never ready: a lock that another thread of this process holds (of a "
            "random generator, of logging, or of a library) stays locked in a forked "
            "child; use multiprocessing_context='forkserver'"
        )

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor, which outlives the workers, is gone."""
        process = self._process
        if process is None or not super().join(timeout):
            return process is None
        _reap(process, timeout)
        self._process = None
        return True

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        super().close()
        self._shipment = None
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # at exit, multiprocessing does
                # Bare: a finalizer may come while threading holds its own locks.
                _thread.start_new_thread(_reap, (process, PATIENCE))

    def _fork(self) -> None:
        self._control, theirs = Channel.pair()
        self._control.never_block()
        # Copies: a forked child closes all that the pools of this process hold.
        copies = [os.dup(end) for end in self._ends]
        loader = os.pidfd_open(self._pid)
        try:
            with _quiet_fork() as collects:
                process = multiprocessing.get_context("fork").Process(
                    target=be_forked,
                    args=(theirs, loader, self._shipment, copies),
                    kwargs={"collects": collects},
                    name="aioloader-supervisor",
                    daemon=True,  # at exit, ``multiprocessing`` ends it
                )
                process.start()
                # Its pipes would outlive it until somebody reaps it; pidfds tell more.
                process._popen.finalizer()  # type: ignore[attr-defined]  # noqa: SLF001
        finally:
            theirs.close()
            for descriptor in (loader, *copies):
                os.close(descriptor)
        self._process = process

    def _dispose(self) -> None:
        """Kill a supervisor that did not come up."""
        self._hang_up()
        self._process.kill()
        self._process.join()

    def _bereaved(self) -> list[Note]:
        """End: this process is not forked again in mid-epoch.

        Raises:
            WorkerDiedError: Always.
        """
        pid = self._process.pid
        super()._bereaved()
        self._is_over = True
        _reap(self._process, _ORPHANED)
        code = self._process.exitcode
        raise WorkerDiedError(
            f"the supervisor (pid {pid}) of the DataLoader worker processes exited "
            f"unexpectedly, {cause_of(UNKNOWN if code is None else code)}, and its "
            "workers with it; iterate again",
            pid=pid,
            exitcode=code,
        )


@contextlib.contextmanager
def _quiet_fork() -> Iterator[bool]:
    """Keep the child quiet until it has settled; yield whether the collector is on.

    Nothing is collected there, no Ctrl-C arrives, and a process that is a daemon of
    ``multiprocessing`` (a worker of its ``Pool``) may fork all the same.
    """
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  (as torch does, the other way round)
    collects, daemon = gc.isenabled(), config.get("daemon")
    gc.disable()
    config["daemon"] = False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield collects
    finally:
        if collects:
            gc.enable()
        config["daemon"] = daemon
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


class ServerLauncher(_SupervisedLauncher):
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


def _reap(process: Any, timeout: float) -> None:
    """Wait for a supervisor that has nothing left to do, and kill it if it stays."""
    if not has_ended(process.pid, timeout):
        process.kill()
    process.join()


def _await_end(pid: int) -> None:
    """Wait until the kernel has killed a worker whose supervisor has died.

    That is a matter of microseconds, but until then it may take a request with it.
    What it has started goes with it.
    """
    has_ended(pid, _ORPHANED)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int, timeout: float) -> bool:
    """Wait for a process to end; tell whether it has."""
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


def advice_on_forks() -> list[str]:
    """Return a sentence on what is loaded here and does not work in forked children."""
    found: list[str] = [one for one in ("obstore", "grpc") if one in sys.modules]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("CUDA")
    if not found:
        return []
    advice = (
        f"this process has loaded {' and '.join(found)}: what was used before the fork "
        "hangs in a forked worker; multiprocessing_context='forkserver' starts workers "
        "without a fork of this process"
    )
    return [advice]
