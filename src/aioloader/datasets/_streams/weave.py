"""Several cursors as one: shards that take turns, and streams drawn by weights.

What several inputs have ready is interleaved into one block, and pulls are slices of
it, so a turn costs little. The inputs only count the samples passed on: a position is
the position of each, and nothing that was interleaved is made again after a load.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from aioloader._order.blocks import Block, join, pick, weave
from aioloader.datasets._streams.cursors import Ahead, Cursor, Replayed, State
from aioloader.datasets._streams.lane import Lane
from aioloader.datasets._streams.shards import Summary

Until: TypeAlias = Literal["all", "first"]
Order = TypeVar("Order")
Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
# Most samples interleaved at once: the cost per sample is small if they are many.
_WOVEN = 1 << 15
# Draws per generator.
_DRAWS = 4096
# Most samples that are drawn at once, and seconds that these may take to come.
_SAMPLES = 2048
_QUICK = 2e-3
# Most rows of columns that are interleaved on the loop.
_ROWS = 256


class Weaver(Replayed, Generic[Order]):
    """Samples of several inputs, interleaved.

    A subclass fills the inputs, and says which of them each of the next samples comes
    from: their ``Order``. Its own state is who is next.

    Args:
        inputs: The inputs; owned.
        key: Name of their states.
    """

    overshoots = True

    def __init__(self, inputs: Sequence[Cursor], key: str) -> None:
        super().__init__({})
        self.inputs = inputs
        self._key = key
        # For each block made, the order; how many of the first the inputs know of.
        self._orders: deque[Order] = deque()
        self._told = 0

    async def _order(self, limit: int) -> tuple[Order, int]:
        """Fill inputs; return the order of the next samples, and their number.

        Args:
            limit: About how many samples; there may be more.
        """
        raise NotImplementedError

    def _counts(self, order: Order, start: int, stop: int) -> Sequence[int]:
        """Return how many samples of a part of an order are of each input."""
        raise NotImplementedError

    def _woven(self, blocks: Sequence[Block], order: Order) -> Block:
        """Return the samples of the blocks of those inputs that have some, in order."""
        raise NotImplementedError

    def _advance(self, count: int) -> None:
        """Note that the next ``count`` samples were interleaved."""
        raise NotImplementedError

    def _after(self, before: State, count: int) -> State:
        """Return the state ``count`` samples of a block after ``here``."""
        raise NotImplementedError

    async def _more(self, limit: int) -> Block:
        """Interleave what the inputs have ready."""
        order, length = await self._order(limit)
        if not length:
            return []
        counts = self._counts(order, 0, length)
        each = zip(self.inputs, counts, strict=True)
        blocks = [one.take(count) for one, count in each if count]
        if len(blocks) == 1:
            block = blocks[0]
        elif length > _ROWS and not any(isinstance(one, list) for one in blocks):
            block = await asyncio.to_thread(self._woven, blocks, order)  # many columns
        else:
            block = self._woven(blocks, order)
        before = self._here()
        self._note(before, block, partial(self._after, before))
        self._orders.append(order)
        self._advance(length)
        return block

    def _forget(self, count: int) -> None:
        """Tell the inputs that all samples of the oldest block were passed on."""
        self._tell(count)
        self._orders.popleft()
        self._told = 0

    def _tell(self, upto: int) -> None:
        if upto == self._told:
            return
        counts = self._counts(self._orders[0], self._told, upto)
        self._told = upto
        for one, count in zip(self.inputs, counts, strict=True):
            if count:
                one.pass_on(count)

    def state(self) -> State:
        """Return who is next, and the position of each input."""
        if self._made:
            self._tell(self._passed)
        return {**super().state(), self._key: [one.state() for one in self.inputs]}

    async def _close(self) -> None:
        """Close the inputs."""
        for one in self.inputs:
            await one.aclose()


class Interleaved(Weaver[Sequence[int]]):
    """Lanes of shards that take turns, sample by sample.

    Args:
        lanes: The lanes.
        state: Whose turn it is, and which lanes have ended.
        summary: Summary of all shards, for the state.
    """

    def __init__(self, lanes: Sequence[Lane], state: State, summary: Summary) -> None:
        super().__init__(lanes, "lanes")
        self.lanes = lanes
        self._summary = summary
        ended = set(state.get("ended", ()))
        self._active = [at for at in range(len(lanes)) if at not in ended]
        self._turn: int = state.get("turn", 0)
        self._has_begun = False

    def _here(self) -> State:
        """Return whose turn it is, and which lanes have ended."""
        active = set(self._active)
        ended = [at for at in range(len(self.lanes)) if at not in active]
        turn = self._turn % max(1, len(self._active))
        return {"shards": self._summary, "turn": turn, "ended": ended}

    def _after(self, before: State, count: int) -> State:
        """Return whose turn it is ``count`` samples later."""
        active = len(self.lanes) - len(before["ended"])
        return {**before, "turn": (before["turn"] + count) % max(1, active)}

    def _advance(self, count: int) -> None:
        """Note whose turn it is."""
        self._turn += count

    def _turns(self) -> list[int]:
        """Return the numbers of the lanes that have not ended, in turn."""
        at = self._turn % max(1, len(self._active))
        return self._active[at:] + self._active[:at]

    def _counts(self, order: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Return how many samples are of each lane in these turns."""
        if len(self.lanes) == 1:
            return [stop - start]
        found, lanes = [0] * len(self.lanes), len(order)
        for later, at in enumerate(reversed(order)):
            found[at] = (stop + later) // lanes - (start + later) // lanes
        return found

    async def _order(self, limit: int) -> tuple[Sequence[int], int]:
        """Wait until all lanes have samples; return whole rounds of those that do."""
        if not self._has_begun:  # all at once, not each when its turn comes
            self._has_begun = True
            for at in self._active:
                self.lanes[at].begin()
        going = [
            at
            for at in self._turns()
            if self.lanes[at].ready() or await self.lanes[at].fill(limit)
        ]
        self._active = sorted(going)
        self._turn = self._active.index(going[0]) if going else 0
        rounds = min((self.lanes[at].ready() for at in going), default=0)
        if len(going) > 1:
            rounds = min(rounds, max(1, max(limit, _WOVEN) // len(going)))
        return going, rounds * len(going)

    def _woven(self, blocks: Sequence[Block], order: Sequence[int]) -> Block:
        """Return the samples in turn; blocks are of the lanes in ascending order."""
        first = sorted(order).index(order[0])
        return weave([*blocks[first:], *blocks[:first]])


class AsTheyCome(Interleaved):
    """Lanes in whichever order they have samples: faster over uneven connections."""

    def __init__(self, lanes: Sequence[Lane], state: State, summary: Summary) -> None:
        super().__init__(lanes, state, summary)
        self._fills: dict[int, asyncio.Task[bool]] = {}

    async def _order(self, limit: int) -> tuple[Sequence[int], int]:
        """Wait until a lane has samples; return it alone."""
        while self._active:
            turns = self._turns()
            for at in turns:
                if not self.lanes[at].ready() and at not in self._fills:
                    fill = asyncio.create_task(self.lanes[at].fill(limit))
                    self._fills[at] = fill
            for place, at in enumerate(turns):
                if ready := self.lanes[at].ready():
                    self._turn += place + 1  # the others come before it the next time
                    return [at], min(limit, ready)
            await asyncio.wait(
                self._fills.values(), return_when=asyncio.FIRST_COMPLETED
            )
            for at in [at for at, fill in self._fills.items() if fill.done()]:
                if not self._fills.pop(at).result():
                    self._active.remove(at)
        return [], 0

    def _advance(self, count: int) -> None:
        """Do nothing: whose turn it is does not depend on the number of samples."""

    async def _close(self) -> None:
        """Stop pending reads, and close all lanes."""
        fills = [*self._fills.values()]
        self._fills.clear()
        for fill in fills:
            fill.cancel()
        await asyncio.gather(*fills, return_exceptions=True)
        await super()._close()


class Mixed(Weaver[Numbers]):
    """Samples of several streams, drawn by weights.

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
        super().__init__(cursors, "up")
        self._weights = np.asarray(weights, np.float64)
        self._words = [word & 0xFFFFFFFFFFFFFFFF for word in key]
        self._until = until
        self._ahead = ahead
        self._ask = 0
        self._drawn: int = state.get("drawn", 0)
        self._ended: set[int] = set(state.get("ended", ()))
        self._finished: set[int] = set()  # inputs without more samples than are ready
        # One block of choices, its number, and how many streams had ended.
        self._draws: Numbers = np.empty(0, np.int64)
        self._drawn_of = -1, 0

    def _here(self) -> State:
        """Return how many samples were drawn, and which streams have ended."""
        return {"drawn": self._drawn, "ended": sorted(self._ended)}

    def _after(self, before: State, count: int) -> State:
        """Return how many were drawn ``count`` samples later."""
        return {**before, "drawn": before["drawn"] + count}

    def _advance(self, count: int) -> None:
        """Note how many were drawn."""
        self._drawn += count

    def _counts(self, order: Numbers, start: int, stop: int) -> Sequence[int]:
        """Return how many of the draws are of each stream."""
        found = np.bincount(order[start:stop], minlength=len(self.inputs))
        counts: list[int] = found.tolist()
        return counts

    def _woven(self, blocks: Sequence[Block], order: Numbers) -> Block:
        """Return the samples in the order of the draws."""
        # Sorted by stream, the samples are those of the blocks, one after the other.
        places = np.empty(len(order), np.int64)
        places[np.argsort(order, kind="stable")] = np.arange(len(order))
        indices: Any = places.tolist()
        return pick(join(blocks), indices)

    async def _order(self, limit: int) -> tuple[Numbers, int]:
        """Draw many streams, and get samples of those."""
        # As many as come quickly: each sample of a stream may have to be waited for.
        most, began = max(limit, self._ask), time.perf_counter()
        choices = self._draws
        while len(self._ended) < len(self.inputs):
            choices = self._draw(most)
            choices = choices[: await self._fill(choices, began + _QUICK)]
            if len(choices):
                is_quick = time.perf_counter() - began < _QUICK
                may_grow = is_quick and self._ahead is not Ahead.NEVER
                self._ask = min(2 * most, _SAMPLES) if may_grow else 0
                return choices, len(choices)
            # The next draw is a stream that has ended.
            self._ended.add(int(self._draw(1)[0]))
            if self._until == "first":
                self._ended.update(range(len(self.inputs)))
        return choices, 0

    async def _fill(self, choices: Numbers, until: float) -> int:
        """Fill the streams for the draws; return for how many draws they suffice.

        After the time ``until`` each stream is asked only once.
        """
        counts, length = self._counts(choices, 0, len(choices)), len(choices)
        for at, (one, count) in enumerate(zip(self.inputs, counts, strict=True)):
            while one.ready() < count and at not in self._finished:
                if not await one.fill(count - one.ready()):
                    self._finished.add(at)
                if self._ahead is not Ahead.NEVER and time.perf_counter() > until:
                    break  # surplus of the others is read again
            if one.ready() < count:
                places = np.flatnonzero(choices == at)
                length = min(length, int(places[one.ready()]))
        return length

    def _draw(self, count: int) -> Numbers:
        """Return the streams of the next samples: at least one, all of one block."""
        block, place = divmod(self._drawn, _DRAWS)
        key = block, len(self._ended)
        if key != self._drawn_of:
            rng = np.random.default_rng([*self._words, block])
            weights = self._weights.copy()
            weights[list(self._ended)] = 0
            bounds = np.cumsum(weights)
            draws = rng.random(_DRAWS) * bounds[-1]
            found = np.searchsorted(bounds, draws, side="right")
            # Integers of one or two bytes are sorted much faster.
            self._draws = found.astype(np.min_scalar_type(len(weights)))
            self._drawn_of = key
        return self._draws[place : place + count]
