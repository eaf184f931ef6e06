"""Data, loaders of both engines, and records, for the cases of all packages.

Torch's loader reads a dataset that adds ``SHIFT`` to each value; ours reads the plain
one and has a ``transform`` that adds it. Equal batches then prove that each engine ran:
a framework that fell back to torch's loader delivers values without the shift.
"""

import contextlib
import dataclasses
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import aioloader
from aioloader.datasets import from_iterable

SHIFT = 1000


def shift(sample: Any) -> Any:
    """Add ``SHIFT`` to a number, or to the item ``x`` of a dict."""
    if isinstance(sample, dict):
        return {**sample, "x": sample["x"] + SHIFT}
    return sample + SHIFT


class Numbers(Dataset[Any]):
    """The numbers below ``n``, as tensors of one element."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return number(index)


class AsyncNumbers(Numbers):
    async def __getitem__(self, index: int) -> torch.Tensor:
        return number(index)


class Stream(IterableDataset[Any]):
    """The same as a stream; each worker reads every ``num_workers``-th number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.n, step):
            yield torch.tensor([float(index)])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Shifted(Dataset[Any]):
    """A dataset with ``transform=shift`` applied, for torch's loader."""

    def __init__(self, inner: Any, shift: Any = shift) -> None:
        self.inner, self.shift = inner, shift

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.shift(self.inner[index])


class ShiftedStream(IterableDataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return map(shift, self.inner)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)


class SizedShiftedStream(ShiftedStream):
    def __len__(self) -> int:
        return len(self.inner)


class Part(IterableDataset[Any]):
    """A rank's part of numbers, as an ``epoch_length`` gives it, for torch's loader."""

    def __init__(self, n: int, rank: int, world: int) -> None:
        self.n, self.rank, self.world = n, rank, world

    def __len__(self) -> int:
        return self.n // self.world

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.rank, self.n, self.world):
            yield torch.tensor([float(index)])


def number(index: int) -> torch.Tensor:
    return torch.tensor([float(index)])


def plain(value: Any) -> Any:
    """Return ``value`` ready for JSON; floats as they are, bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def batches(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def stopped(loader: Any, steps: int) -> tuple[list[Any], Any]:
    """Return the first batches of an epoch, and the state after them."""
    iterator = iter(loader)
    head = [plain(next(iterator)) for _ in range(steps)]
    return head, loader.state_dict()


def resumed(loader: Any, state: Any, epochs: int = 1) -> list[Any]:
    """Load a state; return the rest of its epoch, and further epochs."""
    loader.load_state_dict(state)
    return [batches(loader) for _ in range(epochs)]


def seed(number: int = 7) -> None:
    """Seed all generators of the process."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@dataclasses.dataclass
class Kit:
    """One engine, in one of ``world`` processes."""

    engine: str
    rank: int
    world: int
    folder: Path

    @property
    def is_ours(self) -> bool:
        return self.engine == "ours"

    @property
    def cls(self) -> Any:
        return aioloader.DataLoader if self.is_ours else torch.utils.data.DataLoader

    def data(self, dataset: Any) -> Any:
        """Return the dataset for this engine's loader; torch's has the shift in it."""
        if self.is_ours:
            return dataset
        if not isinstance(dataset, IterableDataset):
            return Shifted(dataset)
        is_sized = hasattr(dataset, "__len__")
        return (SizedShiftedStream if is_sized else ShiftedStream)(dataset)

    def options(self) -> dict[str, Any]:
        return {"transform": shift} if self.is_ours else {}

    def loader(
        self, dataset: Any, *args: Any, stateful: bool = False, **kw: Any
    ) -> Any:
        """Return a loader of this engine over ``dataset``, with the shift."""
        cls = self.cls
        if stateful and not self.is_ours:
            from torchdata.stateful_dataloader import StatefulDataLoader

            cls = StatefulDataLoader
        return cls(self.data(dataset), *args, **kw, **self.options())

    def stream_loader(self, workers: int) -> Any:
        """Return a loader of this rank's part of one of our streams, of three batches.

        Torch's has no workers: each would read all of the part.
        """
        n = 12 * self.world
        if not self.is_ours:
            return self.loader(Part(n, self.rank, self.world), 4)
        stream = from_iterable(range(n)).map(number).epoch_length(n)
        return self.loader(stream, 4, rank="auto", num_workers=workers)

    def merged(self, state: Any) -> Any:
        """Return one state of all ranks."""
        states: list[Any] = [state]
        if self.world > 1:
            states = [None] * self.world
            torch.distributed.all_gather_object(states, state)
        return aioloader.merge_states(states)

    def prepared(self, accelerator: Any, *objects: Any) -> Any:
        """Return the objects, prepared by accelerate."""
        if not self.is_ours:
            return accelerator.prepare(*objects)
        from aioloader.accelerate import prepare

        return prepare(accelerator, *objects)

    def check_engine(self, loader: Any) -> None:
        """Fail if a framework replaced a loader of ours by another class."""
        if self.is_ours:
            assert issubclass(type(loader), aioloader.DataLoader), type(loader)


class Cases:
    """The cases of a package, by name."""

    def __init__(self) -> None:
        self.all: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}

    def add(self, *grid: dict[str, Any]) -> Any:
        """Register a function, once for each set of arguments."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            for arguments in grid or ({},):
                words = [f"{key}={value}" for key, value in arguments.items()]
                name = " ".join([function.__name__, *words])
                self.all[name] = function, arguments
            return function

        return register


WORKERS = ({"workers": 0}, {"workers": 2})
KINDS = tuple(
    {"workers": workers, "kind": kind}
    for workers in (0, 2)
    for kind in ("map", "stream")
)


def dataset(kind: str, n: int = 23) -> Any:
    """Return a dataset of a kind."""
    if kind == "ours":
        return from_iterable(range(n)).map(number)
    makers = {"map": Numbers, "async": AsyncNumbers, "stream": Stream}
    return (makers | {"sized": SizedStream})[kind](n)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the frameworks' logs and warnings."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
