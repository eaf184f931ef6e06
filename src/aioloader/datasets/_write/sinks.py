"""Destinations of shards and token files, which readers see only once complete.

A local shard is written under a unique hidden name, synchronized and renamed. An object
is uploaded in parts, and exists once the upload is completed. A killed process leaves
invisible parts, which a lifecycle rule of the bucket should remove after some days.
Memory holds the parts in flight.

A local file of tokens grows under a hidden name, and a hidden sidecar records how much
of it is valid. After a kill, the next writer resumes there. An upload cannot be
resumed, so the next writer starts over.
"""

import asyncio
import contextlib
import functools
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from aioloader._base.cancellation import finish_despite_cancel, in_thread
from aioloader.datasets._stores.addresses import Address, is_local, path_of
from aioloader.datasets._stores.cache_dir import lock
from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.datasets._stores.options import (
    Flights,
    StoreOptions,
    check_no_options,
    import_obstore,
    obstore_errors,
)
from aioloader.datasets._stores.stores import ObstoreStore
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

# An upload's bytes per part, and parts in flight. S3's 10,000 parts allow 80 GB.
_PART_BYTES, _PARTS = 8 << 20, 4
_PARTIAL = ".partial"
_DRAIN_SECONDS = 5.0
# Yields the bytes of an index, given the file of documents' sizes.
MakeIndex: TypeAlias = Callable[[BinaryIO], Iterator[bytes]]
_SIZE_BYTES = 4


def make_sink(
    destination: "str | os.PathLike[str] | ObjectStore", options: StoreOptions
) -> "Sink":
    if isinstance(destination, (str, os.PathLike)):
        address = os.fsdecode(destination)
        if not address:  # often an unset variable; it would be the current directory
            raise ValueError("the destination is empty; '.' is the current directory")
        if is_local(address):
            folder = path_of(address)
            check_no_options(folder, options)
            return FolderSink(folder)
    return StoreSink(ObstoreStore(destination, options))


def threaded(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Make a method run in a thread; a cancelled caller waits until the method ends.

    An OSError without a file name, as for a full disk, gets the sink's label instead.
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
    """A directory, created if missing, to which one shard is written at a time."""

    def __init__(self, folder: str) -> None:
        self.label = folder
        self._folder = Path(folder)
        self._shard: _Partial | None = None

    @threaded
    def open(self, name: str) -> dict[str, int]:
        """Return all files' sizes by name; remove leftovers of the writer ``name``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Excludes files of writers whose names only start with ``name``.
        file = rf"{re.escape(name)}-(\d+\.\w+(\.idx)?|shards\.json)"
        leftover = re.compile(rf"\.{file}(\.\w+)?{re.escape(_PARTIAL)}")
        sizes: dict[str, int] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Another writer may rename or remove its file now.
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        for file in filter(leftover.fullmatch, sizes):
            (self._folder / file).unlink(missing_ok=True)
        return sizes

    @threaded
    def read(self, file: str) -> bytes | None:
        """Return the contents of a small file, or None for a missing or empty file."""
        return _contents(self._folder / file) or None  # ``swap`` may make it empty

    @threaded
    def put(self, file: str, data: bytes) -> None:
        """Write a small file, completely or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._replace(file, data)

    @threaded
    def swap(self, file: str, before: bytes | None, data: bytes) -> bool:
        """Replace a small file if it contains ``before``; otherwise return False.

        If the file system has locks, only one of several concurrent writers succeeds.
        """
        path = self._folder / file
        while True:
            with path.open("a+b") as current:
                lock(current, "LOCK_EX")
                try:
                    if is_at(current, path):  # otherwise it was replaced: try again
                        current.seek(0)
                        is_same = (current.read() or None) == before
                        if is_same:
                            self._replace(file, data)
                        return is_same
                finally:
                    # A forked process may hold it open, so closing does not unlock it.
                    lock(current, "LOCK_UN")

    @threaded
    def write(self, file: str, data: bytes) -> None:
        """Append bytes to the current shard, which is invisible until ``complete``."""
        if self._shard is None:
            self._shard = _Partial(self._folder / file)
        self._shard.append(data)

    @threaded
    def complete(self) -> None:
        assert self._shard is not None
        self._shard.rename()
        self._shard = None

    async def aclose(self) -> None:
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
    """A file with a unique hidden name, until it is renamed to ``path``."""

    def __init__(self, path: Path) -> None:
        # A unique name: no other writer writes to it or renames it, even by mistake.
        name = f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}"
        self._hidden, self._path = path.with_name(name), path
        super().__init__(self._hidden, "w")

    def append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.write(left) :]

    def rename(self) -> None:
        """Sync the file to the disk, then rename it to its final name."""
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
    """Sync a directory to the disk, so that renames in it survive a crash."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_at(file: BinaryIO, path: Path) -> bool:
    """Tell whether an open file is still the file at ``path``."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


