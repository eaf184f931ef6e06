"""Recycled memory: reused when the last view died, never before."""

import warnings
from typing import Any

import numpy as np
import torch

from aioloader import default_collate
from aioloader._collate.collate import collated
from aioloader._transport.slots import MIN_BYTES, SlotPool


def address(slot: Any) -> int:
    """Return where the memory of an array is."""
    return int(slot.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_view_dies() -> None:
    """Through arrays and tensors, views of them and their numpy aliases."""
    pool = SlotPool()
    slot = pool.lease(MIN_BYTES)
    where = address(slot)
    array = np.ndarray(MIN_BYTES // 4, np.float32, slot)
    del slot
    tensor = torch.from_numpy(array.reshape(64, -1)[:, 1:])
    del array
    alias = tensor[3:].T.numpy()
    del tensor
    assert address(pool.lease(MIN_BYTES)) != where
    del alias
    assert address(pool.lease(MIN_BYTES)) == where


def lent(samples: list[Any]) -> Any:
    """Collate into lent memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return collated(SlotPool().lease, default_collate, samples)


def test_lent_memory_changes_no_batch() -> None:
    """Any dtype, any layout, arrays and tensors, read-only ones too."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 200, (8, 300, 300))
    dtypes = [np.uint8, np.int16, np.int64, np.float32, np.float64, np.bool_]
    for dtype in dtypes:
        arrays = list(base.astype(dtype))
        strided = [array.T for array in arrays]
        read_only: list[Any] = [
            np.frombuffer(array.tobytes(), dtype) for array in arrays
        ]
        for samples in (arrays, strided, read_only):
            expected = torch.stack([torch.from_numpy(s.copy()) for s in samples])
            assert torch.equal(batch := lent(samples), expected)
            assert batch.is_contiguous()
    for torch_dtype in (torch.bfloat16, torch.complex64, torch.float16, torch.uint8):
        tensors = list(torch.from_numpy(base).to(torch_dtype))
        assert torch.equal(lent(tensors), torch.stack(tensors))
    mixed = [torch.zeros(300, 300), torch.zeros(300, 300, dtype=torch.float64)]
    assert lent(mixed).dtype == torch.stack(mixed).dtype
    leaf = torch.zeros(300, 300, requires_grad=True)
    assert lent([leaf, leaf]).requires_grad
