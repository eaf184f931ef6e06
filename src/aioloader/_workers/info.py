"""``get_worker_info()`` for worker processes and threads, and their generators."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from torch.utils.data._utils import worker as torch_worker

from aioloader._base.failures import noted
from aioloader._base.raising import raisable
from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.rng import (
    BatchGenerators,
    key_of_sample,
    seed_batch,
    seed_sample,
)


@dataclass(frozen=True)
class WorkerInfo:
    """The identity, seed and dataset of a worker.

    Attributes:
        id: Number of this worker, from 0.
        num_workers: How many workers the loader has.
        seed: This worker's seed: the iteration's base seed plus ``id``.
        dataset: This worker's copy of the dataset, or the dataset that threads share.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any

    @property
    def rng(self) -> BatchGenerators:
        """Generators (``torch``, ``numpy``, ``random``) of the current batch.

        They are seeded per batch, or per sample with ``rng="sample"`` and in coroutines
        (many run at once). Processes and threads use the same seeds. Outside a batch
        and with ``rng="worker"``, each thread seeds its generators once, with ``seed``.
        """
        keyed = _KEYED.get()
        if keyed is not None:
            return keyed
        rng: BatchGenerators | None = getattr(_HERE, "rng", None)
        if rng is None:
            rng = _HERE.rng = BatchGenerators(self.seed)
        return rng


# Per thread: ``info`` of a worker thread, and ``rng``, seeded once per thread.
_HERE = threading.local()
# Generators of the current batch, by thread; in coroutines, by asyncio task.
_KEYED: ContextVar[BatchGenerators | None] = ContextVar("aioloader_rng", default=None)
_NOTHING = nullcontext()
# The info of a worker process, for all of its threads.
_process: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Return the info of this worker process or thread; None outside of workers.

    In a worker process ``torch.utils.data.get_worker_info()`` returns an object with
    the same values, but without ``rng``.
    """
    return getattr(_HERE, "info", None) or _process


def use_batch_rng(task: BatchTask) -> AbstractContextManager[None]:
    """Set ``WorkerInfo.rng`` for the batch ``task``; return a null context manager."""
    if task.key is not None:
        _KEYED.set(BatchGenerators(task.key))
    return _NOTHING


def use_sample_rng(task: BatchTask, position: int, stage: int) -> None:
    """Set ``WorkerInfo.rng`` for a sample, or for the batch if ``position`` is -1."""
    if task.key is not None:
        key = key_of_sample(task, position, stage) if position >= 0 else task.key
        _KEYED.set(BatchGenerators(key))


def seeded(task: BatchTask) -> AbstractContextManager[None]:
    """Seed global generators and ``rng`` for a batch; return a null context manager."""
    seed_batch(task)
    return use_batch_rng(task)


def seed_for_sample(task: BatchTask, position: int, stage: int) -> None:
    """Seed the global generators and ``WorkerInfo.rng`` for a sample."""
    seed_sample(task, position, stage)
    use_sample_rng(task, position, stage)


# How the ``BatchMaker`` of a worker process seeds the generators.
SEEDS: Final[dict[str, Any]] = {
    "around": seeded,
    "reseed": seed_batch,
    "seed": seed_for_sample,
    "seed_async": use_sample_rng,
}


@contextmanager
def worker_thread(
    number: int, num_workers: int, base_seed: int, dataset: Any
) -> Iterator[None]:
    """In the block, make ``get_worker_info`` report this thread as a worker."""
    _HERE.info = WorkerInfo(number, num_workers, base_seed + number, dataset)
    try:
        yield
    finally:
        _HERE.info = _HERE.rng = None
        _KEYED.set(None)


def be_worker_process(info: WorkerInfo) -> None:
    """Make our ``get_worker_info`` and torch's return ``info`` in this process."""
    global _process  # noqa: PLW0603  (a process is one worker)
    _process = info
    torch_worker._worker_info = torch_worker.WorkerInfo(**vars(info))  # noqa: SLF001  (where torch looks)


def call_init(init: Callable[[int], Any] | None, worker: int) -> None:
    """Call the user's ``worker_init_fn``, if any; add the worker's number to errors."""
    try:
        if init is not None:
            init(worker)
    except BaseException as error:
        where = f"in worker_init_fn of worker {worker}"
        raise noted(raisable(error, "worker_init_fn"), where)  # noqa: B904  (it keeps its cause)
