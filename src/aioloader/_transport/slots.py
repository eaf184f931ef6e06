"""Recycled memory for batches: a slot goes back when the last view of it dies.

Fresh memory costs a page fault for every 4 KB, two to three times the copy into it. So
a pool keeps the mappings of batches that were dropped, and hands them out again. A
consumer that keeps its batches gets fresh memory: nothing stalls, nothing is shared.
"""

import mmap
import weakref
from collections import deque
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Slot: TypeAlias = npt.NDArray[np.uint8]

# Below this the allocator of the C library recycles well enough by itself.
MIN_BYTES = 1 << 18
# Free mappings kept per size, in number and in bytes (but two in any case): more are
# free only after a consumer let go of many.
_MOST_FREE = 8
_MOST_FREE_BYTES = 1 << 28


class SlotPool:
    """Lease memory by size, in steps of an eighth, so that varying batches share."""

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}

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
        size = _rounded(nbytes)
        free = self._free.get(size)
        if free is None:
            most = max(2, min(_MOST_FREE, _MOST_FREE_BYTES // size))
            # A deque drops from its other end when it is full, without a lock.
            free = self._free[size] = deque(maxlen=most)
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
        slot = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
        # The free list outlives the pool in late finalizers, and then dies with them.
        weakref.finalize(slot, free.append, memory).atexit = False
        return slot


def _rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a page, or an eighth of its power of two."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
