"""Leases on workers: one per iteration, of its own pool or of one for all that follow.

Worker processes start with ``iter()``, as torch's do, others with the first request.
With ``persistent_workers`` they stay when the iteration ends.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, TypeVar, cast

from aioloader._order.forks import fork_safe
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.cpu import beside
from aioloader._pipeline.pipeline import Pipeline


class Keepable(Protocol):
    """Workers that may outlive an iteration."""

    def submit(self, run: Pipeline, task: BatchTask) -> None:
        """Take a task; its result is delivered to ``run``."""

    def forget(self, run: Pipeline) -> None:
        """Drop what ``run`` still waits for."""

    def is_open(self) -> bool:
        """Tell whether they take tasks."""

    def end(self) -> None:
        """Let them end, in the background; from any thread, and finalizers."""

    def join(self) -> bool:
        """Wait, bounded, until they are gone; tell whether they are."""

    def close(self) -> None:
        """Close what this process holds."""


AnyPool = TypeVar("AnyPool", bound=Keepable)


class Pools:
    """The pools of one loader: a kept one, where workers are persistent."""

    def __init__(self) -> None:
        self._kept: list[Keepable] = []
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _end_all, self._kept)

    def has_kept(self) -> bool:
        """Tell whether workers are there that another iteration left."""
        return any(pool.is_open() for pool in self._kept)

    def open(self, start: Callable[[], AnyPool], *, keep: bool) -> AnyPool:
        """Return the kept pool, which ``start`` made before, or a new one."""
        if not keep:
            return start()
        with self._lock:
            for pool in self._kept:
                if pool.is_open():
                    return cast("AnyPool", pool)
            _end_all(self._kept)  # those that have failed
            pool = start()
            self._kept[:] = [pool]
            return pool

    def drop(self) -> None:
        """Let kept workers end, in the background: others are to begin."""
        with self._lock:
            kept, self._kept[:] = self._kept[:], []
        _end_all(kept)

    def close(self) -> None:
        """Let kept workers end, and wait for it, bounded."""
        with self._lock:
            kept, self._kept[:] = self._kept[:], []
        for pool in kept:
            pool.end()
        for pool in kept:
            pool.join()

    async def aclose(self) -> None:
        """Let kept workers end, without blocking the loop."""
        if self._kept:
            await beside(self.close)


def _end_all(kept: Sequence[Keepable]) -> None:
    for pool in kept:
        pool.close()


class Lease(Generic[AnyPool]):
    """Workers, as one iteration sees them.

    Args:
        pools: Where workers are kept that outlive it.
        start: Ships what is needed and starts workers; called with the first request.
        reads: Whether workers read the samples too.
        keep: Whether the workers outlive the iteration, and serve the next ones.
    """

    place: Literal["pool"] = "pool"

    def __init__(
        self, pools: Pools, start: Callable[[], AnyPool], *, reads: bool, keep: bool
    ) -> None:
        self.reads = reads
        self._pools = pools
        self._start = start
        self._keep = keep
        self._pool: AnyPool | None = None
        self._is_begun = False
        self._is_over = False
        self._lock = fork_safe(threading.RLock())

    def open(self, run: Pipeline) -> None:
        """Start the workers, or find those that are kept, once; it may take long."""
        if self._is_begun:
            return
        self._is_begun = True
        try:
            pool = self._pools.open(self._start, keep=self._keep)
        except Exception as error:  # what cannot be shipped, above all
            run.fail(error)
            return
        with self._lock:
            self._pool = pool
            if not self._keep:
                # Whoever waits for their end has joined them before.
                weakref.finalize(self, pool.close)
                if self._is_over:
                    pool.end()

    def wait_up(self) -> None:
        """Wait until the time that passes is the user's: here it always is."""

    def submit(self, run: Pipeline, task: BatchTask) -> None:
        """Have the rest of ``task`` made."""
        if self._pool is not None:
            self._pool.submit(run, task)

    def forget(self, run: Pipeline) -> None:
        """End the lease."""
        with self._lock:
            self._is_over = True
            pool = self._pool
        if pool is not None:
            pool.forget(run)
            if not self._keep:
                pool.end()

    def join(self) -> bool:
        """Wait until the workers are gone, if they are not kept."""
        return self._keep or self._pool is None or self._pool.join()
