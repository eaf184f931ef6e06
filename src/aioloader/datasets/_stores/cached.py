"""Ranged reads through a local cache: aligned blocks, kept by version.

A block is read from the store once per machine, for all processes and any start. The
name of a block contains the object's version, so a changed object is read again; that
costs one small request per object and reader.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from typing_extensions import Buffer

from aioloader.datasets._stores.bytes import Fetch, Piece, Version
from aioloader.datasets._stores.cache_dir import CacheDir

_BLOCK = 4 << 20


class CachedRanges:
    """One object's ranges, through a cache.

    Args:
        fetch: Reads a range from the store.
        cache: The directory of the blocks.
        name: Name of the object in the cache; kept as a hash only.
    """

    def __init__(self, fetch: Fetch, cache: CacheDir, name: str) -> None:
        self._fetch = fetch
        self._cache = cache
        self._name = name
        # Pieces share blocks: each is read once, and released after the last piece.
        self._blocks: dict[int, asyncio.Task[Buffer]] = {}
        self._facts: asyncio.Task[Piece] | None = None

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range, as ``Fetch`` does."""
        if self._facts is None:
            self._facts = asyncio.create_task(_begun(self._fetch(0, 1, version)))
        facts: Piece = await _waited(self._facts)
        if facts.version.e_tag is None:  # a change might go unnoticed
            return await self._fetch(start, stop, version)
        stop = min(stop, facts.version.size)
        parts: list[Buffer] = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            block = await self._block(number, facts)
            first = number * _BLOCK
            parts.append(memoryview(block)[max(0, start - first) : stop - first])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return Piece(data, facts.version)

    async def _block(self, number: int, facts: Piece) -> Buffer:
        blocks = self._blocks.items()
        for passed in [at for at, one in blocks if at < number - 4 and one.done()]:
            del self._blocks[passed]
        task = self._blocks.get(number)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._read(number, facts))
            self._blocks[number] = task
        block: Buffer = await _waited(task)
        return block

    async def _read(self, number: int, facts: Piece) -> Buffer:
        start = number * _BLOCK
        size, e_tag, modified = facts.version
        stop = min(start + _BLOCK, size)
        told = e_tag if facts.version.strong else f"{e_tag} {modified}"
        key = f"{self._name}\n{told}\n{size}\n{start}-{stop}"
        data: Buffer | None = await asyncio.to_thread(self._cache.get, key)
        if data is None:
            data = (await self._fetch(start, stop, facts.version)).data
            if len(memoryview(data)) == stop - start:
                await asyncio.to_thread(self._cache.put, key, data)
        return data

    async def aclose(self) -> None:
        """Stop pending work."""
        tasks = [*self._blocks.values(), *([self._facts] if self._facts else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _begun(request: Awaitable[Piece]) -> Piece:
    return await request


async def _waited(task: "asyncio.Task[Any]") -> Any:
    """Return the result of a task that others may wait for too."""
    await asyncio.wait([task])  # cancellation does not reach it
    return task.result()
