"""Workers started by ``multiprocessing`` as new interpreters, on request ("spawn").

The loader's own process is their parent, and ends what they leave behind.
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

from aioloader._workers import child
from aioloader._workers.desk import Ends, send_fatal
from aioloader._workers.shipment import Surroundings, receive
from aioloader._workers.supervisor import ASKED, TERMINATED, Note


class SpawnLauncher:
    """Starts workers by spawning.

    Args:
        surroundings: Of this process when the iteration began.
        file: What ``ship`` wrote; owned from now on.
        ends: The descriptors that all workers share; not owned.
    """

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

    def open(self) -> None:
        """Do nothing: there is no supervisor."""

    def start(self, worker: int, descriptors: Sequence[int]) -> None:
        """Start a worker; ``descriptors`` are its arena and its own queue."""
        arena, *own = descriptors
        requests, results, board, stacks, *samples = self._ends
        ends = (
            requests,
            *(own or [-1]),
            results,
            board,
            stacks,
            arena,
            *(samples or [-1]),
        )
        # Copies, for a forked child closes all that this process holds.
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
                daemon=True,  # if nobody ends it, multiprocessing does at exit
            )
            process.start()
        finally:
            for copy in copies:
                if copy >= 0:
                    os.close(copy)
        self._processes[worker] = process
        self._births.append(Note("born", worker, process.pid or 0))

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there are notes."""
        return [process.sentinel for process in self._processes.values()]

    def notes(self) -> list[Note]:
        """Return what has happened since the last call."""
        found, self._births = self._births, []
        for worker, process in list(self._processes.items()):
            if process.exitcode is not None:
                del self._processes[worker]
                _kill_group(process.pid)
                found.append(Note("died", worker, process.exitcode))
        return found

    def kill(self, worker: int) -> None:
        """Kill a worker; a note will tell that it died."""
        if worker in self._processes:
            self._processes[worker].kill()

    def end(self) -> None:
        """Do nothing: workers end when their requests do, and ``join`` sees to it."""

    def join(self, timeout: float) -> bool:
        """Wait until all are gone: asked, then terminated, then killed."""
        until = time.monotonic() + timeout
        for seconds, insist in ((ASKED, "terminate"), (TERMINATED, "kill")):
            if self._await_all(min(seconds, until - time.monotonic())):
                return True
            for process in self._processes.values():
                getattr(process, insist)()
        return self._await_all(until - time.monotonic())

    def close(self) -> None:
        """Close what this process holds; nobody may be left to reap the workers."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._processes and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # at exit, multiprocessing does
                # Bare: a finalizer may come while threading holds its own locks.
                _thread.start_new_thread(self.join, (ASKED + 2 * TERMINATED,))

    def _await_all(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        for worker, process in list(self._processes.items()):
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is not None:
                del self._processes[worker]
                _kill_group(process.pid)
        return not self._processes


class _Passed:
    """A descriptor that ``multiprocessing`` takes along."""

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
    child.settle(worker, ends, None)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    child.tell_up(worker, ends)
    try:
        surroundings.enter()
        shipment = receive(file.descriptor)
    except BaseException as error:
        send_fatal(worker, ends, error)
        raise SystemExit(1) from None
    os.close(file.descriptor)
    surroundings.enter_environment()
    child.run(worker, ends, shipment)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)  # this process, and what it has started


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
