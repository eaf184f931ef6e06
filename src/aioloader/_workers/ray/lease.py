"""Ray actors as one iteration sees them: placed with its first request."""

import sys
from functools import partial

import torch

from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.lease import Lease, Pools
from aioloader._workers.ray.actor import Ground
from aioloader._workers.ray.pool import RayPool
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.worker_spec import WorkerSpec


def lease_actors(
    pools: Pools, workers: RayWorkers, spec: WorkerSpec, *, keep: bool
) -> "RayLease":
    """Return a lease for one iteration.

    Args:
        pools: Where actors are kept that outlive it.
        workers: How many, and where.
        spec: What they are to do.
        keep: Whether they outlive the iteration, and serve the next ones.
    """
    ground = Ground(list(sys.path), torch.get_default_dtype())
    start = partial(_start, workers, spec, ground)
    return RayLease(pools, start, reads=spec.reads, keep=keep)


def _start(workers: RayWorkers, spec: WorkerSpec, ground: Ground) -> RayPool:
    ray, connection = workers.connect()
    return RayPool(ray, connection, spec, ground, workers.options())


class RayLease(Lease[RayPool]):
    """Ray actors, as one iteration sees them."""

    pump = None

    def explain(self, task: BatchTask) -> str:
        """Say which actor has ``task``, since when, and where it is stuck."""
        return "" if self._pool is None else self._pool.explain(task)

    def restart(self, task: BatchTask) -> bool:
        """Kill the actor that has ``task``; it is placed anew, and makes it again."""
        return self._pool is not None and self._pool.restart(task)
