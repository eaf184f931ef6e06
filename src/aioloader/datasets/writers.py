"""Writers of tar and Parquet shards, on disk and in stores.

Samples are written one by one to shards of about equal size. Readers see only complete
shards. A writer that is opened again, even after a crash, resumes after the last
complete shard. Memory holds a few megabytes, and the parts of an upload in flight.
"""

import abc
import array
import asyncio
import base64
import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeAlias,
    TypedDict,
    Unpack,
)

import numpy as np

from aioloader._base.cancellation import in_thread
from aioloader._base.extras import imported
from aioloader.datasets._checks import (
    check_at_least,
    check_is,
    check_same,
    names_options,
)
from aioloader.datasets._stores.options import hidden
from aioloader.datasets._write.sinks import make_sink
from aioloader.datasets._write.values import (
    Output,
    bytes_of,
    copied,
    members_of,
    table_of,
)
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    import os

    from obstore.store import ObjectStore

    Destination: TypeAlias = str | os.PathLike[str] | ObjectStore

_VERSION = 1
_MISMATCH = (
    "{where} was started with another {what}; write to another place, or under "
    "another name"
)
RowIterable: TypeAlias = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
SHARD_BYTES = 256 << 20
ROW_GROUP_BYTES = 16 << 20
_TAR_END = bytes(1024)  # two blocks, as a tar ends
# Values of these types are encoded on the event loop, others in a thread.
_QUICK_TYPES = bytes, str, int, bytearray, memoryview
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Number of rows to take from a plain iterable before other tasks run.
_ROWS_PER_TURN = 64


class _FinishedShard(NamedTuple):
    """The name, number of samples, and size in bytes of a finished shard."""

    file: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    """A writer's finished shards and settings; writing resumes if the settings match.

    A shard is listed before it is visible. So after a crash only the last listed shard
    can be missing; it is written again.
    """

    name: str  # prefix of the shards' file names
    ending: str  # such as "tar"
    metadata: Mapping[str, Any]  # the user's description of the samples' origin
    schema: str = ""  # of tables, as text
    shards: tuple[_FinishedShard, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}-shards.json"

    @property
    def next_shard(self) -> str:
        return f"{self.name}-{len(self.shards):06d}.{self.ending}"

    def dump(self) -> bytes:
        content = {
            "version": _VERSION,
            "format": self.ending,
            "metadata": self.metadata,
            "schema": self.schema,
            "shards": [entry._asdict() for entry in self.shards],
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def resumed(
        self, text: bytes | None, sizes: Mapping[str, int], label: str
    ) -> "_Manifest":
        """Return the manifest to continue with, or raise a StateMismatchError.

        ``text`` is the manifest file's contents, or None. ``sizes`` are the sizes of
        all files in the folder, by name. ``label`` is the folder, for errors.
        """
        where = f"{label!r} ({self.file})"
        manifest = self if text is None else self._loaded(text, where)
        shards = manifest.shards
        if shards and shards[-1].file not in sizes:
            shards = shards[:-1]  # listed, but not completed
        for entry in shards:
            size = sizes.get(entry.file)
            if size != entry.bytes:
                state = "is gone" if size is None else f"has {size:,} bytes"
                raise StateMismatchError(
                    f"{where} has {entry.file!r} with {entry.bytes:,} bytes, but that "
                    f"{state}; write to another place, or under another name",
                    expected=entry.bytes,
                    found=size,
                )
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{6,}}\.{self.ending}")
        extra = {*filter(pattern.fullmatch, sizes)} - {entry.file for entry in shards}
        if extra:
            raise StateMismatchError(
                f"{where} does not name {min(extra)!r}, which is there: readers would "
                f"take both for one dataset; write to another place, or under another "
                f"name",
                expected=len(shards),
                found=sorted(extra),
            )
        return replace(manifest, shards=shards)

    def _loaded(self, text: bytes, where: str) -> "_Manifest":
        try:
            content = json.loads(text)
            version, schema = content["version"], content["schema"]
            shards = tuple(_FinishedShard(**entry) for entry in content["shards"])
            settings = {name: content[name] for name in ("format", "metadata")}
        except (ValueError, TypeError, KeyError) as exc:
            raise StateMismatchError(
                f"{where} is not a writer's list of shards: {exc!r}; write to another "
                f"place, or under another name"
            ) from exc
        if version != _VERSION:
            raise StateMismatchError(
                f"{where} is of version {version}, and this is {_VERSION}; write to "
                "another place",
                expected=_VERSION,
                found=version,
            )
        check_same(settings, json.loads(self.dump()), _MISMATCH, where)
        return replace(self, shards=shards, schema=schema)


