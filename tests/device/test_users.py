"""Users name a device, choose what to move, and transform batches on it."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from aioloader import DataLoader, Device
from aioloader._device.accelerator import accelerator_of
from device.watched import (
    DEVICE,
    IS_FAKE,
    MARKS,
    MODULE,
    ON_FAKE,
    Rows,
    Watched,
    add_wrong,
    busy,
    counter,
    nothing_is_left,  # noqa: F401  (in place of the one for all tests)
    on,
    warm_device,  # noqa: F401
)

pytestmark = MARKS


class Pictures:
    """Large samples of bytes, with a number and a name."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = torch.full((3, 200, 200), index, dtype=torch.uint8)
        return {"picture": picture, "index": index, "name": f"{index}.png"}


def check(batch: Any, number: int) -> None:
    """Compare a batch of four with its expected values."""
    expected = torch.arange(4 * number, 4 * number + 4)
    assert torch.equal(batch["index"].cpu(), expected)
    pictures = batch["picture"].cpu().to(torch.int64)
    assert bool((pictures == expected[:, None, None, None]).all())


def names() -> list[Any]:
    """Return arguments that all name the device."""
    return [DEVICE.type, f"{DEVICE.type}:0", DEVICE, 0, "auto"]


@pytest.mark.parametrize("place", range(5))
def test_a_device_is_used_by_name_alone(place: int) -> None:
    """Whatever the form of the name."""
    loader: Any = DataLoader(Pictures(), 4, device=names()[place])
    assert torch.device(loader.device).type == DEVICE.type
    for number, batch in enumerate(loader):
        assert batch["picture"].device == DEVICE
        check(batch, number)
    assert number == 19


@pytest.mark.parametrize("device", [DEVICE.type + ":7", 7])
def test_a_missing_device_is_named_with_those_there_are(device: Any) -> None:
    last = MODULE.device_count() - 1
    kinds = f"{DEVICE.type}:0 to {DEVICE.type}:{last}" if last else DEVICE.type
    with pytest.raises(ValueError, match=f"torch sees cpu and {kinds} here; pass one"):
        DataLoader([1], device=device)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Return a function that makes a mesh of this process alone."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield lambda shape: DeviceMesh(
            DEVICE.type,
            torch.zeros(shape, dtype=torch.int64),
            mesh_dim_names=("dp", "tp")[: len(shape)],
            _init_backend=False,
        )
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_one_dimension_names_the_ranks_device(mesh: Any) -> None:
    """Of several dimensions, one has to be chosen."""
    assert DataLoader([1], device=mesh((1,))).device == DEVICE
    with pytest.raises(ValueError, match=r"of one dimension, got 2: .* mesh\['dp'\]"):
        DataLoader([1], device=mesh((1, 1)))


@pytest.mark.parametrize("keys", [["picture"], lambda key: key == "picture"])
def test_entries_that_are_not_named_stay_on_the_host(keys: Any) -> None:
    loader: Any = DataLoader(Pictures(), 4, num_workers=1)
    loader.device = Device(DEVICE, keys=keys)
    for number, batch in enumerate(loader):
        assert batch["picture"].device == DEVICE
        assert batch["index"].device.type == "cpu"
        assert batch["name"] == [f"{4 * number + n}.png" for n in range(4)]
        check(batch, number)


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    """Cast on the device, after a long kernel."""
    assert batch["picture"].device == DEVICE
    busy(2_000_000)
    return {**batch, "picture": batch["picture"].to(torch.float32)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_transform_casts_on_the_device(num_workers: int, ahead: int) -> None:
    """Bytes are copied, floats arrive; the consumer's stream waits for the cast."""
    device = Device(DEVICE, ahead=ahead, transform=scaled)
    loader: Any = DataLoader(Pictures(), 4, num_workers=num_workers, device=device)
    for number, batch in enumerate(loader):
        assert batch["picture"].dtype is torch.float32
        assert type(batch["picture"]) is torch.Tensor
        check(batch, number)


def test_results_of_a_transform_are_not_overwritten() -> None:
    """Dropped batches keep their memory while a kernel reads it."""
    count = counter()
    loader: Any = DataLoader(
        Rows(400), 4, device=Device(DEVICE, transform=lambda batch: batch.clone())
    )
    for number, batch in enumerate(loader):
        busy(2_000_000)
        add_wrong(count, batch, number)
        del batch
    assert int(count) == 0


def test_an_error_of_a_transform_is_its_batchs() -> None:
    """It names the place; the next batch arrives."""

    def fail(batch: Any) -> Any:
        if int(batch["index"][0]) == 8:
            raise KeyError("bad picture")
        return batch

    loader: Any = DataLoader(Pictures(), 4, device=Device(DEVICE, transform=fail))
    iterator = iter(loader)
    check(next(iterator), 0)
    check(next(iterator), 1)
    with pytest.raises(KeyError, match="bad picture") as caught:
        next(iterator)
    assert "in Device.transform" in str(caught.value.__notes__)
    assert "batch 2" in str(caught.value.__notes__)
    del caught
    check(next(iterator), 3)
    iterator.close()


def test_only_dense_tensors_are_prefetched() -> None:
    """The allocator has no record of others."""
    loader: Any = DataLoader(
        [torch.eye(3)] * 4,
        4,
        device=Device(DEVICE, transform=lambda _: torch.eye(3).to_sparse().to(DEVICE)),
    )
    with pytest.raises(TypeError, match="only dense tensors can be prefetched"):
        next(iter(loader))


class Labelled(torch.Tensor):
    """A subclass, as torchvision has."""


def test_unusual_tensors_are_moved_at_their_delivery() -> None:
    """Sparse, nested, subclasses; what is on the device is left alone."""
    nested = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )
    there = torch.ones(2, device=DEVICE)
    batch = {
        "sparse": torch.eye(3).to_sparse(),
        "nested": nested,
        "labelled": torch.ones(3).as_subclass(Labelled),
        "there": there,
    }
    loader: Any = DataLoader(
        [batch], batch_size=None, device=DEVICE, collate_fn=lambda sample: sample
    )
    (moved,) = loader
    assert torch.equal(moved["sparse"].cpu().to_dense(), torch.eye(3))
    assert moved["nested"].is_nested
    assert moved["nested"].values().device == DEVICE
    assert torch.equal(moved["nested"].values().cpu(), nested.values())
    assert type(moved["labelled"]) is Labelled
    assert moved["labelled"].device == DEVICE
    assert moved["there"] is there


