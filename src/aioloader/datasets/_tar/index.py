"""Where the samples of a tar archive start: ``shard.tar.idx``, next to the archive.

Little-endian 64-bit numbers, one per sample, then one for the end of the last member:
the format of NVIDIA's Megatron-Energon and NeMo. With it an archive can be cut between
samples when there are fewer shards than readers.
"""

import array
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aioloader._order.blocks import Bad
from aioloader.datasets._cuts import CannotCutError, nearest, read_whole
from aioloader.datasets._engine import Feed
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.places import Places
from aioloader.datasets._tar.walk import samples
from aioloader.errors import DatasetError, ObjectNotFoundError

if TYPE_CHECKING:
    StrPath = str | os.PathLike[str]

_PIECE = 1 << 20
# Allowed after the last member: zeros to the end of a record.
_RECORD_BYTES = 1 << 16
_NO_SIZE = 1 << 62


def _index_of(path: str) -> str:
    return f"{path}.idx"


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
    offsets = array.array("Q", _offsets(path))
    if sys.byteorder != "little":
        offsets.byteswap()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(offsets.tobytes())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(offsets) - 1


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
    starts = array.array("Q", data[: len(data) & ~7])
    if sys.byteorder != "little":
        starts.byteswap()
    end = starts.pop() if starts else 0
    is_rising = all(a < b for a, b in zip(starts, [*starts[1:], end], strict=True))
    if len(data) % 8 or not is_rising or not end <= size <= end + _RECORD_BYTES:
        text = f"{places.label(name)!r} is not the index of {places.label(address)!r}"
        raise DatasetError(
            f"{text} with its {size:,} bytes (it says {end:,}); write it again by "
            "`aioloader index`",
            location=places.label(name),
        )
    return nearest(starts, size, count)
