"""Values of Arrow columns of any type: in a row, and in a batch.

One rule serves both, so rows and columns collate alike. Lists of numbers are arrays,
and tensors if their lengths agree; structs are dicts; strings and bytes are lists.
Types without a tensor form are kept: dates, times, decimals, UUIDs, lists of strings,
maps. Times that Python cannot represent (nanoseconds, the year 10000) are numpy's.
"""

import decimal
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioloader.datasets._arrow.numbers import (
    Dtype,
    Values,
    array_of,
    cells,
    first_hole,
    fixed_of,
    flags,
    is_whole,
    null_error,
    tensor_of,
    view,
)

if TYPE_CHECKING:
    import pyarrow as pa

# Numbers without NULLs; everything else stays Arrow's until its values are needed.
Column: TypeAlias = "Values | pa.Array"


def column_of(array: "pa.Array") -> "tuple[Column, pa.DataType]":
    """Return an array as a column, and the type of its plain encoding."""
    fixed, array = fixed_of(array.type), plain(array)
    kind = array.type
    if fixed is None or not is_whole(array, fixed):
        return array, kind
    return view(array, fixed), kind


def plain(array: "pa.Array") -> "pa.Array":
    """Undo encodings that only save space, and extension types that add no meaning.

    Dictionaries of anything but numbers stay, because they do save space.
    """
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types, kind = pa.types, array.type
    if types.is_run_end_encoded(kind):
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        return plain(compute.run_end_decode(array))
    if types.is_dictionary(kind):
        return array if fixed_of(kind) is None else plain(array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.bool8":
            return array.storage.cast(pa.bool_())
        is_kept = kind.extension_name in {"arrow.uuid", "arrow.fixed_shape_tensor"}
        return array if is_kept or is_exact(kind) else plain(array.storage)
    if types.is_string_view(kind):  # Arrow hardly supports views yet
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if types.is_binary_view(kind) else array


def is_exact(kind: "pa.DataType") -> bool:
    """Return whether a column has numbers as text, to keep them exact.

    Arrow's decimals have a fixed number of digits, and no NaN.
    """
    is_opaque = getattr(kind, "extension_name", "") == "arrow.opaque"
    return is_opaque and kind.type_name == "numeric"


def join_columns(columns: Sequence[Column], kind: "pa.DataType") -> Column:
    """Return the concatenation of columns of one type; several are copied."""
    if len(columns) == 1:
        return columns[0]
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(columns)
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    return pa.concat_arrays([arrow_of(column, kind) for column in columns])


def weave_columns(columns: Sequence[Column], kind: "pa.DataType") -> Column:
    """Interleave columns of one type and length, row by row."""
    if all(isinstance(column, np.ndarray) for column in columns):
        woven = np.stack(columns, axis=1)
        return woven.reshape(-1, *woven.shape[2:])
    return join_columns(columns, kind).take(turns(len(columns), len(columns[0])))


@functools.lru_cache(maxsize=4)
def turns(count: int, rows: int) -> npt.NDArray[np.int64]:
    """Return the order that interleaves ``count`` concatenated columns."""
    return np.arange(count * rows).reshape(count, rows).T.ravel()


def arrow_of(column: Column, kind: "pa.DataType") -> "pa.Array":
    """Return a column as an Arrow array of its type."""
    return array_of(column, kind) if isinstance(column, np.ndarray) else column


# -- batches ------------------------------------------------------------------------


def collate_columns(columns: Sequence[Column], kind: "pa.DataType", where: str) -> Any:
    """Return the batch of a column given in parts."""
    if all(isinstance(column, np.ndarray) for column in columns):
        return tensor_of(columns)
    return _collate(arrow_of(join_columns(columns, kind), kind), where)


def _collate(array: "pa.Array", where: str) -> Any:
    fixed, array = fixed_of(array.type), plain(array)
    if fixed is not None:
        _refuse_null(first_hole(array, fixed), len(array), where)
        return tensor_of([view(array, fixed)])
    is_struct = _rule_for(array.type) is _structs
    if not is_struct and _leaf_of(array.type) is None:
        return values_of(array)
    valid = flags(array)
    _refuse_null(None if valid is None else int(valid.argmin()), len(array), where)
    if not is_struct:
        return _collate_lists(array, where)
    children = zip(_names(array.type), array.flatten(), strict=True)
    return {name: _collate(child, f"{where}.{name}") for name, child in children}


def _refuse_null(row: int | None, rows: int, where: str) -> None:
    if row is not None:
        raise null_error(where, row, rows)


def _collate_lists(array: "pa.Array", where: str) -> Any:
    """Return lists of numbers as a tensor, or as a list of tensors if they differ."""
    rows, widths, leaf = len(array), [], array
    while (fixed := fixed_of(leaf.type)) is None:
        lengths, leaf = _unlisted(leaf)
        least, most = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
        widths.append(int(most) if least == most else None)
    if leaf.null_count:
        found = (row for row, value in enumerate(values_of(array)) if _has_none(value))
        _refuse_null(next(found, None), rows, where)
    if None in widths:
        return [_as_tensors(value) for value in values_of(array)]
    _refuse_null(first_hole(leaf, fixed), rows, where)
    return tensor_of([view(leaf, fixed).reshape(rows, *widths, *fixed.shape)])


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _as_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_tensors(inner) for inner in value]
    return torch.from_numpy(value)