def test_a_transform_waits_for_samples_on_the_device() -> None:
    """Their memory is not reused before it has run."""
    count = counter()

    class Resident:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            busy(200_000)
            rows = torch.full((4, 1 << 14), 4 * index, dtype=torch.int32)
            return (rows + torch.arange(4, dtype=torch.int32)[:, None]).to(DEVICE)

    loader: Any = DataLoader(
        Resident(),
        batch_size=None,
        device=Device(DEVICE, transform=lambda batch: batch.clone()),
    )
    for number, batch in enumerate(loader):
        add_wrong(count, batch, number)
        del batch
    assert int(count) == 0


@ON_FAKE
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_device_without_streams_has_the_same_batches(
    num_workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies block the stage's thread."""

    def refuse(*, device: Any) -> Any:
        raise RuntimeError(f"{device} has no streams")

    monkeypatch.setattr(torch, "Stream", refuse)
    loader: Any = DataLoader(Pictures(), 4, num_workers=num_workers, device=DEVICE)
    with caplog.at_level(logging.INFO, "aioloader"):
        for number, batch in enumerate(loader):
            check(batch, number)
    assert not loader._live.accelerators[DEVICE].is_async
    assert "copies to fake:0 block: fake:0 has no streams" in caplog.text


@ON_FAKE
def test_moving_batches_again_returns_the_same_tensors() -> None:
    """As accelerate's ``send_to_device`` and Lightning's hooks do, by ``to``."""
    for batch in DataLoader(Pictures(), 4, device=DEVICE):
        for tensor in (batch["picture"], batch["index"]):
            assert tensor.to(DEVICE, non_blocking=True) is tensor


@ON_FAKE
def test_only_cuda_has_locked_slots() -> None:
    """Other devices use the common port, and nothing locks their memory."""
    assert accelerator_of(DEVICE, {}).locker() is None
    assert Watched().locker() is not None
    assert IS_FAKE


class Ending(Watched):
    """Releases ``ended`` for each batch whose copies have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Semaphore(0)

    def mark(self) -> Any:
        mark: Any = super().mark()
        wait = mark.synchronize

        def synchronize() -> None:
            wait()
            self.ended.release()

        mark.synchronize = synchronize
        return mark


def test_stats_have_the_bytes_that_wait_on_the_device() -> None:
    port = Ending()
    loader = on(port, DataLoader(Rows(40), 4), depth=3)
    iterator = iter(loader)
    assert loader.stats().device_bytes == 0
    next(iterator)
    for _ in range(4):  # three are ahead
        assert port.ended.acquire(timeout=20)
    assert loader.stats().device_bytes == 3 << 20
    iterator.close()
    assert loader.stats().device_bytes == 0


def test_a_compiled_step_sees_ordinary_tensors() -> None:
    """One graph serves all batches, without any code of the loader's."""
    graphs: list[Any] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=counted, fullgraph=True)
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = batch["picture"].float().mean() + batch["index"].sum()
        return loss

    torch._dynamo.reset()
    loader = DataLoader(
        Pictures(), 4, num_workers=2, device=DEVICE, collate_fn=without_names
    )
    for number, batch in enumerate(loader):
        assert {*map(type, batch.values())} == {torch.Tensor}
        indices = range(4 * number, 4 * number + 4)
        assert step(batch).item() == sum(indices) / 4 + sum(indices)
    assert len(graphs) == 1
    torch._dynamo.reset()


def without_names(samples: list[dict[str, Any]]) -> Any:
    return default_collate(
        [{k: v for k, v in sample.items() if k != "name"} for sample in samples]
    )
