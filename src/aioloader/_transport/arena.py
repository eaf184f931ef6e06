"""An arena: shared memory with slots, into which a worker writes batches in place.

The worker writes to an anonymous memory file, which both processes map. The first page
contains a state byte per slot. The writer takes free slots. The reader frees a slot
when the last view of its batch is dropped, by a single store, safe in any finalizer.
Neither side waits: a writer without a free slot adds a slot.

The first page also lists the batches that the worker is making (ticket, stage, start).
The reader finds them there after the worker's death.
"""

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aioloader._base.forks import fork_safe
from aioloader._base.machine import memory_left
from aioloader._transport.slots import LockableMap, Locker, Slot, rounded
from aioloader.errors import BatchTooLargeError

# The first page contains a state per slot, then the table of batches in flight.
_PAGE = mmap.PAGESIZE
MAX_IN_FLIGHT, FIELDS = 32, 3
_MAX_SLOTS = _PAGE - MAX_IN_FLIGHT * FIELDS * 8
# Slot states: free; taken; free and page-locked (its pages must stay); too small and
# page-locked (the reader unlocks it).
_FREE, _TAKEN, _LOCKED, _RETIRED = range(4)
# A free slot that was not needed for this many batches returns its pages.
_IDLE_BATCHES = 64
# The maximum number of slots that are added and mapped together. A mapping costs a
# descriptor (before Python 3.13), and unwritten pages cost nothing.
_MAX_ADDED = 8
# Slots of this many bytes or more are added only if the machine has the memory.
_MIN_CHECKED = 1 << 28


class SlotRef(NamedTuple):
    """A reference to an arena's slot: its number, first byte in the file, and size."""

    number: int
    start: int
    size: int


class InFlight(NamedTuple):
    """A batch that a worker is making: ticket, stage, and age in seconds."""

    ticket: int
    stage: int
    seconds: float


@dataclass(eq=False, repr=False)
class _SlotEntry:
    ref: SlotRef
    memory: mmap.mmap
    offset: int
    view: Callable[[], Any] = field(default=lambda: None)
    used_at: int = 0
    is_empty: bool = True

    def drop_pages(self) -> None:
        """Return the slot's pages to the kernel; its addresses stay valid."""
        if not self.is_empty:
            self.memory.madvise(mmap.MADV_REMOVE, self.offset, self.ref.size)
            self.is_empty = True


class Table:
    """A table of the batches that a worker is making; it outlives the worker."""

    descriptor: int  # of the file with the table
    _cells: memoryview  # of int64

    def begin(self, row: int, ticket: int) -> None:
        cell = row * FIELDS
        self._cells[cell + 1] = 0
        self._cells[cell + 2] = time.monotonic_ns()
        self._cells[cell] = ticket + 1  # last: it makes the row valid

    def enter(self, row: int, stage: int) -> None:
        self._cells[row * FIELDS + 1] = stage

    def clear(self, row: int) -> None:
        self._cells[row * FIELDS] = 0

    def in_flight(self) -> list[InFlight]:
        """Return the batches that the worker is making, sorted by ticket."""
        cells, now = self._cells, time.monotonic_ns()
        return sorted(
            InFlight(cells[cell] - 1, cells[cell + 1], (now - cells[cell + 2]) / 1e9)
            for cell in range(0, len(cells), FIELDS)
            if cells[cell]
        )

    def close(self) -> None:
        """Close the table's descriptor; mappings and views stay valid. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Side(Table):
    """Base class of an arena's sides; creates the file unless given a descriptor."""

    _locked: Container[int]  # the page-locked slots that this side knows of

    def __init__(self, descriptor: int | None = None) -> None:
        is_new = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("aioloader-arena")
        self.descriptor = descriptor
        try:
            if is_new:
                os.ftruncate(descriptor, _PAGE)
            self._states = mmap.mmap(descriptor, _PAGE)
        except BaseException:
            self.close()
            raise
        self._cells = memoryview(self._states)[_MAX_SLOTS:].cast("q")

    def free(self, ref: SlotRef) -> None:
        """Free a slot; the writer frees unsent slots, the reader those it received."""
        self._states[ref.number] = _LOCKED if ref.number in self._locked else _FREE


