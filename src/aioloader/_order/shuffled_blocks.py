"""A shuffle of blocks, so that neighbours can be read with one request.

A few keyed permutations map a position to an index, in O(1):

    position -> lane -> offset in a window of the lane -> block -> index

The shuffled blocks are cut into lanes of about equal length, visited in turn. Each lane
is cut into windows, and each window is permuted, which spreads a block over a window.
"""

import operator
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from aioloader._order.permutation import (
    GOLDEN_RATIO,
    MAX_N,
    Indices,
    SeekableOrder,
    ShuffledIndices,
    keyed_order,
)

_TURN = np.uint64(GOLDEN_RATIO)
# Keys of an epoch's permutations: of blocks, of the short block's position, of windows.
_BLOCKS, _SHORT, _WINDOWS = range(3)


class BlockIndex(int):
    """An index whose block is read as a whole.

    Attributes:
        spread: Number of indices per block, and of positions over which it is spread.
    """

    __slots__ = ()
    spread: ClassVar[tuple[int, int]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _block_index, (self.spread, int(self))


@lru_cache
def _class_of(spread: tuple[int, int]) -> type[BlockIndex]:
    """Return the class of indices with this spread.

    The spread is a class attribute: the garbage collector would track instances with
    attributes, so that it would run every 40,000 samples and take 70 ms.
    """
    return type("BlockIndex", (BlockIndex,), {"__slots__": (), "spread": spread})


def _block_index(spread: tuple[int, int], index: int) -> BlockIndex:
    return _class_of(spread)(index)


class ShuffledBlocks(SeekableOrder):
    """Visit ``range(n)`` in blocks of neighbours, shuffled within windows of blocks.

    A sampler for samples in shards; ``IndexedDataset.shuffled`` returns one. Each index
    is visited once. Rank r of R gets every R-th position, so a block stays on one rank
    if R divides ``lanes``, except where a lane begins.

    Args:
        n: Number of indices, from 0 to ``2**63``.
        block: Neighbours that are read together; blocks begin at its multiples.
        window: Indices permuted at a time, of all lanes together; with 0, the blocks
            of a lane are visited one after the other, each in ascending order.
        seed: Key of the permutations; any integer.
        lanes: Parts into which the order is cut, visited in turn.

    Raises:
        ValueError: If ``n`` is out of range, ``window`` is negative, or ``block`` or
            ``lanes`` is below 1.
    """

    def __init__(
        self, n: int, block: int, window: int, seed: int = 0, lanes: int = 64
    ) -> None:
        super().__init__(n, seed)
        self.block: int = operator.index(block)
        self.window: int = operator.index(window)
        self.lanes: int = operator.index(lanes)
        if self.block < 1 or self.window < 0 or self.lanes < 1:
            raise ValueError(
                "block and lanes must be at least 1, and window at least 0, got "
                f"block={block}, window={window}, lanes={lanes}"
            )
        self._orders: dict[tuple[int, int], ShuffledIndices] = {}

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``. Idempotent."""
        super().set_epoch(epoch)
        self._orders = {}

    def at(self, positions: "np.ndarray[Any, Any]") -> Indices:
        """Return the indices at ``positions`` in ``range(n)``."""
        place, lane = np.divmod(np.asarray(positions).astype(np.int64), self.lanes)
        least, longer = divmod(self.n, self.lanes)
        if self.window:
            place = self._in_window(place, lane, least + (lane < longer))
        place += lane * least + np.minimum(lane, longer)
        # Now a place in the order of blocks. The range may end with a short block:
        # it is at place ``short``, and later blocks begin ``rest`` places later.
        block, (full, rest) = self.block, divmod(self.n, self.block)
        short = self._order(full + 1, _SHORT)[0] * block if rest else MAX_N - 1
        is_short = (place >= short) & (place < short + rest)
        indices = place - short + full * block
        whole = ~is_short
        number, offset = np.divmod(place - np.where(place >= short, rest, 0), block)
        if whole.any():
            blocks = self._order(full, _BLOCKS).at(number[whole])
            indices[whole] = blocks * block + offset[whole]
        return indices

    def listed(self, indices: Any) -> list[int]:
        """Return an array or tensor of indices as a list of ``BlockIndex``."""
        plain = super().listed(indices)
        if self.block == 1:
            return plain
        spread = self.block, max(self.window, self.block * self.lanes)
        return [*map(_class_of(spread), plain)]

    def described(self) -> dict[str, Any]:
        """Return the JSON-ready settings that, with the epoch, determine the order."""
        shape = {"block": self.block, "window": self.window, "lanes": self.lanes}
        return {
            "sampler": "ShuffledBlocks",
            "length": self.n,
            "seed": self.seed,
        } | shape

    def __repr__(self) -> str:
        return (
            f"ShuffledBlocks({self.n}, block={self.block}, window={self.window}, "
            f"seed={self.seed}, lanes={self.lanes}, epoch={self.epoch})"
        )

    def _order(self, length: int, key: int) -> ShuffledIndices:
        order = self._orders.get((length, key))
        if order is None:
            order = keyed_order(length, self.seed, self.epoch, key)
            self._orders[length, key] = order
        return order

    def _in_window(self, place: Any, lane: Any, lengths: Any) -> Any:
        """Permute each place within its window; ``lengths`` are those of the lanes."""
        span = max(1, self.window // self.lanes)
        number, place = np.divmod(place, span)
        ends = np.minimum(span, lengths - number * span)  # the last may be shorter
        # Windows of one length share a permutation; each has its own start in it.
        turn = (number * self.lanes + lane).astype(np.uint64) * _TURN >> np.uint64(11)
        place = (place + (turn % ends.astype(np.uint64)).astype(np.int64)) % ends
        for length in np.unique(ends).tolist():
            mine = ends == length
            place[mine] = self._order(length, _WINDOWS).at(place[mine])
        return place + number * span
