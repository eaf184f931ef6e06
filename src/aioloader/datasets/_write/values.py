"""Conversion of samples to the bytes of tar members and to columns of tables."""

import contextlib
import io
import math
import reprlib
import tarfile
from bisect import bisect_left
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch

from aioloader.datasets.decoders import encode, is_buffer
from aioloader.datasets.tar import split_name

_BLOCK = 512
_NUMBER_BYTES = 8
# Raised for values that a type cannot hold; pyarrow's errors derive from these.
_UNFIT = ValueError, TypeError, OverflowError, NotImplementedError
# Types of list items that need no copy; the lists may be long.
_IMMUTABLE = frozenset({int, float, str, bytes, bool, type(None)})
_REPR = reprlib.Repr()
_REPR.maxother = 60


def members_of(key: Any, sample: Mapping[str, Any]) -> bytes:
    """Return a sample as tar members with headers; the bytes are equal in all runs."""
    named = [(n.lower(), v) for n, v in sample.items() if not n.startswith("__")]
    members = dict(named)
    if not members or len(members) < len(named):
        problem = "no members" if not members else "two members of the same name"
        raise ValueError(
            f"sample {key!r} has {problem}: {', '.join(sample)}; give each its own"
        )
    if not isinstance(key, str):
        raise ValueError(  # noqa: TRY004  (as for any other key)
            f"a tar cannot hold the key {key!r} of type {type(key).__name__}: pass "
            f"text, such as {str(key)!r}"
        )
    is_path = not key.startswith("/") and ".." not in key
    parts = []
    for name, value in members.items():
        # A reader must find the same key and field.
        file = f"{key}.{name}"
        if not is_path or "\0" in file or split_name(file) != (key, name):
            raise ValueError(
                f"a tar cannot hold the key {key!r} with {name!r}: write the key as a "
                "relative path without a dot in its last part, '..', NUL or a first "
                "part like __this__, and the name without '/' and NUL"
            )
        try:
            data = encode(value, name)
            info = tarfile.TarInfo(file)
            info.size, info.mode = len(data), 0o444
            header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        except (TypeError, ValueError, OSError) as error:
            error.add_note(f"aioloader: member {name!r} of sample {key!r}")
            raise
        parts += [header, data, bytes(-len(data) % _BLOCK)]
    return b"".join(parts)


def table_of(
    pa: Any, rows: list[dict[str, Any]], first: int, schema: Any, *, may_round: bool
) -> Any:
    """Return rows as a pyarrow table, with the given schema or an inferred one.

    If a row would not be read back unchanged, remove it from ``rows`` and raise a
    ValueError. ``first``: the first row's number. ``may_round``: accept rounding.
    """
    fields: dict[str, Any] = dict.fromkeys(name for row in rows for name in row)
    if schema is not None:
        fields = {field.name: field for field in schema}
    columns = {}
    for name, field in fields.items():
        values = [row.get(name) for row in rows]
        kinds = {getattr(value, "dtype", None) for value in values if value is not None}
        # Without a schema, numbers keep their type if all have the same.
        kind: Any = kinds.pop() if field is None and len(kinds) == 1 else None
        keeps = kind is not None and kind.kind in "biuf" and kind.isnative
        values = [_to_list(value, keeps=keeps) for value in values]
        make = partial(_array, pa, field, may_round=may_round)
        try:
            columns[name] = make(values)
        except _UNFIT as error:
            row, why = _first_unfit(make, values)
            del rows[row]
            target = "one type" if field is None else str(field.type)
            raise ValueError(
                f"column {name!r} cannot be written as {target}: row {first + row:,}: "
                f"{why}; pass a schema that fits all rows"
            ) from error
    return pa.table(columns, schema)


def _to_list(value: Any, *, keeps: bool) -> Any:
    """Convert an array, unless 1-D, to lists or a scalar; if ``keeps``, keep types."""
    if not isinstance(value, np.ndarray) or value.ndim == 1:
        return value
    if not keeps:
        return value.tolist()
    return [_to_list(v, keeps=True) for v in value] if value.ndim else value[()]


