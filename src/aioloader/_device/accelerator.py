"""The device stage's calls on streams, events and page-locked memory.

A loader has one copy stream per device. Copies are queued there, followed by an event.
The consumer's current stream waits for the event on the device, and the allocator
records that this stream uses the memory. ``adopt``, and copies to a device without
streams, block the calling thread.
"""

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch

from aioloader._base.forks import fork_safe
from aioloader._transport.slots import Locker

_CAPTURE_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every context of the process
_LOG = logging.getLogger("aioloader")


class Accelerator:
    """An accelerator used through ``torch.accelerator``, such as XPU or MPS.

    Copies block the stage's thread if the device is not of the current accelerator's
    type, or lacks streams (like MPS) or a needed call. They still precede the step.
    """

    _module: Any = torch.accelerator

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = False  # until ``enter_thread`` finds streams
        self._lock = fork_safe(threading.Lock())
        self._stream: Any = None  # created in the stage's thread: may take seconds

    def locker(self) -> Locker | None:
        """Return None: only ``CudaAccelerator`` page-locks host memory in place."""
        return None

    def enter_thread(self) -> None:
        """Make the copy stream, if any, current in the calling thread (the stage's)."""
        torch.set_num_threads(1)  # of this thread only, as torch's pinning does
        with self._lock:
            if self._stream is None:
                self._stream = self._new_stream()
                self.is_async = self._stream is not None
        if self.is_async:
            self._module.set_stream(self._stream)  # and its device

    def is_locked(self, host: torch.Tensor) -> bool:
        """Tell whether ``host`` can be copied without staging memory."""
        return not self.is_async or host.is_pinned()

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor in host memory, page-locked if copies are async."""
        return torch.empty_like(like, device="cpu", pin_memory=self.is_async)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device, non_blocking=self.is_async)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Block until ``tensors`` are computed; record their use by the copy stream."""
        self._module.synchronize(self.device)
        for tensor in tensors if self.is_async else ():
            tensor.record_stream(self._module.current_stream(self.device))

    def mark(self) -> torch.Event | None:
        """Return an event recorded on this thread's stream; None without streams."""
        if not self.is_async:
            return None
        mark: torch.Event = self._new_event()
        mark.record(self._module.current_stream(self.device))
        return mark

    def hand_over(
        self, mark: torch.Event | None, tensors: Iterable[Any]
    ) -> torch.Event | None:
        """Make the consumer's stream wait for ``mark``; return an event on that stream.

        The consumer's stream is this thread's current stream. The memory of ``tensors``
        (the copies) is not reused before the consumer's queued kernels have run.
        Without ``mark``, do nothing and return None.

        Raises:
            RuntimeError: If a graph is being captured: a queued copy cannot join it.
        """
        if mark is None:
            return None
        stream = self._module.current_stream(self.device)
        if self._is_capturing(stream):
            raise RuntimeError(
                "a batch cannot be taken from the loader while a graph is being "
                "captured: take it before and copy it into the graph's static inputs"
            )
        stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(stream)
        return self.mark()

    def _new_stream(self) -> Any:
        """Return a new stream for copies; None if copies must block."""
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != self.device.type:
            _LOG.info("copies to %s block: the accelerator is %s", self.device, current)
            return None
        try:
            stream: Any = torch.Stream(device=self.device)
            torch.accelerator.set_stream(stream)
            torch.empty(1, device=self.device).record_stream(stream)
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:  # raised if a call is not implemented
            _LOG.info("copies to %s block: %s", self.device, error)
            return None
        return stream

    def _new_event(self) -> Any:
        return torch.Event(device=self.device)

    def _is_capturing(self, stream: Any) -> bool:
        is_capturing = getattr(stream, "is_capturing", None)  # not in older versions
        return is_capturing is not None and bool(is_capturing())


class CudaAccelerator(Accelerator):
    """A CUDA or ROCm device, which need not be the current accelerator.

    Threads that wait for an event sleep. Copies continue while another thread captures
    a graph. The slots that batches are written to are page-locked in place, each once,
    so that the device copies from them directly. If locking is refused, for example by
    a container's limit, batches are staged, and one warning is logged.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self._pid = os.getpid()
        self._is_refused = False

    def enter_thread(self) -> None:
        """Make the copy stream current, and keep graph captures of other threads valid.

        By default an allocation in this thread would invalidate them.
        """
        self._module.set_device(self.device)
        super().enter_thread()
        if self.device.type == "cuda" and torch.version.cuda:
            mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def locker(self) -> Locker | None:
        return self._lock_pages

    def _lock_pages(self, address: int, nbytes: int) -> Callable[[], object] | None:
        if self._is_refused:
            return None
        with self._module.device(self.device):
            runtime = self._module.cudart()
            status = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
            if int(status) == 0:
                return partial(self._unlock, address)
            with self._lock:
                was_refused, self._is_refused = self._is_refused, True
            if not was_refused:
                _LOG.warning(
                    "page-locking %s bytes for %s was refused (%s): batches are copied "
                    "through staging memory",
                    f"{nbytes:,}",
                    self.device,
                    runtime.cudaGetErrorString(status),
                )
            # Clear the error, which an unrelated call would otherwise raise.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return None

    def _unlock(self, address: int) -> None:
        """Unlock memory, but not in a forked child (none is locked) or at exit."""
        if os.getpid() == self._pid and not sys.is_finalizing():
            with self._module.device(self.device):
                self._module.cudart().cudaHostUnregister(address)

    def _new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def _new_event(self) -> Any:
        return self._module.Event(blocking=True)

    def _is_capturing(self, stream: Any) -> bool:  # noqa: ARG002
        return bool(self._module.is_current_stream_capturing())


def accelerator_of(
    device: torch.device, opened: dict[torch.device, Accelerator]
) -> Accelerator:
    """Return the accelerator for ``device`` from ``opened``; add it if it is missing.

    A missing index becomes that of this thread's current device, or 0 without one.
    """
    if device.index is None:
        module: Any = torch.get_device_module(device)
        # Do not initialise the module here: that takes long, perhaps on an event loop.
        is_begun = getattr(module, "is_initialized", module.is_available)()
        current = getattr(module, "current_device", None)  # MPS has none
        device = torch.device(device.type, current() if current and is_begun else 0)
    if device not in opened:
        is_cuda = device.type == "cuda"
        opened[device] = CudaAccelerator(device) if is_cuda else Accelerator(device)
    return opened[device]
