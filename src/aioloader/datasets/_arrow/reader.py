"""One shard of a table: record batches, decoded in a thread, one step ahead.

The order is the file's. A step is as many batches as ``budget`` allows; one is passed
on while the next is decoded, and bytes for later steps are in flight. Decoded batches
are checked before they are passed on; a single damaged row is a ``Bad``, and any other
damage ends the shard with an error.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from aioloader._base.blocks import Bad, Block
from aioloader._base.outlast import in_thread, outlast
from aioloader.datasets._arrow.ranges import Ranges
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.versions import Version
from aioloader.datasets._streams.reader import Made, Reader
from aioloader.datasets._streams.shards import Position
from aioloader.errors import DatasetError

# Larger steps do not fit into the processor's caches.
_LEAST_STEP, _MOST_STEP = 1 << 16, 2 << 20
# pyarrow's message for invalid text in an otherwise valid column.
_BAD_TEXT = "Invalid UTF8"


class Mark(NamedTuple):
    """A place where reading can start again: a byte, and the rows before it."""

    byte: int
    row: int = 0  # of those that were passed on
    read: int = 0  # of all, which filters make differ


# A batch that was read, one row that cannot be, or where the next batch starts.
Item: TypeAlias = pa.RecordBatch | Bad | Mark


class Opened(NamedTuple):
    """An open shard."""

    items: Callable[[], Iterator[Item]]  # starts decoding, in a thread
    # Makes the rows to deliver from a checked batch.
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch]
    rows: int | None = None  # that are expected
    ranges: Ranges | None = None  # the requests for bytes
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


class TableReader(Reader):
    """A shard's rows, in order; in errors it is a ``unit`` of a file, if not all of it.

    ``opening`` opens it, given the bytes that may be requested ahead. The budget is for
    two steps of decoded batches, and the rest for bytes not yet decoded.
    """

    is_ahead = True
    mark: Mark

    def __init__(
        self,
        opening: Callable[[int], Coroutine[Any, Any, Opened]],
        location: str,
        unit: str,
        position: Position,
        budget: int,
    ) -> None:
        super().__init__(location, Mark(*position.get("from", (0,))))
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

    async def make(self) -> Made:
        return (await _advance([self], self._step_bytes))[self]

    def join(self, step: "asyncio.Task[dict[TableReader, Made]]") -> None:
        """Get the first blocks from ``step``, which reads several small shards."""

        async def mine() -> Made:
            made: dict[TableReader, Made] = await outlast(step)
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

    def position(self) -> Position:
        """Return the number of the next row, and the last place to start from."""
        marked = {"from": list(self.mark)} if self.mark.byte else {}
        return {"row": self._first + self.passed, **marked}

    def bytes_ahead(self) -> int | None:
        """Return all that it may hold; None for a small shard, which needs far less."""
        return None if self._is_small else self._window + 2 * self._step_bytes

    def is_draining(self) -> bool:
        ranges = None if self._opened is None else self._opened.ranges
        return self.is_over or (ranges is not None and ranges.is_draining())

    # -- in a thread ----------------------------------------------------------------

    def step(self, nbytes: int) -> tuple[Made, int]:
        """Decode about ``nbytes``; return blocks, and what is left of ``nbytes``."""
        opened, found = self._opened, Made()
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

        def checked() -> Iterator[tuple[Mark, Block]]:
            opened.check()  # or else all of them may be of another file
            yield from found
            if failure is not None:
                raise failure

        return self.gather(checked()), nbytes

    def _decoded(
        self, opened: Opened
    ) -> Generator[tuple[Mark, Block, int], None, None]:
        """Yield blocks, each with the mark before it, and its bytes."""
        mark, start = self.mark, self._first
        _, row, read = mark
        try:
            for item in opened.items():
                if isinstance(item, Mark):
                    mark = Mark(item.byte, row, read)
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
        self, item: pa.RecordBatch | Bad, read: int, opened: Opened
    ) -> tuple[Block, int, int]:
        """Return the valid rows of a batch and failures, its bytes, and its rows."""
        if isinstance(item, Bad):
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
) -> dict[TableReader, Made]:
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


def _step_all(readers: Sequence[TableReader], nbytes: int) -> dict[TableReader, Made]:
    """Return a step of each; nothing for the last ones once there is enough."""
    found: dict[TableReader, Made] = {}
    for reader in readers:
        found[reader], nbytes = reader.step(nbytes)
    return found
