"""Loaders that deliver to a device: values, slots, errors, graphs, exits."""

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from aioloader import DataLoader, Device
from aioloader._device.accelerator import accelerator_of
from aioloader._device.mover import Mover
from device.test_mover import DTYPES
from device.watched import (
    DEVICE,
    IS_FAKE,
    KINDS,
    LARGE,
    MARKS,
    MODULE,
    ON_GPU,
    SIZE,
    SMALL,
    TWO_DEVICES,
    Rows,
    Watched,
    busy,
    captured,
    limited,
    nothing_is_left,  # noqa: F401  (in place of the one for all tests)
    on,
    warm_device,  # noqa: F401
    wrong,
)

pytestmark = MARKS


class Types:
    """Samples of every type, small and large."""

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {"index": index, "empty": torch.empty(0), "no": "text"}
        for dtype in DTYPES:
            for nbytes in (48, 1 << 17):
                raw = (torch.arange(nbytes) + index).to(torch.uint8)
                raw = raw % 2 if dtype is torch.bool else raw
                sample[f"{dtype} {nbytes}"] = raw.view(dtype)
        return sample


def check(batch: dict[str, Any], number: int) -> None:
    """Compare a batch with its samples, bit by bit."""
    samples = [Types()[index] for index in range(number * SIZE, (number + 1) * SIZE)]
    assert batch["no"] == ["text"] * SIZE
    assert batch["empty"].shape == (SIZE, 0)
    for name in samples[0]:
        if name not in {"index", "empty", "no"}:
            expected = torch.stack([sample[name] for sample in samples])
            moved = batch[name]
            assert (moved.dtype, moved.device) == (expected.dtype, DEVICE)
            bits = moved.cpu().view(torch.uint8)
            assert torch.equal(bits, expected.view(torch.uint8)), name
    assert batch["index"].tolist() == [sample["index"] for sample in samples]


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_values_of_every_type_arrive(num_workers: int, workers: Any) -> None:
    """With a plain ``for``."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with DataLoader(Types(), SIZE, device=DEVICE.type, **options) as loader:
        for number, batch in enumerate(loader):
            check(batch, number)
    assert number == 2


@pytest.mark.parametrize(
    ("loop", "num_workers", "workers"),
    [("caller", 0, "process"), ("thread", 2, "process"), ("caller", 2, "thread")],
)
async def test_async_for_delivers_every_type(
    loop: Any, num_workers: int, workers: Any
) -> None:
    """Two batches ahead."""
    options: Any = {"loop": loop, "num_workers": num_workers, "workers": workers}
    async with DataLoader(
        Types(), SIZE, device=Device(DEVICE, ahead=2), **options
    ) as loader:
        batches = [batch async for batch in loader]
    for number, batch in enumerate(batches):
        check(batch, number)


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_batches_are_copied_from_locked_slots(num_workers: int, workers: Any) -> None:
    """No large tensor is staged."""
    port = Watched()
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with on(port, DataLoader(Rows(160), SIZE, **options)) as loader:
        for number, batch in enumerate(loader):
            assert not wrong(batch, number)
    assert port.locked == [True] * 40
    assert max(port.staged, default=0) <= SMALL


def test_batches_are_staged_if_locking_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One log line says so; the values are the same, and no later call fails."""
    runtime = MODULE.cudart()

    class Refusing:
        cudaGetErrorString = staticmethod(runtime.cudaGetErrorString)  # noqa: N815

        @staticmethod
        def cudaHostRegister(_address: int, nbytes: int, flags: int) -> Any:  # noqa: N802
            return runtime.cudaHostRegister(0, nbytes, flags)  # CUDA refuses it

    monkeypatch.setattr(MODULE, "cudart", Refusing)
    port = Watched()
    with caplog.at_level(logging.WARNING, "aioloader"):
        for number, batch in enumerate(on(port, DataLoader(Rows(80), SIZE))):
            assert not wrong(batch, number)
    assert port.staged == [SIZE << 18] * 20
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"page-locking 1,048,576 bytes for {DEVICE} was refused" in line


