"""A block of table rows in columnar form, and the conversion of Arrow values.

Slicing and joining do not copy: the results keep the original memory alive. ``pick``
and ``collate`` copy. Columns without NULLs whose rows are numbers of one shape
(scalars, fixed-size lists, tensors) are numpy views of Arrow's memory; booleans are
unpacked. Times that Python lacks (nanoseconds, the year 10000) are numpy scalars.
"""

import contextlib
import decimal
import functools
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyarrow import compute, types

from aioloader._collate.collate import borrowed, torch_dtype
from aioloader._transport.slots import MIN_BYTES

# How many rows an iteration converts at a time.
_CHUNK_ROWS = 1024
# Limits within which a collation takes about 0.1 ms.
_QUICK_BYTES, _QUICK_COLUMNS = 1 << 18, 64
Values: TypeAlias = npt.NDArray[Any]
Flags: TypeAlias = npt.NDArray[np.bool_]
Dtype: TypeAlias = np.dtype[Any]
# A numpy array for numbers of one shape without NULLs, otherwise an Arrow array.
Column: TypeAlias = Values | pa.Array
# Errors for times that Python cannot represent; LookupError: an unknown time zone.
_NOT_IN_PYTHON = OverflowError, ValueError, LookupError
_DAY = np.timedelta64(1, "D")


class RowSlice(NamedTuple):
    """Rows ``start`` to ``stop`` (exclusive) of columns with equal lengths."""

    columns: tuple[Column, ...]
    start: int
    stop: int

    def cut(self) -> list[Column]:
        return [column[self.start : self.stop] for column in self.columns]


