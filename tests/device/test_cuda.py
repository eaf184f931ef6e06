"""Whole loaders in front of a CUDA device: values, slots, errors, graphs, exits."""

import logging
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from aioloader import DataLoader
from aioloader._device import locking
from aioloader._device.accelerator import Accelerator
from aioloader._device.mover import Mover
from device.gpu import (
    DEVICE,
    KINDS,
    MARKS,
    SIZE,
    SMALL,
    Rows,
    Watched,
    busy,
    nothing_is_left,  # noqa: F401  (in place of the one for all tests)
    on,
    warm_device,  # noqa: F401
    wrong,
)
from device.test_mover import DTYPES

pytestmark = MARKS


class Types:
    """Samples of every type, small and large: all that is in them is their bytes."""

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
    """Hold a batch against its samples, bit by bit."""
    samples = [Types()[index] for index in range(number * SIZE, (number + 1) * SIZE)]
    assert batch["no"] == ["text"] * SIZE
    assert batch["empty"].shape == (SIZE, 0)
    for name in samples[0]:
        if name not in {"index", "empty", "no"}:
            expected = torch.stack([sample[name] for sample in samples])
            found = batch[name]
            assert (found.dtype, found.device) == (expected.dtype, DEVICE)
            bits = found.cpu().view(torch.uint8)
            assert torch.equal(bits, expected.view(torch.uint8)), name
    assert batch["index"].tolist() == [sample["index"] for sample in samples]


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_every_type(num_workers: int, workers: Any) -> None:
    """By a plain ``for``."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with DataLoader(Types(), SIZE, device="cuda", **options) as loader:
        for number, batch in enumerate(loader):
            check(batch, number)
    assert number == 2


@pytest.mark.parametrize(
    ("loop", "num_workers", "workers"),
    [("caller", 0, "process"), ("thread", 2, "process"), ("caller", 2, "thread")],
)
async def test_async_for(loop: Any, num_workers: int, workers: Any) -> None:
    """The same for a task, two batches ahead."""
    options: Any = {"loop": loop, "num_workers": num_workers, "workers": workers}
    async with DataLoader(
        Types(), SIZE, device=DEVICE, prefetch_device=2, **options
    ) as loader:
        batches = [batch async for batch in loader]
    for number, batch in enumerate(batches):
        check(batch, number)


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_slots_are_locked(
    num_workers: int, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No large tensor is staged: each is copied from where it was collated."""
    staged, locked = [], []
    staging, is_locked = Accelerator.staging, Accelerator.is_locked

    def watch_staging(port: Accelerator, like: torch.Tensor) -> torch.Tensor:
        staged.append(like.nbytes)
        return staging(port, like)

    def watch_locked(port: Accelerator, host: torch.Tensor) -> bool:
        locked.append(is_locked(port, host))
        return locked[-1]

    monkeypatch.setattr(Accelerator, "staging", watch_staging)
    monkeypatch.setattr(Accelerator, "is_locked", watch_locked)
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with DataLoader(Rows(160), SIZE, device="cuda", **options) as loader:
        for number, batch in enumerate(loader):
            assert not wrong(batch, number)
    assert locked == [True] * 40
    assert max(staged, default=0) <= SMALL


