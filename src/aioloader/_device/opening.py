"""What one loader has of a device: opened with its first iteration, and kept."""

from dataclasses import dataclass

import torch

from aioloader._device.accelerator import Accelerator
from aioloader._device.locking import PageLocker
from aioloader._device.mover import Mover, Pinner
from aioloader._device.stage import Carrier, Staged
from aioloader._pipeline.ready import ReadyQueue
from aioloader._transport.slots import Locker


@dataclass(frozen=True)
class DeviceSide:
    """How batches are moved, and what page-locks the memory they are written into.

    Attributes:
        carrier: Moves batches.
        locker: For the slots of arenas and pools; None where memory cannot be locked.
        depth: Batches that are moved ahead.
    """

    carrier: Carrier
    locker: Locker | None
    depth: int

    def stage(self, ready: ReadyQueue, epoch: int) -> Staged:
        """Return the stage of one iteration."""
        return Staged(ready, self.carrier, self.depth, epoch)


class Devices:
    """The devices that a loader has moved batches to; usually one."""

    def __init__(self) -> None:
        self._opened: dict[torch.device | None, DeviceSide] = {}

    def open(self, device: torch.device | None, depth: int) -> DeviceSide:
        """Return what moves batches to ``device``; None: to page-locked memory.

        Without an index it is the current device of its kind in this thread.
        """
        if device is not None:
            device = _indexed(device)
        side = self._opened.get(device)
        if side is None or side.depth != depth:
            side = self._opened[device] = _open(device, depth)
        return side


def _open(device: torch.device | None, depth: int) -> DeviceSide:
    if device is not None:
        return DeviceSide(Mover(Accelerator(device)), _locker(device), depth)
    return DeviceSide(Pinner(), None, depth)


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    module = torch.get_device_module(device)
    # Not to be initialised for this, which takes long, on an event loop perhaps.
    index = module.current_device() if module.is_initialized() else 0
    return torch.device(device.type, index)


def _locker(device: torch.device) -> Locker | None:
    return PageLocker(device) if device.type == "cuda" else None