class Rows(Sequence[dict[str, Any]]):
    """A sequence of rows, each a dict of column name to value.

    Numbers and booleans become numpy scalars of the column's width, lists of numbers
    become arrays that own their memory, and structs become dicts. Other values are
    ``str``, ``bytes``, ``datetime``, ``Decimal``, ``UUID``, lists, or None for NULL.
    Times that Python lacks (nanoseconds, 24:00, the year 10000) are numpy scalars.

    Attributes:
        names: The names of the columns, in order.
        kinds: The Arrow types of the columns, after ``plain``.
        parts: The rows, as slices of one or more sets of columns.

    Args:
        table: A ``RecordBatch`` or ``Table`` of pyarrow.

    Raises:
        ValueError: If the table has no columns, or two with the same name.
    """

    __slots__ = ("_length", "kinds", "names", "parts")

    def __init__(self, table: pa.RecordBatch | pa.Table) -> None:
        names = tuple(table.schema.names)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns must have distinct names, got {[*names]}")
        batches = [table]
        if isinstance(table, pa.Table):
            arrays = [pa.nulls(0, kind) for kind in table.schema.types]
            empty = pa.RecordBatch.from_arrays(arrays, schema=table.schema)
            batches = table.to_batches() or [empty]
        parts: list[RowSlice] = []
        for batch in batches:
            columns, kinds = zip(*map(column_of, batch.columns), strict=True)
            parts.append(RowSlice(columns, 0, batch.num_rows))
        self.__setstate__((names, kinds, parts))

    def __setstate__(self, state: tuple[Any, Any, Sequence[RowSlice]]) -> None:
        self.names, self.kinds, self.parts = state
        self._length = 0
        for _, start, stop in self.parts:
            self._length += stop - start

    def _with_parts(self, parts: Sequence[RowSlice]) -> "Rows":
        rows = Rows.__new__(Rows)
        rows.__setstate__((self.names, self.kinds, parts))
        return rows

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A slice that Arrow pickles itself would include the whole buffers.
        schema = pa.schema(zip(self.names, self.kinds, strict=True))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for part in self.parts:
                columns = map(arrow_of, part.cut(), self.kinds)
                writer.write_batch(pa.record_batch([*columns], schema=schema))
        data = sink.getvalue()
        is_out_of_band = protocol > 4
        return _restored, (
            pickle.PickleBuffer(data) if is_out_of_band else bytes(data),
        )

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice, /) -> "Rows": ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return a row, or a block of rows if ``index`` is a slice."""
        if not isinstance(index, slice):
            given = row = operator.index(index)
            if row < 0:
                row += self._length
            if not 0 <= row < self._length:
                raise IndexError(
                    f"index {given} is out of range for {self._length} rows"
                )
            return next(iter(self[row : row + 1]))
        start, stop, step = index.indices(self._length)
        if step != 1:
            return self.pick(range(start, stop, step))
        parts: list[RowSlice] = []
        for columns, first, last in self.parts:
            begin, end = max(first, first + start), min(last, first + stop)
            if begin < end:
                parts.append(RowSlice(columns, begin, end))
            start -= last - first
            stop -= last - first
        return self._with_parts(parts or [self.parts[0]._replace(stop=0, start=0)])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = self.names
        for columns, first, last in self.parts:
            for start in range(first, last, _CHUNK_ROWS):
                part = RowSlice(columns, start, min(last, start + _CHUNK_ROWS)).cut()
                for row in zip(*map(values_of, part), strict=True):
                    yield dict(zip(names, row, strict=True))

    def column(self, name: str) -> list[Any] | None:
        """Return a column's values as they appear in rows; None if it is missing."""
        if name not in self.names:
            return None
        number = self.names.index(name)
        cuts = (columns[number][start:stop] for columns, start, stop in self.parts)
        return [value for cut in cuts for value in values_of(cut)]

    def pick(self, indices: "Sequence[int] | npt.NDArray[np.int64]") -> "Rows":
        """Return the rows at ``indices``, in that order, copied where Arrow can."""
        rows = np.asarray(indices, np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self._length):
            raise IndexError(f"indices must be in range({self._length})")
        try:
            joined = map(join_columns, _columns_of(self.parts), self.kinds)
            columns = tuple(_taken(column, rows) for column in joined)
        except (ValueError, NotImplementedError):
            # There are over 2 GiB of strings, or Arrow has no `take` for the type.
            return self._with_parts([self[n : n + 1].parts[0] for n in rows.tolist()])
        return self._with_parts([RowSlice(columns, 0, len(rows))])

    def joined(self, blocks: Sequence[Any]) -> "Rows | None":
        """Return these rows, then the rows of ``blocks``; None if columns differ."""
        parts = list(self.parts)
        for block in blocks:
            if not isinstance(block, Rows) or self.names != block.names:
                return None
            if self.kinds is not block.kinds and self.kinds != block.kinds:
                return None
            parts += block.parts
        return self._with_parts(parts)

    def interleaved(self, blocks: Sequence[Any]) -> "Rows | None":
        """Return these rows interleaved with ``blocks``; None if columns differ."""
        joined, count = self.joined(blocks), 1 + len(blocks)
        if joined is None:
            return None
        if len(joined.parts) == count:
            with contextlib.suppress(ValueError, NotImplementedError):  # as in pick
                interleaved = tuple(
                    map(interleave_columns, _columns_of(joined.parts), self.kinds)
                )
                return self._with_parts([RowSlice(interleaved, 0, len(joined))])
        return joined.pick(turns(count, len(self)))

    def collate(self) -> dict[str, Any]:
        """Collate all rows into a batch, like ``default_collate``.

        Numbers, and lists of numbers of equal length, become tensors of the column's
        width. Lists of different lengths become a list of tensors. Structs become dicts
        of batches. Other columns become lists of values.

        Returns:
            A dict of column name to batch, in memory that the caller owns.

        Raises:
            TypeError: If a struct, or a column that becomes tensors, has a NULL.
        """
        columns = zip(self.names, self.kinds, _columns_of(self.parts), strict=True)
        return {
            # This shortcut halves the time of the usual case.
            name: copied(parts[0])
            if len(parts) == 1 and isinstance(parts[0], np.ndarray)
            else collate_columns(parts, kind, name)
            for name, kind, parts in columns
        }

    @property
    def is_numeric(self) -> bool:
        return all(
            isinstance(data, np.ndarray) for part in self.parts for data in part.columns
        )

    @property
    def is_quick(self) -> bool:
        """Whether all values are numbers, and few enough to collate in about 0.1 ms."""
        if len(self.names) * len(self.parts) > _QUICK_COLUMNS:
            return False
        nbytes = 0  # a plain loop, because this runs for each batch
        for columns, start, stop in self.parts:
            for column in columns:
                if not isinstance(column, np.ndarray):
                    return False
                nbytes += (stop - start) * column.strides[0]
        return nbytes <= _QUICK_BYTES

    def __repr__(self) -> str:
        return f"<{self._length:,} rows of {', '.join(self.names)}>"


