"""Index batches cut from an order with random access; and what is known of samplers.

Torch's samplers yield Python integers one by one, from a list of the whole permutation.
The exact torch classes are recognised here and cut from one index tensor instead; a
``SeekableOrder`` is computed in blocks. Nothing before the start is computed.

Torch's samplers draw from the user's generator, or else from a seed that they draw from
the default one; other samplers may draw from the default one. To repeat an order, the
seed is enough, or the state of the generator before it. A state is 2.5 KB of random
bytes: 3.4 KB of text.
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

# Indices made at a time: a block of a ``SeekableOrder`` takes about 1 ms.
_BLOCK, _SHUFFLED_BLOCK, _FIRST_BLOCK = 1 << 15, 1 << 13, 1 << 10
# Views of a block made at a time: cheaper than one by one, and takes only 0.1 ms.
_VIEWS = 256
# Indices up to which a permutation is drawn in about a millisecond.
_QUICK = 1 << 16
_DEEPEST = 8  # limit on wrappers around a sampler
_LOOKED_AT = 1 << 8  # of the entries of a list, for its checksum


class IndexBatch(NamedTuple):
    """The request for one batch."""

    number: int  # position of the (global) batch in the epoch, from 0
    first: int  # position of its first sample in the order of all ranks
    indices: Any  # the sampler's
    padding: int = 0  # how many of them, the last ones, are padding
    state: Any = None  # the sampler's, after this batch, if it has one


@dataclass(eq=False, repr=False)
class Order:
    """The index batches of one epoch, of one rank: here of positions in a stream.

    They have no end: only the stream knows its end, and its own state.
    """

    size: int | None  # samples per batch of a rank; None: a sampler yields batches
    part: RankPart
    pulled: int = 0  # how far it was drawn, perhaps ahead of what was delivered
    end: State | None = field(default=None, init=False)  # a sampler's final state

    def prepare(self, epoch: int | None = None, /) -> None:
        """Draw the contents of the state, once: a seed, but no permutation yet.

        A ``KeyedOrder`` is that of ``epoch``; None: of its current one.
        """

    def draws_long(self, _number: int, _start: int, /) -> bool:
        """Tell whether it may take milliseconds to draw a request, of all from one."""
        return False

    def batches(
        self, start: int = 0, _after: State | None = None, /
    ) -> Iterator[IndexBatch]:
        """Yield those from number ``start`` on, which come after a state; once."""
        return self.batches_of(itertools.count(start))

    def batches_of(self, numbers: Iterable[int]) -> Iterator[IndexBatch]:
        part = self.part
        whole = (self.size or 1) * part.world_size
        for number in numbers:
            first = number * whole
            places = part.places(first, first + whole)
            yield IndexBatch(number, places.start, places)

    def state(self) -> State:
        """Return what makes the order again, ready for JSON."""
        return {}

    @property
    def is_restorable(self) -> bool:
        """Whether a state tells what the sampler yields in the next epoch."""
        return True

    def _own(self, found: Any) -> tuple[Any, int, int]:
        """Return our part of a global batch, how many are added, and what place has it.

        As in torch, the order wraps around at its end.
        """
        part = self.part
        mine, padding = part.share(len(found))
        units = found[part.rank :: part.world_size][:mine]
        return units, padding, part.rank + mine * part.world_size - len(found)


@dataclass(eq=False, repr=False, kw_only=True)
class IndexOrder(Order):
    """Batches cut from an order with random access; ``pulled`` is 1 after its end."""

    sampler: Any
    drop_last: bool
    draws: "SamplerDraws | None"
    _shuffled: SeekableOrder | None = field(default=None, init=False)

    def prepare(self, epoch: int | None = None, /) -> None:
        if self.draws is not None:
            self.draws.prepare()
        if isinstance(self.sampler, SeekableOrder) and self._shuffled is None:
            self._shuffled = self.sampler.copy()  # a later set_epoch is for the next
            if epoch is not None:
                self._shuffled.set_epoch(epoch)

    def draws_long(self, number: int, start: int, /) -> bool:
        """Tell whether a permutation is drawn: before the first one, and at the end."""
        if self.draws is None or len(self.sampler) <= _QUICK:
            return False
        whole = (self.size or 1) * self.part.world_size
        return number == start or number >= len(self.sampler) // whole

    def batches(
        self, start: int = 0, _after: Any = None, /, *, as_lists: bool = True
    ) -> Iterator[IndexBatch]:
        """Yield the batches; indices are lists, or else tensors and ranges."""
        n, rank, is_alone = len(self.sampler), self.part.rank, self.part.world_size == 1
        whole = (self.size or 1) * self.part.world_size
        self.prepare()
        lazy = self._shuffled
        listed = lazy.listed if lazy else _listed
        indices: Any = lazy or range(n)
        if self.draws is not None:
            indices = _permutation(n, self.draws.begin())
        # Torch's sampler draws another, unused permutation at its end: with a short
        # last batch, which runs into the end, or else after the last one.
        short = n // whole if n % whole and not self.drop_last else None
        stop = n - n % whole if self.drop_last else n
        at, size = start * whole, _FIRST_BLOCK if lazy else _BLOCK
        while at < stop:
            end = min(at + max(1, size // whole) * whole, stop)
            block = torch.from_numpy(lazy.take(at, end)) if lazy else indices[at:end]
            if as_lists and is_alone and not lazy:
                block = list(block) if type(block) is range else block.tolist()
            if isinstance(block, torch.Tensor):
                pieces = _views(block, whole)
            else:
                pieces = (block[i : i + whole] for i in range(0, len(block), whole))
            for number, found in enumerate(pieces, at // whole):
                if number == short:
                    self._end()
                own, padding = (found, 0) if is_alone else self._filled(found, indices)
                if len(own):
                    if as_lists and type(own) is not list:
                        own = listed(own)
                    yield IndexBatch(number, number * whole + rank, own, padding)
            at, size = end, _SHUFFLED_BLOCK if lazy else _BLOCK
        self._end()

    def _filled(self, found: Any, indices: Any) -> tuple[Any, int]:
        """Return our part of a global batch, and how many are added at its end."""
        own, padding, place = self._own(found)
        if padding:
            again = int(indices[place % len(indices)])
            own = torch.tensor([*_listed(own), again], device="cpu")
        return own, padding

    def _end(self) -> None:
        """Draw the unused permutation, once, from the user's generator."""
        own = None if self.draws is None else self.sampler.generator
        if own is not None and not self.pulled:
            _permutation(len(self.sampler), own)
        self.pulled = 1

    def state(self) -> State:
        known = self.sampler if self._shuffled is None else self._shuffled
        return described(known) | ({} if self.draws is None else self.draws.state())


