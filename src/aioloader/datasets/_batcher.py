"""File reads of one event loop, handed to threads in chunks.

Reads requested in the same turn of the loop travel together: one thread switch and one
wake-up of the loop per chunk, not per file. Chunks start in order of request; reads of
different chunks finish in any order. Nothing is kept after a read is done.
"""

import asyncio
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from aioloader.datasets._stores.failures import ShortReadError

Outcome: TypeAlias = bytes | Exception
Read: TypeAlias = tuple[str, "asyncio.Future[Outcome]"]

MAX_CHUNK = 64
# Two milliseconds of reading outweigh a thread switch of 50 to 150 us. Then 20 to 64
# small cached files share one chunk, and files on slow storage go one by one to
# threads.
_CHUNK_SECONDS = 0.002
_FIRST_GUESS = _CHUNK_SECONDS / 4


def read_file(path: str) -> bytes:
    """Read one whole file, in a thread.

    Returns:
        The contents, owned by the caller.

    Raises:
        OSError: If the file cannot be opened or read.
        ShortReadError: If it ended before the size it had when opened.
    """
    # Four calls: `open().read()` makes twice as many, and each releases the GIL and has
    # to acquire it again (14 % more CPU for 100 KB, 60 % for 4 KB).
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        size = os.fstat(fd).st_size
        data = os.read(fd, size + 1)
        if len(data) != size:
            data = _read_on(fd, data)
    finally:
        os.close(fd)
    if len(data) < size:
        raise ShortReadError(size, len(data))
    return data


def _read_on(fd: int, data: bytes) -> bytes:
    """Read the rest that one call did not return: over 2 GiB, growing, or in /proc."""
    parts = [data]
    while data := os.read(fd, 1 << 24):
        parts.append(data)
    return b"".join(parts)


class ReadBatcher:
    """Combines the reads of one event loop into chunks for threads.

    Without ``enter``, chunks run in the loop's default executor. All methods belong to
    the loop's thread.

    Args:
        num_threads: Most chunks in threads at once; at least 1.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._free = num_threads
        self._waiting: deque[Read] = deque()
        self._flush_is_due = False
        self._seconds_per_file = _FIRST_GUESS
        self._pool: ThreadPoolExecutor | None = None
        self._users = 0

    def read(self, path: str) -> "asyncio.Future[Outcome]":
        """Request the contents of one file.

        Returns:
            A future of the bytes or of the exception raised; a value either way, so
            that an abandoned read logs nothing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append((path, future))
        if self._free and not self._flush_is_due:
            self._flush_is_due = True
            loop.call_soon(self._flush)
        return future

    def enter(self) -> None:
        """Use a separate thread pool from now on; calls nest."""
        self._users += 1
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "aioloader-files")

    async def exit(self) -> None:
        """Join the threads once every ``enter`` has its ``exit``."""
        self._users -= 1
        if self._users == 0 and (pool := self._pool) is not None:
            self._pool = None
            await asyncio.to_thread(pool.shutdown)

    def _flush(self) -> None:
        self._flush_is_due = False
        while self._free and (chunk := self._next_chunk()):
            self._start(chunk)

    def _next_chunk(self) -> list[Read]:
        room = int(_CHUNK_SECONDS / self._seconds_per_file)
        room = max(1, min(MAX_CHUNK, room))
        chunk: list[Read] = []
        while self._waiting and len(chunk) < room:
            path, future = self._waiting.popleft()
            if not future.done():
                chunk.append((path, future))
        return chunk

    def _start(self, chunk: list[Read]) -> None:
        paths = [path for path, _ in chunk]
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(self._pool, _read_all, paths)
        except RuntimeError as exc:  # the process is ending
            _settle(chunk, [exc] * len(chunk))
            return
        self._free -= 1
        work.add_done_callback(partial(self._finish, chunk))

    def _finish(
        self, chunk: list[Read], work: "asyncio.Future[tuple[list[Outcome], float]]"
    ) -> None:
        self._free += 1
        outcomes, seconds = work.result()
        self._seconds_per_file = (self._seconds_per_file + seconds / len(chunk)) / 2
        _settle(chunk, outcomes)
        # The woken readers now request more: wait for them, then flush once.
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)


def _read_all(paths: list[str]) -> tuple[list[Outcome], float]:
    """Read every file of a chunk; return how many seconds that took, too."""
    began = time.perf_counter()
    return [_read_one(path) for path in paths], time.perf_counter() - began


def _read_one(path: str) -> Outcome:
    try:
        return read_file(path)
    except Exception as exc:  # noqa: BLE001  (raised again by the reader)
        return exc


def _settle(chunk: list[Read], outcomes: list[Outcome]) -> None:
    for (_, future), outcome in zip(chunk, outcomes, strict=True):
        if not future.done():
            future.set_result(outcome)
