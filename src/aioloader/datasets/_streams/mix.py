"""Several streams as one: each sample from a stream that is drawn by weight.

The draws are a function of the key and of how many went before, so that the state is
that of the streams and one number.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from aioloader._order.blocks import Block
from aioloader.datasets._streams.cursors import Cursor, State

Until: TypeAlias = Literal["all", "first"]
# Draws made at once.
_BLOCK = 1024


class Mixed:
    """Samples of several cursors.

    Args:
        cursors: What is read; owned.
        weights: Probability of each, not normalised.
        key: Words that the draws depend on.
        until: When it is over.
        state: Where to begin: how many were drawn, and which streams have ended.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        weights: Sequence[float],
        key: Sequence[int],
        until: Until,
        state: State,
    ) -> None:
        self._cursors = cursors
        self._weights = np.asarray(weights, np.float64)
        self._key = [word & 0xFFFFFFFF for word in key]
        self._until = until
        self._drawn: int = state.get("drawn", 0)
        self._ended: set[int] = set(state.get("ended", ()))
        self._draws: list[float] = []
        self._bounds = self._cumulated()

    async def pull(self, limit: int) -> Block:
        """Return the next sample, and as many of the same stream as are drawn next."""
        while len(self._ended) < len(self._cursors):
            at = self._peek()
            count = 1
            while count < limit and self._peek(count) == at:
                count += 1
            block = await self._cursors[at].pull(count)
            if len(block):
                self._drawn += len(block)
                return block
            self._ended.add(at)
            if self._until == "first":
                self._ended.update(range(len(self._cursors)))
            self._bounds = self._cumulated()
        return []

    def _peek(self, ahead: int = 0) -> int:
        """Return which stream the next draw, or a later one, is of."""
        block, place = divmod(self._drawn + ahead, _BLOCK)
        if not self._draws or self._draws[0] != block:
            rng = np.random.default_rng([*self._key, block])
            self._draws = [block, *rng.random(_BLOCK).tolist()]
        draw = self._draws[place + 1] * self._bounds[-1]
        return int(np.searchsorted(self._bounds, draw, side="right"))

    def _cumulated(self) -> Any:
        weights = self._weights.copy()
        weights[list(self._ended)] = 0
        return np.cumsum(weights)

    def state(self) -> State:
        """Return where each stream is, and how many samples were drawn."""
        return {
            "up": [cursor.state() for cursor in self._cursors],
            "drawn": self._drawn,
            "ended": sorted(self._ended),
        }

    async def aclose(self) -> None:
        """Close all streams."""
        for cursor in self._cursors:
            await cursor.aclose()
