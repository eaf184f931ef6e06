"""The fork server: a clean process that has imported torch and forks on request.

Some loaders must not fork the user's process: event loops and their clients do not
survive a fork. The fork server forks supervisors for these loaders, and a loader keeps
its supervisors between epochs (``ServedLauncher``). A process has one fork server for
all loaders. The server runs no user code, and ends when the process closes its socket.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection

from aioloader._base.forks import close_in_children, fork_safe
from aioloader._base.machine import lack_of_linux
from aioloader._transport.channel import MAX_DESCRIPTORS, Channel
from aioloader._workers.idle import IdleSupervisors
from aioloader._workers.process.launcher import PATIENCE, Launcher
from aioloader._workers.process.supervisor import Supervisor, names_of_threads
from aioloader._workers.rng import seed_worker
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, new_python, ship
from aioloader.errors import WorkerStartError

_START_SECONDS = 60.0


class ForkServer:
    """A process's handle on its fork server; may be used from any thread."""

    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        close_in_children(self.channel.close)
        try:
            os.set_inheritable(theirs.fileno(), True)  # noqa: FBT003  (its only argument)
            # Ctrl-C is for the loader's process, even while the fork server imports.
            blocked = {*signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.SIGINT}
            command = new_python(f"fork_server.serve({theirs.fileno()})")
            self.pid = os.posix_spawn(*command, setsigmask=blocked)
        except OSError as error:
            raise WorkerStartError(
                f"the fork server of the worker processes could not be started: {error}"
            ) from error
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        """Tell whether the fork server runs and is a child of this process."""
        try:
            ended, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # another process's child, or reaped by other code
            return False
        return not ended

    def wait(self) -> str:
        """Wait until the server is ready; return the names of its additional threads.

        If there are any, the server must not fork. The message with the names stays in
        the socket for later callers; if it does not arrive, raise ``WorkerStartError``.
        """
        connection.wait([self.channel], _START_SECONDS)
        try:
            received = self.channel.receive_frame(socket.MSG_PEEK)
        except EOFError:
            received = None
            with contextlib.suppress(ChildProcessError):  # reaped by other code
                os.waitpid(self.pid, 0)  # it has closed its socket, so it ends
        if received is None:
            raise WorkerStartError(
                "the fork server of the worker processes has ended, or has not started "
                f"within {_START_SECONDS:g} s: mend the error that it printed, or use "
                "multiprocessing_context='fork'"
            )
        return bytes(received[0]).decode()

    def fork(self) -> Channel:
        """Return the channel to a new supervisor; raise ``OSError`` if this fails."""
        ours, theirs = Channel.pair()
        loader = os.pidfd_open(os.getpid())
        try:
            self.channel.send_frame(b"", [theirs.fileno(), loader])
        finally:
            theirs.close()
            os.close(loader)
        return ours


_LOCK = fork_safe(threading.Lock())
_latest: ForkServer | None = None


def fork_server_in_use() -> ForkServer | None:
    """Return the fork server that was last started; None if none was started."""
    return _latest


def warm_fork_server() -> ForkServer:
    """Return the fork server; start it in the background if it is not running."""
    global _latest  # noqa: PLW0603  (a process has one)
    with _LOCK:
        if _latest is not None and not _latest.is_alive():
            _latest.channel.close()
            _latest = None
        if _latest is None:
            _latest = ForkServer()
        return _latest


def warm_up() -> None:
    """Start the fork server of worker processes and wait until it is ready.

    Loaders that need it (async datasets with workers, and
    ``multiprocessing_context="forkserver"``) start it in the background when they are
    created. An earlier call hides the second or two that importing torch takes. Where
    workers cannot be forked, this function does nothing.

    Raises:
        WorkerStartError: If the fork server cannot be started.
    """
    if not lack_of_linux():
        warm_fork_server().wait()


class ServedLauncher(Launcher):
    """A launcher whose supervisor is forked by the fork server.

    The supervisor unpickles the spec once for all workers, unless that starts threads.
    ``stack`` closes the spec's memory file, and the descriptors of its shared memory.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        supervisors: IdleSupervisors,
        ends: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._supervisors = supervisors
        self._surroundings = Surroundings()
        file, *self._shared = ship(spec)
        for descriptor in (file, *self._shared):
            stack.callback(os.close, descriptor)
        self._descriptors = file, *ends

    def open(self) -> None:
        order = self._surroundings, self._supervisors.is_shared
        while True:
            idle = self._supervisors.take()
            self.control = idle.control if idle else _new_supervisor()
            with contextlib.suppress(OSError):  # it has died; ``notes`` reports that
                for k in range(0, len(self._shared), MAX_DESCRIPTORS):
                    part = self._shared[k : k + MAX_DESCRIPTORS]
                    self.instruct("share", None, part)
                self.instruct("begin", order, self._descriptors)
            first = next(self.notes(PATIENCE), None)
            if idle is None or (first is not None and first.word == "up"):
                return
            self.hang_up()  # it died while idle

    def join(self, timeout: float) -> bool:
        """Wait until the workers end; return whether they have. Keep the supervisor."""
        for note in self.notes(timeout):
            if note.word == "ended" and self.control is not None:
                self._supervisors.give_back(self.control, self._supervisor)
                self.control = None
        return self.control is None

    def reopen(self) -> None:
        """Replace the supervisor, which has died, or has threads and so cannot fork."""
        self.hang_up()
        self.open()


def _new_supervisor() -> Channel:
    warm_up()
    try:
        return warm_fork_server().fork()
    except OSError:  # it has just died
        return warm_fork_server().fork()


def serve(descriptor: int) -> None:
    """Run the fork server: fork a supervisor per request until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the terminal belongs to the loader's process
    os.close(nothing)
    seed_worker(0, 0)  # the first call in a process takes 2 ms more
    gc.collect()
    gc.freeze()
    os.set_inheritable(descriptor, False)  # noqa: FBT003  (its only argument)
    channel = Channel.adopt(descriptor)
    with contextlib.suppress(EOFError, OSError):
        channel.send_frame(names_of_threads().encode())
        while received := channel.receive_frame():
            _fork(channel, *received[1])
    os._exit(0)


def _fork(channel: Channel, control: int, loader: int) -> None:
    user = os.getppid()
    if os.fork() == 0:
        channel.close()
        gc.disable()
        try:
            Supervisor(Channel.adopt(control), loader, user).serve()
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    os.close(control)
    os.close(loader)
