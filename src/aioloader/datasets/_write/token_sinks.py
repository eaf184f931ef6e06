"""Destinations of one file of tokens: a path or a store; readers see a whole file only.

A local file grows under a hidden name, and a hidden sidecar says how much of it counts:
a writer that is killed resumes there. An object is an upload, which cannot be resumed,
so the next writer starts over. The sizes of documents are kept in a file, too.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from aioloader._base.outlast import in_thread
from aioloader.datasets._stores.addresses import Address, is_local, path_of
from aioloader.datasets._stores.cache_dir import lock
from aioloader.datasets._stores.options import Options, check_no_options
from aioloader.datasets._stores.stores import ObstoreStore
from aioloader.datasets._write.sinks import StoreSink, is_at, sync_folder, threaded
from aioloader.errors import StateMismatchError

# Makes the bytes of an index from the file of sizes.
MakeIndex: TypeAlias = Callable[[BinaryIO], Iterator[bytes]]
_SIZE_BYTES = 4


def make_sink(address: Address, index: Address | None, options: Options) -> "TokenSink":
    """Return the sink of a file of tokens, and of its index if it has one."""
    if is_local(address):
        path = path_of(address)
        check_no_options(path, options)
        return FileSink(Path(path), None if index is None else Path(path_of(index)))
    return ObjectSink(address, index, options)


class FileSink:
    """A file, whose directory is created if missing."""

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
        self._is_empty = False  # nothing is there that another writer could resume

    @threaded
    def open(self) -> tuple[bytes | None, bool]:
        """Return an earlier writer's sidecar, if any, and whether it had finished."""
        if self._path.is_dir():
            raise StateMismatchError(
                f"{self.label!r} is a directory: name a file in it, such as "
                f"{str(self._path / 'train.bin')!r}"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._clean()  # it may have been killed just before
            return _contents(self._sidecar), True
        self._tokens = self._growing.open("a+b")
        is_mine = lock(self._tokens, "LOCK_EX", "LOCK_NB")
        # Another one may have finished meanwhile, which renames the file.
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
        """Keep so much of what is there; nothing, and return False, if that is less."""
        files = [(self._tokens, num_bytes), (self._sizes, _SIZE_BYTES * documents)]
        is_there = all(file and file.seek(0, os.SEEK_END) >= n for file, n in files)
        for file, size in files:
            assert file is not None
            file.truncate(size if is_there else 0)
        self._is_empty = not (is_there and documents)
        return is_there

    @threaded
    def append(self, data: bytes, sizes: bytes, sidecar: bytes) -> None:
        """Add tokens and sizes of documents, which count from now on."""
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
        """Add the last ones; make the file visible, after what is next to it."""
        self._write(data, sizes)
        assert self._tokens is not None
        assert self._sizes is not None
        os.fsync(self._tokens.fileno())
        if make_index is not None and self._index is not None:
            _replace(self._index, make_index(self._sizes))
        _replace(self._sidecar, [sidecar])
        # While it is open, and so locked.
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
        """Close the files; what counts stays for the next writer, if anything does."""
        if self._is_empty:
            with contextlib.suppress(OSError):  # an earlier one ends the writer
                self._clean()
                self._growing.unlink(missing_ok=True)  # while it is locked
            self._is_empty = False
        for file in (self._tokens, self._sizes):
            if file is not None:
                lock(file, "LOCK_UN")  # a process forked meanwhile has it, too
                file.close()
        self._tokens = self._sizes = None

    def _clean(self) -> None:
        for path in (self._growing_sizes, self._journal):
            path.unlink(missing_ok=True)


class ObjectSink:
    """An object of a store, which a URL names; otherwise like ``FileSink``."""

    def __init__(
        self, address: Address, index: Address | None, options: Options
    ) -> None:
        folder, _, self._name = address.rpartition("/")
        self._source = ObstoreStore(folder, options)
        self._sink = StoreSink(self._source)
        self._index = None if index is None else index.rpartition("/")[2]
        self.label = self._source.locate(self._name)
        self._sizes: BinaryIO | None = None

    async def open(self) -> tuple[bytes | None, bool]:
        """Return the sidecar of a finished object, and whether there is one."""
        if self._name in await self._sink.open(""):
            return await self._sink.read(f"{self._name}.json"), True
        self._sizes = await in_thread(tempfile.TemporaryFile)
        return None, False

    async def begin(self, _num_bytes: int, _documents: int) -> bool:
        """Return True: nothing was there."""
        return True

    async def append(self, data: bytes, sizes: bytes, _sidecar: bytes) -> None:
        assert self._sizes is not None
        await self._sink.write(self._name, data)
        await in_thread(self._sizes.write, sizes)

    async def finish(
        self, data: bytes, sizes: bytes, make_index: MakeIndex | None, sidecar: bytes
    ) -> None:
        """Add the last ones; make the object visible, after what is next to it."""
        await self.append(data, sizes, sidecar)
        assert self._sizes is not None
        if make_index is not None and self._index is not None:
            other = StoreSink(self._source)  # it has an upload of its own
            pieces = make_index(self._sizes)
            try:
                while piece := await in_thread(next, pieces, b""):
                    await other.write(self._index, piece)
                await other.complete()
            finally:
                await other.aclose()
        await self._sink.put(f"{self._name}.json", sidecar)
        await self._sink.complete()

    async def aclose(self) -> None:
        """Make the store discard an unfinished object; end all requests."""
        await self._sink.aclose()
        if self._sizes is not None:
            await in_thread(self._sizes.close)
            self._sizes = None


def _contents(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file, completely or not at all; one writer at a time."""
    hidden = path.with_name(f".{path.name.removeprefix('.')}.new")
    with hidden.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


TokenSink: TypeAlias = FileSink | ObjectSink
