"""Base classes for Parquet, Arrow and CSV files: listing, metadata and decoding.

Shards are in the order of the files, whose metadata is read concurrently. A thread
decodes record batches in steps: it decodes the next step while the current step is
delivered and bytes for later steps are in flight. Batches are validated: a row with
invalid text becomes a ``FailedSample``; other damage ends the shard with an error.
"""

import asyncio
import contextlib
import copy
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from aioloader._base.blocks import Block, FailedSample
from aioloader._base.cancellation import each, finish_despite_cancel, in_thread
from aioloader.datasets._arrow.projection import RECENT_SCHEMAS, Partitions, Projection
from aioloader.datasets._arrow.ranges import ByteSpan, FetchedRanges, RangeFile, plan
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._stores.addresses import sealed, shown_addresses
from aioloader.datasets._stores.failures import ExpectedVersion, Version, file_failure
from aioloader.datasets._stores.storage import SizedListing, Storage
from aioloader.datasets._streams.shards import (
    BlockReader,
    PositionedBlocks,
    ShardFormat,
    ShardPosition,
    Summary,
    summary_of,
)
from aioloader.errors import DatasetError

# Decoded bytes of a step; a larger step would not fit into the processor's caches.
_MIN_STEP, _MAX_STEP = 1 << 16, 2 << 20
# Maximum rows of a decoded batch, enough to make its fixed cost negligible.
BATCH_ROWS = 1 << 14
# Bytes per request for data that is read in order.
_MIN_REQUEST, MAX_REQUEST = 1 << 18, 8 << 20
# Part of pyarrow's message for invalid text in an otherwise valid column.
_BAD_TEXT = "Invalid UTF8"
# An address, and values that select a part of the file; they depend on the format.
FilePart: TypeAlias = tuple[Any, ...]

# Bytes of the first request for a footer; most footers are shorter.
_FOOTER_GUESS = 1 << 16
# Limit for cached metadata, in bytes: a file's shards are mostly read in sequence.
_CACHE_BYTES = 64 << 20


class RestartPoint(NamedTuple):
    """A byte offset where decoding can restart, and the numbers of rows before it."""

    byte: int
    row: int = 0  # rows delivered, after filters
    read: int = 0  # rows decoded, before filters


# A decoded batch, a row that cannot be decoded, or where the next batch starts.
Item: TypeAlias = pa.RecordBatch | FailedSample | RestartPoint


class Opened(NamedTuple):
    """An opened shard, with all that ``TableReader`` needs to decode it."""

    items: Callable[[], Iterator[Item]]  # decodes; runs in a thread
    # Converts a validated batch to the rows and columns to deliver.
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch]
    rows: int | None = None  # expected number of rows, before filters
    ranges: FetchedRanges | None = None  # of a remote file
    version: Version | None = None
    # Raises if a local file no longer has that version.
    check: Callable[[], None] = lambda: None
    may_wait: bool = False  # decoding may wait for data: use a separate thread
    is_users: bool = False  # the source is the user's: raise its errors unchanged


