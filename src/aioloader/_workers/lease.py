"""What a loader keeps of its workers, and the leases on them, one per iteration.

Worker processes start with ``iter()``, as torch's do, others with the first request.
With ``persistent_workers`` they outlive the iteration.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioloader._order.forks import close_in_children, fork_safe
from aioloader._pipeline.cpu import in_new_thread
from aioloader._pipeline.roles import LastingPool, Pool

if TYPE_CHECKING:
    from aioloader._pipeline.batch_task import BatchTask
    from aioloader._pipeline.pipeline import Pipeline
    from aioloader._transport.channel import Channel


class Pools:
    """The pools of one loader; persistent workers are kept here."""

    def __init__(self) -> None:
        self._kept: list[LastingPool] = []
        self._ending: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _close_all, self._kept)

    def has_kept(self) -> bool:
        """Tell whether workers of an earlier iteration persist and take tasks."""
        return any(pool.is_open() for pool in self._kept)

    def open(self, start: Callable[[], LastingPool], *, keep: bool) -> LastingPool:
        """Return the kept pool or a new one, which is kept if ``keep`` is set."""
        if not keep:
            return start()
        with self._lock:
            for pool in self._kept:
                if pool.is_open():
                    return pool
            _close_all(self._kept)  # pools that have failed
            pool = start()
            self._kept[:] = [pool]
            return pool

    def join_later(self, workers: Pool) -> None:
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
        ending: list[Pool] = [*kept, *self._ending]
        errors: list[BaseException] = []
        for workers in ending:
            try:
                workers.join()
            except BaseException as error:  # raised when all have been waited for
                errors.append(error)
        if errors:
            raise errors[0]

    async def aclose(self) -> None:
        """End kept workers without blocking the loop."""
        if self._kept or self._ending:
            await in_new_thread(self.close)

    def _take(self) -> list[LastingPool]:
        with self._lock:
            kept, self._kept[:] = self._kept[:], []
        return kept


def _close_all(kept: Sequence[LastingPool]) -> None:
    for pool in kept:
        pool.close()


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
        weakref.finalize(self, _close_channels, self._idle)

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
            _close_channels(self._idle)


def _close_channels(idle: "list[Channel]") -> None:
    while idle:
        idle.pop().close()


class Lease(Pool):
    """Workers that may outlive the iteration, as it sees them.

    Args:
        pools: Where persistent workers are kept.
        start: Starts workers; called with the first request.
        reads: Whether workers read the samples too.
        keep: Whether the workers outlive the iteration and serve the next ones.
        pumps: Whether the consumer itself collects results while it waits.
    """

    place = "pool"

    def __init__(
        self,
        pools: Pools,
        start: Callable[[], LastingPool],
        *,
        reads: bool,
        keep: bool,
        pumps: bool = False,
    ) -> None:
        self.reads = reads
        self._pools = pools
        self._start = start
        self._keep = keep
        self._pumps = pumps
        self._pool: LastingPool | None = None
        self._is_begun = False
        self._is_over = False
        self._lock = fork_safe(threading.RLock())

    @property
    def pump(self) -> "Lease | None":
        """This lease, if the consumer collects results while it waits."""
        return self if self._pumps else None

    def open(self, pipeline: "Pipeline") -> None:
        """Start the workers or find the kept ones, once; may take long."""
        if self._is_begun:
            return
        self._is_begun = True
        try:
            pool = self._pools.open(self._start, keep=self._keep)
        except Exception as error:  # mostly: something cannot be pickled
            pipeline.fail(error)
            return
        with self._lock:
            self._pool = pool
            if not self._keep:
                # If anybody waits for their end, they are joined before this runs.
                weakref.finalize(self, pool.close)
                if self._is_over:
                    pool.end()

    def wait_up(self) -> None:
        """Wait until the time that passes is the user's, not that of a start."""
        if self._pool is not None:
            self._pool.wait_up()

    def submit(self, pipeline: "Pipeline", task: "BatchTask") -> None:
        """Have the rest of ``task`` made."""
        if self._pool is not None:
            self._pool.submit(pipeline, task)

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when ``collect`` has something to do."""
        return () if self._pool is None else self._pool.descriptors()

    def collect(self) -> None:
        """Deliver the results that have arrived."""
        if self._pool is not None:
            self._pool.collect()

    def explain(self, task: "BatchTask") -> str:
        """Say which worker has ``task``, since when, and where it is stuck."""
        if self._pool is None:
            return "waits for the workers to start"
        return self._pool.explain(task)

    def restart(self, task: "BatchTask") -> bool:
        """Replace the workers that have ``task``; tell whether there are any."""
        return self._pool is not None and self._pool.restart(task)

    def forget(self, pipeline: "Pipeline") -> None:
        """End the lease."""
        with self._lock:
            self._is_over = True
            pool = self._pool
        if pool is not None:
            pool.forget(pipeline)
            if not self._keep:
                pool.end()

    def join(self) -> bool:
        """Wait until the workers are gone, if they are not kept."""
        return self._keep or self._pool is None or self._pool.join()
