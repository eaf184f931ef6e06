"""Shared memory that a loader lends to a worker, on any operating system.

The loader creates segments and sends one with a request. A segment is free again when
the last view of its batch is dropped. A batch that fits into no segment travels by
pipe, and the next segments are larger. Segments have no names (on Windows, a name lasts
only while its segment is mapped), so none is left behind, however the processes end.
"""

import collections
import contextlib
import itertools
import mmap
import os
import socket
import sys
import tempfile
import threading
import weakref
from typing import Any, TypeAlias

import numpy as np

from aioloader._base.forks import fork_safe
from aioloader._base.machine import memory_left
from aioloader._transport.arena import FIELDS, MAX_IN_FLIGHT, SlotRef, Table
from aioloader._transport.slots import LockableMap, Locker, Slot, rounded

# How another process maps a segment: by a descriptor, or by a name on Windows.
Handle: TypeAlias = int | str
# Slots from this number on are not in segments: their bytes follow the frame.
PIPED = 1 << 40
# Segments grow at least by this factor, so that few of them are too small.
_GROWTH = 1.5
_NAMES = itertools.count()
# Windows has no `pwrite`: callers write in order, so the file's position is the offset.
write_at: Any = getattr(os, "pwrite", lambda file, data, _offset: os.write(file, data))
_CAN_SEND = sys.platform == "win32" or hasattr(socket, "CMSG_LEN")