class ArenaWriter(_Side):
    """The worker's side of an arena; any thread may take slots to fill."""

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(descriptor)
        self._slots: list[_SlotEntry] = []
        self._locked: set[int] = set()
        self._count = 0
        self._end = _PAGE
        self._clock = 0
        self._lock = fork_safe(threading.Lock())

    def take(self, nbytes: int) -> tuple[SlotRef, Slot]:
        """Return a slot of at least ``nbytes``: its reference, and a view to write to.

        Write before sending the reference; the view keeps the slot from being reused.

        Raises:
            BatchTooLargeError: If there is no memory for a new slot.
            MemoryError: If too many slots are in use.
        """
        with self._lock:
            self._clock += 1
            if not self._clock % _IDLE_BATCHES:
                self._empty_idle()
            for slot in self._slots:
                if slot.ref.size >= nbytes and self._is_free(slot):
                    break
            else:
                slot = self._add(nbytes)
            slot.used_at, slot.is_empty = self._clock, False
            if self._states[slot.ref.number] == _LOCKED:
                self._locked.add(slot.ref.number)
            self._states[slot.ref.number] = _TAKEN
            view = Slot((slot.ref.size,), np.uint8, slot.memory, slot.offset)
            slot.view = weakref.ref(view)
            return slot.ref, view

    def _is_free(self, slot: _SlotEntry) -> bool:
        state = self._states[slot.ref.number]
        return state in {_FREE, _LOCKED} and slot.view() is None

    def _add(self, nbytes: int) -> _SlotEntry:
        self._drop_smaller(nbytes)
        size = rounded(nbytes)
        if size >= _MIN_CHECKED and size > (left := memory_left()):
            raise _too_large(size, left)
        alike = sum(slot.ref.size == size for slot in self._slots)
        count = min(max(1, alike), _MAX_ADDED, _MAX_SLOTS - self._count)
        if not count:
            raise MemoryError(
                f"more than {_MAX_SLOTS} batches of one worker are in use"
            )
        try:
            os.ftruncate(self.descriptor, self._end + count * size)
            memory = mmap.mmap(self.descriptor, count * size, offset=self._end)
        except (OSError, OverflowError) as error:  # perhaps a limit of the process
            raise _too_large(size, memory_left(), f" ({error})") from error
        for offset in range(0, count * size, size):
            ref = SlotRef(self._count, self._end, size)
            self._slots.append(_SlotEntry(ref, memory, offset))
            self._count += 1
            self._end += size
        return self._slots[-count]

    def _drop_smaller(self, nbytes: int) -> None:
        """Drop free slots smaller than ``nbytes``, because batches have grown."""
        for slot in self._slots[:]:
            if slot.ref.size < nbytes and self._is_free(slot):
                self._slots.remove(slot)
                if self._states[slot.ref.number] == _LOCKED:
                    self._states[slot.ref.number] = _RETIRED
                else:
                    slot.drop_pages()

    def _empty_idle(self) -> None:
        for slot in self._slots:
            is_idle = slot.used_at < self._clock - _IDLE_BATCHES and self._is_free(slot)
            if is_idle and self._states[slot.ref.number] == _FREE:
                slot.drop_pages()


class ArenaReader(_Side):
    """The loader's side of an arena; it reads batches in place and frees slots."""

    def __init__(
        self, descriptor: int | None = None, *, locker: Locker | None = None
    ) -> None:
        super().__init__(descriptor)
        self._locker = locker  # page-locks slots when they are first leased
        self._locked: dict[int, SlotRef] = {}
        self._segments: list[tuple[int, LockableMap]] = []  # first byte, and mapping
        self._pid = os.getpid()
        self.lent: set[int] = set()  # numbers of slots in use; for any thread

    def view(self, ref: SlotRef, nbytes: int) -> Slot:
        """Return a view of the first ``nbytes`` of a slot that the writer sent.

        The slot is freed with the last array, tensor or ``memoryview`` of these bytes.
        """
        first, memory = self._segment_of(ref)
        if self._locker is not None and ref.number not in self._locked:
            self._unlock_retired()
            if memory.lock(self._locker, ref.start - first, ref.size):
                self._locked[ref.number] = ref
        view = Slot((nbytes,), np.uint8, memory, ref.start - first)
        self.lent.add(ref.number)
        weakref.finalize(view, self._return, ref).atexit = False
        return view

    def _unlock_retired(self) -> None:
        for number, ref in list(self._locked.items()):
            if self._states[number] == _RETIRED:
                del self._locked[number]
                first, memory = self._segment_of(ref)
                memory.unlock(ref.start - first)
                memory.madvise(mmap.MADV_REMOVE, ref.start - first, ref.size)

    def _segment_of(self, ref: SlotRef) -> tuple[int, LockableMap]:
        """Return the first byte and mapping of a slot's segment, mapping it if new."""
        for first, memory in self._segments:
            if first <= ref.start and ref.start + ref.size <= first + len(memory):
                return first, memory
        size = os.fstat(self.descriptor).st_size - ref.start
        memory = LockableMap(self.descriptor, size, offset=ref.start)
        self._segments.append((ref.start, memory))
        return self._segments[-1]

    def _return(self, ref: SlotRef) -> None:
        if os.getpid() == self._pid:  # not for a forked child's copy of a view
            self.lent.discard(ref.number)
            self.free(ref)


def _too_large(size: int, available: int, refused: str = "") -> BatchTooLargeError:
    return BatchTooLargeError(
        f"a batch needs {size:,} bytes of shared memory, but {available:,} are "
        f"available{refused}; use smaller batches or fewer workers",
        nbytes=size,
        slot_bytes=available,
    )
