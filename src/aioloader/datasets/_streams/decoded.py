"""The step that decodes: CPU work, so a block is shared among threads, in order."""

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

from aioloader._order.blocks import Bad, Block
from aioloader.datasets._streams.cursors import Cursor, State, bad

# What is decoded beside others; smaller shares cost more for threads than they gain.
_SHARE = 4


class Decoded:
    """Each sample through a plain function, a block in several threads at a time.

    Args:
        upstream: What is read.
        function: Decodes a sample.
    """

    has_state = False

    def __init__(self, upstream: Cursor, function: Callable[[Any], Any]) -> None:
        self._upstream = upstream
        self._function = function
        self.aclose = upstream.aclose

    def state(self) -> State:
        """Return where the next sample is."""
        return {"up": self._upstream.state()}

    async def pull(self, limit: int) -> Block:
        """Return the next samples, decoded."""
        block = await self._upstream.pull(limit)
        if not len(block):
            return []
        size = max(_SHARE, -(-len(block) // _threads()))
        shares = [block[at : at + size] for at in range(0, len(block), size)]
        jobs = [asyncio.to_thread(self._decode, share) for share in shares]
        return list(itertools.chain.from_iterable(await asyncio.gather(*jobs)))

    def _decode(self, share: Block) -> list[Any]:
        function, made = self._function, []
        for sample in share:
            try:
                made.append(sample if type(sample) is Bad else function(sample))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                made.append(bad(error, "decode"))
        return made


def _threads() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
