"""Shards cut into parts, when there are fewer shards than readers.

A part is a range of bytes that starts and ends between two samples. All parts have
about the same size, and depend only on the shards' sizes, so each rank finds the same.
"""

import re
import zlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from aioloader._base.outlast import each
from aioloader.datasets._stores.addresses import Address
from aioloader.datasets._stores.failures import NoRangesError
from aioloader.datasets._stores.places import Bytes, Places
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.datasets._stores.versions import Version

# Bytes to search at once for the end of a line.
_LOOK = 1 << 16
# Files up to this size may be read whole, to find enough lines for all readers.
_SMALL = 1 << 24


class Part(NamedTuple):
    """A part of a shard: the bytes from ``start`` to ``stop`` of a version of it."""

    address: Address
    start: int
    stop: int | None
    version: Version | None


class CannotCutError(Exception):
    """Internal: why a shard cannot be cut, and what to do."""


# Finds where all but the first of ``count`` even parts of a shard start, in order, by
# its address, size and ``count``; or raises a CannotCutError.
Cuts: TypeAlias = Callable[[Places, Address, int, int], Awaitable[Sequence[int]]]


async def cut_shards(
    places: Places, shards: Sequence[Address], count: int, cuts: Cuts
) -> list[Part]:
    """Return ``count`` parts of all shards, in order; shards stay whole if possible.

    A ValueError if not enough parts can be cut.
    """
    versions = await each(partial(_version, places), shards)
    numbers = shares([version.size for version in versions], count)
    reasons = [""] * len(shards)

    async def cut(at: int) -> list[Part]:
        shard, version, inner = shards[at], versions[at], list[int]()
        if unpacker_of(places.label(shard)):
            reasons[at] = "is compressed: unpack or split it"
        elif numbers[at] > 1:
            try:
                inner = [*await cuts(places, shard, version.size, numbers[at])]
            except CannotCutError as error:
                reasons[at] = str(error)
        return [
            Part(shard, *edges, version)
            for edges in pairwise([0, *inner, version.size])
        ]

    parts = [*chain.from_iterable(await each(cut, range(len(shards))))]
    if len(parts) < count:
        why = "; ".join(
            f"{places.label(shard)!r} {reason}"
            for shard, reason in zip(shards, reasons, strict=True)
            if reason
        )
        why = why or "they have too few samples"
        raise ValueError(
            f"{len(shards)} shards can be cut into {len(parts)} parts only, but there "
            f"are {count} readers (ranks x workers, or as `readers` says): {why}; or "
            "use fewer readers"
        )
    return parts


async def _version(places: Places, shard: Address) -> Version:
    try:
        return await places.version(shard)
    except NoRangesError:
        label = places.label(shard)
        raise ValueError(
            f"{label!r} cannot be cut for more readers: its server gives no ranges; "
            "use fewer readers, or more shards"
        ) from None


def checksum_of(parts: Sequence[Part]) -> str:
    text = ";".join(f"{part.start}-{part.stop}" for part in parts)
    return f"{zlib.crc32(text.encode()):08x}"


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of parts per shard; the largest parts are divided first."""
    shares = [1] * len(sizes)
    heap = [(-size, at) for at, size in enumerate(sizes)]
    heapify(heap)
    for _ in range(count - len(sizes)):
        at = heap[0][1]
        shares[at] += 1
        heapreplace(heap, (-sizes[at] // shares[at], at))
    return shares


async def at_line_ends(
    places: Places, address: Address, size: int, count: int
) -> Sequence[int]:
    """Return starts of lines, as ``Cuts`` does, after even shares of the bytes."""
    after = [size * number // count for number in range(1, count)]
    starts = await each(lambda at: _line_after(places, address, at, size), after)
    found = sorted({start for start in starts if 0 < start < size})
    if len(found) < count - 1 and size <= _SMALL:  # few lines, of uneven lengths
        data = await read_whole(places.open(address, 0, _LOOK, stop=size))
        ends = [0, *(one.end() for one in re.finditer(rb"\n", data))]
        return nearest([end for end in ends if end < size], size, count)
    return found


async def _line_after(places: Places, address: Address, at: int, size: int) -> int:
    """Return where the first line starts that starts at ``at`` or later."""
    at = max(0, at - 1)
    source = places.open(address, at, _LOOK, stop=size)
    try:
        while data := bytes(await source.read()):
            end = data.find(b"\n")
            if end >= 0:
                return at + end + 1
            at += len(data)
    finally:
        await source.aclose()
    return size


def nearest(starts: Sequence[int], size: int, count: int) -> Sequence[int]:
    """Return the ``starts`` closest to even shares of ``size``, without the first one.

    There are ``count - 1``, all different, if there are enough.
    """
    last = len(starts) - count
    place, found = 0, []
    for one in range(1, min(count, len(starts))):
        place = max(place + 1, bisect_left(starts, size * one // count))
        place = min(place, max(last, 0) + one)
        found.append(starts[place])
    return found


async def read_whole(source: Bytes) -> bytes:
    parts: list[bytes] = []
    try:
        while data := bytes(await source.read()):
            parts.append(data)
    finally:
        await source.aclose()
    return b"".join(parts)
