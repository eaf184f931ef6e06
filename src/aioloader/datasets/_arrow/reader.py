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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioloader._order.blocks import Bad, Block, cut
from aioloader.datasets._arrow.ranges import Ranges
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.shards import ShardReader
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._streams.shards import Position

# Larger steps do not fit into the processor's caches.
_LEAST_STEP, _MOST_STEP = 1 << 16, 2 << 20

# pyarrow's message for invalid text in an otherwise valid column.
_BAD_TEXT = "Invalid UTF8"


class Mark(NamedTuple):
    """A place where reading can start again.

    Attributes:
        byte: Where, in the file.
        row: How many rows were passed on before.
        read: How many were read before; filters make these differ.
    """

    byte: int
    row: int = 0
    read: int = 0


# A batch that was read, one that alone cannot be, or where the next one starts.
Item: TypeAlias = "pa.RecordBatch | Bad | Mark"


@dataclass(frozen=True)
class Opened:
    """An open shard.

    Attributes:
        items: Starts decoding; called, and iterated, in threads.
        rows_of: Makes the rows to deliver from a checked batch.
        rows: Expected number of rows, if known.
        ranges: The requests for bytes, if any.
        version: Version of the file.
        check: Checks that a local file is still of that version: whatever was decoded,
            and whatever failed, may be of another one.
        may_wait: Whether it needs a separate thread.
        is_users: Whether errors are the user's, who made the source.
    """

    items: "Callable[[], Iterator[Item]]"
    rows_of: "Callable[[pa.RecordBatch], pa.RecordBatch]"
    rows: int | None = None
    ranges: Ranges | None = None
    version: Version | None = None
    check: Callable[[], None] | None = None
    may_wait: bool = False
    is_users: bool = False


def part_of(rows: int, number: int = 0, parts: int = 1) -> tuple[int, int]:
    """Return the first row of one of several equal parts, and one past the last."""
    return rows * number // parts, rows * (number + 1) // parts


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


