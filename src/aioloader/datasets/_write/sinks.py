"""Destinations of shards: a directory or a store; readers see only whole shards.

A file is written under a unique hidden name, synchronized and renamed. An object is
uploaded in parts, and exists once the upload is completed; a killed process leaves
parts, which nobody sees, and which a lifecycle rule of the bucket should remove after
some days. Memory holds the parts in flight.
"""

import asyncio
import contextlib
import functools
import os
import re
import secrets
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from aioloader._base.outlast import in_thread, outlast
from aioloader.datasets._stores.addresses import is_local, path_of
from aioloader.datasets._stores.cache_dir import lock
from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.datasets._stores.flights import Flights, import_obstore, obstore_errors
from aioloader.datasets._stores.options import Options, check_no_options
from aioloader.datasets._stores.stores import ObstoreStore
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

# Parts of an upload: S3 allows 10,000 of them, which makes 80 GB.
_PART_BYTES, _PARTS = 8 << 20, 4
_PARTIAL = ".partial"
_DRAIN_SECONDS = 5.0


def make_sink(
    destination: "str | os.PathLike[str] | ObjectStore", options: Options
) -> "Sink":
    """Return the sink of an address, or of a store of obstore."""
    if isinstance(destination, (str, os.PathLike)):
        address = os.fsdecode(destination)
        if not address:  # often an unset variable; it would be the current directory
            raise ValueError("the destination is empty; '.' is the current directory")
        if is_local(address):
            folder = path_of(address)
            check_no_options(folder, options)
            return FolderSink(folder)
    return StoreSink(ObstoreStore(destination, options))


# -- directories ------------------------------------------------------------------


