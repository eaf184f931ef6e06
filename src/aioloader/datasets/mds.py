"""MosaicML shards, as the writer of MosaicML Streaming makes them."""

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from aioloader.datasets._mds.format import MDSFormat
from aioloader.datasets._options import StreamOptions, names_options
from aioloader.datasets.sharded import StoredStream

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses


class MDSDataset(StoredStream[dict[str, Any]]):
    """Streams samples from MDS shards.

    A sample is a dict of its columns, decoded like MosaicML Streaming: numbers, text,
    bytes, JSON, arrays (copied), and pictures by Pillow. Plain, gzip and zstandard; a
    plain shard can resume at any sample without reading earlier ones, and is cut if
    there are fewer shards than readers.

    Args:
        addresses: Directories with an ``index.json``, as paths or URLs.
        allow_unsafe_types: Whether columns of pickles are loaded, which runs code of
            their author.
        options: As for ``TarDataset``.

    Raises:
        ValueError: If an argument is wrong.
    """

    @names_options
    def __init__(
        self,
        addresses: "Addresses",
        *,
        allow_unsafe_types: bool = False,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(MDSFormat, allow_unsafe_types=allow_unsafe_types)
        super().__init__(addresses, made_by, **options)
