"""Loaders that deliver to a device which copies as late as it may."""

import asyncio
import gc
import json
import pickle
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader, Device
from aioloader._device.stage import Staged
from aioloader.errors import BatchTimeoutError
from device.recording import LatePort, on


class Images:
    """Large samples, full of their index, with a label."""

    def __init__(self, count: int = 60, side: int = 200) -> None:
        self.count = count
        self.side = side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.side, self.side), index, dtype=torch.int32), index


class AsyncImages(Images):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


def check(batch: Any, first: int, size: int = 4) -> None:
    """Compare a batch with its expected values, everywhere."""
    images, labels = batch
    expected = torch.arange(first, first + size)
    assert torch.equal(labels, expected)
    assert bool((images == expected[:, None, None]).all())


def test_persistent_workers_lock_each_slot_once() -> None:
    """However many epochs there are."""
    port = LatePort()
    loader: Any = DataLoader(Images(), 4, num_workers=2, persistent_workers=True)
    locked = set()
    with on(port, loader):
        for _ in range(4):
            for number, batch in enumerate(loader):
                check(batch, 4 * number)
                locked |= set(port.locked)
        assert len(locked) <= 16
    del batch, loader
    gc.collect()
    assert port.locked == {}


def test_the_error_of_a_lost_device_is_raised() -> None:
    """The iteration ends."""

    class Lost(LatePort):
        def carry_out(self, number: int, why: str) -> None:
            if why == "synchronize":
                raise RuntimeError("CUDA error: device lost")
            super().carry_out(number, why)

    iterator = iter(on(Lost(), DataLoader(Images(), 4)))
    with pytest.raises(RuntimeError, match="device lost"):
        list(iterator)
    iterator.close()


class Behind(LatePort):
    """Its stream is stuck until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited, self.is_reached = threading.Event(), threading.Event()

    def hand_over(self, mark: Any, tensors: Iterable[Any]) -> Any:
        super().hand_over(mark, tensors)
        return self

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.is_reached.wait(20)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slow_device_bounds_the_batches_in_memory(depth: int) -> None:
    """No batch is moved while the memory of too many may still be in use."""
    port, batches = Behind(), list[Any]()
    loader = on(port, DataLoader(Images(), 4), depth)
    thread = threading.Thread(target=lambda: batches.extend(loader))
    thread.start()
    is_awaited = port.is_awaited.wait(20)
    moved = sum(line.startswith("copy") for line in port.log) // 2  # with the labels
    port.is_reached.set()
    thread.join()
    assert is_awaited
    assert depth + 2 <= moved <= 2 * depth + 2
    assert len(batches) == 15
    for number, batch in enumerate(batches):
        check(batch, 4 * number)


def test_a_timeout_loses_no_batch() -> None:
    gate = threading.Event()

    class Slow(Images):
        def __getitem__(self, index: int) -> Any:
            assert index < 4 or gate.wait(20)
            return super().__getitem__(index)

    iterator = iter(on(LatePort(), DataLoader(Slow(8), 4, timeout=0.05)))
    taken, waits = 0, 0
    while taken < 2:
        try:
            check(next(iterator), 4 * taken)
            taken += 1
        except BatchTimeoutError:
            waits += 1
            if taken:
                gate.set()
    assert waits
    iterator.close()


def test_errors_of_samples_are_raised_as_without_device() -> None:
    indices = [0, 1, 99, 3]

    class Holed(Images):
        def __getitem__(self, index: int) -> Any:
            if index == 99:
                raise KeyError("no such image")
            return super().__getitem__(index)

    loader: Any = DataLoader(Holed(), 1, sampler=indices, num_workers=1)
    iterator = iter(on(LatePort(), loader))
    check(next(iterator), 0, 1)
    check(next(iterator), 1, 1)
    with pytest.raises(KeyError, match="no such image"):
        next(iterator)
    check(next(iterator), 3, 1)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_samplers_error_follows_the_earlier_batches() -> None:
    """It is raised once."""

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 1, 2, 3]
            raise KeyError("lost")

    iterator = iter(on(LatePort(), DataLoader(Images(), batch_sampler=Sampler())))
    check(next(iterator), 0)
    with pytest.raises(KeyError, match="lost"):
        next(iterator)
    assert next(iterator, None) is None


async def test_a_cancelled_step_loses_nothing() -> None:
    """The next step returns the batch."""
    async with on(LatePort(), DataLoader(AsyncImages(), batch_size=4)) as loader:
        iterator = aiter(loader)
        for number in range(15):
            task = asyncio.ensure_future(anext(iterator))
            await asyncio.sleep(0)
            task.cancel()
            try:
                batch = await task
            except asyncio.CancelledError:
                batch = await anext(iterator)
            check(batch, 4 * number)
        await iterator.aclose()


def test_batches_on_the_device_count_as_in_flight() -> None:
    """Besides the workers' window."""
    loader = on(LatePort(), DataLoader(Images(), 4, num_workers=1), depth=3)
    for _ in loader:
        assert loader.stats().in_flight <= 2 + 3


