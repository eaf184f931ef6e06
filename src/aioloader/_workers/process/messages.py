"""The messages between a loader and its worker processes.

A request is a small pickle, or a packed batch if it carries samples. A result is a head
(kind, worker, ticket, times of the batch's steps) and a packed value.

``default_collate`` allocates its result in the slot of an arena, where the loader reads
it in place. Other tensors (from a custom collate function) are copied to the slot when
the batch is packed. Small batches are sent inside the frame: below about 64 KB a copy
is cheaper than a slot. If such a batch has only plain tensors, it is not pickled: a
description of its structure, cached on both sides, precedes the tensors' bytes.
"""

import functools
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from aioloader._transport.arena import ArenaWriter, SlotRef
from aioloader._transport.codec import (
    ALIGN,
    MIN_BUFFER_BYTES,
    Buffers,
    Extent,
    PendingCopies,
    Reducers,
    aligned,
    decode,
    encode,
    lay_out,
    overlap,
)
from aioloader._workers.reducers import BufferSpan, reducers

BatchArray: TypeAlias = "np.ndarray[Any, Any]"
EncodeBatch: TypeAlias = Callable[[Any, Reducers, int], tuple[bytes, Buffers]]

RESULT_HEAD = struct.Struct("<BHq8d")
STAGES = ("fetch", "transform", "collate", "send")

# The kinds of results. READY: the worker takes requests. BATCH: a batch. ANSWER: a
# ``BatchResult``, which also has errors or states. FATAL: the ``RemoteError`` for
# which the worker gave up. LEFT: the ``RemoteError`` of leaving the lifespan.
READY, BATCH, ANSWER, FATAL, LEFT = range(5)

# Slot number (-1: none), start and size; bytes used; bytes of the header; buffer count.
_HEAD = struct.Struct("<qqqqqq")
_EXTENT = struct.Struct("<qq")  # first byte and size of a buffer
_MAX_HEADER_INLINE = 1 << 14
# How many bytes of results may wait in the socket.
WAITING_BYTES = 1 << 20
# Replaces the slot number; then the description's size, the description, raw tensors.
_PLAIN = -2
_PLAIN_HEAD = struct.Struct("<qq")
# Limit on cached descriptions: batches of varying sizes need many.
_MAX_HEADS = 256


class Request(NamedTuple):
    """A request to make one batch, or to forget an iteration."""

    ticket: int  # number of the request; -1: the worker must forget ``iteration``
    iteration: int  # identifies the request's iteration
    epochs: Any = None  # the arguments of ``BatchMaker.begin_epoch``
    # The first arguments of the ``BatchTask``, up to the samples if the loader reads. A
    # replica's batches are numbered in the worker's stream, others in the epoch.
    asked: tuple[Any, ...] = ()
    again: bool = False  # as in ``BatchTask``
    # To open a replica's stream: its state, and the function that returns its batches'
    # seeds. To replace a worker with a copy of a stateful map-style dataset: a tuple of
    # the copy's last state.
    resume: Any = None
    is_alone: bool = False  # whether to make it alone, because a worker died with it


