"""Rows of one range of keys, read ahead in order, across lost connections.

A batch is read in a connection's thread while the previous one is consumed; the budget
bounds what is held. A lost connection is opened again, and reading resumes after the
last key.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aioloader._order.blocks import Bad, cut
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._sql.failures import failure_of, given_up, pauses, reason_of
from aioloader.datasets._sql.keys import Key, Span, encoded
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._streams.shards import NamesPositions, Position
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader._order.blocks import Block
    from aioloader.datasets._sql.address import Address
    from aioloader.datasets._sql.links import Batches, Connection, Link
    from aioloader.datasets._sql.source import Source

_LOG = logging.getLogger("aioloader")
_SMALLEST, _LARGEST = 1 << 16, 1 << 22


class Session(Protocol):
    """One iteration over a source: a snapshot, and connections that read it.

    Attributes:
        address: The database.
        source: The table or query.
    """

    address: "Address"
    source: "Source"

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to deliver."""

    async def join(self) -> "Link":
        """Return a connection that reads the snapshot."""

    async def leave(
        self, link: "Link", batches: "Batches | None", *, is_sound: bool
    ) -> None:
        """Stop a scan and return its connection; if ``is_sound``, it may be reused."""

    async def is_lost(self, link: "Link") -> bool:
        """Return whether a connection is lost, after a failure."""

    def scan(
        self, connection: "Connection", span: Span, last: Key | None, batch_bytes: int
    ) -> "Batches":
        """Yield the rows of a range; in the connection's thread."""

    def failures(self, batch: "pa.RecordBatch") -> dict[int, DatasetError]:
        """Return the rows of a batch that cannot be read, with their errors."""


@dataclass
class _Batch:
    """A batch that is ready.

    Attributes:
        rows: The rows to deliver.
        keys: Their keys.
        nbytes: Their size in memory.
        taken: How many were delivered.
    """

    rows: "Block"
    keys: "pa.Array"
    nbytes: int
    taken: int = 0


