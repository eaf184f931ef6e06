"""Index batches cut from an order with random access, starting at any batch.

Torch's samplers yield Python integers one by one, from a list of the whole permutation.
The exact torch classes are recognised here and cut from one index tensor instead; a
``ShuffledIndices`` is computed in blocks. Nothing before the start is computed.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader._order.generators import Draws
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import WHOLE, Part

State: TypeAlias = dict[str, Any]
Chunk: TypeAlias = torch.Tensor | range
Indices: TypeAlias = Chunk | ShuffledIndices

# Indices made at a time: a block of ``ShuffledIndices`` takes under 1 ms.
_BLOCK, _SHUFFLED_BLOCK = 1 << 15, 1 << 13
# Views of a block made at a time: cheaper than one by one, and takes only 0.1 ms.
_VIEWS = 256
# Indices up to which a permutation is drawn in about a millisecond.
QUICK = 1 << 16
_DEEPEST = 8  # limit on wrappers around a sampler


class IndexBatch(NamedTuple):
    """The request for one batch.

    Attributes:
        number: Position of the (global) batch in the epoch, from 0.
        first: Position of its first sample in the order of all ranks.
        indices: The sampler's indices.
        padding: How many of them, the last ones, are padding.
        state: The sampler's state after this batch, if it has one.
    """

    number: int
    first: int
    indices: Any
    padding: int = 0
    state: Any = None


class IndexOrder:
    """Batches cut from an order with random access.

    Args:
        sampler: A sampler for which ``is_known_by_place`` is true.
        size: Samples per batch.
        drop_last: Whether to drop a short last batch.
        part: The rank's part.
        saved: The result of ``state``, or empty.

    Attributes:
        pulled: 1 once its end was drawn.
    """

    end: State | None = None

    def __init__(
        self, sampler: Any, size: int, part: Part, saved: State, *, drop_last: bool
    ) -> None:
        self.pulled: int = saved.get("pulled", 0)
        self._sampler = sampler
        self._cutting = Cutting(size, part, drop_last)
        self._draws: Draws | None = None
        if isinstance(sampler, RandomSampler):
            self._draws = Draws(sampler, saved)
        self._shuffled: ShuffledIndices | None = None

    def prepare(self, epoch: int | None = None) -> None:
        """Draw a seed, if the order has one, once; no permutation yet.

        Args:
            epoch: The epoch of ``ShuffledIndices``; None: its current one.
        """
        if self._draws is not None:
            self._draws.prepare()
        if type(self._sampler) is ShuffledIndices and self._shuffled is None:
            self._shuffled = self._sampler.copy()  # a later set_epoch is for the next
            if epoch is not None:
                self._shuffled.set_epoch(epoch)

    def draws_long(self, number: int, start: int) -> bool:
        """Tell whether it may take milliseconds to draw a request.

        Args:
            number: The request's number.
            start: Number of the first request.
        """
        if self._draws is None or len(self._sampler) <= QUICK:
            return False
        whole = self._cutting.size * self._cutting.part.world_size
        return number == start or number >= len(self._sampler) // whole

    def batches(
        self, start: int = 0, _after: Any = None, *, as_lists: bool = True
    ) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on; called once.

        Args:
            start: Number of the first batch.
            as_lists: Whether indices are lists, or tensors and ranges.
        """
        n, size = len(self._sampler), self._cutting.size
        self.prepare()
        indices: Indices = self._shuffled or range(n)
        if self._draws is not None:
            indices = _permutation(n, self._draws.begin())
        # Torch's sampler draws another, unused permutation at its end: with a short
        # last batch, which runs into the end, or else after the last one.
        short = n // size if n % size and not self._cutting.drop_last else None
        for batch in cut(indices, self._cutting, start, as_lists=as_lists):
            if batch.number == short:
                self._end()
            yield batch
        self._end()

    def _end(self) -> None:
        """Draw the unused permutation, once, from the user's generator."""
        own = None if self._draws is None else self._sampler.generator
        if own is not None and not self.pulled:
            _permutation(len(self._sampler), own)
        self.pulled = 1

    def state(self) -> State:
        """Return the state that restores the order, ready for JSON."""
        drawn = {} if self._draws is None else self._draws.state()
        known = self._sampler if self._shuffled is None else self._shuffled
        return described(known) | drawn


@dataclass(frozen=True)
class Cutting:
    """How an order is cut into one rank's batches.

    Attributes:
        size: Samples per batch of one rank.
        part: The rank, the number of ranks, and what happens to the tail.
        drop_last: Whether to drop a short last global batch.
    """

    size: int
    part: Part = WHOLE
    drop_last: bool = False