def _columns_of(parts: Iterable[RowSlice]) -> Iterable[tuple[Column, ...]]:
    return zip(*map(RowSlice.cut, parts), strict=True)


def _taken(column: Column, indices: npt.NDArray[np.int64]) -> Column:
    if isinstance(column, np.ndarray):
        return column.take(indices, axis=0)
    return column.take(indices)


def _restored(data: Any) -> Rows:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return Rows(reader.read_all())


def column_of(array: pa.Array) -> tuple[Column, pa.DataType]:
    """Convert an Arrow array to a column; also return its type after ``plain``."""
    fixed, array = fixed_of(array.type), plain(array)
    if fixed is None or not _is_whole(array, fixed):
        return array, array.type
    return _view(array, fixed), array.type


def plain(array: pa.Array) -> pa.Array:
    """Decode run-end and numeric dictionary encodings, views, and most extensions."""
    kind = array.type
    if types.is_run_end_encoded(kind):
        return plain(compute.run_end_decode(array))
    if types.is_dictionary(kind):
        return array if fixed_of(kind) is None else plain(array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.bool8":
            return array.storage.cast(pa.bool_())
        is_kept = kind.extension_name in {"arrow.uuid", "arrow.fixed_shape_tensor"}
        return array if is_kept or _is_exact(kind) else plain(array.storage)
    if types.is_string_view(kind):  # Arrow has no kernels for views
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if types.is_binary_view(kind) else array


def join_columns(columns: Sequence[Column], kind: pa.DataType) -> Column:
    if len(columns) == 1:
        return columns[0]
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(columns)
    return pa.concat_arrays([arrow_of(column, kind) for column in columns])


def interleave_columns(columns: Sequence[Column], kind: pa.DataType) -> Column:
    if all(isinstance(column, np.ndarray) for column in columns):
        interleaved = np.stack(columns, axis=1)
        return interleaved.reshape(-1, *interleaved.shape[2:])
    return join_columns(columns, kind).take(turns(len(columns), len(columns[0])))


@functools.lru_cache(maxsize=4)
def turns(count: int, rows: int) -> npt.NDArray[np.int64]:
    """Return indices that interleave ``count`` concatenated blocks of ``rows`` rows."""
    return np.arange(count * rows).reshape(count, rows).T.ravel()


def arrow_of(column: Column, kind: pa.DataType) -> pa.Array:
    if not isinstance(column, np.ndarray):
        return column
    if column.ndim == 1:
        return pa.array(column, kind)
    if order := getattr(kind, "permutation", None):
        column = column.transpose(0, *(int(axis) + 1 for axis in np.argsort(order)))
    storage = getattr(kind, "storage_type", kind)
    if column.size:
        flat = pa.array(column.reshape(-1), kind.value_type)
        lists = pa.FixedSizeListArray.from_arrays(flat, type=storage)
    else:  # if the list size is 0, pyarrow would divide by it
        lists = pa.array([[]] * len(column), storage)
    return lists if storage is kind else pa.ExtensionArray.from_storage(kind, lists)


def fixed_of(kind: pa.DataType) -> Dtype | None:
    """Return the dtype of numeric rows (shaped for lists); None for other types."""
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return fixed_of(kind.value_type)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype: Dtype = np.dtype(kind.to_pandas_dtype())
        return dtype
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation or range(len(kind.shape))
        shape = [kind.shape[axis] for axis in order]
    elif isinstance(kind, pa.BaseExtensionType):
        is_bool = kind.extension_name == "arrow.bool8"
        return fixed_of(pa.bool_() if is_bool else kind.storage_type)
    elif types.is_fixed_size_list(kind):
        shape = [kind.list_size]
    else:
        return None
    inner = fixed_of(kind.value_type)
    if inner is None or inner.shape or not types.is_primitive(kind.value_type):
        return None
    return np.dtype((inner, tuple(shape)))


def _is_whole(array: pa.Array, fixed: Dtype) -> bool:
    """Return whether no row, and no number in a row, is NULL."""
    return not array.null_count and not _leaf(array, fixed).null_count


def _view(array: pa.Array, fixed: Dtype) -> Values:
    """View a plain array's numbers, or copy booleans; values at NULLs are arbitrary."""
    leaf, dtype = _leaf(array, fixed), fixed.base
    size, offset, buffer = len(leaf), leaf.offset, leaf.buffers()[1]
    if not size or buffer is None:
        flat = np.zeros(size, dtype)
    elif dtype != np.bool_:
        flat = np.frombuffer(buffer, dtype, size, offset * dtype.itemsize)
    else:
        first = offset // 8
        bits = np.frombuffer(buffer, np.uint8, (offset + size + 7) // 8 - first, first)
        unpacked = np.unpackbits(bits, bitorder="little")[offset - 8 * first :]
        flat = unpacked[:size].view(np.bool_)
    return _shaped(flat, array, fixed)


def _leaf(array: pa.Array, fixed: Dtype) -> pa.Array:
    if not fixed.shape:
        return array
    storage = getattr(array, "storage", array)
    size = storage.type.list_size
    return storage.values.slice(storage.offset * size, len(storage) * size)


def _shaped(flat: Values, array: pa.Array, fixed: Dtype) -> Values:
    """Give ``flat`` numbers the shape of ``array``, if it has lists or tensors."""
    if not fixed.shape:
        return flat
    kind = array.type
    values = flat.reshape(len(array), *getattr(kind, "shape", fixed.shape))
    order = getattr(kind, "permutation", None)
    return values.transpose(0, *(axis + 1 for axis in order)) if order else values


def _valid(array: pa.Array) -> Flags:
    flags: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return flags


def collate_columns(columns: Sequence[Column], kind: pa.DataType, where: str) -> Any:
    """Collate a column's parts; raise a TypeError for NULLs in numbers or structs."""
    if all(isinstance(column, np.ndarray) for column in columns):
        return tensor_of(columns)
    return _collate(arrow_of(join_columns(columns, kind), kind), where)


def _collate(array: pa.Array, where: str) -> Any:
    """Collate a column; lists of different lengths become separate tensors."""
    array = plain(array)
    fixed, kind = fixed_of(array.type), array.type
    if fixed is None and not types.is_struct(kind) and _leaf_of(kind) is None:
        return values_of(array)
    if array.null_count:
        _refuse_null(array, where)
    if types.is_struct(kind):
        children = zip(_names(kind), array.flatten(), strict=True)
        return {name: _collate(child, f"{where}.{name}") for name, child in children}
    widths, leaf = [], array
    while (fixed := fixed_of(leaf.type)) is None:
        lengths, leaf = _unlisted(leaf)
        shortest, longest = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
        widths.append(int(longest) if shortest == longest else None)
    if not _is_whole(leaf, fixed):
        _refuse_null(array, where)
    if None in widths:
        return [_as_tensors(value) for value in values_of(array)]
    shape = len(array), *widths, *fixed.shape
    return tensor_of([_view(leaf, fixed).reshape(shape)])


def _refuse_null(array: pa.Array, where: str) -> None:
    for row, value in enumerate(values_of(array)):
        if _has_none(value):
            raise TypeError(
                f"column {where!r} has a NULL in row {row} of this batch of "
                f"{len(array)}, and a tensor cannot hold it: filter such rows, replace "
                "NULLs on reading (nulls= of Parquet, Arrow and CSV files, COALESCE in "
                "the query of a database), or pass a collate_fn"
            )


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _as_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_tensors(inner) for inner in value]
    return torch.from_numpy(value)


def copied(values: Values) -> torch.Tensor:
    """Copy an array to a tensor, like ``tensor_of``.

    A small array is copied without numpy, which would release the GIL: switching to
    another thread and back takes longer than the copy.
    """
    if not 0 < values.nbytes < MIN_BYTES:
        return tensor_of([values])
    flat = torch.frombuffer(bytearray(values.data), dtype=torch_dtype(values.dtype))
    return flat if values.ndim == 1 else flat.view(values.shape)


def tensor_of(arrays: Sequence[Values]) -> torch.Tensor:
    """Concatenate arrays into a tensor, in memory of the batch pool if available."""
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    out = borrowed(shape, torch_dtype(arrays[0].dtype))
    if out is None:
        whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy()
        return torch.from_numpy(whole)
    np.concatenate(arrays, out=out.numpy())
    return out


def values_of(column: Column) -> list[Any]:
    """Return each row's value; a row of numbers that contains a NULL is a list."""
    if isinstance(column, np.ndarray):
        return [row.copy() for row in column] if column.ndim > 1 else list(column)
    array = plain(column)
    rule: Callable[[pa.Array], list[Any]] = _numbers
    if fixed_of(array.type) is None:
        kind = array.type
        rule = next((func for fits, func in _RULES if fits(kind)), pa.Array.to_pylist)
    rows = rule(array)
    if array.null_count and rule is not _objects:
        for row in np.flatnonzero(~_valid(array)):
            rows[row] = None
    return rows


def _numbers(array: pa.Array) -> list[Any]:
    fixed = fixed_of(array.type)
    assert fixed is not None
    values, leaf = _view(array, fixed), _leaf(array, fixed)
    rows = values_of(values)
    if fixed.shape and leaf.null_count:
        nothing: Any = None
        valid = _shaped(_valid(leaf), array, fixed)
        for n in np.flatnonzero(~valid.reshape(len(rows), -1).all(axis=1)):
            rows[n] = np.where(valid[n], values[n].astype(object), nothing).tolist()
    return rows


def _objects(array: pa.Array) -> list[Any]:
    # Several times faster than `to_pylist`, which crashes for intervals.
    objects: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return objects


def _decimals(array: pa.Array) -> list[Any]:
    texts = _objects(array.storage)
    return [None if text is None else decimal.Decimal(text) for text in texts]


def _structs(array: pa.Array) -> list[Any]:
    names = _names(array.type)
    children = [values_of(child) for child in array.flatten()]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)]
    return rows or [{} for _ in range(len(array))]


