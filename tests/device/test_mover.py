"""Batches of all kinds: every value arrives, containers keep their types."""

import collections
import dataclasses
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from aioloader import DataLoader, Device
from aioloader._device.mover import Mover
from device.recording import LatePort
from sendable import DTYPES as ALL_DTYPES

DTYPES = [one for one in ALL_DTYPES if one is not torch.complex32]  # torch warns of it


class Point(NamedTuple):
    """A named tuple of leaves."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    """A frozen dataclass."""

    image: torch.Tensor
    name: str
    extra: list[Any]


class Movable:
    """Moves itself, ahead of time, for it tells the allocator."""

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
    """Moves itself, and pins itself before."""

    def __init__(self, tensor: torch.Tensor, *steps: str) -> None:
        self.tensor = tensor
        self.steps = steps

    def pin_memory(self) -> "Late":
        """Return a pinned copy."""
        return Late(self.tensor, *self.steps, "pin_memory")

    def to(self, device: torch.device, non_blocking: bool = False) -> "Late":
        """Return a copy on the device."""
        assert non_blocking
        return Late(self.tensor, *self.steps, "to")


def moved(batch: Any, port: LatePort | None = None) -> Any:
    """Move a batch, hand it over, and let go of it."""
    delivery = Mover(port or LatePort()).move(batch)
    result = delivery.hand_over()
    delivery.release()
    return result


def test_containers_keep_their_types() -> None:
    """Mappings, sequences, records, within each other; the rest is passed on."""
    one, two = torch.ones(3), torch.arange(40_000)
    counter: Any = collections.defaultdict(list, {"a": one})
    record = Record(two, "name", [one, None])
    batch = {
        "point": Point(one, 5),
        "tuple": (two, "text", b"bytes"),
        "default": counter,
        "user": collections.UserDict({"ids": one}),
        "ordered": collections.OrderedDict(a=one),
        "deque": collections.deque([two]),
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
    assert torch.equal(result["record"].image, two)
    assert result["record"].image is not two
    assert record.image is two  # the user's batch is as it was
    assert result["nothing"] is batch["nothing"]
    assert result["range"] is batch["range"]
    assert torch.equal(result["user"]["ids"], one)


def test_small_ones_are_not_views_of_each_other() -> None:
    """Writing to one does not spoil what autograd keeps of another."""
    mask, labels = moved([torch.ones(3), torch.arange(3.0)])
    weights = torch.ones(3, requires_grad=True)
    loss = (weights * mask).sum()
    labels[0] = -1
    loss.backward()
    assert torch.equal(weights.grad, mask)  # type: ignore[arg-type]


def test_strides_are_kept() -> None:
    """Channels last, transposed, expanded: the values, and what strides can be had."""
    images = torch.rand(8, 3, 64, 64).to(memory_format=torch.channels_last)
    turned, expanded = torch.rand(300, 200).T, torch.rand(1, 500).expand(100, 500)
    result = moved([images, turned, expanded])
    assert result[0].is_contiguous(memory_format=torch.channels_last)
    assert result[1].stride() == turned.stride()
    for new, old in zip(result, [images, turned, expanded], strict=True):
        assert torch.equal(new, old)


def test_what_moves_itself() -> None:
    """Ahead if it can tell the allocator, else at its delivery, on that stream."""
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


def test_keys_that_are_not_there() -> None:
    """A slip of the pen would leave a batch on the host."""
    with pytest.raises(ValueError, match=r"names \['imgae'\], which the batch lacks"):
        Mover(LatePort(), ["imgae"]).move({"image": torch.ones(2)})
    with pytest.raises(TypeError, match="needs batches with entries"):
        Mover(LatePort(), ["image"]).move(torch.ones(2))


def test_one_tensor_under_two_keys() -> None:
    """It stays where its key says, under each of them."""
    both = torch.ones(2)
    found = Mover(LatePort(), ["a"]).move({"a": both, "b": both}).hand_over()
    assert found["b"] is both
    assert found["a"] is not both


def test_a_transform_without_a_device() -> None:
    """It is called all the same, in the stage's thread."""
    loader: Any = DataLoader(
        torch.arange(4.0), 2, device=Device("cpu", transform=lambda batch: batch * 2)
    )
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


class Elsewhere:
    """An array of another library, on a device, that could move itself."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def to(self, device: Any, **_options: Any) -> Any:
        raise AssertionError("it is on a device")


class Cupy:
    """The same, by the older protocol."""

    __cuda_array_interface__: ClassVar[dict[str, int]] = {"version": 3}

    def to(self, device: Any, **_options: Any) -> Any:
        raise AssertionError("it is on a device")


def test_arrays_on_a_device_pass_untouched() -> None:
    """Those of other libraries, too."""
    batch = [Elsewhere(), Cupy(), torch.ones(1, device="meta")]
    assert moved(batch) is batch


def test_misuse() -> None:
    """Said by the device itself."""

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


def test_pinning_passes_on_what_cannot_be_pinned() -> None:
    """Numbers, text and containers stay as they are."""
    batch = {"a": [1, "b"], "c": Point(None, 2.5)}
    mover = Mover(None, pins=True)
    assert mover.move(batch).hand_over() is batch
    (late,) = mover.move([Late(torch.ones(1))]).hand_over()
    assert late.steps == ("pin_memory",)
