"""Index batches from orders with random access, and the random state of samplers.

Torch's samplers yield integers one by one. For torch's exact classes, batches are
sliced from one tensor or range instead. A ``SeekableOrder`` is computed in blocks, from
the start position on. To repeat an order, its seed is saved, or the state that the
sampler's generator had before the order was drawn (3.4 KB of text).
"""

import base64
import contextlib
import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader._order.permutation import KeyedOrder, SeekableOrder
from aioloader._order.ranks import RankPart
from aioloader._order.stream_states import checksum
from aioloader.protocols import set_epoch_of

State: TypeAlias = dict[str, Any]
WITH_GENERATOR = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}

# Indices made at a time; a block of a ``SeekableOrder`` takes about 1 ms.
_BLOCK, _SHUFFLED_BLOCK, _FIRST_BLOCK = 1 << 15, 1 << 13, 1 << 10
# Batches split from a block at a time: cheaper than singly, and takes only 0.1 ms.
_VIEWS = 256
# Indices up to which a permutation is drawn in about a millisecond.
_QUICK_LENGTH = 1 << 16
_MAX_NESTED = 8  # wrappers around a sampler
_MAX_SAMPLED = 1 << 8  # entries of a long list in its checksum


class IndexBatch(NamedTuple):
    """The request for one batch."""

    number: int  # position of the (global) batch in the epoch, from 0
    first: int  # position of its first sample in the order of all ranks
    indices: Any  # from the sampler
    padding: int = 0  # how many of the last indices are padding
    state: Any = None  # the sampler's state after this batch, if it has one


@dataclass(eq=False, repr=False)
class Order:
    """The index batches of one epoch on one rank; this base class is for streams.

    A stream's indices are endless positions, because only the stream knows its end.
    """

    size: int | None  # samples per batch of a rank; None: a sampler yields batches
    part: RankPart
    pulled: int = 0  # batches drawn, perhaps more than delivered
    end: State | None = field(default=None, init=False)  # a sampler's final state

    def prepare(self, epoch: int | None = None, /) -> None:
        """Draw the seed that ``state`` must include, but no permutation yet.

        ``epoch`` is the epoch to set in a ``KeyedOrder``; None keeps its current epoch.
        """

    def draws_slowly(self, _number: int, _start: int, /) -> bool:
        """Tell whether drawing request ``number`` may take milliseconds."""
        return False

    def batches(
        self, start: int = 0, _after: State | None = None, /
    ) -> Iterator[IndexBatch]:
        """Yield batches from number ``start`` on; ``_after``: the state before them."""
        return self.batches_of(itertools.count(start))

    def batches_of(self, numbers: Iterable[int]) -> Iterator[IndexBatch]:
        part = self.part
        whole = (self.size or 1) * part.world_size
        for number in numbers:
            first = number * whole
            positions = part.positions(first, first + whole)
            yield IndexBatch(number, positions.start, positions)

    def state(self) -> State:
        """Return a JSON-ready state that restores the order."""
        return {}

    @property
    def is_restorable(self) -> bool:
        """Whether a state determines the sampler's order in the next epoch."""
        return True

    def _rank_part(self, batch: Any) -> tuple[Any, int, int]:
        """Return this rank's part of a batch, the size of its padding, and a position.

        Padding repeats the order from that position, modulo the order's length.
        """
        part = self.part
        mine, padding = part.share(len(batch))
        units = batch[part.rank :: part.world_size][:mine]
        return units, padding, part.rank + mine * part.world_size - len(batch)


