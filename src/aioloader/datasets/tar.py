"""Tar shards, read like WebDataset: members with the same key make a sample."""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from aioloader.datasets._cuts import Cuts
from aioloader.datasets._engine import Kind
from aioloader.datasets._options import StreamOptions, check_at_least, names_options
from aioloader.datasets._streams.shards import MissingEnd, check_missing_end
from aioloader.datasets._tar.index import at_samples
from aioloader.datasets._tar.walk import samples
from aioloader.datasets.sharded import MAX_SAMPLE_BYTES, ByteStream

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses


class TarDataset(ByteStream[dict[str, Any]]):
    """Streams samples from tar files.

    Consecutive members with the same key (the path up to the first dot of the name)
    make one sample: ``{"__key__": ..., "__url__": ..., "jpg": b"...", "cls": b"7"}``,
    with bytes owned by the caller. Links are skipped, and the first is logged. Plain,
    gzip, zstandard, bzip2, xz; a plain tar can resume at any sample, reading at most
    8 MB of earlier data again. If there are fewer shards than readers, ``a.tar`` is cut
    by its index ``a.tar.idx``.

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
        check_missing_end(missing_end)
        steps = partial(samples, max_sample_bytes, missing_end)
        kind = Kind(steps, is_quick=True, copies=True)
        super().__init__(addresses, kind, **options)
