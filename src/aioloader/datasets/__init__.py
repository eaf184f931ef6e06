"""Datasets of files, objects, shards, tables and database rows.

Map-style datasets (``FileDataset``, ``ObjectDataset``) read a sample by index with
``async def __getitem__``, so that a loader keeps ``concurrency`` reads in flight.
Streams read shards sequentially. A dataset's module is imported when its name is first
used. A dataset imports optional dependencies when it is created or read.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioloader.datasets._stores.failures import Piece, Version
    from aioloader.datasets._stores.sources import Requests, Source
    from aioloader.datasets._streams.engine import ShardFile
    from aioloader.datasets._streams.shards import ShardFormat, ShardReader
    from aioloader.datasets.arrow import from_arrow
    from aioloader.datasets.decoders import Decoder
    from aioloader.datasets.files import FileDataset
    from aioloader.datasets.indexed import IndexedDataset
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

# Public names by module.
_HOLDERS = {
    "_streams.engine": ("ShardFile",),
    "_stores.sources": ("Requests", "Source"),
    "_stores.failures": ("Piece", "Version"),
    "_streams.shards": ("ShardFormat", "ShardReader"),
    "arrow": ("from_arrow",),
    "decoders": ("Decoder",),
    "files": ("FileDataset",),
    "indexed": ("IndexedDataset",),
    "iterables": ("from_async_iterable", "from_iterable"),
    "lines": ("JSONLinesDataset", "TextDataset"),
    "map_style": ("from_dataset",),
    "mds": ("MDSDataset",),
    "mixing": ("mix",),
    "named": ("ClassFolders",),
    "objects": ("ObjectDataset",),
    "sharded": ("ByteStream", "ShardedStream"),
    "sql": ("SQLRows",),
    "streams": ("Stream",),
    "tables": ("ArrowDataset", "CSVDataset", "ParquetDataset", "SQLDataset"),
    "tar": ("TarDataset",),
    "tokens": ("TokenDataset", "TokenWriter"),
    "writers": ("ParquetWriter", "TarWriter", "write_parquet"),
}
_LATER = {name: module for module, names in _HOLDERS.items() for name in names}

__all__ = [
    "ArrowDataset",
    "ByteStream",
    "CSVDataset",
    "ClassFolders",
    "Decoder",
    "FileDataset",
    "IndexedDataset",
    "JSONLinesDataset",
    "MDSDataset",
    "ObjectDataset",
    "ParquetDataset",
    "ParquetWriter",
    "Piece",
    "Requests",
    "SQLDataset",
    "SQLRows",
    "ShardFile",
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
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
