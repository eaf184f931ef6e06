"""A keyed permutation of ``range(n)`` with O(1) memory and seek, for any ``n``.

A balanced Feistel network with a hash as round function permutes ``range(4**k)``, with
``4**k >= n``; values from ``n`` on are permuted again until they are below ``n``.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002),
methods 2 and 3.
"""

import abc
import copy
import operator
import time
from collections.abc import Iterator
from typing import Any, Self, TypeAlias

import numpy as np

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

MAX_N = 2**63
_ROUNDS = 8
_MAX_TABLE_BITS = 10  # up to this width of a half, its hashes are tabulated
_BLOCK = 1 << 12  # positions that ``__iter__`` looks up at once
# Odd constants of SplitMix64 (Steele et al., OOPSLA 2014). Multiples of the golden
# ratio, here in units of 2**-64, are spread evenly modulo 1.
GOLDEN_RATIO = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK_64 = (1 << 64) - 1

CHUNK = 1 << 10  # positions that ``paced`` looks up at once: about half a millisecond
_PAUSE_SECONDS = 1e-5  # of sleep, so that other threads get the GIL


class KeyedOrder(abc.ABC):
    """A sampler whose order is a function of its seed and an epoch.

    A loader sets a new epoch for each iteration, or restores one from a saved state.
    """

    def __init__(self, seed: int) -> None:
        self.seed: int = operator.index(seed)
        self.epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``. Idempotent."""
        self.epoch = operator.index(epoch)

    def copy(self) -> Self:
        """Return a copy that ``set_epoch`` on this order does not affect."""
        return copy.copy(self)

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the order of the current epoch."""

    @abc.abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the JSON-ready settings that, with the epoch, determine the order."""


class SeekableOrder(KeyedOrder):
    """An order of ``n`` indices that computes the index at any position."""

    def __init__(self, n: int, seed: int) -> None:
        self.n: int = operator.index(n)
        super().__init__(seed)
        if not 0 <= self.n <= MAX_N:
            raise ValueError(f"n must be from 0 to 2**63, got {n}")

    @abc.abstractmethod
    def at(self, positions: "np.ndarray[Any, Any]") -> Indices:
        """Return the indices at ``positions`` in ``range(n)``.

        Args:
            positions: Integers of shape ``(k,)``, in any order.

        Returns:
            A new array of shape ``(k,)``, dtype int64.
        """

    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at the positions in ``range(start, stop)``.

        Returns:
            A new array of shape ``(stop - start,)``, dtype int64.

        Raises:
            IndexError: Unless ``0 <= start <= stop <= n``.
        """
        if not 0 <= start <= stop <= self.n:
            raise IndexError(
                f"positions {start} to {stop} of {self.n} shuffled indices"
            )
        return self.at(np.arange(start, stop, dtype=np.uint64))

    def listed(self, indices: Any) -> list[int]:
        """Return an array or tensor of indices as a list, to pass to a dataset."""
        listed: list[int] = indices.tolist()
        return listed

    def described(self) -> dict[str, Any]:
        """Return the JSON-ready settings that, with the epoch, determine the order."""
        return {"sampler": type(self).__name__, "length": self.n, "seed": self.seed}

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        position = operator.index(position)
        if position < 0:
            position += self.n
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of {self.n} shuffled indices")
        return self.listed(self.take(position, position + 1))[0]

    def __iter__(self) -> Iterator[int]:
        order = self.copy()
        for start in range(0, self.n, _BLOCK):
            yield from order.listed(order.take(start, min(start + _BLOCK, self.n)))


class ShuffledIndices(SeekableOrder):
    """Visit ``range(n)`` in a shuffled order without storing it.

    A sampler for datasets too large to permute in memory: it computes the index at any
    position. The order depends only on ``n``, ``seed`` and the epoch.

    Example:
        >>> order = ShuffledIndices(10, seed=1)
        >>> sorted(order) == list(range(10)), order[3] == list(order)[3]
        (True, True)

    Args:
        n: Number of indices, from 0 to ``2**63``.
        seed: Key of the permutation; any integer.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__(n, seed)
        # Two halves of the same width, so the domain is at most 4n.
        self._half = max(1, ((max(self.n, 1) - 1).bit_length() + 1) // 2)
        self._rounds: Words | None = None  # keys or hashes of the rounds, once needed

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``. Idempotent."""
        super().set_epoch(epoch)
        self._rounds = None

    def at(self, positions: "np.ndarray[Any, Any]") -> Indices:
        """Return the indices at ``positions`` in ``range(n)``."""
        values = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            values[outside] = self._permute(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def __repr__(self) -> str:
        return f"ShuffledIndices({self.n}, seed={self.seed}, epoch={self.epoch})"

    def _round_keys(self) -> Words:
        state = 0
        for value in (self.n, self.seed, self.epoch):
            # Any integer, with its sign, in 64-bit words.
            size = value.bit_length() // 64 + 1
            data = value.to_bytes(8 * size, "little", signed=True)
            for word in memoryview(data).cast("Q"):
                state = _splitmix(state ^ word)
        keys = [_splitmix(state + i * GOLDEN_RATIO) for i in range(_ROUNDS)]
        return np.array(keys, np.uint64)

    def _permute(self, values: Words) -> Words:
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        is_tabled, rounds = self._half <= _MAX_TABLE_BITS, self._rounds
        if rounds is None:
            rounds = self._round_keys()
            if is_tabled:
                halves = np.arange(1 << self._half, dtype=np.uint64)
                rounds = _hash(np.bitwise_xor.outer(rounds, halves)) & mask
            self._rounds = rounds
        left, right = values >> half, values & mask
        for key in rounds:
            hashed = key[right] if is_tabled else _hash(right ^ key) & mask
            left, right = right, left ^ hashed
        return (left << half) | right


def _hash(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _splitmix(state: int) -> int:
    mixed = (state + GOLDEN_RATIO) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * int(_MIX_1)) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * int(_MIX_2)) & _MASK_64
    return mixed ^ (mixed >> 31)


def keyed_order(length: int, seed: int, epoch: int, key: int) -> ShuffledIndices:
    """Return an epoch's permutation of ``range(length)`` for one ``key``."""
    order = ShuffledIndices(length, seed * GOLDEN_RATIO + key)
    order.set_epoch(epoch)
    return order


def paced(order: ShuffledIndices) -> Iterator[list[int]]:
    """Yield a permutation in chunks and let other threads take the GIL in between."""
    for start in range(0, order.n, CHUNK):
        if start:
            pause()
        indices: list[int] = order.take(start, min(start + CHUNK, order.n)).tolist()
        yield indices


def pause() -> None:
    """Let other threads take the GIL."""
    time.sleep(_PAUSE_SECONDS)
