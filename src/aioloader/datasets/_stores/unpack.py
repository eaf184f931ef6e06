"""Decompression of shards in pieces of bounded size, for any compression ratio."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

from typing_extensions import Buffer

from aioloader._base.extras import imported
from aioloader.errors import DatasetError, TruncatedReadError

_PIECE = 1 << 19

# A generator that yields unpacked pieces, or None to ask for a packed piece. Send it an
# empty piece at the end, or None if no piece has arrived yet.
Unpacking: TypeAlias = Generator[bytes | None, Buffer | None, None]
# The module that unpacks, the packed bytes per call, and the limit of unpacked bytes in
# a call. zstandard accepts no limit: 1 KB may unpack to 32 MB.
_Packing: TypeAlias = tuple[str, int, tuple[int, ...]]
_BY_ENDING: dict[str, _Packing] = {
    **dict.fromkeys(("gz", "tgz"), ("zlib", 1 << 16, (_PIECE,))),
    **dict.fromkeys(("zst", "zstd"), ("zstandard", 1 << 10, ())),
    **dict.fromkeys(("bz2", "tbz2"), ("bz2", 1 << 16, (_PIECE,))),
    **dict.fromkeys(("xz", "txz"), ("lzma", 1 << 16, (_PIECE,))),
}
# Default memory limit; xz needs 65 MB for its largest preset.
UNPACK_BYTES = 1 << 27
# No format needs 2 ** 33 bytes of memory to unpack.
_MAX_BITS = 33


def unpacker_of(name: str) -> Callable[[str, int], Unpacking] | None:
    """Return the unpacker for a shard's name; None if the shard is not compressed."""
    packing = _BY_ENDING.get(name.rpartition(".")[2].lower())
    return packing and (
        lambda location, most: _unpack(_Members(packing, most), location)
    )


def _unpack(members: "_Members", location: str) -> Unpacking:
    """Unpack a shard; raise a DatasetError if it is damaged or ends early."""
    received = unpacked = 0
    while True:
        packed: Buffer | None = None
        while packed is None:
            packed = yield None
        rest, parts = memoryview(packed), list[bytes]()
        if not rest:
            break
        received += len(rest)
        failure: Exception | None = None
        try:
            for data in members.unpack(rest):
                parts.append(data)
                unpacked += len(data)
                if sum(map(len, parts)) >= _PIECE:
                    yield b"".join(parts)
                    parts.clear()
        except Exception as error:  # noqa: BLE001  (raised after the valid bytes)
            failure = error
        if any(parts):
            yield b"".join(parts)
        if failure is not None:
            raise members.error(failure, location, unpacked) from failure
    inner = members.inner  # there must be a member, and the last one must be complete
    if inner is None or not inner.eof:
        raise TruncatedReadError(
            f"{location!r} ends within its packed data, after byte {unpacked:,} of its "
            f"contents: it was cut short at {received:,} bytes; write or "
            "download it again",
            location=location,
            received=received,
        )


class _Members:
    """Unpacks concatenated members or frames; skips zero padding between them."""

    def __init__(self, packing: _Packing, most: int) -> None:
        module, self._length, self._limit = packing
        self._make, self._most = _maker_of(module), most
        self.inner: Any = None
        self._head = b""  # first packed bytes of this member

    def unpack(self, packed: memoryview) -> Iterator[bytes]:
        """Unpack bytes; yield parts of bounded size, except from zstandard."""
        for start in range(0, len(packed), self._length):
            part, is_full = bytes(packed[start : start + self._length]), False
            while part or is_full:
                if self.inner is None or self.inner.eof:
                    part = part.lstrip(b"\0")
                    if not part:
                        break
                    self.inner, self._head = self._make(self._most), b""
                if len(self._head) < self._length:
                    self._head += part
                data = self.inner.decompress(part, *self._limit)
                is_full = len(data) >= _PIECE and not self.inner.eof
                part = getattr(self.inner, "unconsumed_tail", b"")
                part = part or self.inner.unused_data
                yield data

    def error(self, failure: Exception, location: str, unpacked: int) -> DatasetError:
        # Try powers of two, because lzma does not report how much memory it needs.
        is_memory = "memory" in str(failure).lower()
        for bits in range(self._most.bit_length(), _MAX_BITS) if is_memory else ():
            with contextlib.suppress(Exception):
                self._make(1 << bits).decompress(self._head, *self._limit)
                return DatasetError(
                    f"{location!r} needs up to {1 << bits:,} bytes of memory to unpack"
                    f": pass unpack_bytes={1 << bits}",
                    location=location,
                )
        return DatasetError(
            f"{location!r} cannot be unpacked after byte {unpacked:,} of its contents: "
            f"{failure}; write or download it again",
            location=location,
        )


def _maker_of(name: str) -> Callable[[int], Any]:
    """Return a function that makes a member's decompressor, given a memory limit."""
    if name == "zstandard":
        # Before Python 3.14, this failing import would search folders for each shard.
        if sys.version_info >= (3, 14):
            with contextlib.suppress(ImportError):
                zstd: Any = importlib.import_module("compression.zstd")
                key = zstd.DecompressionParameter.window_log_max
                return lambda most: zstd.ZstdDecompressor(
                    options={key: sorted((*key.bounds(), most.bit_length() - 1))[1]}
                )
        zstandard = imported(name, "zstd", "zstandard shards need zstandard")
        make = zstandard.ZstdDecompressor
        return lambda most: make(max_window_size=most).decompressobj()
    module: Any = importlib.import_module(name)  # some builds of Python lack it
    if name == "zlib":
        return lambda _most: module.decompressobj(16 + module.MAX_WBITS)
    if name == "bz2":
        return lambda _most: module.BZ2Decompressor()
    return lambda most: module.LZMADecompressor(memlimit=most)
