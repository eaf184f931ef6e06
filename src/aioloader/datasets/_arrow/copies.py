"""Local copies of files whose server has no ranges.

Tables are read from their ends, so they need ranges. A copy is a temporary file; the
least recently used ones are removed when there are many, and all after the last
iteration.
"""

import contextlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol, Self

from typing_extensions import Buffer

from aioloader.datasets._stores.bytes import Bytes, NoRangesError
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.outlast import in_thread

# Most bytes on disk, and copies that are kept even beyond that.
_MOST_BYTES, _LEAST_COPIES = 1 << 30, 16
_BUDGET = 16 << 20


class Opener(Protocol):
    """Opens addresses."""

    async def expand(self, patterns: str | Iterable[str]) -> list[str]:
        """Return the addresses that ``patterns`` match, in order."""

    def label(self, address: str) -> str:
        """Return an address as it may be shown."""

    def path(self, address: str) -> str | None:
        """Return the path of a local file, or None."""

    def open(self, address: str, start: int, budget: int, /) -> Bytes:
        """Return the bytes of a file from ``start`` on."""

    async def size(self, address: str) -> int:
        """Return the length of a file that is not local, in bytes."""

    async def read(self, address: str, start: int, stop: int) -> Buffer:
        """Return bytes of such a file, at the version seen by ``size``."""

    def cached(self, cache: CacheDir) -> Self:
        """Return the same, read through a cache."""

    async def aclose(self) -> None:
        """Wait for requests in flight, and drop connections."""


class Copies:
    """Opens addresses, with copies of files that cannot be read by ranges.

    Args:
        opener: Opens the original addresses.
    """

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._users = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._lock = threading.Lock()  # copies start in threads
        self.expand = opener.expand
        self.label = opener.label

    def enter(self) -> None:
        """Keep copies until ``aclose`` was called once for each call of this."""
        self._users += 1

    def path(self, address: str) -> str | None:
        """Return the path of a local file or of a copy, or None."""
        if address in self._copies:
            self._copies.move_to_end(address)
            return self._copies[address][0]
        return self._opener.path(address)

    async def size(self, address: str) -> int:
        """Return the length of a file, in bytes; copies it if needed."""
        try:
            return await self._opener.size(address)
        except NoRangesError:
            return await self._copy(address)

    async def read(self, address: str, start: int, stop: int) -> Buffer:
        """Return bytes of a file, or of its copy."""
        while True:
            if address not in self._copies:
                try:
                    return await self._opener.read(address, start, stop)
                except NoRangesError:
                    await self._copy(address)
            # The copy may be replaced by another file's at any moment.
            if copy := self._copies.get(address):
                with contextlib.suppress(FileNotFoundError):
                    return await in_thread(_read, copy[0], start, stop)

    def cached(self, cache: CacheDir) -> Self:
        """Return the same, read through a cache."""
        return type(self)(self._opener.cached(cache))

    async def aclose(self) -> None:
        """Stop pending work; remove the copies after the last iteration."""
        self._users -= 1
        folder = self._folder
        if self._users <= 0 and folder is not None:
            self._folder = None
            self._copies.clear()
            await in_thread(folder.cleanup)
        await self._opener.aclose()

    async def _copy(self, address: str) -> int:
        source, size = self._opener.open(address, 0, _BUDGET), 0
        file = await in_thread(self._new_file)
        try:
            while memoryview(piece := await source.read()):
                size += await in_thread(file.write, piece)
        finally:
            await source.aclose()
            await in_thread(file.close)
        self._copies[address] = file.name, size
        await in_thread(self._drop)
        return size

    def _new_file(self) -> Any:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="aioloader-")
        folder = self._folder.name
        return tempfile.NamedTemporaryFile(dir=folder, buffering=0, delete=False)

    def _drop(self) -> None:
        held = sum(size for _, size in self._copies.values())
        while held > _MOST_BYTES and len(self._copies) > _LEAST_COPIES:
            _, (path, size) = self._copies.popitem(last=False)
            held -= size
            os.unlink(path)  # noqa: PTH108  (open handles stay valid)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opener,)


def _read(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        file.seek(start)
        return file.read(stop - start)