def _lists(array: pa.Array) -> list[Any]:
    spans, child = _spans(array)
    leaf = _leaf_of(child.type)
    if fixed_of(child.type) is not None:
        column, _ = column_of(child)
        return [_numbers_in(column[start:stop]) for start, stop in spans]
    items = values_of(child)
    rows = [items[start:stop] for start, stop in spans]
    return rows if leaf is None else [_stacked(row, leaf) for row in rows]


def _maps(array: pa.Array) -> list[Any]:
    spans, child = _spans(array)
    pairs = list(zip(*map(values_of, child.flatten()), strict=True))
    return [pairs[start:stop] for start, stop in spans]


def _times(array: pa.Array) -> list[Any]:
    kind, unit = array.type, getattr(array.type, "unit", "")
    is_point = types.is_timestamp(kind) or types.is_date(kind)
    unit = unit or ("D" if types.is_date32(kind) else "ms")
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    numbers = _view(array.view(width), np.dtype(width.to_pandas_dtype()))
    exact = numbers.astype(np.int64).view(f"{'M8' if is_point else 'm8'}[{unit}]")
    if unit == "ns":
        return list(exact)
    # `to_pylist` would convert PostgreSQL's 24:00 to 0:00.
    is_beyond = exact >= _DAY if types.is_time(kind) else np.zeros(len(exact), bool)
    if not is_beyond.any():
        with contextlib.suppress(*_NOT_IN_PYTHON):
            values: list[Any] = array.to_pylist()
            return values
    return [_python_time(*row) for row in zip(array, exact, is_beyond, strict=True)]