class Packer(threading.local):
    """A packer, which puts batches into frames and lends memory for creating them.

    Each thread packs one batch at a time. Batches of up to ``inline_bytes`` are sent
    inside the frame.
    """

    def __init__(
        self, arena: ArenaWriter, inline_bytes: int, encode: EncodeBatch = encode
    ) -> None:
        self._arena = arena
        self._encode = encode
        self._inline_bytes = max(inline_bytes, _MAX_HEADER_INLINE)
        self._wanted = 0  # bytes of the largest batch so far
        self._forget()

    def _forget(self) -> None:
        self._ref: SlotRef | None = None
        self._view: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        self._used = 0

    def reset(self) -> None:
        """Start a new batch; free the slot of the previous one if it was not sent."""
        if self._ref is not None:
            self._arena.free(self._ref)
        self._forget()

    def allocate(self, nbytes: int) -> Any:
        """Return writable memory for a part of the batch, in its slot if possible."""
        if self._ref is None:
            self._ref, self._view = self._arena.take(max(nbytes, self._wanted))
        start = aligned(self._used)
        self._used = start + nbytes
        if self._used > len(self._view):
            return np.empty(nbytes, np.uint8)  # the slot of the next batch is larger
        return _bytes_of(self._view)[start : start + nbytes]

    def pack(self, value: Any) -> list[Any]:
        """Return the parts of the frame for ``value``; write large data to a slot.

        Raises:
            Exception: The error of pickling ``value``.
            BatchTooLargeError: If the machine has no memory for the batch.
        """
        return self._plain(value) or self._pickled(value)

    def _plain(self, value: Any) -> list[Any] | None:
        """Return the frame's parts for a small batch of plain tensors, else None."""
        if self._ref is not None:
            return None
        arrays: list[BatchArray] = []
        spans: list[Extent] = []
        kinds: list[Any] = []
        try:
            form = _form_of(value, arrays, spans, kinds)
        except (TypeError, RuntimeError):
            return None
        most = sum(nbytes for _, nbytes in spans) + ALIGN * len(arrays)
        if most > self._inline_bytes or (len(arrays) > 1 and overlap(spans)):
            return None
        head, gaps = _describe(form, *kinds)
        parts: list[Any] = [head]
        for array, gap in zip(arrays, gaps, strict=True):
            parts += (array, gap)
        return parts

    def _pickled(self, value: Any) -> list[Any]:
        spans: list[BufferSpan] = []
        header, buffers = self._encode(value, reducers(spans.append), MIN_BUFFER_BYTES)
        places = [(address, nbytes) for _, address, nbytes in spans]
        has_small = any(nbytes < MIN_BUFFER_BYTES for _, nbytes in places)
        if has_small and overlap(places):
            # Tensors that share memory must stay together, even small ones.
            spans.clear()
            header, buffers = self._encode(value, reducers(spans.append), 0)
        of_tensors = {id(buffer): address for buffer, address, _ in spans}
        raws = [buffer.raw() for buffer in buffers]
        addresses = [of_tensors.get(id(buffer), 0) for buffer in buffers]
        total = sum(aligned(raw.nbytes) for raw in raws)
        is_small = len(header) + total <= self._inline_bytes
        if is_small and (self._ref is None or not total):
            self.reset()
            places, copies, end = lay_out(raws, addresses, 0)
            memory = bytearray(end)
            _copy(copies, memoryview(memory))
            return [*_heads((-1, 0, 0), end, header, places), memory]
        if len(header) > _MAX_HEADER_INLINE:
            # A long header, for example with many strings, is sent as a buffer.
            raws.append(memoryview(header))
            addresses.append(0)
            header = b""
        places = self._place(raws, addresses)
        ref, used = self._ref, max(start + size for start, size in places)
        assert ref is not None
        self._wanted = max(self._wanted, used)
        self._forget()
        return _heads(ref, used, header, places)

    def _place(self, raws: list[memoryview], addresses: list[int]) -> list[Extent]:
        """Put all buffers into one slot, larger if needed; return their extents."""
        if self._ref is not None:
            begin, size = _address(self._view), len(self._view)
            # The buffers of arrays, not only of tensors, may be in the slot.
            places = [(_address(raw) - begin, raw.nbytes) for raw in raws]
            rest = [k for k, (start, _) in enumerate(places) if not 0 <= start < size]
            if not rest:
                return places
            apart = [raws[k] for k in rest], [addresses[k] for k in rest]
            moved, copies, end = lay_out(*apart, min(self._used, size))
            if end <= size:
                _copy(copies, _bytes_of(self._view))
                for k, place in zip(rest, moved, strict=True):
                    places[k] = place
                return places
        places, copies, end = lay_out(raws, addresses, 0)
        before = self._ref
        self._ref, self._view = self._arena.take(max(end, self._wanted))
        _copy(copies, _bytes_of(self._view))
        if before is not None:
            self._arena.free(before)
        return places


def _heads(
    slot: tuple[int, int, int], used: int, header: bytes, places: list[Extent]
) -> list[bytes]:
    head = _HEAD.pack(*slot, used, len(header), len(places))
    return [head, *(_EXTENT.pack(*place) for place in places), header]


def _copy(copies: PendingCopies, memory: memoryview) -> None:
    for start, raw in copies:
        memory[start : start + raw.nbytes] = raw


# Returns the structure and the leaves of a batch, given their description.
_described = functools.lru_cache(_MAX_HEADS)(decode)


