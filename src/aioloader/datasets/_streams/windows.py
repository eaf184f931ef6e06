"""Shuffling within windows, so that the state is a position and not a buffer.

The stream is cut into windows, and each is permuted by a separate key. Two windows are
in memory: one that is passed on, and the next one, which is read meanwhile. The state
is where the window started and how much of it was passed on.
"""

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

from aioloader._order.blocks import Block, cut, join, pick, unreadable
from aioloader._order.permutation import ShuffledIndices, is_quick, paced, pause
from aioloader.datasets._streams.cursors import Cursor, State, check_again

Order = Callable[[int, int], ShuffledIndices]
# Most samples of a window pulled at once; more would delay others.
_PULL = 1 << 13


class Shuffled:
    """Samples permuted within windows.

    Args:
        upstream: The cursor being read, at the start of the window.
        size: Samples of a window.
        order: Maps number and length of a window to a permutation of its places.
        state: Which window it is, and how much of it was passed on.
    """

    def __init__(self, upstream: Cursor, size: int, order: Order, state: State) -> None:
        self._upstream = upstream
        self._size = size
        self._order = order
        self._number: int = state.get("number", 0)
        self._taken: int = state.get("taken", 0)
        self._start = upstream.state()
        # Unreadable samples of the window.
        self._failed: list[int] | None = state.get("failed") if self._taken else None
        self._window: Block | None = None
        self._next: asyncio.Task[tuple[State, Block, list[int]]] | None = None

    async def pull(self, limit: int) -> Block:
        """Return the next samples, all of one window."""
        if self._window is None:
            await self._turn(self._number)
        while len(self._window or ()) and self._taken >= len(self._window or ()):
            self._taken = 0
            await self._turn(self._number + 1)
        part = cut(self._window or [], self._taken, self._taken + limit)
        self._taken += len(part)
        return part

    def state(self) -> State:
        """Return the state at the window's start, and how much of it was passed on."""
        failed = {} if self._failed is None else {"failed": self._failed}
        place = {"number": self._number, "taken": self._taken}
        return {"up": self._start, **place, **failed}

    async def aclose(self) -> None:
        """Stop reading the next window."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
            self._next = None
        await self._upstream.aclose()

    async def _turn(self, number: int) -> None:
        """Move to a window, and start reading the one after it."""
        if self._next is None:
            self._next = asyncio.create_task(self._read(number, self._failed))
        await asyncio.wait([self._next])  # cancellation does not reach it
        self._start, self._window, self._failed = self._next.result()
        self._next = None
        self._number = number
        if len(self._window):
            self._next = asyncio.create_task(self._read(number + 1))

    async def _read(
        self, number: int, known: list[int] | None = None
    ) -> tuple[State, Block, list[int]]:
        """Return the state before a window, its permuted samples, and which failed."""
        start = self._upstream.state()
        parts: list[Block] = []
        found, failed = 0, list[int]()
        while found < self._size:
            block = await self._upstream.pull(min(self._size - found, _PULL))
            if not len(block):
                break
            check_again(block, found, self._size, known)
            failed += [found + place for place in unreadable(block)]
            # Lists are joined as they come: joining all at the end takes milliseconds.
            if isinstance(block, list) and parts and isinstance(parts[-1], list):
                parts[-1] += block
            else:
                parts.append([*block] if isinstance(block, list) else block)
            found += len(block)
        if is_quick(found):
            return start, self._permuted(parts, number, found), failed
        # In a thread, while the previous window is passed on.
        permuted = await asyncio.to_thread(self._permuted, parts, number, found)
        return start, permuted, failed

    def _permuted(self, parts: list[Block], number: int, length: int) -> Block:
        order = paced(self._order(number, length))
        if not any(isinstance(part, list) for part in parts):
            return pick(join(parts), [*chain.from_iterable(order)])
        whole: Any = list(join(parts)) if len(parts) > 1 else parts.pop()
        permuted = [sample for places in order for sample in pick(whole, places)]
        while len(whole) > _PULL:  # freeing it at once would block
            del whole[-_PULL:]
            pause()
        return permuted
