"""The worker pools and idle supervisors that a loader keeps between epochs.

Worker processes start with ``iter()``, as torch's do; other workers start with the
first request. With ``persistent_workers``, processes and Ray actors outlive an epoch.
"""

import _thread
import contextlib
import os
import signal
import socket
import threading
import weakref
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread
from aioloader._base.forks import close_in_children, fork_safe
from aioloader._pipeline.runner import GRACE

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioloader._pipeline.lasting_pool import LastingPool
    from aioloader._pipeline.pipeline import Pool
    from aioloader._transport.channel import Channel


class IdleSupervisor(NamedTuple):
    """A supervisor that has no workers: the channel to it, and its pid."""

    control: "Channel"
    supervisor: int

    def close(self) -> None:
        self.control.close()


def wait_or_kill(
    control: "Channel", supervisor: int, process: Any = None, seconds: float = GRACE
) -> None:
    """Wait for a supervisor to end; after ``seconds``, kill it if it is stuck."""
    try:
        control.pause(seconds)
        if supervisor:
            os.kill(supervisor, signal.SIGKILL)
    except EOFError:
        with contextlib.suppress(OSError):  # the supervisor has ended
            ending = os.pidfd_open(supervisor)
            connection.wait([ending], seconds)
            os.close(ending)
    except ProcessLookupError:
        pass
    finally:
        control.close()
    if process is not None:
        process.join()


class IdleSupervisors:
    """Idle supervisors and counts of worker deaths, which a loader's pools share."""

    def __init__(self) -> None:
        # How many worker processes have died unexpectedly, and how many were replaced.
        self.deaths = self.restarts = 0
        self.counting = fork_safe(threading.Lock())
        # Whether supervisors unpickle for all workers. False if that starts threads.
        self.is_shared = True
        self._idle: list[IdleSupervisor] = []
        self._ending: list[_thread.LockType] = []  # released after each wait
        weakref.finalize(self, _close_all, self._idle)

    def take(self) -> "IdleSupervisor | None":
        """Return an idle supervisor, which the caller then owns, or None."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def give_back(self, control: "Channel", supervisor: int) -> None:
        """Keep a supervisor for a later epoch; its workers have ended."""
        close_in_children(control.close)
        self._idle.append(IdleSupervisor(control, supervisor))

    def wait_later(self, wait: "Callable[[], object]") -> None:
        """Call ``wait`` in a thread that ``close`` waits for; safe in finalizers."""
        ended = _thread.allocate_lock()
        ended.acquire()

        def run() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(ended.release)
                wait()

        self._ending.append(ended)
        for lock in self._ending[:]:
            if not lock.locked():
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._ending.remove(lock)
        try:
            # Not Thread: a finalizer may run while threading holds its own locks.
            _thread.start_new_thread(run, ())
        except RuntimeError:  # at interpreter exit; supervisors see this process end
            ended.release()

    def has_any(self) -> bool:
        """Tell whether ``close`` has a supervisor to end or wait for."""
        return bool(self._idle or self._ending)

    def close(self) -> None:
        """End the idle supervisors; wait, with a timeout, until all have ended."""
        while (idle := self.take()) is not None:
            idle.control.shutdown(socket.SHUT_WR)
            self.wait_later(partial(wait_or_kill, *idle))
        for ended in self._ending[:]:
            if ended.acquire(timeout=GRACE):
                ended.release()


class Pools:
    """One loader's worker pools; they refer to ``supervisors``, not to this object."""

    def __init__(self) -> None:
        self.supervisors = IdleSupervisors()
        self._kept: list[LastingPool] = []
        self._ending: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _close_all, self._kept)

    def has_kept(self) -> bool:
        """Tell whether an earlier iteration's persistent workers still take tasks."""
        return any(pool.is_open() for pool in self._kept)

    def kept(self, start: "Callable[[], LastingPool]") -> "LastingPool":
        """Return the open persistent pool; if there is none, start one."""
        with self._lock:
            for pool in self._kept:
                if pool.is_open():
                    return pool
            _close_all(self._kept)  # pools that have failed
            self._kept.append(start())
            return self._kept[0]

    def join_later(self, workers: "Pool") -> None:
        """Make ``close`` wait for ``workers``, if the pool object still exists then."""
        with self._lock:
            self._ending.add(workers)

    def drop(self) -> None:
        """End persistent workers in the background; the next epoch starts new ones."""
        _close_all(self._take())

    def close(self) -> None:
        """End persistent workers; wait, with a timeout, for all workers to end."""
        kept = self._take()
        with self._lock:
            ending = list(self._ending)
        for pool in kept:
            pool.end()
        with contextlib.ExitStack() as stack:  # an error is raised after all the waits
            stack.callback(self.supervisors.close)
            for workers in (*ending, *kept):
                stack.callback(workers.join)

    async def aclose(self) -> None:
        if self._kept or self._ending or self.supervisors.has_any():
            await in_thread(self.close, executor=CpuThread.once())

    def _take(self) -> "list[LastingPool]":
        with self._lock:
            kept, self._kept[:] = self._kept[:], []
        return kept


def _close_all(kept: "list[LastingPool] | list[IdleSupervisor]") -> None:
    with contextlib.suppress(IndexError):  # another thread took the last one
        while kept:
            kept.pop().close()
