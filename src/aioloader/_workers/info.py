"""What ``get_worker_info()`` returns in worker processes and threads."""

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
        dataset: The dataset as this worker has it.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any

    @property
    def rng(self) -> Keyed:
        """Generators (``torch``, ``numpy``, ``random``) of the current batch.

        Seeded for the batch, alike in processes and in threads; in coroutines, of
        which many run at once, for the sample. Where there is no batch, and with
        ``rng="worker"``, seeded once with ``seed``.
        """
        keyed = _KEYED.get()
        if keyed is not None:
            return keyed
        if _HERE.rng is None:
            _HERE.rng = Keyed(self.seed)
        return _HERE.rng


class _Here(threading.local):
    """The worker that this thread is, and its generators by its own seed."""

    info: WorkerInfo | None = None
    rng: Keyed | None = None


_HERE = _Here()
# Of the current batch: a thread's own, and in coroutines each task's.
_KEYED: ContextVar[Keyed | None] = ContextVar("aioloader_rng", default=None)
# Of a worker process, for all of its threads.
_process: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Return the info of this worker process or thread; None in the loader's own.

    In a worker process ``torch.utils.data.get_worker_info()`` tells the same, but for
    ``rng``.
    """
    return _HERE.info or _process


def use_batch_rng(key: int) -> None:
    """Set ``rng`` to the generators of a batch, in this thread or task."""
    _KEYED.set(Keyed(key))


def use_sample_rng(task: BatchTask, position: int, stage: int) -> None:
    """Set ``rng`` to that of a sample of ``task``, or of all of it (position -1)."""
    use_batch_rng(
        key_of_sample(task, position, stage) if position >= 0 else task.key or 0
    )


def be_worker_thread(info: WorkerInfo | None) -> None:
    """Let ``get_worker_info`` return ``info`` in this thread, without a batch."""
    _HERE.info, _HERE.rng = info, None
    _KEYED.set(None)


def be_worker_process(info: WorkerInfo, *, tell_torch: bool = False) -> None:
    """Let ``get_worker_info`` return ``info`` in this process, and torch's too."""
    global _process  # noqa: PLW0603  (a process is one worker)
    _process = info
    if tell_torch:
        torch_worker._worker_info = torch_worker.WorkerInfo(  # noqa: SLF001  (where torch looks)
            id=info.id,
            num_workers=info.num_workers,
            seed=info.seed,
            dataset=info.dataset,
        )
