"""The calls on streams, events and device memory; nothing else makes them.

One copy stream per loader. A copy is begun there and marked by an event; the consumer's
own stream waits for the event, on the device, and the allocator records that it uses
the memory. No call here waits, but ``Mark.synchronize``.
"""

import ctypes
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from aioloader._order.forks import fork_safe

_CAPTURE_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Mark(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block this thread until the device has come to it."""


class Port(Protocol):
    """A device, as the stage sees it."""

    device: torch.device

    def enter_thread(self) -> None:
        """Make this thread, which is the stage's own, one that tasks for the device."""

    def copying(self) -> AbstractContextManager[object]:
        """Return what is entered while copies are begun: they go to the copy stream."""

    def is_locked(self, host: torch.Tensor) -> bool:
        """Tell whether a tensor is in page-locked memory."""

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory for a copy of ``like``; recycled when it is free.

        Its strides are those of ``like``, if these fill a block.
        """

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy page-locked memory to the device."""

    def mark(self) -> Mark:
        """Mark what was begun on the stream that is current in this thread."""

    def hand_over(self, mark: Mark, tensors: Iterable[Any]) -> Mark:
        """Have the consumer's stream wait for ``mark``, and own ``tensors`` as well.

        Args:
            mark: Where the copies end.
            tensors: What was copied; their memory is not given to another copy before
                the consumer's kernels that were queued before they died have ended.

        Returns:
            Where the consumer's stream is.
        """


class Accelerator:
    """A CUDA (or ROCm, or XPU) device.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._lock = fork_safe(threading.Lock())
        self._stream: Any = None  # made in the stage's thread: that may take seconds
        # A thread that waits for the device sleeps, where that can be had.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}

    def enter_thread(self) -> None:
        """Make the device current, and one thread enough.

        While a graph is captured elsewhere, this thread's allocations are no part of
        it: torch's default would have them end the capture.
        """
        self._module.set_device(self.device)
        torch.set_num_threads(1)  # of this thread alone, as torch's own pinning does
        if self.device.type == "cuda" and torch.version.cuda:
            mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        with self._lock:
            if self._stream is None:
                self._stream = self._module.Stream(device=self.device)

    def copying(self) -> AbstractContextManager[object]:
        """Make the copy stream current in this thread."""
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context

    def is_locked(self, host: torch.Tensor) -> bool:
        """Tell whether a tensor is in page-locked memory, whatever locked it."""
        return host.is_pinned()

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory from torch's own pool."""
        # The pool is notified of each copy that begins from its memory.
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy page-locked memory to the device."""
        return host.to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        """Mark the stream that is current in this thread."""
        mark = self._module.Event(**self._event_options)
        mark.record(self._module.current_stream(self.device))
        found: Mark = mark
        return found

    def hand_over(self, mark: Mark, tensors: Iterable[Any]) -> Mark:
        """Hand over to the stream that is current in this thread; mark it.

        Raises:
            RuntimeError: If a graph is being captured, of which a copy that has begun
                cannot become a part.
        """
        stream = self._module.current_stream(self.device)
        if self.device.type == "cuda" and self._module.is_current_stream_capturing():
            raise RuntimeError(
                "a batch cannot be taken from the loader while a CUDA graph is being "
                "captured: take it before, and copy it into the graph's own inputs"
            )
        stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(stream)
        return self.mark()


def accelerator_for(device: Any) -> torch.device | None:
    """Return the device that batches are to be moved to; None for the host's memory.

    Raises:
        TypeError: If ``device`` names none.
        ValueError: If torch does not see it here, or it has no streams.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"device must name a torch device, got {device!r}") from error
    if found.type == "cpu":
        return None
    if found.type not in {"cuda", "xpu"}:
        raise ValueError(
            f"device={str(found)!r}: batches can be moved ahead to 'cuda' and 'xpu' "
            "devices, which have streams; leave device out and move each batch by its "
            "own .to()"
        )
    module = torch.get_device_module(found)
    count = module.device_count() if module.is_available() else 0
    if (found.index or 0) >= count:
        raise ValueError(
            f"device={str(found)!r}: torch sees {count} {found.type} devices here; "
            "pass device='cpu', or leave it out, to keep batches in the host's memory"
        )
    return found