class StoreSink:
    """A sink like ``FolderSink``, but for an object store or a folder in it."""

    def __init__(self, source: ObstoreStore) -> None:
        self.label = source.label
        self._source = source
        self._flights = Flights()
        self._file = ""
        self._upload: Any = None

    async def open(self, name: str) -> dict[str, int]:  # noqa: ARG002  (parts are invisible)
        """Return the sizes of the folder's objects by name, without subfolders."""
        obstore = import_obstore()
        listed = await self._request("list", "", obstore.list_with_delimiter_async)
        return {meta["path"]: meta["size"] for meta in listed["objects"]}

    async def read(self, file: str) -> bytes | None:
        return (await self._version(file))[0]

    async def _version(self, file: str) -> tuple[bytes | None, Any]:
        """Return a file's data or None, and the mode to replace only that version."""
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
        """Do as ``FolderSink.swap``, atomically if the store has conditional writes."""
        current, mode = await self._version(file)
        if current != before:
            return False
        obstore = import_obstore()
        errors, store = obstore.exceptions, self._source.open()
        for choice in (mode, "overwrite"):
            put = obstore.put_async(store, file, data, mode=choice)
            try:
                await self._flights.follow(put)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return False
            except obstore_errors() as exc:
                failure = failure_of("write", self._source.locate(file), exc)
                is_refused = Reason(exc).status == HTTPStatus.NOT_IMPLEMENTED
                lacks_conditions = isinstance(exc, NotImplementedError) or is_refused
                if choice == "overwrite" or not lacks_conditions:
                    break
            else:
                return True
        raise failure

    async def write(self, file: str, data: bytes) -> None:
        """Append bytes to the current shard; wait if too many parts are in flight."""

        def send(store: "ObjectStore") -> Any:
            if self._upload is None:
                self._file = file
                self._upload = import_obstore().open_writer_async(
                    store, file, buffer_size=_PART_BYTES, max_concurrency=_PARTS
                )
            return self._upload.write(data)

        await self._request("write", file, send)

    async def complete(self) -> None:
        await self._request("write", self._file, lambda _: self._upload.close())
        self._upload = None

    async def aclose(self) -> None:
        """Discard an incomplete shard, and wait until all requests have ended."""
        try:
            if self._upload is not None:
                error = RuntimeError("aborted")
                closing = self._upload.__aexit__(type(error), error, None)
                self._upload = None
                with contextlib.suppress(*obstore_errors()):
                    await finish_despite_cancel(asyncio.ensure_future(closing))
        finally:
            await self._flights.drain(_DRAIN_SECONDS)
            self._source.close()

    async def _request(self, verb: str, file: str, make: Any) -> Any:
        try:
            return await self._flights.follow(make(self._source.open()))
        except obstore_errors() as exc:
            failure = failure_of(verb, self._source.locate(file), exc)
        raise failure


Sink: TypeAlias = FolderSink | StoreSink


def make_token_sink(
    address: Address, index: Address | None, options: StoreOptions
) -> "TokenSink":
    if is_local(address):
        path = path_of(address)
        check_no_options(path, options)
        return FileSink(Path(path), None if index is None else Path(path_of(index)))
    return ObjectSink(address, index, options)


