"""Samples of local shards, which are mapped into memory.

A mapping keeps the file that was indexed, even if another one takes its name. A file
that is written in place shows that before and after each read.
"""

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from aioloader._base.cancellation import in_thread
from aioloader._base.forks import fork_safe
from aioloader.datasets._stores.failures import (
    Version,
    file_failure,
    opener,
    version_of_file,
)
from aioloader.datasets._streams.edges import Edges, changed_since, check_end
from aioloader.datasets._streams.engine import ByteFormatSpec, sample_of

T = TypeVar("T")
# Shards open at once, each with two descriptors.
OPEN = 256
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # Windows has none
# The largest block that the C library adapts to, less what it adds.
_KEPT = (32 << 20) - (1 << 16)


class LocalReads:
    """The reads of one event loop, all in one thread, of what all loops share.

    Memory that several threads allocate is more often fresh: twice the time of 100 KB.
    """

    def __init__(self, local: Any) -> None:
        self.users = 0
        self._local = local
        self._thread: ThreadPoolExecutor | None = None

    async def read(self, indices: list[int]) -> list[Any]:
        """Return samples; one that cannot be read fails all of them."""
        return await self._run(self._local.samples, indices)

    async def version(self, shard: int) -> Version:
        """Return the version of a shard that is as it was indexed."""
        return await self._run(self._local.version, shard)

    async def _run(self, function: Callable[[Any], T], about: Any) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "aioloader-indexed")
        return await in_thread(function, about, executor=self._thread)

    async def aclose(self) -> None:
        """End the thread, when it has read what was asked for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


class _MappedShard:
    """A shard that is mapped, and was as it is at a time."""

    def __init__(self, path: str, end: int, expected: Version | None) -> None:
        self._path = path
        try:
            self._file = opener(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self.version = version_of_file(self._file)
            size = self.version.size
            self.data = mmap.mmap(self._file, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise file_failure(path, error) from error
        if expected is not None and not self.version.is_of(expected):
            raise changed_since(path, expected, self.version)
        check_end(path, end, size, self.data[end : end + 512])
        self.view = memoryview(self.data)

    def check(self) -> None:
        """Check that it is as it was: to read one that is shorter ends the process."""
        facts, before = os.fstat(self._file), self.version
        if facts.st_mtime != before.modified or facts.st_size != before.size:
            changed = Version(facts.st_size, None, facts.st_mtime)
            raise changed_since(self._path, before, changed)


class MappedShards:
    """Samples of mapped shards, by their indices; of each shard a path and a kind."""

    def __init__(
        self, shards: Sequence[tuple[str, ByteFormatSpec]], edges: Edges
    ) -> None:
        self._shards, self._edges = shards, edges
        self._mappings: OrderedDict[int, _MappedShard] = OrderedDict()
        self._lock = fork_safe(threading.Lock())
        # Once the C library has freed a block of this size, it keeps twice as much for
        # samples, which otherwise cost up to a page fault per 4 KB.
        np.empty(_KEPT, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedShards, (self._shards, self._edges)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return samples; the kernel reads all of them ahead, in any order."""
        if len(indices) > OPEN:  # perhaps of as many shards
            halves = indices[: len(indices) // 2], indices[len(indices) // 2 :]
            return [sample for half in halves for sample in self.samples(half)]
        places, made = [*map(self._edges.find, indices)], list[Any]()
        with self._lock:
            used = {one: self._mapping(one) for one in {place[0] for place in places}}
        if _WILL_NEED is not None:
            for shard, start, stop in places:
                aligned = start - start % mmap.PAGESIZE
                used[shard].data.madvise(_WILL_NEED, aligned, stop - aligned)
        try:
            for shard, start, stop in places:
                path, kind = self._shards[shard]
                made.append(sample_of(kind, path, start, used[shard].view[start:stop]))
        finally:
            for mapping in used.values():
                mapping.check()
        return made

    def version(self, shard: int) -> Version:
        """Return the version of a shard that is as it was indexed."""
        with self._lock:
            return self._mapping(shard).version

    def _mapping(self, shard: int) -> _MappedShard:
        mapping = self._mappings.pop(shard, None)
        if mapping is None:
            versions = self._edges.versions
            expected = versions[shard] if versions else None
            path, end = self._shards[shard][0], self._edges.end(shard)
            mapping = _MappedShard(path, end, expected)
            while len(self._mappings) >= OPEN:  # views keep what they need
                self._mappings.popitem(last=False)
        self._mappings[shard] = mapping
        mapping.check()
        return mapping
