"""Make batches of in-memory tensors with one gather per tensor, not per sample.

``TensorDataset`` is read this way, in the loader's process and in workers.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from aioloader._collate.collate import borrowed, default_collate

_BOOLS = {bool, np.bool_}


def gatherable(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """Return a plain ``TensorDataset``'s tensors if all can be gathered, or None."""
    if type(dataset) is not TensorDataset:
        return None
    if TensorDataset.__getitem__.__module__ != TensorDataset.__module__:
        return None  # a program has replaced the method
    return dataset.tensors if all(map(_has_rows, dataset.tensors)) else None


def _has_rows(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is a CPU tensor whose rows torch can select and copy."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return _is_implemented(tensor.dtype, min(tensor.dim(), 2))


@functools.cache
def _is_implemented(dtype: torch.dtype, dimensions: int) -> bool:
    """Tell whether torch can select and copy rows; it cannot for 1-D uint16."""
    tensor = torch.empty((1,) * dimensions, dtype=dtype, device="cpu")
    try:
        tensor.index_select(0, torch.zeros(1, dtype=torch.int64, device="cpu"))
        tensor.clone()
    except RuntimeError:
        return False
    return True


class UnreadSamples:
    """A batch's samples, not read yet; ``default_collate`` reads and collates them.

    ``tensors`` are from ``gatherable``, ``indices`` from any batch sampler.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[Any]) -> None:
        self._tensors = tensors
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def collate(self) -> list[torch.Tensor]:
        """Return one batch tensor per dataset tensor, in lent memory if possible."""
        tensors, indices, index = self._tensors, self._indices, _as_index(self._indices)
        least = int(index.min()) if index is not None and len(index) else 2
        # A bool as an index is a mask, not row 0 or 1.
        may_be_bool = least < 2 and isinstance(indices, (list, tuple))
        has_bools = may_be_bool and not _BOOLS.isdisjoint(map(type, indices))
        if index is not None and not has_bools:
            if least < 0:  # negative indices count from the end
                index = torch.where(index < 0, index + len(tensors[0]), index)
            with contextlib.suppress(IndexError):  # raised again below, with the index
                return [_gather(tensor, index) for tensor in tensors]
        samples = [tuple(tensor[i] for tensor in tensors) for i in indices]
        columns: list[torch.Tensor] = default_collate(samples)
        return columns


def _as_index(indices: Any) -> torch.Tensor | None:
    """Return ``indices`` as a 1-D int64 CPU tensor; None if they are not integers."""
    try:
        # Arrays are copied, because they may be read-only.
        is_tensor = isinstance(indices, torch.Tensor)
        index = indices if is_tensor else torch.tensor(indices, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # e.g. slices
        return None
    is_whole = not index.is_floating_point() and index.dtype is not torch.bool
    if len(indices) and (index.dim() != 1 or not is_whole):
        return None
    return index.to("cpu", torch.int64)


def _gather(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shape = (len(index), *tensor.shape[1:])
    out = None if tensor.requires_grad else borrowed(shape, tensor.dtype)
    return torch.index_select(tensor, 0, index, out=out)
