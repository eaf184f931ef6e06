"""Batches of all kinds on a device: values arrive, containers keep their types."""

import collections
import dataclasses
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from aioloader import DataLoader, Device
from aioloader._device.mover import Mover
from device.recording import LatePort
from sendable import DTYPES as ALL_DTYPES

DTYPES = [kind for kind in ALL_DTYPES if kind is not torch.complex32]  # torch warns


class Point(NamedTuple):
    """A named tuple of leaves."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str
    extra: list[Any]


class Movable:
    """Moves itself ahead, for it tells the allocator."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.calls: list[str] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> "Movable":
        """Return a copy on the device."""
        assert non_blocking
        self.calls.append("to")
        return type(self)(self.tensor.clone())

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator."""


class Late:
    """Pins itself, then moves itself."""

    def __init__(self, tensor: torch.Tensor, *steps: str) -> None:
        self.tensor = tensor
        self.steps = steps

    def pin_memory(self) -> "Late":
        return Late(self.tensor, *self.steps, "pin_memory")

    def to(self, device: torch.device, non_blocking: bool = False) -> "Late":
        """Return a copy on the device."""
        assert non_blocking
        return Late(self.tensor, *self.steps, "to")


def moved(batch: Any, port: LatePort | None = None) -> Any:
    """Move a batch, hand it over, and release it."""
    delivery = Mover(port or LatePort()).move(batch)
    result = delivery.hand_over()
    delivery.release()
    return result


def test_containers_keep_their_types() -> None:
    """Mappings, sequences, records, nested; other values are passed on."""
    small, large = torch.ones(3), torch.arange(40_000)
    counter: Any = collections.defaultdict(list, {"a": small})
    record = Record(large, "name", [small, None])
    batch = {
        "point": Point(small, 5),
        "tuple": (large, "text", b"bytes"),
        "default": counter,
        "user": collections.UserDict({"ids": small}),
        "ordered": collections.OrderedDict(a=small),
        "deque": collections.deque([large]),
        "record": record,
        "size": torch.Size([2, 3]),
        "range": range(3),
        "nothing": [None, 1.5, {1, 2}],
    }
    result = moved(batch)
    assert list(result) == list(batch)
    for name, value in batch.items():
        assert type(result[name]) is type(value), name
    assert result["default"].default_factory is list
    assert torch.equal(result["record"].image, large)
    assert result["record"].image is not large
    assert record.image is large  # the user's batch is unchanged
    assert result["nothing"] is batch["nothing"]
    assert result["range"] is batch["range"]
    assert torch.equal(result["user"]["ids"], small)


def test_small_tensors_are_not_views_of_each_other() -> None:
    """A write to one does not change a tensor that autograd has saved."""
    mask, labels = moved([torch.ones(3), torch.arange(3.0)])
    weights = torch.ones(3, requires_grad=True)
    loss = (weights * mask).sum()
    labels[0] = -1
    loss.backward()
    assert torch.equal(weights.grad, mask)  # type: ignore[arg-type]


def test_values_and_dense_strides_are_kept() -> None:
    """Channels last and transposed; an expanded tensor keeps its values."""
    images = torch.rand(8, 3, 64, 64).to(memory_format=torch.channels_last)
    turned, expanded = torch.rand(300, 200).T, torch.rand(1, 500).expand(100, 500)
    result = moved([images, turned, expanded])
    assert result[0].is_contiguous(memory_format=torch.channels_last)
    assert result[1].stride() == turned.stride()
    for new, old in zip(result, [images, turned, expanded], strict=True):
        assert torch.equal(new, old)


def test_objects_that_can_move_are_asked_to() -> None:
    """Ahead if they tell the allocator; otherwise at delivery, on that stream."""
    port = LatePort()
    movable, late = Movable(torch.ones(2)), Late(torch.zeros(2))
    delivery = Mover(port).move([movable, late])
    assert movable.calls == ["to"]
    result = delivery.hand_over()
    assert type(result[0]) is Movable
    assert result[1].steps == ("pin_memory", "to")
    delivery.release()
    assert delivery.sources is not None
    delivery.end()
    assert delivery.sources is None


def test_missing_keys_are_an_error() -> None:
    """A typing error would leave a batch on the host."""
    with pytest.raises(ValueError, match=r"names \['imgae'\], which the batch lacks"):
        Mover(LatePort(), ["imgae"]).move({"image": torch.ones(2)})
    with pytest.raises(TypeError, match="needs batches with entries"):
        Mover(LatePort(), ["image"]).move(torch.ones(2))


def test_a_tensor_under_two_keys_is_where_each_key_says() -> None:
    both = torch.ones(2)
    batch = Mover(LatePort(), ["a"]).move({"a": both, "b": both}).hand_over()
    assert batch["b"] is both
    assert batch["a"] is not both


def test_a_devices_transform_also_runs_on_the_cpu() -> None:
    """In the stage's thread."""
    loader: Any = DataLoader(
        torch.arange(4.0), 2, device=Device("cpu", transform=lambda batch: batch * 2)
    )
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


class Elsewhere:
    """An array of another library, already on a device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def to(self, device: Any, **_options: Any) -> Any:
        raise AssertionError("it is on a device")


class Cupy:
    __cuda_array_interface__: ClassVar[dict[str, int]] = {"version": 3}

    def to(self, device: Any, **_options: Any) -> Any:
        raise AssertionError("it is on a device")


def test_arrays_on_a_device_pass_untouched() -> None:
    """Those of other libraries, too."""
    batch = [Elsewhere(), Cupy(), torch.ones(1, device="meta")]
    assert moved(batch) is batch


def test_wrong_arguments_of_a_device_raise() -> None:
    async def transform(batch: Any) -> Any:
        return batch

    with pytest.raises(TypeError, match="transform must be a plain function"):
        Device(transform=transform)
    wrong: tuple[Any, ...] = ("image", 3)
    for keys in wrong:
        with pytest.raises(TypeError, match="keys must be a list of keys"):
            Device("cuda", keys=keys)
        with pytest.raises(TypeError, match="transform must be callable"):
            Device("cuda", transform=keys)


def test_pinning_leaves_other_values_unchanged() -> None:
    """Numbers, text and containers."""
    batch = {"a": [1, "b"], "c": Point(None, 2.5)}
    mover = Mover(None, pins=True)
    assert mover.move(batch).hand_over() is batch
    (late,) = mover.move([Late(torch.ones(1))]).hand_over()
    assert late.steps == ("pin_memory",)
