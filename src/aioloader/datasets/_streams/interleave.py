"""Several shards at once: parallel lanes that alternate samples in a fixed order.

The shards, permuted if wanted, go to the lanes round-robin; each lane reads its shards
one after the other, and the lanes take turns. Ranks and workers take whole lanes, so
with a fixed number of lanes the order does not depend on the number of readers. When
all of the current shard has been requested, a lane opens the next one; if shards are
small, as many as fit into half of its byte budget.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from aioloader._order.blocks import Bad, Block, cut, weave
from aioloader.datasets._stores.bytes import START_DIVISOR
from aioloader.datasets._stores.versions import Version, saved
from aioloader.datasets._streams.cursors import State, skip
from aioloader.datasets._streams.shards import (
    CountsBytes,
    KnowsVersion,
    NamesPositions,
    OpensTogether,
    Position,
    Shard,
    ShardFormat,
    ShardReader,
)
from aioloader.errors import ShardChangedError

# Least number of samples that a lane asks its reader for: many share the cost.
_SAMPLES = 256
# Least number of rows of columns, which are in memory anyway.
_ROWS = 1 << 14
# Shards that may be opened together.
_TOGETHER = 16
# Most samples interleaved at once: the cost per sample is small if they are many.
_WOVEN = 1 << 15


class Lane:
    """The shards of one lane, one after the other.

    Args:
        made_by: The format that opens a shard.
        shards: The lane's shards, in order.
        budget: Bytes to read ahead.
        state: Where to start: which shard, a position in it, and how many samples after
            that position were passed on.
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
        self._has_columns = False
        self._reader: ShardReader | None = None
        self._ahead: deque[ShardReader] = deque()
        self._done: ShardReader | None = None  # until it is closed

    def begin(self) -> None:
        """Open the first shard, and start reading it ahead."""
        if self._reader is None and self._number < len(self._shards):
            self._reader = self._open(self._number, self._position)
            self._reader.begin()

    def ready(self) -> int:
        """Return how many samples can be taken without waiting."""
        return len(self._block) - self._taken

    def look(self, count: int) -> Block:
        """Return the next samples that are ready, without taking them."""
        return cut(self._block, self._taken, self._taken + count)

    def pass_on(self, count: int) -> None:
        """Note that ``count`` samples were passed on."""
        self._taken += count

    async def fill(self, limit: int) -> bool:
        """Get about ``limit`` samples if none is ready; return whether any are."""
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
        """Return the position of the next sample.

        Counting from the start of a block is right for data that does not change. A
        reader of rows, which may be deleted and inserted, names the last one instead.
        """
        if self._is_broken and self._taken:  # the rest of the shard is lost
            return {"shard": self._number + 1, "at": {}, "taken": 0}
        if isinstance(self._reader, NamesPositions) and self._taken:
            position = self._reader.position_after(self._taken)
            return {"shard": self._number, "at": position, "taken": 0}
        taken = self._skip or self._taken
        position = self._position
        if version := self._version():
            position = {**position, **saved(*version)}
        return {"shard": self._number, "at": position, "taken": taken}

    async def aclose(self) -> None:
        """Close the open readers."""
        readers = [self._reader, *self._ahead, self._done]
        self._reader = self._done = None
        self._ahead.clear()
        for reader in readers:
            if reader is not None:
                await reader.aclose()

    async def _pull(self, reader: ShardReader, limit: int) -> None:
        try:
            await self._drop(reader)
            self._skip = self._taken = 0
            self._block, self._position = [], reader.position()
            least = _ROWS if self._has_columns else _SAMPLES
            self._block = await reader.pull(max(limit, least))
            self._has_columns = not isinstance(self._block, list)
        except ShardChangedError:
            raise
        except Exception as error:  # noqa: BLE001  (the loader's policy decides)
            # The rest of the shard is lost. Until this is passed on, `_skip` still
            # counts for the state if the samples before it could not be dropped.
            self._block, self._taken, self._is_broken = [Bad(error)], 0, True
            return
        if not len(self._block):
            await self._turn()
        elif reader.is_draining():
            self._open_next()

    async def _drop(self, reader: ShardReader) -> None:
        """Drop the samples passed on before the state was saved."""
        if missing := await skip(reader, self._skip):
            raise ShardChangedError(
                f"shard {self._number} of its lane ends {missing:,} samples before the "
                "position in the state; it has changed since"
            )

    def _open_next(self) -> None:
        """Open the next shards ahead, with half of the budget: the rest is kept free.

        Otherwise each small shard would cost the time of a request.
        """
        ahead, shards = self._ahead, self._shards
        while (number := self._number + len(ahead) + 1) < len(shards):
            if not self._has_room():
                return
            if isinstance(self._format, OpensTogether):
                few = [shards[at] for at in range(number, len(shards))[:_TOGETHER]]
                ahead.extend(self._format.open_together(few, self._budget))
            if len(ahead) < number - self._number:  # none of them
                ahead.append(self._open(number, {}))
                ahead[-1].begin()

    def _has_room(self) -> bool:
        """Return whether one more shard may be read ahead.

        One whose size is not known yet is expected to be small if the current one is,
        and may take as much as any shard before it is pulled.
        """
        left, start = self._budget // 2, self._budget // START_DIVISOR
        current = self._version()
        is_small = current is None or current[1].size <= start
        for reader in self._ahead:
            count = reader.bytes_ahead() if isinstance(reader, CountsBytes) else left
            is_whole = is_small if count is None else reader.is_draining()
            if not is_whole:
                return False
            left -= start if count is None else count
        return not self._ahead or left >= start

    def _version(self) -> tuple[str, Version] | None:
        """Return the address and version of the current shard, if known."""
        reader = self._reader
        return reader.version() if isinstance(reader, KnowsVersion) else None

    def _open(self, number: int, position: Position) -> ShardReader:
        return self._format.open(self._shards[number], position, self._budget)

    async def _turn(self) -> None:
        """Move to the next shard."""
        self._done = self._reader
        self._reader = self._ahead.popleft() if self._ahead else None
        self._number += 1
        self._position, self._is_broken = {}, False
        self._block, self._taken, self._skip = [], 0, 0
        if self._done is not None:
            await self._done.aclose()
            self._done = None


