"""Values of Arrow columns of any type: in a row, and in a batch.

One rule serves both, so rows and columns collate alike. Lists of numbers are arrays,
and tensors if their lengths agree; structs are dicts; strings and bytes are lists.
Types without a tensor form are kept: dates, times, decimals, UUIDs, lists of strings,
maps. Times that Python cannot represent (nanoseconds, the year 10000) are numpy's.
"""

import decimal
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioloader.datasets._arrow.numbers import (
    Numbers,
    collate_numbers,
    fixed_of,
    flags,
    merged,
    null_error,
    turns,
    woven,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from aioloader.datasets._arrow.numbers import Fixed


class Boxed:
    """A column that stays Arrow's until its values are needed."""

    __slots__ = ("array",)

    def __init__(self, array: "pa.Array") -> None:
        self.array = array

    @property
    def kind(self) -> "pa.DataType":
        """The Arrow type of the rows."""
        return self.array.type

    def cut(self, start: int, stop: int) -> "Boxed":
        """Return some of the rows, as a view."""
        return Boxed(self.array.slice(start, stop - start))

    def take(self, indices: npt.NDArray[np.int64]) -> "Boxed":
        """Return the rows at ``indices``, copied."""
        return Boxed(self.array.take(indices))

    def rows(self) -> list[Any]:
        """Return each row's value."""
        return values_of(self.array)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Arrow's own pickles include the whole buffers of a slice.
        buffer = _to_stream(self.array)
        if protocol < 5:
            return _from_stream, (buffer.to_pybytes(),)
        return _from_stream, (pickle.PickleBuffer(buffer),)


Column: TypeAlias = Numbers | Boxed


def _to_stream(array: "pa.Array") -> "pa.Buffer":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    batch = pa.RecordBatch.from_arrays([array], names=[""])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _from_stream(data: Any) -> Boxed:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return Boxed(reader.read_next_batch().column(0))


def column_of(array: "pa.Array") -> Column:
    """Return an array as a column; numbers are viewed, not copied."""
    fixed = fixed_of(array.type)
    array = plain(array)
    return Boxed(array) if fixed is None else Numbers.of(array, fixed)


def plain(array: "pa.Array") -> "pa.Array":
    """Undo encodings that only save space, and extension types that add no meaning.

    Dictionaries of anything but numbers stay, because they do save space.
    """
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    kind = array.type
    if pa.types.is_run_end_encoded(kind):
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        return plain(compute.run_end_decode(array))
    if pa.types.is_dictionary(kind):
        return array if fixed_of(kind) is None else plain(array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.bool8":
            return array.storage.cast(pa.bool_())
        is_kept = kind.extension_name in {"arrow.uuid", "arrow.fixed_shape_tensor"}
        return array if is_kept or is_exact(kind) else plain(array.storage)
    if pa.types.is_string_view(kind):  # Arrow hardly supports views yet
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(kind) else array


def join_columns(columns: Sequence[Any]) -> Column:
    """Return the concatenation of columns of one kind; several are copied."""
    if len(columns) == 1:
        column: Column = columns[0]
        return column
    if type(columns[0]) is Numbers:
        return merged(columns)
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    return Boxed(pa.concat_arrays([column.array for column in columns]))


def weave_columns(columns: Sequence[Any]) -> Column:
    """Interleave columns of one kind and length, row by row."""
    if type(columns[0]) is Numbers:
        return woven(columns)
    return join_columns(columns).take(turns(len(columns), len(columns[0].array)))


def collate_columns(columns: Sequence[Any], where: str) -> Any:
    """Return the batch of a column given in parts."""
    if type(columns[0]) is Numbers:
        return collate_numbers(columns, where)
    boxed = join_columns(columns)
    assert type(boxed) is Boxed
    return _collate(boxed.array, where)


def _collate(array: "pa.Array", where: str) -> Any:
    fixed = fixed_of(array.type)
    array = plain(array)
    if fixed is not None:
        return collate_numbers([Numbers.of(array, fixed)], where)
    if _is_struct(array.type):
        _refuse_nulls(array, where)
        children = zip(_names(array.type), array.flatten(), strict=True)
        return {name: _collate(child, f"{where}.{name}") for name, child in children}
    if _leaf_of(array.type) is not None:
        _refuse_nulls(array, where)
        return _collate_lists(array, where)
    return values_of(array)


def _refuse_nulls(array: "pa.Array", where: str) -> None:
    valid = flags(array)
    if valid is not None:
        raise null_error(where, int(valid.argmin()), len(array))


def _collate_lists(array: "pa.Array", where: str) -> Any:
    """Return lists of numbers as a tensor, or as a list of tensors if they differ."""
    leaf, widths = _unfold(array)
    if leaf.null_count:
        rows = values_of(array)
        found = (row for row, value in enumerate(rows) if _has_none(value))
        if (row := next(found, None)) is not None:
            raise null_error(where, row, len(rows))
    fixed = fixed_of(leaf.type)
    if fixed is None or None in widths:
        return [_as_tensors(value, where) for value in values_of(array)]
    numbers = Numbers.of(leaf, fixed)
    numbers.values = numbers.values.reshape(len(array), *widths, *fixed.shape)
    return collate_numbers([numbers], where)


def _unfold(array: "pa.Array") -> "tuple[pa.Array, list[int | None]]":
    """Return the numbers in nested lists, and each level's length if it is constant."""
    widths: list[int | None] = []
    while fixed_of(array.type) is None:
        lengths, array = _unlisted(array)
        least, most = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
        widths.append(int(most) if least == most else None)
    return array, widths


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _as_tensors(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_as_tensors(inner, where) for inner in value]
    return torch.from_numpy(value)


# -- rows ---------------------------------------------------------------------------


def values_of(array: "pa.Array") -> list[Any]:
    """Return the value of each row."""
    fixed = fixed_of(array.type)
    array = plain(array)
    if fixed is not None:
        return Numbers.of(array, fixed).rows()
    return _rule_for(array.type)(array)


def _rule_for(kind: "pa.DataType") -> "Callable[[pa.Array], list[Any]]":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    rule: Callable[[pa.Array], list[Any]] = pa.Array.to_pylist
    if is_text or types.is_binary(kind) or types.is_large_binary(kind):
        rule = _objects
    elif is_exact(kind):
        rule = _decimals
    elif _is_struct(kind):
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


def is_exact(kind: "pa.DataType") -> bool:
    """Return whether a column has numbers as text, to keep them exact.

    Arrow's decimals have a fixed number of digits, and no NaN.
    """
    is_opaque = getattr(kind, "extension_name", "") == "arrow.opaque"
    return is_opaque and kind.type_name == "numeric"


def _is_struct(kind: "pa.DataType") -> bool:
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    return bool(pa.types.is_struct(kind))


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
    integers = column_of(array.view(pa.int32() if kind.bit_width == 32 else pa.int64()))
    assert type(integers) is Numbers
    values = integers.values.astype(np.int64)
    return _set_nulls(array, list(values.view(f"{'M8' if is_point else 'm8'}[{unit}]")))


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
    fixed, leaf = fixed_of(child.type), _leaf_of(child.type)
    if fixed is not None:
        numbers = Numbers.of(child, fixed)
        rows = [numbers.cut(start, stop).whole() for start, stop in spans]
    else:
        items = values_of(child)
        rows = [items[start:stop] for start, stop in spans]
        if leaf is not None:
            rows = [_stacked(row, leaf) for row in rows]
    return _set_nulls(array, rows)


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


def _leaf_of(kind: "pa.DataType") -> "Fixed | None":
    """Return dtype and row shape of numbers in nested lists; None: no numbers."""
    levels = 0
    while _is_list(kind) and fixed_of(kind) is None:
        kind = kind.value_type
        levels += 1
    fixed = fixed_of(kind)
    if fixed is None or not levels:
        return None
    return fixed._replace(shape=(0,) * (levels + len(fixed.shape)))


def _stacked(rows: list[Any], leaf: "Fixed") -> Any:
    """Return arrays of one shape as one array, others unchanged."""
    if not rows:
        return np.zeros((0, *leaf.shape), leaf.dtype)
    first = rows[0]
    alike = all(isinstance(r, np.ndarray) and r.shape == first.shape for r in rows)
    return np.stack(rows) if alike else rows
