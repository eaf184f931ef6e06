"""Recycled memory for batches; a slot is free again when its last view is dropped.

Fresh memory costs a page fault for every 4 KB, which takes two to three times as long
as the copy into it. So a pool reuses the mappings of dropped batches; a consumer that
keeps its batches gets fresh memory. Memory can be page-locked, so that a device reads
it in place. Locking takes milliseconds, so memory stays locked while it is mapped.
"""

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np


class Slot(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array of bytes that lives as long as any array or tensor over it.

    A plain array might not live as long, because numpy lets a view of a view refer
    directly to the lowest array of the same type.
    """


# Maps a size in bytes to a writable buffer, which lives as long as its references.
Allocator: TypeAlias = Callable[[int], Any]
# Page-locks memory for a device, given its address and size, from any thread. Returns a
# function that unlocks the memory, safe in finalizers; None if locking failed.
Locker: TypeAlias = Callable[[int, int], Callable[[], object] | None]
# The C library recycles smaller buffers well enough by itself.
MIN_BYTES = 1 << 18
# The most free mappings per size: the first number, or the second in bytes if that is
# more, because dozens of small batches may be in flight. The third is for all sizes.
_MAX_FREE = 8
_MAX_FREE_BYTES_PER_SIZE = 1 << 25
_MAX_FREE_BYTES = 1 << 28
# A forked child gets a copy of the memory.
_PRIVATE: dict[str, Any] = {}
if hasattr(mmap, "MAP_PRIVATE"):
    _PRIVATE["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class LockableMap(mmap.mmap):
    """A memory mapping in which ranges of pages can be page-locked."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self._unlocks: dict[int, Callable[[], object]] = {}

    def lock(self, locker: Locker, start: int, nbytes: int) -> bool:
        """Page-lock ``nbytes`` from ``start`` on; return whether that succeeded."""
        address = np.frombuffer(self, np.uint8, 1, start).ctypes.data
        unlock = locker(address, nbytes)
        if unlock is not None:
            self._unlocks[start] = unlock
        return unlock is not None

    def unlock(self, start: int) -> None:
        self._unlocks.pop(start)()

    # Unlock before unmapping: a device's driver identifies memory by its address. A
    # weak reference's callback would come too late.
    def __del__(self) -> None:
        for unlock in self._unlocks.values():
            unlock()


@dataclass(eq=False, repr=False)
class SlotPool:
    """Recycled memory in size classes, so that batches of similar size share it."""

    locker: Locker | None = None  # page-locks new mappings, if set
    _free: dict[int, deque[LockableMap]] = field(default_factory=dict, init=False)

    def allocate(self, nbytes: int) -> Slot:
        """Return ``nbytes`` of page-aligned memory, not zeroed, for one batch.

        The memory is in use while the slot, or any array, tensor or ``memoryview`` over
        it, is alive.
        """
        size = rounded(nbytes)
        free = self._free.get(size)
        if free is None:
            # A deque drops from its other end when it is full, without a lock.
            free = self._free[size] = deque(
                maxlen=max(_MAX_FREE, _MAX_FREE_BYTES_PER_SIZE // size)
            )
        try:
            memory = free.pop()
        except IndexError:
            self._drop_surplus()
            memory = LockableMap(-1, size, **_PRIVATE)
            if self.locker is not None:
                memory.lock(self.locker, 0, size)
        slot = Slot((nbytes,), np.uint8, memory)
        # Late finalizers keep the free list alive after the pool.
        weakref.finalize(slot, free.append, memory).atexit = False
        return slot

    def _drop_surplus(self) -> None:
        """Unmap free memory above ``_MAX_FREE_BYTES``, from the oldest sizes first."""
        sizes = list(self._free.items())  # other threads add to it
        surplus = sum(size * len(free) for size, free in sizes) - _MAX_FREE_BYTES
        for size, free in sizes:
            with contextlib.suppress(IndexError):  # another thread took the last one
                while surplus > 0:
                    free.popleft()
                    surplus -= size


def rounded(nbytes: int) -> int:
    """Round up to a multiple of a page or, if larger, 1/8 of the next power of two."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
