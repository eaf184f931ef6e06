"""Several shards at once: lanes side by side, sample by sample, in a known order.

The shards, permuted if wanted, are dealt to lanes as cards are; each lane reads its
shards one after the other, and the lanes take turns. Ranks and workers take whole
lanes, so that with a fixed number of lanes the order does not depend on how many
readers there are. A lane opens its next shard when all of the present one has been
requested.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from aioloader._order.blocks import Bad, Block, cut, join, pick
from aioloader.datasets._streams.cursors import State, skip
from aioloader.datasets._streams.shards import Position, Shard, ShardFormat, ShardReader

# Samples that a lane asks its reader for at once, at least: many share the cost.
_AT_ONCE = 256


class Lane:
    """The shards of one lane, one after the other.

    Args:
        made_by: What opens a shard.
        shards: The lane's shards, in order.
        budget: Bytes to read ahead.
        state: Where to begin: which shard, a position there, and how many samples from
            that position on were passed on.
    """

    def __init__(
        self, made_by: ShardFormat, shards: Sequence[Shard], budget: int, state: State
    ) -> None:
        self._format = made_by
        self._shards = shards
        self._budget = budget
        self._number: int = state.get("shard", 0)
        self._position: Position = state.get("at", {})
        self._skip: int = state.get("taken", 0)
        self._block: Block = []
        self._taken = 0
        self._is_broken = False
        self._reader: ShardReader | None = None
        self._next: ShardReader | None = None
        self._done: ShardReader | None = None  # until it is closed

    def begin(self) -> None:
        """Open the first shard, and let it be read ahead."""
        if self._reader is None and self._number < len(self._shards):
            self._reader = self._open(self._number, self._position)
            self._reader.begin()

    def ready(self) -> int:
        """Return how many samples can be taken at once."""
        return len(self._block) - self._taken

    def take(self, count: int) -> Block:
        """Take samples that are ready."""
        start = self._taken
        self._taken += count
        return cut(self._block, start, self._taken)

    async def fill(self, limit: int) -> bool:
        """Get more samples if none is ready; tell whether there are any."""
        while not self.ready():
            if self._is_broken:
                await self._turn()
            if self._reader is None:
                if self._number >= len(self._shards):
                    return False
                self._reader = self._open(self._number, self._position)
            await self._pull(self._reader, limit)
        return True

    def state(self) -> State:
        """Return where the next sample is."""
        taken = self._skip or self._taken
        return {"shard": self._number, "at": self._position, "taken": taken}

    async def aclose(self) -> None:
        """Close what is open."""
        readers = [self._reader, self._next, self._done]
        self._reader = self._next = self._done = None
        for reader in readers:
            if reader is not None:
                await reader.aclose()

    async def _pull(self, reader: ShardReader, limit: int) -> None:
        try:
            await skip(reader, self._skip)
            self._skip = self._taken = 0
            self._block, self._position = [], reader.position()
            self._block = await reader.pull(limit)
        except Exception as error:  # noqa: BLE001  (the loader's policy decides)
            # The rest of the shard is lost.
            self._skip = self._taken = 0
            self._block, self._is_broken = [Bad(error)], True
            return
        if not len(self._block):
            await self._turn()
        elif reader.is_draining():
            self._open_next()

    def _open_next(self) -> None:
        """Let the next shard be read ahead; it has the rest of the budget soon."""
        if self._next is None and self._number + 1 < len(self._shards):
            self._next = self._open(self._number + 1, {})
            self._next.begin()

    def _open(self, number: int, position: Position) -> ShardReader:
        return self._format.open(self._shards[number], position, self._budget)

    async def _turn(self) -> None:
        """Go on to the next shard."""
        self._done, self._reader, self._next = self._reader, self._next, None
        self._number += 1
        self._position, self._is_broken = {}, False
        self._block, self._taken = [], 0
        if self._done is not None:
            await self._done.aclose()
            self._done = None


class Interleaved:
    """Lanes that take turns, sample by sample.

    Args:
        lanes: The lanes.
        state: What ``state`` returned, but for the lanes'.
    """

    def __init__(self, lanes: Sequence[Lane], state: State) -> None:
        self._lanes = lanes
        ended = set(state.get("ended", ()))
        self._active = [at for at in range(len(lanes)) if at not in ended]
        self._turn: int = state.get("turn", 0)
        self._has_begun = False

    def begin(self) -> None:
        """Open all lanes at once, not each when its turn comes."""
        if not self._has_begun:
            self._has_begun = True
            for at in self._active:
                self._lanes[at].begin()

    async def pull(self, limit: int) -> Block:
        """Return the next samples in turn, those that can be had without a wait.

        Only the first is waited for.
        """
        self.begin()
        parts: list[Block] = []
        found = 0
        while found < limit and self._active:
            at = self._turn % len(self._active)
            lane = self._lanes[self._active[at]]
            if not lane.ready():
                if parts:
                    break
                if not await lane.fill(max(limit, _AT_ONCE)):
                    del self._active[at]
                    self._turn = at
                    continue
            part = self._rounds(limit - found) if at == 0 else None
            if part is None:
                count = 1 if len(self._active) > 1 else limit - found
                part = lane.take(min(count, lane.ready()))
                self._turn = at + 1
            parts.append(part)
            found += len(part)
        return join(parts)

    def _rounds(self, limit: int) -> Block | None:
        """Return whole rounds of all lanes, as many as are ready; None if none is."""
        lanes = [self._lanes[at] for at in self._active]
        count = len(lanes)
        rounds = min(limit // count, *(lane.ready() for lane in lanes))
        if rounds < 1 or count == 1:
            return None
        taken = join([lane.take(rounds) for lane in lanes])
        turns = np.arange(rounds * count).reshape(count, rounds).T
        return pick(taken, turns.ravel().tolist())

    def state(self) -> State:
        """Return whose turn it is, and where each lane is."""
        active = set(self._active)
        return {
            "turn": self._turn % max(1, len(self._active)),
            "ended": [at for at in range(len(self._lanes)) if at not in active],
            "lanes": [lane.state() for lane in self._lanes],
        }

    async def aclose(self) -> None:
        """Close all lanes."""
        for lane in self._lanes:
            await lane.aclose()


class AsTheyCome(Interleaved):
    """Lanes in whichever order they have samples: faster over uneven connections."""

    def __init__(self, lanes: Sequence[Lane], state: State) -> None:
        super().__init__(lanes, state)
        self._fills: dict[asyncio.Task[bool], int] = {}

    async def pull(self, limit: int) -> Block:
        """Return the next samples of the first lane that has any."""
        while self._active:
            waiting = set(self._fills.values())
            for at in self._active:
                if at not in waiting:
                    fill = asyncio.create_task(
                        self._lanes[at].fill(max(limit, _AT_ONCE))
                    )
                    self._fills[fill] = at
            done, _ = await asyncio.wait(
                self._fills, return_when=asyncio.FIRST_COMPLETED
            )
            for fill in done:
                at = self._fills.pop(fill)
                if fill.result():
                    lane = self._lanes[at]
                    return lane.take(min(limit, lane.ready()))
                self._active.remove(at)
        return []

    async def aclose(self) -> None:
        """End what is under way, and close all lanes."""
        fills = list(self._fills)
        self._fills.clear()
        for fill in fills:
            fill.cancel()
        await asyncio.gather(*fills, return_exceptions=True)
        await super().aclose()