class WriterOptions(TypedDict, total=False):
    """Keyword arguments of every ``ShardWriter``."""

    shard_bytes: int
    shard_samples: int | None
    metadata: Mapping[str, Any] | None
    store_options: Mapping[str, Any] | None


class ParquetOptions(WriterOptions, total=False):
    """Keyword arguments of ``ParquetWriter``."""

    schema: Any
    compression: str
    row_group_bytes: int


class ShardWriter(abc.ABC):
    """An async context manager that writes shards ``NAME-000000``, ``NAME-000001``...

    ``NAME-shards.json`` lists the names and sizes of the shards. A new writer for the
    same place resumes: pass it the same samples in the same order, from number
    ``next_sample`` on. Run one writer at a time; several machines that write to one
    place need different names. A shard ends with the sample that fills it.

    Args:
        destination: A directory, a URL (``s3://bucket/train``), or an obstore store.
        name: Prefix of the shards' names.
        shard_bytes: Size at which a shard is finished.
        shard_samples: Maximum number of samples per shard; None: no limit.
        metadata: JSON-serialisable data about the samples' origin, which is stored.
            Writing resumes only with equal metadata.
        store_options: Options of the store that a URL names.

    Attributes:
        next_sample: Number of the next sample, from 0; known once the writer is open.

    Raises:
        ImportError: If ``destination`` is in a store, and obstore is not installed.
        TypeError: If ``metadata`` is not JSON-serialisable.
        ValueError: If an argument is wrong.
    """

    ending: ClassVar[str]
    _send_bytes = 4 << 20  # number of buffered bytes worth a call in a thread

    @names_options
    def __init__(
        self,
        destination: "Destination",
        name: str = "shard",
        *,
        shard_bytes: int = SHARD_BYTES,
        shard_samples: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_at_least(shard_bytes, 1, "shard_bytes")
        if shard_samples is not None:
            check_at_least(shard_samples, 1, "shard_samples")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"name must be made of letters, digits, dots, dashes and underscores, "
                f"got {name!r}; folders belong in the destination"
            )
        json.dumps(metadata)  # raises if not JSON-serialisable
        self.next_sample: int = 0
        self._shard_bytes = shard_bytes
        self._shard_samples = shard_samples
        self._sink = make_sink(destination, hidden(store_options))
        self._manifest = _Manifest(name, self.ending, dict(metadata or {}))
        self._saved: bytes | None = None
        self._lock = asyncio.Lock()
        self._is_open = False
        self._begin()

    @property
    def shards(self) -> list[str]:
        """Names of the finished shards."""
        return [entry.file for entry in self._manifest.shards]

    async def __aenter__(self) -> Self:
        """Open the destination, and find the shards that are already written.

        Raises:
            StateMismatchError: If existing shards have other settings or metadata, or
                were not made by a writer.
            DatasetError: If the store fails.
        """
        manifest = self._manifest
        try:
            sizes = await self._sink.open(manifest.name)
            self._saved = await self._sink.read(manifest.file)
            self._manifest = manifest.resumed(self._saved, sizes, self._sink.label)
            self._resume(self._manifest.schema)
            await self._save(self._manifest)
        except BaseException:
            await self._sink.aclose()
            raise
        self.next_sample = sum(entry.samples for entry in self._manifest.shards)
        self._begin()
        self._is_open = True
        return self

    @property
    def _count(self) -> int:
        return self.next_sample - self._first

    def _begin(self) -> None:
        """Begin a new shard; discard the samples of an unfinished shard."""
        self._first = self.next_sample
        self._pending: list[Any] = []
        self._pending_bytes = self._sent_bytes = 0

    async def write(self, sample: Mapping[str, Any]) -> None:
        """Write one sample; concurrent calls are served in order.

        After a TypeError or ValueError the sample is not written, and the writer stays
        open. Other errors close the writer; a new one resumes after the last shard.

        Raises:
            TypeError: If the sample or one of its values has an unsuitable type.
            ValueError: If the sample could not be read back unchanged. Parquet values
                are checked once a row group is full, so the error may name an earlier
                row; only that row is not written.
            DatasetError: If the store fails.
            RuntimeError: If the writer is not open.
        """
        async with self._lock:
            if not self._is_open:
                raise RuntimeError(
                    f"{self!r} is not open: use it in 'async with', and not after an "
                    f"error; open another one, which resumes"
                )
            encoded, size = await self._encode(sample)
            self._is_open = False  # until this succeeds
            self._pending.append(encoded)
            self._pending_bytes += size
            self.next_sample += 1
            is_full = self._sent_bytes + self._pending_bytes >= self._shard_bytes
            if is_full or self._count == self._shard_samples:
                await self._finish()
            elif self._pending_bytes >= self._send_bytes:
                await self._send()
            self._is_open = True

    async def _send(self, *, is_end: bool = False) -> None:
        pending, count = self._pending, len(self._pending)
        try:
            data = await in_thread(partial(self._pack, is_end=is_end), pending)
        except ValueError:
            if len(pending) < count:  # `_pack` removed a refused row
                self._pending_bytes = self._pending_bytes * len(pending) // count
                self.next_sample -= 1
                self._is_open = True
            raise
        del pending
        self._pending, self._pending_bytes = [], 0
        await self._sink.write(self._manifest.next_shard, data)
        self._sent_bytes += len(data)

    async def _finish(self) -> None:
        """List the shard in the manifest, then make it visible to readers."""
        await self._send(is_end=True)
        old, index, size = self._manifest, self._index(), self._sent_bytes
        shards = (*old.shards, _FinishedShard(old.next_shard, self._count, size))
        manifest = replace(old, shards=shards, schema=self._schema())
        await self._save(manifest)
        if index is not None:  # after `_save`, which detects other writers
            await self._sink.put(f"{old.next_shard}.idx", index)
        await self._sink.complete()
        self._manifest = manifest
        self._begin()

    async def _save(self, manifest: _Manifest) -> None:
        data = manifest.dump()
        if not await self._sink.swap(manifest.file, self._saved, data):
            raise StateMismatchError(
                f"another writer has written to {self._sink.label!r} ({manifest.file}) "
                f"meanwhile; run one writer at a time, or give each a different name"
            )
        self._saved = data

    async def __aexit__(
        self, _kind: object, exc: BaseException | None, *_: object
    ) -> None:
        """Finish the last shard, or discard it after an error.

        Raises:
            RuntimeError: If ``write`` failed and the block suppressed its error.
        """
        is_whole = self._is_open
        self._is_open = False
        try:
            if exc is None and self._count:
                if not is_whole:
                    raise RuntimeError(
                        f"an error in 'write' closed {self!r}, and the {self._count:,} "
                        f"samples of its last shard are lost: open another one, which "
                        f"resumes at sample {self._first:,}"
                    )
                await self._finish()
        finally:
            self._is_open = False
            self._begin()
            await self._sink.aclose()

    def __repr__(self) -> str:
        count = len(self._manifest.shards)
        place = f"{self._sink.label!r}, {self._manifest.name!r}"
        return f"{type(self).__name__}({place}, {count} shards)"

    @abc.abstractmethod
    async def _encode(self, sample: Mapping[str, Any]) -> tuple[Any, int]:
        """Encode the next sample for ``_pack``; return it and its approximate size."""

    @abc.abstractmethod
    def _pack(self, encoded: list[Any], *, is_end: bool) -> bytes:
        """Turn encoded samples into the shard's next bytes; runs in a thread.

        To refuse a sample, remove it from ``encoded`` and raise a ValueError.
        """

    def _index(self) -> bytes | None:
        """Return the index of the shard just sent; None if no index file is needed."""
        return None

    def _schema(self) -> str:
        """Return the schema of the shards as text; empty unless they are tables."""
        return ""

    def _resume(self, schema: str) -> None:  # noqa: B027  (tars have none)
        """Adopt the schema of existing shards; empty if no shard exists."""


