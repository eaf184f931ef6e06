"""Compressed shards, decompressed in a thread in bounded pieces.

Whatever the compression ratio, about one piece at most is unpacked ahead.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import Buffer

from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError, TruncatedReadError

_PIECE = 4 << 20
_GZIP = 16 + zlib.MAX_WBITS
# Packed bytes per call. zstandard does not bound what a call returns: in
# the worst case 128 KB for four bytes, so 32 MB here.
_GZIP_SLICE, _ZSTD_SLICE = 1 << 16, 1 << 10
# The memory of xz's largest preset, 65 MB, and some more.
_MOST_MEMORY = 1 << 27


class Unpacker:
    """Decompresses packed bytes into a bounded number of unpacked ones.

    Args:
        make: Makes a decompressor of one member (gzip), frame (zstandard) or stream.
        length: Packed bytes for each of its calls.
        is_bounded: Whether its ``decompress`` accepts a limit on what it returns.
    """

    def __init__(
        self, make: Callable[[], Any], length: int, *, is_bounded: bool
    ) -> None:
        self._make = make
        self._length = length
        self._is_bounded = is_bounded
        self._inner: Any = None
        self._rest = memoryview(b"")
        self._tail: Buffer = b""

    def feed(self, piece: Buffer) -> None:
        """Add packed bytes, valid until all of them were taken."""
        self._rest = memoryview(piece)

    def take(self, limit: int) -> bytes:
        """Return about ``limit`` bytes; none if more packed ones are needed."""
        parts: list[bytes] = []
        room = limit
        while room > 0:
            is_holding = self._is_holding()
            part = b"" if is_holding else self._next_part()
            if not (part or is_holding):
                break
            data = self._unpack(part, room)
            parts.append(data)
            room -= len(data)
        if not parts and self._is_bounded and not self.is_whole():
            parts.append(self._inner.decompress(b"", limit))  # bytes it held back
        return b"".join(parts)

    def is_whole(self) -> bool:
        """Return whether no member is incomplete."""
        return self._inner is None or bool(self._inner.eof)

    def has_ended(self) -> bool:
        """Return whether the bytes may end here: at least one member, all complete."""
        return self._inner is not None and self.is_whole()

    def _is_holding(self) -> bool:
        """Return whether bzip2 or xz has packed bytes left that it has taken."""
        return not (self.is_whole() or getattr(self._inner, "needs_input", True))

    def _next_part(self) -> Buffer:
        part = self._tail
        self._tail = b""
        if not part:
            part, self._rest = self._rest[: self._length], self._rest[self._length :]
        if self.is_whole():  # padding is allowed between members
            part = bytes(part).lstrip(b"\0")
            if not part and self._rest:
                return self._next_part()
        return part

    def _unpack(self, part: Buffer, room: int) -> bytes:
        if self.is_whole():
            self._inner = self._make()
        inner = self._inner
        if self._is_bounded:
            data: bytes = inner.decompress(part, room)
            self._tail = getattr(inner, "unconsumed_tail", b"") or inner.unused_data
        else:
            data = inner.decompress(bytes(part))
            self._tail = inner.unused_data
        return data


def _gunzip() -> Unpacker:
    return Unpacker(lambda: zlib.decompressobj(_GZIP), _GZIP_SLICE, is_bounded=True)


def _unbz2() -> Unpacker:
    import bz2  # noqa: PLC0415  (Python may be built without it)

    return Unpacker(bz2.BZ2Decompressor, _GZIP_SLICE, is_bounded=True)


def _unxz() -> Unpacker:
    import lzma  # noqa: PLC0415  (Python may be built without it)

    make = partial(lzma.LZMADecompressor, memlimit=_MOST_MEMORY)
    return Unpacker(make, _GZIP_SLICE, is_bounded=True)


def _unzstd() -> Unpacker:
    try:
        import zstandard  # noqa: PLC0415  (an optional dependency)
    except ImportError as exc:
        raise ImportError(
            'zstandard shards need zstandard: pip install "aioloader[zstd]"'
        ) from exc
    make = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
    return Unpacker(make, _ZSTD_SLICE, is_bounded=False)


_UNPACKERS = {
    "gz": _gunzip,
    "tgz": _gunzip,
    "zst": _unzstd,
    "zstd": _unzstd,
    "bz2": _unbz2,
    "tbz2": _unbz2,
    "xz": _unxz,
    "txz": _unxz,
}


def unpacker_of(name: str) -> Callable[[], Unpacker] | None:
    """Return the decompressor for a shard of this name, or None if not packed."""
    ending = name.rpartition(".")[2].lower()
    return _UNPACKERS.get(ending)


class Unpacked:
    """The unpacked bytes of a packed shard.

    Args:
        make: Makes the decompressor.
        location: Redacted address, for errors.
    """

    def __init__(self, make: Callable[[], Unpacker], location: str) -> None:
        self._unpacker = make()
        self._location = location
        self._given = 0
        self._has_ended = False

    def read(
        self, read: Callable[[], Buffer | None], version: Version | None
    ) -> Buffer | None:
        """Return the next piece; empty at the end.

        Args:
            read: Returns a packed piece, or None.
            version: The packed shard's.

        Returns:
            None if ``read`` did.

        Raises:
            DatasetError: If it cannot be unpacked, or was cut short.
        """
        while not (data := self._take()) and not self._has_ended:
            piece = read()
            if piece is None:
                return None
            if memoryview(piece):
                self._unpacker.feed(piece)
            else:
                self._end(version.size if version else 0)
        self._given += len(data)
        return data

    def _take(self) -> bytes:
        try:
            return self._unpacker.take(_PIECE)
        except Exception as error:
            raise DatasetError(
                f"{self._location!r} cannot be unpacked after byte {self._given:,} of "
                f"its contents: {error}; it is damaged",
                location=self._location,
            ) from error

    def _end(self, size: int) -> None:
        self._has_ended = True
        if not self._unpacker.has_ended():
            raise TruncatedReadError(
                f"{self._location!r} ends within its packed data, after byte "
                f"{self._given:,} of its contents: it was cut short at {size:,} bytes",
                location=self._location,
                received=size,
            )
