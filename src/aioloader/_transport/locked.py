"""Mapped memory that can be page-locked, so that a device reads it in place.

Locking takes milliseconds, so what is locked stays so until its mapping is gone: it is
unlocked before it is unmapped, for a device's driver knows memory by its address.
"""

import mmap
from typing import Protocol

import numpy as np


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
