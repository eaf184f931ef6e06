"""Page-locking of the memory that batches are written into, by the CUDA runtime.

A slot that is locked is the source of the copy to the device: no thread copies it to
other memory first. Locking is asked for once per slot. Where it is refused (by a limit,
in a container), batches are staged, and one line in the log says so.
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
        """Lock whole pages; tell whether that was granted."""
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
        """Unlock what was locked; nothing is left to unlock in a forked child."""
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
        # The runtime would report the refusal again, to an innocent call.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