@dataclass(eq=False, repr=False, kw_only=True)
class IndexOrder(Order):
    """Batches sliced from an order with random access; ``pulled`` is 1 at the end."""

    sampler: Any
    drop_last: bool
    draws: "SamplerDraws | None"
    _seekable: SeekableOrder | None = field(default=None, init=False)

    def prepare(self, epoch: int | None = None, /) -> None:
        if self.draws is not None:
            self.draws.prepare()
        if isinstance(self.sampler, SeekableOrder) and self._seekable is None:
            self._seekable = self.sampler.copy()  # unaffected by a later set_epoch
            if epoch is not None:
                self._seekable.set_epoch(epoch)

    def draws_slowly(self, number: int, start: int, /) -> bool:
        """Tell whether a long permutation is drawn at request ``number``."""
        if self.draws is None or len(self.sampler) <= _QUICK_LENGTH:
            return False
        whole = (self.size or 1) * self.part.world_size
        return number == start or number >= len(self.sampler) // whole

    def batches(
        self, start: int = 0, _after: Any = None, /, *, as_lists: bool = True
    ) -> Iterator[IndexBatch]:
        """Yield batches of indices: lists if ``as_lists``, else tensors or ranges."""
        n, rank, is_alone = len(self.sampler), self.part.rank, self.part.world_size == 1
        whole = (self.size or 1) * self.part.world_size
        self.prepare()
        lazy = self._seekable
        listed = lazy.listed if lazy else _listed
        indices: Any = lazy or range(n)
        if self.draws is not None:
            indices = _permutation(n, self.draws.begin())
        # Torch's sampler draws another, unused permutation at its end: with a short
        # last batch, which reaches the end, or else after the last one.
        short = n // whole if n % whole and not self.drop_last else None
        stop = n - n % whole if self.drop_last else n
        low, size = start * whole, _FIRST_BLOCK if lazy else _BLOCK
        while low < stop:
            top = min(low + max(1, size // whole) * whole, stop)
            block = torch.from_numpy(lazy.take(low, top)) if lazy else indices[low:top]
            if as_lists and is_alone and not lazy:
                block = list(block) if type(block) is range else block.tolist()
            if isinstance(block, torch.Tensor):
                batches = _views(block, whole)
            else:
                batches = (block[i : i + whole] for i in range(0, len(block), whole))
            for number, batch in enumerate(batches, low // whole):
                if number == short:
                    self._draw_unused()
                own, padding = (batch, 0) if is_alone else self._padded(batch, indices)
                if len(own):
                    if as_lists and type(own) is not list:
                        own = listed(own)
                    yield IndexBatch(number, number * whole + rank, own, padding)
            low, size = top, _SHUFFLED_BLOCK if lazy else _BLOCK
        self._draw_unused()

    def _padded(self, batch: Any, indices: Any) -> tuple[Any, int]:
        """Return this rank's padded part of a global batch, and the padding's size."""
        own, padding, position = self._rank_part(batch)
        if padding:
            again = int(indices[position % len(indices)])
            own = torch.tensor([*_listed(own), again], device="cpu")
        return own, padding

    def _draw_unused(self) -> None:
        """Draw once the extra permutation that torch draws from a user's generator."""
        own = None if self.draws is None else self.sampler.generator
        if own is not None and not self.pulled:
            _permutation(len(self.sampler), own)
        self.pulled = 1

    def state(self) -> State:
        state = described(self.sampler if self._seekable is None else self._seekable)
        return state | ({} if self.draws is None else self.draws.state())


def _permutation(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a permutation on the generator's device, and return it on the CPU."""
    return torch.randperm(n, generator=generator, device=generator.device).cpu()


def _views(block: torch.Tensor, size: int) -> Iterator[Any]:
    for start in range(0, len(block), size * _VIEWS):
        yield from block[start : start + size * _VIEWS].split(size)  # type: ignore[no-untyped-call]


def _listed(chunk: torch.Tensor | range) -> list[int]:
    return list(chunk) if isinstance(chunk, range) else chunk.tolist()


def packed(state: torch.Tensor) -> State:
    """Return a CPU generator's state and seed, ready for JSON."""
    generator = torch.Generator()
    generator.set_state(state)
    # Every 32 random bits are followed by 32 zeros; only the zeros are compressible.
    random, zeros = state.numpy().view(np.uint32).reshape(-1, 2).T
    text = base64.b64encode(random.tobytes() + zlib.compress(zeros.tobytes(), 1))
    return {"seed": generator.initial_seed(), "state": text.decode()}


def unpacked(saved: State) -> torch.Tensor:
    data = base64.b64decode(saved["state"])
    half = torch.default_generator.get_state().numel() // 2
    data = data[:half] + zlib.decompress(data[half:])
    halves = np.frombuffer(data, np.uint32).reshape(2, -1).T
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.uint8).reshape(-1))


class SamplerDraws:
    """The seed or generator state from which a sampler draws one order.

    Samplers draw from their ``generator``, or else from the default one. ``saved`` is
    the result of an earlier ``state()``, or empty.
    """

    def __init__(self, sampler: Any, saved: State) -> None:
        own: torch.Generator | None = getattr(sampler, "generator", None)
        self._source = torch.default_generator if own is None else own
        self._is_drawn = sampler is not None
        is_random = type(sampler) is RandomSampler
        # Whether a user's generator, which the next epoch uses, draws more at the end.
        self.draws_at_end = is_random and own is not None
        self._draws_seed = is_random and own is None
        self._seed: int | None = saved.get("seed") if self._draws_seed else None
        # "before" in states: a user's sampler may draw nothing.
        is_torchs = type(sampler) in WITH_GENERATOR
        self._key = "generator" if own is not None or is_torchs else "before"
        self._saved: State | None = saved.get(self._key) if self._is_drawn else None
        self._before: torch.Tensor | None = None

    def prepare(self) -> None:
        if self._draws_seed and self._seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_()
            self._seed = int(drawn.item())

    def begin(self) -> torch.Generator:
        """Return the generator to draw from, in its state before the order is drawn.

        The generator is a new one if a seed or a saved state determines the order.
        """
        self.prepare()
        if self._seed is not None:
            return torch.Generator().manual_seed(self._seed)
        if self._saved is not None:
            copied = torch.Generator()
            copied.set_state(unpacked(self._saved))
            return copied
        if self._is_drawn and self._before is None:
            self._before = self._source.get_state()
        return self._source

    def begin_later(self) -> None:
        """Undo ``begin`` if nothing was drawn since: the sampler may draw later."""
        before = self._before
        if before is not None and torch.equal(before, self._source.get_state()):
            self._before = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Return a context in which the sampler draws a saved order again."""
        if self._saved is None:
            yield
            return
        now = self._source.get_state()
        self._source.set_state(unpacked(self._saved))
        try:
            yield
        finally:
            self._source.set_state(now)

    def state(self) -> State:
        """Return the JSON-ready random state before the order was drawn, if known."""
        if self._seed is not None:
            return {"seed": self._seed}
        if self._saved is not None:
            return {self._key: self._saved}
        return {} if self._before is None else {self._key: packed(self._before)}


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and what it wraps as ``sampler`` or ``batch_sampler``."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is s for s in seen) or len(seen) == _MAX_NESTED:
            continue
        seen.append(part)
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]


def described(sampler: Any) -> State:
    """Return a sampler's class, length and settings, which a load compares."""
    if isinstance(sampler, KeyedOrder):
        return {**sampler.described(), "epoch": sampler.epoch}
    try:
        length = len(sampler)
    except Exception:  # noqa: BLE001  (torch iterates without asking for it)
        length = None
    state: State = {"sampler": type(sampler).__name__, "length": length}
    for part in nested(sampler):
        if type(part) in {RandomSampler, WeightedRandomSampler}:
            state["replacement"] = part.replacement
        elif type(part) is DistributedSampler:
            state |= {"seed": part.seed, "shuffle": part.shuffle}
    return state


def contents_of(sampler: Any) -> State:
    """Return a checksum of the indices or weights from which an epoch is drawn.

    These may change between epochs, but not within an epoch. Of a long list, only some
    entries count. Return ``{}`` if none exist, or if a torch sampler's are not numbers.
    """
    values: Any
    for part in nested(sampler):
        if type(part) is SubsetRandomSampler:
            values, dtype = part.indices, "<i8"
        elif type(part) is WeightedRandomSampler:
            values, dtype = part.weights, "<f8"
        elif type(part) in {list, tuple, range}:
            entries = [_sampled(entry, 8) for entry in _sampled(part, _MAX_SAMPLED)]
            return {"contents": checksum([len(part), entries])}
        else:
            continue
        try:
            return {"contents": zlib.crc32(np.ascontiguousarray(values, dtype).data)}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return {}
    return {}


def _sampled(part: Any, most: int) -> Any:
    """Return evenly spread entries of a long sequence, or another value unchanged."""
    if not isinstance(part, (list, tuple, range)) or len(part) <= most:
        return part
    return [*part[:: len(part) // most], part[-1]]


def epoch_of(part: Any) -> int | None:
    """Return the ``epoch`` of a sampler or dataset that has ``set_epoch``, or None."""
    return getattr(_with_epoch(part), "epoch", None)


def set_epoch(part: Any, epoch: int | None) -> int | None:
    """Set ``epoch``, unless None, in a sampler or dataset; return its current epoch."""
    counts = _with_epoch(part)
    if epoch is not None:
        set_epoch_of(counts, epoch)
    return getattr(counts, "epoch", None)


def _with_epoch(part: Any) -> Any:
    for each in nested(part):
        is_known = type(getattr(each, "epoch", None)) is int
        if is_known and callable(getattr(each, "set_epoch", None)):
            return each
    return None
