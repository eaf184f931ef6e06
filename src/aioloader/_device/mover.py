"""How the leaves of a batch are moved: in place, staged, packed, or by themselves.

A large tensor in page-locked memory (a slot of an arena) is copied from there. One in
pageable memory is staged: copied to page-locked memory first. Small ones are staged
together and sent as one, because each transfer has a fixed cost. Objects that move
themselves, and tensors that are not a plain block of memory, are moved by their ``to``.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aioloader._device.accelerator import Mark, Port
from aioloader._device.leaves import is_leaf, keys_of, map_leaves, moves_itself
from aioloader._device.naming import Choose, Keys, Transform
from aioloader._order.failures import noted
from aioloader._order.raising import raisable

# Up to this size tensors are packed, each with the alignment of the device's allocator.
_SMALL: Final = 1 << 16
_ALIGN: Final = 512
_DLPACK_CPU: Final = 1  # kDLCPU


class Moved:
    """A batch whose copies have started.

    Args:
        port: The device.
        batch: The batch; ``late`` leaves are still on the host.
        mark: The end of the copies.
        arrived: The copies, for the allocator: objects with ``record_stream``.
        late: The leaves that are moved at delivery.
        sources: The host memory that is copied from.

    Attributes:
        taken: A mark on the consumer's stream when the batch was handed over.
        is_async: Whether it may not have arrived yet.
        copied_bytes: Bytes that are copied ahead.
        held_bytes: Its memory on the device, in bytes.
    """

    def __init__(
        self,
        port: Port,
        batch: Any,
        mark: Mark,
        *,
        arrived: Sequence[Any],
        late: Sequence[Any],
        sources: Any,
    ) -> None:
        self._port = port
        self._batch = batch
        self._marks = [mark]
        self._arrived = arrived
        self._late = late
        self._sources = sources
        self.taken: Mark | None = None
        self.is_async = port.is_async
        self.copied_bytes = 0
        self.held_bytes = _storage_bytes(arrived)

    def hand_over(self) -> Any:
        """Return the batch, for this thread's current stream; called once."""
        self.taken = self._port.hand_over(self._marks[0], self._arrived)
        batch, self._batch, self._arrived = self._batch, None, ()
        if self._late:
            batch = self._move_late(batch)
        return batch

    def release(self) -> None:
        """Block until the sources are no longer read, and release them."""
        is_last = not self._late  # read first: the consumer may add a mark meanwhile
        for mark in self._marks:
            mark.synchronize()
        if is_last:
            self._sources = None

    def is_held(self) -> bool:
        """Tell whether some of it was or will be moved at delivery."""
        return self._sources is not None and len(self._marks) > 1

    def _move_late(self, batch: Any) -> Any:
        port, late = self._port, {id(leaf) for leaf in self._late}

        def convert(leaf: Any) -> Any:
            if id(leaf) not in late:
                return leaf
            return leaf.to(port.device, non_blocking=port.is_async)

        batch = map_leaves(batch, convert)
        self._marks.append(port.mark())
        self._late = ()
        return batch


