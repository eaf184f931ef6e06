"""The fork server: a clean process that has imported torch and forks on request.

It forks a supervisor for each loader that must not fork the user's process: event loops
and their clients do not survive a fork. It is single-threaded, runs no user code,
serves all loaders of a process, and ends with it, when its socket closes. A loader
keeps its supervisor between epochs (``ServedLauncher``).
"""

import contextlib
import gc
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import connection

from aioloader._order.forks import close_in_children, fork_safe
from aioloader._transport.channel import Channel
from aioloader._workers.kept import Servers
from aioloader._workers.process.launcher import PATIENCE, Launcher
from aioloader._workers.process.supervisor import Note, Supervisor, number_of_threads
from aioloader._workers.rng import seed_worker
from aioloader._workers.worker_spec import QUIET, Surroundings, WorkerSpec, ship
from aioloader.errors import WorkerStartError

_PATIENCE = 60.0


class ForkServer:
    """The loader's handle on the fork server; made once, used from any thread."""

    def __init__(self) -> None:
        self._channel, theirs = Channel.pair()
        self.descriptor = self._channel.fileno()
        self._is_ready = False
        self._lock = fork_safe(threading.Lock())
        self._pid = os.getpid()
        close_in_children(self._channel.close)
        weakref.finalize(self, self._channel.close)
        try:
            os.set_inheritable(theirs.fileno(), True)  # noqa: FBT003  (its only argument)
            # Ctrl-C is for the loader's process, also while this one imports.
            blocked = {*signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.SIGINT}
            command = _command(theirs.fileno())
            self.pid = os.posix_spawn(*command, setsigmask=blocked)
        except OSError as error:
            self._channel.close()
            raise WorkerStartError(
                f"the fork server of the worker processes could not be started: {error}"
            ) from error
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        """Tell whether this process can use it."""
        if os.getpid() != self._pid:
            return False
        try:
            ended, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # reaped by other code
            return False
        return not ended

    def wait(self) -> None:
        """Wait until it has imported its modules."""
        with self._lock:
            if self._is_ready:
                return
            try:
                connection.wait([self._channel], _PATIENCE)  # type: ignore[list-item]
                self._is_ready = self._channel.receive() is not None
            except EOFError:
                with contextlib.suppress(ChildProcessError):  # reaped by other code
                    os.waitpid(self.pid, 0)  # it is ending
        if not self._is_ready:
            raise WorkerStartError(
                "the fork server of the worker processes has ended, or has not started "
                f"within {_PATIENCE:g} s; see what it printed"
            )

    def fork(self) -> Channel:
        """Return the channel to a new supervisor; ``OSError``: the server is gone."""
        ours, theirs = Channel.pair()
        loader = os.pidfd_open(os.getpid())
        try:
            self._channel.send(b"", [theirs.fileno(), loader])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(loader)
        return ours

    def abandon(self) -> None:
        """Close this end: the server has ended, or belongs to another process."""
        self._channel.close()


_LOCK = fork_safe(threading.Lock())
_latest: ForkServer | None = None


def fork_server_in_use() -> ForkServer | None:
    """Return the fork server that this process uses, if it has started one."""
    return _latest


def warm_fork_server() -> ForkServer:
    """Start the fork server in the background if it is not running; return it."""
    global _latest  # noqa: PLW0603  (a process has one)
    with _LOCK:
        if _latest is not None and not _latest.is_alive():
            _latest.abandon()
            _latest = None
        if _latest is None:
            _latest = ForkServer()
        return _latest


def warm_up() -> None:
    """Start the fork server of worker processes and wait until it is ready.

    Loaders that need it (async datasets with workers, and
    ``multiprocessing_context="forkserver"``) start it in the background when they are
    made; calling this earlier hides the second or two that importing torch takes.

    Raises:
        WorkerStartError: If it cannot be started.
    """
    warm_fork_server().wait()


class ServedLauncher(Launcher):
    """Start workers through a supervisor of the fork server.

    With the method "spawn" each worker unpickles the dataset itself, as a new
    interpreter would; with "forkserver" the supervisor does so once, for all of them.
    """

    def __init__(
        self, spec: WorkerSpec, method: str, servers: Servers, ends: Sequence[int]
    ) -> None:
        super().__init__(ends)
        self._method = method
        self._servers = servers
        self._surroundings = Surroundings()
        self._file: int | None = ship(spec)
        self._has_ended = False

    def open(self) -> None:
        assert self._file is not None
        is_shared = self._servers.is_shared and self._method != "spawn"
        order = self._surroundings, self._method, is_shared
        while True:
            idle = self._servers.take()
            self._control = idle or _new_supervisor()
            with contextlib.suppress(EOFError, OSError):
                self._instruct("begin", order, (self._file, *self._ends))
                up = self._await("up", PATIENCE)
                self._supervisor = up.number if up is not None else 0
                return
            if idle is None:  # ``notes`` finds that it has died
                return
            self._hang_up()  # it died while idle

    def join(self, timeout: float) -> bool:
        """Wait until the workers have ended; the supervisor is kept."""
        self._has_ended = self._has_ended or super().join(timeout)
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

    def reopen(self, note: Note) -> None:
        """Start over: the supervisor has died, or has threads and cannot fork."""
        if note.word == "threads":
            self._servers.is_shared = False  # each worker unpickles
        self._hang_up()
        self.open()


def _new_supervisor() -> Channel:
    warm_up()
    try:
        return warm_fork_server().fork()
    except OSError:  # it has just died
        return warm_fork_server().fork()


def _command(descriptor: int) -> tuple[str, list[str], dict[str, str]]:
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  (as multiprocessing does)
    path = [os.fspath(entry) for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from aioloader._workers.process.fork_server import serve; serve({descriptor})"
    )
    return executable, [executable, *flags, "-c", code], {**os.environ, **QUIET}


# -- the program of the fork server -------------------------------------------------


def serve(descriptor: int) -> None:
    """Run the fork server: fork a supervisor per request, until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the terminal belongs to the loader's process
    os.close(nothing)
    if number_of_threads() > 1:
        sys.stderr.write("aioloader: an import started threads in the fork server\n")
        os._exit(1)
    seed_worker(0, 0)  # its first call takes 2 ms longer than the next
    gc.collect()
    gc.freeze()
    os.set_inheritable(descriptor, False)  # noqa: FBT003  (its only argument)
    channel = Channel.adopt(descriptor)
    with contextlib.suppress(EOFError, OSError):
        channel.send(b"ready")
        while received := channel.receive():
            _fork(channel, *received[1])
    os._exit(0)


def _fork(channel: Channel, control: int, loader: int) -> None:
    if os.fork() == 0:
        channel.close()
        status = 1
        try:
            gc.disable()
            Supervisor(Channel.adopt(control), loader).serve()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(control)
    os.close(loader)
