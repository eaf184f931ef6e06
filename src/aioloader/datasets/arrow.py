"""Arrow data of other libraries as a stream: tables, datasets, queries, frames, Ray."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from aioloader.datasets._options import OrderOptions, names_options
from aioloader.datasets._streams.cursors import Cursor, Reading, State
from aioloader.datasets._streams.descriptions import name_of
from aioloader.datasets.sharded import ShardedStream
from aioloader.datasets.streams import Stream
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from aioloader.datasets._arrow.wanted import Wanted

Row = dict[str, Any]


@names_options
def from_arrow(
    source: Any,
    columns: Iterable[str] | None = None,
    *,
    filters: Any = None,
    nulls: Mapping[str, Any] | None = None,
    **order: Unpack[OrderOptions],
) -> Stream[Row]:
    """Return a stream of the rows of Arrow data; needs the extra ``arrow``.

    A ``pyarrow.Table`` and a ``pyarrow.dataset.Dataset`` (or Lance's, which is derived
    from it) are cut into shards. Anything else is read from its beginning by each
    reader, which keeps every Nth row: Polars frames, DuckDB relations and other objects
    with ``__arrow_c_stream__``; or a function that returns one or yields record
    batches, called in every epoch. A state counts rows, so a source must return them in
    the same order again: a query needs ORDER BY.

    For Ray Data, pass the list ``dataset.streaming_split(n)``: reader k of n reads the
    k-th. Its order changes between runs, so a state within an epoch is refused.

    Args:
        source: The data.
        columns: Names of the columns to read; default: all.
        filters: The rows to read, as for ``ParquetDataset``; a dataset skips files of
            other partitions, and row groups by their statistics.
        nulls: Column to the value that replaces NULL.
        order: As for ``ShardedStream``; for tables and datasets.

    Raises:
        ImportError: If pyarrow is not installed.
        TypeError: If ``source`` is not Arrow data, or can be read only once.
        ValueError: If an argument is wrong.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
    except ImportError as exc:
        raise ImportError(
            'from_arrow needs pyarrow: pip install "aioloader[arrow]"'
        ) from exc
    from aioloader.datasets._arrow.memory import (  # noqa: PLC0415  (needs pyarrow)
        FragmentFormat,
        MemoryFormat,
    )
    from aioloader.datasets._arrow.wanted import Wanted  # noqa: PLC0415  (likewise)

    wanted = Wanted(columns, nulls, None, filters)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return _Shards(MemoryFormat(source, wanted), **order)
    if _is_dataset(source):
        return _Shards(FragmentFormat(source, wanted), **order)
    kind = type(source).__name__
    if order:
        raise TypeError(
            f"{', '.join(order)} of from_arrow apply to tables and pyarrow.dataset, "
            f"not to {kind!r}; use steps of the stream, such as .shuffle(size)"
        )
    if isinstance(source, pa.RecordBatchReader) or hasattr(source, "__next__"):
        raise TypeError(
            f"from_arrow got a {kind!r}, which can be read only once; pass the "
            "function that made it"
        )
    splits = source if isinstance(source, (list, tuple)) else [source]
    if splits and all(hasattr(one, "iter_batches") for one in splits):
        return _Streamed(None, wanted, splits)
    if not (callable(source) or hasattr(source, "__arrow_c_stream__")):
        raise TypeError(
            f"from_arrow needs Arrow data, got {kind!r}: it has no __arrow_c_stream__ "
            "and is not a function that returns such an object"
        )
    return _Streamed(source, wanted)


def _is_dataset(source: Any) -> bool:
    return any(
        one.__module__ == "pyarrow._dataset" and one.__name__ == "Dataset"
        for one in type(source).__mro__
    )


class _Shards(ShardedStream[Row]):
    """A table or a dataset."""

    def describe(self) -> State:
        """Return the source and how it is read."""
        return {**super().describe(), "kind": "from_arrow"}

    def __repr__(self) -> str:
        return f"from_arrow({type(self.made_by).__name__})"


class _Streamed(Stream[Row]):
    """A stream that each reader restarts in every epoch, or one of Ray Data.

    Args:
        source: The data, or the function that returns it.
        wanted: The columns and rows to read.
        splits: Iterators of Ray Data instead, one for each reader.
    """

    def __init__(
        self, source: Any, wanted: "Wanted", splits: Iterable[Any] = ()
    ) -> None:
        super().__init__()
        self._source = source
        self._wanted = wanted
        self._splits = [*splits]

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor over this reader's rows.

        Raises:
            ValueError: If there are not as many iterators of Ray Data as readers.
            StateMismatchError: If the state is within an epoch of them.
        """
        from aioloader.datasets._arrow.memory import (  # noqa: PLC0415  (needs pyarrow)
            StreamCursor,
        )

        share, source = reading.share, self._source
        if self._splits:
            self._check_splits(share.readers, state)
            source = self._splits[share.reader]
            share = replace(share, reader=0, readers=1)

        def make() -> Any:
            if self._splits:
                return source.iter_batches(batch_format="pyarrow", batch_size=None)
            return source if hasattr(source, "__arrow_c_stream__") else source()

        return StreamCursor(make, self._wanted, share, state, repr(self))

    def _check_splits(self, readers: int, state: State) -> None:
        count = len(self._splits)
        if count != readers:
            raise ValueError(
                f"{self!r} has {count} iterators of Ray Data for {readers} readers "
                "(ranks x workers): each reads its own; pass all that "
                f"dataset.streaming_split({readers}) returns"
            )
        if "read" in state:  # also of a partly read block
            raise StateMismatchError(
                f"{self!r} cannot resume after row {state['read']:,}, or some rows "
                "later: Ray Data returns rows in another order each time; load a state "
                "of the end of an epoch, or write its rows to Parquet files and stream "
                "those",
                expected=0,
                found=state["read"],
            )

    def describe(self) -> State:
        """Return the source and how it is read."""
        function = "" if self._splits else name_of(self._source)
        splits = {"splits": len(self._splits)} if self._splits else {}
        described = self._wanted.describe()
        return {"kind": "from_arrow", **described, "function": function, **splits}

    def __repr__(self) -> str:
        if self._splits:
            return f"from_arrow(<{len(self._splits)} iterators of Ray Data>)"
        return f"from_arrow({name_of(self._source)})"
