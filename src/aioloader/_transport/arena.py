"""Shared memory between two processes: slots that batches are written into, in place.

An anonymous memory file, grown by its writer and mapped by both. A byte per slot in the
first page says which side has it: the writer takes free slots, the reader frees a slot
when the last view of its batch is dropped. That is one store to memory, safe in any
finalizer. There is no wake-up and no polling: a writer without a free slot adds one. A
slot that the reader has page-locked keeps its pages, which a device may know.

The first page also has the batches that its writer, a worker, is making: ticket, stage
and start of each. Stores of eight bytes need no lock and no message, and the reader
finds them there after the writer's death.
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

# The first page: a state per slot, then the table of batches in the making.
_PAGE = mmap.PAGESIZE
PLACES, FIELDS = 32, 3
_MOST_SLOTS = _PAGE - PLACES * FIELDS * 8
# Free, with pages that may be returned; taken; free and locked; locked and given up.
_FREE, _TAKEN, _LOCKED, _RETIRED = range(4)
# Free slots not needed for this many batches return their pages.
_IDLE = 64
# Slots are added in segments of at most this many: a mapping costs a descriptor (before
# Python 3.13), and unwritten pages cost nothing.
_MOST_ADDED = 8
# Below this size the available memory is not checked.
_BIG = 1 << 28


class SlotRef(NamedTuple):
    """A slot in its file: its number, first byte and size in bytes."""

    number: int
    start: int
    size: int


class InFlight(NamedTuple):
    """A ticket that a worker has taken, its stage, and how many seconds ago."""

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
        """Return the pages to the kernel; the addresses stay valid."""
        if not self.is_empty:
            self.memory.madvise(mmap.MADV_REMOVE, self.offset, self.ref.size)
            self.is_empty = True


class Table:
    """The batches that a worker is making; in memory that outlives it."""

    descriptor: int  # of this memory
    _cells: memoryview  # of a page

    def begin(self, place: int, ticket: int) -> None:
        cell = place * FIELDS
        self._cells[cell + 1] = 0
        self._cells[cell + 2] = time.monotonic_ns()
        self._cells[cell] = ticket + 1  # last: it makes the place valid

    def enter(self, place: int, stage: int) -> None:
        self._cells[place * FIELDS + 1] = stage

    def clear(self, place: int) -> None:
        self._cells[place * FIELDS] = 0

    def in_flight(self) -> list[InFlight]:
        """Return the tickets that the worker has, the oldest first."""
        cells, now = self._cells, time.monotonic_ns()
        return sorted(
            InFlight(cells[at] - 1, cells[at + 1], (now - cells[at + 2]) / 1e9)
            for at in range(0, len(cells), FIELDS)
            if cells[at]
        )

    def close(self) -> None:
        """Close the file; mappings, and views, stay valid. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Side(Table):
    """Either side: it has the first page. Without a descriptor it makes the file."""

    _locked: Container[int]  # the slots that the reader has locked, as far as known

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
        self._cells = memoryview(self._states)[_MOST_SLOTS:].cast("q")

    def free(self, ref: SlotRef) -> None:
        """Free a slot: of a batch that is not sent, or of a sent one."""
        self._states[ref.number] = _LOCKED if ref.number in self._locked else _FREE


class ArenaWriter(_Side):
    """The side that takes and fills slots; used from any thread."""

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(descriptor)
        self._slots: list[_SlotEntry] = []
        self._locked: set[int] = set()
        self._count = 0
        self._end = _PAGE
        self._clock = 0
        self._lock = fork_safe(threading.Lock())

    def take(self, nbytes: int) -> tuple[SlotRef, Slot]:
        """Take a slot of at least ``nbytes``, adding one if none is free.

        Write to the view only until the reference is sent. While the view or a
        ``memoryview`` of it is kept after that, the slot is not taken again.

        Raises:
            BatchTooLargeError: If the machine has no memory for it.
        """
        with self._lock:
            self._clock += 1
            if not self._clock % _IDLE:
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
        if size >= _BIG and size > (left := memory_left()):
            raise _too_large(size, left)
        alike = sum(slot.ref.size == size for slot in self._slots)
        number = min(max(1, alike), _MOST_ADDED, _MOST_SLOTS - self._count)
        if not number:
            raise MemoryError(
                f"more than {_MOST_SLOTS} batches of one worker are in use"
            )
        try:
            os.ftruncate(self.descriptor, self._end + number * size)
            memory = mmap.mmap(self.descriptor, number * size, offset=self._end)
        except (OSError, OverflowError) as error:  # by a limit of the process, say
            raise _too_large(size, memory_left(), f" ({error})") from error
        for offset in range(0, number * size, size):
            ref = SlotRef(self._count, self._end, size)
            self._slots.append(_SlotEntry(ref, memory, offset))
            self._count += 1
            self._end += size
        return self._slots[-number]

    def _drop_smaller(self, nbytes: int) -> None:
        """Give up free slots that are too small since batches have grown."""
        for slot in self._slots[:]:
            if slot.ref.size < nbytes and self._is_free(slot):
                self._slots.remove(slot)
                if self._states[slot.ref.number] == _LOCKED:
                    self._states[slot.ref.number] = _RETIRED  # the reader unlocks it
                else:
                    slot.drop_pages()

    def _empty_idle(self) -> None:
        for slot in self._slots:
            is_idle = slot.used_at < self._clock - _IDLE and self._is_free(slot)
            if is_idle and self._states[slot.ref.number] == _FREE:
                slot.drop_pages()


class ArenaReader(_Side):
    """The side that reads in place and frees slots when their views are dropped.

    ``locker`` page-locks slots when they are first leased.
    """

    def __init__(
        self, descriptor: int | None = None, *, locker: Locker | None = None
    ) -> None:
        super().__init__(descriptor)
        self._locker = locker
        self._locked: dict[int, SlotRef] = {}
        self._segments: list[tuple[int, LockableMap]] = []  # first byte, and mapping
        self._pid = os.getpid()
        self.lent: set[int] = set()  # slots; any thread may return one

    def lease(self, ref: SlotRef, nbytes: int) -> Slot:
        """Return the first ``nbytes`` of a slot that was sent.

        The array, or a ``memoryview`` of it, keeps the slot; a numpy view of the array
        alone does not.
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
        """Return the mapping of a slot; a new one extends to the file's end."""
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