def _python_time(scalar: pa.Scalar, exact: Any, is_beyond: Any) -> Any:
    if is_beyond and scalar.is_valid:
        return exact
    try:
        return scalar.as_py()
    except _NOT_IN_PYTHON:
        return exact


def _is_text(kind: pa.DataType) -> bool:
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_text or types.is_binary(kind) or types.is_large_binary(kind))


def _is_exact(kind: pa.DataType) -> bool:
    """Return whether a type stores numbers as text, since Arrow decimals lack NaN."""
    is_opaque = getattr(kind, "extension_name", "") == "arrow.opaque"
    return is_opaque and kind.type_name == "numeric"


def _is_list(kind: pa.DataType) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind)
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(is_list or is_view or types.is_fixed_size_list(kind))


_RULES: list[tuple[Callable[[Any], bool], Callable[[Any], list[Any]]]] = [
    (_is_text, _objects),
    (_is_exact, _decimals),
    (types.is_struct, _structs),
    (_is_list, _lists),
    (types.is_dictionary, lambda array: values_of(array.dictionary_decode())),
    (types.is_map, _maps),
    (lambda kind: types.is_temporal(kind) and not types.is_interval(kind), _times),
]


def _names(kind: pa.StructType) -> list[str]:
    return [kind.field(number).name for number in range(kind.num_fields)]