def test_unusual_tensors_arrive() -> None:
    """Sparse, conjugated, packed, with a gradient."""
    weights = torch.rand(3, requires_grad=True)
    turned = torch.view_as_complex(torch.rand(40, 2)).conj()
    batch: list[Any] = [
        torch.eye(5).to_sparse(),
        turned,
        weights,
        pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.rand(300, 200).T,
        torch.rand(8, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.ones(2, device=DEVICE),
    ]
    delivery = moved_in_a_thread(batch)
    moved = delivery.hand_over()
    delivery.release()
    assert torch.equal(moved[0].cpu().to_dense(), torch.eye(5))
    assert torch.equal(moved[1].cpu().resolve_conj(), turned.resolve_conj())
    assert torch.equal(moved[2].cpu(), weights)
    assert moved[3].data.device == DEVICE
    assert torch.equal(moved[4].cpu(), batch[4])
    assert moved[5].is_contiguous(memory_format=torch.channels_last)
    assert moved[6] is batch[6]


def moved_in_a_thread(batch: Any) -> Any:
    """Begin to move a batch, as the stage does."""
    mover, deliveries = Mover(accelerator_of(DEVICE, {})), list[Any]()

    def move() -> None:
        mover.enter_thread()
        deliveries.append(mover.move(batch))

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    return deliveries[0]


def test_the_host_does_not_wait_for_a_copy() -> None:
    """A batch is handed over before it arrives; the stream waits."""
    port = Watched(late=2_000_000_000)  # a second
    with on(port, DataLoader(Rows(SIZE), SIZE)) as loader:
        batch = next(iter(loader))
        assert not MODULE.current_stream().query()
        assert not wrong(batch, 0)


class Uneven(Rows):
    """The third sample is of 256 MiB, or of 16 on the fake device."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LARGE if index == 2 else 1 << 18,), index, dtype=torch.int32)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_out_of_memory_is_an_error_of_one_batch(num_workers: int) -> None:
    """It names the batch and its size; the next batch arrives."""
    with (
        limited(2 * LARGE),
        DataLoader(Uneven(5), 1, device=DEVICE.type, num_workers=num_workers) as loader,
    ):
        iterator = iter(loader)
        assert [int(next(iterator)[0, -1]) for _ in range(2)] == [0, 1]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            next(iterator)
        assert f"batch 2: moving 1 tensors of {4 * LARGE:,} bytes to {DEVICE}" in str(
            caught.value.__notes__
        )
        del caught
        assert [int(batch[0, -1]) for batch in iterator] == [3, 4]


def test_a_step_inside_a_capture_is_an_error() -> None:
    """It says what to do; iteration can resume."""
    with on(Watched(), DataLoader(Rows(80), SIZE)) as loader:
        iterator = iter(loader)
        static = next(iterator)
        with (
            pytest.raises(RuntimeError, match="copy it into the graph's static inputs"),
            captured(),
        ):
            static.add_(1)  # an empty graph would be warned of
            next(iterator)
        batches = list(iterator)
    assert len(batches) == 18
    assert not wrong(batches[-1], 19)


@ON_GPU
@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_capturing_a_graph_does_not_disturb_copies(mode: Any) -> None:
    """Nor the reverse; batches are copied into the graph's inputs."""
    port = Watched()
    with on(port, DataLoader(Rows(400), SIZE, num_workers=2)) as loader:
        iterator = iter(loader)
        static = next(iterator).clone()
        doubled = static * 2
        for _ in range(2):  # one is ahead
            assert port.copied.acquire(timeout=20)
        port.may_copy.clear()
        batch = next(iterator)  # the stage goes on to the next one, and is held there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            port.may_copy.set()
            assert port.copied.acquire(timeout=20)
            torch.mul(static, 2, out=doubled)
        for number in range(1, 100):
            static.copy_(batch)
            graph.replay()
            assert not wrong(doubled // 2, number)
            batch = next(iterator, None)
        assert batch is None


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_pin_memory_pins_all_tensors(num_workers: int, workers: Any) -> None:
    """Without a device."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with DataLoader(Types(), SIZE, pin_memory=True, **options) as loader:
        for batch in loader:
            tensors = [t for t in batch.values() if isinstance(t, torch.Tensor)]
            assert all(each.is_pinned() for each in tensors if each.numel())
            check(
                {
                    name: value.to(DEVICE) if torch.is_tensor(value) else value
                    for name, value in batch.items()
                },
                int(batch["index"][0]) // SIZE,
            )


BEGIN = (
    """
from device import fake_accelerator
fake_accelerator.begin()
"""
    * IS_FAKE
)
SCRIPT = """
import signal, sys, torch
from aioloader import DataLoader

class Rows:
    def __len__(self):
        return 40_000
    def __getitem__(self, index):
        return torch.full((1 << 16,), index)

device = torch.device(sys.argv[2])
loader = DataLoader(Rows(), 4, device=device, num_workers=int(sys.argv[3]))
for number, batch in enumerate(loader):
    torch.get_device_module(device)._sleep(1_000_000)
    assert batch.device == device and int(batch[0, 0]) == 4 * number
    if number == 20 and sys.argv[1] == "raise":
        raise KeyError("of the step")
    if number == 20 and sys.argv[1] == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if number == 20 and sys.argv[1] == "exit":
        sys.exit(3)
    if number == 20 and sys.argv[1] in ("context", "end"):
        break
if sys.argv[1] == "context":
    assert not torch._C._cuda_hasPrimaryContext(0)
iterator = iter(loader)
next(iterator)
"""


PATHS = os.pathsep.join([*filter(None, sys.path)])


def run_all(ways: dict[str, int], device: str, num_workers: int) -> None:
    """Run the script in all ways at once; each must end with its exit status."""
    options = ["-W", "ignore::ResourceWarning", "-c", BEGIN + SCRIPT]
    children = {
        way: subprocess.Popen(
            [sys.executable, *options, way, device, str(num_workers)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": PATHS},
        )
        for way in ways
    }
    errors = {way: child.communicate(timeout=50)[1] for way, child in children.items()}
    for way, child in children.items():
        assert child.returncode == ways[way], f"{way}: {errors[way]}"
        for sign in ("terminate called", "core dumped", "Fatal Python", "CUDA error"):
            assert sign not in errors[way]


# They take long: on the fake device, those that ended wrong once.
EXITS: list[Any] = [({"exit": 3, "interrupt": -2}, 0)]
if not IS_FAKE:
    ways = {"end": 0, "raise": 1, "interrupt": -2, "exit": 3}
    EXITS = [(ways, 0), (ways, 2)]


@pytest.mark.parametrize(("ways", "num_workers"), EXITS)
def test_exits_during_copies_are_clean(ways: dict[str, int], num_workers: int) -> None:
    """No crash, and no message but the raised exception."""
    run_all(ways, str(DEVICE), num_workers)


@ON_GPU
@TWO_DEVICES
def test_a_second_device_is_the_only_one_used() -> None:
    """The first one has not even a context."""
    run_all({"context": 0}, "cuda:1", 2)


@TWO_DEVICES
def test_the_current_device_does_not_matter() -> None:
    """Batches arrive on the second device while the first is current."""
    second = torch.device(DEVICE.type, 1)
    with DataLoader(Rows(400), SIZE, device=second, num_workers=2) as loader:
        for number, batch in enumerate(loader):
            with MODULE.device(second):
                busy(200_000)
            assert batch.device.index == 1
            assert not wrong(batch, number)
    assert MODULE.current_device() == 0
