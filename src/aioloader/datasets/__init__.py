"""Where samples come from: files, objects, shards, tables and rows.

Map-style datasets (``FileDataset``, ``ObjectDataset``) read one sample by its index, by
``async def __getitem__``, so that the loader keeps ``concurrency`` reads in flight.
Streams read shards from the front. A dataset's module is imported when its name is
first used, and an optional dependency when a dataset that needs it is made or read.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioloader.datasets._stores.requests import Requests
    from aioloader.datasets._stores.sources import Source
    from aioloader.datasets._stores.versions import Piece, Version
    from aioloader.datasets._streams.shards import Parser, ShardFormat, ShardReader
    from aioloader.datasets.arrow import from_arrow
    from aioloader.datasets.decoders import Decoder
    from aioloader.datasets.files import FileDataset
    from aioloader.datasets.iterables import from_async_iterable, from_iterable
    from aioloader.datasets.lines import JSONLinesDataset, TextDataset
    from aioloader.datasets.map_style import from_dataset
    from aioloader.datasets.mds import MDSDataset
    from aioloader.datasets.mixing import mix
    from aioloader.datasets.named import ClassFolders
    from aioloader.datasets.objects import ObjectDataset
    from aioloader.datasets.sharded import ByteStream, ShardedStream
    from aioloader.datasets.sql import SQLRows
    from aioloader.datasets.streams import Stream
    from aioloader.datasets.tables import (
        ArrowDataset,
        CSVDataset,
        ParquetDataset,
        SQLDataset,
    )
    from aioloader.datasets.tar import TarDataset
    from aioloader.datasets.tokens import TokenDataset, TokenWriter
    from aioloader.datasets.writers import ParquetWriter, TarWriter, write_parquet

_LATER = {
    "ArrowDataset": "aioloader.datasets.tables",
    "ByteStream": "aioloader.datasets.sharded",
    "CSVDataset": "aioloader.datasets.tables",
    "ClassFolders": "aioloader.datasets.named",
    "Decoder": "aioloader.datasets.decoders",
    "FileDataset": "aioloader.datasets.files",
    "JSONLinesDataset": "aioloader.datasets.lines",
    "MDSDataset": "aioloader.datasets.mds",
    "ObjectDataset": "aioloader.datasets.objects",
    "Parser": "aioloader.datasets._streams.shards",
    "ParquetDataset": "aioloader.datasets.tables",
    "ParquetWriter": "aioloader.datasets.writers",
    "Piece": "aioloader.datasets._stores.versions",
    "Requests": "aioloader.datasets._stores.requests",
    "SQLDataset": "aioloader.datasets.tables",
    "SQLRows": "aioloader.datasets.sql",
    "ShardFormat": "aioloader.datasets._streams.shards",
    "ShardReader": "aioloader.datasets._streams.shards",
    "ShardedStream": "aioloader.datasets.sharded",
    "Source": "aioloader.datasets._stores.sources",
    "Stream": "aioloader.datasets.streams",
    "TarDataset": "aioloader.datasets.tar",
    "TarWriter": "aioloader.datasets.writers",
    "TextDataset": "aioloader.datasets.lines",
    "TokenDataset": "aioloader.datasets.tokens",
    "TokenWriter": "aioloader.datasets.tokens",
    "Version": "aioloader.datasets._stores.versions",
    "from_arrow": "aioloader.datasets.arrow",
    "from_async_iterable": "aioloader.datasets.iterables",
    "from_dataset": "aioloader.datasets.map_style",
    "from_iterable": "aioloader.datasets.iterables",
    "mix": "aioloader.datasets.mixing",
    "write_parquet": "aioloader.datasets.writers",
}

__all__ = [
    "ArrowDataset",
    "ByteStream",
    "CSVDataset",
    "ClassFolders",
    "Decoder",
    "FileDataset",
    "JSONLinesDataset",
    "MDSDataset",
    "ObjectDataset",
    "ParquetDataset",
    "ParquetWriter",
    "Parser",
    "Piece",
    "Requests",
    "SQLDataset",
    "SQLRows",
    "ShardFormat",
    "ShardReader",
    "ShardedStream",
    "Source",
    "Stream",
    "TarDataset",
    "TarWriter",
    "TextDataset",
    "TokenDataset",
    "TokenWriter",
    "Version",
    "from_arrow",
    "from_async_iterable",
    "from_dataset",
    "from_iterable",
    "mix",
    "write_parquet",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
