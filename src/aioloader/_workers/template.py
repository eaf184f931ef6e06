"""The template: a clean process that has imported torch once, and forks on request.

The loader's process is never forked: its threads, locks and event loops stay out. There
is one template for all loaders of a process. It is single-threaded, holds nothing of
the user's, and ends when the loader's process does: its socket tells.
"""

import multiprocessing.spawn
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from aioloader._transport.channel import Channel
from aioloader._workers.guard import close_in_children
from aioloader.errors import WorkerStartError

# OpenBLAS and OpenMP would start threads at import, and threads do not survive a fork.
QUIET = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
READY = b"ready"
_PATIENCE = 60.0


class Template:
    """The loader's handle on the template process; made once, used by any thread."""

    def __init__(self) -> None:
        self._channel, theirs = Channel.pair()
        self.descriptor = self._channel.fileno()
        self._is_ready = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        close_in_children(self._channel.close)
        weakref.finalize(self, self._channel.close)
        try:
            os.set_inheritable(theirs.fileno(), True)  # noqa: FBT003  (its only argument)
            self.pid = os.posix_spawn(*_command(theirs.fileno()))
        except OSError as error:
            self._channel.close()
            raise WorkerStartError(
                f"the template of the worker processes could not be started: {error}"
            ) from error
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        """Tell whether it can be asked, from this process."""
        if os.getpid() != self._pid:
            return False
        try:
            ended, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # reaped by somebody else
            return False
        return not ended

    def wait(self) -> None:
        """Wait until it has imported what it preloads.

        Raises:
            WorkerStartError: If it ended instead, or takes longer than a minute.
        """
        with self._lock:
            if self._is_ready:
                return
            try:
                is_here = self._channel.wait(_PATIENCE)
                self._is_ready = is_here and self._channel.receive() is not None
            except EOFError:
                pass
        if not self._is_ready:
            raise WorkerStartError(
                "the template of the worker processes has ended, or has not begun "
                f"within {_PATIENCE:g} s; what it printed says why"
            )

    def ask(self, order: bytes, descriptors: Sequence[int]) -> None:
        """Let it fork a nursery.

        Args:
            order: What the nursery is told; the template does not look into it.
            descriptors: What the nursery gets copies of.

        Raises:
            OSError: If it is gone.
        """
        self._channel.send(order, descriptors)

    def abandon(self) -> None:
        """Close this end; it has ended, or is another process's."""
        self._channel.close()


class _Shared:
    """The template of this process, made on demand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latest: Template | None = None

    def get(self) -> Template:
        with self._lock:
            if self.latest is not None and not self.latest.is_alive():
                self.latest.abandon()
                self.latest = None
            if self.latest is None:
                self.latest = Template()
            return self.latest


_SHARED = _Shared()


def template_in_use() -> Template | None:
    """Return the template that this process uses, if it has started one."""
    return _SHARED.latest


def warm_template() -> Template:
    """Start the template in the background, if it does not run yet, and return it.

    Raises:
        WorkerStartError: If it cannot be started.
    """
    return _SHARED.get()


def warm_up() -> None:
    """Start what worker processes are forked from, and wait until it is ready.

    A loader with workers starts it in the background by itself when it is made; to call
    this earlier hides the second or two that importing torch takes.

    Raises:
        WorkerStartError: If it cannot be started.
    """
    warm_template().wait()


def _command(descriptor: int) -> tuple[str, list[str], dict[str, str]]:
    """Return program, arguments and environment of the template."""
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  (as multiprocessing does)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from aioloader._workers.serve import serve; serve({descriptor})"
    )
    return executable, [executable, *flags, "-c", code], {**os.environ, **QUIET}
