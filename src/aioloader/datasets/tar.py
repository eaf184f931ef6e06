"""Tar shards, read as WebDataset reads them: members of one key make a sample."""

from functools import partial
from typing import TYPE_CHECKING, Any

from aioloader.datasets._requests import Requests
from aioloader.datasets._tar_walk import TarParser
from aioloader.datasets.sharded import MAX_BYTES, MAX_SAMPLE_BYTES, ByteStream

if TYPE_CHECKING:
    import os

    from obstore.store import ObjectStore

    from aioloader.datasets.sharded import Addresses


class TarDataset(ByteStream[dict[str, Any]]):
    """Stream samples from tar files.

    Consecutive members with the same key (the path up to the first dot of the name)
    make one sample: ``{"__key__": ..., "__url__": ..., "jpg": b"...", "cls": b"7"}``,
    with bytes owned by the caller. Plain, gzip and zstandard; a plain tar can be
    resumed at any sample without reading what was before.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/train-{000..127}.tar"``.
        store: What ``addresses`` are relative to: URL, directory or store of obstore.
        shuffle: Whether the shards are permuted, anew in each epoch.
        seed: Key of the permutation.
        interleave: How many shards are read at once, sample by sample in turn.
        deterministic: Whether they take turns strictly.
        max_bytes: Bytes that are read ahead, in all.
        max_sample_bytes: Larger samples fail, and are not held in memory.
        requests: How requests that fail or stall are treated.
        config: Options of ``obstore.store.from_url``.

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

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        addresses: "Addresses",
        *,
        store: "str | os.PathLike[str] | ObjectStore | None" = None,
        shuffle: bool = False,
        seed: int = 0,
        interleave: int = 1,
        deterministic: bool = True,
        max_bytes: int = MAX_BYTES,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        requests: Requests | None = None,
        **config: Any,
    ) -> None:
        super().__init__(
            addresses,
            partial(_parser, max_sample_bytes),
            store=store,
            requests=requests,
            order={
                "shuffle": shuffle,
                "seed": seed,
                "interleave": interleave,
                "deterministic": deterministic,
                "max_bytes": max_bytes,
            },
            config=config,
        )


def _parser(max_sample_bytes: int, url: str, offset: int) -> TarParser:
    return TarParser(url, max_sample_bytes=max_sample_bytes, offset=offset)
