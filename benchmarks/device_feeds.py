"""Loaders as feeds of batches on a device, each as its users would best write it.

All get the same samples, ready in memory: pictures of ``uint8[3, 224, 224]`` and their
labels. ``device`` may be the CPU, to run the same code where there is nothing else.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from layouts import Case, Ready, fill_pairs
from spdl_feeds import Ring, iterate, no_hooks, spdl_subprocesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Batch = list[torch.Tensor]


class Pictures(Ready):
    """One picture and its label, repeated: a worker's cache holds it.

    So a worker writes batches as fast as memory takes them.
    """

    distinct = 1

    def __init__(self, side: int) -> None:
        super().__init__()
        self._side = side

    def _make(self, generator: torch.Generator) -> list[tuple[torch.Tensor, int]]:
        shape = (3, self._side, self._side)
        return [(torch.randint(256, shape, generator=generator).byte(), 7)]


def picture_case(batch: int = 256, side: int = 224) -> Case:
    """Return the batches to move; 38.5 MB each by default."""
    layout = [((batch, 3, side, side), torch.uint8), ((batch,), torch.int64)]
    return Case("pictures", partial(Pictures, side), batch, layout, fill_pairs)


def bare_copies(case: Case, device: torch.device) -> Iterator[Batch]:
    """Copy two pinned batches in turn, into memory that is reused: the limit."""
    hosts = [case.empty() for _ in range(2)]
    if device.type != "cpu":
        hosts = [[view.pin_memory() for view in views] for views in hosts]
    targets = [[view.to(device) for view in views] for views in hosts]
    while True:
        for views, target in zip(hosts, targets, strict=True):
            for view, place in zip(views, target, strict=True):
                place.copy_(view, non_blocking=True)
            yield target


def aioloader_feed(
    case: Case,
    device: torch.device,
    *,
    moves: bool = True,
    ahead: int = 1,
    **settings: Any,
) -> Iterable[Batch]:
    """Build our loader; batches come from the workers' slots, and may stay there."""
    import aioloader  # noqa: PLC0415

    loader: Iterable[Batch] = aioloader.DataLoader(
        case.dataset(),
        case.batch,
        persistent_workers=True,
        device=aioloader.Device(device, ahead=ahead) if moves else None,
        **settings,
    )
    return loader


def torch_loader(
    case: Case, device: torch.device, *, num_workers: int, ahead: int = 2
) -> DataLoader[Any]:
    """Build torch's loader: persistent workers, a thread that pins."""
    return DataLoader(
        case.dataset(),
        case.batch,
        num_workers=num_workers,
        persistent_workers=True,
        prefetch_factor=ahead,
        pin_memory=device.type != "cpu",
    )


def torch_feed(case: Case, device: torch.device, **settings: int) -> Iterator[Batch]:
    """Move each batch in the step's own stream, as most programs do."""
    for batch in torch_loader(case, device, **settings):
        yield [each.to(device, non_blocking=True) for each in batch]


def torch_prefetched(
    case: Case, device: torch.device, **settings: int
) -> Iterator[Batch]:
    """Move the next batch on a separate stream, after the step: the known recipe."""
    batches = iter(torch_loader(case, device, **settings))
    if device.type != "cuda":
        yield from batches
        return
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin() -> Batch | None:
        host = next(batches, None)
        if host is None:
            return None
        with torch.cuda.stream(side):
            return [each.to(device, non_blocking=True) for each in host]

    following = begin()
    while following is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        batch = following
        for each in batch:
            each.record_stream(current)
        following = begin()
        yield batch
        del batch


def spdl_feed(
    case: Case, device: torch.device, *, num_workers: int, processes: bool = False
) -> Iterator[Batch]:
    """Collate in SPDL's threads, and move in another one by its own function.

    With ``processes``, two of its subprocesses collate, as in ``transport.py``.
    """
    from spdl.io import transfer_tensor_h2d  # noqa: PLC0415
    from spdl.pipeline import AsyncQueue, PipelineBuilder  # noqa: PLC0415

    dataset, ring = case.dataset(), Ring(case)
    dataset[0]

    def load(at: int) -> Batch:
        return list(ring([dataset[index] for index in range(at, at + case.batch)]))

    builder: Any = PipelineBuilder()
    if processes:
        builder.add_source(spdl_subprocesses(case, recycled=True))
    else:
        builder.add_source(range(0, len(dataset), case.batch))
        builder.pipe(load, concurrency=num_workers, output_order="input")
    if device.type == "cuda":
        # its stream belongs to its thread
        builder.pipe(transfer_tensor_h2d, executor=ThreadPoolExecutor(1))
    pipeline = builder.add_sink(2).build(
        num_threads=num_workers,
        task_hook_factory=no_hooks,
        queue_class=AsyncQueue,
        use_thread_output_queue=True,
    )
    return iterate(pipeline)
