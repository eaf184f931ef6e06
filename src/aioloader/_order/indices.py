"""Index batches cut from an order with random access, starting at any batch.

Torch's samplers yield Python integers one by one, from a list of the whole permutation.
The exact torch classes are recognised here and cut from one index tensor instead; a
``ShuffledIndices`` is computed in blocks. Nothing before the start is computed.
"""

import zlib
from collections.abc import Iterator
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
from aioloader._order.ranks import Part

State: TypeAlias = dict[str, Any]
Chunk: TypeAlias = torch.Tensor | range
Indices: TypeAlias = Chunk | ShuffledIndices

# Indices made at a time: a block of ``ShuffledIndices`` takes under 1 ms.
_BLOCK, _SHUFFLED_BLOCK = 1 << 15, 1 << 13
# Views of a block made at a time: cheaper than one by one, and takes only 0.1 ms.
_VIEWS = 256
# Indices up to which a permutation is drawn in about a millisecond.
_QUICK = 1 << 16
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


class Order:
    """The index batches of one epoch, of one rank.

    Attributes:
        end: The final state of the sampler, if it has one.
        pulled: How far it was drawn, perhaps ahead of what was delivered.
    """

    def __init__(self, size: int | None, part: Part, pulled: int = 0) -> None:
        self._size = size
        self._part = part
        self._whole = (size or 1) * part.world_size  # units of a global batch
        self.end: State | None = None
        self.pulled = pulled

    def prepare(self, epoch: int | None = None, /) -> None:
        """Draw the contents of the state, once: a seed, but no permutation yet.

        ``ShuffledIndices`` are those of ``epoch``; None: of its current one.
        """

    def draws_long(self, _number: int, _start: int, /) -> bool:
        """Tell whether it may take milliseconds to draw a request, of all from one."""
        return False

    def batches(
        self, start: int = 0, after: State | None = None, /
    ) -> Iterator[IndexBatch]:
        """Yield the batches from number ``start`` on; called once.

        Args:
            start: Number of the first batch.
            after: The ``state`` of the batch before it.
        """
        raise NotImplementedError

    def state(self) -> State:
        """Return what makes the order again, ready for JSON; a stream has its own."""
        return {}

    def _own(self, found: Any) -> tuple[Any, int, int]:
        """Return our part of a global batch, how many are added, and what place has it.

        As in torch, the order wraps around at its end.
        """
        part = self._part
        mine, padding = part.share(len(found))
        units = found[part.rank :: part.world_size][:mine]
        return units, padding, part.rank + mine * part.world_size - len(found)


class IndexOrder(Order):
    """Batches cut from an order with random access; ``pulled`` is 1 after its end."""

    def __init__(
        self, sampler: Any, size: int, part: Part, saved: State, *, drop_last: bool
    ) -> None:
        super().__init__(size, part, saved.get("pulled", 0))
        self._sampler = sampler
        self._drop_last = drop_last
        is_random = isinstance(sampler, RandomSampler)
        self._draws = Draws(sampler, saved) if is_random else None
        self._shuffled: ShuffledIndices | None = None

    @staticmethod
    def suits(sampler: Any) -> bool:
        """Tell whether the order can be cut: torch's exact classes, and ours."""
        if type(sampler) is RandomSampler:
            is_whole = sampler.num_samples == len(sampler.data_source)
            return is_whole and not sampler.replacement
        return type(sampler) in {SequentialSampler, ShuffledIndices}

    def prepare(self, epoch: int | None = None, /) -> None:
        if self._draws is not None:
            self._draws.prepare()
        if type(self._sampler) is ShuffledIndices and self._shuffled is None:
            self._shuffled = self._sampler.copy()  # a later set_epoch is for the next
            if epoch is not None:
                self._shuffled.set_epoch(epoch)

    def draws_long(self, number: int, start: int, /) -> bool:
        """Tell whether a permutation is drawn: before the first one, and at the end."""
        if self._draws is None or len(self._sampler) <= _QUICK:
            return False
        return number == start or number >= len(self._sampler) // self._whole

    def batches(
        self, start: int = 0, _after: Any = None, /, *, as_lists: bool = True
    ) -> Iterator[IndexBatch]:
        """Yield the batches; indices are lists, or else tensors and ranges."""
        n, whole, rank = len(self._sampler), self._whole, self._part.rank
        is_alone = self._part.world_size == 1
        self.prepare()
        indices: Indices = self._shuffled or range(n)
        if self._draws is not None:
            indices = _permutation(n, self._draws.begin())
        # Torch's sampler draws another, unused permutation at its end: with a short
        # last batch, which runs into the end, or else after the last one.
        short = n // whole if n % whole and not self._drop_last else None
        stop = n - n % whole if self._drop_last else n
        whole_order: Any = indices
        is_whole = type(indices) is not ShuffledIndices
        size = _BLOCK if is_whole else _SHUFFLED_BLOCK
        step = max(1, size // whole) * whole
        for at in range(start * whole, stop, step):
            end = min(at + step, stop)
            block = whole_order[at:end] if is_whole else _taken(indices, at, end)
            if as_lists and is_alone:
                block = list(block) if type(block) is range else block.tolist()
            if isinstance(block, torch.Tensor):
                pieces = _views(block, whole)
            else:
                pieces = (block[i : i + whole] for i in range(0, len(block), whole))
            for number, found in enumerate(pieces, at // whole):
                if number == short:
                    self._end()
                if is_alone:
                    yield IndexBatch(number, number * whole, found)
                    continue
                own, padding, place = self._own(found)
                if padding:
                    again = _taken(indices, place % n, place % n + 1)
                    own = torch.tensor([*_listed(own), *_listed(again)], device="cpu")
                if len(own):
                    own = _listed(own) if as_lists else own
                    yield IndexBatch(number, number * whole + rank, own, padding)
        self._end()

    def _end(self) -> None:
        """Draw the unused permutation, once, from the user's generator."""
        own = None if self._draws is None else self._sampler.generator
        if own is not None and not self.pulled:
            _permutation(len(self._sampler), own)
        self.pulled = 1

    def state(self) -> State:
        known = self._sampler if self._shuffled is None else self._shuffled
        return described(known) | ({} if self._draws is None else self._draws.state())


def _permutation(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw on the generator's device, whatever torch's default; return on the CPU."""
    return torch.randperm(n, generator=generator, device=generator.device).cpu()


def _taken(indices: Indices, start: int, stop: int) -> Chunk:
    if type(indices) is ShuffledIndices:
        return torch.from_numpy(indices.take(start, stop))
    chunk: Any = indices
    part: Chunk = chunk[start:stop]
    return part


def _views(block: torch.Tensor, size: int) -> Iterator[Any]:
    for at in range(0, len(block), size * _VIEWS):
        yield from block[at : at + size * _VIEWS].split(size)  # type: ignore[no-untyped-call]


def _listed(chunk: Chunk) -> list[int]:
    return list(chunk) if type(chunk) is range else chunk.tolist()


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