def _first_unfit(
    make: Callable[[list[Any]], Any], values: list[Any]
) -> tuple[int, str]:
    """Return the index of the first value that ``make`` refuses, and the reason."""

    def why(count: int) -> str:
        try:
            make(values[:count])
        except _UNFIT as error:
            return str(error) or repr(error)
        return ""

    counts = range(1, len(values) + 1)
    row = bisect_left(counts, 1, key=lambda count: bool(why(count)))
    return row, why(row + 1)


def _array(pa: Any, field: Any, values: list[Any], *, may_round: bool) -> Any:
    """Return a pyarrow array of exactly these values, of the field's type if given.

    Check the values, because pyarrow silently truncates 0.75 to int64 and drops fields.
    """
    kind: Any = None if field is None else field.type
    guess: Any = None
    with contextlib.suppress(*_UNFIT):
        guess = pa.array(values)
    fits = guess is not None and (kind is None or guess.type == kind)
    array = guess if fits else pa.array(values, kind)
    if array.null_count and field is not None and not field.nullable:
        raise ValueError("there is no value, and the column is not nullable")
    # pyarrow's guess may truncate, too: datetimes after a date, 0.5 of float16 after 1.
    is_mixed = len({*map(type, values)} - {type(None)}) > 1
    is_exact = guess is not None and not is_mixed and "date32" not in str(guess.type)
    if is_exact and (fits or _is_same(guess, array, may_round=may_round)):
        return array
    for value, read in zip(values, array.to_pylist(), strict=True):
        if not _is_kept(value, read, may_round=may_round):
            raise ValueError(f"{_REPR.repr(value)} would become {_REPR.repr(read)}")
    return array


def _is_same(exact: Any, array: Any, *, may_round: bool) -> bool:
    """Tell whether arrays surely agree; rounding is allowed if ``may_round``."""
    from pyarrow import compute, types  # noqa: PLC0415  (as in ``writers``)

    with contextlib.suppress(*_UNFIT):
        if array.cast(exact.type).equals(exact):
            return True
    while all(hasattr(side.type, "value_field") for side in (array, exact)):
        array, exact = array.flatten(), exact.flatten()
    if not may_round or not all(types.is_floating(a.type) for a in (array, exact)):
        return False
    return bool(compute.is_finite(array).equals(compute.is_finite(exact)))


def _is_kept(value: Any, read: Any, *, may_round: bool) -> bool:
    """Tell whether a value is read back unchanged, perhaps as another type.

    True also for values that cannot be compared, and for rounded ones if ``may_round``.
    """
    kept = partial(_is_kept, may_round=may_round)
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        read = dict(read)
        return all(name in read and kept(value[name], read[name]) for name in value)
    if isinstance(read, (list, tuple)):
        return len(value) == len(read) and all(map(kept, value, read))
    if isinstance(value, Number) and isinstance(read, Number):
        is_rounded = may_round and isinstance(read, float) and math.isfinite(read)
        return bool(is_rounded or value == read or value != value)  # noqa: PLR0124  (NaN)
    if isinstance(value, datetime) and isinstance(read, date):
        if not isinstance(read, datetime):
            read = datetime.combine(read, time(), value.tzinfo)
        return value == read or (value.tzinfo is None) != (read.tzinfo is None)
    return value == read or not isinstance(value, (time, timedelta))


def copied(value: Any) -> Any:
    """Return a copy of a value, so that the caller cannot change what is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: copied(field) for name, field in value.items()}
    if isinstance(value, (list, tuple)):
        items = (v if type(v) in _IMMUTABLE else copied(v) for v in value)
        return tuple(items) if isinstance(value, tuple) else [*items]  # pairs of a map
    return bytes(value) if is_buffer(value) else value


def bytes_of(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return _NUMBER_BYTES


class Output(io.BytesIO):
    """A memory file for pyarrow; ``tell`` also counts bytes that ``taken`` removed."""

    _taken = 0

    def tell(self) -> int:
        return self._taken + super().tell()

    def taken(self) -> bytes:
        data = self.getvalue()
        self._taken += len(data)
        self.seek(0)
        self.truncate()
        return data