class FileSink:
    """A local file of tokens, whose directory is created if missing."""

    def __init__(self, path: Path, index: Path | None) -> None:
        self.label = str(path)
        self._path, self._index = path, index
        self._sidecar = path.with_name(f"{path.name}.json")
        self._growing, self._growing_sizes, self._journal = (
            path.with_name(f".{path.name}{ending}.partial")
            for ending in ("", ".sizes", ".json")
        )
        self._tokens: BinaryIO | None = None
        self._sizes: BinaryIO | None = None
        self._is_empty = False  # whether there is nothing to resume

    @threaded
    def open(self) -> tuple[bytes | None, bool]:
        """Return the earlier sidecar or None, and whether the file is finished."""
        if self._path.is_dir():
            raise StateMismatchError(
                f"{self.label!r} is a directory: name a file in it, such as "
                f"{str(self._path / 'train.bin')!r}"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._clean()  # its writer may have been killed before this
            return _contents(self._sidecar), True
        self._tokens = self._growing.open("a+b")
        is_mine = lock(self._tokens, "LOCK_EX", "LOCK_NB")
        # If another writer has just finished, it has renamed the file.
        if not is_mine or not is_at(self._tokens, self._growing) or self._path.exists():
            raise StateMismatchError(
                f"another writer is writing {self.label!r} now; run one writer at a "
                "time, or give each a different path"
            )
        journal = _contents(self._journal)
        self._is_empty = journal is None
        self._sizes = self._growing_sizes.open("a+b")
        return journal, False

    @threaded
    def begin(self, num_bytes: int, documents: int) -> bool:
        """Truncate both files; if either is too short, empty both and return False."""
        files = [(self._tokens, num_bytes), (self._sizes, _SIZE_BYTES * documents)]
        is_there = all(file and file.seek(0, os.SEEK_END) >= n for file, n in files)
        for file, size in files:
            assert file is not None
            file.truncate(size if is_there else 0)
        self._is_empty = not (is_there and documents)
        return is_there

    @threaded
    def append(self, data: bytes, sizes: bytes, sidecar: bytes) -> None:
        """Append tokens and documents' sizes; sync both, then record both as valid."""
        self._write(data, sizes)
        for file in (self._tokens, self._sizes):
            if data and file is not None:
                os.fsync(file.fileno())
        _replace(self._journal, [sidecar])
        self._is_empty &= not data

    @threaded
    def finish(
        self, data: bytes, sizes: bytes, make_index: MakeIndex | None, sidecar: bytes
    ) -> None:
        """Write the last tokens, index and sidecar, then make the file visible."""
        self._write(data, sizes)
        assert self._tokens is not None
        assert self._sizes is not None
        os.fsync(self._tokens.fileno())
        if make_index is not None and self._index is not None:
            _replace(self._index, make_index(self._sizes))
        _replace(self._sidecar, [sidecar])
        # The file is still open, so this writer still has its lock.
        self._growing.replace(self._path)
        self._is_empty = False
        sync_folder(self._path.parent)
        self._clean()

    def _write(self, data: bytes, sizes: bytes) -> None:
        for file, new in ((self._tokens, data), (self._sizes, sizes)):
            assert file is not None
            file.write(new)
            file.flush()

    @threaded
    def aclose(self) -> None:
        """Close the files; remove them if they hold nothing to resume."""
        if self._is_empty:
            with contextlib.suppress(OSError):  # the writer raises an earlier error
                self._clean()
                self._growing.unlink(missing_ok=True)  # while it is locked
            self._is_empty = False
        files, self._tokens, self._sizes = (self._tokens, self._sizes), None, None
        with contextlib.ExitStack() as stack:  # a disk may be too full to flush one
            for file in filter(None, files):
                stack.callback(file.close)
                lock(file, "LOCK_UN")  # a forked process may hold it open

    def _clean(self) -> None:
        for path in (self._growing_sizes, self._journal):
            path.unlink(missing_ok=True)


class ObjectSink:
    """A sink like ``FileSink``, but for an object in a store; it cannot resume."""

    def __init__(
        self, address: Address, index: Address | None, options: StoreOptions
    ) -> None:
        folder, _, self._name = address.rpartition("/")
        self._source = ObstoreStore(folder, options)
        self._sink = StoreSink(self._source)
        self._index = None if index is None else index.rpartition("/")[2]
        self.label = self._source.locate(self._name)
        self._sizes: BinaryIO | None = None

    async def open(self) -> tuple[bytes | None, bool]:
        """Return a finished object's sidecar or None, and whether the object exists."""
        if self._name in await self._sink.open(""):
            return await self._sink.read(f"{self._name}.json"), True
        self._sizes = await in_thread(tempfile.TemporaryFile)
        return None, False

    async def begin(self, _num_bytes: int, _documents: int) -> bool:
        return True

    async def append(self, data: bytes, sizes: bytes, _sidecar: bytes) -> None:
        assert self._sizes is not None
        await self._sink.write(self._name, data)
        await in_thread(self._sizes.write, sizes)

    async def finish(
        self, data: bytes, sizes: bytes, make_index: MakeIndex | None, sidecar: bytes
    ) -> None:
        """Write the last tokens, index and sidecar, then make the object visible."""
        await self.append(data, sizes, sidecar)
        assert self._sizes is not None
        if make_index is not None and self._index is not None:
            sink = StoreSink(self._source)  # for a separate upload
            pieces = make_index(self._sizes)
            try:
                while piece := await in_thread(next, pieces, b""):
                    await sink.write(self._index, piece)
                await sink.complete()
            finally:
                await sink.aclose()
        await self._sink.put(f"{self._name}.json", sidecar)
        await self._sink.complete()

    async def aclose(self) -> None:
        await self._sink.aclose()
        if self._sizes is not None:
            await in_thread(self._sizes.close)
            self._sizes = None


def _contents(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file, completely or not at all. Only one writer may do so at a time."""
    hidden = path.with_name(f".{path.name.removeprefix('.')}.new")
    with hidden.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


TokenSink: TypeAlias = FileSink | ObjectSink
