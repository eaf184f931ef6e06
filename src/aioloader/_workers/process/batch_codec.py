"""The encoding of batches between processes: written once, read in place.

``default_collate`` allocates its result in the slot; tensors that are elsewhere when
the batch is packed (from a custom collate function) are copied in. Small batches travel
inside the frame: below about 64 KB a copy is cheaper than a slot. A small batch of
plain tensors is not pickled either: a description of its structure is cached, and
looked up by its bytes.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from aioloader._transport.arena import ArenaReader, ArenaWriter, SlotRef
from aioloader._transport.codec import LEAST_BYTES, decode, encode
from aioloader._transport.layout import (
    ALIGN,
    Layout,
    Place,
    aligned,
    do_overlap,
    lay_out,
)
from aioloader._workers.reducers import Span, reducers

Array: TypeAlias = "np.ndarray[Any, Any]"

# slot number (-1: none), start, size; bytes used; header: place and size; buffers
_HEAD = struct.Struct("<qqqqqqq")
_PLACE = struct.Struct("<qq")  # first byte and size of a buffer
_HEADER_INLINE = 1 << 14
# Instead of a slot number: a description of so many bytes and raw tensors follow.
_PLAIN = -2
_PLAIN_HEAD = struct.Struct("<qq")
# Limit on cached descriptions: batches of varying sizes need many.
_MOST_DESCRIPTIONS = 256


class Packer:
    """The sender's side: lend memory of a slot, and pack a batch to send.

    One batch at a time: each thread has its own packer.

    Args:
        arena: The arena of the slots.
        inline_bytes: Up to this size a batch travels inside the frame.
    """

    def __init__(self, arena: ArenaWriter, inline_bytes: int) -> None:
        self._arena = arena
        self._inline_bytes = max(inline_bytes, _HEADER_INLINE)
        self._ref: SlotRef | None = None
        self._view: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        self._used = 0
        self._wanted = 0  # by the largest batch so far
        self._described: dict[Any, tuple[bytes, list[bytes]]] = {}

    def reset(self) -> None:
        """Start a new batch; memory lent for a failed one is free again."""
        if self._ref is not None:
            self._arena.give_back(self._ref)
        self._forget()

    def lease(self, nbytes: int) -> Any:
        """Return writable memory for a part of the batch, in its slot if it fits.

        Raises:
            BatchTooLargeError: If the machine has no memory for it.
        """
        if self._ref is None:
            self._ref, self._view = self._arena.take(max(nbytes, self._wanted))
        start = aligned(self._used)
        self._used = start + nbytes
        if self._used > len(self._view):
            return np.empty(nbytes, np.uint8)  # the slot of the next batch is larger
        # A numpy view would not keep the owner of the memory alive.
        return _bytes_of(self._view)[start : start + nbytes]

    def pack(self, value: Any) -> list[bytes | memoryview]:
        """Return the parts of the frame, after writing large ones to the slot.

        Raises:
            Exception: The error of pickling ``value``.
            BatchTooLargeError: If the machine has no memory for it.
        """
        return self._plain(value) or self._pickled(value)

    def _plain(self, value: Any) -> list[Any] | None:
        """Return the parts of a small batch of plain tensors, or None."""
        if self._ref is not None:
            return None
        arrays: list[np.ndarray[Any, Any]] = []
        addresses: list[Place] = []
        try:
            form = _form_of(value, arrays, addresses)
        except _NOT_PLAIN:
            return None
        if sum(nbytes for _, nbytes in addresses) + ALIGN * len(arrays) > (
            self._inline_bytes
        ) or (len(arrays) > 1 and do_overlap(addresses)):
            return None
        described = self._described.get(form)
        if described is None:
            if len(self._described) >= _MOST_DESCRIPTIONS:
                self._described.clear()
            described = self._described[form] = _describe(form, arrays)
        head, gaps = described
        if len(arrays) == 1:
            return [head, arrays[0]]
        return [
            head,
            *(part for pair in zip(arrays, gaps, strict=True) for part in pair),
        ]

    def _pickled(self, value: Any) -> list[Any]:
        spans: list[Span] = []
        header, buffers = encode(value, reducers(spans.append))
        if _have_small_overlaps(spans):
            # Tensors that share memory stay together, however small.
            spans.clear()
            header, buffers = encode(value, reducers(spans.append), least_bytes=0)
        of_tensors = {id(buffer): address for buffer, address, _ in spans}
        raws = [buffer.raw() for buffer in buffers]
        addresses = [of_tensors.get(id(buffer), 0) for buffer in buffers]
        total = sum(aligned(raw.nbytes) for raw in raws)
        is_small = len(header) + total <= self._inline_bytes
        if is_small and (self._ref is None or not total):
            self.reset()
            return _inline(header, lay_out(raws, addresses, 0))
        if len(header) > _HEADER_INLINE:
            # E.g. a list of long strings: the header is one more buffer.
            return self._in_slot(b"", [*raws, memoryview(header)], [*addresses, 0])
        return self._in_slot(header, raws, addresses)

    def _forget(self) -> None:
        self._ref = None
        self._view, self._used = np.empty(0, np.uint8), 0

    def _in_slot(
        self, header: bytes, raws: list[memoryview], addresses: list[int]
    ) -> list[Any]:
        places = self._place(raws, addresses)
        ref, used = self._ref, max(start + size for start, size in places)
        assert ref is not None
        self._wanted = max(self._wanted, used)
        head = _HEAD.pack(*ref, used, 0, len(header), len(raws))
        self._forget()
        return [head, *(_PLACE.pack(*place) for place in places), header]

    def _place(self, raws: list[memoryview], addresses: list[int]) -> list[Place]:
        """Copy other buffers into the slot; move all if it is too small."""
        if self._ref is None:
            return self._move(lay_out(raws, addresses, 0))
        begin, size = _address(self._view), len(self._view)
        # Other arrays than tensors' may be in the slot too.
        places = [(_address(raw) - begin, raw.nbytes) for raw in raws]
        rest = [k for k, (at, _) in enumerate(places) if not 0 <= at < size]
        if rest:
            raws_left, addresses_left = (
                [raws[k] for k in rest],
                [addresses[k] for k in rest],
            )
            layout = lay_out(raws_left, addresses_left, min(self._used, size))
            if layout.end > size:
                return self._move(lay_out(raws, addresses, 0))
            self._copy(layout)
            for k, place in zip(rest, layout.places, strict=True):
                places[k] = place
        return places

    def _move(self, layout: Layout) -> list[Place]:
        """Copy everything into a slot that is large enough."""
        before = self._ref
        self._ref, self._view = self._arena.take(max(layout.end, self._wanted))
        self._copy(layout)
        if before is not None:
            self._arena.give_back(before)
        return layout.places

    def _copy(self, layout: Layout) -> None:
        for start, raw in layout.copies:
            self._view[start : start + raw.nbytes] = np.frombuffer(raw, np.uint8)


def _have_small_overlaps(spans: list[Span]) -> bool:
    """Tell whether some tensors that share memory would stay in the header."""
    if len(spans) < 2 or min(nbytes for *_, nbytes in spans) >= LEAST_BYTES:
        return False
    return do_overlap([(address, nbytes) for _, address, nbytes in spans])


def unpack(
    frame: bytes | memoryview, at: int, arena: ArenaReader, *, copy: bool = False
) -> Any:
    """Return the packed batch; its large parts are views of the slot.

    Args:
        frame: A frame with a packed batch.
        at: Offset of the batch in the frame.
        arena: The reader's side of the sender's arena.
        copy: Make private copies and free the slot at once.
    """
    number, length = _PLAIN_HEAD.unpack_from(frame, at)
    if number == _PLAIN:
        return _unpack_plain(memoryview(frame)[at + _PLAIN_HEAD.size :], length)
    number, start, size, used, first, length, count = _HEAD.unpack_from(frame, at)
    at += _HEAD.size
    places = [_PLACE.unpack_from(frame, at + k * _PLACE.size) for k in range(count)]
    at += count * _PLACE.size
    rest = memoryview(frame)[at:]
    if number < 0:
        memory = memoryview(bytearray(rest[first:] if count else b""))
    else:
        view = arena.lease(SlotRef(number, start, size), used)
        memory = _bytes_of(view.copy() if copy else view)
        del view
    buffers = [memory[begin : begin + nbytes] for begin, nbytes in places]
    return decode(rest[:length] if length else buffers.pop(), buffers)


def slot_of(frame: bytes | memoryview, at: int) -> SlotRef | None:
    """Return the slot of a packed batch, if it has one."""
    if _PLAIN_HEAD.unpack_from(frame, at)[0] == _PLAIN:
        return None
    ref = SlotRef(*_HEAD.unpack_from(frame, at)[:3])
    return None if ref.number < 0 else ref


def _inline(header: bytes, layout: Layout) -> list[Any]:
    parts: list[Any] = []
    used = 0
    for start, raw in layout.copies:
        parts += (bytes(start - used), raw)
        used = start + raw.nbytes
    places = [_PLACE.pack(*place) for place in layout.places]
    head = _HEAD.pack(-1, 0, 0, used, len(header), len(header), len(places))
    return [head, *places, header, *parts]


# -- small batches of plain tensors ---------------------------------------------------

# Errors of describing a batch that does not consist of plain tensors.
_NOT_PLAIN = (TypeError, RuntimeError)


class _Leaf(NamedTuple):
    """A tensor in the memory of its batch."""

    shape: tuple[int, ...]
    dtype: str
    start: int


def _form_of(value: Any, arrays: list[Array], addresses: list[Place]) -> Any:
    """Return the structure of a batch as a key; append its arrays.

    Raises:
        TypeError: If it is not made of plain tensors in lists, tuples and dicts.
        RuntimeError: If a tensor is not plain memory.
    """
    kind = type(value)
    if kind is torch.Tensor:
        array, shape = value.numpy(), value.shape
        if not value.is_contiguous() or 0 in shape or 1 in shape:
            raise TypeError("strides may not follow from the shape")
        arrays.append(array)
        addresses.append((value.data_ptr(), value.nbytes))
        return value.dtype, shape
    if kind not in {list, tuple, dict} or not value:
        raise TypeError("no tensor")
    if kind is dict:
        if {*map(type, value)} != {str}:
            raise TypeError("keys may be equal without being the same")
        keys, value = tuple(value), value.values()
    else:
        keys = ()
    return kind, keys, tuple([_form_of(part, arrays, addresses) for part in value])


def _describe(form: Any, arrays: list[Array]) -> tuple[bytes, list[bytes]]:
    """Return the head of a frame for such a batch, and the padding after each array."""
    leaves, gaps, start = [], [], 0
    for array in arrays:
        leaves.append(_Leaf(array.shape, array.dtype.str, start))
        end = aligned(start + array.nbytes)
        gaps.append(bytes(end - start - array.nbytes))
        start = end
    description = pickle.dumps((_without_leaves(form), leaves), 5)
    return _PLAIN_HEAD.pack(_PLAIN, len(description)) + description, gaps


def _without_leaves(form: Any) -> Any:
    if len(form) == 2:
        return None
    kind, keys, parts = form
    return kind, keys, [_without_leaves(part) for part in parts]


# Maps the bytes of a description to the structure and the leaves of a batch.
_DESCRIPTIONS: dict[bytes, tuple[Any, list[_Leaf]]] = {}


def _unpack_plain(frame: memoryview, length: int) -> Any:
    description = bytes(frame[:length])
    known = _DESCRIPTIONS.get(description)
    if known is None:
        if len(_DESCRIPTIONS) >= _MOST_DESCRIPTIONS:
            _DESCRIPTIONS.clear()
        known = _DESCRIPTIONS[description] = pickle.loads(description)  # noqa: S301  (our own worker)
    form, leaves = known
    memory = bytearray(frame[length:])
    return _assemble(
        form,
        iter(
            [
                torch.from_numpy(np.ndarray(shape, dtype, memory, start))
                for shape, dtype, start in leaves
            ]
        ),
    )


def _assemble(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if form is None:
        return next(tensors)
    kind, keys, parts = form
    values = [_assemble(part, tensors) for part in parts]
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return values if kind is list else tuple(values)


def _address(buffer: Any) -> int:
    """Return the address of a buffer; 0 for an empty one."""
    if not len(buffer):
        return 0
    memory = np.frombuffer(buffer, np.uint8)
    return int(memory.__array_interface__["data"][0])


def _bytes_of(array: "np.ndarray[Any, np.dtype[np.uint8]]") -> memoryview:
    """Return the memory of ``array`` and keep it alive; a numpy view would not."""
    return memoryview(array)  # type: ignore[arg-type]