def test_a_missing_device_is_an_error_at_once() -> None:
    """It says what to pass."""
    if not torch.cuda.is_available():
        seen = "torch sees no device but the cpu here"
        with pytest.raises(ValueError, match=seen):
            DataLoader([1], device="cuda")
        with pytest.raises(ValueError, match=seen):
            DataLoader([1], device="mps")
        with pytest.raises(ValueError, match=f"device=1: {seen}; pass 'auto' or 'cpu'"):
            DataLoader([1], device=1)
        assert DataLoader([1], device="auto").device is None
    wrong: tuple[Any, ...] = ("graphics", 1.5, True)
    for device in wrong:
        with pytest.raises(TypeError, match="device must name a torch device"):
            DataLoader([1], device=device)
    with pytest.raises(ValueError, match=r"Device\.ahead must be at least 1, got 0"):
        Device("cuda", ahead=0)
    with pytest.raises(TypeError, match=r"Device\.ahead must be an integer, got 1\.5"):
        Device("cuda", ahead=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device must name a torch device"):
        DataLoader([1], device=Device("graphics"))


def test_devices_compare_by_value() -> None:
    """They show their parts, and can be assigned."""
    device = Device("cpu", ahead=2, keys=["a"], transform=len)
    assert pickle.loads(pickle.dumps(device)) == device
    shown = "Device(name='cpu', ahead=2, keys=['a'], transform=<built-in function len>)"
    assert repr(device) == shown
    loader: Any = DataLoader([1, 2, 3], 2, device=device)
    assert loader.device == Device(ahead=2, keys=["a"], transform=len)
    assert list(loader) == [2, 1]
    loader.device = "cpu"
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]


def test_stats_report_and_trace_have_the_copies(tmp_path: Path) -> None:
    loader = on(LatePort(), DataLoader(Images(), 4, num_workers=1), depth=2)
    with loader.trace(tmp_path / "run.json"):
        for _ in loader:
            pass
    stages = {stage.name: stage for stage in loader.stats().stages}
    device = stages["device"]
    assert (device.items, device.nbytes) == (15, 15 * 4 * (200 * 200 * 4 + 8))
    parts = device.busy + device.starved + device.blocked
    assert parts == pytest.approx(loader.stats().seconds)
    assert "device" in str(loader.stats())
    assert loader.stats().device_bytes == 0
    assert loader.report().batches == 14
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    copies = [event for event in events if event["name"] == "copy"]
    assert [event["args"]["batch"] for event in copies] == list(range(15))


def test_the_cpu_needs_no_stage_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a thread nor a call."""
    monkeypatch.delattr(Staged, "__init__")
    loader: Any = DataLoader(list(range(6)), 2, device="cpu", num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert loader.device is None
