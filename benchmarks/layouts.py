"""The samples that go through worker processes, in a module that spawn can import.

They are in memory, so only the transfer from worker to consumer is measured. Each
process makes its rows at the first access: no contender transfers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

# More than any contender delivers: an epoch never ends while the clock runs.
ENDLESS = 8_000_000
KEYS = tuple(f"field{number}" for number in range(20))
Views = list[torch.Tensor]


class Ready(Dataset[Any]):
    """Samples in a list or a tensor, made once per process."""

    distinct = 4096

    def __init__(self, length: int = ENDLESS) -> None:
        self._length = length
        self._rows: Any = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._rows is None:
            self._rows = self._make(torch.Generator().manual_seed(0))
        return self._rows[index % self.distinct]

    def _make(self, generator: torch.Generator) -> Any:
        raise NotImplementedError


class ImageRows(Ready):
    """Rows of one tensor of 77 MB in memory, ``uint8[3, 224, 224]`` each."""

    distinct = 512

    def _make(self, generator: torch.Generator) -> torch.Tensor:
        shape = (self.distinct, 3, 224, 224)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


class FloatRows(Ready):
    """Rows of ``width`` numbers, ``float32``."""

    distinct = 512

    def __init__(self, width: int, length: int = ENDLESS) -> None:
        super().__init__(length)
        self._width = width

    def _make(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.distinct, self._width, generator=generator)


class PairRows(Ready):
    """Pairs of a ``float32[64]`` and an int."""

    def _make(self, generator: torch.Generator) -> list[tuple[torch.Tensor, int]]:
        features = torch.randn(self.distinct, 64, generator=generator)
        return [(row, at % 10) for at, row in enumerate(features)]


class DictRows(Ready):
    """Dicts of 20 tensors, ``float32[8]`` each."""

    distinct = 1024

    def _make(self, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
        values = torch.randn(self.distinct, len(KEYS), 8, generator=generator)
        return [dict(zip(KEYS, row, strict=True)) for row in values]


class Window(Sampler[int]):
    """The indices from ``start`` to ``stop``; a loader keeps it between epochs."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


@dataclass(frozen=True)
class Case:
    """One kind of batch: how it is made, and its layout for workers without a loader.

    ``fill`` collates samples into views of memory that is reused.
    """

    name: str
    dataset: Callable[[], Ready]
    batch: int
    layout: Sequence[tuple[tuple[int, ...], torch.dtype]]
    fill: Callable[[list[Any], Views], object]

    def empty(self) -> Views:
        """Return fresh tensors for one batch."""
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.layout]

    def arrays(self, samples: list[Any]) -> list[np.ndarray[Any, Any]]:
        """Collate to numpy arrays, which cross a queue as bytes, not as descriptors."""
        views = self.empty()
        self.fill(samples, views)
        return [view.numpy() for view in views]


def fill_rows(samples: list[torch.Tensor], views: Views) -> None:
    torch.stack(samples, out=views[0])


def fill_pairs(samples: list[tuple[torch.Tensor, int]], views: Views) -> None:
    features, labels = zip(*samples, strict=True)
    torch.stack(features, out=views[0])
    views[1].copy_(torch.tensor(labels))


def fill_dicts(samples: list[dict[str, torch.Tensor]], views: Views) -> None:
    for key, view in zip(KEYS, views, strict=True):
        torch.stack([sample[key] for sample in samples], out=view)


IMAGES = Case("38 MB", ImageRows, 256, [((256, 3, 224, 224), torch.uint8)], fill_rows)
PAIRS = Case(
    "pairs",
    PairRows,
    64,
    [((64, 64), torch.float32), ((64,), torch.int64)],
    fill_pairs,
)
DICTS = Case("dicts", DictRows, 64, [((64, 8), torch.float32)] * 20, fill_dicts)
SMALL = Case("1 KB", partial(FloatRows, 4), 64, [((64, 4), torch.float32)], fill_rows)
MIDDLE = Case(
    "150 KB", partial(FloatRows, 600), 64, [((64, 600), torch.float32)], fill_rows
)
