"""Who am I: what ``get_worker_info()`` returns in worker processes and threads."""

import threading
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from aioloader._workers.seeds import Keyed


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
        """Generators (``torch``, ``numpy``, ``random``) of the batch in hand.

        Seeded for the batch, alike in processes and in threads; where no batch is in
        hand, with ``seed``.
        """
        if _HERE.rng is None:
            _HERE.rng = Keyed(self.seed)
        return _HERE.rng


class _Here(threading.local):
    """The worker that this thread is, and its generators; or None."""

    info: WorkerInfo | None = None
    rng: Keyed | None = None


_HERE = _Here()
# Of a worker process, for all of its threads.
_process: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Return what this worker process or worker thread is; None in the loader's own.

    In a worker process ``torch.utils.data.get_worker_info()`` tells the same, but for
    ``rng``.
    """
    return _HERE.info or _process


def be_at(key: int) -> None:
    """Let ``rng`` of this thread be what the batch of ``key`` draws from."""
    _HERE.rng = Keyed(key)


def be_worker_thread(info: WorkerInfo | None) -> None:
    """Let ``get_worker_info`` return ``info`` in this thread."""
    _HERE.info = info


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
