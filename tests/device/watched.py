"""Shared by the tests on a device: samples, a watched port, long kernels.

The device is a GPU, or the fake accelerator in a process that ``test_on_fake`` starts.
The port is the loader's own. It can begin its copies late, and leave out a step that
keeps memory from being reused, to check that the tests would notice.
"""

import contextlib
import dataclasses
import gc
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch

from aioloader import DataLoader, Device
from aioloader._device.accelerator import CudaAccelerator
from aioloader.testing import Resources
from device import fake_accelerator

IS_FAKE = os.environ.get("AIOLOADER_TEST_DEVICE") == "fake"
if IS_FAKE:
    fake_accelerator.begin().set_delay(100)
HAS_DEVICE = IS_FAKE or torch.cuda.is_available()
MARKS = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not HAS_DEVICE, reason="needs a GPU; test_on_fake runs it on the fake device"
    ),
]
DEVICE = torch.device("fake" if IS_FAKE else "cuda", 0)
MODULE: Any = torch.get_device_module(DEVICE)
ON_GPU = pytest.mark.skipif(IS_FAKE, reason="about CUDA's own graphs and contexts")
TWO_DEVICES = pytest.mark.skipif(
    not HAS_DEVICE or MODULE.device_count() < 2, reason="needs two devices"
)
FEWER = 8 if IS_FAKE else 1  # factor by which there are fewer batches
LARGE = 1 << (22 if IS_FAKE else 26)  # words
ON_FAKE = pytest.mark.skipif(not IS_FAKE, reason="the fake device tells more")
KINDS: list[Any] = [(0, "process"), (2, "process"), (2, "thread")]
SIZE = 4
SMALL = 1 << 16  # tensors up to this size are packed, so they are always staged


class Rows:
    """Rows of 256 KiB, full of their index: batches of 1 MiB come in slots."""

    def __init__(self, count: int, words: int = 1 << 16) -> None:
        self.count = count
        self.words = words

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.words,), index, dtype=torch.int32)


class Watched(CudaAccelerator):
    """The device's port, with delays and faults.

    Args:
        late: Cycles that the device waits before each copy.
        forgets: The step that is left out.

    Attributes:
        locked: For each large tensor, whether its memory was page-locked.
        staged: Bytes of each tensor that was copied through staging memory.
        copied: Released for each copy that has begun.
        may_copy: Whether copies may begin.
    """

    def __init__(
        self, late: int = 0, forgets: Literal["", "event", "record", "slot"] = ""
    ) -> None:
        super().__init__(DEVICE)
        self.late = late
        self.forgets = forgets
        self.locked: list[bool] = []
        self.staged: list[int] = []
        self.copied = threading.Semaphore(0)
        self.may_copy = threading.Event()
        self.may_copy.set()

    def is_locked(self, host: torch.Tensor) -> bool:
        self.locked.append(super().is_locked(host))
        return self.locked[-1]

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        self.staged.append(like.nbytes)
        return super().staging(like)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        assert self.may_copy.wait(20)
        if self.late:
            busy(self.late)
        copy = super().copy(host)
        self.copied.release()
        return copy

    def mark(self) -> Any:
        mark: Any = super().mark()
        if self.forgets == "slot":
            mark.synchronize = lambda: None
        return mark

    def hand_over(self, mark: Any, tensors: Iterable[Any]) -> Any:
        if self.forgets == "event":
            mark = super().mark()  # of the consumer's own stream
        return super().hand_over(mark, () if self.forgets == "record" else tensors)


def on(port: CudaAccelerator, loader: "DataLoader[Any]", depth: int = 1) -> Any:
    """Have ``loader`` deliver its batches by ``port``, out of locked slots."""
    loader.device = Device(port.device, ahead=depth)
    loader._live.accelerators[port.device] = port
    return loader


def busy(cycles: int) -> None:
    """Occupy the current stream; a million cycles are about half a millisecond."""
    MODULE._sleep(cycles)


def counter() -> torch.Tensor:
    """Return the count to which ``add_wrong`` adds."""
    return torch.zeros((), dtype=torch.int64, device=DEVICE)


def add_wrong(count: torch.Tensor, batch: torch.Tensor, number: int) -> None:
    """Add the wrong words of a batch, on the device and in the current stream."""
    if IS_FAKE:
        MODULE.count_unequal(count, batch, number * SIZE)
        return
    expected = torch.arange(len(batch), device=batch.device) + number * SIZE
    count += (batch != expected[:, None]).sum()


def wrong(batch: torch.Tensor, number: int) -> int:
    """Return the number of wrong words of a batch, once the device has counted them."""
    with MODULE.device(batch.device):
        count = torch.zeros((), dtype=torch.int64, device=batch.device)
        add_wrong(count, batch, number)
        return int(count)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Leave ``nbytes`` of memory on the device, besides used and cached memory."""
    MODULE.synchronize()
    MODULE.empty_cache()
    room = MODULE.memory_reserved(DEVICE) + nbytes
    if IS_FAKE:
        MODULE.set_capacity(room)
    else:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(room / total, DEVICE)
    try:
        yield
    finally:
        if IS_FAKE:
            MODULE.set_capacity(1 << 30)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def captured() -> Any:
    """Capture the current stream's work in the block as a graph."""
    if IS_FAKE:
        return MODULE.captured()
    graph = torch.cuda.CUDAGraph()
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def active_bytes(when: Literal["current", "peak"] = "current") -> int:
    """Return the bytes that the device uses, also those that only kernels still use."""
    stats: dict[str, int] = MODULE.memory_stats(DEVICE)
    return stats[f"active_bytes.all.{when}"]


@pytest.fixture(scope="module", autouse=True)
def warm_device() -> None:
    """Have the driver open its files, once per process."""
    if HAS_DEVICE:
        host = torch.ones(1 << 20, pin_memory=True)
        (host.to(DEVICE, non_blocking=True) @ torch.ones(1 << 20, device=DEVICE)).item()
        on(Watched(), DataLoader(Rows(4), SIZE)).close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaks; the driver may open files."""
    before = Resources.now()
    held = Held.now()
    yield
    if HAS_DEVICE:
        MODULE.synchronize()
        gc.collect()
        now = Resources.now().descriptors
        drivers = {each for each in now if "nvidia" in each[1]}
        before = dataclasses.replace(before, descriptors=before.descriptors | drivers)
    before.assert_unchanged()
    assert Held.now() == held


class Held(NamedTuple):
    """Counts of the fake device; zero for a real one.

    Attributes:
        blocks: Allocations of both devices.
        registered: Page-locked ranges.
        violations: Reads of unlocked ranges, and unlocks of unknown ones.
    """

    blocks: int
    registered: int
    violations: int

    @classmethod
    def now(cls) -> "Held":
        """Return the counts once all streams are idle."""
        if not IS_FAKE:
            return cls(0, 0, 0)
        MODULE.synchronize(0)
        MODULE.synchronize(1)
        gc.collect()
        host = MODULE.host_memory_stats()
        blocks = [MODULE.memory_stats(i)["blocks.all.current"] for i in range(2)]
        return cls(sum(blocks), host["registered"], host["violations"])
