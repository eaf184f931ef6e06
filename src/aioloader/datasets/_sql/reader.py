"""Rows of one range of keys, read ahead in order, across lost connections.

A batch is read in a connection's thread while the previous one is consumed; the budget
bounds what is held. A lost connection is opened again, and reading resumes after the
last key.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioloader._order.blocks import Bad, cut
from aioloader.datasets._sql.failures import Retries, failure_of, may_pass
from aioloader.datasets._sql.keys import Key, Span, encoded
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._streams.shards import Position, ShardReader

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader._order.blocks import Block
    from aioloader.datasets._sql.connection import Connection
    from aioloader.datasets._sql.session import Batches, Session
    from aioloader.errors import DatasetError

_LOG = logging.getLogger("aioloader")
_SMALLEST, _LARGEST = 1 << 16, 1 << 22


class SQLReader(ShardReader):
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
        session: "Session",
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
        self._start = self._last_read = last
        # Batches that are ready: rows, their keys, bytes.
        self._ready: deque[tuple[Block, pa.Array, int]] = deque()
        self._held = 0  # bytes
        self._taken = 0  # rows of the first batch
        self._pulled: pa.Array | None = None  # keys of the last pull
        self._error: BaseException | None = None
        self._is_over = span.is_void
        self._task: asyncio.Task[DatasetError | None] | None = None
        # Either a pull waits for a batch, or the task for room.
        self._changed = asyncio.Event()

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
        rows, keys, nbytes = self._ready[0]
        start, stop = self._taken, min(self._taken + limit, len(rows))
        self._pulled, self._taken = keys[start:stop], stop
        if stop == len(rows):
            self._ready.popleft()
            self._taken = 0
            self._held -= nbytes
            self._changed.set()
        return cut(rows, start, stop)

    def position(self) -> Position:
        """Return the key of the last row returned, if any."""
        if self._pulled is None:
            return {} if self._start is None else {"key": self._start}
        return self.positions()(len(self._pulled))

    def positions(self) -> Callable[[int], Position]:
        """Return what maps a number of rows of the last pull to their key."""
        assert self._pulled is not None
        keys = self._pulled
        return lambda count: {"key": encoded(keys[count - 1].as_py())}

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

    async def _read(self) -> "DatasetError | None":
        """Read to the end, across lost connections; return the error if that fails."""
        retries = Retries(self._deadline)
        while True:
            before = self._last_read
            failed = await self._attempt()
            if failed is None:
                return None
            error, is_passing = failed
            if self._last_read != before:
                retries.restart()
            pause = retries.pause(error) if is_passing else None
            if pause is None:
                return error
            if retries.count == 1:
                _LOG.warning("%s; retrying", error)
            await asyncio.sleep(pause)

    async def _attempt(self) -> "tuple[DatasetError, bool] | None":
        """Read to the end with one connection.

        Returns:
            The failure, if any, and whether it may pass.
        """
        session = self._session
        connection: Connection | None = None
        batches: Batches | None = None
        is_sound = False
        try:
            connection = await session.join()
            start = self._span, self._last_read, self._batch_bytes
            batches = session.scan(connection, *start)
            while batch := await connection.run(self._next, batches):
                _, keys, nbytes = batch
                self._last_read = encoded(keys[-1].as_py())
                self._ready.append(batch)
                self._held += nbytes
                self._changed.set()
                await self._wait_for_room(nbytes)
            is_sound = True
        except Exception as exc:  # noqa: BLE001  (reported without its traceback)
            is_lost = connection is not None and await session.is_lost(connection)
            after = "" if self._last_read is None else f", after {self._last_read!r}"
            place = f"{self._span.words(session.source.key)}{after}"
            what = f"{session.source.label} ({place})"
            error = failure_of("read", what, session.address, exc)
            return error, is_lost or may_pass(session.address, exc)
        finally:
            if connection is not None:
                if batches is not None:
                    connection.post(batches.close)
                await session.leave(connection, is_sound=is_sound)
        return None

    def _next(self, batches: "Batches") -> "tuple[Block, pa.Array, int] | None":
        """Return the next batch; in the connection's thread."""
        batch = next(batches, None)
        if batch is None:
            return None
        from aioloader.datasets._arrow.rows import Rows  # noqa: PLC0415  (has pyarrow)

        rows: Block = Rows(batch.select(list(self._session.names)))
        if failures := self._session.failures(batch):
            rows = list(rows)
            for at, error in failures.items():
                rows[at] = Bad(error)
        return rows, batch.column(self._session.source.key), batch.nbytes

    async def _wait_for_room(self, latest: int) -> None:
        size = max(latest, self._batch_bytes)  # one row may exceed a batch
        while self._ready and self._held + size > self._budget:
            self._changed.clear()
            await self._changed.wait()