def new_segment(nbytes: int) -> tuple[LockableMap, Handle]:
    """Return a new segment's mapping and handle; the caller owns the handle.

    Raises:
        OSError: If memory or descriptors are exhausted.
    """
    if sys.platform == "win32":
        name = f"aioloader-{os.getpid()}-{next(_NAMES)}"
        return LockableMap(-1, nbytes, tagname=name), name
    descriptor = _unnamed_memory()
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "posix_fallocate"):  # without it, a full disk kills the writer
            os.posix_fallocate(descriptor, 0, nbytes)
        return LockableMap(descriptor, nbytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def attach(handle: Handle, nbytes: int) -> mmap.mmap:
    """Map another process's segment, and close the handle if it is a descriptor."""
    if isinstance(handle, str):
        return mmap.mmap(-1, nbytes, tagname=handle)  # type: ignore[call-arg,unused-ignore]
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


def unnamed_file() -> int:
    """Return the descriptor of a file without a name, in memory if possible."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("aioloader-file")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def table_in(descriptor: int) -> memoryview:
    """Map a file's first page, and return the cells of the ``Table`` there."""
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    return memoryview(memory)[: MAX_IN_FLIGHT * FIELDS * 8].cast("q")


def _unnamed_memory() -> int:
    """Return the descriptor of new shared memory, which has no name."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("aioloader-segment")
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/aioloader-{os.getpid()}-{next(_NAMES)}"
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
    descriptor: int = _posixshmem.shm_open(name, flags, mode=0o600)
    _posixshmem.shm_unlink(name)
    return descriptor


class Lender(Table):
    """The loader's side; it lends segments to one worker and reads batches in place.

    Only one thread may call ``lend``. Only one thread at a time may call ``arrive``
    and ``view``. Any thread may drop a batch. ``locker`` page-locks the segments.
    """

    def __init__(self, locker: Locker | None = None) -> None:
        self.descriptor = unnamed_file()
        write_at(self.descriptor, bytes(mmap.PAGESIZE), 0)
        self._cells = table_in(self.descriptor)
        self._locker = locker
        self._lock = fork_safe(threading.Lock())
        self._segments: dict[int, LockableMap] = {}
        self._free: collections.deque[int] = collections.deque()
        self._at_worker: set[int] = set()  # segments that the worker may fill
        self._numbers = itertools.count()
        self._needed = 0  # size of new segments; 0: no batch has come by pipe
        self._piped = memoryview(b"")
        self._pid = os.getpid()
        self.lent: set[int] = set()  # as in ``ArenaReader``

    def lend(self, most: int) -> tuple[int, int, Handle | None] | None:
        """Lend a segment; return its number, size and handle, or None if none is lent.

        Only a new segment has a handle, which the caller then owns. The worker may hold
        at most ``most`` segments of the needed size.
        """
        with self._lock:
            needed = self._needed
            lent = [k for k in self._at_worker if len(self._segments[k]) >= needed]
            if not needed or len(lent) >= most:
                return None
            while self._free:
                number = self._free.popleft()
                if len(self._segments[number]) >= needed:
                    self._at_worker.add(number)
                    return number, len(self._segments[number]), None
                del self._segments[number]  # unmapped with its last view
        size = rounded(needed)
        if size > memory_left() or not _CAN_SEND:
            return None
        try:
            memory, handle = new_segment(size)
            if self._locker is not None:
                memory.lock(self._locker, 0, size)
        except OSError:  # no room, no descriptor: by pipe
            return None
        with self._lock:
            number = next(self._numbers)
            self._segments[number] = memory
            self._at_worker.add(number)
        return number, size, handle

    def arrive(self, ref: SlotRef, used: int, frame: memoryview) -> None:
        """Record that a batch of ``used`` bytes has come, in a segment or by pipe."""
        with self._lock:
            if ref.number < PIPED:
                self._at_worker.discard(ref.number)
            else:
                self._piped = frame[-used:]
                if used > self._needed:
                    self._needed = max(used, int(_GROWTH * self._needed))

    def view(self, ref: SlotRef, nbytes: int) -> Slot:
        """Return a batch's first ``nbytes``, in place, or copied if it came by pipe."""
        if ref.number >= PIPED:
            return Slot((nbytes,), np.uint8, bytearray(self._piped[:nbytes]))
        view = Slot((nbytes,), np.uint8, self._segments[ref.number])
        self.lent.add(ref.number)
        weakref.finalize(view, self._return, ref).atexit = False
        return view

    def free(self, ref: SlotRef) -> None:
        """Free the slot of a dropped batch, so that it can be lent again."""
        if ref.number < PIPED:
            self._free.append(ref.number)

    def _return(self, ref: SlotRef) -> None:
        if os.getpid() == self._pid:  # not for a forked child's copy of a view
            self.lent.discard(ref.number)
            self.free(ref)


class Borrower(Table):
    """The worker's side; any thread may take segments that the loader has lent."""

    def __init__(self, descriptor: int) -> None:
        self._cells = table_in(descriptor)
        os.close(descriptor)
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._views: dict[int, Any] = {}  # weak references to the latest slots
        self._free: list[int] = []
        self._numbers = itertools.count(PIPED)
        self._piped: dict[int, Slot] = {}

    def add(self, number: int, size: int, handle: Handle | None) -> None:
        """Add a segment that the loader has lent; map it if it has a ``handle``."""
        with self._lock:
            if handle is not None:
                self._maps[number] = attach(handle, size)
            self._free.append(number)

    def take(self, nbytes: int) -> tuple[SlotRef, Slot]:
        """Take a slot of at least ``nbytes``, in private memory if no segment fits."""
        with self._lock:
            for number in self._free:
                memory, view = self._maps[number], self._views.get(number)
                # User code may have kept an earlier batch.
                if len(memory) >= nbytes and (view is None or view() is None):
                    self._free.remove(number)
                    slot = Slot((len(memory),), np.uint8, memory)
                    self._views[number] = weakref.ref(slot)
                    return SlotRef(number, 0, len(memory)), slot
            size = max(1, nbytes)
            ref = SlotRef(next(self._numbers), 0, size)
            self._piped[ref.number] = Slot((size,), np.uint8)
            return ref, self._piped[ref.number]

    def free(self, ref: SlotRef) -> None:
        """Free a slot whose batch will not be sent."""
        with self._lock:
            if ref.number < PIPED:
                self._free.append(ref.number)
            else:
                del self._piped[ref.number]

    def piped(self, ref: SlotRef, used: int) -> memoryview:
        """Return a piped batch's bytes, to send after its frame; none for a segment."""
        if ref.number < PIPED:
            return memoryview(b"")
        with self._lock:
            slot: Any = self._piped.pop(ref.number)
            return memoryview(slot)[:used]
