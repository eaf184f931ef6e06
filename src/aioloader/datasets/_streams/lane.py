"""The shards of one lane, one after the other; small ones are opened ahead."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from aioloader._base.blocks import Bad, Block
from aioloader.datasets._stores.bytes import START_DIVISOR
from aioloader.datasets._stores.versions import saved
from aioloader.datasets._streams.cursors import Replayed, State, skip
from aioloader.datasets._streams.shards import (
    Position,
    ShardFormat,
    ShardReader,
    Summary,
)
from aioloader.errors import ShardChangedError

# Least number of samples that a lane asks its reader for: many share the cost.
_SAMPLES = 512
# Least number of rows of columns, which are in memory anyway.
_ROWS = 1 << 14
# Shards that may be opened together.
_TOGETHER = 16


class Lane(Replayed):
    """The samples of several shards.

    They are at ``places`` of ``shards``, looked up on access: there may be millions.
    A state is the number of a shard, a position in it, and how many samples after that
    were passed on. Counting them is right for data that does not change; a reader of
    rows, which may be deleted and inserted, names the last one instead. The state of
    the only lane of a reader, which gets the ``summary``, is like that of several.
    """

    overshoots = True

    def __init__(
        self,
        made_by: ShardFormat,
        shards: Sequence[Any],
        places: Sequence[int],
        budget: int,
        state: State,
        summary: Summary | None = None,
    ) -> None:
        super().__init__({})
        self._summary = summary
        self._format = made_by
        self._shards, self._places = shards, places
        self._budget = budget
        self._number: int = state.get("shard", 0)
        # Where the shard is opened, and what is dropped then, until it was.
        self._position: Position = state.get("at", {})
        self._skip: int = state.get("taken", 0)
        self._least = _SAMPLES
        self._reader: ShardReader | None = None
        self._ahead: deque[ShardReader] = deque()
        self._done: ShardReader | None = None  # until it is closed

    def begin(self) -> None:
        if self._number < len(self._places):
            self._reader = self._open(self._number, self._position)
            self._reader.begin()

    async def _make(self, limit: int) -> Block:
        """Return the next samples of a shard; one that is lost is a ``Bad``."""
        while self._number < len(self._places):
            reader = self._reader
            if reader is None:
                reader = self._reader = self._open(self._number, self._position)
            try:
                if self._skip:
                    await self._drop(reader)
                block = await reader.pull(max(limit, self._least))
            except ShardChangedError:
                raise
            except Exception as error:  # noqa: BLE001  (the loader's policy decides)
                # The rest of the shard is lost, and all that was to be dropped of it.
                self._known = self._here(), None
                await self._turn()
                return [Bad(error)]
            if block:
                self._known = self._here(), reader.positions()
                self._least = _SAMPLES if isinstance(block, list) else _ROWS
                self._position = reader.position()
                if self._number + 1 < len(self._places) and reader.is_draining():
                    self._open_next()
                return block
            await self._turn()
        return []

    def _here(self) -> State:
        """Return the position of the next sample, with the version of its shard."""
        version = None if self._reader is None else self._reader.version()
        at = {**self._position, **saved(*version)} if version else self._position
        return {"shard": self._number, "at": at, "taken": self._skip}

    def state(self) -> State:
        """Return the position; of all shards, if it is the only lane."""
        state = super().state()
        if self._summary is None:
            return state
        return {"shards": self._summary, "turn": 0, "ended": [], "lanes": [state]}

    def _after(self, before: State, what: Any, count: int) -> State:
        if count and what is not None:
            return {**before, "at": what(count), "taken": 0}
        return {**before, "taken": count} if count else before

    async def _drop(self, reader: ShardReader) -> None:
        """Drop the samples passed on before the state was saved."""
        if missing := await skip(reader.pull, self._skip):
            raise ShardChangedError(
                f"shard {self._number} of its lane ends {missing:,} samples before the "
                "position in the state; resume with the original shards, or start "
                "again"
            )
        self._skip, self._position = 0, reader.position()

    async def _turn(self) -> None:
        """Move to the next shard."""
        self._done = self._reader
        self._reader = self._ahead.popleft() if self._ahead else None
        self._number += 1
        self._position, self._skip = {}, 0
        if self._done is not None:
            await self._done.aclose()
            self._done = None

    async def _close(self) -> None:
        readers = [self._reader, *self._ahead, self._done]
        self._reader = self._done = None
        self._ahead.clear()
        for reader in readers:
            if reader is not None:
                await reader.aclose()

    # -- the next shards -------------------------------------------------------------

    def _open(self, number: int, position: Position) -> ShardReader:
        return self._format.open(
            self._shards[self._places[number]], position, self._budget
        )

    def _open_next(self) -> None:
        """Open the next shards ahead, with half of the budget: the rest is kept free.

        Otherwise each small shard would cost the time of a request.
        """
        ahead = self._ahead
        while (number := self._number + len(ahead) + 1) < len(self._places):
            if not self._has_room():
                return
            places = self._places[number : number + _TOGETHER]
            few = [self._shards[place] for place in places]
            ahead.extend(self._format.open_together(few, self._budget))
            if len(ahead) < number - self._number:  # none of them
                ahead.append(self._open(number, {}))
                ahead[-1].begin()

    def _has_room(self) -> bool:
        """Return whether one more shard may be read ahead.

        One whose size is not known yet is expected to be small if the current one is,
        and may take as much as any shard before it is pulled.
        """
        left: float = self._budget // 2
        start = self._budget // START_DIVISOR
        current = None if self._reader is None else self._reader.version()
        is_small = current is None or current[1].size <= start
        for reader in self._ahead:
            count = reader.bytes_ahead()
            if not (is_small if count is None else reader.is_draining()):
                return False
            left -= start if count is None else count
        return not self._ahead or left >= start