def cut(
    indices: Indices, cutting: Cutting, start: int = 0, *, as_lists: bool = False
) -> Iterator[IndexBatch]:
    """Yield one rank's batches.

    Args:
        indices: The order of all ranks.
        cutting: How it is cut.
        start: Number of the first batch.
        as_lists: Whether indices are lists, or else tensors and ranges.
    """
    part = cutting.part
    is_alone = part.world_size == 1
    n, whole = len(indices), cutting.size * part.world_size
    stop = n - n % whole if cutting.drop_last else n
    whole_order: Any = indices
    is_whole = type(indices) is not ShuffledIndices
    block_size = _BLOCK if is_whole else _SHUFFLED_BLOCK
    step = max(1, block_size // whole) * whole
    for at in range(start * whole, stop, step):
        end = min(at + step, stop)
        block: Any = whole_order[at:end] if is_whole else _taken(indices, at, end)
        if as_lists and is_alone:
            block = list(block) if type(block) is range else block.tolist()
        if isinstance(block, torch.Tensor):
            pieces = _views(block, whole)
        else:
            pieces = (block[i : i + whole] for i in range(0, len(block), whole))
        for number, found in enumerate(pieces, at // whole):
            if is_alone:
                yield IndexBatch(number, number * whole, found)
                continue
            chunk, padding = _own_part(indices, found, number * whole, part)
            if len(chunk):
                own = _listed(chunk) if as_lists else chunk
                yield IndexBatch(number, number * whole + part.rank, own, padding)


def is_known_by_place(sampler: Any) -> bool:
    """Tell whether the order can be cut: for torch's exact classes, and for ours."""
    if type(sampler) is RandomSampler:
        is_whole = sampler.num_samples == len(sampler.data_source)
        return is_whole and not sampler.replacement
    return type(sampler) in {SequentialSampler, ShuffledIndices}


def described(sampler: Any) -> State:
    """Return what is known of a sampler before it is iterated."""
    try:
        length = len(sampler)
    except Exception:  # noqa: BLE001  (torch iterates without asking for it)
        length = None
    state: State = {"sampler": type(sampler).__name__, "length": length}
    if isinstance(sampler, ShuffledIndices):
        state |= {"seed": sampler.seed, "epoch": sampler.epoch}
    for part in nested(sampler):
        if type(part) in {RandomSampler, WeightedRandomSampler}:
            state["replacement"] = part.replacement
    return state


def _permutation(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw on the generator's device, whatever torch's default; return on the CPU."""
    return torch.randperm(n, generator=generator, device=generator.device).cpu()


def contents_of(sampler: Any) -> State:
    """Return a checksum of the indices or weights that an epoch is drawn from.

    They may change from epoch to epoch, but not within one. Empty if there are none, or
    they are no numbers.
    """
    values: Any
    for part in nested(sampler):
        if type(part) is SubsetRandomSampler:
            values, dtype = part.indices, "<i8"
        elif type(part) is WeightedRandomSampler:
            values, dtype = part.weights, "<f8"
        else:
            continue
        try:
            return {"contents": zlib.crc32(np.ascontiguousarray(values, dtype).data)}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return {}
    return {}


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those it wraps, by the attributes that wrappers use."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is one for one in seen) or len(seen) == _DEEPEST:
            continue
        seen.append(part)
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]


def epoch_of(part: Any) -> int | None:
    """Return the epoch of a sampler, perhaps a wrapped one, or of a dataset.

    None if it cannot be read as ``epoch`` and set with ``set_epoch``.
    """
    counts = _with_epoch(part)
    return None if counts is None else int(counts.epoch)


def set_epoch(part: Any, epoch: int | None) -> None:
    """Set the epoch that ``epoch_of`` returned, if it did."""
    counts = _with_epoch(part)
    if counts is not None and epoch is not None:
        counts.set_epoch(epoch)


def _with_epoch(part: Any) -> Any:
    for one in nested(part):
        is_known = type(getattr(one, "epoch", None)) is int
        if is_known and callable(getattr(one, "set_epoch", None)):
            return one
    return None


def _own_part(
    indices: Indices, found: Chunk, first: int, part: Part
) -> tuple[Chunk, int]:
    """Return our part of a global batch, and how many of its samples are padding.

    Args:
        indices: The order of all ranks.
        found: The global batch.
        first: Its position in the order.
        part: Which part is ours.
    """
    mine, padding = part.share(len(found))
    chunk: Any = found[part.rank :: part.world_size][:mine]
    if padding:
        # As in torch, the order wraps around at its end.
        place = (first + part.rank + mine * part.world_size) % len(indices)
        again = _taken(indices, place, place + 1)
        chunk = torch.tensor([*_listed(chunk), *_listed(again)], device="cpu")
    return chunk, padding


def _views(block: torch.Tensor, size: int) -> Iterator[Any]:
    for at in range(0, len(block), size * _VIEWS):
        yield from block[at : at + size * _VIEWS].split(size)  # type: ignore[no-untyped-call]


def _taken(indices: Indices, start: int, stop: int) -> Chunk:
    if type(indices) is ShuffledIndices:
        return torch.from_numpy(indices.take(start, stop))
    chunk: Any = indices
    part: Chunk = chunk[start:stop]
    return part


def _listed(chunk: Chunk) -> list[int]:
    return list(chunk) if type(chunk) is range else chunk.tolist()