class Mover:
    """Start the copies of batches to one device, in the stage's thread.

    Args:
        port: The device.
        keys: Which entries of a batch move: their keys, or a function of a key; None:
            all.
        transform: That of ``Device``, run on the stream of the copies, or None.
    """

    def __init__(
        self, port: Port, keys: Keys | None = None, transform: Transform | None = None
    ) -> None:
        self._port = port
        self._keys = keys
        self._transform = transform
        self.device = port.device
        self.enter_thread = port.enter_thread

    def move(self, batch: Any) -> Moved:
        """Start copying a batch.

        Tensors that are already on a device stay where they are; one that occurs twice
        is copied once.

        Raises:
            torch.OutOfMemoryError: If the device has no room for it.
            ValueError: If it lacks an entry that must move.
        """
        found = _Sorted()
        chosen = None if self._keys is None else _chooser(self._keys, batch)
        map_leaves(batch, found.add, chosen)
        with self._settled_on_error():
            results, arrived = self._send(found)
            late = [results[id(leaf)] for leaf in found.late]
            moved = map_leaves(batch, lambda leaf: results.get(id(leaf), leaf), chosen)
            if self._transform is not None:
                moved, arrived = self._transformed(self._transform, moved, found)
            mark = self._port.mark()
        delivery = Moved(
            self._port,
            moved,
            mark,
            arrived=arrived,
            late=late,
            sources=(batch, late),
        )
        ahead = (*found.small, *found.large, *found.movable)
        delivery.copied_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in ahead)
        return delivery

    @contextlib.contextmanager
    def _settled_on_error(self) -> Iterator[None]:
        """On an error, wait until no copy reads the memory that it releases."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device is lost
                self._port.mark().synchronize()
            raise

    def _transformed(
        self, transform: Transform, batch: Any, found: "_Sorted"
    ) -> tuple[Any, list[Any]]:
        """Return the transformed batch and its tensors that are on a device."""
        if found.resident:
            self._port.adopt(found.resident)
        try:
            batch = transform(batch)
            owned = _Sorted()
            map_leaves(batch, owned.add)
            for tensor in owned.resident:
                _check_dense(tensor)
        except BaseException as error:
            error = raisable(error, "Device.transform")
            raise noted(error, "in Device.transform")  # noqa: B904  (it keeps its cause)
        return batch, [*owned.resident, *owned.movable]

    def _send(self, found: "_Sorted") -> tuple[dict[int, Any], list[Any]]:
        """Return the copy of each leaf, by identity, and all copied tensors."""
        results: dict[int, Any] = {}
        arrived: list[Any] = []
        if found.small:
            packed = self._copy_packed(found.small)
            arrived.append(packed[0])
            results.update(zip(map(id, found.small), packed[1], strict=True))
        for tensor in found.large:
            results[id(tensor)] = self._copy(tensor)
            arrived.append(results[id(tensor)])
        for leaf in found.movable:
            results[id(leaf)] = self._sendable(leaf).to(
                self.device, non_blocking=self._port.is_async
            )
            arrived.append(results[id(leaf)])
        for leaf in found.late:
            results[id(leaf)] = self._sendable(leaf)
        return results, arrived

    def _sendable(self, leaf: Any) -> Any:
        return _pinned(leaf) if self._port.is_async else leaf

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._port.is_locked(tensor):
            tensor = self._port.staging(tensor).copy_(tensor)
        return self._port.copy(tensor)

    def _copy_packed(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy small tensors as one; return its bytes and the tensors in them."""
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        places = list(itertools.accumulate(sizes, initial=0))
        staged = self._port.staging(
            torch.empty(places.pop(), dtype=torch.uint8, device="meta")
        )
        views = [
            (tensor.dtype, tensor.shape, place, place + tensor.nbytes)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        for tensor, (dtype, shape, start, stop) in zip(tensors, views, strict=True):
            staged[start:stop].view(dtype).view(shape).copy_(tensor)
        block = self._port.copy(staged)
        # ``data``: for autograd each must be a separate tensor, not a view.
        return block, [
            block[start:stop].view(dtype).view(shape).data
            for dtype, shape, start, stop in views
        ]


class HostCarrier:
    """Batches that stay in host memory: transformed, pinned, or both.

    Args:
        pins: Whether to pin batches, for consumers that move them themselves.
        transform: That of ``Device``, run in the stage's thread, or None.
    """

    device = torch.device("cpu")

    def __init__(
        self, *, pins: bool = True, transform: Transform | None = None
    ) -> None:
        self._pins = pins
        self._transform = transform

    def enter_thread(self) -> None:
        """Use one thread for a copy, as torch's own pinning does."""
        torch.set_num_threads(1)

    def move(self, batch: Any) -> "Pinned":
        """Transform, and copy other tensors to torch's page-locked memory.

        Workers' slots are not page-locked in these loaders: a consumer may drop a batch
        during its copy to the device, and torch waits for the copy only before it
        reuses its own pinned memory.

        Raises:
            RuntimeError: If there is no page-locked memory.
        """
        if self._transform is not None:
            try:
                batch = self._transform(batch)
            except BaseException as error:
                error = raisable(error, "Device.transform")
                raise noted(error, "in Device.transform")  # noqa: B904  (it keeps its cause)
        return Pinned(map_leaves(batch, _pinned) if self._pins else batch)


class Pinned:
    """A batch that need not be moved."""

    taken: Mark | None = None
    is_async = False
    copied_bytes = held_bytes = 0

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def hand_over(self) -> Any:
        """Return the batch; once."""
        batch, self._batch = self._batch, None
        return batch

    def release(self) -> None:
        """Do nothing: the batch owns its memory."""

    def is_held(self) -> bool:
        """Tell that there is nothing to release."""
        return False


class _Sorted:
    """The leaves of a batch by how they are moved, each once."""

    def __init__(self) -> None:
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []
        # With ``to`` and ``record_stream``: objects that can be moved ahead.
        self.movable: list[Any] = []
        self.late: list[Any] = []
        self.resident: list[torch.Tensor] = []  # already on a device
        self._seen: set[int] = set()

    def add(self, leaf: Any) -> Any:
        """Add a leaf and return it."""
        is_tensor = isinstance(leaf, torch.Tensor)
        is_movable = is_tensor or (moves_itself(leaf) and _is_on_host(leaf))
        if is_movable and id(leaf) not in self._seen:
            self._seen.add(id(leaf))
            if is_tensor:
                self._add_tensor(leaf)
            else:
                has_record = callable(getattr(leaf, "record_stream", None))
                (self.movable if has_record else self.late).append(leaf)
        return leaf

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            self.resident.append(tensor)
        elif not _is_plain(tensor):
            self.late.append(tensor)
        elif tensor.nbytes <= _SMALL and tensor.is_contiguous():
            self.small.append(tensor)
        else:
            self.large.append(tensor)


def _chooser(keys: Keys, batch: Any) -> Choose:
    """Return a function that tells by its key whether an entry of ``batch`` moves.

    Raises:
        TypeError: If the batch has no entries.
        ValueError: If it lacks a named entry.
    """
    if is_leaf(batch):
        raise TypeError(
            "Device.keys needs batches with entries, such as dicts or tuples, and this "
            f"is one {type(batch).__name__}"
        )
    if callable(keys):
        return keys
    known = keys_of(batch)
    missing = [key for key in keys if key not in known]
    if missing:
        raise ValueError(
            f"Device.keys names {missing!r}, which the batch lacks: it has {known!r}"
        )
    return keys.__contains__


def _check_dense(tensor: torch.Tensor) -> None:
    """Refuse tensors without ``record_stream``: they could be reused too early."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"Device.transform returned a {type(tensor).__name__} of layout "
            f"{tensor.layout}: only dense tensors can be prefetched"
        )


def _is_on_host(leaf: Any) -> bool:
    """Tell whether another library's array, with a method ``to``, is in host memory."""
    device = getattr(leaf, "__dlpack_device__", None)
    if device is not None:
        return bool(device()[0] == _DLPACK_CPU)
    return not hasattr(leaf, "__cuda_array_interface__")


def _storage_bytes(arrived: Sequence[Any]) -> int:
    """Return the device memory of tensors in bytes, counting shared memory once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in arrived
        if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is only a block of memory with a shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pinned(leaf: Any) -> Any:
    """Return a leaf in page-locked memory if it is on the host and can be moved."""
    if isinstance(leaf, torch.Tensor):
        can_pin = leaf.device.type == "cpu" and not leaf.is_quantized
        return leaf.pin_memory() if can_pin else leaf
    pin = getattr(type(leaf), "pin_memory", None)
    return leaf.pin_memory() if callable(pin) else leaf
