"""Where the samples of shards start and end: ``.idx`` files, packs, and scans.

An index of a shard is a sorted list of numbers, one more than it has samples: where
each sample starts, and where the last one ends. There are two kinds of files:

- ``shard.tar.idx``, next to its shard: little-endian 64-bit numbers, as NVIDIA's
  Megatron-Energon and NeMo have it. It has no version of its shard.
- A pack, one file for all shards: ``aioidx`` and a version, the length of a header, the
  header (JSON: names, counts, sizes, entity tags and times of shards), zeros up to a
  multiple of 8, and the numbers of all shards, 32-bit ones if all are below 4 GiB.
"""

import array
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioloader._base.cancellation import in_thread
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.storage import Storage, read_whole
from aioloader.errors import DatasetError, ObjectNotFoundError, ShardChangedError

_MAGIC, _VERSION = b"aioidx", 1
_HEAD = struct.Struct("<6sHQ")
_DALI = b"v1."  # how its text starts
_PIECE = 1 << 20
# Allowed after the last sample: zeros to the end of a record, as `tar` writes them.
_RECORD_BYTES = 1 << 16
# The columns of a pack's header, besides the names and counts.
_FACTS = ("sizes", "e_tags", "modified")

Numbers = npt.NDArray[np.unsignedinteger[Any]]


# Where a sample is: the number of its shard, its first byte and one past it.
SampleRange: TypeAlias = tuple[int, int, int]


class Edges:
    """The places of all samples, of ``counts`` in each shard.

    Memory: 4 bytes per sample if all shards are below 4 GiB, else 8. Those of a local
    pack are mapped, and shared by all processes.

    Attributes:
        counts: How many samples each shard has.
        numbers: The numbers of all shards, each with one more than it has samples.
        versions: The version of each shard as it was indexed; none if not known.
        mapped: The arguments of ``map_edges``, if it was called.
    """

    def __init__(
        self,
        counts: Sequence[int],
        numbers: Numbers,
        versions: Sequence[Version] = (),
        mapped: tuple[str, int, int] | None = None,
    ) -> None:
        self.counts, self.numbers = counts, numbers
        self.versions, self.mapped = versions, mapped
        self._firsts = [0, *accumulate(counts)]
        view: Any = numbers
        self._view = memoryview(view)  # four times as fast as the array

    def __len__(self) -> int:
        return self._firsts[-1]

    def find(self, index: int) -> SampleRange:
        shard = bisect_right(self._firsts, index) - 1
        at = index + shard
        return shard, self._view[at], self._view[at + 1]

    def of_shard(self, shard: int) -> Numbers:
        """Return the numbers of one shard."""
        start = self._firsts[shard] + shard
        return self.numbers[start : start + self.counts[shard] + 1]

    def end(self, shard: int) -> int:
        """Return where the last sample of a shard ends."""
        end: int = self._view[self._firsts[shard + 1] + shard]
        return end

    def of_shards(self, shards: Sequence[int]) -> "Edges":
        """Return those of some of the shards."""
        if [*shards] == [*range(len(self.counts))]:
            return self
        counts = [self.counts[shard] for shard in shards]
        parts = [*map(self.of_shard, shards)]
        some = [self.versions[shard] for shard in shards] if self.versions else ()
        return Edges(counts, np.concatenate(parts), some)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mapped is not None:
            return map_edges, (*self.mapped, self.counts, self.versions)
        return Edges, (self.counts, self.numbers, self.versions)


class EdgesBuilder:
    """The numbers of shards, added one shard after another."""

    def __init__(self) -> None:
        self._counts, self._numbers = list[int](), array.array("I")
        self._versions: list[Version | None] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, numbers: Numbers, version: Version | None) -> None:
        if self._numbers.itemsize == 4 and numbers[-1] >= 1 << 32:
            self._numbers = array.array("Q", self._numbers)
        data = numbers.astype(f"u{self._numbers.itemsize}").data
        self._numbers.frombytes(data.cast("B"))
        self._counts.append(len(numbers) - 1)
        self._versions.append(version)

    def done(self) -> Edges:
        """Return the edges; without versions, unless all are known."""
        versions = [one for one in self._versions if one is not None]
        known = versions if len(versions) == len(self._counts) else ()
        numbers: Numbers = np.frombuffer(self._numbers, f"u{self._numbers.itemsize}")
        return Edges(self._counts, numbers, known)


# -- an index next to a shard ------------------------------------------------------


def index_name(path: str) -> str:
    return f"{path}.idx"


async def read_index(storage: Storage, address: Address) -> Numbers | None:
    """Return the numbers in the index next to a shard; None if there is none."""
    beside = sibling(address, index_name)
    try:
        data = await read_whole(storage.open(beside, 0, _PIECE))
    except ObjectNotFoundError:
        return None
    numbers = np.frombuffer(data[: len(data) & ~7], "<u8")
    if data.startswith(_DALI):
        raise not_its_index(storage, address, "it is one of NVIDIA DALI, in text")
    if len(data) % 8 or not _is_rising(numbers):
        raise not_its_index(storage, address, "it is damaged, or of another format")
    return numbers