class TarWriter(ShardWriter):
    """Writes tar shards that ``TarDataset`` and WebDataset read.

    A sample is a dict of values by extension; ``__key__`` is its name (default: its
    number). Bytes and text are written unchanged. Other values are encoded by
    extension, as the reverse of ``Decoder``: ``cls`` numbers, ``json``, ``npy``,
    ``pth``, ``jpg`` and ``png`` images of Pillow, NumPy and torch. Equal samples
    produce equal bytes. Each shard has an index (``.tar.idx``), so that several readers
    can share it. Arguments and errors are those of ``ShardWriter``.

    Example:
        >>> import asyncio, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> async def write():
        ...     async with TarWriter(folder, "train") as writer:
        ...         for number in range(writer.next_sample, 3):
        ...             await writer.write({"txt": f"text {number}", "cls": number})
        ...     return writer.shards
        >>> asyncio.run(write())
        ['train-000000.tar']
    """

    ending = "tar"

    def _begin(self) -> None:
        super()._begin()
        self._starts = array.array("Q")
        self._key = ""

    async def _encode(self, sample: Mapping[str, Any]) -> tuple[bytes, int]:
        key = sample.get("__key__", f"{self.next_sample:09d}")
        if self._starts and key == self._key:
            raise ValueError(
                f"sample {self.next_sample:,} has the key {key!r}, like the one before:"
                f" readers would take both for one sample"
            )
        if all(isinstance(value, _QUICK_TYPES) for value in sample.values()):
            members = members_of(key, sample)
        else:
            members = await in_thread(members_of, key, sample)
        self._key = key
        self._starts.append(self._sent_bytes + self._pending_bytes)
        return members, len(members)

    def _pack(self, encoded: list[bytes], *, is_end: bool) -> bytes:
        return b"".join([*encoded, _TAR_END] if is_end else encoded)

    def _index(self) -> bytes:
        """Return the offsets of the samples, and the end of the last sample."""
        self._starts.append(self._sent_bytes - len(_TAR_END))
        return np.asarray(self._starts).astype("<u8").tobytes()


