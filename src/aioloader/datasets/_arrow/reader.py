"""One shard of a table: record batches, decoded in a thread, one step ahead.

The order is the file's. A step is as many batches as ``budget`` allows; one is passed
on while the next is decoded, and bytes for later steps are in flight. Decoded batches
are checked before they are passed on; a single damaged row is a ``Bad``, and any other
damage ends the shard with an error.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioloader._order.blocks import Bad, Block, cut
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.shards import CountsBytes, KnowsVersion
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._arrow.ranges import Ranges
    from aioloader.datasets._streams.shards import Position

# Larger steps do not fit into the processor's caches.
_LEAST_STEP, _MOST_STEP = 1 << 16, 2 << 20

# pyarrow's message for invalid text in an otherwise valid column.
_BAD_TEXT = "Invalid UTF8"


class Budget(NamedTuple):
    """Shares of the bytes that a reader may hold.

    Attributes:
        step: For the decoded batches of one step; two of them are held.
        window: For bytes not yet decoded.
    """

    step: int
    window: int

    @classmethod
    def of(cls, nbytes: int) -> "Budget":
        """Divide ``nbytes``."""
        step = max(_LEAST_STEP, min(_MOST_STEP, nbytes // 4))
        return cls(step, max(0, nbytes - 2 * step))


class Slice(NamedTuple):
    """One of several parts with equal numbers of rows, in order.

    Attributes:
        number: Which part.
        parts: How many there are.
    """

    number: int = 0
    parts: int = 1

    def bounds(self, rows: int) -> tuple[int, int]:
        """Return the first of its rows and one past the last, given their number."""
        return rows * self.number // self.parts, rows * (self.number + 1) // self.parts


_WHOLE = Slice()


@dataclass(frozen=True)
class Place:
    """Names the data being read, for errors.

    Attributes:
        location: The file, redacted.
        unit: Part of the file, such as ``"row group 3"``; empty: all.
        part: Part of its rows.
    """

    location: str
    unit: str
    part: Slice = _WHOLE

    def __str__(self) -> str:
        return f"{self.unit} of {self.location!r}" if self.unit else repr(self.location)


@dataclass(frozen=True)
class Source:
    """An open shard.

    Attributes:
        batches: Starts decoding; called, and iterated, in threads. An item that alone
            cannot be read is a ``Bad``.
        rows_of: Makes the rows to deliver from a checked batch.
        rows: Expected number of rows, if known.
        ranges: The requests for bytes, if any.
        version: Version of the file.
        check: Checks that a local file is still of that version: whatever was decoded,
            and whatever failed, may be of another one.
        has_thread: Whether it has a separate thread, because it may wait.
        is_users: Whether errors are the user's, who made the source.
    """

    batches: "Callable[[], Iterator[pa.RecordBatch | Bad]]"
    rows_of: "Callable[[pa.RecordBatch], pa.RecordBatch]"
    rows: int | None = None
    ranges: "Ranges | None" = None
    version: Version | None = None
    check: Callable[[], None] | None = None
    has_thread: bool = False
    is_users: bool = False


def between(
    batches: "Generator[pa.RecordBatch, None, None]", first: int, stop: int
) -> "Iterator[pa.RecordBatch]":
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


def shares(count: int, among: int) -> list[int]:
    """Divide ``count`` into ``among`` nearly equal numbers."""
    return [count * (at + 1) // among - count * at // among for at in range(among)]


class Steps:
    """Turns batches into blocks, several at a time, in threads, one after the other.

    Args:
        source: The open shard.
        place: Its name.
        skip: Rows to skip at the beginning.
    """

    def __init__(self, source: Source, place: Place, skip: int) -> None:
        self.is_over = False
        self.failure: Exception | None = None
        self._source = source
        self._place = place
        self._skip = skip
        # Rows read, and rows made of them: filters make them differ.
        self._read = self._row = 0
        self._is_warm = False
        self._batches: Iterator[pa.RecordBatch | Bad] | None = None

    def step(self, nbytes: int) -> tuple[list[Block], int]:
        """Decode the next blocks; ``is_over`` or ``failure`` show whether more follow.

        Args:
            nbytes: Approximate bytes to decode.

        Returns:
            The blocks, and the rest of ``nbytes``.
        """
        blocks: list[Block] = []
        try:
            if self._batches is None:
                self._batches = self._source.batches()
            while nbytes > 0 and not self.is_over:
                batch = next(self._batches, None)
                if batch is None:
                    self._end()
                elif len(block := self._block(batch)):
                    blocks.append(block)
                    # pyarrow may crash when asked for the size of a damaged batch.
                    if type(block) is Rows and not isinstance(batch, Bad):
                        nbytes -= _bytes_of(batch)
        except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
            self._fail(error)
        try:
            if self._source.check is not None:
                self._source.check()
        except DatasetError as error:
            self._fail(error)
            return [], nbytes
        return blocks, nbytes

    def close(self) -> None:
        """Close the file; not during a step."""
        batches, self._batches = self._batches, iter(())
        close = getattr(batches, "close", None)
        if close is not None:
            close()

    def _block(self, batch: "pa.RecordBatch | Bad") -> Block:
        block: Block
        if isinstance(batch, Bad):
            block, rows = [batch], 1
        else:
            block, rows = self._checked(batch), batch.num_rows
        self._read += rows
        drop = min(len(block), max(0, self._skip - self._row))
        self._row += len(block)
        return cut(block, drop) if drop else block

    def _checked(self, batch: "pa.RecordBatch") -> Block:
        """Return the rows of a valid batch, or its valid rows and failures."""
        try:
            batch.validate(full=True)
        except ValueError as error:
            if _BAD_TEXT not in str(error):
                raise
            return self._singly(batch)
        rows = Rows(self._source.rows_of(batch))
        if not self._is_warm and len(rows):
            self._is_warm = True
            if not rows.is_numeric:
                _warm(rows)
        return rows

    def _singly(self, batch: "pa.RecordBatch") -> list[Any]:
        """Return the rows of a batch; those with invalid text as ``Bad``."""
        samples: list[Any] = []
        for at in range(batch.num_rows):
            row = batch.slice(at, 1)
            try:
                row.validate(full=True)
            except ValueError as error:
                samples.append(Bad(self._error(f"row {self._read + at:,}", error)))
            else:
                samples += Rows(self._source.rows_of(row))
        return samples

    def _end(self) -> None:
        self.is_over = True
        expected, skip = self._source.rows, self._skip
        if expected is not None and self._read != expected:
            text = f"{self._place} has {self._read:,} of {expected:,} rows announced"
            raise DatasetError(text, location=self._place.location)
        if skip > self._row:
            raise DatasetError(
                f"{self._place} has {self._row:,} rows and is to be read from row "
                f"{skip:,} on; it is not the file that the state was saved for",
                location=self._place.location,
            )

    def _fail(self, error: Exception) -> None:
        """Keep the DatasetError for a failed read."""
        self.is_over = True
        if self._source.is_users:
            self.failure = error
            return
        ranges = self._source.ranges
        if ranges is not None and ranges.failure is not None:
            error = ranges.failure
        if isinstance(error, DatasetError):
            self.failure = error
        elif isinstance(error, OSError) and error.errno is not None:
            self.failure = file_failure(self._place.location, error)
        else:
            self.failure = self._error(f"from row {self._read:,} on", error)
        self.failure.__cause__ = None if self.failure is error else error

    def _error(self, where: str, cause: Exception) -> DatasetError:
        text = str(cause).strip() or type(cause).__name__
        return DatasetError(
            f"{self._place} cannot be read, {where}: {text}; it is damaged, or was "
            "rewritten meanwhile",
            location=self._place.location,
        )


def _bytes_of(batch: "pa.RecordBatch") -> int:
    """Return the bytes of a batch; those of its buffers where Arrow cannot count them.

    Arrow 22 and older cannot count those of views, which Polars gives.
    """
    try:
        return int(batch.nbytes)
    except TypeError:
        return int(batch.get_total_buffer_size())


def _step_all(shards: "Sequence[Steps]", nbytes: int) -> list[list[Block]]:
    """Return a step of each shard; nothing for the last ones once there is enough."""
    found: list[list[Block]] = []
    for steps in shards:
        blocks, nbytes = steps.step(nbytes)
        found.append(blocks)
    return found


def _warm(rows: Rows) -> None:
    """Make one row, so that lookups (time zones) happen in a thread.

    A failure here repeats where it can be reported.
    """
    with contextlib.suppress(Exception):
        rows[0]


# The next blocks of readers.
_Decoded: TypeAlias = dict["TableReader", list[Block]]


class TableReader(KnowsVersion, CountsBytes):
    """A shard's rows, in order.

    Args:
        opening: Opens the shard, given the bytes that may be requested ahead.
        place: Its name.
        row: Rows to skip at the beginning.
        budget: Most bytes to hold.
    """

    def __init__(
        self,
        opening: Callable[[int], Coroutine[Any, Any, Source]],
        place: Place,
        row: int,
        budget: int,
    ) -> None:
        self._opening = opening
        self._place = place
        self._row = row
        self._budget = Budget.of(budget)
        self._blocks: deque[Block] = deque()
        self._taken = 0
        self._is_closed = False
        self._ranges: Ranges | None = None
        self._steps: Steps | None = None
        self._of: tuple[str, Version] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._work: asyncio.Future[Any] | None = None
        self._next: asyncio.Task[_Decoded] | None = None
        self._is_small = False

    def begin(self) -> None:
        """Start reading."""
        is_over = self._steps is not None and self._steps.is_over
        if self._next is None and not is_over and not self._is_closed:
            self.join(asyncio.create_task(_advance([self])))

    def join(self, step: "asyncio.Task[_Decoded]", *, is_small: bool = False) -> None:
        """Get the next blocks from ``step``.

        Args:
            step: Task that reads them, perhaps for other readers too.
            is_small: Whether the shard is far smaller than its budget.
        """
        self._next, self._is_small = step, is_small

    async def pull(self, limit: int) -> Block:
        """Return the next rows, from 1 to ``limit``; an empty list at the end.

        Raises:
            DatasetError: If the rest of the shard cannot be read.
        """
        while not self._blocks:
            self.begin()
            if self._next is None:
                return self._end()
            await asyncio.wait([self._next])  # cancellation does not reach it
            step, self._next = self._next, None
            self._blocks.extend(step.result().pop(self, ()))
            self.begin()
        block = self._blocks[0]
        part = cut(block, self._taken, self._taken + limit)
        self._taken += len(part)
        self._row += len(part)
        if self._taken >= len(block):
            self._blocks.popleft()
            self._taken = 0
        return part

    def version(self) -> tuple[str, Version] | None:
        """Return the address and version of the file; None before it is open."""
        return self._of

    def position(self) -> "Position":
        """Return the number of the next row."""
        return {"row": self._row}

    def bytes_ahead(self) -> int | None:
        """Return all that it may hold; None for a small shard, which needs far less."""
        return None if self._is_small else sum(self._budget)

    def is_draining(self) -> bool:
        """Return whether all was requested."""
        if self._ranges is not None and self._ranges.is_draining():
            return True
        return self._is_closed or (self._steps is not None and self._steps.is_over)

    async def aclose(self) -> None:
        """Cancel requests and decoding, and wait for them to end."""
        self._is_closed = True
        self._blocks.clear()
        step, self._next = self._next, None
        if step is not None:
            step.cancel()
        if self._ranges is not None:
            await self._ranges.aclose()
        waiting = [one for one in (step, self._work) if one is not None]
        if waiting:
            await asyncio.wait(waiting)
        if self._steps is not None:
            self._steps.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    def _end(self) -> list[Any]:
        if self._steps is not None and self._steps.failure is not None:
            raise self._steps.failure
        return []

    async def open(self) -> Steps:
        """Open the shard before the first step; return its decoder."""
        if self._steps is None:
            source = await self._opening(self._budget.window)
            self._steps = Steps(source, self._place, self._row)
            self._ranges = source.ranges
            if source.version is not None:
                self._of = self._place.location, source.version
            if self._ranges is not None or source.has_thread:
                # A thread that waits for the network must not be one of the loop's.
                self._pool = ThreadPoolExecutor(1, "aioloader-arrow")
            if self._ranges is not None:
                self._ranges.begin()
        return self._steps

    def decode(
        self, shards: Sequence[Steps], nbytes: int | None
    ) -> "asyncio.Future[list[list[Block]]]":
        """Start a step of all ``shards`` in one thread, with ``nbytes`` in all."""
        job = partial(_step_all, shards, nbytes or self._budget.step)
        return asyncio.get_running_loop().run_in_executor(self._pool, job)

    def await_at_close(self, work: "asyncio.Future[Any] | None") -> None:
        """Make ``aclose`` wait for a thread."""
        self._work = work


def begin_together(readers: Sequence[TableReader], nbytes: int) -> None:
    """Start reading small local shards in one thread call, which costs the same as one.

    Args:
        readers: Readers of shards that are less than a step each.
        nbytes: Approximate bytes to decode for all of them.
    """
    step = asyncio.create_task(_advance(readers, nbytes))
    for one in readers:
        one.join(step, is_small=True)


async def _advance(
    readers: Sequence[TableReader], nbytes: int | None = None
) -> _Decoded:
    """Decode the next step of one shard, or of several small ones."""
    shards: dict[TableReader, Steps] = {}
    for one in readers:
        try:
            shards[one] = await one.open()
        except Exception:
            if len(readers) == 1:
                raise
            break  # it is opened again, alone, when pulled
    work = readers[0].decode([*shards.values()], nbytes)
    for one in readers:
        one.await_at_close(work)
    await asyncio.wait([work])  # a thread continues when its task is cancelled
    for one in readers:
        one.await_at_close(None)
    return dict(zip(shards, work.result(), strict=True))
