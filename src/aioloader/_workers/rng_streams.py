"""Seeding of a worker's random generators, before each batch or sample."""

from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings

from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.info import use_batch_rng, use_sample_rng
from aioloader._workers.rng import key_of_sample, seed_all, states
from aioloader._workers.worker_spec import WorkerSpec


class Seeded:
    """Seed the global generators for a task, before its plain code runs."""

    __slots__ = ("_key",)

    def __init__(self, task: BatchTask) -> None:
        self._key = task.key

    def __enter__(self) -> None:
        if self._key is not None:
            seed_all(self._key)
            use_batch_rng(self._key)

    def __exit__(self, *_exc: object) -> None:
        pass


def seed_batch(task: BatchTask) -> None:
    """Seed the global generators for a task."""
    if task.key is not None:
        seed_all(task.key)


def seed_for_sample(task: BatchTask, position: int, stage: int) -> None:
    """Seed the global generators for a sample of ``task`` in one of its stages."""
    seed_all(key_of_sample(task, position, stage))
    use_sample_rng(task, position, stage)


def initialise(spec: WorkerSpec, worker: int) -> bool:
    """Call the user's init function; return whether it seeded the generators.

    Then shard a data pipe among the workers, as in torch.
    """
    init, before = spec.worker_init_fn, None
    if init is not None:
        before = states()
        init(worker)
    if isinstance(spec.dataset, (IterDataPipe, MapDataPipe)):
        graph_settings.apply_sharding(spec.dataset, spec.num_workers, worker)
    return before is not None and states() != before