class ParquetWriter(ShardWriter):
    """Writes Parquet shards that ``ParquetDataset`` and other libraries read.

    A sample is a row: a dict of values by column. All shards have the given schema, or
    the schema of the first row group.

    Args:
        destination: As for ``ShardWriter``, like all arguments not listed here.
        name: Prefix of the shards' names.
        schema: A pyarrow schema.
        compression: As in pyarrow.
        row_group_bytes: Approximate size of a row group.
        options: As for ``ShardWriter``.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is wrong.
    """

    ending = "parquet"

    @names_options
    def __init__(
        self,
        destination: "Destination",
        name: str = "part",
        *,
        schema: Any = None,
        compression: str = "zstd",
        row_group_bytes: int = ROW_GROUP_BYTES,
        **options: Unpack[WriterOptions],
    ) -> None:
        super().__init__(destination, name, **options)
        _import_pyarrow()
        check_at_least(row_group_bytes, 1, "row_group_bytes")
        self._arrow_schema: Any = None
        self._allow_rounding = schema is not None
        if schema is not None:
            self._set_schema(schema)
        self._compression = compression
        self._send_bytes = row_group_bytes

    def _set_schema(self, schema: Any) -> None:
        self._arrow_schema, self._columns = schema, frozenset(schema.names)

    def _begin(self) -> None:
        super()._begin()
        self._output = Output()
        self._file: Any = None

    async def _encode(self, sample: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        number = self.next_sample
        check_is(sample, Mapping, f"row {number:,}", "a dict of columns")
        if self._arrow_schema is not None and not sample.keys() <= self._columns:
            unknown = ", ".join(sorted(sample.keys() - self._columns))
            raise ValueError(
                f"row {number:,} has columns that the schema lacks: {unknown}; pass a "
                f"schema that has all"
            )
        row = {name: copied(value) for name, value in sample.items()}
        return row, sum(map(bytes_of, row.values()))

    def _pack(self, encoded: list[dict[str, Any]], *, is_end: bool) -> bytes:
        """Return rows as a row group, followed by the footer at the end of a shard."""
        if encoded:
            pa = _import_pyarrow()
            import pyarrow.parquet as pq  # noqa: PLC0415  (it takes a while)

            first, may_round = self.next_sample - len(encoded), self._allow_rounding
            table = table_of(
                pa, encoded, first, self._arrow_schema, may_round=may_round
            )
            if self._file is None:
                self._set_schema(table.schema)
                output = pa.PythonFile(self._output, "w")
                options = {"compression": self._compression}
                self._file = pq.ParquetWriter(output, table.schema, **options)
            self._file.write_table(table, row_group_size=len(encoded))
        if is_end:
            self._file.close()
        return self._output.taken()

    def _schema(self) -> str:
        return base64.b64encode(self._arrow_schema.serialize()).decode()

    def _resume(self, schema: str) -> None:
        if not schema:
            return
        pa = _import_pyarrow()
        stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema)))
        if self._arrow_schema is not None and not self._arrow_schema.equals(stored):
            raise StateMismatchError(
                f"{self!r} was started with another schema: {stored}; pass that one, "
                "or write to another place",
                expected=str(stored),
                found=str(self._arrow_schema),
            )
        self._set_schema(stored)


