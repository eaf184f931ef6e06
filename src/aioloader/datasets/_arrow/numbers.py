"""Columns of numbers: numpy views of Arrow memory, and tensors.

A type of numbers has one dtype and one shape for all rows: numbers, booleans, lists of
a fixed size, tensors of a fixed shape. Without NULLs such a column is kept as a numpy
array of shape ``(rows, *shape)``, a view of Arrow's memory where that is possible.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioloader._collate.collate import borrowed, torch_dtype
from aioloader._transport.slots import MIN_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

Values: TypeAlias = npt.NDArray[Any]
Flags: TypeAlias = npt.NDArray[np.bool_]
Dtype: TypeAlias = np.dtype[Any]


def fixed_of(kind: "pa.DataType") -> Dtype | None:
    """Return the dtype of rows of an Arrow type; None if not numbers of one shape.

    That of several numbers is numpy's of a sub-array, which has a base and a shape.
    """
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return fixed_of(kind.value_type)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype: Dtype = np.dtype(kind.to_pandas_dtype())
        return dtype
    shape: tuple[int, ...]
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation or range(len(kind.shape))
        shape = tuple(kind.shape[at] for at in order)
    elif isinstance(kind, pa.BaseExtensionType):
        is_bool = kind.extension_name == "arrow.bool8"
        return fixed_of(pa.bool_() if is_bool else kind.storage_type)
    elif types.is_fixed_size_list(kind):
        shape = (kind.list_size,)
    else:
        return None
    inner = fixed_of(kind.value_type)
    if inner is None or inner.shape or not types.is_primitive(kind.value_type):
        return None
    return np.dtype((inner, shape))


def view(array: "pa.Array", fixed: Dtype) -> Values:
    """Return the numbers of an array of plain encoding; undefined at NULLs."""
    return _shaped(_flat(_leaf(array, fixed), fixed.base), array, fixed)


def cells(array: "pa.Array", fixed: Dtype) -> Flags | None:
    """Return which numbers are not NULL, shaped like ``view``; None: all.

    The numbers of a row that is NULL itself count as valid.
    """
    leaf, valid = _leaf(array, fixed), flags(array)
    if not fixed.shape or not leaf.null_count:
        return None
    found: Flags = _shaped(leaf.is_valid().to_numpy(zero_copy_only=False), array, fixed)
    if valid is not None:
        found = found | ~valid.reshape(-1, *[1] * len(fixed.shape))
    return None if found.all() else found


def flags(array: "pa.Array") -> Flags | None:
    """Return which values are not NULL; None if there is no NULL."""
    if not array.null_count:
        return None
    valid: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def is_whole(array: "pa.Array", fixed: Dtype) -> bool:
    """Return whether an array of numbers has no NULL, in rows or for rows."""
    return not array.null_count and not _leaf(array, fixed).null_count


def first_hole(array: "pa.Array", fixed: Dtype) -> int | None:
    """Return the first row of numbers that is NULL, or has one; None: no row."""
    valid, inner = flags(array), cells(array, fixed)
    found = np.ones(len(array), np.bool_) if valid is None else valid
    if inner is not None:
        found = found & inner.reshape(len(array), -1).all(axis=1)
    return None if found.all() else int(found.argmin())


def array_of(values: Values, kind: "pa.DataType") -> "pa.Array":
    """Return the Arrow array of a plain type whose ``view`` is ``values``."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if values.ndim == 1:
        return pa.array(values, kind)
    if order := getattr(kind, "permutation", None):
        values = values.transpose(0, *(int(at) + 1 for at in np.argsort(order)))
    storage = getattr(kind, "storage_type", kind)
    flat = pa.array(values.reshape(-1), kind.value_type)
    lists = pa.FixedSizeListArray.from_arrays(flat, type=storage)
    return lists if storage is kind else pa.ExtensionArray.from_storage(kind, lists)


def _leaf(array: "pa.Array", fixed: Dtype) -> "pa.Array":
    """Return the primitive array that holds the numbers."""
    if not fixed.shape:
        return array
    storage = getattr(array, "storage", array)
    size = storage.type.list_size
    return storage.values.slice(storage.offset * size, len(storage) * size)


def _flat(array: "pa.Array", dtype: Dtype) -> Values:
    """Return the numbers of a primitive array, without a copy (except booleans)."""
    size, offset, buffer = len(array), array.offset, array.buffers()[1]
    if not size or buffer is None:
        return np.zeros(size, dtype)
    if dtype != np.bool_:
        return np.frombuffer(buffer, dtype, size, offset * dtype.itemsize)
    first = offset // 8
    bits = np.frombuffer(buffer, np.uint8, (offset + size + 7) // 8 - first, first)
    unpacked = np.unpackbits(bits, bitorder="little")[offset - 8 * first :]
    return unpacked[:size].view(np.bool_)


def _shaped(flat: Values, array: "pa.Array", fixed: Dtype) -> Values:
    """Give the numbers of an array of lists or tensors its shape."""
    if not fixed.shape:
        return flat
    kind = array.type
    values = flat.reshape(len(array), *getattr(kind, "shape", fixed.shape))
    order = getattr(kind, "permutation", None)
    return values.transpose(0, *(at + 1 for at in order)) if order else values


def null_error(where: str, row: int, rows: int) -> TypeError:
    """Return the error for a NULL in a tensor column."""
    return TypeError(
        f"column {where!r} has a NULL in row {row} of this batch of {rows}, and a "
        "tensor cannot hold it: filter such rows, replace NULLs on reading (nulls= of "
        "the dataset), or pass a collate_fn"
    )


def copied(values: Values) -> torch.Tensor:
    """Return an array as a tensor that owns its memory, like ``tensor_of``.

    A small one is copied without numpy, which releases the GIL for each array:
    switching to a waiting thread takes longer than the copy.
    """
    if not 0 < values.nbytes < MIN_BYTES:
        return tensor_of([values])
    flat = torch.frombuffer(bytearray(values.data), dtype=torch_dtype(values.dtype))
    return flat if values.ndim == 1 else flat.view(values.shape)


def tensor_of(arrays: Sequence[Values]) -> torch.Tensor:
    """Return arrays of one dtype as one tensor, joined along the first dimension.

    It owns its memory; if it is large and there is a pool, the pool does.
    """
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    out = borrowed(shape, torch_dtype(arrays[0].dtype))
    if out is None:
        whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy()
        return torch.from_numpy(whole)
    np.concatenate(arrays, out=out.numpy())
    return out
