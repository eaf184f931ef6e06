"""Arrow data from Python: tables, ``pyarrow.dataset``, and streams such as Ray Data.

Rows come in the source's order. A table is cut into ranges of rows, a dataset into
fragments (Parquet: row groups). With fewer fragments than readers, fragments are cut
further, and a reader also decodes the rows before its part. Positions count rows:
resuming reads the range, fragment or whole stream again from its beginning.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from aioloader._base.blocks import Block
from aioloader._base.cancellation import in_thread
from aioloader._order.ranks import ReaderShare
from aioloader.datasets._arrow.files import (
    BATCH_ROWS,
    Opened,
    TableReader,
    between,
    edges,
)
from aioloader.datasets._arrow.projection import Projection
from aioloader.datasets._streams.cursors import Cursor, Reading, State, qualname
from aioloader.datasets._streams.shards import (
    ShardFormat,
    ShardPosition,
    ShardReader,
    Summary,
    summary_of,
)
from aioloader.datasets.streams import Stream
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from pyarrow import dataset as ds  # slow to import

# Rows per shard of a table.
_SHARD_ROWS = 1 << 16
# Budget of a stream's reader for decoded batches, in bytes.
_STREAM_BUDGET = 16 << 20
RowRange: TypeAlias = tuple[int, int]
# A fragment, the number of its part, and the number of parts.
FragmentPart: TypeAlias = "tuple[ds.Fragment, int, int]"
Row: TypeAlias = dict[str, Any]


class MemoryFormat(ShardFormat[RowRange]):
    """A format for a table in memory; a shard is a range of rows."""

    def __init__(self, table: pa.Table, projection: Projection) -> None:
        self._table = table
        self._projection = projection.checked(table.schema, "the table")

    async def shards(
        self, _stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[RowRange]:
        rows = self._table.num_rows
        starts = range(0, max(1, rows), _SHARD_ROWS)
        return [(start, min(start + _SHARD_ROWS, rows)) for start in starts]

    async def cut(self, _shards: Sequence[RowRange], count: int) -> list[RowRange]:
        return [*pairwise(edges(self._table.num_rows, count))]

    async def sizes(self, shards: Sequence[RowRange], *, must: bool) -> Sequence[int]:  # noqa: ARG002  (all are known)
        return [stop - start for start, stop in shards]

    def summary(self, shards: Sequence[RowRange]) -> Summary:
        return {"count": len(shards), "rows": self._table.num_rows}

    def describe(self) -> dict[str, Any]:
        return self._projection.describe()

    def open(
        self, shard: RowRange, position: ShardPosition, budget: int
    ) -> ShardReader:
        start, stop = shard
        part = self._table.slice(start, stop - start)

        async def open_shard(_window: int) -> Opened:
            select = self._projection.select
            batches = map(select, part.to_batches(max_chunksize=BATCH_ROWS))
            rows_of = partial(self._projection.rows_of, location="the table")
            return Opened(lambda: batches, rows_of, part.num_rows)

        unit = f"rows {start:,} to {stop:,}"
        return TableReader(open_shard, "the table", unit, position, budget)


class FragmentFormat(ShardFormat):
    """A format for pyarrow and Lance datasets; a shard is a fragment or a part."""

    def __init__(self, dataset: "ds.Dataset", projection: Projection) -> None:
        self._dataset = dataset
        self._projection = projection.checked(dataset.schema, "the dataset")
        filters = projection.filters
        # Skips data by statistics. None if NaNs, which statistics omit, may match.
        self._condition = None
        if filters is not None and not filters.nans(dataset.schema):
            self._condition = filters.expression
        self._is_native = type(dataset).__module__.startswith("pyarrow.")

    async def shards(
        self, _stack: AsyncExitStack, _known: Summary | None = None
    ) -> "list[FragmentPart]":
        return [(fragment, 0, 1) for fragment in await in_thread(self._fragments)]

    async def cut(
        self, shards: "Sequence[FragmentPart]", count: int
    ) -> "list[FragmentPart]":
        counts = (b - a for a, b in pairwise(edges(count, len(shards))))
        return [
            (fragment, number, parts)
            for (fragment, *_), parts in zip(shards, counts, strict=True)
            for number in range(parts)
        ]

    def _fragments(self) -> "list[ds.Fragment]":
        if not self._is_native:
            return list(self._dataset.get_fragments())
        fragments: list[ds.Fragment] = []
        for fragment in self._dataset.get_fragments(self._condition):
            split = getattr(fragment, "split_by_row_group", None)
            args = self._condition, self._dataset.schema
            fragments += [fragment] if split is None else split(*args)
        return fragments or list(self._dataset.get_fragments())[:1]

    def summary(self, shards: "Sequence[FragmentPart]") -> Summary:
        return summary_of(_name(fragment) for fragment, *_ in shards)

    def describe(self) -> dict[str, Any]:
        return self._projection.describe()

    def open(
        self, shard: "FragmentPart", position: ShardPosition, budget: int
    ) -> ShardReader:
        location = _name(shard[0])

        async def open_shard(_window: int) -> Opened:
            rows_of = partial(self._projection.rows_of, location=location)
            return Opened(partial(self._part, *shard), rows_of, may_wait=True)

        return TableReader(open_shard, location, "", position, budget)

    def _part(
        self, fragment: "ds.Fragment", number: int, parts: int
    ) -> Iterator[pa.RecordBatch]:
        """Return the batches of one part of a fragment that is cut into ``parts``."""
        if parts == 1:
            return self._batches(fragment)
        if self._condition is None and not self._is_native:
            rows = fragment.count_rows()
        else:
            # In pyarrow 26, count_rows also counts rows of the file's other row groups.
            rows = sum(batch.num_rows for batch in self._batches(fragment, []))
        first, stop = edges(rows, parts)[number:][:2]
        return between(self._batches(fragment), first, stop)

    def _batches(
        self, fragment: "ds.Fragment", columns: list[str] | None = None
    ) -> Generator[pa.RecordBatch, None, None]:
        names = list(self._projection.names) if columns is None else columns
        options: dict[str, Any] = {"columns": names, "filter": self._condition}
        if self._is_native:
            # The dataset's schema includes the partition columns.
            options |= {"schema": self._dataset.schema, "use_threads": False}
        scanner = fragment.scanner(batch_size=BATCH_ROWS, **options)
        yield from scanner.to_reader()


def _name(fragment: "ds.Fragment") -> str:
    path = getattr(fragment, "path", "") or "a fragment in memory"
    if (number := getattr(fragment, "fragment_id", None)) is not None:  # Lance's
        return f"fragment {number}"
    groups = getattr(fragment, "row_groups", None) or ()
    return "/".join([path, *(f"row group {group.id}" for group in groups)])


class ArrowStream(Stream[Row]):
    """A stream of Arrow data; in each epoch, all readers read from the beginning.

    ``source``: the data, or a function that returns the data. ``splits``: iterators of
    Ray Data to read instead of ``source``, one for each reader.
    """

    def __init__(
        self, source: Any, projection: Projection, splits: Iterable[Any] = ()
    ) -> None:
        super().__init__()
        self._source = source
        self._projection = projection
        self._splits = [*splits]

    async def open(self, reading: Reading, state: State) -> Cursor:
        share, make = reading.share, self._source
        if self._splits:
            self._check_splits(share.readers, state)
            split = self._splits[share.reader]
            make = partial(split.iter_batches, batch_format="pyarrow", batch_size=None)
            share = replace(share, reader=0, readers=1)
        elif hasattr(make, "__arrow_c_stream__"):
            make = lambda: self._source  # noqa: E731
        return StreamCursor(make, self._projection, share, state, repr(self))

    def _check_splits(self, readers: int, state: State) -> None:
        count = len(self._splits)
        if count != readers:
            raise ValueError(
                f"{self!r} has {count} iterators of Ray Data for {readers} readers "
                "(ranks x workers): each reads its own; pass all that "
                f"dataset.streaming_split({readers}) returns"
            )
        if "read" in state:  # saved after some rows of an epoch
            raise StateMismatchError(
                f"{self!r} cannot resume after row {state['read']:,}, or some rows "
                "later: Ray Data returns rows in another order each time; load a state "
                "of the end of an epoch, or write its rows to Parquet files and stream "
                "those",
                expected=0,
                found=state["read"],
            )

    def describe(self) -> State:
        function = "" if self._splits else qualname(self._source)
        splits = {"splits": len(self._splits)} if self._splits else {}
        described = self._projection.describe()
        return {"kind": "from_arrow", **described, "function": function, **splits}

    def __repr__(self) -> str:
        if self._splits:
            return f"from_arrow(<{len(self._splits)} iterators of Ray Data>)"
        return f"from_arrow({qualname(self._source)})"


class StreamCursor(Cursor):
    """Reads the stream that ``make`` returns; each of N readers keeps every Nth row."""

    def __init__(
        self,
        make: Callable[[], Any],
        projection: Projection,
        share: ReaderShare,
        state: State,
        label: str,
    ) -> None:
        super().__init__(state)
        self._make_source = make
        self._projection = projection
        self._reader, self._readers = share.reader, share.readers
        self._row: int = state.get("read", 0)
        self._label = label
        position = {"row": self._row}
        self._rows = TableReader(self._open, label, "", position, _STREAM_BUDGET)

    async def _close(self) -> None:
        await self._rows.aclose()

    async def _make(self, limit: int) -> Block:
        while True:
            block = await self._rows.pull(limit * self._readers)
            if not len(block):
                return block
            first = (self._reader - self._row) % self._readers
            self._row += len(block)
            share: Block = block[first :: self._readers]
            if len(share):
                return share

    def _make_state(self) -> State:
        return {"read": self._row}

    async def _open(self, _window: int) -> Opened:
        rows_of = lambda batch: self._projection.rows_of(batch, self._label)  # noqa: E731
        return Opened(self._batches, rows_of, may_wait=True, is_users=True)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for batch in _batches_of(self._make_source()):
            self._projection = self._projection.checked(batch.schema, self._label)
            yield self._projection.select(batch)


def _batches_of(source: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(source, pa.RecordBatch):
        yield source
    elif hasattr(source, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(source)
    elif isinstance(source, Iterable):
        for part in source:
            yield from _batches_of(part)
    else:
        raise TypeError(
            f"{type(source).__name__!r} is not Arrow data: it has no "
            "__arrow_c_stream__ and is not an iterable of such objects; pass tables, "
            "batches or readers"
        )