async def write_parquet(
    rows: "RowIterable | Callable[[int], RowIterable]",
    destination: "Destination",
    name: str = "part",
    **options: Unpack[ParquetOptions],
) -> list[str]:
    """Write rows to Parquet shards, and return the shards' names.

    A new call after a crash, with the same rows, resumes after the last shard.

    Args:
        rows: Dicts of values by column, as an iterable, an async iterable or a stream:
            rows that are already written are skipped. Or a function of a row number
            that returns the rows from that number on.
        destination: As for ``ShardWriter``.
        name: As for ``ShardWriter``.
        options: As for ``ParquetWriter``.

    Raises:
        ValueError: If ``rows`` has fewer rows than are already written.
        StateMismatchError: If the destination has other data.
        DatasetError: If the store fails.
    """
    async with ParquetWriter(destination, name, **options) as writer:
        first = writer.next_sample
        skip = first
        if callable(rows):
            rows, skip = rows(first), 0
        async with aclosing(_iterate(rows)) as iterator:
            async for row in iterator:
                if skip:
                    skip -= 1
                else:
                    await writer.write(row)
        if skip:
            raise ValueError(
                f"{first:,} rows are in {writer!r}, but the source has {skip:,} fewer"
                ": write to another place"
            )
    return writer.shards


async def _iterate(rows: RowIterable) -> AsyncGenerator[Mapping[str, Any], None]:
    if isinstance(rows, AsyncIterable):
        iterator = aiter(rows)
        try:
            async for row in iterator:
                yield row
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()
    else:
        for number, row in enumerate(rows):
            if number % _ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
            yield row


def _import_pyarrow() -> Any:
    return imported("pyarrow", "arrow", "writing Parquet needs pyarrow")
