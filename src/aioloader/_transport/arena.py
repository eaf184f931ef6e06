"""Shared memory between two processes: slots that batches are written into, in place.

An anonymous memory file, grown by its writer and mapped by both. A byte per slot in the
first page says which side has it: the writer takes free slots, the reader frees a slot
when the last view of its batch is dropped. That is one store to memory, safe in any
finalizer. There is no wake-up and no polling: a writer without a free slot adds one. A
slot that the reader has page-locked keeps its pages, which a device may know.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aioloader._observe.machine import memory_left
from aioloader._order.forks import fork_safe
from aioloader._transport.slots import LockableMap, Locker, Slot, rounded
from aioloader.errors import BatchTooLargeError

_STATES = mmap.PAGESIZE
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


@dataclass(eq=False)
class _Slot:
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


def make_arena() -> int:
    """Return the descriptor of a new, empty arena; the caller owns it."""
    descriptor = os.memfd_create("aioloader-arena")
    os.ftruncate(descriptor, _STATES)
    return descriptor


class ArenaWriter:
    """The side that takes and fills slots; used from any thread.

    Args:
        descriptor: The result of ``make_arena``; owned from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._states = mmap.mmap(descriptor, _STATES)
        self._slots: list[_Slot] = []
        self._locked: set[int] = set()  # by the reader, as far as known here
        self._count = 0
        self._end = _STATES
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
            slot = self._find(nbytes) or self._add(nbytes)
            slot.used_at, slot.is_empty = self._clock, False
            if self._states[slot.ref.number] == _LOCKED:
                self._locked.add(slot.ref.number)
            self._states[slot.ref.number] = _TAKEN
            view = np.frombuffer(slot.memory, np.uint8, slot.ref.size, slot.offset)
            slot.view = weakref.ref(view)
            return slot.ref, view

    def give_back(self, ref: SlotRef) -> None:
        """Free a slot that was taken and will not be sent or read."""
        self._states[ref.number] = _LOCKED if ref.number in self._locked else _FREE

    def close(self) -> None:
        """Close the file; mappings stay valid."""
        os.close(self.descriptor)

    def _find(self, nbytes: int) -> _Slot | None:
        for slot in self._slots:
            if slot.ref.size >= nbytes and self._is_free(slot):
                return slot
        return None

    def _is_free(self, slot: _Slot) -> bool:
        state = self._states[slot.ref.number]
        return state in {_FREE, _LOCKED} and slot.view() is None

    def _add(self, nbytes: int) -> _Slot:
        self._drop_smaller(nbytes)
        size = rounded(nbytes)
        _check_room(size)
        alike = sum(slot.ref.size == size for slot in self._slots)
        number = min(max(1, alike), _MOST_ADDED, _STATES - self._count)
        if not number:
            raise MemoryError(f"more than {_STATES} batches of one worker are in use")
        try:
            os.ftruncate(self.descriptor, self._end + number * size)
            memory = mmap.mmap(self.descriptor, number * size, offset=self._end)
        except (OSError, OverflowError) as error:
            raise _too_large(size, memory_left(), str(error)) from error
        for offset in range(0, number * size, size):
            ref = SlotRef(self._count, self._end, size)
            self._slots.append(_Slot(ref, memory, offset))
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
        """Return the pages of idle slots to the kernel."""
        for slot in self._slots:
            is_idle = slot.used_at < self._clock - _IDLE and self._is_free(slot)
            if is_idle and self._states[slot.ref.number] == _FREE:
                slot.drop_pages()


class ArenaReader:
    """The side that reads in place and frees slots when their views are dropped.

    Args:
        descriptor: The same memory file; owned from now on.
        locker: Page-locks slots when they are first leased, or None.
    """

    def __init__(self, descriptor: int, locker: Locker | None = None) -> None:
        self.descriptor = descriptor
        self._locker = locker
        self._locked: dict[int, SlotRef] = {}
        self._states = mmap.mmap(descriptor, _STATES)
        self._segments: list[tuple[int, LockableMap]] = []  # first byte, and mapping
        self._pid = os.getpid()
        self._is_closed = False
        self.lent = 0

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
        view = np.frombuffer(memory, np.uint8, nbytes, ref.start - first)
        self.lent += 1
        weakref.finalize(view, self._return, ref.number).atexit = False
        return view

    def free(self, ref: SlotRef) -> None:
        """Free a slot that was sent and is not wanted."""
        self._free(ref.number)

    def close(self) -> None:
        """Close the file; existing views stay valid. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)

    def _unlock_retired(self) -> None:
        """Unlock slots that the writer has given up."""
        for number, ref in list(self._locked.items()):
            if self._states[number] == _RETIRED:
                del self._locked[number]
                first, memory = self._segment_of(ref)
                memory.unlock(ref.start - first)
                memory.madvise(mmap.MADV_REMOVE, ref.start - first, ref.size)

    def _free(self, number: int) -> None:
        self._states[number] = _LOCKED if number in self._locked else _FREE

    def _segment_of(self, ref: SlotRef) -> tuple[int, LockableMap]:
        """Return the mapping of a slot; a new one extends to the file's end."""
        for first, memory in self._segments:
            if first <= ref.start and ref.start + ref.size <= first + len(memory):
                return first, memory
        size = os.fstat(self.descriptor).st_size - ref.start
        memory = LockableMap(self.descriptor, size, offset=ref.start)
        self._segments.append((ref.start, memory))
        return self._segments[-1]

    def _return(self, number: int) -> None:
        if os.getpid() == self._pid:  # not for a forked child's copy of a view
            self.lent -= 1
            self._free(number)


def _check_room(size: int) -> None:
    if size >= _BIG and size > (available := memory_left()):
        raise _too_large(size, available)


def _too_large(size: int, available: int, reason: str = "") -> BatchTooLargeError:
    refused = f" ({reason})" if reason else ""  # by a limit of the process, say
    return BatchTooLargeError(
        f"a batch needs {size:,} bytes of shared memory, but {available:,} are "
        f"available{refused}; use smaller batches or fewer workers",
        nbytes=size,
        slot_bytes=available,
    )
