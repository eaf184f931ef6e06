"""Streams of Arrow data of other libraries, such as Polars, DuckDB, Lance and Ray."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from aioloader._base.extras import imported
from aioloader.datasets._checks import names_options
from aioloader.datasets.sharded import OrderOptions, ShardedStream
from aioloader.datasets.streams import Stream


@names_options
def from_arrow(
    source: Any,
    columns: Iterable[str] | None = None,
    *,
    filters: Any = None,
    nulls: Mapping[str, Any] | None = None,
    **order: Unpack[OrderOptions],
) -> Stream[dict[str, Any]]:
    """Return a stream of the rows of Arrow data; needs the extra ``arrow``.

    A ``pyarrow.Table`` or ``pyarrow.dataset.Dataset`` (also a Lance dataset) is split
    into shards. Other sources are objects with ``__arrow_c_stream__``, such as Polars
    frames and DuckDB relations, and functions that return such an object or yield
    record batches. Each of N readers reads such a source from the start and keeps every
    Nth row. A state counts rows, so their order must repeat: a query needs ORDER BY.

    For Ray Data, pass the list ``dataset.streaming_split(n)``: reader k of n reads
    split k. The order changes between runs, so a state within an epoch is refused.

    Args:
        source: The data, in one of these forms.
        columns: Names of the columns to read; default: all.
        filters: Which rows to read, as for ``ParquetDataset``. A dataset skips files of
            other partitions, and row groups by their statistics.
        nulls: Replacements for NULL, by column.
        order: As for ``ShardedStream``; for tables and datasets only.

    Raises:
        ImportError: If pyarrow is not installed.
        TypeError: If ``source`` is not Arrow data, is read-once, or takes no ``order``.
        ValueError: If an argument is wrong.
    """
    pa = imported("pyarrow", "arrow", "from_arrow needs pyarrow")
    memory = "aioloader.datasets._arrow.memory"
    module = imported(memory, "arrow", "from_arrow needs pyarrow")
    projection = module.Projection(columns, nulls, None, filters)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return ShardedStream(module.MemoryFormat(source, projection), **order)
    dataset = sys.modules.get("pyarrow.dataset")  # imported if `source` is a dataset
    if dataset is not None and isinstance(source, dataset.Dataset):
        return ShardedStream(module.FragmentFormat(source, projection), **order)
    name = type(source).__name__
    if order:
        raise TypeError(
            f"{', '.join(order)} of from_arrow apply to tables and pyarrow.dataset, "
            f"not to {name!r}; use steps of the stream, such as .shuffle(size)"
        )
    if isinstance(source, pa.RecordBatchReader) or hasattr(source, "__next__"):
        raise TypeError(
            f"from_arrow got a {name!r}, which can be read only once; pass the "
            "function that made it"
        )
    splits = source if isinstance(source, (list, tuple)) else [source]
    if not splits or not all(hasattr(split, "iter_batches") for split in splits):
        splits = ()
        if not (callable(source) or hasattr(source, "__arrow_c_stream__")):
            raise TypeError(
                f"from_arrow needs Arrow data, got {name!r}: it has no "
                "__arrow_c_stream__ and is not a function that returns such an object"
            )
    stream: Stream[dict[str, Any]]
    stream = module.ArrowStream(None if splits else source, projection, splits)
    return stream
