"""Overhead: what does the loader itself cost when reading costs nothing?

A TensorDataset of a million rows in batches of 64 and 1024, and a Python dataset of
small tensors in batches of 64. One full shuffled epoch, its start included, in us per
batch; the limit is the cost of the same rows without any loader.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

from harness import Contender, Figures, Metric, Options, Question, Target, main
from meter import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[Any, int], Iterable[object]]
ROWS = 1_000_000
PYTHON_ROWS = 64_000
WARM_ROWS = 20_000
# torch's worker processes are timed only on the first batches, including start-up
WORKER_BATCHES = 3_000
# epochs are repeated for this long, and the median one counts
SECONDS = 1.5


def make_columns(rows: int) -> Pair:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, 16, generator=generator),
        torch.randint(0, 10, (rows,), generator=generator),
    )


class PythonRows(Dataset[tuple[torch.Tensor, int]]):
    """A dataset as users write it: one row and a Python int per sample."""

    def __init__(self, rows: int) -> None:
        self.features, labels = make_columns(rows)
        self.labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.features[index], self.labels[index]


class WholeBatches(Dataset[Pair]):
    """The recipe's dataset: its index is a whole batch, as list or tensor."""

    def __init__(self, columns: tuple[torch.Tensor, ...]) -> None:
        self.features, self.labels = columns

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int] | torch.Tensor) -> Pair:
        chosen = torch.as_tensor(indices)
        return self.features.index_select(0, chosen), self.labels.index_select(
            0, chosen
        )