def unpack(
    frame: bytes | memoryview, offset: int, arena: Any, *, copy: bool = False
) -> Any:
    """Return the batch that is packed in ``frame``, starting at byte ``offset``.

    Large parts are views of the slot or, with ``copy``, private copies. Tensors are not
    inference tensors, because a batch may be used outside of ``torch.inference_mode``.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return unpack(frame, offset, arena, copy=copy)
    number, length = _PLAIN_HEAD.unpack_from(frame, offset)
    if number == _PLAIN:
        offset += _PLAIN_HEAD.size
        form, leaves = _described(bytes(frame[offset : offset + length]))
        octets = bytearray(frame[offset + length :])
        tensors = [
            torch.from_numpy(np.ndarray(shape, dtype, octets, start))
            for shape, dtype, start in leaves
        ]
        return _assemble(form, iter(tensors))
    number, start, size, used, length, count = _HEAD.unpack_from(frame, offset)
    offset += _HEAD.size
    places = [
        _EXTENT.unpack_from(frame, offset + k * _EXTENT.size) for k in range(count)
    ]
    rest = memoryview(frame)[offset + count * _EXTENT.size :]
    if number < 0:
        memory = memoryview(bytearray(rest[length:]))
    else:
        view = arena.view(SlotRef(number, start, size), used)
        memory = _bytes_of(view.copy() if copy else view)
        del view
    buffers = [memory[begin : begin + nbytes] for begin, nbytes in places]
    return decode(rest[:length] if length else buffers.pop(), buffers)


def _assemble(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if form is None:
        return next(tensors)
    kind, keys, parts = form
    values = [_assemble(part, tensors) for part in parts]
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return values if kind is list else tuple(values)


def slot_of(frame: bytes | memoryview, offset: int) -> SlotRef | None:
    """Return the slot of a packed batch; None if the batch is inside the frame."""
    if _PLAIN_HEAD.unpack_from(frame, offset)[0] < 0:
        return None
    return SlotRef(*_HEAD.unpack_from(frame, offset)[:3])


def used_of(frame: bytes | memoryview, offset: int) -> int:
    """Return how many bytes a packed batch uses in its slot."""
    used: int = _HEAD.unpack_from(frame, offset)[3]
    return used


def _form_of(
    value: Any, arrays: list[BatchArray], spans: list[Extent], kinds: list[Any]
) -> Any:
    """Return the structure of a batch of plain tensors in lists, tuples and dicts.

    Appends to ``arrays``, to ``spans`` (their memory) and to ``kinds`` (types, shapes).
    """
    kind = type(value)
    if kind is torch.Tensor:
        array, shape = value.numpy(), value.shape
        if not value.is_contiguous() or 0 in shape or 1 in shape:
            raise TypeError("strides may not follow from the shape")
        arrays.append(array)
        spans.append((value.data_ptr(), value.nbytes))
        kinds += (value.dtype, shape)
        return None
    if kind not in {list, tuple, dict} or not value:
        raise TypeError("no tensor")
    if kind is dict:
        if {*map(type, value)} != {str}:
            raise TypeError("keys may be equal without being the same")
        keys, value = tuple(value), value.values()
    else:
        keys = ()
    return kind, keys, tuple([_form_of(part, arrays, spans, kinds) for part in value])


@functools.lru_cache(_MAX_HEADS)
def _describe(form: Any, *kinds: Any) -> tuple[bytes, list[bytes]]:
    """Return a frame's head for tensors of ``kinds``, and the padding after each."""
    leaves, gaps, start = [], [], 0
    for dtype, shape in zip(kinds[::2], kinds[1::2], strict=True):
        array = torch.empty(shape, dtype=dtype, device="cpu").numpy()
        leaves.append((array.shape, array.dtype.str, start))
        end = aligned(start + array.nbytes)
        gaps.append(bytes(end - start - array.nbytes))
        start = end
    description = pickle.dumps((form, leaves), 5)
    return _PLAIN_HEAD.pack(_PLAIN, len(description)) + description, gaps


def _address(buffer: Any) -> int:
    """Return the address of a buffer; 0 for an empty one."""
    if not len(buffer):
        return 0
    memory = np.frombuffer(buffer, np.uint8)
    return int(memory.__array_interface__["data"][0])


def _bytes_of(array: "np.ndarray[Any, np.dtype[np.uint8]]") -> memoryview:
    """Return a memoryview; unlike a numpy view, it keeps the memory's owner alive."""
    return memoryview(array)  # type: ignore[arg-type]
