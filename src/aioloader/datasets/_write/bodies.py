"""The contents of shards: samples to the bytes of tar or Parquet files.

A body makes the shards of one writer, one after another. It holds bytes not yet taken:
some megabytes, and for tables a row group.
"""

import abc
import array
import base64
import io
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from aioloader.datasets._decode.fields import encode, is_buffer, is_light
from aioloader.datasets._tar.groups import Groups

# A few of these are worth a call in a thread.
_DUE_BYTES = 4 << 20
_BLOCK = 512
_ENDLESS = 1 << 62
_NUMBER_BYTES = 8


class Body(abc.ABC):
    """One shard being made, then the next one.

    Args:
        due_bytes: How many bytes are worth taking.

    Attributes:
        size: Bytes of the shard so far; an estimate for rows that were not taken.
        schema: The schema of tables as text, known once a shard has ended.
    """

    schema = ""

    def __init__(self, due_bytes: int) -> None:
        self.size = self._waiting = 0
        self._due_bytes = due_bytes

    def is_light(self, sample: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Return whether ``encode`` is quick."""
        return True

    @abc.abstractmethod
    def encode(self, sample: Mapping[str, Any], number: int) -> Any:
        """Return the form of a sample that ``append`` takes.

        Raises:
            TypeError: If the sample, or a value, has an unsuitable type.
            ValueError: If it could not be read back unchanged.
        """

    @abc.abstractmethod
    def append(self, encoded: Any) -> None:
        """Add a sample."""

    def _count(self, size: int) -> None:
        self.size += size
        self._waiting += size

    def is_due(self) -> bool:
        """Return whether it is time to take bytes."""
        return self._waiting >= self._due_bytes

    @abc.abstractmethod
    def take(self) -> bytes:
        """Return the bytes that are ready; runs in a thread, like ``end``."""

    @abc.abstractmethod
    def end(self) -> tuple[bytes, bytes | None]:
        """End the shard, and return the rest of it, and its index if it has one."""


class TarBody(Body):
    """Tar archives whose members readers group into samples like WebDataset."""

    def __init__(self) -> None:
        super().__init__(_DUE_BYTES)
        self._starts = array.array("Q")
        self._parts: list[bytes] = []
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
        named = [(n.lower(), v) for n, v in sample.items() if not n.startswith("__")]
        members = dict(named)
        if not members or len(members) < len(named):
            what = "no members" if not members else "two members of the same name"
            raise ValueError(f"sample {key!r} has {what}: {', '.join(sample)}")
        parts: list[bytes] = []
        for name, value in members.items():
            _check_name(key, name)
            try:
                parts += _member(f"{key}.{name}", encode(value, name))
            except (TypeError, ValueError, OSError) as error:
                error.add_note(f"aioloader: member {name!r} of sample {key!r}")
                raise
        return key, b"".join(parts)

    def append(self, encoded: tuple[str, bytes]) -> None:
        """Add a sample."""
        self._key, data = encoded
        self._starts.append(self.size)
        self._parts.append(data)
        self._count(len(data))

    def take(self) -> bytes:
        """Return the samples that are ready."""
        parts, self._parts, self._waiting = self._parts, [], 0
        return b"".join(parts)

    def end(self) -> tuple[bytes, bytes]:
        """Return the rest, with two blocks of zeros, and the index.

        It has the samples' starts and the last one's end, as in ``_tar.index``.
        """
        self._parts.append(bytes(2 * _BLOCK))
        self._starts.append(self.size)
        index = np.asarray(self._starts).astype("<u8").tobytes()
        self._starts, self._key, self.size = array.array("Q"), "", 0
        return self.take(), index


def _check_name(key: Any, name: str) -> None:
    """Raise a ValueError unless a reader finds the same key and field."""
    groups = Groups("", _ENDLESS)
    if isinstance(key, str) and not key.startswith("/") and ".." not in key:
        field = groups.place(f"{key}.{name}", 0, 0)
        if groups.key == key and field == name:
            return
    raise ValueError(
        f"a tar cannot hold the key {key!r} with {name!r}: keys are relative paths "
        f"without a dot in the last part, or in the whole if there is one part"
    )


def _member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return a header, which is the same in each run, the body, and zeros after it."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return header, data, bytes(-len(data) % _BLOCK)


class ParquetBody(Body):
    """Parquet files, a row group at a time.

    Args:
        schema: The rows' schema in pyarrow; None: that of the first row group.
        compression: As in pyarrow.
        row_group_bytes: Approximate size of a row group.
    """

    def __init__(self, schema: Any, compression: str, row_group_bytes: int) -> None:
        super().__init__(row_group_bytes)
        self._schema = schema
        self._compression = compression
        self._rows: list[dict[str, Any]] = []
        self._output = _Output()
        self._writer: Any = None

    def encode(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return a copy of the row."""
        if not isinstance(sample, Mapping):
            kind = type(sample).__name__
            raise TypeError(f"row {number:,} must be a dict of columns, got {kind}")
        if self._schema is not None and sample.keys() - set(self._schema.names):
            unknown = sorted(sample.keys() - set(self._schema.names))
            raise ValueError(
                f"row {number:,} has columns that the schema lacks: "
                f"{', '.join(unknown)}; pass a schema that has all"
            )
        return {name: _copied(value) for name, value in sample.items()}

    def append(self, encoded: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(encoded)
        self._count(sum(map(_bytes_of, encoded.values())))

    def take(self) -> bytes:
        """Return the rows as a row group."""
        if self._rows:
            self._write()
        self.size = self._output.size
        return self._output.taken()

    def end(self) -> tuple[bytes, None]:
        """Return the rest with the footer, which has the row groups: no index."""
        data = self.take()
        self._writer.close()
        data += self._output.taken()
        self.schema = base64.b64encode(self._schema.serialize()).decode()
        self._output, self._writer, self.size = _Output(), None, 0
        return data, None

    def _write(self) -> None:
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
        import pyarrow.parquet as pq  # noqa: PLC0415

        rows, self._rows, self._waiting = self._rows, [], 0
        if self._schema is None:
            names = dict.fromkeys(name for row in rows for name in row)
            table = pa.table({name: _column(pa, rows, name) for name in names})
            self._schema = table.schema
        else:
            columns = [_column(pa, rows, one.name, one.type) for one in self._schema]
            table = pa.Table.from_arrays(columns, schema=self._schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._output, "w"),
                self._schema,
                compression=self._compression,
            )
        self._writer.write_table(table, row_group_size=len(rows))


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


class _Output(io.RawIOBase):
    """An output file for pyarrow; keeps bytes until they are taken."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Keep a copy."""
        self._parts.append(bytes(data))
        self.size += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        """Return how much was written."""
        return self.size

    def taken(self) -> bytes:
        """Return the bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
