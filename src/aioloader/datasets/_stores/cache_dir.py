"""A directory of immutable byte strings by key: a cache that processes share.

Threads, workers and unrelated processes use one directory at once. An entry is one
file, written next to its place and renamed when complete, so a reader sees all of it or
nothing. Nothing is synced to disk: after a power cut an entry may be torn; its checksum
shows that, and it counts as missing. Memory holds nothing.

One more file holds the number of bytes stored or reserved. A process adds to it under a
lock, at least 1/256 of the limit each time. If there is no room, it measures the
directory and evicts the least recently used entries until 7/8 of the limit are left;
others wait meanwhile. The file may be lost: then the next process measures. Memory:
16 bytes an entry while it does.
"""

import contextlib
import hashlib
import os
import re
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader._order.forks import fork_safe

# Magic and format version, key's digest, length of the data; then the checksum of these
# and of the data.
_FIELDS = struct.Struct("<8s32sQ")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MAGIC = b"aiolc\r\n\1"
# The format is part of the digest: other versions never find, or reject, our entries.
_PERSON = b"aioloader 1"
_MOST = 1 << 30  # per read or write; the system's limit is 2 GiB
_TOUCH = 60.0
_PAUSE = 60.0
_BINARY = getattr(os, "O_BINARY", 0)

_SIZE = struct.Struct("<q")
_SIZE_FILE = ".aioloader-size"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{62}\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
_OURS = re.compile(f"{_ENTRY.pattern}|{_TEMPORARY.pattern}")
# The pid of a writer in another container is meaningless here: it gets this long.
_YOUNG, _OLD = 60.0, 3600.0


