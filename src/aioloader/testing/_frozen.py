"""Samples and batches as values that can be compared, bit for bit, and counted.

``==`` does not work for them: on tensors it gives a tensor, and NaN is not equal to
NaN.
"""

import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch

_ATOMS = (str, bytes, int, bool, type(None))
_MOST = 200  # characters of a batch that a message shows


def frozen(value: Any) -> Hashable:
    """Return a value that is equal for two values if they are, in every bit.

    Tensors and arrays are compared by dtype, shape and bytes; containers and plain
    objects by their parts; anything else by its pickle.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    for base, freeze in _FREEZERS.items():
        if isinstance(value, base):
            return kind, freeze(value)
    if hasattr(value, "__array_interface__"):  # a picture
        return kind, _frozen_array(value)
    if type(getattr(value, "__dict__", None)) is dict and not callable(value):
        return kind, frozen(vars(value))
    return kind, pickle.dumps(value)


def _frozen_tensor(tensor: torch.Tensor) -> Hashable:
    whole = tensor if tensor.layout is torch.strided else tensor.to_dense()
    data = (
        whole.detach()
        .cpu()
        .reshape(-1)
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    return str(tensor.device), str(tensor.dtype), tuple(tensor.shape), data


def _frozen_array(value: Any) -> Hashable:
    array = np.asarray(value)
    if array.dtype.hasobject:
        return array.shape, frozen(array.tolist())
    return array.dtype.str, array.shape, array.tobytes()


def _frozen_mapping(value: Mapping[Any, Any]) -> Hashable:
    return tuple((frozen(key), frozen(one)) for key, one in value.items())


def _frozen_sequence(value: Any) -> Hashable:
    return tuple(map(frozen, value))


def _frozen_set(value: Any) -> Hashable:
    return frozenset(map(frozen, value))


_FREEZERS: dict[Any, Callable[[Any], Hashable]] = {
    torch.Tensor: _frozen_tensor,
    (np.ndarray, np.generic): _frozen_array,
    Mapping: _frozen_mapping,
    (list, tuple): _frozen_sequence,
    (set, frozenset): _frozen_set,
}


def shown(value: Any) -> str:
    """Return a short text of ``value``, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
