"""Byte offsets of the samples in shards, stored in ``.idx`` files or in packs.

A shard's index is an ascending list of byte offsets: where each sample starts, and
where the last one ends. There are two kinds of files:

- ``shard.tar.idx``, next to its shard: little-endian 64-bit offsets, as NVIDIA's
  Megatron-Energon and NeMo write them. It does not record the shard's version.
- A pack is one file for all shards. It starts with ``aioidx``, a version, and the
  length of a header. The header is JSON (names, counts, sizes, entity tags and times of
  shards), padded to a multiple of 8. All offsets follow, as 32-bit or 64-bit numbers.
"""

import array
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from aioloader._base.cancellation import in_thread
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.storage import Storage, read_whole
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ShardChangedError,
    TruncatedReadError,
)

_MAGIC, _VERSION = b"aioidx", 1
_HEAD = struct.Struct("<6sHQ")
_DALI = b"v1."  # the start of an index of NVIDIA DALI
_READ_BYTES = 1 << 20
# Most bytes after the last sample: `tar` writes zeros to the end of a record.
_MAX_PADDING = 1 << 16
# The columns of a pack's header that hold the shards' versions.
_VERSION_COLUMNS = ("sizes", "e_tags", "modified")

Offsets = npt.NDArray[np.unsignedinteger[Any]]
# Where a sample is: the number of its shard, its first byte, and the byte after it.
SampleRange: TypeAlias = tuple[int, int, int]


class Edges:
    """The byte offsets at which the samples of several shards start and end.

    A sample takes 4 bytes of memory if all offsets are below 4 GiB, else 8. The offsets
    of a local pack are memory-mapped, so all processes share them.

    Attributes:
        counts: The number of samples of each shard.
        offsets: For each shard, the starts of its samples and the end of the last one.
        versions: Each shard's version when it was indexed; None or missing if unknown.
        seen: The versions that the first reads of other shards found in this process.
        tail: How many bytes must follow the last sample of each shard.
        mapped: Arguments ``path``, ``base`` and ``width`` of ``map_edges``, or None.
    """

    trailer_bytes = 512  # to check after a shard's last sample

    def __init__(
        self,
        counts: Sequence[int],
        offsets: Offsets,
        versions: Sequence[Version | None] = (),
        mapped: tuple[str, int, int] | None = None,
    ) -> None:
        self.counts, self.offsets = counts, offsets
        self.versions, self.mapped = versions, mapped
        self.seen: dict[int, Version] = {}
        self.tail = 0
        self._firsts = [0, *accumulate(counts)]
        view: Any = offsets
        self._view = memoryview(view)  # its look-ups are four times as fast

    def __len__(self) -> int:
        return self._firsts[-1]

    def find(self, index: int) -> SampleRange:
        shard = bisect_right(self._firsts, index) - 1
        place = index + shard
        return shard, self._view[place], self._view[place + 1]

    def version(self, shard: int) -> Version | None:
        """Return the version that all reads of a shard must have; None: any."""
        return (self.versions[shard] if self.versions else None) or self.seen.get(shard)

    def of_shard(self, shard: int) -> Offsets:
        """Return the starts of one shard's samples, and the end of the last one."""
        start = self._firsts[shard] + shard
        return self.offsets[start : start + self.counts[shard] + 1]

    def end(self, shard: int) -> int:
        """Return the byte offset at which a shard's last sample ends."""
        end: int = self._view[self._firsts[shard + 1] + shard]
        return end

    def of_shards(self, shards: Sequence[int]) -> "Edges":
        """Return the edges of the given shards, in the given order."""
        if [*shards] == [*range(len(self.counts))]:
            return self
        counts = [self.counts[shard] for shard in shards]
        parts = [*map(self.of_shard, shards)]
        versions = [self.versions[shard] for shard in shards] if self.versions else ()
        return Edges(counts, np.concatenate(parts), versions)

    def check_end(
        self, shard: int, location: str, size: int, rest: bytes = b""
    ) -> None:
        """Check a shard's size, and the bytes after its last sample; see ``check_end``.

        Raises:
            ShardChangedError: If the index does not fit the shard.
            TruncatedReadError: If too few bytes follow the last sample.
        """
        end = self.end(shard)
        check_end(location, end, size, rest)
        if end and size < end + self.tail:
            raise without_end(location, size)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mapped is not None:
            args = *self.mapped, self.counts, self.versions
            return map_edges, args, {"tail": self.tail}
        return Edges, (self.counts, self.offsets, self.versions), {"tail": self.tail}


