"""Batches of samples of similar length, each within a budget of tokens.

Windows of a shuffled order are sorted by length and cut into batches. Only the lengths
and one window are in memory. The state of an iterator is an epoch, window and batch.
Source: the bucketing of fairseq's ``batch_by_size`` and torchtext's ``pool``.
"""

import operator
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from aioloader._order.permutation import KeyedOrder, keyed_order

_BLOCK = 1 << 16  # lengths that are converted at once for the checksum
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.integer[Any]]]


class TokenBudgetBatchSampler(KeyedOrder):
    """Batches of samples of similar length, up to ``max_tokens`` each when padded.

    For ``DataLoader(batch_sampler=...)`` over a map-style dataset whose samples are
    padded to the longest of their batch. Each window of a shuffled order is sorted by
    length and cut where the number of samples times the longest length would exceed
    ``max_tokens``; its batches come in random order. aioloader's loader changes the
    order in each epoch (for torch's, call ``set_epoch``), and resumes at any batch by
    making one window: about 3 ms for 10,000 samples. With ``rank=`` each rank takes
    every n-th batch; batches of one step have similar numbers of tokens, not samples.

    Example:
        >>> order = TokenBudgetBatchSampler([3, 9, 4, 8], 18, shuffle=False)
        >>> list(order)
        [[0, 2], [3, 1]]

    Args:
        lengths: Tokens of each sample: integers, at least 1, shape (samples,). An array
            or a CPU tensor is not copied.
        max_tokens: Limit on a batch's number of samples times its longest length.
        window: Samples that are sorted together. Larger windows waste less padding, but
            make batches less random.
        shuffle: Whether the order is random. If not, windows follow the dataset, and
            their batches ascend in length.
        seed: Key of the order; any integer, the same on all ranks.

    Raises:
        ValueError: If ``max_tokens`` or ``window`` is below 1, or lengths are not a
            one-dimensional sequence of integers from 1 to ``max_tokens``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Integers | Any,
        max_tokens: int,
        window: int = 10_000,
        shuffle: bool = True,  # noqa: FBT001, FBT002  (as torch's samplers)
        seed: int = 0,
    ) -> None:
        self.max_tokens: int = operator.index(max_tokens)
        self.window: int = operator.index(window)
        self.shuffle: bool = bool(shuffle)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.lengths: Integers = _checked(lengths, self.max_tokens)
        super().__init__(seed)
        self._counted: tuple[int, int] | None = None  # epoch, and its batches

    def __iter__(self) -> "BudgetIterator":
        """Return a ``BudgetIterator`` over the batches of the current epoch."""
        return BudgetIterator(self.copy())

    def __len__(self) -> int:
        """Return the number of batches of the current epoch.

        Once per epoch this sorts all windows: about a second for 3,000,000 samples.
        """
        epoch = self.epoch if self.shuffle else 0
        if self._counted is None or self._counted[0] != epoch:
            count = sum(len(self._cut(number)[1]) for number in range(self.windows))
            self._counted = epoch, count
        return self._counted[1]

    @property
    def windows(self) -> int:
        """How many windows of samples an epoch has."""
        return -(-len(self.lengths) // self.window)

    def batches_of(self, number: int) -> list[Integers]:
        """Return the batches of indices of one window, in the order of delivery."""
        indices, stops = self._cut(number)
        starts = [0, *stops[:-1]]
        order = list(range(len(stops)))
        if self.shuffle:  # with keys from 1: key 0 is for the samples
            batches = keyed_order(len(stops), self.seed, self.epoch, number + 1)
            order = batches.take(0, len(stops)).tolist()
        return [indices[starts[batch] : stops[batch]] for batch in order]

    def _cut(self, number: int) -> tuple[Integers, list[int]]:
        """Return a window's indices sorted by length, and where each batch ends."""
        start = number * self.window
        stop = min(start + self.window, len(self.lengths))
        indices: Integers = np.arange(start, stop)
        if self.shuffle:
            order = keyed_order(len(self.lengths), self.seed, self.epoch, 0)
            indices = order.take(start, stop)
        lengths = self.lengths[indices]
        small = lengths.astype(np.min_scalar_type(lengths.max()))
        by_length = np.argsort(small, kind="stable")  # up to 16 bits: a radix sort
        stops, first, budget = list[int](), 0, self.max_tokens
        for position, length in enumerate(lengths[by_length].tolist()):
            if (position + 1 - first) * length > budget:
                stops.append(position)
                first = position
        return indices[by_length], [*stops, len(indices)]

    def described(self) -> dict[str, Any]:
        """Return the JSON-ready settings that, with the epoch, determine the order."""
        return {
            "sampler": type(self).__name__,
            "length": len(self.lengths),
            "seed": self.seed if self.shuffle else None,
            "max_tokens": self.max_tokens,
            "window": self.window,
            "contents": self._checksum,
        }

    @cached_property
    def _checksum(self) -> int:
        checksum = 0
        for start in range(0, len(self.lengths), _BLOCK):
            block = self.lengths[start : start + _BLOCK].astype("<i8")
            checksum = zlib.crc32(block.data, checksum)
        return checksum

    def __repr__(self) -> str:
        return (
            f"TokenBudgetBatchSampler({len(self.lengths)} lengths, {self.max_tokens}, "
            f"window={self.window}, shuffle={self.shuffle}, seed={self.seed}, "
            f"epoch={self.epoch})"
        )


class BudgetIterator:
    """Iterator over the batches of one epoch, which ``load_state_dict`` repositions."""

    def __init__(self, sampler: TokenBudgetBatchSampler) -> None:
        self._sampler = sampler
        self._window = self._taken = 0
        self._batches: list[Integers] | None = None  # of the current window, once made

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        while self._window < self._sampler.windows:
            if self._batches is None:
                self._batches = self._sampler.batches_of(self._window)
            if self._taken < len(self._batches):
                self._taken += 1
                batch: list[int] = self._batches[self._taken - 1].tolist()
                return batch
            self._window, self._taken, self._batches = self._window + 1, 0, None
        raise StopIteration

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the window, and how many batches of it were taken."""
        epoch = self._sampler.epoch
        return {"epoch": epoch, "window": self._window, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a state of an iterator whose sampler had the same settings."""
        self._sampler.set_epoch(state["epoch"])
        self._window, self._taken = state["window"], state["taken"]
        self._batches = None


def _checked(lengths: Any, budget: int) -> Integers:
    """Return ``lengths`` as an array of integers from 1 to ``budget``, or raise."""
    try:
        array = np.asarray(lengths)
    except ValueError as error:  # nested sequences of several lengths
        raise ValueError(f"lengths must have one dimension: {error}") from error
    if array.ndim != 1:
        raise ValueError(
            f"lengths must have one dimension, got an array of shape {array.shape}"
        )
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be integers, got values of type {array.dtype}")
    least, longest = int(array.argmin()), int(array.argmax())
    if array[least] < 1:
        raise ValueError(
            f"lengths must be at least 1, got {array[least]} at index {least}"
        )
    if array[longest] > budget:
        raise ValueError(
            f"the sample at index {longest} has {array[longest]:,} tokens, more than "
            f"max_tokens={budget:,}: leave it out, cut it, or allow more"
        )
    return array