class CacheDir:
    """Keep byte strings in a directory of limited size; evict the least recently used.

    All methods block: call them in threads. An object may be pickled, and used by many
    threads and by forked processes. The bytes of a key must never change. Keys are kept
    as hashes only, because they may be signed URLs.

    The limit may be exceeded by 1/256 per process, and by entries being put. If storing
    fails (disk full, no permission), there is one warning, and storing pauses for a
    minute. Leftovers of killed writers are removed by the next scan that finds them a
    minute old.

    Args:
        directory: Created if missing; other files in it are left alone.
        max_bytes: Limit of the lengths of all files, each 52 bytes longer than its
            data; at least 1.

    Raises:
        ValueError: If ``max_bytes`` is less than 1.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     cache = CacheDir(directory, max_bytes=10_000_000)
        ...     cache.put("train/000.tar", b"contents")
        ...     cache.get("train/000.tar")
        b'contents'
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.directory: str = str(Path(directory).expanduser().absolute())
        self.max_bytes = max_bytes
        self._has_warned = False
        self._paused_until = 0.0
        self._lock = fork_safe(threading.Lock())
        self._reserved, self._pid = 0, os.getpid()  # bytes that may still be added

    def get(self, key: str) -> bytes | None:
        """Return what was put under ``key``, or None.

        A damaged entry is deleted and counts as missing.
        """
        digest = _digest(key)
        path = self.path(digest)
        try:
            file = os.open(path, os.O_RDONLY | _BINARY)
            try:
                data = _read(file, digest)
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            self._warn("read", exc)
            return None
        if data is None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        return data

    def put(self, key: str, data: Buffer) -> None:
        """Store ``data`` under ``key`` if possible; make room if needed."""
        view = memoryview(data).cast("B")
        size = _HEADER_BYTES + len(view)
        if size > self.max_bytes or time.monotonic() < self._paused_until:
            return
        digest = _digest(key)
        fields = _FIELDS.pack(_MAGIC, digest, len(view))
        header = fields + _CHECKSUM.pack(zlib.crc32(view, zlib.crc32(fields)))
        path = self.path(digest)
        try:
            if not self._reserve(size):
                return
            try:
                try:
                    _replace(path, header, view)
                except FileNotFoundError:  # the directory was cleared meanwhile
                    _replace(path, header, view)
            except BaseException:
                with self._lock:
                    self._reserved += size
                raise
        except OSError as exc:
            self._paused_until = time.monotonic() + _PAUSE
            self._warn("write", exc)

    def path(self, digest: bytes) -> str:
        """Return the path of an entry, in one of 256 folders."""
        name = digest.hex()
        # Making a `Path` takes longer than opening the file.
        return f"{self.directory}{os.sep}{name[:2]}{os.sep}{name[2:]}"

    def _warn(self, verb: str, exc: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn(
            f"cannot {verb} the cache in {self.directory!r}: {exc.strerror}; "
            f"continuing without it (warned once)",
            RuntimeWarning,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheDir, (self.directory, self.max_bytes)

    def __repr__(self) -> str:
        return f"CacheDir({self.directory!r}, max_bytes={self.max_bytes})"

    # -- the limit ------------------------------------------------------------------

    def _reserve(self, size: int) -> bool:
        """Make room; return whether ``size`` bytes may be added now.

        Threads of this process wait for each other: one scan serves them all.

        Raises:
            OSError: If the directory cannot be used.
        """
        with self._lock:
            if self._pid != os.getpid():  # the bytes are those of the parent process
                self._reserved, self._pid = 0, os.getpid()
            if self._reserved < size:
                self._reserved += self._take(size - self._reserved)
            has_room = self._reserved >= size
            self._reserved -= size if has_room else 0
            return has_room

    def _take(self, size: int) -> int:
        """Reserve at least ``size`` bytes, if that can be; return how many."""
        with _opened_alone(self.directory) as file:
            raw = os.read(file, _SIZE.size + 1)
            stored = _SIZE.unpack(raw)[0] if len(raw) == _SIZE.size else -1
            if stored < 0 or stored + size > self.max_bytes:
                stored = self._scan(size)
            room = max(0, self.max_bytes - stored)
            taken = min(size + self.max_bytes // 256, room)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, _SIZE.pack(stored + taken))
            os.ftruncate(file, _SIZE.size)
        return taken

    def _scan(self, size: int) -> int:
        """Measure the directory, evict the surplus, and return what is left."""
        sizes, times, now = array("q"), array("q"), time.time()
        for file, found in self._files():
            if _is_left_over(file.name, now - found.st_mtime):
                with contextlib.suppress(OSError):
                    os.unlink(file)  # noqa: PTH108
                continue
            sizes.append(found.st_size)
            times.append(found.st_mtime_ns)
        stored = sum(sizes)
        if stored + size <= self.max_bytes:
            return stored
        surplus = stored + size - max(size, self.max_bytes * 7 // 8)
        order = np.argsort(np.asarray(times), kind="stable")
        freed = np.cumsum(np.asarray(sizes)[order])
        at = min(int(np.searchsorted(freed, surplus)), len(order) - 1)
        last, gone = times[order[at]], 0
        for file, found in self._files():
            if gone >= surplus:
                break
            if found.st_mtime_ns <= last and _ENTRY.fullmatch(file.name):
                with contextlib.suppress(OSError):
                    os.unlink(file)  # noqa: PTH108  (open readers keep it)
                    gone += found.st_size
        return stored - gone

    def _files(self) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
        """Yield entries and temporary files, but those just deleted."""
        for folder in _scanned(self.directory):
            if _FOLDER.fullmatch(folder.name):
                for file in _scanned(folder.path):
                    if _OURS.fullmatch(file.name):
                        with contextlib.suppress(OSError):
                            yield file, file.stat(follow_symlinks=False)


def _scanned(folder: str) -> Iterator["os.DirEntry[str]"]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _digest(key: str) -> bytes:
    encoded = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=32, person=_PERSON).digest()


def _read(fd: int, digest: bytes) -> bytes | None:
    """Return the data of an open entry; None if it is damaged."""
    found = os.fstat(fd)
    header = os.read(fd, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    magic, of, length = _FIELDS.unpack_from(header)
    if (magic, of, length) != (_MAGIC, digest, found.st_size - _HEADER_BYTES):
        return None
    data = os.read(fd, min(length, _MOST))
    if len(data) < length:
        data = _read_on(fd, data, length)
    checksum = zlib.crc32(data, zlib.crc32(header[: _FIELDS.size]))
    if checksum != _CHECKSUM.unpack_from(header, _FIELDS.size)[0]:
        return None
    # Uses within a minute count as one; a time in the future is a wrong clock.
    if abs(time.time() - found.st_mtime) > _TOUCH:
        with contextlib.suppress(OSError):
            os.utime(fd)
    return data


def _read_on(fd: int, data: bytes, length: int) -> bytes:
    """Read the rest that one call did not return."""
    parts, missing = [data], length - len(data)
    while missing and (data := os.read(fd, min(missing, _MOST))):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _replace(path: str, header: bytes, view: memoryview) -> None:
    """Write a file completely or not at all."""
    folder, _, name = path.rpartition(os.sep)
    # Process numbers repeat, across containers and after a restart.
    unique = f"{os.getpid()}.{os.urandom(8).hex()}"
    temporary = f"{folder}{os.sep}.{name}.{unique}.tmp"
    fd = _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            _write(fd, memoryview(header))
            _write(fd, view)
        finally:
            os.close(fd)
        os.replace(temporary, path)  # noqa: PTH105  (half the time)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _opened(path: str, flags: int) -> int:
    """Open a file; its folder is created if missing."""
    try:
        return os.open(path, flags | _BINARY, 0o666)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | _BINARY, 0o666)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[:_MOST]) :]


@contextlib.contextmanager
def _opened_alone(directory: str) -> Iterator[int]:
    """Open the file with the size; no other process does until the block ends."""
    file = _opened(f"{directory}{os.sep}{_SIZE_FILE}", os.O_RDWR | os.O_CREAT)
    # Without locks (Windows, some file systems) two scans do no harm.
    with contextlib.suppress(ImportError, OSError):
        import fcntl  # noqa: PLC0415

        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield file
    finally:
        # Closing it is not enough: a process forked meanwhile holds it open, too.
        with contextlib.suppress(ImportError, OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _is_left_over(name: str, age: float) -> bool:
    """Return whether a file is a leftover of a writer that has ended."""
    found = _TEMPORARY.fullmatch(name)
    if found is None or age < _YOUNG:
        return False
    return age > _OLD or not _is_alive(int(found[1]))


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # on Windows, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