class PermutationBatches(Sampler[torch.Tensor]):
    """Batches of a shuffled epoch as index tensors, never Python ints."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch = rows, batch

    def __len__(self) -> int:
        return math.ceil(self.rows / self.batch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.split(torch.randperm(self.rows), self.batch))


class Bare:
    """The limit for tensors: a permutation and one gather per column."""

    def __init__(self, dataset: TensorDataset, batch: int) -> None:
        self.whole = WholeBatches(dataset.tensors)
        self.batch = batch

    def __iter__(self) -> Iterator[Pair]:
        for chosen in torch.split(torch.randperm(len(self.whole)), self.batch):
            yield self.whole[chosen]


class BarePython:
    """The limit for a Python dataset: a loop around it and default_collate."""

    def __init__(self, dataset: PythonRows, batch: int) -> None:
        self.dataset, self.batch = dataset, batch

    def __iter__(self) -> Iterator[object]:
        order = torch.randperm(len(self.dataset)).tolist()
        for at in range(0, len(order), self.batch):
            yield default_collate(
                [self.dataset[index] for index in order[at : at + self.batch]]
            )


def torch_plain(dataset: Dataset[Any], batch: int) -> Iterable[object]:
    return DataLoader(dataset, batch, shuffle=True)


def torch_lists(
    dataset: TensorDataset, batch: int, *, indexed: bool = True, workers: int = 0
) -> Iterable[object]:
    """Build the documented recipe: a BatchSampler as the sampler.

    Args:
        dataset: The columns.
        batch: Rows per batch.
        indexed: Turn the list into a tensor and gather once per column; else index
            with the list itself, which costs half as much again.
        workers: Persistent worker processes.
    """
    return DataLoader(
        WholeBatches(dataset.tensors) if indexed else dataset,
        sampler=BatchSampler(RandomSampler(dataset), batch, drop_last=False),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def torch_tensors(
    dataset: TensorDataset, batch: int, *, workers: int = 0
) -> Iterable[object]:
    """Build the fastest path through torch: index tensors, and nothing to convert."""
    return DataLoader(
        WholeBatches(dataset.tensors),
        sampler=PermutationBatches(len(dataset), batch),
        batch_size=None,
        collate_fn=unchanged,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def unchanged(batch: object) -> object:
    return batch


def ours(dataset: Dataset[Any], batch: int) -> Iterable[object]:
    import aioloader  # noqa: PLC0415

    loader: Iterable[object] = aioloader.DataLoader(dataset, batch, shuffle=True)
    return loader


def count(loader: Iterable[object], limit: int) -> int:
    batches = 0
    for _ in loader:
        batches += 1
        if batches == limit:
            break
    return batches


async def count_async(loader: Any) -> int:
    batches = 0
    async for _ in loader:
        batches += 1
    return batches


def count_in_loop(loader: Iterable[object], limit: int) -> int:  # noqa: ARG001
    return asyncio.run(count_async(loader))


def epochs(
    make: Make,
    batch: int,
    options: Options,
    *,
    python: bool = False,
    counter: Callable[[Iterable[object], int], int] = count,
    limit: int = 0,
) -> Figures:
    """Time whole epochs, including their start; return the median one.

    A small dataset goes through a loader of the same kind first, as warm-up.
    """
    source = PythonRows if python else (lambda n: TensorDataset(*make_columns(n)))
    rows = (PYTHON_ROWS if python else ROWS) // (10 if options.quick else 1)
    counter(make(source(WARM_ROWS), batch), limit)
    loader = make(source(rows), batch)
    expected = min(limit or rows, math.ceil(rows / batch))
    seen: list[float] = []
    gc.collect()
    with Meter() as meter:
        while sum(seen) < SECONDS and len(seen) < 30:
            start = time.perf_counter()
            batches = counter(loader, limit)
            seen.append(time.perf_counter() - start)
            if batches != expected:
                raise RuntimeError(f"{batches} batches, {expected} expected")
    epoch = statistics.median(seen)
    return {
        "us": epoch / expected * 1e6,
        "epoch_ms": epoch * 1e3,
        "cpu": meter.cpu / meter.wall,
    }


def tensor_contenders(batch: int) -> dict[str, Contender]:
    plain = f"{batch}: torch"

    def one(make: Make, *, extra: bool = False, **more: Any) -> Contender:
        return Contender(
            partial(epochs, make, batch, **more), against=plain, extra=extra
        )

    workers: dict[str, Any] = {"extra": True, "limit": WORKER_BATCHES}
    return {
        f"{batch}: limit": one(Bare),
        f"{batch}: aioloader for": one(ours),
        f"{batch}: aioloader async for": one(ours, counter=count_in_loop),
        plain: one(torch_plain),
        f"{batch}: torch lists": one(torch_lists),
        f"{batch}: torch tensors": one(torch_tensors),
        f"{batch}: torch lists unconverted": one(
            partial(torch_lists, indexed=False), extra=True
        ),
        f"{batch}: torch lists 2 workers": one(
            partial(torch_lists, workers=2), **workers
        ),
        f"{batch}: torch tensors 2 workers": one(
            partial(torch_tensors, workers=2), **workers
        ),
    }


def python_contenders() -> dict[str, Contender]:
    def one(make: Make, **more: Any) -> Contender:
        run = partial(epochs, make, 64, python=True, **more)
        return Contender(run, against="python: limit")

    return {
        "python: limit": one(BarePython),
        "python: aioloader for": one(ours),
        "python: aioloader async for": one(ours, counter=count_in_loop),
        "python: torch": one(torch_plain),
    }


def targets() -> list[Target]:
    promised = []
    for batch, sync, asynchronous in ((64, 8, 4), (1024, 20, 10)):
        mine = f"{batch}: aioloader "
        recipes = [f"{batch}: torch {kind}" for kind in ("lists", "tensors")]
        promised += [
            Target(f"{mine}for", [f"{batch}: torch"], sync),
            Target(f"{mine}async for", [f"{batch}: torch"], asynchronous),
            *(Target(f"{mine}for", [recipe], 1.5) for recipe in recipes),
        ]
    return [*promised, Target("python: aioloader for", ["python: torch"], 1)]


QUESTION = Question(
    name="overhead",
    text="What does the loader itself cost? A shuffled epoch over rows in memory.",
    contenders=tensor_contenders(64) | tensor_contenders(1024) | python_contenders(),
    metrics=[
        Metric("us", "us/batch", ",.1f", higher=False),
        Metric("epoch_ms", "ms/epoch", higher=False),
        Metric("cpu", "cores used", ".2f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=targets(),
)

if __name__ == "__main__":
    main(QUESTION)
