"""Columns of numbers: numpy views of Arrow memory, and tensors.

A column has one dtype and one shape for all rows: numbers, booleans, lists of a fixed
size, tensors of a fixed shape. NULLs in a batch do not change the kind of its column.
Batches and the values of rows own their memory.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioloader._collate.collate import borrowed, torch_dtype
from aioloader._transport.slots import MIN_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

Values: TypeAlias = npt.NDArray[Any]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Fixed(NamedTuple):
    """The dtype and shape of every row of a column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def fixed_of(kind: "pa.DataType") -> Fixed | None:
    """Return dtype and shape for an Arrow type; None if not numbers of one shape."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return fixed_of(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors_of(kind)
    if isinstance(kind, pa.BaseExtensionType):
        is_bool = kind.extension_name == "arrow.bool8"
        return fixed_of(pa.bool_() if is_bool else kind.storage_type)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Fixed(np.dtype(kind.to_pandas_dtype()), ())
    if types.is_fixed_size_list(kind):
        inner = fixed_of(kind.value_type)
        if inner is not None and not inner.shape and _is_primitive(kind.value_type):
            return Fixed(inner.dtype, (kind.list_size,))
    return None


def _tensors_of(kind: "pa.FixedShapeTensorType") -> Fixed | None:
    inner, shape = fixed_of(kind.value_type), tuple(kind.shape)
    if inner is None or inner.shape or not _is_primitive(kind.value_type):
        return None
    order = kind.permutation
    return Fixed(inner.dtype, tuple(shape[at] for at in order) if order else shape)


def _is_primitive(kind: "pa.DataType") -> bool:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    return bool(pa.types.is_primitive(kind))


def flags(array: "pa.Array") -> Flags | None:
    """Return which values are not NULL; None if there is no NULL."""
    if not array.null_count:
        return None
    valid: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


class Numbers:
    """A column of numbers.

    Attributes:
        values: Shape ``(rows, *shape)``; undefined at NULLs.
        valid: Which rows are not NULL, shape ``(rows,)``; None: all.
        cells: Which numbers in rows are not NULL, shaped like ``values``; None: all.
    """

    __slots__ = ("cells", "valid", "values")

    def __init__(
        self, values: Values, valid: Flags | None = None, cells: Flags | None = None
    ) -> None:
        self.values = values
        self.valid = valid
        self.cells = cells

    @classmethod
    def of(cls, array: "pa.Array", fixed: Fixed) -> "Numbers":
        """Return a view of an array of plain encoding whose type is ``fixed``."""
        if not fixed.shape and not hasattr(array, "storage"):
            return cls(_flat(array, fixed.dtype), flags(array))
        storage = getattr(array, "storage", array)
        size = storage.type.list_size
        child = storage.values.slice(storage.offset * size, len(storage) * size)
        values = _shaped(_flat(child, fixed.dtype), array)
        valid, inner = flags(storage), flags(child)
        cells = None
        if inner is not None:
            cells = _shaped(inner, array)
            if valid is not None:  # ignore the numbers of NULL rows
                cells = cells | ~valid.reshape(-1, *[1] * len(fixed.shape))
        return cls(values, valid, _holes(cells))

    @property
    def kind(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape of each row."""
        return self.values.dtype, self.values.shape[1:]

    @property
    def is_whole(self) -> bool:
        """Whether there is no NULL."""
        return self.valid is None and self.cells is None

    def cut(self, start: int, stop: int) -> "Numbers":
        """Return some of the rows, as a view."""
        if self.is_whole:
            return Numbers(self.values[start:stop])
        return self._each(lambda array: array[start:stop])

    def take(self, indices: npt.NDArray[np.int64]) -> "Numbers":
        """Return the rows at ``indices``, copied."""
        if self.is_whole:
            return Numbers(self.values.take(indices, axis=0))
        return self._each(lambda array: array.take(indices, axis=0))

    def rows(self) -> list[Any]:
        """Return the value of each row: a numpy scalar, a separate array, or None.

        An array with a NULL is returned as nested lists.
        """
        rows: list[Any] = list(self.values)
        if self.values.ndim > 1:
            rows = [row.copy() for row in rows]
        if self.cells is not None:
            whole = self.cells.all(axis=tuple(range(1, self.cells.ndim)))
            for at in np.flatnonzero(~whole):
                rows[at] = _with_none(self.values[at], self.cells[at])
        if self.valid is not None:
            for at in np.flatnonzero(~self.valid):
                rows[at] = None
        return rows

    def whole(self) -> Any:
        """Return the rows as one array, or as a list if there are NULLs."""
        holes = self.valid is not None or self.cells is not None
        return self.rows() if holes else self.values.copy()

    def _each(self, change: Any) -> "Numbers":
        """Apply ``change`` to each of the column's arrays."""
        valid, cells = (
            None if array is None else change(array)
            for array in (self.valid, self.cells)
        )
        return Numbers(change(self.values), _holes(valid), _holes(cells))

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (self.values, self.valid, self.cells)