def _is_rising(numbers: Numbers) -> bool:
    return len(numbers) > 0 and bool((numbers[:-1] < numbers[1:]).all())


def fits(end: int, size: int) -> bool:
    """Tell whether a shard may be as long if its last sample ends there."""
    return end <= size <= end + _RECORD_BYTES


def check_end(location: str, end: int, size: int, rest: bytes = b"") -> None:
    """Check that a shard's last sample, if any, ends there, and what follows it."""
    if not end:
        return
    if not fits(end, size) or rest.strip(b"\0"):
        what = f"its last sample ended at byte {end:,}, and it has {size:,} bytes"
        after = ", and others than zeros after that" if rest.strip(b"\0") else ""
        raise _changed(location, what + after)


def changed_since(location: str, before: Version, now: Version) -> ShardChangedError:
    what = f"it had {before.size:,} bytes and has {now.size:,}"
    if before.size == now.size:
        what = f"it has {now.size:,} bytes as before, but another ETag or date"
    return _changed(location, what)


def _changed(location: str, what: str) -> ShardChangedError:
    return ShardChangedError(
        f"{location!r} has changed since it was indexed: {what}; write the index again "
        "by `aioloader index`, or restore the shard",
        location=location,
    )


def not_its_index(storage: Storage, address: Address, why: str) -> DatasetError:
    location = storage.label(sibling(address, index_name))
    return DatasetError(
        f"{location!r} is not the index of {storage.label(address)!r}: {why}; write it "
        "again by `aioloader index`",
        location=location,
    )


def index_bytes(numbers: "Sequence[int] | Numbers") -> bytes:
    return np.asarray(numbers, "<u8").tobytes()


# -- a pack ------------------------------------------------------------------------


class IndexPack(NamedTuple):
    """The index of many shards: their names, and their edges with versions."""

    names: list[str]
    edges: Edges
    format: dict[str, Any]  # what tells its samples from those of another format

    def by_name(self) -> dict[str, tuple[Numbers, Version]]:
        """Return the numbers and the version of each shard."""
        edges = self.edges
        return {
            name: (edges.of_shard(shard), edges.versions[shard])
            for shard, name in enumerate(self.names)
        }

    def contents(self) -> bytes:
        """Return the contents of its file."""
        edges = self.edges
        facts = zip(*edges.versions, strict=True) if edges.versions else [[]] * 3
        header = {"format": self.format, "names": self.names, "counts": edges.counts}
        header |= {name: [*one] for name, one in zip(_FACTS, facts, strict=True)}
        width = edges.numbers.dtype.itemsize
        text = json.dumps({**header, "width": width}).encode("utf-8", "surrogateescape")
        text += b" " * (-(_HEAD.size + len(text)) % 8)
        numbers = edges.numbers.astype(f"<u{width}", copy=False).tobytes()
        return b"".join([_HEAD.pack(_MAGIC, _VERSION, len(text)), text, numbers])


async def read_pack(storage: Storage, address: Address) -> IndexPack:
    """Open a pack: a local one is mapped, any other is read into memory.

    Raises:
        ObjectNotFoundError: If there is none.
        ValueError: If it is something else.
        DatasetError: If it is damaged, or cannot be read.
    """
    location, path, data = storage.label(address), storage.path(address), b""
    if path is not None:
        size = (version := await storage.version(address)).size
        head, _ = await storage.part(address, 0, min(_HEAD.size, size), version)
        at = min(_header_end(head, location), size)
        text, _ = await storage.part(address, _HEAD.size, at, version)
    else:
        data = await read_whole(storage.open(address, 0, 4 * _PIECE))
        at = _header_end(data[: _HEAD.size], location)
        text = data[_HEAD.size : at]
    try:
        header = json.loads(text.decode("utf-8", "surrogateescape"))
        names, counts, of, width, *facts = (
            header[name] for name in ("names", "counts", "format", "width", *_FACTS)
        )
        versions = [Version(*one) for one in zip(*facts, strict=True)]
        length = sum(counts) + len(counts)
    except (ValueError, KeyError, TypeError) as error:
        raise _no_pack(location, repr(error)) from error
    if path is not None:
        args = path, at, width, counts, versions
        return IndexPack(names, await in_thread(map_edges, *args), of)
    if len(data) != at + width * length:
        raise _no_pack(location, f"it has {len(data):,} bytes")
    numbers = np.frombuffer(data, f"<u{width}", offset=at).astype(f"u{width}")
    return IndexPack(names, Edges(counts, numbers, versions), of)


def map_edges(
    path: str, at: int, width: int, counts: Sequence[int], versions: Sequence[Version]
) -> Edges:
    """Map the numbers in a pack, which ``counts`` describe."""
    length = sum(counts) + len(counts)
    if (size := os.stat(path).st_size) != at + width * length:  # noqa: PTH116
        raise _no_pack(path, f"it has {size:,} bytes")
    numbers = np.asarray(np.memmap(path, f"<u{width}", "r", at, (length,)))
    return Edges(counts, numbers, versions, (path, at, width))


def _header_end(head: bytes, location: str) -> int:
    """Return where the header of a pack ends."""
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
