"""What a loader keeps of its workers between epochs.

Worker processes start with ``iter()``, as torch's do, others with the first request.
With ``persistent_workers`` they outlive the iteration.
"""

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioloader._order.forks import close_in_children, fork_safe
from aioloader._pipeline.cpu import in_new_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioloader._pipeline.roles import LastingPool, Pool
    from aioloader._transport.channel import Channel


class Pools:
    """The pools of one loader."""

    def __init__(self) -> None:
        self._kept: list[LastingPool] = []
        self._ending: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _close_all, self._kept)

    def has_kept(self) -> bool:
        """Tell whether workers of an earlier iteration persist and take tasks."""
        return any(pool.is_open() for pool in self._kept)

    def open(self, start: "Callable[[], LastingPool]", *, keep: bool) -> "LastingPool":
        """Return the kept pool or a new one, which is kept if ``keep`` is set."""
        if not keep:
            return start()
        with self._lock:
            for pool in self._kept:
                if pool.is_open():
                    return pool
            _close_all(self._kept)  # pools that have failed
            self._kept.append(start())
            return self._kept[0]

    def join_later(self, workers: "Pool") -> None:
        """Make ``close`` wait for workers: nobody does if their iterator is dropped."""
        self._ending.add(workers)

    def drop(self) -> None:
        """End kept workers in the background: others replace them."""
        _close_all(self._take())

    def close(self) -> None:
        """End kept workers and wait until all have ended, bounded."""
        kept = self._take()
        for pool in kept:
            pool.end()
        with contextlib.ExitStack() as stack:  # an error is raised after all waits
            for workers in (*self._ending, *kept):
                stack.callback(workers.join)

    async def aclose(self) -> None:
        """End kept workers without blocking the loop."""
        if self._kept or self._ending:
            await in_new_thread(self.close)

    def _take(self) -> "list[LastingPool]":
        with self._lock:
            kept, self._kept[:] = self._kept[:], []
        return kept


@dataclass
class Tally:
    """Counts of a loader's worker processes, over all epochs.

    Attributes:
        deaths: Processes that died unexpectedly.
        restarts: Processes that have replaced them.
    """

    deaths: int = 0
    restarts: int = 0


class Servers:
    """The supervisors of the fork server that a loader keeps between epochs."""

    def __init__(self) -> None:
        self._idle: list[Channel] = []
        self._lock = fork_safe(threading.Lock())
        # Whether to unpickle once for all workers: not if that starts threads.
        self.is_shared = True
        weakref.finalize(self, _close_all, self._idle)

    def take(self) -> "Channel | None":
        """Return the channel to an idle supervisor, now the caller's, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, control: "Channel") -> None:
        """Keep a supervisor that has ended its workers."""
        close_in_children(control.close)
        with self._lock:
            self._idle.append(control)

    def close(self) -> None:
        """End the idle supervisors."""
        with self._lock:
            _close_all(self._idle)


def _close_all(kept: "list[LastingPool] | list[Channel]") -> None:
    while kept:
        kept.pop().close()
