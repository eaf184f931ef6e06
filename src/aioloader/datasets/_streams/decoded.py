"""The decoding step: CPU work, so threads share a block, in order."""

import asyncio
import itertools
import os

from aioloader._order.blocks import Block
from aioloader.datasets._streams.cursors import Mapped

# Least samples per thread; smaller shares cost more for threads than they gain.
_SHARE = 4


class Decoded(Mapped):
    """Decodes samples, each block in several threads."""

    stage = "decode"

    async def pull(self, limit: int) -> Block:
        """Return the next samples, decoded."""
        block = await self._upstream.pull(limit)
        if not len(block):
            return []
        size = max(_SHARE, -(-len(block) // _threads()))
        shares = [block[at : at + size] for at in range(0, len(block), size)]
        jobs = [asyncio.to_thread(self._apply, share) for share in shares]
        return list(itertools.chain.from_iterable(await asyncio.gather(*jobs)))


def _threads() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
