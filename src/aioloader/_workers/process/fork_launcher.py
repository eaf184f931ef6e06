"""Workers forked from this process: ``iter()`` forks a supervisor."""

import _thread
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]
from typing import Any

from aioloader._order.forks import without_collector
from aioloader._transport.channel import Channel
from aioloader._workers.process.launch import (
    ORPHANED,
    PATIENCE,
    SupervisedLauncher,
    has_ended,
)
from aioloader._workers.process.supervisor import UNKNOWN, Note, be_forked
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerDiedError, WorkerStartError

# Seconds for a forked supervisor to start; to take the locks, at the first fork; the
# factor by which each later fork has longer; and seconds for all forks together.
_ALIVE, _UP, _LONGER, _FORKING = 10.0, 0.3, 1.3, 30.0


class ForkLauncher(SupervisedLauncher):
    """Fork a supervisor from this process, as ``multiprocessing`` does.

    Args:
        spec: What the workers do; they inherit it.
        ends: The descriptors that all workers share; not owned.
    """

    def __init__(self, spec: WorkerSpec, ends: Sequence[int]) -> None:
        super().__init__()
        self._spec: WorkerSpec | None = spec
        self._ends = ends
        self._process: Any = None
        self._patience = PATIENCE
        self._pid = os.getpid()

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
            self._dispose()
            patience *= _LONGER
        raise WorkerStartError(
            f"the workers' supervisor was forked {count} times in {_FORKING:g} s and "
            "was never ready: a lock that another thread of this process holds (of a "
            "random generator, of logging, or of a library) stays locked in a forked "
            "child; use multiprocessing_context='forkserver'"
        )

    def end(self) -> None:
        """End the workers in the background; a stopped supervisor is continued."""
        super().end()
        if self._process is not None and os.getpid() == self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)

    def join(self, timeout: float) -> bool:
        """Wait until the supervisor, which outlives the workers, has ended."""
        process = self._process
        if process is None or not super().join(timeout):
            self._patience = 0.0
            return process is None
        _reap(process, timeout)
        self._process = None
        return True

    def close(self) -> None:
        """Close what this process holds; without ``end`` the workers are killed."""
        super().close()
        self._spec = None
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # at exit, multiprocessing does it
                # Not Thread: a finalizer may run while threading holds its own locks.
                _thread.start_new_thread(_reap, (process, self._patience))

    def _fork(self) -> None:
        self._control, theirs = Channel.pair()
        self._control.never_block()
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
                self._process = process
                _watch_by_pidfd(process)
        finally:
            theirs.close()
            for descriptor in (loader, *copies):
                os.close(descriptor)

    def advice(self) -> list[str]:
        """Return a sentence on loaded libraries that fail in forked children."""
        found: list[str] = [one for one in ("obstore", "grpc") if one in sys.modules]
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            found.append("CUDA")
        if not found:
            return []
        advice = (
            f"this process has loaded {' and '.join(found)}: objects used before the "
            "fork hang in a forked worker; multiprocessing_context='forkserver' starts "
            "workers without forking this process"
        )
        return [advice]

    def _dispose(self) -> None:
        """Kill a supervisor that did not come up."""
        self._hang_up()
        self._process.kill()
        self._process.join()

    def _orphans(self) -> list[Note]:
        """Raise: this process is not forked again in mid-epoch.

        Raises:
            WorkerDiedError: Always.
        """
        from aioloader._workers.process.recovery import cause_of

        pid = self._process.pid
        super()._orphans()
        self._is_over = True
        _reap(self._process, ORPHANED)
        code = self._process.exitcode
        raise WorkerDiedError(
            f"the supervisor (pid {pid}) of the DataLoader worker processes exited "
            f"unexpectedly, {cause_of(UNKNOWN if code is None else code)}, and its "
            "workers with it; start a new iteration",
            pid=pid,
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


def _reap(process: Any, timeout: float) -> None:
    """Wait for a supervisor with nothing left to do; kill it if it does not end."""
    if not has_ended(process.pid, timeout):
        process.kill()
    process.join()
