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
from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.outlast import in_thread
from aioloader.datasets._stores.versions import Known, Version, version_of_file

# Most bytes on disk, and copies that are kept even beyond that.
_MOST_BYTES, _LEAST_COPIES = 1 << 30, 16
_BUDGET = 16 << 20


class Opener(Protocol):
    """Opens addresses."""

    async def expand(self, patterns: str | Iterable[str]) -> list[str]:
        """Return the addresses that ``patterns`` match, in order."""

    def label(self, address: str) -> str:
        """Return an address as it may be shown."""

    def name(self, address: str) -> str:
        """Return the name of a file, as it was given or listed."""

    def path(self, address: str) -> str | None:
        """Return the path of a local file, or None."""

    def open(self, address: str, start: int, budget: int, /) -> Bytes:
        """Return the bytes of a file from ``start`` on."""

    async def version(self, address: str) -> Version:
        """Return the version of a file."""

    async def read(
        self, address: str, start: int, stop: int, version: Version
    ) -> Buffer:
        """Return bytes of a file that is not local, at a version."""

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
        self._copies: OrderedDict[str, tuple[str, Version]] = OrderedDict()
        self._lock = threading.Lock()  # copies start in threads
        self.expand = opener.expand
        self.label, self.name = opener.label, opener.name

    def enter(self) -> None:
        """Keep copies until ``aclose`` was called once for each call of this."""
        self._users += 1

    def path(self, address: str) -> str | None:
        """Return the path of a local file or of a copy, or None."""
        if address in self._copies:
            self._copies.move_to_end(address)
            return self._copies[address][0]
        return self._opener.path(address)

    def local(self, address: str) -> str | None:
        """Return the path of a local file that is no copy, or None."""
        return self._opener.path(address)

    async def version(self, address: str) -> Version:
        """Return the version of a file, or of its copy; copies it if needed."""
        if copy := self._copies.get(address):
            return copy[1]
        try:
            return await self._opener.version(address)
        except NoRangesError:
            return await self._copy(address)

    def check(self, address: str, version: Version) -> None:
        """Check that a local file, or the original of a copy, is of a version.

        A file that was deleted while it is open is still there. In a thread.

        Raises:
            DatasetError: If it is not.
        """
        path, copy = self._opener.path(address), self._copies.get(address)
        if copy is not None:
            found = copy[1]
        elif path is None:
            return  # every answer is compared
        else:
            try:
                found = version_of_file(path)
            except FileNotFoundError:
                return
            except OSError as error:
                raise file_failure(path, error) from error
        Known(version).check(self.label(address), found)

    async def read(
        self, address: str, start: int, stop: int, version: Version
    ) -> Buffer:
        """Return bytes of a file, or of its copy."""
        while True:
            if address not in self._copies:
                try:
                    return await self._opener.read(address, start, stop, version)
                except NoRangesError:
                    await self._copy(address)
            self.check(address, version)
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

    async def _copy(self, address: str) -> Version:
        source = self._opener.open(address, 0, _BUDGET)
        file = await in_thread(self._new_file)
        try:
            while memoryview(piece := await source.read()):
                await in_thread(file.write, piece)
        finally:
            await source.aclose()
            await in_thread(file.close)
        assert source.version is not None
        self._copies[address] = file.name, source.version
        await in_thread(self._drop)
        return source.version

    def _new_file(self) -> Any:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="aioloader-")
        folder = self._folder.name
        return tempfile.NamedTemporaryFile(dir=folder, buffering=0, delete=False)

    def _drop(self) -> None:
        held = sum(version.size for _, version in self._copies.values())
        while held > _MOST_BYTES and len(self._copies) > _LEAST_COPIES:
            _, (path, version) = self._copies.popitem(last=False)
            held -= version.size
            os.unlink(path)  # noqa: PTH108  (open handles stay valid)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opener,)


def _read(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        file.seek(start)
        return file.read(stop - start)