def edges(size: int, count: int) -> list[int]:
    """Return the ``count + 1`` edges of nearly equal parts of ``range(size)``."""
    return [size * part // count for part in range(count + 1)]


def between(
    batches: Generator[pa.RecordBatch, None, None], first: int, stop: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows ``first`` to ``stop`` (exclusive) of a generator, then close it."""
    row = 0
    with contextlib.closing(batches):
        for batch in batches:
            begin, end = max(first - row, 0), min(stop - row, batch.num_rows)
            row += batch.num_rows
            if begin < end:
                yield batch.slice(begin, end - begin)
            if row >= stop:
                return


class TableReader(BlockReader):
    """Reads the rows of a shard in order, one step ahead.

    ``open_shard``: opens the shard, given how many bytes it may request ahead.
    ``unit``: the shard's name within the file, for errors; empty for a whole file.
    ``budget``: bytes for two decoded steps and for data that is not yet decoded.
    """

    is_ahead = True
    mark: RestartPoint

    def __init__(
        self,
        open_shard: Callable[[int], Coroutine[Any, Any, Opened]],
        location: str,
        unit: str,
        position: ShardPosition,
        budget: int,
    ) -> None:
        super().__init__(location, RestartPoint(*position.get("from", (0,))))
        self._open_shard = open_shard
        self._label = f"{unit} of {location!r}" if unit else repr(location)
        self._first_row: int = position.get("row", 0)
        self._step_bytes = max(_MIN_STEP, min(_MAX_STEP, budget // 4))
        self._window = max(0, budget - 2 * self._step_bytes)
        self._is_small = False
        self._opened: Opened | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        self.start()

    async def make(self) -> PositionedBlocks:
        return (await _advance([self], self._step_bytes))[self]

    def join(self, step: "asyncio.Task[dict[TableReader, PositionedBlocks]]") -> None:
        """Take the first blocks from ``step``, a task that decodes several shards."""

        async def own_blocks() -> PositionedBlocks:
            return (await finish_despite_cancel(step)).get(self, [])

        self._is_small = True
        self.start(own_blocks())

    async def open(self) -> None:
        if self._opened is None:
            self._opened = opened = await self._open_shard(self._window)
            if opened.may_wait:
                self.own_thread()
            if opened.ranges is not None:
                opened.ranges.begin()

    async def interrupt(self) -> None:
        if self._opened is not None and self._opened.ranges is not None:
            await self._opened.ranges.aclose()

    def version(self) -> tuple[str, Version] | None:
        version = None if self._opened is None else self._opened.version
        return None if version is None else (self.location, version)

    def position(self) -> ShardPosition:
        marked = {"from": list(self.mark)} if self.mark.byte else {}
        return {"row": self._first_row + self.passed, **marked}

    def bytes_ahead(self) -> int | None:
        """Return the reader's maximum memory in bytes; None if the shard is small."""
        return None if self._is_small else self._window + 2 * self._step_bytes

    def is_draining(self) -> bool:
        ranges = None if self._opened is None else self._opened.ranges
        return self.is_over or (ranges is not None and ranges.is_draining())

    # -- in a thread ----------------------------------------------------------------

    def step(self, nbytes: int) -> tuple[PositionedBlocks, int]:
        """Decode about ``nbytes``; return blocks, and what is left of ``nbytes``."""
        opened, blocks = self._opened, PositionedBlocks()
        failure: Exception | None = None
        assert opened is not None
        try:
            self.generator = self.generator or self._decoded(opened)
            while nbytes > 0 and not self.is_over:
                mark, block, size = next(self.generator)
                blocks.append((mark, block))
                nbytes -= size
        except StopIteration:
            self.is_over = True
        except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
            failure = error

        def checked() -> Iterator[tuple[RestartPoint, Block]]:
            opened.check()  # if the file changed, blocks and failure may be wrong
            yield from blocks
            if failure is not None:
                raise failure

        return self.gather(checked()), nbytes

    def _decoded(
        self, opened: Opened
    ) -> Generator[tuple[RestartPoint, Block, int], None, None]:
        """Yield (preceding restart point, block, bytes of the block)."""
        mark, start = self.mark, self._first_row
        _, row, read = mark
        try:
            for item in opened.items():
                if isinstance(item, RestartPoint):
                    mark = RestartPoint(item.byte, row, read)
                    continue
                block, size, rows = self._block_of(item, read, opened)
                drop = min(len(block), max(0, start - row))
                read, row = read + rows, row + len(block)
                if drop < len(block):
                    yield mark, block[drop:], size
            self._check_end(opened.rows, read, row, start)
        except Exception as error:
            failure = error if opened.is_users else self._failed(error, read, opened)
            if failure is error:
                raise
            raise failure from error

    def _block_of(
        self, item: pa.RecordBatch | FailedSample, read: int, opened: Opened
    ) -> tuple[Block, int, int]:
        """Return an item's block, size in bytes (0 if unknown), and number of rows."""
        if isinstance(item, FailedSample):
            return [item], 0, 1
        try:
            item.validate(full=True)
        except ValueError as error:
            if _BAD_TEXT not in str(error):
                raise
            # The size is not computed: that may crash pyarrow if the batch is damaged.
            return self._by_row(item, read, opened), 0, item.num_rows
        rows = Rows(opened.rows_of(item))
        if not read and len(rows) and not rows.is_numeric:
            # Convert one row, so that this thread loads time zones. A failure recurs
            # where it can be reported.
            with contextlib.suppress(Exception):
                rows[0]
        try:
            size = item.nbytes
        except TypeError:  # view types, as from Polars, before Arrow 23
            size = item.get_total_buffer_size()
        return rows, int(size), item.num_rows

    def _by_row(self, batch: pa.RecordBatch, read: int, opened: Opened) -> list[Any]:
        """Return a batch's rows; a row with invalid text becomes a ``FailedSample``."""
        samples: list[Any] = []
        for n in range(batch.num_rows):
            row = batch.slice(n, 1)
            try:
                row.validate(full=True)
            except ValueError as error:
                samples.append(FailedSample(self._error(f"row {read + n:,}", error)))
            else:
                samples += Rows(opened.rows_of(row))
        return samples

    def _check_end(self, expected: int | None, read: int, row: int, start: int) -> None:
        if expected is not None and read != expected:
            text = f"{self._label} has {read:,} of {expected:,} rows: write it again"
            raise DatasetError(text, location=self.location)
        if start > row:
            raise DatasetError(
                f"{self._label} has {row:,} rows and is to be read from row {start:,} "
                "on; resume with the original shards, or start again",
                location=self.location,
            )

    def _failed(self, error: Exception, read: int, opened: Opened) -> DatasetError:
        cause = (opened.ranges.failure if opened.ranges else None) or error
        if isinstance(cause, DatasetError):
            return cause
        if isinstance(cause, OSError) and cause.errno is not None:
            return file_failure(self.location, cause)
        return self._error(f"from row {read:,} on", cause)

    def _error(self, where: str, cause: Exception) -> DatasetError:
        text = str(cause).strip() or type(cause).__name__
        return DatasetError(
            f"{self._label} cannot be read, {where}: {text}; write or copy it "
            "again, and not while it is read",
            location=self.location,
        )


def begin_together(readers: Sequence[TableReader], nbytes: int) -> None:
    """Start decoding up to ``nbytes`` of small local shards, in one thread call."""
    step = asyncio.create_task(_advance(readers, nbytes))
    for reader in readers:
        reader.join(step)


async def _advance(
    readers: Sequence[TableReader], nbytes: int
) -> dict[TableReader, PositionedBlocks]:
    """Open the readers' shards, and decode a step of each, ``nbytes`` in total."""
    opened: list[TableReader] = []
    for reader in readers:
        try:
            await reader.open()
        except Exception:
            if len(readers) == 1:
                raise
            break  # opening fails again, and raises, when that reader is pulled
        opened.append(reader)
    return await in_thread(_step_all, opened, nbytes, executor=readers[0].thread)


def _step_all(
    readers: Sequence[TableReader], nbytes: int
) -> dict[TableReader, PositionedBlocks]:
    """Decode a step of each reader; after ``nbytes`` in total, steps are empty."""
    steps: dict[TableReader, PositionedBlocks] = {}
    for reader in readers:
        steps[reader], nbytes = reader.step(nbytes)
    return steps


class FileMetadata(NamedTuple):
    """A file's schema, version and shards, which ``TableFormat`` caches."""

    address: str
    location: str  # the address without secrets
    version: Version
    schema: pa.Schema
    # For each shard: the values after the address, and the length in rows or bytes.
    parts: Sequence[tuple[FilePart, int]]
    details: Any  # specific to the format
    nbytes: int  # approximate memory of this object
    skipped: Collection[int] = ()  # indices of parts without a matching row


class DecodePlan(NamedTuple):
    """A plan to decode a shard from its open file, in a thread."""

    items: Callable[[pa.NativeFile], Iterator[Item]]
    spans: Sequence[ByteSpan]  # requested if the file is remote
    max_request: int  # bytes per request
    in_order: bool = True  # whether reads only move forward
    rows: int | None = None  # expected number, before filters
    tail: bytes = b""  # the end of the file, if known


class TableFormat(ShardFormat[FilePart]):
    """Base class of table formats; subclasses read metadata and plan decoding."""

    def __init__(self, addresses: Any, storage: Storage, **projection: Any) -> None:
        self._addresses = addresses
        self.storage: Storage = storage
        self._projection = Projection(**projection)
        self._partitions = Partitions()
        self._forget()

    def _forget(self) -> None:
        self._cache: OrderedDict[str, FileMetadata] = OrderedDict()
        # All files of the latest listing, with versions even if metadata was evicted.
        self._listed: list[str] = []
        self._versions: dict[str, Version] = {}
        self._schemas: deque[pa.Schema] = deque(maxlen=RECENT_SCHEMAS)

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[FilePart]:
        stack.push_async_callback(self.storage.aclose)
        addresses = await self.storage.expand(self._addresses)
        if not await self._are_unchanged(addresses):
            self._forget()  # all files, because one may change the others' columns
            self._listed = [*addresses]
        names = map(self.storage.name, addresses)
        given = self._projection.given or ()
        self._partitions = await in_thread(Partitions, names, given)
        # The first file decides which columns are read; all files decide their types.
        first = await self._metadata_of(addresses[0])
        projection, rest = await in_thread(self._start_table, first, addresses[1:])
        metas = [first, *await each(self._metadata_of, rest)]
        shards = await in_thread(self._unify, metas, projection)
        self._projection = projection  # at the end: other iterations use the old one
        return shards

    async def _are_unchanged(self, addresses: Sequence[str]) -> bool:
        """Return whether the previous listing had the same files and versions."""
        if [*addresses] != self._listed:
            return False
        versions = await each(self.storage.version, [*self._versions])
        return all(
            now.is_marked and now.is_of(before)
            for now, before in zip(versions, self._versions.values(), strict=True)
        )

    def _start_table(
        self, first: FileMetadata, rest: Sequence[str]
    ) -> tuple[Projection, Sequence[str]]:
        """Return a started projection, and the files in ``rest`` that may match."""
        schema = self._columns(first.schema, first.address)
        projection = copy.copy(self._projection)
        projection.start(schema, first.location)
        if projection.filters is None or not self._partitions:
            return projection, rest
        guarantees = [self._guarantee(address, first.schema) for address in rest]
        numbers = projection.filters.files(schema, guarantees)
        return projection, [rest[number] for number in numbers]

    def _unify(
        self, metas: Sequence[FileMetadata], projection: Projection
    ) -> list[FilePart]:
        """Unify the files' columns, and return the shards to read. Runs in a thread."""
        for meta in metas:
            projection.add(self._columns(meta.schema, meta.address), meta.location)
        projection.settle()
        filters, shards = projection.filters, SizedListing()
        filtered = [] if filters is None else filters.names(projection.schema)
        shards.sizes = sizes = []
        for meta in metas:
            schema = self._columns(meta.schema, meta.address)
            # Statistics are useless for values that are cast before the comparison.
            is_plain = not meta.skipped or projection.has(schema, filtered)
            for number, (part, size) in enumerate(meta.parts):
                if not (is_plain and number in meta.skipped):
                    shards.append((meta.address, *part))
                    sizes.append(size)
        if not shards and (spare := next((m for m in metas if m.parts), None)):
            # An iteration needs a shard, so keep one although no row matches.
            (part, size), *_ = spare.parts
            shards.append((spare.address, *part))
            sizes.append(size)
        return shards

    async def sizes(
        self,
        shards: Sequence[FilePart],
        *,
        must: bool,  # noqa: ARG002
    ) -> list[int] | None:
        return shards.sizes if isinstance(shards, SizedListing) else None

    def summary(self, shards: Sequence[FilePart]) -> Summary:
        return summary_of(address for address, *_ in shards)

    def describe(self) -> dict[str, Any]:
        return self._projection.describe()

    async def cut(self, shards: Sequence[FilePart], count: int) -> list[FilePart]:
        pieces: list[FilePart] = []
        if not shards:  # the files have no row groups
            return pieces
        counts = (b - a for a, b in pairwise(edges(count, len(shards))))
        for shard, parts in zip(shards, counts, strict=True):
            pieces += self._cut(shard, parts) if parts > 1 else [shard]
        return pieces

    def _cut(self, shard: FilePart, count: int) -> list[FilePart]:
        """Cut a shard into ``count`` parts; a reader decodes from the shard's start."""
        return [(*shard, number, count) for number in range(count)]

    async def _metadata_of(self, address: str) -> FileMetadata:
        meta = self._cache.get(address)
        if meta is None:
            meta = await self._read_metadata(address, self.storage.label(address))
            first = self._versions.setdefault(address, meta.version)
            ExpectedVersion(first).check(meta.location, meta.version)
            self._cache[address] = meta
            sizes = [cached.nbytes for cached in self._cache.values()]
            while sum(sizes) > _CACHE_BYTES and len(sizes) > 1:
                self._cache.popitem(last=False)
                del sizes[0]
        return meta

    @abstractmethod
    async def _read_metadata(self, address: str, location: str) -> FileMetadata:
        """Read a file's metadata; the caller caches it."""

    async def _tail(
        self, address: str, footer_length: Callable[[bytes, int, str], int]
    ) -> tuple[bytes, Version]:
        """Return a file's last ``footer_length(...)`` bytes, and its version."""
        tail, version = await self.storage.part(address, -_FOOTER_GUESS)
        length = footer_length(tail, version.size, self.storage.label(address))
        if length > len(tail):
            tail, _ = await self.storage.part(address, -length, 0, version)
        return tail[len(tail) - length :], version

    def _shared(self, schema: pa.Schema) -> pa.Schema:
        """Return a recent equal schema, or else ``schema``, so that files share it."""
        shared = next((old for old in self._schemas if old.equals(schema)), schema)
        if shared is schema:
            self._schemas.append(schema)
        return shared

    def _columns(self, schema: pa.Schema, address: str) -> pa.Schema:
        if not self._partitions:
            return schema
        return self._partitions.append_to(schema, self.storage.name(address))

    def _guarantee(self, address: str, schema: pa.Schema) -> Any:
        """Return the condition that a file's name implies for its rows, or None."""
        if not self._partitions:
            return None
        return self._partitions.guarantee(self.storage.name(address), schema)

    def open(
        self, shard: FilePart, position: ShardPosition, budget: int
    ) -> TableReader:
        address, *part = shard
        open_shard = partial(self._open, address, part, position)
        label = self.storage.label(address)
        return TableReader(open_shard, label, self._unit(part), position, budget)

    @abstractmethod
    def _unit(self, part: Sequence[Any]) -> str:
        """Return the name of a file's part for errors; empty for a whole file."""

    @abstractmethod
    async def _decode_plan(
        self,
        meta: FileMetadata,
        projection: Projection,
        part: Sequence[Any],
        position: ShardPosition,
        window: int,
    ) -> DecodePlan:
        """Return a plan to decode a file's part, requesting ``window`` bytes ahead."""

    async def opened(
        self, address: str
    ) -> tuple[FileMetadata, Projection, Callable[[pa.RecordBatch], pa.RecordBatch]]:
        """Return a file's metadata, the projection, and a function to apply it."""
        meta = await self._metadata_of(address)
        columns = self._columns(meta.schema, address)
        # The next listing replaces this projection.
        projection = self._projection = self._projection.checked(columns, meta.location)
        values = Partitions.of(self.storage.name(address)) if self._partitions else None
        rows_of = partial(projection.rows_of, location=meta.location, partition=values)
        return meta, projection, rows_of

    async def _open(
        self, address: str, part: Sequence[Any], position: ShardPosition, window: int
    ) -> Opened:
        meta, projection, rows_of = await self.opened(address)
        ExpectedVersion.of(position).check(meta.location, meta.version)
        decoding = await self._decode_plan(meta, projection, part, position, window)
        ranges = None
        path = self.storage.path(address)
        if path is None:
            ranges = FetchedRanges(
                partial(self.storage.read, address, version=meta.version),
                meta.version.size,
                plan(decoding.spans, decoding.max_request, in_order=decoding.in_order),
                budget=window,
                location=meta.location,
                in_order=decoding.in_order,
            )
            ranges.tail = decoding.tail

        def items() -> Iterator[Item]:
            if ranges is None:
                file = pa.OSFile(path)
            else:
                raw = RangeFile(meta.version.size, ranges.read)
                file = pa.PythonFile(raw, mode="r")
            with contextlib.closing(file):
                yield from decoding.items(file)

        return Opened(
            items=items,
            rows_of=rows_of,
            rows=decoding.rows,
            ranges=ranges,
            version=meta.version,
            check=partial(self.storage.check, address, meta.version),
            may_wait=ranges is not None,
        )

    def __getstate__(self) -> dict[str, Any]:
        schemas: deque[pa.Schema] = deque(maxlen=RECENT_SCHEMAS)
        caches: dict[str, Any] = {"_cache": OrderedDict(), "_schemas": schemas}
        return {**self.__dict__, **caches, "_listed": [], "_versions": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(sealed(self._addresses))})"


def request_bytes(window: int) -> int:
    """Return the size of requests, in bytes, for a shard that is read in order."""
    return max(_MIN_REQUEST, min(window // 4, MAX_REQUEST))


def damaged_footer(place: str, location: str, error: Exception) -> DatasetError:
    text = f"{place} has a footer that cannot be read: {error}; write or copy it again"
    return DatasetError(text, location=location)


def check_footer(length: int, room: int, size: int, location: str) -> None:
    if not 0 < length <= room:
        raise DatasetError(
            f"{location!r} is damaged: its footer has {length:,} bytes, the whole file "
            f"has {size:,}; write or copy it again",
            location=location,
        )
