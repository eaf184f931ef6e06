"""Random access to the samples of local shards, which are mapped into memory.

A mapping keeps the file that was indexed, even if another file takes the name.
In-place changes of the file are detected before and after each read.
"""

import contextlib
import importlib
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
from aioloader.datasets._streams.edges import Edges, changed_since
from aioloader.datasets._streams.engine import ByteFormatSpec, sample_of

T = TypeVar("T")
# Most shards open at once, each with two descriptors; a process may have few.
MAX_OPEN = 256
with contextlib.suppress(ImportError):  # Windows
    resource: Any = importlib.import_module("resource")
    if (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) >= 0:
        MAX_OPEN = max(1, min(MAX_OPEN, limit // 8))
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # Windows has none
# The C library's largest dynamic ``M_MMAP_THRESHOLD``, less some overhead.
_MAX_KEPT_BYTES = (32 << 20) - (1 << 16)


class LocalReads:
    """Reads local shards for one event loop, in one thread; loops share ``local``.

    Several threads would use more fresh memory: a 100 KB read would take twice as long.
    """

    def __init__(self, local: Any) -> None:
        self.users = 0
        self._local = local
        self._thread: ThreadPoolExecutor | None = None

    async def read(self, indices: list[int]) -> list[Any]:
        """Return the samples at ``indices``; raise if a sample is unreadable."""
        return await self._run(self._local.samples, indices)

    async def version(self, shard: int) -> Version:
        """Return the version of a shard; raise an error if it has changed."""
        return await self._run(self._local.version, shard)

    async def _run(self, function: Callable[[Any], T], argument: Any) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "aioloader-indexed")
        return await in_thread(function, argument, executor=self._thread)

    async def aclose(self) -> None:
        """End the thread after its current reads, without waiting for them."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


class _MappedShard:
    """A memory-mapped shard, with the version that the file had when it was mapped."""

    def __init__(self, path: str, shard: int, edges: Edges) -> None:
        self._path = path
        try:
            self._file = opener(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self.version = version_of_file(self._file)
            size = self.version.size
            access = mmap.ACCESS_READ
            # An empty file cannot be mapped.
            self.data: Any = size and mmap.mmap(self._file, size, access=access)
        except (OSError, ValueError) as error:
            raise file_failure(path, error) from error
        expected, end = edges.version(shard), edges.end(shard)
        if expected is not None and not self.version.is_of(expected):
            raise changed_since(path, expected, self.version)
        self.view = memoryview(self.data or b"")
        rest = bytes(self.view[end : end + Edges.trailer_bytes])
        edges.check_end(shard, path, size, rest)

    def check(self) -> None:
        """Raise an error if the file changed; reading past its end kills a process."""
        facts, before = os.fstat(self._file), self.version
        if facts.st_mtime != before.modified or facts.st_size != before.size:
            changed = Version(facts.st_size, None, facts.st_mtime)
            raise changed_since(self._path, before, changed)


class MappedShards:
    """Random access to memory-mapped shards, each with a path and a byte format."""

    def __init__(
        self, shards: Sequence[tuple[str, ByteFormatSpec]], edges: Edges
    ) -> None:
        self._shards, self._edges = shards, edges
        self._mappings: OrderedDict[int, _MappedShard] = OrderedDict()
        self._lock = fork_safe(threading.Lock())
        # After freeing a block of this size, the C library keeps twice as much memory
        # for samples; fresh memory costs up to a page fault per 4 KB.
        np.empty(_MAX_KEPT_BYTES, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedShards, (self._shards, self._edges)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``; first ask the kernel to prefetch them."""
        if len(indices) > MAX_OPEN:  # each may be in another shard
            halves = indices[: len(indices) // 2], indices[len(indices) // 2 :]
            return [sample for half in halves for sample in self.samples(half)]
        places, made = [*map(self._edges.find, indices)], list[Any]()
        with self._lock:
            used = {shard: self._mapping(shard) for shard in {p[0] for p in places}}
        if _WILL_NEED is not None:
            for shard, start, stop in places:
                aligned = start - start % mmap.PAGESIZE
                used[shard].data.madvise(_WILL_NEED, aligned, stop - aligned)
        try:
            for shard, start, stop in places:
                path, spec = self._shards[shard]
                made.append(sample_of(spec, path, start, used[shard].view[start:stop]))
        finally:
            for mapping in used.values():
                mapping.check()
        return made

    def version(self, shard: int) -> Version:
        """Return the version of a shard; raise an error if it has changed."""
        with self._lock:
            return self._mapping(shard).version

    def _mapping(self, shard: int) -> _MappedShard:
        mapping = self._mappings.pop(shard, None)
        if mapping is None:
            mapping = _MappedShard(self._shards[shard][0], shard, self._edges)
            self._edges.seen[shard] = mapping.version
            while len(self._mappings) >= MAX_OPEN:  # views keep their mappings alive
                self._mappings.popitem(last=False)
        self._mappings[shard] = mapping
        mapping.check()
        return mapping
