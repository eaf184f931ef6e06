"""A device in host memory that copies as late as it may, and logs its calls.

Copies begin in order and are carried out when something waits for them, from the bytes
that are then at the address. So a slot that is given back too early, or a batch that is
handed over without a wait, has wrong values.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aioloader import Device
from aioloader._device.accelerator import Accelerator
from aioloader._transport.slots import Locker

if TYPE_CHECKING:
    from aioloader import DataLoader


class Mark:
    """The number of copies that had begun."""

    def __init__(self, port: "LatePort", number: int) -> None:
        self.port = port
        self.number = number

    def synchronize(self) -> None:
        """Carry the copies out."""
        self.port.carry_out(self.number, "synchronize")


class LatePort(Accelerator):
    """A device in the host's memory.

    Attributes:
        log: The calls, in order.
        locked: Sizes of page-locked ranges, by address.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_async = True
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self._copies: list[tuple[torch.Tensor, int]] = []
        self._done = 0
        self._stagings: list[torch.Tensor] = []

    def locker(self) -> Locker:
        return self._lock_pages

    def enter_thread(self) -> None:
        """Do nothing: all threads are alike."""

    def is_locked(self, host: torch.Tensor) -> bool:
        """Return whether the tensor is in a page-locked range."""
        return any(
            start <= host.data_ptr() and host.data_ptr() + host.nbytes <= start + size
            for start, size in self.locked.items()
        )

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory that is never given back."""
        staging = torch.empty_like(like, device="cpu")
        self._stagings.append(staging)
        self.log.append(f"stage {staging.nbytes}")
        return staging

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Begin a copy from an address, not from an object, which would stay alive."""
        copy = torch.full_like(host, 1)
        assert copy.stride() == host.stride()
        with self._lock:
            self._copies.append((copy, host.data_ptr()))
        self.log.append(f"copy {host.nbytes}")
        return copy

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the tensors are in host memory."""

    def mark(self) -> Any:
        """Return the number of copies so far."""
        return Mark(self, len(self._copies))

    def hand_over(self, mark: Any, tensors: Iterable[Any]) -> Any:
        """Carry out the copies of a batch."""
        names = " ".join(str(getattr(each, "nbytes", "own")) for each in tensors)
        self.carry_out(mark.number, f"hand over {names}")
        return Mark(self, 0)

    # -- as a locker --------------------------------------------------------------

    def _lock_pages(self, address: int, nbytes: int) -> Callable[[], object]:
        """Lock whole pages that are not locked."""
        assert not address % 4096
        assert not nbytes % 4096
        assert address not in self.locked
        self.locked[address] = nbytes
        return partial(self.locked.pop, address)

    def carry_out(self, number: int, why: str) -> None:
        """Copy what began before a mark."""
        with self._lock:
            while self._done < number:
                copy, address = self._copies[self._done]
                if copy.nbytes:
                    ctypes.memmove(copy.data_ptr(), address, copy.nbytes)
                self._copies[self._done] = copy.new_empty(0), 0
                self._done += 1
            self.log.append(why)


def on(port: LatePort, loader: "DataLoader[Any]", depth: int = 1) -> "DataLoader[Any]":
    """Have ``loader`` deliver its batches by ``port``."""
    device = torch.device("cuda", 0)
    loader.device = Device(device, ahead=depth)
    loader._live.accelerators[device] = port
    return loader