class EdgesBuilder:
    """A builder of ``Edges``, to which shards are added one after another."""

    def __init__(self) -> None:
        self._counts, self._offsets = list[int](), array.array("I")
        self._versions: list[Version | None] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, offsets: Offsets, version: Version | None) -> None:
        if self._offsets.itemsize == 4 and offsets[-1] >= 1 << 32:
            self._offsets = array.array("Q", self._offsets)
        data = offsets.astype(f"u{self._offsets.itemsize}").data
        self._offsets.frombytes(data.cast("B"))
        self._counts.append(len(offsets) - 1)
        self._versions.append(version)

    def done(self) -> Edges:
        offsets: Offsets = np.frombuffer(self._offsets, f"u{self._offsets.itemsize}")
        return Edges(self._counts, offsets, self._versions)


# -- an index next to a shard ------------------------------------------------------


def index_name(path: str) -> str:
    return f"{path}.idx"


async def read_index(storage: Storage, address: Address) -> Offsets | None:
    """Return the offsets from a shard's ``.idx`` file; None if the file is missing."""
    index = sibling(address, index_name)
    try:
        data = await read_whole(storage.open(index, 0, _READ_BYTES))
    except ObjectNotFoundError:
        return None
    offsets = np.frombuffer(data[: len(data) & ~7], "<u8")
    if data.startswith(_DALI):
        raise not_its_index(storage, address, "it is one of NVIDIA DALI, in text")
    if len(data) % 8 or not data or (offsets[:-1] >= offsets[1:]).any():
        raise not_its_index(storage, address, "it is damaged, or of another format")
    return offsets


def fits(end: int, size: int) -> bool:
    """Tell whether the last sample of a shard of ``size`` bytes may end at ``end``."""
    return end <= size <= end + _MAX_PADDING


def check_end(location: str, end: int, size: int, rest: bytes = b"") -> None:
    """Check, unless ``end`` is 0, that ``size`` fits ``end`` and ``rest`` is zeros."""
    if not end:
        return
    if not fits(end, size) or rest.strip(b"\0"):
        change = f"its last sample ended at byte {end:,}, and it has {size:,} bytes"
        if rest.strip(b"\0"):
            change += ", with more data after the sample"
        raise changed(location, change)


def without_end(location: str, size: int, loss: str = "") -> TruncatedReadError:
    why = "was cut short, or its writer leaves them out (missing_end='warn')"
    return TruncatedReadError(
        f"{location!r} stops at byte {size:,} without the zeros at the end of a tar "
        f"archive: it {why if size else 'is empty'}{loss}",
        location=location,
        expected=size + 1024,
        received=size,
    )


def changed_since(location: str, before: Version, now: Version) -> ShardChangedError:
    change = f"it had {before.size:,} bytes and has {now.size:,}"
    if before.size == now.size:
        change = f"it has {now.size:,} bytes as before, but another ETag or date"
    return changed(location, change)


def changed(location: str, change: str) -> ShardChangedError:
    return ShardChangedError(
        f"{location!r} has changed since it was indexed: {change}; write the index "
        "again by `aioloader index`, or restore the shard",
        location=location,
    )


def not_its_index(storage: Storage, address: Address, why: str) -> DatasetError:
    location = storage.label(sibling(address, index_name))
    return DatasetError(
        f"{location!r} is not the index of {storage.label(address)!r}: {why}; write it "
        "again by `aioloader index`",
        location=location,
    )


def index_bytes(offsets: Sequence[int] | Offsets) -> bytes:
    return np.asarray(offsets, "<u8").tobytes()


# -- a pack ------------------------------------------------------------------------


