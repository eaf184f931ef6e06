"""A cache directory that maps keys to immutable bytes, shared by processes.

Each entry is a file, renamed when complete, so readers see all of it or nothing. Files
are not synced to disk: an entry torn by a power cut fails its checksum, and counts as
missing. A process scans the directory, under a lock, after adding 1/32 of the limit, or
at the limit if alone. Scans of a full cache evict the least recently used entries.
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
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import Buffer

from aioloader._base.forks import fork_safe
from aioloader._base.warnings import warn

# An entry's header: magic number with format version, digest of the key, length of the
# data; then a checksum of these fields and the data.
_FIELDS = struct.Struct("<8s32sQ")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MAGIC = b"aiolc\r\n\1"
# Digests depend on the format, so other format versions never find these entries.
_PERSON = b"aioloader 1"
# Seconds between updates of an entry's time of use; also the pause of failed writes.
_TOUCH_SECONDS = _PAUSE_SECONDS = 60.0
# Each of several processes scans after adding 1/32 of the limit.
_SCAN_FRACTION = 32
# A scanning process locks this file, and sets its modification time at the end.
_SCAN_FILE = ".aioloader-scan"

_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{62}\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
# Ages in seconds at which a temporary file is removed: the first if its process ended,
# the second always, because the pid of another container means nothing here.
_DEAD_AGE, _MAX_AGE = 60.0, 3600.0


class CacheDir:
    """A directory of byte strings with a size limit and least-recently-used eviction.

    All methods block: call them in threads. Threads and forked processes may share a
    ``CacheDir``, and it can be pickled. The bytes of a key must never change. Only
    hashes of keys are stored, because keys may be signed URLs. The directory is created
    if missing; foreign files in it are neither counted nor removed.

    The limit applies to the sum of file lengths; each file has 52 bytes more than its
    data. Each process may exceed it by 1/32, and by entries being written. A failed
    write (disk full, no permission) pauses writes for a minute. Failures warn once.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.directory: str = str(Path(directory).expanduser().absolute())
        self.max_bytes = max_bytes
        self._has_warned = False
        self._paused_until = 0.0
        self._lock = fork_safe(threading.Lock())
        self._room, self._pid = 0, os.getpid()  # bytes left before the next scan
        self._scanned = -1  # time of this process's latest scan

    def get(self, key: str) -> bytes | None:
        """Return the data of ``key``, or None; a damaged entry is deleted."""
        digest = _digest(key)
        path = self._path(digest)
        try:
            with FileIO(path) as file:
                data = _read(file, digest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            self._warn("read", exc)
            return None
        if data is None:
            _remove(path)
        return data

    def put(self, key: str, data: Buffer) -> None:
        """Store ``data`` under ``key`` if possible; may evict other entries."""
        view = memoryview(data).cast("B")
        size = _HEADER_BYTES + len(view)
        if size > self.max_bytes or time.monotonic() < self._paused_until:
            return
        digest = _digest(key)
        fields = _FIELDS.pack(_MAGIC, digest, len(view))
        header = fields + _CHECKSUM.pack(zlib.crc32(view, zlib.crc32(fields)))
        path = self._path(digest)
        try:
            if self._has_room(size):
                try:
                    _replace(path, header, view)
                except FileNotFoundError:  # the directory was cleared meanwhile
                    _replace(path, header, view)
        except OSError as exc:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            self._warn("write", exc)

    def _path(self, digest: bytes) -> str:
        """Return the path of an entry, which is in one of 256 folders."""
        name = digest.hex()
        # Creating a `Path` takes longer than opening the file.
        return f"{self.directory}{os.sep}{name[:2]}{os.sep}{name[2:]}"

    def _warn(self, verb: str, exc: OSError) -> None:
        if not self._has_warned:
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

    def _has_room(self, size: int) -> bool:
        """Reserve ``size`` bytes, scanning if necessary; return whether they fit."""
        share = max(size, self.max_bytes // _SCAN_FRACTION)
        with self._lock:
            if self._pid != os.getpid():  # forked: the room is the parent's
                self._room, self._scanned, self._pid = 0, -1, os.getpid()
            if self._last_scan() != self._scanned:  # another process has scanned since
                self._room = min(self._room, share)
            if self._room < size:
                with _locked(f"{self.directory}{os.sep}{_SCAN_FILE}") as file:
                    is_alone = self._last_scan() == self._scanned
                    free = self.max_bytes - self._scan(size)
                    os.utime(file, ns=(now := time.time_ns(), now))
                self._scanned = self._last_scan()
                self._room = free if is_alone else min(free, share)
            has_room = self._room >= size
            self._room -= size if has_room else 0
            return has_room

    def _last_scan(self) -> int:
        """Return when any process last scanned, in ns since the epoch; 0 if never."""
        try:
            return os.stat(f"{self.directory}{os.sep}{_SCAN_FILE}").st_mtime_ns  # noqa: PTH116
        except OSError:
            return 0

    def _scan(self, size: int) -> int:
        """Evict entries if ``size`` bytes do not fit; return the bytes still stored."""
        sizes, times, now = array("q"), array("q"), time.time()
        for file, status in self._files():
            if _is_left_over(file.name, now - status.st_mtime):
                _remove(file.path)
            else:
                sizes.append(status.st_size)
                times.append(status.st_mtime_ns)
        stored = sum(sizes)
        if stored + size <= self.max_bytes:
            return stored
        surplus = stored + size - max(size, self.max_bytes * 7 // 8)
        order = np.argsort(np.asarray(times), kind="stable")
        freed = np.cumsum(np.asarray(sizes)[order])
        index = min(int(np.searchsorted(freed, surplus)), len(order) - 1)
        last, gone = times[order[index]], 0
        for file, status in self._files():
            if gone >= surplus:
                break
            if status.st_mtime_ns <= last and _ENTRY.fullmatch(file.name):
                gone += status.st_size if _remove(file.path) else 0
        return stored - gone

    def _files(self) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
        """Yield all entries and temporary files, with their status."""
        for folder in _entries_of(self.directory):
            if _FOLDER.fullmatch(folder.name):
                for file in _entries_of(folder.path):
                    if _ENTRY.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name):
                        with contextlib.suppress(OSError):
                            yield file, file.stat(follow_symlinks=False)


def _digest(key: str) -> bytes:
    encoded = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=32, person=_PERSON).digest()


def _read(file: FileIO, digest: bytes) -> bytes | None:
    """Return an entry's data, or None if damaged; update the entry's time of use."""
    status = os.fstat(file.fileno())
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    magic, owner, length = _FIELDS.unpack_from(header)
    if (magic, owner, length) != (_MAGIC, digest, status.st_size - _HEADER_BYTES):
        return None
    data = file.readall()
    checksum = zlib.crc32(data, zlib.crc32(header[: _FIELDS.size]))
    if checksum != _CHECKSUM.unpack_from(header, _FIELDS.size)[0]:
        return None
    # abs(), because a wrong clock may have set a time in the future.
    if abs(time.time() - status.st_mtime) > _TOUCH_SECONDS:
        with contextlib.suppress(OSError):
            os.utime(file.fileno())
    return data


def _replace(path: str, *parts: Buffer) -> None:
    """Write a file completely or not at all; create its folder if missing."""
    folder, _, name = path.rpartition(os.sep)
    # Random, because pids repeat across containers and after a restart.
    unique = f"{os.getpid()}.{os.urandom(8).hex()}"
    temporary = f"{folder}{os.sep}.{name}.{unique}.tmp"
    try:
        file = FileIO(temporary, "x")
    except FileNotFoundError:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = FileIO(temporary, "x")
    try:
        with file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
        os.replace(temporary, path)  # noqa: PTH105  (half the time)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: str) -> bool:
    """Try to remove a file; return whether that worked."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108  (half the time)
        return True
    return False


def _entries_of(folder: str) -> Iterator["os.DirEntry[str]"]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Yield a locked file, created if missing; wait while another process locks it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(file, "LOCK_EX")  # if locks do not work, concurrent scans are harmless
        yield file
    finally:
        # Unlock explicitly: a process forked meanwhile may keep the file open.
        lock(file, "LOCK_UN")
        os.close(file)


def lock(file: int | BinaryIO, *flags: str) -> bool:
    """Call ``fcntl.flock``; return False if another process holds the lock."""
    # Windows has no ``fcntl`` module, and some file systems have no locks.
    with contextlib.suppress(ImportError, OSError):
        import fcntl  # noqa: PLC0415

        try:
            fcntl.flock(file, sum(getattr(fcntl, flag) for flag in flags))
        except BlockingIOError:
            return False
    return True


def _is_left_over(name: str, age: float) -> bool:
    match = _TEMPORARY.fullmatch(name)
    if match is None or age < _DEAD_AGE:
        return False
    return age > _MAX_AGE or not _is_alive(int(match[1]))


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # on Windows, os.kill(pid, 0) would send Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
