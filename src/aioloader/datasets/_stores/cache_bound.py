"""The size limit of a cache directory: reserving space, and evicting entries.

One file holds the number of bytes stored or reserved. A process adds to it under a
lock, at least 1/256 of the limit each time. If there is no room, it measures the
directory and evicts the least recently used entries until 7/8 of the limit are left;
others wait meanwhile. The file may be lost: then the next process measures. Memory:
16 bytes an entry while it does.
"""

import contextlib
import os
import re
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aioloader._order.forks import fork_safe

_SIZE = struct.Struct("<q")
_SIZE_FILE = ".aioloader-size"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{62}\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
# The pid of a writer in another container is meaningless here: it gets this long.
_YOUNG = 60.0
_OLD = 3600.0


def entry_path(directory: str, digest: bytes) -> str:
    """Return the path of an entry, in one of 256 folders."""
    name = digest.hex()
    # Making a `Path` takes longer than opening the file.
    return f"{directory}{os.sep}{name[:2]}{os.sep}{name[2:]}"


def temporary_path(path: str) -> str:
    """Return a path next to ``path`` that no other writer uses."""
    folder, _, name = path.rpartition(os.sep)
    # Process numbers repeat, across containers and after a restart.
    return f"{folder}{os.sep}.{name}.{os.getpid()}.{os.urandom(8).hex()}.tmp"


class Bound:
    """Keep a directory within ``max_bytes``, in any thread and forked process.

    Args:
        directory: The directory of the entries of ``entry_path``.
        max_bytes: Limit of the lengths of all files.
    """

    def __init__(self, directory: str, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = fork_safe(threading.Lock())
        self._left = 0  # bytes reserved and not used yet

    def reserve(self, size: int) -> bool:
        """Make room; return whether ``size`` bytes may be added now.

        Threads of this process wait for each other: one scan serves them all.

        Raises:
            OSError: If the directory cannot be used.
        """
        if self._pid != os.getpid():
            self._begin()  # the lock may have been held when this process was forked
        with self._lock:
            if self._left < size:
                self._left += self._take(size - self._left)
            has_room = self._left >= size
            self._left -= size if has_room else 0
            return has_room

    def give_back(self, size: int) -> None:
        """Cancel a reservation that was not used."""
        with self._lock:
            self._left += size

    def _take(self, size: int) -> int:
        """Reserve at least ``size`` bytes, if that can be; return how many."""
        with _opened_alone(self._directory) as file:
            stored = _read_size(file)
            if stored is None or stored + size > self._max_bytes:
                stored = self._scan(size)
            room = max(0, self._max_bytes - stored)
            taken = min(size + self._max_bytes // 256, room)
            _write_size(file, stored + taken)
        return taken

    def _scan(self, size: int) -> int:
        """Measure the directory, evict the surplus, and return what is left."""
        sizes, times = self._survey()
        left = sum(sizes)
        if left + size > self._max_bytes:
            low = max(size, self._max_bytes * 7 // 8)
            left -= self._evict(sizes, times, left + size - low)
        return left

    def _survey(self) -> tuple["array[int]", "array[int]"]:
        """Return sizes and times of use of all files; delete leftovers."""
        sizes, times = array("q"), array("q")
        now = time.time()
        for file in self._files():
            with contextlib.suppress(OSError):  # already deleted
                found = file.stat(follow_symlinks=False)
                if _is_left_over(file.name, now - found.st_mtime):
                    os.unlink(file)  # noqa: PTH108
                    continue
                sizes.append(found.st_size)
                times.append(found.st_mtime_ns)
        return sizes, times

    def _evict(self, sizes: "array[int]", times: "array[int]", wanted: int) -> int:
        """Delete the least recently used files; return the number of bytes freed."""
        order = np.argsort(np.asarray(times), kind="stable")
        freed = np.cumsum(np.asarray(sizes)[order])
        at = min(int(np.searchsorted(freed, wanted)), len(order) - 1)
        last = times[order[at]]
        gone = 0
        for file in self._files():
            if gone >= wanted:
                break
            with contextlib.suppress(OSError):
                found = file.stat(follow_symlinks=False)
                if found.st_mtime_ns <= last and _ENTRY.fullmatch(file.name):
                    os.unlink(file)  # noqa: PTH108  (open readers keep it)
                    gone += found.st_size
        return gone

    def _files(self) -> Iterator["os.DirEntry[str]"]:
        with contextlib.suppress(OSError), os.scandir(self._directory) as folders:
            for folder in folders:
                if _FOLDER.fullmatch(folder.name):
                    yield from _files_of(folder.path)


def _files_of(folder: str) -> Iterator["os.DirEntry[str]"]:
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            if _ENTRY.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name):
                yield file


@contextlib.contextmanager
def _opened_alone(directory: str) -> Iterator[int]:
    """Open the file with the size; no other process does until the block ends."""
    path = f"{directory}{os.sep}{_SIZE_FILE}"
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(path, flags, 0o666)
    except FileNotFoundError:
        Path(directory).mkdir(parents=True, exist_ok=True)
        file = os.open(path, flags, 0o666)
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


def _read_size(file: int) -> int | None:
    """Return the size; None if it is not known."""
    raw = os.read(file, _SIZE.size + 1)
    size: int = _SIZE.unpack(raw)[0] if len(raw) == _SIZE.size else -1
    return size if size >= 0 else None


def _write_size(file: int, size: int) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, _SIZE.pack(size))
    os.ftruncate(file, _SIZE.size)


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
