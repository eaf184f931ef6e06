"""Files to read tables from: local ones, objects, and local copies of objects.

Tables are read from their ends, so they need ranges. A file whose server has none is
copied to a temporary file; the least recently used copies are removed when there are
many, and all after the last iteration.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import Buffer

from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import NoRangesError, file_failure, truncated
from aioloader.datasets._stores.outlast import in_thread
from aioloader.datasets._stores.versions import Known, Version, opener, version_of_file

if TYPE_CHECKING:
    from aioloader.datasets._stores.places import Places

# Most bytes on disk, and copies that are kept even beyond that.
_MOST_BYTES, _LEAST_COPIES = 1 << 30, 16
_BUDGET = 16 << 20


class Copies:
    """Opens addresses, with copies of files that cannot be read by ranges."""

    def __init__(self, places: "Places") -> None:
        self._places = places
        self._users = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: OrderedDict[str, tuple[str, Version]] = OrderedDict()
        self._lock = threading.Lock()  # copies start in threads
        self.expand, self.label, self.name = places.expand, places.label, places.name

    def enter(self) -> None:
        """Keep copies until ``aclose`` was called once for each call of this."""
        self._users += 1

    def path(self, address: str) -> str | None:
        """Return the path of a local file or of a copy, or None."""
        if address in self._copies:
            self._copies.move_to_end(address)
            return self._copies[address][0]
        return self._places.path(address)

    async def version(self, address: str) -> Version:
        """Return the version of a file, or of its copy; copies it if needed."""
        if copy := self._copies.get(address):
            return copy[1]
        try:
            return await self._places.version(address)
        except NoRangesError:
            return await self.copy(address)

    def check(self, address: str, version: Version) -> None:
        """Check that a local file, or the original of a copy, is of a version.

        A file that was deleted while it is open is still there. In a thread.
        """
        path = self._places.path(address)
        if copy := self._copies.get(address):
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

    async def part(
        self, address: str, start: int, stop: int = 0, version: Version | None = None
    ) -> tuple[bytes, Version]:
        """Return some bytes of a file, and its version, which is checked if known.

        A negative ``start`` counts from the end; a ``stop`` of 0 is the end.
        """
        if (path := self._places.path(address)) is not None:
            return await asyncio.to_thread(read_local, path, start, stop, version)
        version = version or await self.version(address)
        start, stop = _bounds(start, stop, version.size)
        data = b""
        if start < stop:
            data = bytes(memoryview(await self.read(address, start, stop, version)))
        return _checked(data, stop - start, self.label(address)), version

    async def read(
        self, address: str, start: int, stop: int, version: Version
    ) -> Buffer:
        """Return bytes of an object, or of its copy."""
        while True:
            if address not in self._copies:
                try:
                    return await self._places.read(address, start, stop, version)
                except NoRangesError:
                    await self.copy(address)
            self.check(address, version)
            # The copy may be replaced by another file's at any moment.
            if copy := self._copies.get(address):
                with contextlib.suppress(FileNotFoundError):
                    return (await in_thread(read_local, copy[0], start, stop, None))[0]

    def cached(self, cache: CacheDir) -> Self:
        return type(self)(self._places.cached(cache))

    async def aclose(self) -> None:
        """Stop pending work; remove the copies after the last iteration."""
        self._users -= 1
        folder = self._folder
        if self._users <= 0 and folder is not None:
            self._folder = None
            self._copies.clear()
            await in_thread(folder.cleanup)
        await self._places.aclose()

    async def copy(self, address: str) -> Version:
        """Copy an object to a temporary file, and return its version."""
        source = self._places.open(address, 0, _BUDGET)
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
        return type(self), (self._places,)


def _bounds(start: int, stop: int, size: int) -> tuple[int, int]:
    return max(0, start + size) if start < 0 else start, stop or size


def read_local(
    path: str, start: int, stop: int, version: Version | None
) -> tuple[bytes, Version]:
    """Return some bytes of a local file, and its version, as ``Copies.part``."""
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            found = version_of_file(file.fileno())
            start, stop = _bounds(start, stop, found.size)
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise file_failure(path, error) from error
    Known(version).check(path, found)
    return _checked(data, stop - start, path), found


def _checked(data: bytes, expected: int, location: str) -> bytes:
    if len(data) != expected:
        what = ": it was rewritten; start again"
        raise truncated(location, expected, len(data), what)
    return data
