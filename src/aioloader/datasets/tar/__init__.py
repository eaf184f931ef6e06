"""Tar shards, read like WebDataset: members with the same key make a sample.

Where the samples start is in ``shard.tar.idx``, next to the archive: little-endian
64-bit numbers, one per sample, then one for the end of the last member, as NVIDIA's
Megatron-Energon and NeMo have it. With it an archive can be cut between samples when
there are fewer shards than readers.
"""

import array
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from aioloader._base.blocks import Bad
from aioloader.datasets._checks import check_at_least, check_word, names_options
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.places import Places
from aioloader.datasets._streams.engine import (
    CannotCutError,
    Cuts,
    Feed,
    Kind,
    nearest,
    read_whole,
)
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.datasets.sharded import MAX_SAMPLE_BYTES, ByteStream, StreamOptions
from aioloader.datasets.tar._archive import samples
from aioloader.errors import DatasetError, ObjectNotFoundError

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses

    StrPath = str | os.PathLike[str]

_PIECE = 1 << 20
# Allowed after the last member: zeros to the end of a record.
_RECORD_BYTES = 1 << 16
_NO_SIZE = 1 << 62


async def at_samples(
    places: Places, address: Address, size: int, count: int
) -> Sequence[int]:
    """Return where samples start, as ``Cuts`` does: from the archive's index."""
    name = sibling(address, _index_of)
    try:
        data = await read_whole(places.open(name, 0, _PIECE))
    except ObjectNotFoundError:
        raise CannotCutError(
            f"has no index, {places.label(name)!r}: write it with `aioloader index`"
        ) from None
    starts = _numbers(data[: len(data) & ~7])
    is_rising = len(starts) > 0 and all(a < b for a, b in pairwise(starts))
    end = starts.pop() if starts else 0
    if len(data) % 8 or not is_rising or not end <= size <= end + _RECORD_BYTES:
        text = f"{places.label(name)!r} is not the index of {places.label(address)!r}"
        raise DatasetError(
            f"{text} with its {size:,} bytes (it says {end:,}); write it again by "
            "`aioloader index`",
            location=places.label(name),
        )
    return nearest(starts, size, count)


class TarDataset(ByteStream[dict[str, Any]]):
    """Streams samples from tar files.

    Consecutive members with the same key (the path up to the first dot of the name)
    make one sample: ``{"__key__": ..., "__url__": ..., "jpg": b"...", "cls": b"7"}``,
    with bytes owned by the caller. Links are skipped, and the first is logged; so is a
    sample whose members are not next to each other. Plain, gzip, zstandard, bzip2, xz;
    a plain tar can resume at any sample, reading at most 8 MB of earlier data again. If
    there are fewer shards than readers, ``a.tar`` is split by its index ``a.tar.idx``.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/train-{000..127}.tar"``.
        max_sample_bytes: Larger samples fail, and are not held in memory.
        missing_end: A tar without the zeros at its end was cut short, which is an
            ``"error"``, and its last sample is lost. With ``"warn"``, for writers that
            leave them out, it is read to where it stops.
        options: ``store``, ``store_options``, ``shuffle``, ``interleave``, ``cache``
            and all others of ``StoredStream``.

    Raises:
        ValueError: If an argument is wrong.

    Example:
        >>> import asyncio, io, tarfile, tempfile
        >>> path = tempfile.mktemp(".tar")
        >>> with tarfile.open(path, "w") as tar:
        ...     member = tarfile.TarInfo("a.txt")
        ...     member.size = 2
        ...     tar.addfile(member, io.BytesIO(b"hi"))
        >>> async def first():
        ...     async for sample in TarDataset(path):
        ...         return sample["txt"]
        >>> asyncio.run(first())
        b'hi'
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_samples)

    @names_options
    def __init__(
        self,
        addresses: "Addresses",
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        missing_end: MissingEnd = "error",
        **options: Unpack[StreamOptions],
    ) -> None:
        check_at_least(max_sample_bytes, 1, "max_sample_bytes")
        check_word(missing_end, MissingEnd, "missing_end")
        steps = partial(samples, max_sample_bytes, missing_end)
        kind = Kind(steps, is_quick=True, copies=True)
        super().__init__(addresses, kind, **options)


def write_index(path: "StrPath", index: "StrPath | None" = None) -> int:
    """Write the index of a tar archive on disk, completely or not at all.

    Args:
        path: The archive, not compressed.
        index: The file to write; default: ``path`` plus ``.idx``.

    Returns:
        The number of samples.

    Raises:
        DatasetError: If a sample of the archive cannot be read.
        OSError: If it cannot be read or the index cannot be written.
    """
    path = os.fspath(path)
    target = Path(os.fspath(index) if index is not None else _index_of(path))
    offsets = _numbers(_offsets(path))
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(offsets.tobytes())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(offsets) - 1


def _index_of(path: str) -> str:
    return f"{path}.idx"


def _numbers(values: "bytes | Sequence[int]") -> "array.array[int]":
    """Return numbers from, or for, the bytes of an index."""
    numbers = array.array("Q", values)
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers


def _offsets(path: str) -> Sequence[int]:
    """Return where the samples of an archive start, and where the last one ends."""
    feed = Feed(path, 0)
    starts = [0]
    with Path(path).open("rb", buffering=0) as file:
        for step in samples(_NO_SIZE, "warn", feed):
            if step is None:
                feed.give(file.read(_PIECE))
                continue
            for sample in step[0]:
                if type(sample) is Bad:
                    raise sample.error
                starts.append(step[1])
    return starts
