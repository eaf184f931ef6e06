"""Samples to the bytes of tar members and to the columns of tables."""

import io
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from aioloader.datasets._decode import encode, is_buffer
from aioloader.datasets._tar import split_name

_BLOCK = 512
_NUMBER_BYTES = 8


# -- members of a tar ---------------------------------------------------------------


def members_of(key: Any, sample: Mapping[str, Any]) -> bytes:
    """Return the members of a sample with their headers, the same ones in each run.

    Raises:
        TypeError: If a value has an unsuitable type.
        ValueError: If the sample could not be read back unchanged.
    """
    named = [(n.lower(), v) for n, v in sample.items() if not n.startswith("__")]
    members = dict(named)
    if not members or len(members) < len(named):
        what = "no members" if not members else "two members of the same name"
        raise ValueError(f"sample {key!r} has {what}: {', '.join(sample)}")
    parts = []
    for name, value in members.items():
        _check_name(key, name)
        try:
            data = encode(value, name)
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size, info.mode = len(data), 0o444
            header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        except (TypeError, ValueError, OSError) as error:
            error.add_note(f"aioloader: member {name!r} of sample {key!r}")
            raise
        parts += [header, data, bytes(-len(data) % _BLOCK)]
    return b"".join(parts)


def _check_name(key: Any, name: str) -> None:
    """Raise a ValueError unless a reader finds the same key and field."""
    is_path = isinstance(key, str) and not key.startswith("/") and ".." not in key
    if is_path and split_name(f"{key}.{name}") == (key, name):
        return
    raise ValueError(
        f"a tar cannot hold the key {key!r} with {name!r}: keys are relative paths "
        f"without a dot in the last part, or in the whole if there is one part"
    )


# -- rows of a table ----------------------------------------------------------------


def table_of(pa: Any, rows: list[dict[str, Any]], schema: Any) -> Any:
    """Return rows as a table of pyarrow, of a given schema or of their own.

    Raises:
        ValueError: If a column does not fit.
    """
    if schema is None:
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: _column(pa, rows, name) for name in names})
    columns = [_column(pa, rows, field.name, field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(pa: Any, rows: list[dict[str, Any]], name: str, kind: Any = None) -> Any:
    values = [row.get(name) for row in rows]
    # pyarrow takes only arrays of one dimension.
    values = [
        value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value
        for value in values
    ]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        what = "one type" if kind is None else str(kind)
        raise ValueError(
            f"column {name!r} cannot be written as {what}: {error}; pass a schema that "
            f"fits all rows"
        ) from error


def copied(value: Any) -> Any:
    """Return a copy that the caller cannot change before the row group is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, (np.ndarray, list, dict)):
        return value.copy()
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


class Output(io.RawIOBase):
    """An output file for pyarrow; keeps bytes until they are taken."""

    def __init__(self) -> None:
        self._size = 0
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Keep a copy."""
        self._parts.append(bytes(data))
        self._size += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        """Return how much was written."""
        return self._size

    def taken(self) -> bytes:
        """Return the bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
