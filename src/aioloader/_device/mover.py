"""Move the leaves of a batch to a device, each in the way that is fastest for it.

A large tensor in page-locked memory (such as an arena's slot) is copied from there.
Other large tensors are staged: copied to page-locked memory first. Small tensors are
staged together and sent as one block, because each transfer has a fixed cost. Objects
with a method ``to``, and tensors that are not plain blocks of memory, move by ``to``.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aioloader._base.failures import noted
from aioloader._base.raising import raisable
from aioloader._device.accelerator import Accelerator
from aioloader._device.leaves import (
    entries_of,
    is_leaf,
    leaves_of,
    map_leaves,
    moves_itself,
)
from aioloader._device.naming import BatchKeys, BatchTransform, Choose

# Tensors up to this size are packed, aligned as the device's allocator aligns.
_MAX_PACKED: Final = 1 << 16
_ALIGN: Final = 512
_DLPACK_CPU: Final = 1  # kDLCPU


@dataclass(eq=False)
class Moved:
    """A batch whose copies have started, and the memory to keep until they end."""

    batch: Any
    port: Accelerator | None = None  # the device; None if the batch stays on the host
    mark: torch.Event | None = None  # event after the copies
    # The copies, each with the method ``record_stream``, for the allocator.
    arrived: Sequence[Any] = ()
    late: Sequence[Any] = ()  # leaves that move only when the batch is delivered
    sources: Any = None  # the host memory that is copied
    copied_bytes: int = 0  # bytes copied before delivery
    held_bytes: int = 0  # bytes of device memory that it uses
    taken: torch.Event | None = None  # event on the consumer's stream, at the hand-over

    def hand_over(self) -> Any:
        """Return the batch for use on this thread's current stream. Call only once."""
        batch, port = self.batch, self.port
        if port is not None:
            self.taken = port.hand_over(self.mark, self.arrived)
            if self.late:
                copies = {id(leaf): _sent(leaf, port) for leaf in self.late}
                batch = map_leaves(batch, lambda leaf: copies.get(id(leaf), leaf))
                self.taken = port.mark()
        self.batch, self.arrived = None, ()
        return batch

    def release(self) -> None:
        """Block until the copies have ended; release their host memory.

        If leaves move at delivery, the host memory is kept until ``end``.
        """
        if self.mark is not None:
            self.mark.synchronize()
        if not self.late:
            self.sources = None

    def end(self) -> None:
        """Wait until the consumer's stream has passed the hand-over; release memory."""
        if self.taken is not None:
            self.taken.synchronize()
        self.sources, self.late = None, ()


@dataclass(eq=False, repr=False)
class Mover:
    """Moves batches to one device or within host memory, in the stage's thread."""

    port: Accelerator | None  # the device; None if batches stay in host memory
    keys: BatchKeys | None = None  # which entries move, as in ``Device``
    transform: BatchTransform | None = None  # run on the stream of the copies
    # Whether batches that stay in host memory are page-locked, for consumers that move
    # batches themselves.
    pins: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.port is None else self.port.device

    def enter_thread(self) -> None:
        if self.port is not None:
            self.port.enter_thread()
        else:  # copy in one thread, as torch's pinning does
            torch.set_num_threads(1)

    def move(self, batch: Any) -> Moved:
        """Start copying a batch; return a ``Moved`` with the copies.

        Tensors on a device stay there; a tensor that occurs twice is copied once. With
        ``pins``, a batch for the host is copied to torch's page-locked memory, even
        from a locked slot: a consumer may drop the batch while copying it to a device,
        and only torch's own memory is not reused before that copy ends.
        """
        port = self.port
        if port is None:
            batch = self._transformed(batch)
            return Moved(map_leaves(batch, _pinned) if self.pins else batch)
        try:
            return self._begin(batch, port)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device is lost
                # Wait for copies of the memory that the error releases.
                Moved(None, port, port.mark()).release()
            raise

    def _begin(self, batch: Any, port: Accelerator) -> Moved:
        chosen = None if self.keys is None else _chooser(self.keys, batch)
        leaves = _by_way(batch, chosen)
        copies = {id(leaf): _copied(leaf, port) for leaf in leaves["large"]}
        for leaf in leaves["movable"]:
            copies[id(leaf)] = _sent(_sendable(leaf, port), port)
        arrived = [*copies.values()]
        if leaves["small"]:
            block, parts = _copy_packed(leaves["small"], port)
            arrived.append(block)
            copies.update(zip(map(id, leaves["small"]), parts, strict=True))
        late = [_sendable(leaf, port) for leaf in leaves["late"]]
        copies.update(zip(map(id, leaves["late"]), late, strict=True))
        moved = map_leaves(batch, lambda leaf: copies.get(id(leaf), leaf), chosen)
        if self.transform is not None:
            if leaves["resident"]:
                port.adopt(leaves["resident"])
            moved = self._transformed(moved)
            made = _by_way(moved)
            _check_dense(made["resident"])
            arrived = [*made["resident"], *made["movable"]]
        ahead = [*leaves["small"], *leaves["large"], *leaves["movable"]]
        return Moved(
            moved,
            port,
            port.mark(),
            arrived,
            late,
            sources=(batch, late),
            copied_bytes=sum(getattr(leaf, "nbytes", 0) for leaf in ahead),
            held_bytes=_storage_bytes(arrived),
        )

    def _transformed(self, batch: Any) -> Any:
        if self.transform is None:
            return batch
        try:
            return self.transform(batch)
        except BaseException as error:
            error = raisable(error, "Device.transform")
            raise noted(error, "in Device.transform")  # noqa: B904  (it keeps its cause)


