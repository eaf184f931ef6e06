"""Resolve the loader's ``device`` argument, in each of its forms, to a device."""

import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, TypeAlias

import torch
from typing_extensions import TypeVar

from aioloader.protocols import is_async_function

# The type of the batch that ``Device.transform`` returns; None without a transform.
Made_co = TypeVar("Made_co", covariant=True, default=None)
Choose: TypeAlias = Callable[[Any], bool]
BatchKeys: TypeAlias = Collection[Any] | Choose
BatchTransform: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Device(Generic[Made_co]):
    """The device to move batches to, with options: ``Device("cuda", ahead=2)``.

    ``device="cuda"`` is short for ``device=Device("cuda")``.

    Example:
        >>> Device("cuda", keys=["image"])
        Device(name='cuda', ahead=1, keys=['image'], transform=None)

    Args:
        name: A value that ``DataLoader(device=...)`` accepts: a name (``"cuda:1"``), a
            local rank, a one-dimensional ``DeviceMesh``, or ``"auto"``. With ``None``,
            batches stay in host memory.
        ahead: How many batches are moved to the device before they are requested.
        keys: The entries of a batch to move, by key, field or position; or a function
            that takes a key, field or position and returns whether to move the entry.
        transform: A function of a batch, called when the batch's copies are queued. The
            function's kernels run after the copies on the same stream and overlap the
            training step. Without a device, the function gets CPU tensors.

    Raises:
        ValueError: If ``ahead`` is below 1.
        TypeError: If an argument other than ``name`` is of the wrong type. The loader
            checks ``name``.
    """

    name: Any = None
    _: KW_ONLY
    ahead: int = 1
    keys: BatchKeys | None = None
    transform: Callable[[Any], Made_co] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.ahead, "__index__"):
            raise TypeError(f"Device.ahead must be an integer, got {self.ahead!r}")
        if operator.index(self.ahead) < 1:
            raise ValueError(f"Device.ahead must be at least 1, got {self.ahead}")
        keys, transform = self.keys, self.transform
        is_names = isinstance(keys, Collection) and not isinstance(keys, (str, bytes))
        if keys is not None and not (is_names or callable(keys)):
            raise TypeError(
                "Device.keys must be a list of keys, such as ['image'], or a function "
                f"of a key, got {keys!r}"
            )
        if transform is not None and not callable(transform):
            raise TypeError(
                f"Device.transform must be callable, got {type(transform).__name__!r}"
            )
        if is_async_function(transform):
            raise TypeError(
                "Device.transform must be a plain function: a thread calls it"
            )


def found_here(device: Any) -> "torch.device | Device[Any] | None":
    """Resolve ``device`` to a torch device or None; a ``Device`` keeps its options."""
    if isinstance(device, Device):
        return replace(device, name=device_of(device.name))
    return device_of(device)


def device_of(device: Any) -> torch.device | None:
    """Return the device that batches are moved to; None for host memory.

    Args:
        device: None; a name or ``torch.device``; an index of the current accelerator;
            ``"auto"`` for that accelerator, or host memory if there is none; or a
            one-dimensional ``DeviceMesh`` for this rank's device.
    """
    if device is None:
        return None
    if isinstance(device, str) and device == "auto":
        return current_accelerator()
    if is_mesh(device):
        place_in(device, "device")
        if device.device_type == "cpu":
            return None
        # The device that ``init_device_mesh`` has made current for this rank.
        module = torch.get_device_module(device.device_type)
        return torch.device(device.device_type, module.current_device())
    named = _named(device)
    if named.type == "cpu":
        return None
    count = _count(named.type)
    if (named.index or 0) >= count:
        raise ValueError(
            f"device={str(named)!r}: torch sees {seen()} here; pass one of these, "
            "'auto', or leave device out to keep batches in host memory"
        )
    return named


def is_mesh(value: object) -> bool:
    """Tell whether ``value`` is a ``DeviceMesh``, without importing its module."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def place_in(mesh: Any, name: str) -> int:
    """Return this process's coordinate in a one-dimensional ``DeviceMesh``.

    ``name`` is the argument that received the mesh; errors mention it.

    Raises:
        ValueError: If the mesh has several dimensions or lacks this process.
    """
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("dp",)
        raise ValueError(
            f"{name} must be a DeviceMesh of one dimension, got {mesh.ndim}: pass the "
            f"one that batches are sharded over, such as mesh[{names[0]!r}]"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"{name} is a DeviceMesh without this rank: pass its own")
    return int(place[0])


def current_accelerator() -> torch.device | None:
    """Return this process's accelerator, without an index; None if none is usable."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def seen() -> str:
    """Return the devices that torch sees, as text for an error."""
    accelerator = current_accelerator()
    if accelerator is None:
        return "no device but the cpu"
    kind, last = accelerator.type, _count(accelerator.type) - 1
    return f"cpu and {kind}" + (f":0 to {kind}:{last}" if last else "")


def _named(device: Any) -> torch.device:
    if hasattr(device, "__index__") and not isinstance(device, bool):
        kind = current_accelerator()
        if kind is None:
            raise ValueError(
                f"device={device}: torch sees {seen()} here; pass 'auto' or 'cpu' to "
                "keep batches in host memory where there is no accelerator"
            )
        device = f"{kind.type}:{operator.index(device)}"
    cause = None
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError as error:
        cause = error
    raise TypeError(
        f"device must name a torch device, got {device!r}; torch sees {seen()} here "
        "(import the package of any other device first)"
    ) from cause


def _count(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # there is no such module
        return 0
    return int(module.device_count()) if module.is_available() else 0
