"""What the tests on a CUDA device share: samples, a port that is watched, long kernels.

The port is the loader's own. It can be told to begin its copies late, and to leave out
a step that keeps memory from being used again, to see that a test would notice.
"""

import dataclasses
import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pytest
import torch

from aioloader import DataLoader
from aioloader._device.accelerator import Accelerator, Mark
from aioloader._device.locking import PageLocker
from aioloader._device.mover import Mover
from aioloader._device.opening import DeviceSide
from aioloader.testing import Resources

MARKS = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
KINDS: list[Any] = [(0, "process"), (2, "process"), (2, "thread")]
SIZE = 4
SMALL = 1 << 16  # up to this, tensors are packed: these are staged wherever they are


class Rows:
    """Rows of 256 KiB, full of their index: batches of 1 MiB come in slots."""

    def __init__(self, count: int, words: int = 1 << 16) -> None:
        self.count = count
        self.words = words

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.words,), index, dtype=torch.int32)


class Watched(Accelerator):
    """The device as it is, but for what it is told.

    Args:
        late: Cycles that the device waits before each copy.
        forgets: What is left out.

    Attributes:
        staged: Sizes of what went through staging memory, in bytes.
        copied: Released for each copy that has begun.
        may_copy: Whether copies may begin.
    """

    def __init__(
        self, late: int = 0, forgets: Literal["", "record", "wait"] = ""
    ) -> None:
        super().__init__(DEVICE)
        self.late = late
        self.forgets = forgets
        self.staged: list[int] = []
        self.copied = threading.Semaphore(0)
        self.may_copy = threading.Event()
        self.may_copy.set()

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

    def mark(self) -> Mark:
        mark: Any = super().mark()
        if self.forgets == "wait":
            mark.synchronize = lambda: None
        found: Mark = mark
        return found

    def hand_over(self, mark: Mark, tensors: Iterable[Any]) -> Mark:
        return super().hand_over(mark, () if self.forgets == "record" else tensors)


def on(port: Accelerator, loader: "DataLoader[Any]", depth: int = 1) -> Any:
    """Have ``loader`` deliver its batches by ``port``, out of locked slots."""
    loader.device = port.device
    side = DeviceSide(Mover(port), PageLocker(port.device), depth)
    loader._live.devices.open = lambda *_: side  # type: ignore[method-assign]
    return loader


def busy(cycles: int) -> None:
    """Occupy the current stream; a million cycles are about half a millisecond."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def other_stream() -> Any:
    """Return a stream that is not the default one."""
    return torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]


def wrong(batch: torch.Tensor, number: int) -> torch.Tensor:
    """Count, on the device and in the current stream, what is not of that batch."""
    expected = torch.arange(len(batch), device=batch.device) + number * SIZE
    return (batch != expected[:, None]).sum()


def active_bytes(when: Literal["current", "peak"] = "current") -> int:
    """Return what is in use on the device, and what only its kernels still use."""
    found: int = torch.cuda.memory_stats(DEVICE)[f"active_bytes.all.{when}"]
    return found


@pytest.fixture(scope="module", autouse=True)
def warm_device() -> None:
    """Have the driver open what it opens once per process."""
    if torch.cuda.is_available():
        host = torch.ones(1 << 20, pin_memory=True)
        (host.to(DEVICE, non_blocking=True) @ torch.ones(1 << 20, device=DEVICE)).item()
        on(Watched(), DataLoader(Rows(4), SIZE)).close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves something behind; the driver may open files."""
    before = Resources.now()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        gc.collect()
        now = Resources.now().descriptors
        drivers = {each for each in now if "nvidia" in each[1]}
        before = dataclasses.replace(before, descriptors=before.descriptors | drivers)
    before.assert_unchanged()
