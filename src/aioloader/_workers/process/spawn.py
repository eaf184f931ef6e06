"""Workers started by ``multiprocessing`` as new interpreters, on request ("spawn").

The loader's own process is their parent and ends the processes that they leave.
"""

import _thread
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

from aioloader._order.forks import fork_safe
from aioloader._workers.process import worker_main
from aioloader._workers.process.endpoint import Ends, send_fatal
from aioloader._workers.process.launch import has_ended
from aioloader._workers.process.supervisor import ASKED, TERMINATED, Note
from aioloader._workers.worker_spec import Surroundings, receive


class SpawnLauncher:
    """Start workers by spawning.

    Args:
        surroundings: This process's surroundings at the start of the iteration.
        file: The file that ``ship`` wrote; owned from now on.
        ends: The descriptors that all workers share; not owned.
    """

    forks = False

    def __init__(
        self, surroundings: Surroundings, file: int, ends: Sequence[int]
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._surroundings = surroundings
        self._file: int | None = file
        self._ends = tuple(ends)
        self._processes: dict[int, Any] = {}
        self._births: list[Note] = []
        self._pid = os.getpid()
        self._is_ending = False
        self._ended = fork_safe(threading.Event())

    def open(self) -> None:
        """Do nothing: there is no supervisor."""

    def advice(self) -> list[str]:
        """Return sentences for a worker that is stuck."""
        return []

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its own queue."""
        ends = Ends.of(self._ends, descriptors)
        # Duplicates: a forked child closes all descriptors of this process's pools.
        copies = [os.dup(end) if end >= 0 else -1 for end in ends]
        assert self._file is not None
        try:
            process = self._context.Process(
                target=_be_worker,
                args=(
                    worker,
                    [_Passed(copy) for copy in copies],
                    _Passed(self._file),
                    self._surroundings,
                ),
                name=f"aioloader-{worker}",
                daemon=True,  # multiprocessing ends it at exit if nobody has
            )
            process.start()
        finally:
            for copy in copies:
                if copy >= 0:
                    os.close(copy)
        self._processes[worker] = process
        self._births.append(Note("born", worker, process.pid or 0))
        _thread.start_new_thread(_end_its_group, (process,))

    def descriptors(self) -> list[int]:
        """Return descriptors that are readable when there are notes."""
        return [process.sentinel for process in self._processes.values()]

    def notes(self) -> list[Note]:
        """Return the starts and deaths since the last call."""
        found, self._births = self._births, []
        for worker, process in list(self._processes.items()):
            if process.exitcode is not None:
                del self._processes[worker]
                found.append(Note("died", worker, process.exitcode))
        return found

    def kill(self, worker: int) -> None:
        """Kill a worker; a note reports its death."""
        if worker in self._processes:
            self._processes[worker].kill()

    def end(self) -> None:
        """End the workers in the background; their queues are already closed."""
        if self._is_ending or os.getpid() != self._pid:
            return
        self._is_ending = True
        with contextlib.suppress(RuntimeError):  # at exit, multiprocessing does it
            # Not Thread: a finalizer may run while threading holds its own locks.
            _thread.start_new_thread(self._end_all, (list(self._processes.values()),))

    def join(self, timeout: float) -> bool:
        """Wait until all have ended; return whether they have."""
        self.end()
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Close what this process holds; the workers end."""
        self.end()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _end_all(self, processes: Sequence[Any]) -> None:
        """Wait for the workers; terminate and at last kill those that do not end."""
        for seconds, insist in ((ASKED, "terminate"), (TERMINATED, "kill")):
            until = time.monotonic() + seconds
            for process in processes:
                if not has_ended(process.pid, max(0.0, until - time.monotonic())):
                    getattr(process, insist)()
        for process in processes:
            has_ended(process.pid, TERMINATED)
        self._ended.set()


class _Passed:
    """A descriptor that ``multiprocessing`` passes to a new process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return [reduction.DupFd(self.descriptor)] if self.descriptor >= 0 else [None]

    def __setstate__(self, state: Any) -> None:
        self.descriptor = -1 if state[0] is None else state[0].detach()


def _be_worker(
    worker: int, passed: list[_Passed], file: _Passed, surroundings: Surroundings
) -> None:
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # noqa: SLF001  (it may have children)
    ends = Ends(*(end.descriptor for end in passed))
    worker_main.settle(worker, ends, None)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if not worker_main.tell_up(worker, ends):
        return
    try:
        surroundings.enter()
        spec = receive(file.descriptor)
    except BaseException as error:
        send_fatal(worker, ends, error)
        raise SystemExit(1) from None
    os.close(file.descriptor)
    surroundings.enter_environment()
    worker_main.run(worker, ends, spec)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)  # this process and its children


def _end_its_group(process: Any) -> None:
    """Wait for the end of a worker and end the processes that it has started."""
    pid = process.pid
    process.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
