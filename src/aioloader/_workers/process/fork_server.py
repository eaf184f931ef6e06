"""The fork server: a clean process that has imported torch and forks on request.

It forks a supervisor for each loader that must not fork the user's process: event loops
and their clients do not survive a fork. It is single-threaded, runs no user code,
serves all loaders of a process, and ends with it, when its socket closes.
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

from aioloader._order.forks import close_in_children, fork_safe
from aioloader._transport.channel import Channel
from aioloader._workers.process import supervisor
from aioloader._workers.rng import seed_worker
from aioloader._workers.worker_spec import QUIET
from aioloader.errors import WorkerStartError

READY = b"ready"
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
        """Wait until it has imported its modules.

        Raises:
            WorkerStartError: If it has ended, or takes longer than a minute.
        """
        with self._lock:
            if self._is_ready:
                return
            try:
                is_here = self._channel.wait(_PATIENCE)
                self._is_ready = is_here and self._channel.receive() is not None
            except EOFError:
                with contextlib.suppress(ChildProcessError):  # reaped by other code
                    os.waitpid(self.pid, 0)  # it is ending
        if not self._is_ready:
            raise WorkerStartError(
                "the fork server of the worker processes has ended, or has not started "
                f"within {_PATIENCE:g} s; see what it printed"
            )

    def fork(self) -> Channel:
        """Request a new supervisor and return the channel to it.

        Raises:
            OSError: If the fork server is gone.
        """
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
        return ours.never_block()

    def abandon(self) -> None:
        """Close this end: the server has ended, or belongs to another process."""
        self._channel.close()


_LOCK = fork_safe(threading.Lock())
_latest: ForkServer | None = None


def fork_server_in_use() -> ForkServer | None:
    """Return the fork server that this process uses, if it has started one."""
    return _latest


def warm_fork_server() -> ForkServer:
    """Start the fork server in the background if it is not running; return it.

    Raises:
        WorkerStartError: If it cannot be started.
    """
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


def fork_supervisor() -> Channel:
    """Return the channel to a new supervisor below the fork server.

    Raises:
        WorkerStartError: If there is no fork server.
    """
    try:
        return warm_fork_server().fork()
    except OSError:  # it has just died
        return warm_fork_server().fork()


def _command(descriptor: int) -> tuple[str, list[str], dict[str, str]]:
    """Return program, arguments and environment of the fork server."""
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
    _read_nothing()
    if supervisor.number_of_threads() > 1:
        sys.stderr.write("aioloader: an import started threads in the fork server\n")
        os._exit(1)
    seed_worker(0, 0)  # its first call takes 2 ms longer than the next
    gc.collect()
    gc.freeze()
    os.set_inheritable(descriptor, False)  # noqa: FBT003  (its only argument)
    channel = Channel.adopt(descriptor)
    with contextlib.suppress(EOFError, OSError):
        channel.send(READY)
        while received := channel.receive():
            _fork(channel, received[1])
    os._exit(0)


def _fork(channel: Channel, descriptors: list[int]) -> None:
    control, loader = descriptors
    if os.fork() == 0:
        channel.close()
        status = 1
        try:
            supervisor.be_served(Channel.adopt(control), loader)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(control)
    os.close(loader)


def _read_nothing() -> None:
    """Redirect stdin: the terminal belongs to the loader's process."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