class SQLReader(NamesPositions):
    """Reads one range.

    Args:
        session: The iteration.
        span: The range.
        last: Key of the last row delivered; None: none was.
        budget: Most bytes to hold; a batch is a quarter, but at least 64 KiB.
        deadline: Seconds in which a lost connection must be restored.
    """

    def __init__(
        self,
        session: Session,
        span: Span,
        last: Key | None,
        budget: int,
        deadline: float,
    ) -> None:
        self._session = session
        self._span = span
        self._budget = budget
        self._batch_bytes = max(_SMALLEST, min(budget // 4, _LARGEST))
        self._deadline = deadline
        self._last = self._last_read = last
        # Of the last pull: keys, and the part of them that was returned.
        self._pulled: tuple[pa.Array, int, int] | None = None
        self._ready: deque[_Batch] = deque()
        self._held = 0
        self._error: BaseException | None = None
        self._is_over = span.is_void
        self._task: asyncio.Task[DatasetError | None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()

    def begin(self) -> None:
        """Start reading ahead."""
        if self._task is None and not self._is_over:
            self._task = asyncio.create_task(self._read())
            self._task.add_done_callback(self._finish)

    async def pull(self, limit: int) -> "Block":
        """Return the next rows, from 1 to ``limit``; an empty list at the end.

        Raises:
            DatasetError: If they cannot be read.
        """
        self.begin()
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return []
            self._changed.clear()
            await self._changed.wait()
        batch = self._ready[0]
        start = batch.taken
        batch.taken = stop = min(start + limit, len(batch.rows))
        self._pulled = batch.keys, start, stop
        if stop == len(batch.rows):
            self._ready.popleft()
            self._held -= batch.nbytes
            self._has_room.set()
        return cut(batch.rows, start, stop)

    def position(self) -> Position:
        """Return the key of the last row returned, if any."""
        if self._pulled is None:
            return {} if self._last is None else {"key": self._last}
        _, start, stop = self._pulled
        return self.positions()(stop - start)

    def positions(self) -> Callable[[int], Position]:
        """Return what maps a number of rows of the last pull to their key."""
        assert self._pulled is not None
        keys, start, _ = self._pulled
        return lambda count: {"key": encoded(keys[start + count - 1].as_py())}

    def is_draining(self) -> bool:
        """Return whether all was read."""
        return self._is_over

    async def aclose(self) -> None:
        """Stop reading, and give the connection back."""
        task, self._task = self._task, None
        self._is_over = True
        if task is not None:
            task.cancel()
            await outlast(asyncio.gather(task, return_exceptions=True))
        self._error = None
        self._ready.clear()
        self._changed.set()

    # -- reading ahead ------------------------------------------------------------

    def _finish(self, task: "asyncio.Task[DatasetError | None]") -> None:
        # Rows not read must not look like an end.
        if task.cancelled():
            self._error = RuntimeError("reading ahead was cancelled")
        else:
            self._error = task.exception() or task.result()
        self._is_over = True
        self._changed.set()

    async def _read(self) -> DatasetError | None:
        """Read to the end, across lost connections; return the error if that fails."""
        loop = asyncio.get_running_loop()
        attempts, give_up = 0, 0.0
        waits = pauses()
        while True:
            before = self._last_read
            lost = await self._attempt()
            if lost is None or not lost.may_pass:
                return None if lost is None else lost.error
            if attempts == 0 or self._last_read != before:
                attempts, give_up = 0, loop.time() + self._deadline
                waits = pauses()
            attempts += 1
            pause = next(waits)
            if loop.time() + pause >= give_up:
                return given_up(lost.error, attempts)
            if attempts == 1:
                _LOG.warning("%s; retrying", lost.error)
            await asyncio.sleep(pause)

    async def _attempt(self) -> "_Lost | None":
        """Read to the end with one connection; return the failure, if any."""
        session = self._session
        link: Link | None = None
        batches: Batches | None = None
        is_sound = False
        try:
            link = await session.join()
            batches = await link.run(
                session.scan, self._span, self._last_read, self._batch_bytes
            )
            while batch := await link.run(self._next, batches):
                self._add(batch)
                await self._wait_for_room(batch.nbytes)
            is_sound = True
        except Exception as exc:  # noqa: BLE001  (reported without its traceback)
            may_pass = reason_of(session.address, exc).may_pass or (
                link is not None and await session.is_lost(link)
            )
            error = failure_of("read", self._what(), session.address, exc)
            return _Lost(error, may_pass)
        finally:
            if link is not None:
                await session.leave(link, batches, is_sound=is_sound)
        return None

    def _next(self, _connection: "Connection", batches: "Batches") -> _Batch | None:
        """Return the next rows; in the connection's thread."""
        batch = next(batches, None)
        if batch is None:
            return None
        keys = batch.column(self._session.source.key)
        rows: Block = Rows(batch.select(list(self._session.names)))
        failures = self._session.failures(batch)
        if failures:
            rows = list(rows)
            for at, error in failures.items():
                rows[at] = Bad(error)
        return _Batch(rows, keys, batch.nbytes)

    def _add(self, batch: _Batch) -> None:
        self._last_read = encoded(batch.keys[-1].as_py())
        self._ready.append(batch)
        self._held += batch.nbytes
        self._changed.set()

    async def _wait_for_room(self, latest: int) -> None:
        size = max(latest, self._batch_bytes)  # one row may exceed a batch
        while self._ready and self._held + size > self._budget:
            self._has_room.clear()
            await self._has_room.wait()

    def _what(self) -> str:
        source = self._session.source
        after = "" if self._last_read is None else f", after {self._last_read!r}"
        return f"{source.label} ({self._span.words(source.key)}{after})"


@dataclass(frozen=True)
class _Lost:
    """A failed attempt.

    Attributes:
        error: The error to raise if there is no retry.
        may_pass: Whether to retry.
    """

    error: DatasetError
    may_pass: bool
