"""The contents of a shard: samples to the bytes of a tar or Parquet file.

A body holds bytes not yet taken: some megabytes, and for tables a row group.
"""

import array
import sys
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from aioloader.datasets._decode.fields import encode, is_buffer, is_light
from aioloader.datasets._tar.headers import split_name

# A few of these are worth a call in a thread.
_DUE_BYTES = 4 << 20
_BLOCK = 512
_NUMBER_BYTES = 8


class Body(Protocol):
    """One shard being made.

    Attributes:
        size: Bytes so far; an estimate for rows that are not yet written.
    """

    size: int

    def is_light(self, sample: Mapping[str, Any]) -> bool:
        """Return whether ``encode`` is quick."""

    def encode(self, sample: Mapping[str, Any], number: int) -> Any:
        """Return the form of a sample that ``append`` takes.

        Raises:
            TypeError: If the sample, or a value, has an unsuitable type.
            ValueError: If it could not be read back unchanged.
        """

    def append(self, encoded: Any) -> None:
        """Add a sample."""

    def is_due(self) -> bool:
        """Return whether it is time to take bytes."""

    def take(self, *, is_end: bool = False) -> bytes:
        """Return the bytes that are ready; runs in a thread."""

    def index(self) -> bytes | None:
        """Return the index of the samples, if it is a separate file."""


class TarBody:
    """A tar archive whose members readers group into samples like WebDataset."""

    def __init__(self) -> None:
        self.size = 0
        self._starts = array.array("Q")
        self._parts: list[bytes] = []
        self._ready = 0
        self._key = ""

    def is_light(self, sample: Mapping[str, Any]) -> bool:
        """Return whether all members are bytes, text or numbers."""
        return all(map(is_light, sample.values()))

    def encode(self, sample: Mapping[str, Any], number: int) -> tuple[str, bytes]:
        """Return the key of a sample, and its members with their headers."""
        key = sample.get("__key__", f"{number:09d}")
        if key == self._key:
            raise ValueError(
                f"sample {number:,} has the key {key!r}, like the one before: readers "
                f"would take both for one sample"
            )
        members = {n.lower(): v for n, v in sample.items() if not n.startswith("__")}
        count = sum(not name.startswith("__") for name in sample)
        if not members or len(members) < count:
            what = "no members" if not members else "two members of the same name"
            raise ValueError(f"sample {key!r} has {what}: {', '.join(sample)}")
        parts = []
        for name, value in members.items():
            _check_name(key, name)
            try:
                parts.append(_member(f"{key}.{name}", encode(value, name)))
            except (TypeError, ValueError, OSError) as error:
                error.add_note(f"aioloader: member {name!r} of sample {key!r}")
                raise
        return key, b"".join(parts)

    def append(self, encoded: tuple[str, bytes]) -> None:
        """Add a sample."""
        self._key, data = encoded
        self._starts.append(self.size)
        self._parts.append(data)
        self.size += len(data)
        self._ready += len(data)

    def is_due(self) -> bool:
        """Return whether some megabytes are ready."""
        return self._ready >= _DUE_BYTES

    def take(self, *, is_end: bool = False) -> bytes:
        """Return the bytes that are ready; at the end also two blocks of zeros."""
        parts, self._parts, self._ready = self._parts, [], 0
        if is_end:
            self._starts.append(self.size)
            parts.append(bytes(2 * _BLOCK))
            self.size += 2 * _BLOCK
        return b"".join(parts)

    def index(self) -> bytes:
        """Return the samples' starts and the last one's end, as in ``_tar.index``.

        Only after the end.
        """
        starts = self._starts[:]
        if sys.byteorder != "little":
            starts.byteswap()
        return starts.tobytes()


def _check_name(key: Any, name: str) -> None:
    """Raise a ValueError unless a reader finds the same key and field."""
    is_path = isinstance(key, str) and not key.startswith("/") and ".." not in key
    if is_path and split_name(f"{key}.{name}") == (key, name):
        return
    raise ValueError(
        f"a tar cannot hold the key {key!r} with {name!r}: keys are relative paths "
        f"without a dot in the last part, or in the whole if there is one part"
    )


def _member(name: str, data: bytes) -> bytes:
    """Return a member with its header, which is the same in each run."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return b"".join((header, data, bytes(-len(data) % _BLOCK)))


class ParquetBody:
    """A Parquet file, a row group at a time.

    Args:
        schema: The rows' schema in pyarrow; None: that of the first row group.
        compression: As in pyarrow.
        row_group_bytes: Approximate size of a row group.

    Attributes:
        schema: The schema, once known.
    """

    def __init__(self, schema: Any, compression: str, row_group_bytes: int) -> None:
        self.size = 0
        self.schema = schema
        self._compression = compression
        self._group_bytes = row_group_bytes
        self._rows: list[dict[str, Any]] = []
        self._pending = 0
        self._output = _Output()
        self._writer: Any = None

    def is_light(self, sample: Mapping[str, Any]) -> bool:  # noqa: ARG002  (they all are)
        """Return True: rows become columns in ``take``."""
        return True

    def encode(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return a copy of the row."""
        if not isinstance(sample, Mapping):
            kind = type(sample).__name__
            raise TypeError(f"row {number:,} must be a dict of columns, got {kind}")
        if self.schema is not None and sample.keys() - set(self.schema.names):
            unknown = sorted(sample.keys() - set(self.schema.names))
            raise ValueError(
                f"row {number:,} has columns that the schema lacks: "
                f"{', '.join(unknown)}; pass a schema that has all"
            )
        return {name: _copied(value) for name, value in sample.items()}

    def append(self, encoded: dict[str, Any]) -> None:
        """Add a row."""
        size = sum(map(_bytes_of, encoded.values()))
        self._rows.append(encoded)
        self._pending += size
        self.size += size

    def is_due(self) -> bool:
        """Return whether a row group is ready."""
        return self._pending >= self._group_bytes

    def take(self, *, is_end: bool = False) -> bytes:
        """Write the rows as a row group; at the end the footer too."""
        if self._rows:
            self._write()
        if is_end:
            self._writer.close()
        self.size = self._output.size
        return self._output.taken()

    def index(self) -> None:
        """Return None: row groups are in the footer."""

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
        import pyarrow.parquet as pq  # noqa: PLC0415

        rows, self._rows, self._pending = self._rows, [], 0
        if self.schema is None:
            names = dict.fromkeys(name for row in rows for name in row)
            types: list[tuple[str, Any]] = [(name, None) for name in names]
        else:
            types = [(field.name, field.type) for field in self.schema]
        columns = [
            _column(pa, [row.get(name) for row in rows], name, kind)
            for name, kind in types
        ]
        if self.schema is None:
            table = pa.table(dict(zip(names, columns, strict=True)))
            self.schema = table.schema
        else:
            table = pa.Table.from_arrays(columns, schema=self.schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._output, "w"),
                self.schema,
                compression=self._compression,
            )
        self._writer.write_table(table, row_group_size=len(rows))


def _column(pa: Any, values: list[Any], name: str, kind: Any) -> Any:
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


def _copied(value: Any) -> Any:
    """Return a copy that the caller cannot change before the row group is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, (np.ndarray, list, dict)):
        return value.copy()
    return bytes(value) if is_buffer(value) else value


def _bytes_of(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return _NUMBER_BYTES


class _Output:
    """An output file for pyarrow; keeps bytes until they are taken."""

    closed = False

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        """Keep a copy."""
        self._parts.append(bytes(data))
        self.size += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        """Return how much was written."""
        return self.size

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def taken(self) -> bytes:
        """Return the bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
