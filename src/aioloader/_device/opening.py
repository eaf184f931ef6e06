"""A loader's devices: opened by its first iteration, and kept."""

from dataclasses import dataclass
from typing import Any

import torch

from aioloader._device.accelerator import Accelerator, accelerator_of
from aioloader._device.mover import Mover
from aioloader._device.naming import Keys, Transform
from aioloader._device.stage import Carrier, Staged
from aioloader._observe.records import Copies
from aioloader._pipeline.ready import ReadyQueue
from aioloader._transport.slots import Locker


@dataclass(frozen=True)
class DeviceSide:
    """The carrier of batches, and the locker of the memory they are written to.

    Attributes:
        carrier: Moves batches.
        locker: For the slots of arenas and pools; None if memory cannot be locked.
        depth: How many batches are moved ahead.
    """

    carrier: Carrier
    locker: Locker | None
    depth: int

    def stage(self, ready: ReadyQueue, epoch: int, copies: Copies) -> Staged:
        """Return the stage of one iteration."""
        return Staged(ready, self.carrier, self.depth, epoch, copies)


class Devices:
    """The devices that a loader has moved batches to; usually one."""

    def __init__(self) -> None:
        self._opened: dict[torch.device, tuple[Accelerator, Locker | None]] = {}

    def open(
        self,
        device: torch.device,
        depth: int,
        keys: Keys | None = None,
        transform: Transform | None = None,
    ) -> DeviceSide:
        """Return the device side for ``device``.

        Without an index, it is this thread's current device of that kind.
        """
        device = _indexed(device)
        if device not in self._opened:
            port = accelerator_of(device)
            self._opened[device] = port, port.locker()
        port, locker = self._opened[device]
        return DeviceSide(Mover(port, keys, transform), locker, depth)


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    module: Any = torch.get_device_module(device)
    # Do not initialise it for this: that takes long, and may be on an event loop.
    is_begun = getattr(module, "is_initialized", module.is_available)()
    current = getattr(module, "current_device", None)  # not of MPS, which has one
    return torch.device(device.type, current() if current and is_begun else 0)
