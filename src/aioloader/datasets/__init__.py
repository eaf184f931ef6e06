"""Where samples come from: files, objects, shards, tables and rows.

Map-style datasets (``FileDataset``, ``ObjectDataset``) read one sample by its index, by
``async def __getitem__``, so that the loader keeps ``concurrency`` reads in flight.
Streams read shards from the front. Importing this package imports no optional
dependency; what a dataset needs it asks for when it is made or first read.
"""

from aioloader.datasets._stores.requests import Requests
from aioloader.datasets.files import FileDataset
from aioloader.datasets.iterables import from_async_iterable, from_iterable
from aioloader.datasets.lines import JSONLinesDataset, TextDataset
from aioloader.datasets.objects import ObjectDataset
from aioloader.datasets.sharded import ShardedStream
from aioloader.datasets.sql import SQLRows
from aioloader.datasets.streams import Stream
from aioloader.datasets.tables import ArrowDataset, ParquetDataset, SQLDataset
from aioloader.datasets.tar import TarDataset

__all__ = [
    "ArrowDataset",
    "FileDataset",
    "JSONLinesDataset",
    "ObjectDataset",
    "ParquetDataset",
    "Requests",
    "SQLDataset",
    "SQLRows",
    "ShardedStream",
    "Stream",
    "TarDataset",
    "TextDataset",
    "from_async_iterable",
    "from_iterable",
]