def _flat(array: "pa.Array", dtype: np.dtype[Any]) -> Values:
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


def _shaped(flat: Values, array: "pa.Array") -> Values:
    """Give the numbers of an array of lists or tensors its shape."""
    kind = array.type
    shape = getattr(kind, "shape", None) or [array.type.list_size]
    values = flat.reshape(len(array), *shape)
    order = getattr(kind, "permutation", None)
    return values.transpose(0, *(at + 1 for at in order)) if order else values


def _with_none(values: Values, cells: Flags) -> Any:
    """Return an array as nested lists, with None where ``cells`` is false."""
    nothing: Any = None
    return np.where(cells, values.astype(object), nothing).tolist()


def merged(columns: Sequence[Numbers]) -> Numbers:
    """Return the concatenation of columns of one kind."""
    values = np.concatenate([column.values for column in columns])
    if not [True for c in columns if c.valid is not None or c.cells is not None]:
        return Numbers(values)
    valid = np.concatenate([_filled(c.valid, (len(c.values),)) for c in columns])
    cells = np.concatenate([_filled(c.cells, c.values.shape) for c in columns])
    return Numbers(values, _holes(valid), _holes(cells))


def woven(columns: Sequence[Numbers]) -> Numbers:
    """Interleave columns of one kind and length, row by row."""
    if any(one.valid is not None or one.cells is not None for one in columns):
        return merged(columns).take(turns(len(columns), len(columns[0].values)))
    values = np.stack([column.values for column in columns], axis=1)
    return Numbers(values.reshape(-1, *values.shape[2:]))


@functools.lru_cache(maxsize=4)
def turns(count: int, rows: int) -> npt.NDArray[np.int64]:
    """Return the order that interleaves ``count`` concatenated columns."""
    return np.arange(count * rows).reshape(count, rows).T.ravel()


def _holes(found: Flags | None) -> Flags | None:
    """Return the flags, or None if all are set."""
    return None if found is None or found.all() else found


def _filled(found: Flags | None, shape: tuple[int, ...]) -> Flags:
    return np.ones(shape, np.bool_) if found is None else found


def collate_numbers(columns: Sequence[Numbers], where: str) -> torch.Tensor:
    """Return columns of one kind as one tensor that owns its memory.

    Raises:
        TypeError: If there is a NULL; it names the column and the row.
    """
    for column in columns:
        if column.valid is not None or column.cells is not None:
            _refuse_nulls(merged(columns), where)
            break
    return tensor_of([column.values for column in columns])


def _refuse_nulls(column: Numbers, where: str) -> None:
    rows = len(column.values)
    found = np.zeros(rows, np.bool_) if column.valid is None else ~column.valid
    if column.cells is not None:
        found = found | ~column.cells.reshape(rows, -1).all(axis=1)
    if found.any():
        raise null_error(where, int(found.argmax()), rows)


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