def _by_way(batch: Any, chosen: Choose | None = None) -> defaultdict[str, list[Any]]:
    """Return the distinct leaves of a batch, grouped by ``_way_of``."""
    leaves: defaultdict[str, list[Any]] = defaultdict(list)
    for leaf in {id(leaf): leaf for leaf in leaves_of(batch, chosen)}.values():
        leaves[_way_of(leaf)].append(leaf)
    return leaves


def _way_of(leaf: Any) -> str:
    """Return how a leaf moves; "resident" for a tensor on a device, "" if it stays."""
    if not isinstance(leaf, torch.Tensor):
        if not (moves_itself(leaf) and _is_on_host(leaf)):
            return ""
        # It can move before delivery if the allocator can record its stream.
        return "movable" if callable(getattr(leaf, "record_stream", None)) else "late"
    if leaf.device.type != "cpu":
        return "resident"
    if not _is_plain(leaf):
        return "late"
    return "small" if leaf.nbytes <= _MAX_PACKED and leaf.is_contiguous() else "large"


def _copied(tensor: torch.Tensor, port: Accelerator) -> torch.Tensor:
    if not port.is_locked(tensor):
        tensor = port.staging(tensor).copy_(tensor)
    return port.copy(tensor)


def _sendable(leaf: Any, port: Accelerator) -> Any:
    return _pinned(leaf) if port.is_async else leaf


def _sent(leaf: Any, port: Accelerator) -> Any:
    return leaf.to(port.device, non_blocking=port.is_async)


def _copy_packed(
    tensors: Sequence[torch.Tensor], port: Accelerator
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy small tensors as one block; return the block and the copies in it."""
    sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
    *starts, size = itertools.accumulate(sizes, initial=0)
    staged = port.staging(torch.empty(size, dtype=torch.uint8, device="meta"))

    def parts(block: torch.Tensor) -> Iterator[torch.Tensor]:
        for tensor, start in zip(tensors, starts, strict=True):
            bits = block[start : start + tensor.nbytes]
            yield bits.view(tensor.dtype).view(tensor.shape)

    for tensor, part in zip(tensors, parts(staged), strict=True):
        part.copy_(tensor)
    block = port.copy(staged)
    # ``data``: autograd must see separate tensors, not views of the block.
    return block, [part.data for part in parts(block)]


def _chooser(keys: BatchKeys, batch: Any) -> Choose:
    """Return a function that tells whether the entry at a key of ``batch`` moves."""
    if is_leaf(batch):
        raise TypeError(
            "Device.keys needs batches with entries, such as dicts or tuples, and this "
            f"is one {type(batch).__name__}"
        )
    if callable(keys):
        return keys
    known = list(entries_of(batch))
    missing = [key for key in keys if key not in known]
    if missing:
        raise ValueError(
            f"Device.keys names {missing!r}, which the batch lacks: it has {known!r}"
        )
    return keys.__contains__


def _check_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raise if a tensor is not dense: its memory might be reused while it is in use."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"Device.transform returned a {type(tensor).__name__} of layout "
                f"{tensor.layout}: only dense tensors can be prefetched"
            )


def _is_on_host(leaf: Any) -> bool:
    """Tell whether another library's array is in host memory; assume so if unknown."""
    device = getattr(leaf, "__dlpack_device__", None)
    if device is not None:
        return bool(device()[0] == _DLPACK_CPU)
    return not hasattr(leaf, "__cuda_array_interface__")


def _storage_bytes(arrived: Sequence[Any]) -> int:
    """Return the size of the tensors' storages in bytes; count each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in arrived
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether memory, dtype, shape and strides describe a tensor completely."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pinned(leaf: Any) -> Any:
    """Return a page-locked copy of a leaf, or the leaf if it cannot be pinned."""
    if isinstance(leaf, torch.Tensor):
        can_pin = leaf.device.type == "cpu" and not leaf.is_quantized
        return leaf.pin_memory() if can_pin else leaf
    pin = getattr(type(leaf), "pin_memory", None)
    return leaf.pin_memory() if callable(pin) else leaf
