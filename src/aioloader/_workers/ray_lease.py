"""Ray actors as one iteration sees them: placed with its first request."""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from aioloader._pipeline.run import Run
from aioloader._pipeline.work import Work
from aioloader._workers.lease import Pools
from aioloader._workers.ray_actor import Ground
from aioloader._workers.ray_pool import RayPool
from aioloader._workers.ray_workers import RayWorkers
from aioloader._workers.shipment import Shipment


def lease_actors(
    pools: Pools, workers: RayWorkers, shipment: Shipment, *, keep: bool
) -> "RayLease":
    """Return a lease for one iteration.

    Args:
        pools: Where actors are kept that outlive it.
        workers: How many, and where.
        shipment: What they are to do.
        keep: Whether they outlive the iteration, and serve the next ones.
    """
    ground = Ground(list(sys.path), torch.get_default_dtype())
    start = partial(_start, workers, shipment, ground)
    return RayLease(pools, start, reads=shipment.reads, keep=keep)


def _start(workers: RayWorkers, shipment: Shipment, ground: Ground) -> RayPool:
    ray, connection = workers.connect()
    return RayPool(ray, connection, shipment, ground, workers.options())


class RayLease:
    """Ray actors, as one iteration sees them.

    Args:
        pools: Where actors are kept that outlive it.
        start: Connects, and has actors placed.
        reads: Whether they read the samples too.
        keep: Whether they outlive the iteration.
    """

    place: Literal["pool"] = "pool"
    pump = None

    def __init__(
        self, pools: Pools, start: Callable[[], RayPool], *, reads: bool, keep: bool
    ) -> None:
        self.reads = reads
        self._pools = pools
        self._start = start
        self._keep = keep
        self._pool: RayPool | None = None
        self._is_over = False
        self._lock = threading.RLock()

    def open(self, run: Run) -> None:
        """Have the actors placed, or find those that are kept; it may take long."""
        try:
            pool = self._pools.open(self._start, keep=self._keep)
        except Exception as error:  # no cluster, or what cannot be shipped
            run.fail(error)
            return
        with self._lock:
            self._pool = pool
            if not self._keep:
                weakref.finalize(self, pool.end)
                if self._is_over:
                    pool.end()

    def submit(self, run: Run, work: Work) -> None:
        """Have the rest of ``work`` made."""
        if self._pool is not None:
            self._pool.submit(run, work)

    def forget(self, run: Run) -> None:
        """End the lease."""
        with self._lock:
            self._is_over = True
            pool = self._pool
        if pool is not None:
            pool.forget(run)
            if not self._keep:
                pool.end()

    def join(self) -> bool:
        """Wait until the actors are gone, if they are not kept."""
        return self._keep or self._pool is None or self._pool.join()

    def explain(self, work: Work) -> str:
        """Say which actor has ``work``, since when, and where it is stuck."""
        return "" if self._pool is None else self._pool.explain(work)

    def restart(self, work: Work) -> bool:
        """Kill the actor that has ``work``; it is placed anew, and makes it again."""
        return self._pool is not None and self._pool.restart(work)
