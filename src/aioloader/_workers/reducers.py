"""Pickle tensors for other processes, with their memory out of band.

A dense CPU tensor is sent as the bytes that it spans, with its strides. Other tensors
are pickled as torch pickles them, except that their CPU storages are out of band.
"""

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from aioloader._transport.codec import Reducers

# A tensor's buffer, its address and its size in bytes.
BufferSpan: TypeAlias = tuple[pickle.PickleBuffer, int, int]
# Called with the memory of each pickled tensor.
NoteSpan: TypeAlias = Callable[[BufferSpan], object]


def reducers(note: NoteSpan) -> Reducers:
    """Return reducers for one pickle; they pass each tensor's memory to ``note``."""
    return {
        torch.Tensor: partial(_reduce, note),
        torch.UntypedStorage: partial(_reduce_storage, note),
    }


def _reduce(note: NoteSpan, tensor: torch.Tensor) -> Any:
    """Reduce a contiguous CPU tensor to its bytes; ``_reduce_rare`` reduces others."""
    try:
        array = tensor.numpy()
        buffer = pickle.PickleBuffer(array)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):  # no numpy dtype, a gradient, or no memory
        return _reduce_rare(note, tensor)
    shape = array.shape
    if not array.flags.c_contiguous or (
        # The strides of such dimensions need not follow from the shape.
        (1 in shape or 0 in shape)
        and array.strides != np.ndarray(shape, array.dtype, array).strides
    ):
        return _reduce_rare(note, tensor)
    note((buffer, tensor.data_ptr(), array.nbytes))
    return _rebuild, (buffer, array.dtype.str, shape)


def _rebuild(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Half the cost of ``torch.frombuffer`` and a view.
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _reduce_rare(note: NoteSpan, tensor: torch.Tensor) -> Any:
    if tensor.is_quantized:  # torch's workers lose the scales
        return _rebuild_quietly, tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if tensor.requires_grad or tensor.is_nested or tensor.is_meta:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    bits = tensor.is_conj(), tensor.is_neg()  # torch's workers lose them
    tensor = _flipped(tensor, *bits)
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not tensor.numel():
        empty = partial(torch.empty_strided, dtype=tensor.dtype, device="cpu")
        return empty, (shape, strides)
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    block = tensor.as_strided((size,), (1,)).view(torch.uint8)
    return _rebuild_rare, (_noted(note, block), tensor.dtype, shape, strides, bits)


def _flipped(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:  # noqa: FBT001
    """Return the tensor; if ``conj`` or ``neg``, a view with that bit flipped."""
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor  # noqa: SLF001


def _noted(note: NoteSpan, octets: torch.Tensor) -> pickle.PickleBuffer:
    buffer = pickle.PickleBuffer(octets.numpy())  # type: ignore[arg-type]
    note((buffer, octets.data_ptr(), octets.nbytes))
    return buffer


def _rebuild_rare(
    buffer: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    bits: tuple[bool, bool],
) -> torch.Tensor:
    memory = torch.frombuffer(buffer, dtype=dtype)
    return _flipped(memory.as_strided(shape, strides), *bits).data  # no view


def _rebuild_quietly(rebuild: Callable[..., torch.Tensor], args: Any) -> torch.Tensor:
    """Rebuild a tensor with a deprecated torch function, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rebuild(*args)


def _reduce_storage(note: NoteSpan, storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        return storage.__reduce__()  # type: ignore[no-untyped-call]
    if not storage.nbytes():  # torch cannot load its own pickle of an empty one
        return torch.UntypedStorage, ()
    octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return _rebuild_storage, (_noted(note, octets),)


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


# For pickles whose tensors need not share memory afterwards.
REDUCERS = reducers(lambda _span: None)


def is_shared(value: torch.Tensor | torch.UntypedStorage) -> bool:
    """Tell whether ``value`` is in shared memory; False if it has no storage."""
    try:
        return bool(value.is_shared())
    except (NotImplementedError, RuntimeError):  # sparse, on the meta device
        return False
