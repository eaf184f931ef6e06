"""Batches of tensors that are in memory: one gather per tensor, no work per sample.

So are batches of a ``TensorDataset`` made, in this process and in workers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from aioloader._collate.collate import borrowed


def gatherable(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of an exact ``TensorDataset`` that can be gathered."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
    return dataset.tensors


class Rows:
    """Rows of tensors that nobody has looked at: ``default_collate`` gathers them.

    Args:
        tensors: What ``gatherable`` returned.
        indices: Which rows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        self._tensors = tensors
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def collate(self) -> list[torch.Tensor]:
        """Return a tensor for each of the dataset's, in memory of the batch.

        Raises:
            IndexError: If an index is out of range.
        """
        index = torch.as_tensor(self._indices, dtype=torch.int64)
        if self._indices and min(self._indices) < 0:  # from the end, as for a list
            index = torch.where(index < 0, index + len(self._tensors[0]), index)
        return [_gather(tensor, index) for tensor in self._tensors]


def _gather(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shape = (len(index), *tensor.shape[1:])
    out = None if tensor.requires_grad else borrowed(shape, tensor.dtype)
    return torch.index_select(tensor, 0, index, out=out)
