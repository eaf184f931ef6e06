"""The common part of Parquet, Arrow and CSV files: addresses, columns and shards.

Shards are in the order of the files. The metadata of each file, mostly at its end, is
read once, of many files at a time. Record batches are decoded in a thread: one step, as
many as ``budget`` allows, is passed on while the next is decoded, and bytes for later
steps are in flight. Batches are checked before they are passed on: a single damaged row
is a ``FailedSample``, and any other damage ends the shard with an error.
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
from aioloader.datasets._arrow.projection import Partitions, Projection
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

# Larger steps do not fit into the processor's caches.
_LEAST_STEP, _MOST_STEP = 1 << 16, 2 << 20
# pyarrow's message for invalid text in an otherwise valid column.
_BAD_TEXT = "Invalid UTF8"
# An address, and what distinguishes a part of the file.
FilePart: TypeAlias = tuple[Any, ...]

# Most footers are shorter, so that one request gets them.
_TAIL = 1 << 16
# Ends kept, in bytes: shards of one file are mostly read one after the other.
_KEPT = 64 << 20
# Recent schemas to compare with, so that equal ones share an object.
_SCHEMAS = 8


class RestartPoint(NamedTuple):
    """A place where reading can start again: a byte, and the rows before it."""

    byte: int
    row: int = 0  # of those that were passed on
    read: int = 0  # of all, which filters make differ


# A batch that was read, one row that cannot be, or where the next batch starts.
Item: TypeAlias = pa.RecordBatch | FailedSample | RestartPoint


class Opened(NamedTuple):
    items: Callable[[], Iterator[Item]]  # starts decoding, in a thread
    # Makes the rows to deliver from a checked batch.
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch]
    rows: int | None = None  # that are expected
    ranges: FetchedRanges | None = None  # the requests for bytes
    version: Version | None = None
    # Checks that a local file is still of that version: whatever was decoded, and
    # whatever failed, may be of another one.
    check: Callable[[], None] = lambda: None
    may_wait: bool = False  # for the network, so that it needs a separate thread
    is_users: bool = False  # whether the user made the source, and its errors


def edges(size: int, count: int) -> list[int]:
    """Return where ``count`` nearly equal parts of ``size`` start, and the end."""
    return [size * at // count for at in range(count + 1)]


def between(
    batches: Generator[pa.RecordBatch, None, None], first: int, stop: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows from ``first`` to before ``stop``; later ones are not decoded."""
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
    """A shard's rows, in order; in errors it is a ``unit`` of a file, if not all of it.

    ``opening`` opens it, given the bytes that may be requested ahead. The budget is for
    two steps of decoded batches, and the rest for bytes not yet decoded.
    """

    is_ahead = True
    mark: RestartPoint

    def __init__(
        self,
        opening: Callable[[int], Coroutine[Any, Any, Opened]],
        location: str,
        unit: str,
        position: ShardPosition,
        budget: int,
    ) -> None:
        super().__init__(location, RestartPoint(*position.get("from", (0,))))
        self._opening = opening
        self._place = f"{unit} of {location!r}" if unit else repr(location)
        self._first: int = position.get("row", 0)
        self._step_bytes = max(_LEAST_STEP, min(_MOST_STEP, budget // 4))
        self._window = max(0, budget - 2 * self._step_bytes)
        self._is_small = False
        self._opened: Opened | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        self.start()

    async def make(self) -> PositionedBlocks:
        return (await _advance([self], self._step_bytes))[self]

    def join(self, step: "asyncio.Task[dict[TableReader, PositionedBlocks]]") -> None:
        """Get the first blocks from ``step``, which reads several small shards."""

        async def mine() -> PositionedBlocks:
            made: dict[TableReader, PositionedBlocks] = await finish_despite_cancel(
                step
            )
            return made.get(self, [])

        self._is_small = True
        self.start(mine())

    async def open(self) -> None:
        if self._opened is None:
            self._opened = opened = await self._opening(self._window)
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
        return {"row": self._first + self.passed, **marked}

    def bytes_ahead(self) -> int | None:
        """Return all that it may hold; None for a small shard, which needs far less."""
        return None if self._is_small else self._window + 2 * self._step_bytes

    def is_draining(self) -> bool:
        ranges = None if self._opened is None else self._opened.ranges
        return self.is_over or (ranges is not None and ranges.is_draining())

    # -- in a thread ----------------------------------------------------------------

    def step(self, nbytes: int) -> tuple[PositionedBlocks, int]:
        """Decode about ``nbytes``; return blocks, and what is left of ``nbytes``."""
        opened, found = self._opened, PositionedBlocks()
        failure: Exception | None = None
        assert opened is not None
        try:
            self.generator = self.generator or self._decoded(opened)
            while nbytes > 0 and not self.is_over:
                mark, block, size = next(self.generator)
                found.append((mark, block))
                nbytes -= size
        except StopIteration:
            self.is_over = True
        except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
            failure = error

        def checked() -> Iterator[tuple[RestartPoint, Block]]:
            opened.check()  # or else all of them may be of another file
            yield from found
            if failure is not None:
                raise failure

        return self.gather(checked()), nbytes

    def _decoded(
        self, opened: Opened
    ) -> Generator[tuple[RestartPoint, Block, int], None, None]:
        """Yield blocks, each with the mark before it, and its bytes."""
        mark, start = self.mark, self._first
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
        """Return the valid rows of a batch and failures, its bytes, and its rows."""
        if isinstance(item, FailedSample):
            return [item], 0, 1
        try:
            item.validate(full=True)
        except ValueError as error:
            if _BAD_TEXT not in str(error):
                raise
            # pyarrow may crash when asked for the size of a damaged batch.
            return self._singly(item, read, opened), 0, item.num_rows
        rows = Rows(opened.rows_of(item))
        if not read and len(rows) and not rows.is_numeric:
            # Make one row, so that lookups (time zones) happen in a thread. A failure
            # here repeats where it can be reported.
            with contextlib.suppress(Exception):
                rows[0]
        try:
            size = item.nbytes
        except TypeError:  # before Arrow 23, of views, which Polars gives
            size = item.get_total_buffer_size()
        return rows, int(size), item.num_rows

    def _singly(self, batch: pa.RecordBatch, read: int, opened: Opened) -> list[Any]:
        """Return the rows of a batch; those with invalid text as ``FailedSample``."""
        samples: list[Any] = []
        for at in range(batch.num_rows):
            row = batch.slice(at, 1)
            try:
                row.validate(full=True)
            except ValueError as error:
                samples.append(FailedSample(self._error(f"row {read + at:,}", error)))
            else:
                samples += Rows(opened.rows_of(row))
        return samples

    def _check_end(self, expected: int | None, read: int, row: int, start: int) -> None:
        if expected is not None and read != expected:
            text = f"{self._place} has {read:,} of {expected:,} rows: write it again"
            raise DatasetError(text, location=self.location)
        if start > row:
            raise DatasetError(
                f"{self._place} has {row:,} rows and is to be read from row {start:,} "
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
            f"{self._place} cannot be read, {where}: {text}; write or copy it "
            "again, and not while it is read",
            location=self.location,
        )


def begin_together(readers: Sequence[TableReader], nbytes: int) -> None:
    """Start reading small local shards in one thread call, which costs as much as one.

    Each is less than a step; about ``nbytes`` are decoded of all of them.
    """
    step = asyncio.create_task(_advance(readers, nbytes))
    for one in readers:
        one.join(step)


async def _advance(
    readers: Sequence[TableReader], nbytes: int
) -> dict[TableReader, PositionedBlocks]:
    """Decode the next step of one shard, or of several small ones."""
    opened: list[TableReader] = []
    for one in readers:
        try:
            await one.open()
        except Exception:
            if len(readers) == 1:
                raise
            break  # it is opened again, alone, when pulled
        opened.append(one)
    return await in_thread(_step_all, opened, nbytes, executor=readers[0].thread)


def _step_all(
    readers: Sequence[TableReader], nbytes: int
) -> dict[TableReader, PositionedBlocks]:
    """Return a step of each; nothing for the last ones once there is enough."""
    found: dict[TableReader, PositionedBlocks] = {}
    for reader in readers:
        found[reader], nbytes = reader.step(nbytes)
    return found


class FileMetadata(NamedTuple):
    """What is known of a file before it is read, mostly from its end."""

    address: str
    location: str  # the address, redacted
    version: Version
    schema: pa.Schema
    # What distinguishes its shards, and their lengths in rows or bytes.
    parts: Sequence[tuple[FilePart, int]]
    facts: Any  # what the format knows besides
    nbytes: int  # about how much memory this takes
    skipped: Collection[int] = ()  # shards in which no row is wanted


class DecodePlan(NamedTuple):
    """How a shard is decoded from the open file, in a thread."""

    items: Callable[[pa.NativeFile], Iterator[Item]]
    spans: Sequence[ByteSpan]  # bytes to request of an object
    most: int  # bytes of a request
    in_order: bool = True  # whether the bytes are read one after the other
    rows: int | None = None  # that are expected
    tail: bytes = b""  # the end of the file, if that is known and read again


class TableFormat(ShardFormat[FilePart]):
    """Tables in files, each with one or more shards.

    A format says what is known of a file (``_read_end``), and how a part of it is
    decoded (``_decoding``). ``addresses`` are patterns; the other arguments are those
    of ``Projection``, whose errors it raises.
    """

    def __init__(self, addresses: Any, storage: Storage, **wanted: Any) -> None:
        self._addresses = addresses
        self.storage: Storage = storage
        self._wanted = Projection(**wanted)
        self._partitions = Partitions()
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[str, FileMetadata] = OrderedDict()
        # Of all files, as listed: an end may be dropped and read again.
        self._listed: list[str] = []
        self._versions: dict[str, Version] = {}
        self._schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[FilePart]:
        stack.push_async_callback(self.storage.aclose)
        addresses = await self.storage.expand(self._addresses)
        if not await self._are_unchanged(addresses):
            self._forget()
            self._listed = [*addresses]
        names = map(self.storage.name, addresses)
        given = self._wanted.given or ()
        self._partitions = await in_thread(Partitions, names, given)
        # The first file decides which columns are read; all decide their types.
        first = await self._known_end(addresses[0])
        wanted, others = await in_thread(self._begun, first, addresses[1:])
        ends = [first, *await each(self._known_end, others)]
        shards = await in_thread(self._unified, ends, wanted)
        self._wanted = wanted  # other iterations used the previous one until here
        return shards

    async def _are_unchanged(self, addresses: Sequence[str]) -> bool:
        """Return whether the files are those of the latest listing: ends stay valid.

        One changed file may change the columns that are read of the others.
        """
        if [*addresses] != self._listed:
            return False
        versions = await each(self.storage.version, [*self._versions])
        return all(
            now.is_marked and now.is_of(known)
            for now, known in zip(versions, self._versions.values(), strict=True)
        )

    def _begun(
        self, first: FileMetadata, others: Sequence[str]
    ) -> tuple[Projection, Sequence[str]]:
        """Begin a table; return it, and the other files that may have wanted rows."""
        schema = self._with_name(first.schema, first.address)
        wanted = copy.copy(self._wanted)
        wanted.start(schema, first.location)
        if wanted.filters is None or not self._partitions:
            return wanted, others
        known = [self._condition(one, first.schema) for one in others]
        return wanted, [others[at] for at in wanted.filters.files(schema, known)]

    def _unified(
        self, ends: Sequence[FileMetadata], wanted: Projection
    ) -> list[FilePart]:
        """Unify the files into one table, and return their shards; in a thread."""
        for end in ends:
            wanted.add(self._with_name(end.schema, end.address), end.location)
        wanted.settle()
        filters, shards = wanted.filters, SizedListing()
        about = [] if filters is None else filters.names(wanted.schema)
        shards.sizes = sizes = []
        for end in ends:
            schema = self._with_name(end.schema, end.address)
            # Statistics do not apply to values that are cast before the comparison.
            is_plain = not end.skipped or wanted.has(schema, about)
            for number, (part, size) in enumerate(end.parts):
                if not (is_plain and number in end.skipped):
                    shards.append((end.address, *part))
                    sizes.append(size)
        if not shards and (left := next((end for end in ends if end.parts), None)):
            # One that has no wanted row, for its readers to find out.
            (part, size), *_ = left.parts
            shards.append((left.address, *part))
            sizes.append(size)
        return shards

    async def sizes(  # the sizes were read with the ends of the files
        self,
        shards: Sequence[FilePart],
        *,
        must: bool,  # noqa: ARG002
    ) -> list[int] | None:
        return shards.sizes if isinstance(shards, SizedListing) else None

    def summary(self, shards: Sequence[FilePart]) -> Summary:
        return summary_of(address for address, *_ in shards)

    def describe(self) -> dict[str, Any]:
        return self._wanted.describe()

    async def cut(self, shards: Sequence[FilePart], count: int) -> list[FilePart]:
        found: list[FilePart] = []
        if not shards:  # files without row groups
            return found
        counts = (b - a for a, b in pairwise(edges(count, len(shards))))
        for shard, parts in zip(shards, counts, strict=True):
            found += self._cut(shard, parts) if parts > 1 else [shard]
        return found

    def _cut(self, shard: FilePart, count: int) -> list[FilePart]:
        """Return a shard in parts; a part's reader also decodes the rows before it."""
        return [(*shard, number, count) for number in range(count)]

    async def _known_end(self, address: str) -> FileMetadata:
        end = self._kept.get(address)
        if end is None:
            end = await self._read_end(address, self.storage.label(address))
            first = self._versions.setdefault(address, end.version)
            ExpectedVersion(first).check(end.location, end.version)
            self._kept[address] = end
            sizes = [one.nbytes for one in self._kept.values()]
            while sum(sizes) > _KEPT and len(sizes) > 1:
                self._kept.popitem(last=False)
                del sizes[0]
        return end

    @abstractmethod
    async def _read_end(self, address: str, location: str) -> FileMetadata:
        """Read what is to be known of a file."""

    async def _tail(
        self, address: str, length_of: Callable[[bytes, int, str], int]
    ) -> tuple[bytes, Version]:
        """Return the end of a file, as long as it says, and the file's version."""
        tail, version = await self.storage.part(address, -_TAIL)
        length = length_of(tail, version.size, self.storage.label(address))
        if length > len(tail):
            tail, _ = await self.storage.part(address, -length, 0, version)
        return tail[len(tail) - length :], version

    def _shared(self, schema: pa.Schema) -> pa.Schema:
        """Return one object for equal schemas: there may be many files."""
        found = next((one for one in self._schemas if one.equals(schema)), schema)
        if found is schema:
            self._schemas.append(schema)
        return found

    def _with_name(self, schema: pa.Schema, address: str) -> pa.Schema:
        if not self._partitions:
            return schema
        return self._partitions.added(schema, self.storage.name(address))

    def _condition(self, address: str, own: pa.Schema) -> Any:
        """Return what a file's name says of all its rows, or None."""
        if not self._partitions:
            return None
        return self._partitions.condition(self.storage.name(address), own)

    def open(
        self, shard: FilePart, position: ShardPosition, budget: int
    ) -> TableReader:
        address, *part = shard
        opening = partial(self._open, address, part, position)
        label = self.storage.label(address)
        return TableReader(opening, label, self._unit(part), position, budget)

    @abstractmethod
    def _unit(self, part: Sequence[Any]) -> str:
        """Return what a part of a file is called in errors; empty: all of it."""

    @abstractmethod
    async def _decoding(
        self,
        end: FileMetadata,
        wanted: Projection,
        part: Sequence[Any],
        position: ShardPosition,
        window: int,
    ) -> DecodePlan:
        """Return how a part of a file is decoded, holding up to ``window`` bytes."""

    async def opened(
        self, address: str
    ) -> tuple[FileMetadata, Projection, Callable[[pa.RecordBatch], pa.RecordBatch]]:
        """Return what is known of a file, what is wanted, and what makes its rows."""
        end = await self._known_end(address)
        columns = self._with_name(end.schema, address)
        # A later listing replaces it.
        wanted = self._wanted = self._wanted.checked(columns, end.location)
        in_name = (
            Partitions.of(self.storage.name(address)) if self._partitions else None
        )
        rows_of = partial(wanted.rows_of, location=end.location, in_name=in_name)
        return end, wanted, rows_of

    async def _open(
        self, address: str, part: Sequence[Any], position: ShardPosition, window: int
    ) -> Opened:
        end, wanted, rows_of = await self.opened(address)
        ExpectedVersion.of(position).check(end.location, end.version)
        how = await self._decoding(end, wanted, part, position, window)
        ranges = None
        path = self.storage.path(address)
        if path is None:
            ranges = FetchedRanges(
                partial(self.storage.read, address, version=end.version),
                end.version.size,
                plan(how.spans, how.most, in_order=how.in_order),
                budget=window,
                location=end.location,
                in_order=how.in_order,
            )
            ranges.tail = how.tail

        def items() -> Iterator[Item]:
            if ranges is None:
                file = pa.OSFile(path)
            else:
                raw = RangeFile(end.version.size, ranges.read)
                file = pa.PythonFile(raw, mode="r")
            with contextlib.closing(file):
                yield from how.items(file)

        return Opened(
            items=items,
            rows_of=rows_of,
            rows=how.rows,
            ranges=ranges,
            version=end.version,
            check=partial(self.storage.check, address, end.version),
            may_wait=ranges is not None,
        )

    def __getstate__(self) -> dict[str, Any]:
        schemas: deque[pa.Schema] = deque(maxlen=_SCHEMAS)
        known: dict[str, Any] = {"_kept": OrderedDict(), "_schemas": schemas}
        return {**self.__dict__, **known, "_listed": [], "_versions": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(sealed(self._addresses))})"


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
