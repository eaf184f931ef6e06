"""The size limit of a cache directory: reserving space, and evicting entries.

Processes announce what they are about to add by records at the end of one file, the
journal. A process that finds no room scans the directory, evicts the least recently
used entries until 7/8 of the limit are left, and records the new total in the journal.
One process scans for all, once for each 1/8 that they add together; others do not store
meanwhile. The journal may be lost: the scan counts. Memory: 16 bytes an entry, then.
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

# Time of a scan and the bytes it found; or zero, and the bytes added.
_RECORD = struct.Struct("<dq")
_JOURNAL = ".aioloader-journal"
_LONGEST_JOURNAL = 1 << 20
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{62}\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
# The pid of a writer in another container is meaningless here: it gets this long.
_YOUNG = 60.0
_OLD = 3600.0
_FRESH = 60.0  # oldest scan that a new process may use


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
        self._journal = f"{directory}{os.sep}{_JOURNAL}"
        self._max_bytes = max_bytes
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = fork_safe(threading.Lock())
        self._scanning = fork_safe(threading.Lock())
        self._unsaid = 0  # bytes added here that are not in the journal
        self._offset = 0  # read position in the journal
        self._total: int | None = None  # bytes stored or reserved, if known

    def reserve(self, size: int) -> bool:
        """Make room; return whether ``size`` bytes may be added now.

        Raises:
            OSError: If the journal cannot be used.
        """
        if self._pid != os.getpid():
            self._begin()  # the lock may have been held when this process was forked
        with self._lock:
            more = self._unsaid + size
            if more < self._max_bytes // 256 and self._fits(more):
                self._unsaid = more
                return True
            unsaid, self._unsaid = self._unsaid, 0
        journal = _open(self._journal)
        try:
            if unsaid:
                _append(journal, 0.0, unsaid)
            return self._reserve(journal, size)
        finally:
            os.close(journal)

    def _reserve(self, journal: int, size: int) -> bool:
        if not self._has_room(journal, size) and not self._make_room(journal, size):
            return False
        _append(journal, 0.0, size)
        # If two writers took the same room, at least one sees both records here.
        if self._has_room(journal, 0):
            return True
        _append(journal, 0.0, -size)
        return False

    def give_back(self, size: int) -> None:
        """Cancel a reservation that was not used."""
        with self._lock:
            self._unsaid -= size

    def _fits(self, more: int) -> bool:
        return self._total is not None and self._total + more <= self._max_bytes

    def _has_room(self, journal: int, size: int) -> bool:
        """Read new records of the journal; return whether ``size`` bytes fit."""
        with self._lock:
            length = os.fstat(journal).st_size
            if length < self._offset or length % _RECORD.size:
                self._offset, self._total = 0, None  # the journal was replaced
            if length % _RECORD.size:
                return False  # torn record: the scan resets the journal
            for when, amount in _records(journal, self._offset):
                self._learn(when, amount)
                self._offset += _RECORD.size
            return self._fits(size)

    def _learn(self, when: float, amount: int) -> None:
        if when > 0:
            if self._total is not None or abs(time.time() - when) < _FRESH:
                self._total = amount
        elif self._total is not None:
            self._total += amount

    def _make_room(self, journal: int, size: int) -> bool:
        """Scan if no other process does; return whether there is room then.

        Threads of this process wait for each other: one scan serves them all.
        """
        with self._scanning, _alone(journal) as is_alone:
            if not is_alone:
                return self._has_room(journal, size)
            # Another process may have finished a scan since.
            if self._has_room(journal, size):
                return True
            self._scan(journal, size)
        return self._has_room(journal, size)

    def _scan(self, journal: int, size: int) -> None:
        """Measure the directory, evict the surplus, and record what is left."""
        start = os.fstat(journal).st_size
        if start > _LONGEST_JOURNAL or start % _RECORD.size:
            os.ftruncate(journal, 0)
            start = 0
        sizes, times = self._survey()
        left = sum(sizes)
        if left + size > self._max_bytes:
            low = max(size, self._max_bytes * 7 // 8)
            left -= self._evict(sizes, times, left + size - low)
        left += sum(amount for _, amount in _records(journal, start))
        _append(journal, time.time(), left)

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


def _open(journal: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    try:
        return os.open(journal, flags, 0o666)
    except FileNotFoundError:
        Path(journal).parent.mkdir(parents=True, exist_ok=True)
        return os.open(journal, flags, 0o666)


def _records(journal: int, start: int) -> Iterator[tuple[float, int]]:
    """Return the complete records from ``start`` on."""
    os.lseek(journal, start, os.SEEK_SET)
    records = os.read(journal, os.fstat(journal).st_size - start)
    return _RECORD.iter_unpack(records[: len(records) // _RECORD.size * _RECORD.size])


def _append(journal: int, when: float, amount: int) -> None:
    os.write(journal, _RECORD.pack(when, amount))


@contextlib.contextmanager
def _alone(journal: int) -> Iterator[bool]:
    """Yield whether no other process scans; if so, none will until the block ends."""
    try:
        import fcntl  # noqa: PLC0415  (no such module on Windows)
    except ImportError:
        yield True
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except OSError:
        pass  # no locks on this file system: two scans do no harm
    try:
        yield True
    finally:
        # Closing it is not enough: a process forked meanwhile holds it open, too.
        with contextlib.suppress(OSError):
            fcntl.flock(journal, fcntl.LOCK_UN)


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