# -- rows ---------------------------------------------------------------------------


def values_of(column: Column) -> list[Any]:
    """Return the value of each row.

    A number is a numpy scalar, and several of a fixed shape are a separate array, or
    nested lists if there is a NULL among them.
    """
    if isinstance(column, np.ndarray):
        return [row.copy() for row in column] if column.ndim > 1 else list(column)
    fixed, array = fixed_of(column.type), plain(column)
    if fixed is None:
        return _rule_for(array.type)(array)
    values, inner = view(array, fixed), cells(array, fixed)
    rows = values_of(values)
    if inner is not None:
        whole = inner.reshape(len(rows), -1).all(axis=1)
        for at in np.flatnonzero(~whole):
            rows[at] = _with_none(values[at], inner[at])
    return _set_nulls(array, rows)


def _with_none(values: Values, valid: Any) -> Any:
    """Return an array as nested lists, with None where it is not valid."""
    nothing: Any = None
    return np.where(valid, values.astype(object), nothing).tolist()


def _rule_for(kind: "pa.DataType") -> "Callable[[pa.Array], list[Any]]":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    rule: Callable[[pa.Array], list[Any]] = pa.Array.to_pylist
    if is_text or types.is_binary(kind) or types.is_large_binary(kind):
        rule = _objects
    elif is_exact(kind):
        rule = _decimals
    elif types.is_struct(kind):
        rule = _structs
    elif _is_list(kind):
        rule = _lists
    elif types.is_dictionary(kind):
        rule = _decoded
    elif types.is_map(kind):
        rule = _maps
    elif types.is_temporal(kind) and not types.is_interval(kind):
        rule = _times
    return rule


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _names(kind: "pa.StructType") -> list[str]:
    return [kind.field(at).name for at in range(kind.num_fields)]


def _objects(array: "pa.Array") -> list[Any]:
    # Several times as fast as `to_pylist`, which crashes for some types (intervals).
    objects: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return objects


def _decimals(array: "pa.Array") -> list[Any]:
    texts = _objects(array.storage)
    return [None if text is None else decimal.Decimal(text) for text in texts]


def _decoded(array: "pa.Array") -> list[Any]:
    return values_of(array.dictionary_decode())


def _times(array: "pa.Array") -> list[Any]:
    if getattr(array.type, "unit", "") == "ns":
        return _numpy_times(array)
    try:
        values: list[Any] = array.to_pylist()
    except (OverflowError, ValueError, LookupError):  # a time zone unknown to pytz
        exact = _numpy_times(array)
        values = [_python_time(*pair) for pair in zip(array, exact, strict=True)]
    return values


