"""Memory: what does a dataset cost that four workers read, forked and by fork server?

An array of 1 GB (``float32[262144, 1024]`` with 1 GB = 2**30), the same as an
``np.memmap``, and a list of 2M strings; one epoch, in order. The list is also read
shuffled, because then each worker writes reference counts into all of its pages. The
figure is the peak PSS, in units of 2**30 bytes, of this process and all its
descendants, read at each quarter of the epoch and at its last batch, while the workers
live; a page that several processes map counts once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from harness import Contender, Figures, Limit, Metric, Options, Question, main
from meter import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

WORKERS = 4
COLUMNS = 1024
ROWS = 262_144
STRINGS = 2_000_000
BATCH = 256
GB = 2**30
STARTS = ("fork", "spawn", "forkserver")


class Rows(Dataset[torch.Tensor]):
    """Rows of an array, or of a file mapped into memory."""

    batch = BATCH

    def __init__(self, rows: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index]))


class Names(Dataset[int]):
    """A list of file names, each touched once: its reference count is written."""

    batch = 8 * BATCH

    def __init__(self, count: int) -> None:
        self.names = [f"images/{number:07d}.jpg" for number in range(count)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


class Shuffled(Names):
    """The same list, read in a random order."""


@contextlib.contextmanager
def array(share: int) -> Iterator[Rows]:
    yield Rows(np.ones((ROWS // share, COLUMNS), dtype=np.float32))


@contextlib.contextmanager
def memmap(share: int) -> Iterator[Rows]:
    """Write the file and map it; it is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path, shape = Path(folder, "rows.f32"), (ROWS // share, COLUMNS)
        written = np.memmap(path, np.float32, "w+", shape=shape)
        written[:] = 1
        written.flush()
        del written
        yield Rows(np.memmap(path, np.float32, "r", shape=shape))


@contextlib.contextmanager
def strings(share: int) -> Iterator[Names]:
    yield Names(STRINGS // share)


@contextlib.contextmanager
def shuffled(share: int) -> Iterator[Names]:
    yield Shuffled(STRINGS // share)


def pss_bytes() -> int:
    """Add up the PSS of this process and its descendants."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(one.split()[1]) for one in lines if one[:4] == "Pss:")
    return total * 1024


def torch_loader(dataset: Any, *, start: str) -> Iterable[Any]:
    return DataLoader(
        dataset,
        dataset.batch,
        shuffle=isinstance(dataset, Shuffled),
        num_workers=WORKERS,
        multiprocessing_context=start,
    )


def ours(dataset: Any, **settings: Any) -> Iterable[Any]:
    import aioloader  # noqa: PLC0415

    loader: Iterable[Any] = aioloader.DataLoader(
        dataset,
        dataset.batch,
        shuffle=isinstance(dataset, Shuffled),
        num_workers=WORKERS,
        **settings,
    )
    return loader


def run(
    make: Callable[[Any], Iterable[Any]],
    open_dataset: Callable[[int], AbstractContextManager[Any]],
    options: Options,
) -> Figures:
    """Read one epoch, and the memory at four points of it."""
    # four workers are the question, whatever the number of cores
    warnings.filterwarnings("ignore", "This DataLoader will create")
    start = time.perf_counter()
    with open_dataset(16 if options.quick else 1) as dataset:
        before = pss_bytes()
        last = -(-len(dataset) // dataset.batch)
        points = [last * quarter // 4 for quarter in (1, 2, 3, 4)]
        seen = []
        for number, _ in enumerate(make(dataset), 1):
            if number in points:
                seen.append(pss_bytes())
    if number != last:
        raise RuntimeError(f"{number} batches, {last} expected")
    return {
        "pss_gb": max(seen) / GB,
        "last_gb": seen[-1] / GB,
        "before_gb": before / GB,
        "seconds": time.perf_counter() - start,
    }


def contenders() -> dict[str, Contender]:
    loaders: dict[str, Callable[[Any], Iterable[Any]]] = {
        "aioloader": ours,
        **{f"torch {start}": partial(torch_loader, start=start) for start in STARTS},
        "aioloader forkserver": partial(ours, multiprocessing_context="forkserver"),
    }
    # these pickle a copy for each worker: half a minute for a constant result
    slow = ("torch spawn", "torch forkserver")
    datasets = {
        "array": array,
        "memmap": memmap,
        "strings": strings,
        "strings shuffled": shuffled,
    }
    return {
        f"{kind}: {name}": Contender(
            partial(run, make, dataset),
            against=f"{kind}: torch fork",
            max_rounds=1 if name in slow and "strings" not in kind else 3,
        )
        for kind, dataset in datasets.items()
        for name, make in loaders.items()
    }


QUESTION = Question(
    name="memory",
    text="What does a dataset cost that four workers read? PSS of all processes",
    contenders=contenders(),
    metrics=[
        Metric("pss_gb", "peak GB", ".2f", higher=False),
        Metric("last_gb", "last batch GB", ".2f", higher=False),
        Metric("before_gb", "before GB", ".2f", higher=False),
        Metric("seconds", "s", ".1f", higher=False),
    ],
    limits=[
        Limit("array: aioloader", "pss_gb", 1.3),
        Limit("array: aioloader forkserver", "pss_gb", 2.1),
        Limit("memmap: aioloader", "pss_gb", 1.3),
        Limit("memmap: aioloader forkserver", "pss_gb", 1.3),
        Limit("strings: aioloader", "pss_gb", 1.0),
        Limit("strings: aioloader forkserver", "pss_gb", 1.0),
    ],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
