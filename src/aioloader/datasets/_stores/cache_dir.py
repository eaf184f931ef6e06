"""A directory of immutable byte strings by key: a cache that processes share.

Threads, workers and unrelated processes use one directory at once. An entry is one
file, written next to its place and renamed when complete, so a reader sees all of it or
nothing. Nothing is synced to disk: after a power cut an entry may be torn; its checksum
shows that, and it counts as missing. Memory holds nothing.
"""

import contextlib
import hashlib
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader.datasets._stores.cache_bound import Bound, entry_path, temporary_path

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
        self._bound = Bound(self.directory, max_bytes)
        self._has_warned = False
        self._paused_until = 0.0

    def get(self, key: str) -> bytes | None:
        """Return what was put under ``key``, or None.

        A damaged entry is deleted and counts as missing.
        """
        digest = _digest(key)
        path = entry_path(self.directory, digest)
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            self._warn("read", exc)
            return None
        try:
            data = _read(fd, digest)
        except OSError as exc:
            self._warn("read", exc)
            return None
        finally:
            os.close(fd)
        if data is None:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        return data

    def put(self, key: str, data: Buffer) -> None:
        """Store ``data`` under ``key`` if possible; make room if needed."""
        view = memoryview(data).cast("B")
        size = _HEADER_BYTES + len(view)
        if size > self.max_bytes or time.monotonic() < self._paused_until:
            return
        digest = _digest(key)
        fields = _FIELDS.pack(_MAGIC, digest, len(view))
        checksum = zlib.crc32(view, zlib.crc32(fields))
        header = fields + _CHECKSUM.pack(checksum)
        try:
            if self._bound.reserve(size):
                self._store(digest, header, view)
        except OSError as exc:
            self._paused_until = time.monotonic() + _PAUSE
            self._warn("write", exc)

    def _store(self, digest: bytes, header: bytes, view: memoryview) -> None:
        path = entry_path(self.directory, digest)
        try:
            try:
                _replace(path, header, view)
            except FileNotFoundError:  # the directory was cleared meanwhile
                _replace(path, header, view)
        except BaseException:
            self._bound.give_back(len(header) + len(view))
            raise

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
    data = os.read(fd, length)
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
    """Read the rest that one call did not return: over 2 GiB."""
    parts, missing = [data], length - len(data)
    while missing and (data := os.read(fd, min(missing, _MOST))):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _replace(path: str, header: bytes, view: memoryview) -> None:
    """Write a file completely or not at all."""
    temporary = temporary_path(path)
    fd = _create(temporary)
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


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[:_MOST]) :]