def _python_time(scalar: "pa.Scalar", exact: Any) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError, LookupError):  # a time zone unknown to pytz
        return exact


def _numpy_times(array: "pa.Array") -> list[Any]:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types, kind = pa.types, array.type
    is_point = types.is_timestamp(kind) or types.is_date(kind)
    unit = getattr(kind, "unit", "D" if types.is_date32(kind) else "ms")
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    numbers = view(array.view(width), np.dtype(width.to_pandas_dtype()))
    times = numbers.astype(np.int64).view(f"{'M8' if is_point else 'm8'}[{unit}]")
    return _set_nulls(array, list(times))


def _maps(array: "pa.Array") -> list[Any]:
    spans, child = _spans(array)
    pairs = list(zip(*map(values_of, child.flatten()), strict=True))
    return _set_nulls(array, [pairs[start:stop] for start, stop in spans])


def _structs(array: "pa.Array") -> list[Any]:
    names = _names(array.type)
    children = [values_of(child) for child in array.flatten()]
    rows: list[Any] = [
        dict(zip(names, values, strict=True)) for values in zip(*children, strict=True)
    ] or [{} for _ in range(len(array))]
    return _set_nulls(array, rows)


def _lists(array: "pa.Array") -> list[Any]:
    spans, child = _spans(array)
    leaf = _leaf_of(child.type)
    if fixed_of(child.type) is not None:
        column, _ = column_of(child)
        rows = [_numbers_in(column[start:stop]) for start, stop in spans]
    else:
        items = values_of(child)
        rows = [items[start:stop] for start, stop in spans]
        if leaf is not None:
            rows = [_stacked(row, leaf) for row in rows]
    return _set_nulls(array, rows)


def _numbers_in(column: Column) -> Any:
    """Return numbers as one array, or as a list if there are NULLs."""
    if not isinstance(column, np.ndarray):
        column, _ = column_of(column)
    return column.copy() if isinstance(column, np.ndarray) else values_of(column)


def _spans(array: "pa.Array") -> "tuple[Iterable[tuple[int, int]], pa.Array]":
    """Return start and end of each list in the flattened values, and those values."""
    lengths, child = _unlisted(array)
    stops = np.cumsum(lengths).tolist()
    return zip([0, *stops], stops, strict=False), child


def _set_nulls(array: "pa.Array", rows: list[Any]) -> list[Any]:
    valid = flags(array)
    if valid is not None:
        for at in np.flatnonzero(~valid):
            rows[at] = None
    return rows


def _unlisted(array: "pa.Array") -> "tuple[npt.NDArray[np.int64], pa.Array]":
    """Return the lengths of lists, and their flattened values; NULLs are arbitrary."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
    from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

    if isinstance(array, (pa.ListArray, pa.LargeListArray)):  # maps too
        stops = array.offsets.to_numpy()
        first, last = int(stops[0]), int(stops[-1])
        return np.diff(stops), plain(array.values.slice(first, last - first))
    lengths = compute.list_value_length(array).fill_null(0)
    return lengths.to_numpy().astype(np.int64), plain(array.flatten())


def _leaf_of(kind: "pa.DataType") -> Dtype | None:
    """Return the dtype of rows of empty nested lists; None: no lists of numbers."""
    levels = 0
    while _is_list(kind) and fixed_of(kind) is None:
        kind = kind.value_type
        levels += 1
    fixed = fixed_of(kind)
    if fixed is None or not levels:
        return None
    return np.dtype((fixed.base, (0,) * (levels + len(fixed.shape))))


def _stacked(rows: list[Any], leaf: Dtype) -> Any:
    """Return arrays of one shape as one array, others unchanged."""
    if not rows:
        return np.zeros((0, *leaf.shape), leaf.base)
    first = rows[0]
    alike = all(isinstance(r, np.ndarray) and r.shape == first.shape for r in rows)
    return np.stack(rows) if alike else rows
