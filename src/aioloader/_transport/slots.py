"""Recycled memory for batches: a slot goes back when the last view of it dies.

Fresh memory costs a page fault for every 4 KB, two to three times the copy into it. So
a pool keeps the mappings of batches that were dropped, and hands them out again. A
consumer that keeps its batches gets fresh memory: nothing stalls, nothing is shared.

Memory can be page-locked, so that a device reads it in place. Locking takes
milliseconds, so memory stays locked until its mapping is gone. It is unlocked before it
is unmapped: a device's driver knows memory by its address.
"""

import mmap
import weakref
from collections import deque
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Slot: TypeAlias = npt.NDArray[np.uint8]

# Below this the allocator of the C library recycles well enough by itself.
MIN_BYTES = 1 << 18
# Free mappings kept per size, and bytes of them in all: more are only free after a
# consumer dropped many.
_MOST_FREE = 8
_MOST_FREE_BYTES = 1 << 28


class Locker(Protocol):
    """What page-locks memory for a device; from any thread."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock whole pages; tell whether that was granted."""

    def unlock(self, address: int) -> None:
        """Unlock what was locked from ``address`` on; from finalizers too."""


class LockableMap(mmap.mmap):
    """A mapping, parts of which can be page-locked."""

    def lock(self, locker: Locker, start: int, nbytes: int) -> bool:
        """Lock the pages from ``start`` on; tell whether they are locked."""
        address = np.frombuffer(self, np.uint8, 1, start).ctypes.data
        if not locker.lock(address, nbytes):
            return False
        self._locked()[start] = locker, address
        return True

    def unlock(self, start: int) -> None:
        """Unlock what was locked from ``start`` on."""
        locker, address = self._locked().pop(start)
        locker.unlock(address)

    def _locked(self) -> dict[int, tuple[Locker, int]]:
        locked: dict[int, tuple[Locker, int]] = self.__dict__.setdefault("parts", {})
        return locked

    def __del__(self) -> None:
        for start in list(self._locked()):
            self.unlock(start)


class Lender(Protocol):
    """What a batch can be written into."""

    def lease(self, nbytes: int) -> Any:
        """Return a writable buffer of ``nbytes``, owned by the code that holds it."""
        ...


class SlotPool:
    """Lease memory by size, in steps of an eighth, so that varying batches share."""

    def __init__(self) -> None:
        self._free: dict[int, deque[LockableMap]] = {}
        # Page-locks what is mapped from now on, if set.
        self.locker: Locker | None = None

    def lease(self, nbytes: int) -> Slot:
        """Return memory for one batch.

        Whoever holds the array, or a ``torch.frombuffer`` of it, owns the memory; what
        is derived from that tensor keeps it. A numpy view of the array alone does not.
        Nothing is zeroed.

        Args:
            nbytes: Size wanted, in bytes; at least 1.

        Returns:
            An array of shape ``(nbytes,)``, dtype uint8, aligned to a page.
        """
        size = rounded(nbytes)
        free = self._free.get(size)
        if free is None:
            # A deque drops from its other end when it is full, without a lock.
            free = self._free[size] = deque(maxlen=_MOST_FREE)
        try:
            memory = free.pop()
        except IndexError:
            self._drop_surplus()
            memory = _map(size)
            if self.locker is not None:
                memory.lock(self.locker, 0, size)
        slot = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
        # The free list outlives the pool in late finalizers, and then dies with them.
        weakref.finalize(slot, free.append, memory).atexit = False
        return slot

    def _drop_surplus(self) -> None:
        """Give free memory above the bound back, first that of the oldest sizes."""
        surplus = sum(size * len(free) for size, free in self._free.items())
        surplus -= _MOST_FREE_BYTES
        for size, free in self._free.items():
            while free and surplus > 0:
                free.popleft()
                surplus -= size


def _map(size: int) -> LockableMap:
    """Return fresh memory that a forked child gets a copy of, and does not share."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return LockableMap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return LockableMap(-1, size)


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a page, or an eighth of its power of two."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