class TableReader(ShardReader):
    """A shard's rows, in order.

    Args:
        opening: Opens the shard, given the bytes that may be requested ahead.
        location: The file, redacted, for errors.
        unit: Part of the file, such as ``"row group 3"``; empty: all.
        position: Where to start.
        budget: Most bytes to hold: two steps of decoded batches, and the rest for
            bytes not yet decoded.
    """

    def __init__(
        self,
        opening: Callable[[int], Coroutine[Any, Any, Opened]],
        location: str,
        unit: str,
        position: "Position",
        budget: int,
    ) -> None:
        self._opening = opening
        self._location = location
        self._place = f"{unit} of {location!r}" if unit else repr(location)
        self._row: int = position.get("row", 0)
        self._mark = Mark(*position.get("from", (0,)))
        self._step_bytes = max(_LEAST_STEP, min(_MOST_STEP, budget // 4))
        self._window = max(0, budget - 2 * self._step_bytes)
        self._is_small = False
        self._opened: Opened | None = None
        self._decoder: Iterator[tuple[Block, int, Mark]] | None = None
        self._failure: Exception | None = None
        self._is_over = False
        # Decoded, each with the mark before it; and how much of the first was taken.
        self._blocks: deque[tuple[Block, Mark]] = deque()
        self._taken = 0
        self._next: asyncio.Task[_Decoded] | None = None
        # Where a step runs (None: in the loop's threads), and the one that runs.
        self.pool: ThreadPoolExecutor | None = None
        self.work: asyncio.Future[Any] | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        """Start reading."""
        if self._next is None and not self._is_over:
            self.join(asyncio.create_task(_advance([self], self._step_bytes)))

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
                if self._failure is not None:
                    raise self._failure
                return []
            await asyncio.wait([self._next])  # cancellation does not reach it
            step, self._next = self._next, None
            self._blocks.extend(step.result().pop(self, ()))
            self.begin()
        block, self._mark = self._blocks[0]
        part = cut(block, self._taken, self._taken + limit)
        self._taken += len(part)
        self._row += len(part)
        if self._taken >= len(block):
            self._blocks.popleft()
            self._taken = 0
        return part

    def version(self) -> tuple[str, Version] | None:
        """Return the address and version of the file; None before it is open."""
        if self._opened is None or self._opened.version is None:
            return None
        return self._location, self._opened.version

    def position(self) -> "Position":
        """Return the number of the next row, and the last place to start from."""
        marked = {"from": list(self._mark)} if self._mark.byte else {}
        return {"row": self._row, **marked}

    def bytes_ahead(self) -> int | None:
        """Return all that it may hold; None for a small shard, which needs far less."""
        return None if self._is_small else self._window + 2 * self._step_bytes

    def is_draining(self) -> bool:
        """Return whether all was requested."""
        ranges = None if self._opened is None else self._opened.ranges
        return self._is_over or (ranges is not None and ranges.is_draining())

    async def aclose(self) -> None:
        """Cancel requests and decoding, and wait for them to end."""
        self._is_over = True
        self._blocks.clear()
        step, self._next = self._next, None
        if step is not None:
            step.cancel()
        if self._opened is not None and self._opened.ranges is not None:
            await self._opened.ranges.aclose()
        waiting = [one for one in (step, self.work) if one is not None]
        if waiting:
            await asyncio.wait(waiting)
        if (close := getattr(self._decoder, "close", None)) is not None:
            close()
        pool, self.pool = self.pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    async def open(self) -> None:
        """Open the shard before the first step."""
        if self._opened is not None:
            return
        self._opened = opened = await self._opening(self._window)
        if opened.ranges is not None or opened.may_wait:
            # A thread that waits for the network must not be one of the loop's.
            self.pool = ThreadPoolExecutor(1, "aioloader-arrow")
        if opened.ranges is not None:
            opened.ranges.begin()

    # -- in a thread ----------------------------------------------------------------

    def step(self, nbytes: int) -> tuple[list[tuple[Block, Mark]], int]:
        """Decode the next blocks.

        Args:
            nbytes: Approximate bytes to decode.

        Returns:
            The blocks, each with the mark before it; and the rest of ``nbytes``.
        """
        found: list[tuple[Block, Mark]] = []
        assert self._opened is not None
        try:
            if self._decoder is None:
                self._decoder = self._decoded(self._opened)
            while nbytes > 0 and not self._is_over:
                block, size, mark = next(self._decoder)
                found.append((block, mark))
                nbytes -= size
        except StopIteration:
            self._is_over = True
        except Exception as error:  # noqa: BLE001  (a decoder may raise anything)
            self._failure, self._is_over = error, True
        try:
            if self._opened.check is not None:
                self._opened.check()
        except DatasetError as error:
            self._failure, self._is_over = error, True
            return [], nbytes
        return found, nbytes

    def _decoded(self, opened: Opened) -> "Iterator[tuple[Block, int, Mark]]":
        """Yield blocks, each with its bytes and the mark before it."""
        mark, start = self._mark, self._row
        _, row, read = mark
        block: Block
        try:
            for item in opened.items():
                if isinstance(item, Mark):
                    mark = Mark(item.byte, row, read)
                    continue
                if isinstance(item, Bad):
                    block, rows, size = [item], 1, 0
                else:
                    # pyarrow may crash when asked for the size of a damaged batch.
                    block, rows = self._checked(item, read, opened), item.num_rows
                    size = _bytes_of(item) if type(block) is Rows else 0
                drop = min(len(block), max(0, start - row))
                read, row = read + rows, row + len(block)
                if drop < len(block):
                    yield (cut(block, drop) if drop else block), size, mark
            self._check_end(opened.rows, read, row, start)
        except Exception as error:
            if opened.is_users:
                raise
            failure = self._failed(error, read, opened.ranges)
            if failure is error:
                raise
            raise failure from error

    def _checked(self, batch: "pa.RecordBatch", read: int, opened: Opened) -> Block:
        """Return the rows of a valid batch, or its valid rows and failures."""
        try:
            batch.validate(full=True)
        except ValueError as error:
            if _BAD_TEXT not in str(error):
                raise
            return self._singly(batch, read, opened)
        rows = Rows(opened.rows_of(batch))
        if not read and len(rows) and not rows.is_numeric:
            # Make one row, so that lookups (time zones) happen in a thread. A failure
            # here repeats where it can be reported.
            with contextlib.suppress(Exception):
                rows[0]
        return rows

    def _singly(self, batch: "pa.RecordBatch", read: int, opened: Opened) -> list[Any]:
        """Return the rows of a batch; those with invalid text as ``Bad``."""
        samples: list[Any] = []
        for at in range(batch.num_rows):
            row = batch.slice(at, 1)
            try:
                row.validate(full=True)
            except ValueError as error:
                samples.append(Bad(self._error(f"row {read + at:,}", error)))
            else:
                samples += Rows(opened.rows_of(row))
        return samples

    def _check_end(self, expected: int | None, read: int, row: int, start: int) -> None:
        if expected is not None and read != expected:
            text = f"{self._place} has {read:,} of {expected:,} rows announced"
            raise DatasetError(text, location=self._location)
        if start > row:
            raise DatasetError(
                f"{self._place} has {row:,} rows and is to be read from row {start:,} "
                "on; it is not the file that the state was saved for",
                location=self._location,
            )

    def _failed(
        self, error: Exception, read: int, ranges: Ranges | None
    ) -> DatasetError:
        """Return the DatasetError for a failed read."""
        cause = (ranges and ranges.failure) or error
        if isinstance(cause, DatasetError):
            return cause
        if isinstance(cause, OSError) and cause.errno is not None:
            return file_failure(self._location, cause)
        return self._error(f"from row {read:,} on", cause)

    def _error(self, where: str, cause: Exception) -> DatasetError:
        text = str(cause).strip() or type(cause).__name__
        return DatasetError(
            f"{self._place} cannot be read, {where}: {text}; it is damaged, or was "
            "rewritten meanwhile",
            location=self._location,
        )


# The next blocks of readers.
_Decoded: TypeAlias = dict[TableReader, list[tuple[Block, Mark]]]


def _bytes_of(batch: "pa.RecordBatch") -> int:
    """Return the bytes of a batch; those of its buffers where Arrow cannot count them.

    Arrow 22 and older cannot count those of views, which Polars gives.
    """
    try:
        return int(batch.nbytes)
    except TypeError:
        return int(batch.get_total_buffer_size())


def _step_all(
    readers: Sequence[TableReader], nbytes: int
) -> list[list[tuple[Block, Mark]]]:
    """Return a step of each; nothing for the last ones once there is enough."""
    found: list[list[tuple[Block, Mark]]] = []
    for reader in readers:
        blocks, nbytes = reader.step(nbytes)
        found.append(blocks)
    return found


def begin_together(readers: Sequence[TableReader], nbytes: int) -> None:
    """Start reading small local shards in one thread call, which costs the same as one.

    Args:
        readers: Readers of shards that are less than a step each.
        nbytes: Approximate bytes to decode for all of them.
    """
    step = asyncio.create_task(_advance(readers, nbytes))
    for one in readers:
        one.join(step, is_small=True)


async def _advance(readers: Sequence[TableReader], nbytes: int) -> _Decoded:
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
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(readers[0].pool, _step_all, opened, nbytes)
    for one in readers:
        one.work = work
    await asyncio.wait([work])  # a thread continues when its task is cancelled
    for one in readers:
        one.work = None
    return dict(zip(opened, work.result(), strict=True))
