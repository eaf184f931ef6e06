"""Several streams as one: each sample from a stream that is drawn by weight.

The draws are a function of the key and of the number drawn before, so the state is that
of the streams and some numbers. Many are drawn at once, and the streams' samples are
interleaved into one block; pulls are slices of it.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from aioloader._order.blocks import Block, cut, join, pick
from aioloader.datasets._streams.cursors import Ahead, Cursor, State, Trail, skip

Until: TypeAlias = Literal["all", "first"]
Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
# Draws per generator.
_BLOCK = 4096
# Most samples that are drawn at once, and seconds that these may take to come.
_SAMPLES = 2048
_QUICK = 2e-3
# Most rows of columns that are interleaved on the loop.
_ROWS = 256


class _Part:
    """One of the streams, with the samples pulled but not yet passed on.

    Args:
        cursor: The stream's cursor; owned.
        taken: Samples to drop first.
        failed: Which of them were unreadable; None: not known.
    """

    def __init__(self, cursor: Cursor, taken: int, failed: list[int] | None) -> None:
        self.cursor = cursor
        self.has_ended = False
        # Until these samples are dropped.
        self._loaded: State = {"up": cursor.state(), "taken": taken, "failed": failed}
        self._trail = Trail(cursor)
        self._block: Block = []
        self._woven = 0

    def ready(self) -> int:
        """Return how many samples are ready."""
        return len(self._block) - self._woven

    async def fill(self, count: int) -> None:
        """Get up to ``count`` more samples; at least one, or the end."""
        if self._loaded["taken"]:
            await skip(self.cursor, self._loaded["taken"], self._loaded["failed"])
            self._loaded = {**self._loaded, "taken": 0}
        before = self.cursor.state()
        block = await self.cursor.pull(count)
        self.has_ended = not len(block)
        self._trail.add(before, block)
        rest = cut(self._block, self._woven)
        self._block = join([rest, block]) if len(rest) else block
        self._woven = 0

    def take(self, count: int) -> Block:
        """Return the next samples."""
        start, self._woven = self._woven, self._woven + count
        return cut(self._block, start, self._woven)

    def pass_on(self, count: int) -> None:
        """Note that ``count`` samples were passed on."""
        self._trail.advance(count)

    def state(self) -> State:
        """Return the position of the first sample not yet passed on."""
        return self._loaded if self._loaded["taken"] else self._trail.state()


class Mixed:
    """Samples of several cursors, interleaved.

    Args:
        cursors: The streams' cursors; owned.
        weights: Probability of each, not normalised.
        key: Words that the draws depend on.
        state: Where to start: how many were drawn, and which streams have ended.
        until: Whether the mixture ends with the first stream or with the last.
        ahead: How far they may be read ahead.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        weights: Sequence[float],
        key: Sequence[int],
        state: State,
        *,
        until: Until,
        ahead: Ahead,
    ) -> None:
        taken = state.get("taken") or [0] * len(cursors)
        failed = state.get("failed") or [None] * len(cursors)
        each = zip(cursors, taken, failed, strict=True)
        self._parts = [_Part(*one) for one in each]
        self._weights = np.asarray(weights, np.float64)
        self._key = [word & 0xFFFFFFFFFFFFFFFF for word in key]
        self._until = until
        self._ahead = ahead
        self._ask = 0
        self._drawn: int = state.get("drawn", 0)
        self._ended: set[int] = set(state.get("ended", ()))
        # One block of choices, its number, and how many streams had ended.
        self._draws: Numbers = np.empty(0, np.int64)
        self._drawn_of = -1, 0
        # The interleaved block, its streams, and how much was passed on, and noted.
        self._woven: Block = []
        self._choices: Numbers = np.empty(0, np.int64)
        self._given = self._noted = 0

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; none at the end."""
        if self._given >= len(self._woven):
            await self._weave(limit)
        start, self._given = self._given, min(self._given + limit, len(self._woven))
        self._drawn += self._given - start
        return cut(self._woven, start, self._given)

    def _note(self) -> None:
        """Tell each stream how many of its samples were passed on."""
        choices, self._noted = self._choices[self._noted : self._given], self._given
        counts = np.bincount(choices, minlength=len(self._parts)).tolist()
        for part, count in zip(self._parts, counts, strict=True):
            part.pass_on(count)

    async def _weave(self, limit: int) -> None:
        """Draw many streams, and put their samples in that order."""
        self._note()
        self._woven, self._choices = [], self._choices[:0]
        self._given = self._noted = 0
        # As many as come quickly: each sample of a stream may have to be waited for.
        most, began = max(limit, self._ask), time.perf_counter()
        while len(self._ended) < len(self._parts):
            choices = self._draw(most)
            choices = choices[: await self._fill(choices, began + _QUICK)]
            if len(choices):
                await self._put_in_order(choices)
                is_quick = time.perf_counter() - began < _QUICK
                may_grow = is_quick and self._ahead is not Ahead.NEVER
                self._ask = min(2 * most, _SAMPLES) if may_grow else 0
                return
            # The next draw is a stream that has ended.
            self._ended.add(int(self._draw(1)[0]))
            if self._until == "first":
                self._ended.update(range(len(self._parts)))

    async def _fill(self, choices: Numbers, until: float) -> int:
        """Fill the streams for the draws; return for how many draws they suffice.

        After the time ``until`` each stream is asked only once.
        """
        counts = np.bincount(choices, minlength=len(self._parts)).tolist()
        length = len(choices)
        for at, (part, count) in enumerate(zip(self._parts, counts, strict=True)):
            while part.ready() < count and not part.has_ended:
                await part.fill(count - part.ready())
                if self._ahead is not Ahead.NEVER and time.perf_counter() > until:
                    break  # surplus of the others is read again
            if part.ready() < count:
                places = np.flatnonzero(choices == at)
                length = min(length, int(places[part.ready()]))
        return length

    async def _put_in_order(self, choices: Numbers) -> None:
        """Interleave the next samples of the streams."""
        counts = np.bincount(choices, minlength=len(self._parts)).tolist()
        blocks = [
            part.take(count)
            for part, count in zip(self._parts, counts, strict=True)
            if count
        ]
        # Sorted by stream, the samples are those of the blocks, one after the other.
        places = np.empty(len(choices), np.int64)
        places[np.argsort(choices, kind="stable")] = np.arange(len(choices))
        self._choices = choices
        if len(choices) > _ROWS and not any(isinstance(one, list) for one in blocks):
            self._woven = await asyncio.to_thread(_woven, blocks, places)
        else:
            self._woven = _woven(blocks, places)

    def _draw(self, count: int) -> Numbers:
        """Return the streams of the next samples: at least one, all of one block."""
        block, place = divmod(self._drawn, _BLOCK)
        key = block, len(self._ended)
        if key != self._drawn_of:
            rng = np.random.default_rng([*self._key, block])
            weights = self._weights.copy()
            weights[list(self._ended)] = 0
            bounds = np.cumsum(weights)
            draws = rng.random(_BLOCK) * bounds[-1]
            found = np.searchsorted(bounds, draws, side="right")
            # Integers of one or two bytes are sorted much faster.
            self._draws = found.astype(np.min_scalar_type(len(weights)))
            self._drawn_of = key
        return self._draws[place : place + count]

    def state(self) -> State:
        """Return each stream's position, and how many samples were drawn."""
        self._note()
        states = [part.state() for part in self._parts]
        return {
            "up": [one["up"] for one in states],
            "taken": [one["taken"] for one in states],
            "failed": [one["failed"] for one in states],
            "drawn": self._drawn,
            "ended": sorted(self._ended),
        }

    async def aclose(self) -> None:
        """Close all streams."""
        for part in self._parts:
            await part.cursor.aclose()


def _woven(blocks: Sequence[Block], places: Numbers) -> Block:
    indices: Any = places.tolist()
    return pick(join(blocks), indices)
