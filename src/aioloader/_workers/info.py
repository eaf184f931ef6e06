"""``get_worker_info()`` for worker processes and threads."""

import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.rng import Keyed, key_of_sample


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker knows about itself.

    Attributes:
        id: Number of this worker, from 0.
        num_workers: How many workers the loader has.
        seed: Its own seed, ``base_seed + id``.
        dataset: This worker's copy of the dataset, or the dataset that threads share.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any

    @property
    def rng(self) -> Keyed:
        """Generators (``torch``, ``numpy``, ``random``) of the current batch.

        Seeded per batch, the same in processes and threads; in coroutines, many of
        which run at once, per sample. Outside a batch, and with ``rng="worker"``,
        seeded once with ``seed``.
        """
        keyed = _KEYED.get()
        if keyed is not None:
            return keyed
        if _HERE.rng is None:
            _HERE.rng = Keyed(self.seed)
        return _HERE.rng


class _Here(threading.local):
    """The info of this worker thread, and generators seeded for it."""

    info: WorkerInfo | None = None
    rng: Keyed | None = None


_HERE = _Here()
# Generators of the current batch: per thread, and in coroutines per task.
_KEYED: ContextVar[Keyed | None] = ContextVar("aioloader_rng", default=None)
# The info of a worker process, for all of its threads.
_process: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Return the info of this worker process or thread; None in the loader's own.

    In a worker process ``torch.utils.data.get_worker_info()`` returns the same, without
    ``rng``.
    """
    return _HERE.info or _process


def use_batch_rng(key: int) -> None:
    """Set ``rng`` to the generators of a batch, in this thread or task."""
    _KEYED.set(Keyed(key))


def use_sample_rng(task: BatchTask, position: int, stage: int) -> None:
    """Set ``rng`` to the generators of a sample, or of the batch (position -1)."""
    use_batch_rng(
        key_of_sample(task, position, stage) if position >= 0 else task.key or 0
    )


def be_worker_thread(info: WorkerInfo | None) -> None:
    """Make ``get_worker_info`` return ``info`` in this thread, outside any batch."""
    _HERE.info, _HERE.rng = info, None
    _KEYED.set(None)


def be_worker_process(info: WorkerInfo, *, tell_torch: bool = False) -> None:
    """Make ``get_worker_info``, and torch's, return ``info`` in this process."""
    global _process  # noqa: PLW0603  (a process is one worker)
    _process = info
    if tell_torch:
        torch_worker._worker_info = torch_worker.WorkerInfo(  # noqa: SLF001  (where torch looks)
            id=info.id,
            num_workers=info.num_workers,
            seed=info.seed,
            dataset=info.dataset,
        )
