"""The calls on streams, events and device memory; nothing else makes them.

One copy stream per loader. A copy is queued there and followed by an event; the
consumer's own stream waits for the event on the device, and the allocator records that
it uses the memory. No call here blocks, except ``Mark.synchronize`` and copies to a
device without streams.
"""

import ctypes
import logging
import threading
from collections.abc import Iterable
from typing import Any, Final, Protocol

import torch

from aioloader._device.locking import PageLocker
from aioloader._order.forks import fork_safe
from aioloader._transport.slots import Locker

_CAPTURE_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_LOG = logging.getLogger("aioloader")


class Mark(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached it."""


class Port(Protocol):
    """The stage's view of a device.

    Attributes:
        device: The device, with its index.
        is_async: Whether copies run while this thread does other work.
    """

    device: torch.device
    is_async: bool

    def enter_thread(self) -> None:
        """Prepare this thread, the stage's own, for copies to the device."""

    def is_locked(self, host: torch.Tensor) -> bool:
        """Tell whether a tensor is in page-locked memory."""

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory for a copy of ``like``; recycled when free.

        It has the strides of ``like`` if these are dense.
        """

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Start copying page-locked memory to the device."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Block until tensors of other streams are ready; use them in this one."""

    def mark(self) -> Mark:
        """Mark the end of the work queued on this thread's current stream."""

    def hand_over(self, mark: Mark, tensors: Iterable[Any]) -> Mark:
        """Make the consumer's stream wait for ``mark`` and use ``tensors``.

        Args:
            mark: The end of the copies.
            tensors: The copies; when they are dropped, their memory is not reused
                before the consumer's kernels that were queued by then have ended.

        Returns:
            A mark on the consumer's stream.
        """


class _Reached:
    """The mark of a copy that has ended."""

    def synchronize(self) -> None:
        """Return at once."""


class Accelerator:
    """A device used through ``torch.accelerator``: XPU, MPS, any PrivateUse1.

    If it has no streams (MPS), or its package lacks a call needed here, each copy
    blocks the stage's thread; batches are still moved ahead of the step.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = False  # until ``enter_thread``
        self._lock = fork_safe(threading.Lock())
        self._stream: Any = None  # made in the stage's thread: may take seconds

    def locker(self) -> Locker | None:
        """Return the locker of host memory for the device, or None."""
        return None

    def enter_thread(self) -> None:
        """Make the copy stream current in this thread."""
        torch.set_num_threads(1)  # only for this thread, as torch's pinning does
        with self._lock:
            if self._stream is None:
                self._stream = self._new_stream()
                self.is_async = self._stream is not None
        if self.is_async:
            self._set_stream(self._stream)

    def is_locked(self, host: torch.Tensor) -> bool:
        """Tell whether a tensor need not be staged: the user may have locked it."""
        return not self.is_async or host.is_pinned()

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory from torch's own pool."""
        # The pool is notified of each copy from its memory.
        return torch.empty_like(like, device="cpu", pin_memory=self.is_async)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy page-locked memory to the device."""
        return host.to(self.device, non_blocking=self.is_async)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Block until tensors of other streams are made; use them in this one."""
        self._synchronize()
        for tensor in tensors if self.is_async else ():
            tensor.record_stream(self._current_stream())

    def mark(self) -> Mark:
        """Mark the stream that is current in this thread."""
        if not self.is_async:
            return _Reached()
        mark = self._new_event()
        mark.record(self._current_stream())
        found: Mark = mark
        return found

    def hand_over(self, mark: Mark, tensors: Iterable[Any]) -> Mark:
        """Hand over to this thread's current stream; mark it.

        Raises:
            RuntimeError: If a graph is being captured: a copy that is already queued
                cannot become part of it.
        """
        if not self.is_async:
            return mark
        stream = self._current_stream()
        if self._is_capturing(stream):
            raise RuntimeError(
                "a batch cannot be taken from the loader while a graph is being "
                "captured: take it before and copy it into the graph's static inputs"
            )
        stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(stream)
        return self.mark()

    # -- overridden for CUDA ------------------------------------------------------

    def _new_stream(self) -> Any:
        """Return a stream; None if copies must block."""
        found = torch.accelerator.current_accelerator()
        if found is None or found.type != self.device.type:
            _LOG.info("copies to %s block: the accelerator is %s", self.device, found)
            return None
        try:
            stream: Any = torch.Stream(device=self.device)
            self._set_stream(stream)
            torch.empty(1, device=self.device).record_stream(stream)
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:  # torch raises it for a missing call
            _LOG.info("copies to %s block: %s", self.device, error)
            return None
        return stream

    def _set_stream(self, stream: Any) -> None:
        torch.accelerator.set_stream(stream)  # and its device

    def _current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _new_event(self) -> Any:
        return torch.Event(device=self.device)

    def _synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def _is_capturing(self, stream: Any) -> bool:
        is_capturing = getattr(stream, "is_capturing", None)  # not in older versions
        return is_capturing is not None and bool(is_capturing())


class CudaAccelerator(Accelerator):
    """A CUDA (or ROCm) device, even if the process has another current accelerator.

    Waiting threads sleep, memory is page-locked in place, and copies continue while a
    graph is captured elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = torch.get_device_module(device)

    def locker(self) -> Locker | None:
        """Return a locker that uses the CUDA runtime."""
        return PageLocker(self.device)

    def enter_thread(self) -> None:
        """Prepare the thread; its allocations must not end captures elsewhere.

        By torch's default they would.
        """
        super().enter_thread()
        if self.device.type == "cuda" and torch.version.cuda:
            mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _new_stream(self) -> Any:
        self._module.set_device(self.device)
        return self._module.Stream(device=self.device)

    def _set_stream(self, stream: Any) -> None:
        self._module.set_device(self.device)
        self._module.set_stream(stream)

    def _current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def _new_event(self) -> Any:
        return self._module.Event(blocking=True)

    def _synchronize(self) -> None:
        self._module.synchronize(self.device)

    def _is_capturing(self, stream: Any) -> bool:  # noqa: ARG002
        return bool(self._module.is_current_stream_capturing())


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the port of a device that has an index."""
    return CudaAccelerator(device) if device.type == "cuda" else Accelerator(device)