def _permutation(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw on the generator's device, whatever torch's default; return on the CPU."""
    return torch.randperm(n, generator=generator, device=generator.device).cpu()


def _views(block: torch.Tensor, size: int) -> Iterator[Any]:
    for at in range(0, len(block), size * _VIEWS):
        yield from block[at : at + size * _VIEWS].split(size)  # type: ignore[no-untyped-call]


def _listed(chunk: torch.Tensor | range) -> list[int]:
    return list(chunk) if isinstance(chunk, range) else chunk.tolist()


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator and its seed, ready for JSON."""
    generator = torch.Generator()
    generator.set_state(state)
    # Each 32 random bits are followed by 32 zeros, and only these can be compressed.
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
    """The random draws of one order: of a sampler, if it draws.

    It draws from its ``generator`` or else from the default one. ``saved`` is the
    ``state`` of another process, or empty.
    """

    def __init__(self, sampler: Any, saved: State) -> None:
        own: torch.Generator | None = getattr(sampler, "generator", None)
        self._source = torch.default_generator if own is None else own
        self._is_drawn = sampler is not None
        self._draws_seed = own is None and type(sampler) is RandomSampler
        self._seed: int | None = saved.get("seed") if self._draws_seed else None
        # Only of a user's sampler is it unknown whether it draws.
        is_torchs = type(sampler) in WITH_GENERATOR
        self._key = "generator" if own is not None or is_torchs else "before"
        self._saved: State | None = saved.get(self._key) if self._is_drawn else None
        self._before: torch.Tensor | None = None

    def prepare(self) -> None:
        if self._draws_seed and self._seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_()
            self._seed = int(drawn.item())

    def begin(self) -> torch.Generator:
        """Return the generator to draw from, in its state when the order was drawn.

        That of a saved order is a copy: the sampler's own is past it already.
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
        """Undo ``begin``, unless something was drawn since.

        A generator function draws at its first step, and not when ``iter`` is called.
        """
        before = self._before
        if before is not None and torch.equal(before, self._source.get_state()):
            self._before = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the sampler draw as it did when a saved order was first drawn.

        Afterwards its generator is back where it was.
        """
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
        """Return the state that ``begin`` started from, ready for JSON, or empty."""
        if self._seed is not None:
            return {"seed": self._seed}
        if self._saved is not None:
            return {self._key: self._saved}
        return {} if self._before is None else {self._key: packed(self._before)}


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
    """Return a checksum of the indices or weights that an epoch is drawn from.

    They may change from epoch to epoch, but not within one. Empty if there are none, or
    they are no numbers. Of a long list, some are looked at.
    """
    values: Any
    for part in nested(sampler):
        if type(part) is SubsetRandomSampler:
            values, dtype = part.indices, "<i8"
        elif type(part) is WeightedRandomSampler:
            values, dtype = part.weights, "<f8"
        elif type(part) in {list, tuple, range}:
            some = [_sampled(one, 8) for one in _sampled(part, _LOOKED_AT)]
            return {"contents": checksum([len(part), some])}
        else:
            continue
        try:
            return {"contents": zlib.crc32(np.ascontiguousarray(values, dtype).data)}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return {}
    return {}


def _sampled(part: Any, most: int) -> Any:
    """Return some of a long sequence, evenly spread, and its last one."""
    if not isinstance(part, (list, tuple, range)) or len(part) <= most:
        return part
    return [*part[:: len(part) // most], part[-1]]


def epoch_of(part: Any) -> int | None:
    """Return the epoch of a sampler, perhaps a wrapped one, or of a dataset.

    None if it cannot be read as ``epoch`` and set with ``set_epoch``.
    """
    return getattr(_with_epoch(part), "epoch", None)


def set_epoch(part: Any, epoch: int | None) -> int | None:
    """Set the epoch that ``epoch_of`` returned, if it did; return the present one."""
    counts = _with_epoch(part)
    if epoch is not None:
        set_epoch_of(counts, epoch)
    return getattr(counts, "epoch", None)


def _with_epoch(part: Any) -> Any:
    for one in nested(part):
        is_known = type(getattr(one, "epoch", None)) is int
        if is_known and callable(getattr(one, "set_epoch", None)):
            return one
    return None
