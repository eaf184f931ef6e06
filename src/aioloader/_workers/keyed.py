"""What a worker does about random numbers: who seeds, and what before which batch."""

from aioloader._pipeline.work import Work
from aioloader._workers.info import be_at, be_at_sample
from aioloader._workers.seeds import key_of_sample, seed_all, states
from aioloader._workers.shipment import Shipment


class Seeded:
    """Seed the global generators for a work, before its plain code runs."""

    __slots__ = ("_key",)

    def __init__(self, work: Work) -> None:
        self._key = work.key

    def __enter__(self) -> None:
        if self._key is not None:
            seed_all(self._key)
            be_at(self._key)

    def __exit__(self, *_exc: object) -> None:
        pass


def seed_batch(work: Work) -> None:
    """Seed the global generators for a work."""
    if work.key is not None:
        seed_all(work.key)


def seed_for_sample(work: Work, position: int, stage: int) -> None:
    """Seed the global generators for a sample of ``work``, in one of its stages."""
    seed_all(key_of_sample(work, position, stage))
    be_at_sample(work, position, stage)


def initialise(shipment: Shipment, worker: int) -> bool:
    """Call the user's init function; tell whether it seeded the generators."""
    init = shipment.worker_init_fn
    if init is None:
        return False
    before = states()
    init(worker)
    return states() != before
