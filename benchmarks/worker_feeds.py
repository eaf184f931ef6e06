"""Loaders with workers as feeds, and the steady state measured for each.

torch, SPDL (``spdl_feeds.py``) and aioloader get the same datasets and the same
consumer. Workers persist; every consumer has one torch thread, as each worker has.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from harness import Figures
    from layouts import Case

WORKERS = 2


def steady(
    batches: Iterable[Any],
    seconds: float,
    *,
    read: Callable[[Any], object] | None = None,
    warm: int = 24,
) -> Figures:
    """Take batches for some seconds, after those that warm the workers up.

    Returns:
        ``rate`` in batches per second; ``consumer_ms``, the CPU time of this process
        alone per batch, its threads included; ``batch_ms``.
    """
    torch.set_num_threads(1)
    start = cpu = 0.0
    for number, batch in enumerate(batches):
        if number == warm:
            gc.collect()
            start, cpu = time.perf_counter(), time.process_time()
        if read is not None:
            read(batch)
        if number > warm and (now := time.perf_counter()) > start + seconds:
            break
    else:
        raise RuntimeError("the epoch ended while the clock ran")
    cpu = time.process_time() - cpu
    del batch  # before the loader's own memory goes
    taken, wall = number - warm, now - start
    return {
        "rate": taken / wall,
        "batch_ms": wall / taken * 1e3,
        "consumer_ms": cpu / taken * 1e3,
    }


def torch_batches(  # noqa: PLR0913  (settings)
    case: Case,
    *,
    workers: int = WORKERS,
    ahead: int = 2,
    start: str = "fork",
    sharing: str = "file_descriptor",
    arrays: bool = False,
    persistent: bool = True,
) -> Iterable[Any]:
    """Build torch's loader: persistent workers, ``ahead`` batches each.

    With ``arrays`` a ``collate_fn`` of the user returns numpy arrays, which the queue
    pickles, and the consumer makes tensors of them.
    """
    torch.multiprocessing.set_sharing_strategy(sharing)
    if not workers:
        return DataLoader(case.dataset(), case.batch)
    loader = DataLoader(
        case.dataset(),
        case.batch,
        num_workers=workers,
        multiprocessing_context=start,
        persistent_workers=persistent,
        prefetch_factor=ahead,
        collate_fn=case.arrays if arrays else None,
    )
    return map(as_tensors, loader) if arrays else loader


def as_tensors(arrays: Iterable[Any]) -> list[torch.Tensor]:
    """Return arrays that came through a queue as tensors over the same memory."""
    return [torch.from_numpy(array) for array in arrays]


def aioloader_batches(case: Case, **settings: Any) -> Iterable[Any]:
    """Build our loader: two workers, processes from the template by default."""
    import aioloader  # noqa: PLC0415

    settings = {"num_workers": WORKERS, "persistent_workers": True} | settings
    loader: Iterable[Any] = aioloader.DataLoader(case.dataset(), case.batch, **settings)
    return loader