def test_refused_locking_stages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so; the values are the same, and no later call fails for it."""
    runtime = locking._runtime()

    class Refusing:
        cudaGetErrorString = staticmethod(runtime.cudaGetErrorString)  # noqa: N815

        @staticmethod
        def cudaHostRegister(_address: int, nbytes: int, flags: int) -> Any:  # noqa: N802
            return runtime.cudaHostRegister(0, nbytes, flags)  # refused, in earnest

    monkeypatch.setattr(locking, "_runtime", Refusing)
    port = Watched()
    with caplog.at_level(logging.WARNING, "aioloader"):
        for number, batch in enumerate(on(port, DataLoader(Rows(80), SIZE))):
            assert not wrong(batch, number)
    assert port.staged == [SIZE << 18] * 20
    (line,) = (record.getMessage() for record in caplog.records)
    assert "page-locking 1,048,576 bytes for cuda:0 was refused" in line


def test_what_moves_itself() -> None:
    """Sparse, conjugated, packed, with a gradient: all of it arrives."""
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
    delivery = Mover(Accelerator(DEVICE)).move(batch)
    found = delivery.hand_over()
    delivery.release()
    assert torch.equal(found[0].cpu().to_dense(), torch.eye(5))
    assert torch.equal(found[1].cpu().resolve_conj(), turned.resolve_conj())
    assert torch.equal(found[2].cpu(), weights)
    assert found[3].data.device == DEVICE
    assert torch.equal(found[4].cpu(), batch[4])
    assert found[5].is_contiguous(memory_format=torch.channels_last)
    assert found[6] is batch[6]


def test_the_host_does_not_wait_for_a_copy() -> None:
    """A batch is handed over before it has arrived; the stream waits."""
    port = Watched(late=100_000_000)
    with on(port, DataLoader(Rows(SIZE), SIZE)) as loader:
        (batch,) = loader
        assert not torch.cuda.current_stream().query()
        assert not wrong(batch, 0)


class Uneven(Rows):
    """The third sample is of 256 MiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << (26 if index == 2 else 18),), index, dtype=torch.int32)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_out_of_memory(num_workers: int) -> None:
    """The error names the batch and its size; the next batch arrives."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(DEVICE) + (128 << 20)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total, DEVICE)
    try:
        with DataLoader(Uneven(5), 1, device="cuda", num_workers=num_workers) as loader:
            iterator = iter(loader)
            assert [int(next(iterator)[0, -1]) for _ in range(2)] == [0, 1]
            with pytest.raises(torch.OutOfMemoryError) as caught:
                next(iterator)
            assert "batch 2: moving 1 tensors of 268,435,456 bytes to cuda:0" in str(
                caught.value.__notes__
            )
            del caught
            assert [int(batch[0, -1]) for batch in iterator] == [3, 4]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_no_batch_inside_a_capture() -> None:
    """The error says what to do; the loader goes on."""
    with on(Watched(), DataLoader(Rows(80), SIZE)) as loader:
        iterator = iter(loader)
        static = next(iterator)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="copy it into the graph's own inputs"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            static.add_(1)  # an empty graph would be warned of
            next(iterator)
        batches = list(iterator)
    assert len(batches) == 18
    assert not wrong(batches[-1], 19)


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_capture_while_batches_are_moved(mode: Any) -> None:
    """Neither disturbs the other; batches are copied into the graph's inputs."""
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
def test_pinned_batches(num_workers: int, workers: Any) -> None:
    """Without a device, all tensors are in page-locked memory."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with DataLoader(Types(), SIZE, pin_memory=True, **options) as loader:
        for batch in loader:
            tensors = [
                each for each in batch.values() if isinstance(each, torch.Tensor)
            ]
            assert all(each.is_pinned() for each in tensors if each.numel())
            check(
                {
                    name: value.to(DEVICE) if torch.is_tensor(value) else value
                    for name, value in batch.items()
                },
                int(batch["index"][0]) // SIZE,
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
    torch.cuda._sleep(1_000_000)
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


def run_all(ways: dict[str, int], device: str, num_workers: int) -> None:
    """Run the script side by side in all ways; each ends with its exit status."""
    options = ["-W", "ignore::ResourceWarning", "-c", textwrap.dedent(SCRIPT)]
    children = {
        way: subprocess.Popen(
            [sys.executable, *options, way, device, str(num_workers)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        for way in ways
    }
    errors = {way: child.communicate(timeout=50)[1] for way, child in children.items()}
    for way, child in children.items():
        assert child.returncode == ways[way], f"{way}: {errors[way]}"
        for sign in ("terminate called", "core dumped", "Fatal Python", "CUDA error"):
            assert sign not in errors[way]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_exits(num_workers: int) -> None:
    """With the stage at work: no crash, nothing said that was not raised."""
    run_all({"end": 0, "raise": 1, "interrupt": -2, "exit": 3}, "cuda:0", num_workers)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device() -> None:
    """It is used, and no other: not even for a context."""
    run_all({"context": 0}, "cuda:1", 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_does_not_matter() -> None:
    """While it is the first, batches come on the second."""
    with DataLoader(Rows(400), SIZE, device="cuda:1", num_workers=2) as loader:
        for number, batch in enumerate(loader):
            with torch.cuda.device(1):
                busy(200_000)
            assert batch.device.index == 1
            assert not wrong(batch, number)
    assert torch.cuda.current_device() == 0