def threaded(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Run a method in a thread; a caller that is cancelled waits for its end.

    Errors of a full disk, which name no file, get the sink's label.
    """

    @functools.wraps(method)
    async def run(sink: Any, *args: Any) -> T:
        try:
            return await in_thread(method, sink, *args)
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = sink.label
            raise

    return run


class FolderSink:
    """A directory, created if missing, to which one shard at a time is written."""

    def __init__(self, folder: str) -> None:
        self.label = folder
        self._folder = Path(folder)
        self._shard: _Partial | None = None

    @threaded
    def open(self, name: str) -> dict[str, int]:
        """Return names and sizes of all files; leftovers of ``name`` are removed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Not those of a writer whose name starts with this one's.
        file = rf"{re.escape(name)}-(\d+\.\w+(\.idx)?|shards\.json)"
        left = re.compile(rf"\.{file}(\.\w+)?{re.escape(_PARTIAL)}")
        there: dict[str, int] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Another writer may rename its file meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        there[entry.name] = entry.stat().st_size
        for file in filter(left.fullmatch, there):
            (self._folder / file).unlink(missing_ok=True)
        return there

    @threaded
    def read(self, file: str) -> bytes | None:
        """Return a small file, or None."""
        with contextlib.suppress(FileNotFoundError):
            # An empty file was created by ``swap``.
            return (self._folder / file).read_bytes() or None
        return None

    @threaded
    def put(self, file: str, data: bytes) -> None:
        """Write a small file, completely or not at all."""
        self._replace(file, data)

    @threaded
    def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small file if it equals ``before``; return whether it did.

        Of several concurrent writers one succeeds, where the file system has locks.
        """
        path = self._folder / file
        while True:
            with path.open("a+b") as found:
                lock(found, "LOCK_EX")
                try:
                    if is_at(found, path):  # else it was replaced
                        found.seek(0)
                        is_same = (found.read() or None) == before
                        if is_same:
                            self._replace(file, data)
                        return is_same
                finally:
                    # Closing it is not enough: a process forked meanwhile has it, too.
                    lock(found, "LOCK_UN")

    @threaded
    def write(self, file: str, data: bytes) -> None:
        """Add bytes to a shard; it is invisible until it is completed."""
        if self._shard is None:
            self._shard = _Partial(self._folder / file)
        self._shard.append(data)

    @threaded
    def complete(self) -> None:
        """Make the shard visible to readers."""
        assert self._shard is not None
        self._shard.rename()
        self._shard = None

    async def aclose(self) -> None:
        """Remove an incomplete shard."""
        if self._shard is not None:
            await in_thread(self._shard.remove)
            self._shard = None

    def _replace(self, file: str, data: bytes) -> None:
        partial = _Partial(self._folder / file)
        try:
            partial.append(data)
            partial.rename()
        except BaseException:
            partial.remove()
            raise


class _Partial(FileIO):
    """A file under a hidden name, until it is renamed to ``path``."""

    def __init__(self, path: Path) -> None:
        # A unique name, so no other writer writes to it or renames it, even by mistake.
        name = f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}"
        self._hidden, self._path = path.with_name(name), path
        super().__init__(self._hidden, "w")

    def append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.write(left) :]

    def rename(self) -> None:
        """Make sure that the bytes are on the disk, then rename the file."""
        os.fsync(self.fileno())
        self.close()
        try:
            self._hidden.replace(self._path)
        except FileNotFoundError as error:
            raise StateMismatchError(
                f"another writer has removed {str(self._hidden)!r} meanwhile; run one "
                "writer at a time, or give each a different name"
            ) from error
        sync_folder(self._path.parent)

    def remove(self) -> None:
        self.close()
        self._hidden.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make sure that the names in a directory are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file is still the one of its path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


# -- stores -----------------------------------------------------------------------


class StoreSink:
    """A store, or the folder in it that a URL names; otherwise like ``FolderSink``."""

    def __init__(self, source: ObstoreStore) -> None:
        self.label = source.label
        self._source = source
        self._flights = Flights()
        self._file = ""
        self._upload: Any = None

    async def open(self, name: str) -> dict[str, int]:  # noqa: ARG002  (parts are invisible)
        """Return the objects in the folder, not those below it."""
        obstore = import_obstore()
        listed = await self._request("list", "", obstore.list_with_delimiter_async)
        return {meta["path"]: meta["size"] for meta in listed["objects"]}

    async def read(self, file: str) -> bytes | None:
        return (await self._version(file))[0]

    async def _version(self, file: str) -> tuple[bytes | None, Any]:
        """Return a small object, and the mode that replaces only this version."""
        get = functools.partial(import_obstore().get_async, path=file)
        try:
            got = await self._request("read", file, get)
        except FileNotFoundError:
            return None, "create"
        data = bytes(await self._request("read", file, lambda _: got.bytes_async()))
        tags = {name: got.meta.get(name) for name in ("e_tag", "version")}
        return data, {name: tag for name, tag in tags.items() if tag} or "overwrite"

    async def put(self, file: str, data: bytes) -> None:
        put = import_obstore().put_async
        await self._request("write", file, lambda store: put(store, file, data))

    async def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small object if it equals ``before``; return whether it did.

        Of several concurrent writers one succeeds, where the store has conditional
        writes.
        """
        found, mode = await self._version(file)
        if found != before:
            return False
        obstore = import_obstore()
        errors, store = obstore.exceptions, self._source.open()
        for how in (mode, "overwrite"):
            put = obstore.put_async(store, file, data, mode=how)
            try:
                await self._flights.follow(put)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return False
            except obstore_errors() as exc:
                failure = failure_of("write", self._source.locate(file), exc)
                if how == "overwrite" or not _lacks_conditions(exc):
                    break
            else:
                return True
        raise failure

    async def write(self, file: str, data: bytes) -> None:
        """Add bytes to a shard; waits while the most parts allowed are in flight."""

        def send(store: "ObjectStore") -> Any:
            if self._upload is None:
                self._file = file
                self._upload = import_obstore().open_writer_async(
                    store, file, buffer_size=_PART_BYTES, max_concurrency=_PARTS
                )
            return self._upload.write(data)

        await self._request("write", file, send)

    async def complete(self) -> None:
        """Wait for all parts, and combine them into one object."""
        await self._request("write", self._file, lambda _: self._upload.close())
        self._upload = None

    async def aclose(self) -> None:
        """Make the store discard the parts of an incomplete shard; end all requests.

        Errors of the store are ignored.
        """
        try:
            if self._upload is not None:
                error = RuntimeError("aborted")
                closing = self._upload.__aexit__(type(error), error, None)
                self._upload = None
                with contextlib.suppress(*obstore_errors()):
                    await outlast(asyncio.ensure_future(closing))
        finally:
            await self._flights.drain(_DRAIN_SECONDS)
            self._source.close()

    async def _request(self, verb: str, file: str, make: Any) -> Any:
        """Return the result of the request that ``make`` makes of a store."""
        try:
            return await self._flights.follow(make(self._source.open()))
        except obstore_errors() as exc:
            failure = failure_of(verb, self._source.locate(file), exc)
        raise failure


def _lacks_conditions(error: Exception) -> bool:
    """Return whether a store has no conditional writes."""
    is_known = isinstance(error, NotImplementedError)
    return is_known or Reason(error).status == HTTPStatus.NOT_IMPLEMENTED


Sink: TypeAlias = FolderSink | StoreSink
