"""A batch as it crosses between processes: written once, read in place.

While a batch is collated, ``default_collate`` takes its memory from the slot; what is
not there when the batch is packed (a custom collate function's tensors) is copied in.
Small batches travel inside the frame: below some 64 KB a copy is cheaper than a slot.
"""

import pickle
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioloader._transport.arena import ArenaReader, ArenaWriter, SlotRef
from aioloader._transport.codec import Reducers, decode, encode

# slot number (-1: none), start, size; bytes used; header: place and size; buffers
_HEAD = struct.Struct("<qqqqqqq")
_PLACE = struct.Struct("<qq")  # first byte and size of a buffer
_ALIGN = 64
_HEADER_INLINE = 1 << 14

Place: TypeAlias = tuple[int, int]


def _reduce(tensor: torch.Tensor) -> Any:
    """Reduce a plain tensor to its bytes, which go out of band."""
    try:
        array = tensor.numpy()
        buffer = pickle.PickleBuffer(array)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):  # a type that numpy lacks, a gradient, no memory
        return _reduce_rare(tensor)
    if not array.flags.c_contiguous:
        return _reduce_rare(tensor)
    return _rebuild, (buffer, array.dtype.str, array.shape)


def _reduce_rare(tensor: torch.Tensor) -> Any:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.requires_grad or tensor.is_quantized:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    tensor = tensor.resolve_conj().resolve_neg()
    order = _order_of(tensor)
    block = tensor.permute(order).contiguous()
    buffer = pickle.PickleBuffer(block.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return _rebuild_rare, (buffer, tensor.dtype, tuple(block.shape), order)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the order in which the dimensions lie in memory, if they fill a block."""
    strides, as_it_is = tensor.stride(), tuple(range(tensor.ndim))
    order = tuple(sorted(as_it_is, key=lambda k: -strides[k]))
    return order if tensor.permute(order).is_contiguous() else as_it_is


def _rebuild(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Half the cost of ``torch.frombuffer`` and a view.
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _rebuild_rare(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]
) -> torch.Tensor:
    block = (
        torch.frombuffer(buffer, dtype=dtype).view(shape)
        if len(buffer)
        else torch.empty(shape, dtype=dtype)
    )
    back = sorted(range(len(order)), key=order.__getitem__)
    return block.permute(back)


REDUCERS: Reducers = {torch.Tensor: _reduce}


class Packer:
    """The sender's side: lends memory of a slot, and packs what is to be sent.

    One batch at a time: a thread that packs has a packer of its own.

    Args:
        arena: Where slots are taken.
        inline_bytes: Up to this size a batch travels inside the frame.
    """

    def __init__(self, arena: ArenaWriter, inline_bytes: int) -> None:
        self._arena = arena
        self._inline_bytes = max(inline_bytes, _HEADER_INLINE)
        self._ref: SlotRef | None = None
        self._view: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._wanted = 0  # by the largest batch so far

    def reset(self) -> None:
        """Begin a new batch; what was lent for one that came to nothing is free."""
        if self._ref is not None:
            self._arena.give_back(self._ref)
        self._forget()

    def lease(self, nbytes: int) -> Any:
        """Return writable memory for a part of the batch, in its slot if that has room.

        Raises:
            BatchTooLargeError: If the machine has no memory for it.
        """
        if self._ref is None:
            self._ref, self._view = self._arena.take(max(nbytes, self._wanted))
        start = _aligned(self._used)
        self._used = start + nbytes
        if self._used > len(self._view):
            return np.empty(nbytes, np.uint8)  # the slot of the next batch is larger
        # Not a numpy view, which would forget who owns the memory.
        return _bytes_of(self._view)[start : start + nbytes]

    def pack(self, value: Any) -> list[bytes | memoryview]:
        """Return the parts of the frame; large ones are in the slot by then.

        Raises:
            Exception: What pickling ``value`` raised.
            BatchTooLargeError: If the machine has no memory for it.
        """
        header, buffers = encode(value, REDUCERS)
        raws = [buffer.raw() for buffer in buffers]
        total = sum(_aligned(raw.nbytes) for raw in raws)
        is_small = len(header) + total <= self._inline_bytes
        if is_small and (self._ref is None or not total):
            self.reset()
            return _inline(header, raws)
        if len(header) > _HEADER_INLINE:
            # A list of long strings, say: the header is one more buffer.
            return self._in_slot(b"", [*raws, memoryview(header)])
        return self._in_slot(header, raws)

    def _forget(self) -> None:
        self._ref = None
        self._view, self._used = np.empty(0, np.uint8), 0

    def _in_slot(self, header: bytes, raws: list[memoryview]) -> list[Any]:
        places = self._place(raws)
        ref, used = self._ref, max(start + size for start, size in places)
        assert ref is not None
        self._wanted = max(self._wanted, used)
        head = _HEAD.pack(*ref, used, 0, len(header), len(raws))
        self._forget()
        return [head, *(_PLACE.pack(*place) for place in places), header]

    def _place(self, raws: Sequence[memoryview]) -> list[Place]:
        """Copy what is not in the slot behind what is; move all if that is too much."""
        begin = _address(self._view) if self._ref is not None else 0
        end = begin + len(self._view)
        inside = [begin <= _address(raw) < end for raw in raws]
        used = _aligned(min(self._used, len(self._view)))
        sizes = [_aligned(raw.nbytes) for raw in raws]
        missing = sum(n for n, there in zip(sizes, inside, strict=True) if not there)
        if self._ref is None or used + missing > len(self._view):
            before = self._ref
            self._ref, self._view = self._arena.take(max(sum(sizes), self._wanted))
            places = self._copy(raws, [False] * len(raws), 0, 0)
            if before is not None:
                self._arena.give_back(before)
            return places
        return self._copy(raws, inside, begin, used)

    def _copy(
        self, raws: Sequence[memoryview], inside: list[bool], begin: int, used: int
    ) -> list[Place]:
        places = []
        for raw, is_inside in zip(raws, inside, strict=True):
            start = _address(raw) - begin if is_inside else used
            if not is_inside:
                self._view[used : used + raw.nbytes] = np.frombuffer(raw, np.uint8)
                used = _aligned(used + raw.nbytes)
            places.append((start, raw.nbytes))
        return places


def unpack(frame: bytes, at: int, arena: ArenaReader, *, copy: bool = False) -> Any:
    """Return what was packed; its large parts are views of the slot.

    Args:
        frame: A frame that holds a parcel.
        at: Where in the frame the parcel begins.
        arena: The reader's side of the sender's arena.
        copy: Take private copies and free the slot at once.
    """
    number, start, size, used, first, length, count = _HEAD.unpack_from(frame, at)
    at += _HEAD.size
    places = [_PLACE.unpack_from(frame, at + k * _PLACE.size) for k in range(count)]
    at += count * _PLACE.size
    header = memoryview(frame)[at : at + length]
    if number < 0:
        memory = (
            memoryview(bytearray(frame[at + first :])) if count else memoryview(b"")
        )
    else:
        view = arena.lease(SlotRef(number, start, size), used)
        memory = _bytes_of(view.copy() if copy else view)
        del view
    buffers = [memory[begin : begin + nbytes] for begin, nbytes in places]
    return decode(header if length else buffers.pop(), buffers)


def slot_of(frame: bytes, at: int) -> SlotRef | None:
    """Return the slot that the parcel of a frame is in, if it is in one."""
    ref = SlotRef(*_HEAD.unpack_from(frame, at)[:3])
    return None if ref.number < 0 else ref


def _inline(header: bytes, raws: list[memoryview]) -> list[Any]:
    places: list[bytes] = []
    parts: list[Any] = []
    used = 0
    for raw in raws:
        places.append(_PLACE.pack(used, raw.nbytes))
        gap = -raw.nbytes % _ALIGN
        parts += (raw, bytes(gap))
        used += raw.nbytes + gap
    head = _HEAD.pack(-1, 0, 0, used, len(header), len(header), len(raws))
    return [head, *places, header, *parts]


def _aligned(place: int) -> int:
    """Return ``place`` rounded up to where a buffer may begin."""
    return -(-place // _ALIGN) * _ALIGN


def _address(buffer: Any) -> int:
    """Return where the memory of a buffer begins; 0 for an empty one."""
    if not len(buffer):
        return 0
    memory = np.frombuffer(buffer, np.uint8)
    return int(memory.__array_interface__["data"][0])


def _bytes_of(array: npt.NDArray[np.uint8]) -> memoryview:
    """Return the memory of ``array``, which it keeps: a numpy view would forget it."""
    return memoryview(array)  # type: ignore[arg-type]
