"""Page-locking of the memory that batches are written to, by the CUDA runtime.

The device copies directly from a locked slot: no thread copies it to other memory
first. Each slot is locked once. If locking is refused (by a limit, in a container),
batches are staged, and this is logged once.
"""

import contextlib
import logging
import os
import sys
import threading
from typing import Any

import torch

from aioloader._order.forks import fork_safe

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
_LOG = logging.getLogger("aioloader")


class PageLocker:
    """Lock memory by the CUDA runtime.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._pid = os.getpid()
        self._lock = fork_safe(threading.Lock())
        self._is_refused = False

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock whole pages; return whether they are locked."""
        if self._is_refused:
            return False
        with self._module.device(self._device):
            runtime = self._module.cudart()
            status = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
            if int(status) == 0:
                return True
            self._give_up(nbytes, runtime.cudaGetErrorString(status))
        return False

    def unlock(self, address: int) -> None:
        """Unlock memory; does nothing in a forked child, which has no locks."""
        if os.getpid() == self._pid and not sys.is_finalizing():
            with self._module.device(self._device):
                self._module.cudart().cudaHostUnregister(address)

    def _give_up(self, nbytes: int, reason: str) -> None:
        with self._lock:
            was_refused, self._is_refused = self._is_refused, True
        if not was_refused:
            _LOG.warning(
                "page-locking %s bytes for %s was refused (%s): batches are copied "
                "through staging memory",
                f"{nbytes:,}",
                self._device,
                reason,
            )
        # Clear the error, or the runtime would report it to an unrelated call.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
