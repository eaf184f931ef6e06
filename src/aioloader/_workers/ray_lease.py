"""Ray actors as one iteration sees them: placed with its first request."""

import sys
from functools import partial

import torch

from aioloader._pipeline.work import Work
from aioloader._workers.lease import Lease, Pools
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


class RayLease(Lease[RayPool]):
    """Ray actors, as one iteration sees them."""

    pump = None

    def explain(self, work: Work) -> str:
        """Say which actor has ``work``, since when, and where it is stuck."""
        return "" if self._pool is None else self._pool.explain(work)

    def restart(self, work: Work) -> bool:
        """Kill the actor that has ``work``; it is placed anew, and makes it again."""
        return self._pool is not None and self._pool.restart(work)
