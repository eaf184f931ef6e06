"""Convert samples and batches to hashable values, equal if all bits are equal.

``==`` does not suffice: on tensors it returns a tensor, and NaN differs from NaN.
"""

import pickle
from collections.abc import Hashable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

_ATOMS = (str, bytes, int, bool, type(None))
_MAX_SHOWN = 200  # maximum number of characters of a batch in a message


def frozen(value: Any) -> Hashable:
    """Return a hashable value that is equal for values with the same bits.

    Tensors and arrays are compared by device, dtype, shape and bytes; containers and
    plain objects by their parts; ``_ATOMS`` and classes directly; others by pickle.
    """
    kind = type(value)
    part: Hashable
    match value:
        case _ if kind in _ATOMS or isinstance(value, type):
            part = value
        case torch.Tensor():
            part = _frozen_tensor(value)
        case Mapping():
            part = tuple((frozen(k), frozen(v)) for k, v in value.items())
        case list() | tuple():
            part = tuple(map(frozen, value))
        case set() | frozenset():
            part = frozenset(map(frozen, value))
        case _ if hasattr(value, "__array_interface__"):  # also an image
            part = _frozen_array(value)
        case _ if type(getattr(value, "__dict__", None)) is dict and not callable(
            value
        ):
            part = frozen(vars(value))
        case _:
            part = pickle.dumps(value)
    return kind, part


def _frozen_tensor(tensor: torch.Tensor) -> Hashable:
    whole = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = whole.detach().cpu().reshape(-1).contiguous()
    data = flat.view(torch.uint8).numpy().tobytes()
    return str(tensor.device), str(tensor.dtype), tuple(tensor.shape), data


def _frozen_array(value: Any) -> Hashable:
    array = np.asarray(value)
    if array.dtype.hasobject:
        return array.shape, frozen(array.tolist())
    return array.dtype.str, array.shape, array.tobytes()


def compare(
    where: str, kind: str, expected: list[Any], actual: list[Any], start: int = 0
) -> None:
    """Check that two lists of batches or samples are equal; number them from ``start``.

    Raises:
        AssertionError: If they differ; the message names the first difference.
    """
    nothing = object()
    pairs = zip_longest(expected, actual, fillvalue=nothing)
    for number, pair in enumerate(pairs, start):
        if frozen(pair[0]) != frozen(pair[1]):
            first, second = ("none" if x is nothing else shown(x) for x in pair)
            raise AssertionError(
                f"{where}: {kind} {number} differs: expected {first}, found {second}"
            )


def shown(value: Any) -> str:
    """Return the ``repr`` of ``value`` on one line, cut to fit in a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