class IndexPack(NamedTuple):
    """The index of many shards, with their names, edges and versions."""

    names: list[str]
    edges: Edges
    format: dict[str, Any]  # identifies the format of the samples

    def by_name(self) -> dict[str, tuple[Offsets, Version]]:
        """Return the offsets and the version of each shard, by its name."""
        versions = cast("Sequence[Version]", self.edges.versions)
        return {
            name: (self.edges.of_shard(shard), versions[shard])
            for shard, name in enumerate(self.names)
        }

    def contents(self) -> bytes:
        """Return the pack as the bytes of a file."""
        edges, versions = self.edges, cast("Sequence[Version]", self.edges.versions)
        columns = zip(*versions, strict=True) if versions else [[]] * 3
        header = {"format": self.format, "names": self.names, "counts": edges.counts}
        header |= dict(zip(_VERSION_COLUMNS, map(list, columns), strict=True))
        width = edges.offsets.dtype.itemsize
        text = json.dumps({**header, "width": width}).encode("utf-8", "surrogateescape")
        text += b" " * (-(_HEAD.size + len(text)) % 8)
        offsets = edges.offsets.astype(f"<u{width}", copy=False).tobytes()
        return b"".join([_HEAD.pack(_MAGIC, _VERSION, len(text)), text, offsets])


async def read_pack(storage: Storage, address: Address) -> IndexPack:
    """Open a pack; a local one is mapped into memory, any other is read.

    Raises:
        ObjectNotFoundError: If there is no file at ``address``.
        ValueError: If the file is not a pack.
        DatasetError: If the pack is damaged, of another version, or cannot be read.
    """
    location, path, data = storage.label(address), storage.path(address), b""
    if path is not None:
        size = (version := await storage.version(address)).size
        head, _ = await storage.part(address, 0, min(_HEAD.size, size), version)
        start = min(_header_end(head, location), size)
        text, _ = await storage.part(address, _HEAD.size, start, version)
    else:
        data = await read_whole(storage.open(address, 0, 4 * _READ_BYTES))
        start = _header_end(data[: _HEAD.size], location)
        text = data[_HEAD.size : start]
    try:
        header = json.loads(text.decode("utf-8", "surrogateescape"))
        keys = ("names", "counts", "format", "width", *_VERSION_COLUMNS)
        names, counts, of, width, *columns = (header[key] for key in keys)
        versions = [Version(*row) for row in zip(*columns, strict=True)]
        length = sum(counts) + len(counts)
    except (ValueError, KeyError, TypeError) as error:
        raise _no_pack(location, repr(error)) from error
    if path is not None:
        args = path, start, width, counts, versions
        return IndexPack(names, await in_thread(map_edges, *args), of)
    if len(data) != start + width * length:
        raise _no_pack(location, f"it has {len(data):,} bytes")
    offsets = np.frombuffer(data, f"<u{width}", offset=start).astype(f"u{width}")
    return IndexPack(names, Edges(counts, offsets, versions), of)


def map_edges(
    path: str, base: int, width: int, counts: Sequence[int], versions: Sequence[Version]
) -> Edges:
    """Return edges whose offsets are mapped from byte ``base`` of a local pack."""
    length = sum(counts) + len(counts)
    if (size := os.stat(path).st_size) != base + width * length:  # noqa: PTH116
        raise _no_pack(path, f"it has {size:,} bytes")
    offsets = np.asarray(np.memmap(path, f"<u{width}", "r", base, (length,)))
    return Edges(counts, offsets, versions, (path, base, width))


def _header_end(head: bytes, location: str) -> int:
    """Return the byte at which a pack's header ends and its list of offsets starts."""
    if not head.startswith(_MAGIC[: len(head)]):
        raise ValueError(
            f"{location!r} is something else than an index of shards: pass another name"
        )
    if len(head) < _HEAD.size:
        raise _no_pack(location, f"it has {len(head)} bytes")
    _, version, length = _HEAD.unpack(head)
    if version != _VERSION:
        raise _no_pack(location, f"it is of version {version}, not {_VERSION}")
    return _HEAD.size + int(length)


def _no_pack(location: str, why: str) -> DatasetError:
    return DatasetError(
        f"{location!r} is no index of shards: {why}; write it again by `aioloader "
        "index --pack`",
        location=location,
    )
