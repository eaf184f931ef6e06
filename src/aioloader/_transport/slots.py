"""Recycled memory for batches: a slot is free again when its last view is dropped.

Fresh memory costs a page fault for every 4 KB, two to three times the copy into it. So
a pool keeps the mappings of dropped batches and reuses them. A consumer that keeps its
batches gets fresh memory: nothing stalls, nothing is shared.

Memory can be page-locked, so that a device reads it in place. Locking takes
milliseconds, so memory stays locked as long as its mapping. It is unlocked before it is
unmapped, because a device's driver identifies memory by address.
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
    """Bytes that live as long as an array or a tensor over them.

    A type of its own: a view refers to the last array of its own type, and so would
    keep the mapping instead of the slot.
    """


# Returns a writable buffer of so many bytes, owned by the code that holds it.
Allocator: TypeAlias = Callable[[int], Any]
# Page-locks whole pages for a device: from an address on, so many bytes, in any thread.
# Returns what unlocks them, which is safe in finalizers; None if they are not locked.
Locker: TypeAlias = Callable[[int, int], Callable[[], object] | None]
# Below this the allocator of the C library recycles well enough by itself.
MIN_BYTES = 1 << 18
# Free mappings kept per size: 8, or so many bytes, as dozens of small batches may be
# ahead; and bytes in total: more are free only after a consumer dropped many batches.
_MOST_FREE = 8
_MOST_SMALL_BYTES = 1 << 25
_MOST_FREE_BYTES = 1 << 28
# A forked child gets a copy.
_PRIVATE: dict[str, Any] = {}
if hasattr(mmap, "MAP_PRIVATE"):
    _PRIVATE["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class LockableMap(mmap.mmap):
    """A mapping whose parts can be page-locked."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self._unlocks: dict[int, Callable[[], object]] = {}

    def lock(self, locker: Locker, start: int, nbytes: int) -> bool:
        """Lock the pages from ``start`` on; return whether they are locked."""
        address = np.frombuffer(self, np.uint8, 1, start).ctypes.data
        unlock = locker(address, nbytes)
        if unlock is not None:
            self._unlocks[start] = unlock
        return unlock is not None

    def unlock(self, start: int) -> None:
        self._unlocks.pop(start)()

    def __del__(self) -> None:  # a weak reference's callback would come too late
        for unlock in self._unlocks.values():
            unlock()


@dataclass(eq=False, repr=False)
class SlotPool:
    """Lease memory by size, in steps of an eighth, so that batch sizes may vary."""

    locker: Locker | None = None  # page-locks what is mapped from now on, if set
    _free: dict[int, deque[LockableMap]] = field(default_factory=dict, init=False)

    def lease(self, nbytes: int) -> Slot:
        """Return memory for one batch.

        The holder of the slot, or of an ``np.ndarray(shape, dtype, slot)`` or a
        ``torch.frombuffer`` of it, owns the memory; views of these keep it alive, but
        not slices of the slot. Nothing is zeroed.

        Args:
            nbytes: Size wanted, in bytes; at least 1.

        Returns:
            An array of shape ``(nbytes,)``, dtype uint8, aligned to a page.
        """
        size = rounded(nbytes)
        free = self._free.get(size)
        if free is None:
            # A deque drops from its other end when it is full, without a lock.
            free = self._free[size] = deque(
                maxlen=max(_MOST_FREE, _MOST_SMALL_BYTES // size)
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
        """Release free memory above the bound, the oldest sizes first."""
        sizes = list(self._free.items())  # other threads add to it
        surplus = sum(size * len(free) for size, free in sizes) - _MOST_FREE_BYTES
        for size, free in sizes:
            with contextlib.suppress(IndexError):  # another thread took the last one
                while surplus > 0:
                    free.popleft()
                    surplus -= size


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a page, or an eighth of its power of two."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