class Interleaved:
    """Lanes that take turns, sample by sample.

    The samples that all lanes have ready are interleaved into one block, and pulls are
    slices of it, so turns cost little. Lanes only count the samples passed on.

    Args:
        lanes: The lanes.
        state: What ``state`` returned, without the lanes' states.
    """

    def __init__(self, lanes: Sequence[Lane], state: State) -> None:
        self._lanes = lanes
        ended = set(state.get("ended", ()))
        self._active = [at for at in range(len(lanes)) if at not in ended]
        self._turn: int = state.get("turn", 0)
        self._has_begun = False
        self._woven: Block = []
        self._given = 0
        self._weft: list[Lane] = []  # those in the current block, in turn

    def begin(self) -> None:
        """Open all lanes at once, not each when its turn comes."""
        if not self._has_begun:
            self._has_begun = True
            for at in self._active:
                self._lanes[at].begin()

    async def pull(self, limit: int) -> Block:
        """Return the next samples in turn, from 1 to ``limit``; none at the end."""
        self.begin()
        if self._given >= len(self._woven):
            await self._fill(limit)
            await self._weave(limit)
        return self.take(limit) or []

    def take(self, limit: int) -> Block | None:
        """Return the next samples if they are ready; None if they must be read."""
        part = cut(self._woven, self._given, self._given + limit)
        if not len(part):
            return None
        self._pass(len(part))
        return part

    async def _fill(self, limit: int) -> None:
        """Wait until all lanes have samples; leave out those that have ended."""
        turns = self._turns()
        going = [at for at in turns if await self._lanes[at].fill(limit)]
        self._active = sorted(going)
        self._turn = self._active.index(going[0]) if going else 0

    async def _weave(self, limit: int) -> None:
        """Interleave the ready samples: whole rounds, from the next turn on."""
        lanes = [self._lanes[at] for at in self._turns()]
        rounds = min((lane.ready() for lane in lanes), default=0)
        if len(lanes) > 1:
            rounds = min(rounds, max(1, max(limit, _WOVEN) // len(lanes)))
        blocks = [lane.look(rounds) for lane in lanes]
        if len(blocks) > 1 and not isinstance(blocks[0], list):
            woven = await asyncio.to_thread(weave, blocks)  # may be many columns
        else:
            woven = weave(blocks)
        self._woven, self._weft, self._given = woven, lanes, 0

    def _turns(self) -> list[int]:
        """Return the numbers of the lanes, in turn."""
        at = self._turn % max(1, len(self._active))
        return self._active[at:] + self._active[:at]

    def _pass(self, count: int) -> None:
        """Note that the next samples of the block were passed on."""
        before, self._given = self._given, self._given + count
        lanes = len(self._weft)
        for place, lane in enumerate(self._weft):
            later = lanes - 1 - place
            lane.pass_on((self._given + later) // lanes - (before + later) // lanes)
        self._turn += count

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
                    fill = asyncio.create_task(self._lanes[at].fill(limit))
                    self._fills[fill] = at
            done, _ = await asyncio.wait(
                self._fills, return_when=asyncio.FIRST_COMPLETED
            )
            for fill in done:
                at = self._fills.pop(fill)
                if fill.result():
                    block = self._lanes[at].look(limit)
                    self._lanes[at].pass_on(len(block))
                    return block
                self._active.remove(at)
        return []

    async def aclose(self) -> None:
        """Stop pending reads, and close all lanes."""
        fills = list(self._fills)
        self._fills.clear()
        for fill in fills:
            fill.cancel()
        await asyncio.gather(*fills, return_exceptions=True)
        await super().aclose()
