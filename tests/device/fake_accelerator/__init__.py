"""An accelerator that torch takes for a real one: PrivateUse1, by the name ``fake``.

Its streams are threads that begin each job late, its memory cannot be read by the host
and is overwritten when it is freed, and nothing but ``record_stream`` and events keeps
it from being used again. See ``runtime.h``. A process that has begun it has another
current accelerator: tests run it in processes of their own.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

HERE = Path(__file__).parent
SOURCES = [HERE / "fake.cpp", HERE / "runtime.h"]
# A virtual environment that is not active has its ninja all the same.
PATHS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
CYCLES = 2000  # of ``_sleep``, in a microsecond


def missing() -> str:
    """Return what is missing to build it, or an empty text."""
    tools = ("g++", "ninja")
    lacking = [name for name in tools if shutil.which(name, path=PATHS) is None]
    return f"the fake accelerator needs {' and '.join(lacking)}" if lacking else ""


def build() -> Path:
    """Return the library; the first process that asks builds it, the others wait."""
    content = "".join(source.read_text() for source in SOURCES)
    version = f"{torch.__version__} {sys.version_info[:2]} {content}"
    name = hashlib.sha256(version.encode()).hexdigest()[:16]
    folder = HERE.parents[2] / "build" / "fake_accelerator" / name
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "fake.so"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            os.environ["PATH"] = PATHS
            (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that died
            cpp_extension.load(
                "fake",
                [str(HERE / "fake.cpp")],
                extra_cflags=["-O2"],
                build_directory=str(folder),
                is_python_module=False,
            )
    return library


@functools.cache
def begin() -> Any:
    """Register the device with torch; return ``torch.fake``."""
    path = build()
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    module: Any = Fake("torch.fake", ctypes.CDLL(str(path)))
    module.calls.fake_begin()
    backend_registration.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", module)  # type: ignore[no-untyped-call]
    return module


class Event(torch.Event):
    """An event that takes CUDA's arguments."""

    def __new__(cls, *, enable_timing: bool = False, blocking: bool = False) -> Any:
        return super().__new__(cls, "fake", enable_timing=enable_timing)


class Fake(ModuleType):
    """The names that ``torch.cuda`` has, and those that only a fake can have."""

    Stream = torch.Stream
    Event = Event

    def __init__(self, name: str, calls: ctypes.CDLL) -> None:
        super().__init__(name)
        calls.fake_lock.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        calls.fake_unlock.argtypes = [ctypes.c_size_t]
        calls.fake_set_capacity.argtypes = [ctypes.c_int, ctypes.c_size_t]
        sizes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        calls.fake_count.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *sizes]
        self.calls = calls

    # -- as torch.cuda has them ---------------------------------------------------

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Have no generators."""

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: torch.device) -> Any:
        return torch.accelerator.device_index(device.index)

    def current_stream(self, device: Any = None) -> Any:
        return torch.accelerator.current_stream(device)

    def default_stream(self) -> Any:
        return torch.Stream(stream_id=0, device_index=0, device_type=20)

    def set_stream(self, stream: Any) -> None:
        torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def is_current_stream_capturing(self) -> bool:
        return bool(self.current_stream().is_capturing())

    def empty_cache(self) -> None:
        self.calls.fake_empty_cache()

    def memory_stats(self, device: Any = 0) -> dict[str, int]:
        """Return the figures of a device, by CUDA's names."""
        index = device if isinstance(device, int) else torch.device(device).index
        figures = self._figures(index or 0)
        names = ("blocks", "allocated_bytes", "active_bytes", "reserved_bytes")
        stats = {f"{name}.all.current": figures[i] for i, name in enumerate(names)}
        return {**stats, "active_bytes.all.peak": figures[4], "num_ooms": figures[5]}

    def memory_reserved(self, device: Any = "fake:0") -> int:
        return self.memory_stats(device)["reserved_bytes.all.current"]

    def reset_peak_memory_stats(self, device: Any = "fake:0") -> None:
        self._figures(torch.device(device).index or 0, resets=True)

    def host_memory_stats(self) -> dict[str, int]:
        """Return the figures of page-locked memory, some by CUDA's names."""
        figures = (ctypes.c_int64 * 5)()
        self.calls.fake_host_figures(figures)
        names = ("registered", "registered_bytes", "violations", "blocks")
        stats = dict(zip(names, figures, strict=False))
        return {**stats, "allocated_bytes.current": figures[4]}

    def cudart(self) -> "Runtime":
        return Runtime(self.calls)

    def _sleep(self, cycles: int) -> None:
        self.calls.fake_busy(cycles // CYCLES)

    # -- as only a fake has them ----------------------------------------------------

    def set_delay(self, microseconds: int) -> None:
        """Have each job of all streams begin late, by up to that much."""
        self.calls.fake_set_delay(microseconds)

    def set_capacity(self, nbytes: int, device: int = 0) -> None:
        self.calls.fake_set_capacity(device, nbytes)

    def forgive(self) -> None:
        """Forget the violations so far."""
        self.calls.fake_forgive()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Have the current stream say that a graph is being captured."""
        self.calls.fake_capture(True)
        try:
            yield
        finally:
            self.calls.fake_capture(False)

    def count_unequal(self, count: torch.Tensor, batch: torch.Tensor, row: int) -> None:
        """Add to ``count``, in the current stream, the words that are not their row."""
        assert batch.is_contiguous()
        assert batch.dtype is torch.int32
        pointers = count.data_ptr(), batch.data_ptr()
        self.calls.fake_count(*pointers, len(batch), batch[0].numel(), row)

    def _figures(self, device: int, *, resets: bool = False) -> list[int]:
        figures = (ctypes.c_int64 * 6)()
        self.calls.fake_figures(device, resets, figures)
        return list(figures)


class Runtime:
    """The three calls of CUDA's runtime that lock memory."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self.cudaHostUnregister = calls.fake_unlock
        self._lock = calls.fake_lock

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:  # noqa: N802
        assert flags == 1
        return self._lock(address, nbytes)

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {1: "invalid argument"}.get(status, str(status))
