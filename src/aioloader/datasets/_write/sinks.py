"""Destinations of shards: a directory or a store; readers see only whole shards.

A file is written under a unique hidden name, synchronised and renamed. An object is
uploaded in parts, and exists once the upload is completed; a killed process leaves
parts, which nobody sees, and which a lifecycle rule of the bucket should remove after
some days. Memory holds the parts in flight.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from aioloader.datasets._stores.addresses import is_local, path_of
from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.datasets._stores.flights import (
    Flights,
    import_obstore,
    obstore_errors,
)
from aioloader.datasets._stores.options import Options, check_no_options
from aioloader.datasets._stores.outlast import in_thread, outlast
from aioloader.datasets._stores.stores import StoreSource
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Parts of an upload: S3 allows 10,000 of them, which makes 80 GB.
_PART_BYTES, _PARTS = 8 << 20, 4
_PARTIAL = ".partial"
_DRAIN_SECONDS = 5.0


class Upload(Protocol):
    """One shard being written; invisible until it is completed."""

    async def write(self, data: bytes) -> None:
        """Add bytes."""

    async def complete(self) -> None:
        """Make it visible to readers."""

    async def abort(self) -> None:
        """Remove what was written."""


class Sink(Protocol):
    """A folder on disk or in a store.

    Attributes:
        label: Its address as it may be shown.
    """

    label: str

    async def open(self, name: str) -> dict[str, int]:
        """Return the names and sizes of existing files, including ``name``'s."""

    async def read(self, file: str) -> bytes | None:
        """Return a small file, or None."""

    async def put(self, file: str, data: bytes) -> None:
        """Write a small file at once, replacing the existing one."""

    async def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small file if it equals ``before``; return whether it did.

        Of several concurrent writers one succeeds, where the file system has locks
        (``flock``) or the store has conditional writes.
        """

    def begin(self, file: str) -> Upload:
        """Start writing a shard."""

    async def aclose(self) -> None:
        """Release connections."""


def make_sink(
    destination: "str | os.PathLike[str] | ObjectStore", options: Options
) -> Sink:
    """Return the sink of an address, or of a store of obstore.

    Raises:
        ImportError: If it is a store, and obstore is not installed.
        TypeError: If it is none of these.
        ValueError: If a URL is of an unknown kind, or rejects the options.
    """
    if isinstance(destination, (str, os.PathLike)):
        address = os.fsdecode(destination)
        if is_local(address):
            folder = path_of(address)
            check_no_options(folder, options)
            return FolderSink(folder)
    return StoreSink(StoreSource(destination, options))


# -- directories ------------------------------------------------------------------


class FolderSink:
    """A directory, created if missing.

    Args:
        folder: Its path.

    Attributes:
        label: The path.
    """

    def __init__(self, folder: str) -> None:
        self.label = folder
        self._folder = Path(folder)

    async def open(self, name: str) -> dict[str, int]:
        """Make the directory, and remove leftovers of a killed writer."""
        return await in_thread(self._open, name)

    def _open(self, name: str) -> dict[str, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Not those of a writer whose name starts with this one's.
        file = rf"{re.escape(name)}-(\d+\.\w+(\.idx)?|shards\.json)"
        left = re.compile(rf"\.{file}(\.\w+)?{re.escape(_PARTIAL)}")
        with os.scandir(self._folder) as entries:
            there = {e.name: e.stat().st_size for e in entries if e.is_file()}
        for file in filter(left.fullmatch, there):
            (self._folder / file).unlink(missing_ok=True)
        return there

    async def read(self, file: str) -> bytes | None:
        """Return a small file, or None."""
        with contextlib.suppress(FileNotFoundError):
            # An empty file was created by ``swap``.
            return await in_thread((self._folder / file).read_bytes) or None
        return None

    async def put(self, file: str, data: bytes) -> None:
        """Write a small file, and replace the old one."""
        await in_thread(self.begin(file).put, data)

    async def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small file if it equals ``before``; return whether it did."""
        return await in_thread(self._swap, self._folder / file, before, data)

    def _swap(self, path: Path, before: bytes | None, data: bytes) -> bool:
        with _locked(path) as file:
            if (file.read() or None) != before:
                return False
            self.begin(path.name).put(data)
            return True

    def begin(self, file: str) -> "_FileUpload":
        """Start writing a shard."""
        return _FileUpload(self._folder, file)

    async def aclose(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Yield the file at a path, created if missing, and locked."""
    while True:
        with path.open("a+b") as file:
            _lock(file, "LOCK_EX")
            try:
                if _is_at(file, path):  # else it was replaced
                    file.seek(0)
                    yield file
                    return
            finally:
                # Closing it is not enough: a process forked meanwhile has it, too.
                _lock(file, "LOCK_UN")


def _lock(file: BinaryIO, what: str) -> None:
    """Lock or unlock a file, where possible; a lock ends with the process."""
    try:
        import fcntl  # noqa: PLC0415  (no such module on Windows)
    except ImportError:
        return
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, getattr(fcntl, what))


def _is_at(file: BinaryIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


class _FileUpload:
    """A file under a hidden name, until it is complete."""

    def __init__(self, folder: Path, file: str) -> None:
        self._folder, self._path = folder, folder / file
        # A unique name, so no other writer writes to it or renames it, even by mistake.
        self._partial = folder / f".{file}.{secrets.token_hex(4)}{_PARTIAL}"
        self._file: FileIO | None = None

    def put(self, data: bytes) -> None:
        """Write all of it, in the calling thread."""
        try:
            self._write(data)
            self._complete()
        except BaseException:
            self._abort()
            raise

    async def write(self, data: bytes) -> None:
        """Add bytes, in a thread."""
        await in_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = FileIO(self._partial, "w")
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    async def complete(self) -> None:
        """Make sure that the bytes are on the disk, then rename the file."""
        await in_thread(self._complete)

    def _complete(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            self._partial.replace(self._path)
        except FileNotFoundError as error:
            raise StateMismatchError(
                f"another writer has removed {str(self._partial)!r} meanwhile; run one "
                "writer at a time, or give each a different name"
            ) from error
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    async def abort(self) -> None:
        """Remove the file."""
        await in_thread(self._abort)

    def _abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)


# -- stores -----------------------------------------------------------------------


class StoreSink:
    """A store, or the folder in it that a URL names.

    Args:
        source: The store.

    Attributes:
        label: Its address as it may be shown.
    """

    def __init__(self, source: StoreSource) -> None:
        self.label = source.label
        self._source = source
        self._flights: Flights | None = None

    async def open(self, name: str) -> dict[str, int]:  # noqa: ARG002  (parts are invisible)
        """Return the objects in the folder, not those below it."""
        self._flights = Flights()
        obstore = import_obstore()
        listed = await self.request("list", "", obstore.list_with_delimiter_async)
        return {meta["path"]: meta["size"] for meta in listed["objects"]}

    async def read(self, file: str) -> bytes | None:
        """Return a small object, or None."""
        return (await self._version(file))[0]

    async def put(self, file: str, data: bytes) -> None:
        """Write a small object, replacing the existing one."""
        obstore = import_obstore()
        await self.request("write", file, lambda s: obstore.put_async(s, file, data))

    async def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small object if it equals ``before``; return whether it did."""
        obstore = import_obstore()
        assert self._flights is not None
        found, mode = await self._version(file)
        if found != before:
            return False
        put = obstore.put_async(self._source.open(), file, data, mode=mode)
        errors = obstore.exceptions
        try:
            await self._flights.follow(put)
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return False
        except obstore_errors() as exc:
            failure = failure_of("write", self._source.locate(file), exc)
            has_conditions = not _lacks_conditions(exc)
        else:
            return True
        if has_conditions:
            raise failure
        await self.put(file, data)
        return True

    async def _version(self, file: str) -> tuple[bytes | None, Any]:
        """Return a small object, and the mode that replaces only this version."""
        obstore = import_obstore()
        try:
            got = await self.request("read", file, lambda s: obstore.get_async(s, file))
        except FileNotFoundError:
            return None, "create"
        data = bytes(await self.request("read", file, lambda _: got.bytes_async()))
        tags = {name: got.meta.get(name) for name in ("e_tag", "version")}
        return data, {name: tag for name, tag in tags.items() if tag} or "overwrite"

    def begin(self, file: str) -> "_ObjectUpload":
        """Start uploading a shard."""
        return _ObjectUpload(self, file)

    async def aclose(self) -> None:
        """Wait for requests to end, and drop idle connections."""
        if self._flights is not None:
            await self._flights.drain(_DRAIN_SECONDS)
        self._source.close()

    async def request(self, verb: str, file: str, make: Any) -> Any:
        """Return the result of a request.

        Args:
            verb: For an error, as in ``"write"``.
            file: The object, for an error.
            make: Makes the request, given a store.

        Raises:
            DatasetError: If the store refuses it.
        """
        assert self._flights is not None
        try:
            return await self._flights.follow(make(self._source.open()))
        except obstore_errors() as exc:
            failure = failure_of(verb, self._source.locate(file), exc)
        raise failure


def _lacks_conditions(error: Exception) -> bool:
    """Return whether a store has no conditional writes."""
    is_known = isinstance(error, NotImplementedError)
    return is_known or Reason(error).status == HTTPStatus.NOT_IMPLEMENTED


class _ObjectUpload:
    """An upload in parts, several in flight."""

    def __init__(self, sink: StoreSink, file: str) -> None:
        self._sink, self._file = sink, file
        self._writer: Any = None

    async def write(self, data: bytes) -> None:
        """Add bytes; waits while the most parts allowed are in flight."""
        await self._sink.request(
            "write", self._file, lambda s: self._open(s).write(data)
        )

    def _open(self, store: "ObjectStore") -> Any:
        if self._writer is None:
            self._writer = import_obstore().open_writer_async(
                store, self._file, buffer_size=_PART_BYTES, max_concurrency=_PARTS
            )
        return self._writer

    async def complete(self) -> None:
        """Wait for all parts, and combine them into one object."""
        await self._sink.request("write", self._file, lambda s: self._open(s).close())

    async def abort(self) -> None:
        """Make the store discard the parts; errors of the store are ignored."""
        if self._writer is None:
            return
        error = RuntimeError("aborted")
        closing = self._writer.__aexit__(type(error), error, None)
        with contextlib.suppress(*obstore_errors()):
            await outlast(asyncio.ensure_future(closing))