def _numbers_in(column: Column) -> Any:
    """Copy numbers to an array, or to a list if there are NULLs."""
    if not isinstance(column, np.ndarray):
        column, _ = column_of(column)
    return column.copy() if isinstance(column, np.ndarray) else values_of(column)


def _spans(array: pa.Array) -> tuple[Iterable[tuple[int, int]], pa.Array]:
    """Return each list's (start, stop) in the flattened values, and these values."""
    lengths, child = _unlisted(array)
    stops = np.cumsum(lengths).tolist()
    return zip([0, *stops], stops, strict=False), child


def _unlisted(array: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return the lengths of lists (undefined for NULL), and the flattened values."""
    if isinstance(array, (pa.ListArray, pa.LargeListArray)):  # maps too
        stops = array.offsets.to_numpy()
        first, last = int(stops[0]), int(stops[-1])
        return np.diff(stops), plain(array.values.slice(first, last - first))
    lengths = compute.list_value_length(array).fill_null(0)
    return lengths.to_numpy().astype(np.int64), plain(array.flatten())


def _leaf_of(kind: pa.DataType) -> Dtype | None:
    """Return the dtype for an empty nested list of numbers; None for other types."""
    levels = 0
    while _is_list(kind) and fixed_of(kind) is None:
        kind, levels = kind.value_type, levels + 1
    fixed = fixed_of(kind)
    if fixed is None or not levels:
        return None
    return np.dtype((fixed.base, (0,) * (levels + len(fixed.shape))))


def _stacked(rows: list[Any], leaf: Dtype) -> Any:
    """Stack equally shaped arrays (empty for no rows); return other rows unchanged."""
    if not rows:
        return np.zeros((0, *leaf.shape), leaf.base)
    first = rows[0]
    alike = all(isinstance(r, np.ndarray) and r.shape == first.shape for r in rows)
    return np.stack(rows) if alike else rows
