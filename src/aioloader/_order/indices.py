"""Index batches cut from an order that is known by place, from any batch on.

Torch's samplers yield Python integers one by one, from a list of the whole permutation.
The exact torch classes are recognised here and cut from one index tensor instead; a
``ShuffledIndices`` is computed in blocks. Whatever comes first is not looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import WHOLE, Part

Chunk: TypeAlias = torch.Tensor | range

# Indices of an order that are computed at a time.
_BLOCK = 1 << 15
# Views of a block that are made at a time: cheaper than one by one, and in 0.1 ms.
_VIEWS = 256


class IndexBatch(NamedTuple):
    """The request for one batch.

    Attributes:
        number: Place of the (global) batch in the epoch, from 0.
        first: Place of its first sample in the order of all ranks.
        indices: What the sampler gave.
        padding: How many of them, the last ones, only stand in.
        state: Of a sampler that has one, behind this batch.
    """

    number: int
    first: int
    indices: Any
    padding: int = 0
    state: Any = None


class Indices(Protocol):
    """An order whose indices can be looked up by place."""

    def __len__(self) -> int:
        """Return the number of indices."""

    def take(self, start: int, stop: int) -> Any:
        """Return the indices at places ``start`` to ``stop``, as an array or range."""


class Ascending:
    """The order ``0, 1, 2, ...``."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def take(self, start: int, stop: int) -> range:
        """Return the indices from ``start`` to ``stop``."""
        return range(start, stop)


class Permuted:
    """The order of a permutation that is in memory."""

    def __init__(self, permutation: torch.Tensor) -> None:
        self._permutation = permutation

    def __len__(self) -> int:
        return len(self._permutation)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of the permutation."""
        return self._permutation[start:stop]


def is_known_by_place(sampler: Any) -> bool:
    """Tell whether the order of ``sampler`` can be cut: torch's exact classes, ours."""
    if type(sampler) is RandomSampler:
        is_whole = sampler.num_samples == len(sampler.data_source)
        return is_whole and not sampler.replacement
    return type(sampler) in {SequentialSampler, ShuffledIndices}


@dataclass(frozen=True)
class Cutting:
    """How an order is cut into one rank's batches.

    Attributes:
        size: Samples of a batch of one rank.
        part: Which rank, of how many, and what becomes of the tail.
        drop_last: Whether a last global batch that is not whole is left out.
        as_lists: Whether indices are lists of Python integers, or tensors and ranges.
    """

    size: int
    part: Part = WHOLE
    drop_last: bool = False
    as_lists: bool = False


def cut(indices: Indices, cutting: Cutting, start: int = 0) -> Iterator[IndexBatch]:
    """Yield one rank's batches.

    Args:
        indices: The order of all ranks.
        cutting: How it is cut.
        start: Number of the first batch.
    """
    part, size, as_lists = cutting.part, cutting.size, cutting.as_lists
    n, whole = len(indices), size * part.world_size
    stop = n - n % whole if cutting.drop_last else n
    is_alone = part.world_size == 1
    step = max(1, _BLOCK // whole) * whole
    for at in range(start * whole, stop, step):
        end = min(at + step, stop)
        block: Any = _as_chunk(indices.take(at, end))
        if as_lists and is_alone:
            block = _listed(block)
        for first, found in zip(
            range(at, end, whole), _pieces(block, whole), strict=True
        ):
            number = first // whole
            if is_alone:
                yield IndexBatch(number, first, found)
                continue
            for batch in _dealt(indices, found, number, first, part):
                dealt = _listed(batch.indices) if as_lists else batch.indices
                yield batch._replace(indices=dealt)


def _dealt(
    indices: Indices, found: Chunk, number: int, first: int, part: Part
) -> Iterator[IndexBatch]:
    """Yield our part of a global batch, if we have one."""
    mine, padding = part.share(len(found))
    chunk: Any = found[part.rank :: part.world_size][:mine]
    if padding:
        # As in torch, the order begins anew behind its end.
        place = (first + part.rank + mine * part.world_size) % len(indices)
        stand_in = _as_chunk(indices.take(place, place + 1))
        chunk = torch.tensor([*_listed(chunk), *_listed(stand_in)])
    if len(chunk):
        yield IndexBatch(number, first + part.rank, chunk, padding)


def _pieces(block: Any, size: int) -> Iterator[Any]:
    """Return parts of a block, one after the other; views, if it is a tensor."""
    if not isinstance(block, torch.Tensor):
        yield from (block[at : at + size] for at in range(0, len(block), size))
        return
    for at in range(0, len(block), size * _VIEWS):
        yield from block[at : at + size * _VIEWS].split(size)  # type: ignore[no-untyped-call]


def _as_chunk(taken: Any) -> Chunk:
    is_chunk = isinstance(taken, (torch.Tensor, range))
    return taken if is_chunk else torch.from_numpy(taken)


def _listed(chunk: Chunk) -> list[int]:
    return list(chunk) if type(chunk) is range else chunk.tolist()
