"""Writers of shards that the datasets read: tar and Parquet, on disk and in stores.

Samples come one by one and are written to shards of about equal size, which readers see
when they are complete. A writer that is opened again, also after a crash, resumes after
the last complete shard. Memory holds some megabytes, and the parts of an upload in
flight.
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
_OTHER = (
    "{where} was started with another {what}; write to another place, or under "
    "another name"
)
RowIterable: TypeAlias = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
SHARD_BYTES = 256 << 20
ROW_GROUP_BYTES = 16 << 20
_END = bytes(1024)  # two blocks, as a tar ends
# Encoded at once; others in a thread.
_LIGHT = bytes, str, int, bytearray, memoryview
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Rows taken from a plain iterable before other tasks get their turn.
_TURN = 64


class _FinishedShard(NamedTuple):
    """One finished shard: its name, number of samples, and size in bytes."""

    file: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    """The finished shards of one name, and what decides whether writing resumes.

    It names a shard before readers see the shard. So after a crash only the last one
    may be missing, and is written again.

    ``ending`` is theirs, as in ``"tar"``; ``metadata`` is the user's description of the
    samples' origin; ``schema`` is that of tables, as text.
    """

    name: str
    ending: str
    metadata: Mapping[str, Any]
    schema: str = ""
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
        self, text: bytes | None, there: Mapping[str, int], label: str
    ) -> "_Manifest":
        """Return the manifest of an earlier writer, or raise a StateMismatchError.

        Given are the contents of the manifest file, if it exists, the sizes of all
        files of the folder by name, and the folder, for errors.
        """
        where = f"{label!r} ({self.file})"
        found = self if text is None else self._loaded(text, where)
        shards = found.shards
        if shards and shards[-1].file not in there:
            shards = shards[:-1]  # started, not finished
        for entry in shards:
            size = there.get(entry.file)
            if size != entry.bytes:
                state = "is gone" if size is None else f"has {size:,} bytes"
                raise StateMismatchError(
                    f"{where} has {entry.file!r} with {entry.bytes:,} bytes, but that "
                    f"{state}; write to another place, or under another name",
                    expected=entry.bytes,
                    found=size,
                )
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{6,}}\.{self.ending}")
        others = {*filter(pattern.fullmatch, there)} - {one.file for one in shards}
        if others:
            raise StateMismatchError(
                f"{where} does not name {min(others)!r}, which is there: readers would "
                f"take both for one dataset; write to another place, or under another "
                f"name",
                expected=len(shards),
                found=sorted(others),
            )
        return replace(found, shards=shards)

    def _loaded(self, text: bytes, where: str) -> "_Manifest":
        try:
            content = json.loads(text)
            version, schema = content["version"], content["schema"]
            shards = tuple(_FinishedShard(**entry) for entry in content["shards"])
            theirs = {name: content[name] for name in ("format", "metadata")}
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
        check_same(theirs, json.loads(self.dump()), _OTHER, where)
        return replace(self, shards=shards, schema=schema)


class WriterOptions(TypedDict, total=False):
    """Keywords of every ``ShardWriter``."""

    shard_bytes: int
    shard_samples: int | None
    metadata: Mapping[str, Any] | None
    store_options: Mapping[str, Any] | None


class ParquetOptions(WriterOptions, total=False):
    """Keywords of ``ParquetWriter``."""

    schema: Any
    compression: str
    row_group_bytes: int


class ShardWriter(abc.ABC):
    """Writes samples to shards ``NAME-000000``, ``NAME-000001``...; a context manager.

    Next to them is ``NAME-shards.json``, with their names and sizes. A writer opened
    where there was one before resumes: pass it the same samples in the same order, from
    number ``next_sample`` on. One writer at a time; for several machines in one place,
    use a different name each. A shard ends with the sample that reaches its size.

    Args:
        destination: A directory, a URL (``s3://bucket/train``), or a store of obstore.
        name: Prefix of the names of the shards.
        shard_bytes: Size of a shard.
        shard_samples: Most samples of a shard, or None.
        metadata: The samples' origin, JSON-serialisable: it is stored, and writing
            resumes only with the same.
        store_options: Options of the store that a URL names.

    Attributes:
        next_sample: Number of the next sample, from 0; known once the writer is open.

    Raises:
        ImportError: If a store is written to, and obstore is not installed.
        TypeError: If ``metadata`` cannot be stored as JSON.
        ValueError: If an argument is wrong.
    """

    ending: ClassVar[str]
    _due_bytes = 4 << 20  # worth a call in a thread

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
        json.dumps(metadata)  # raises if it is not JSON
        self.next_sample: int = 0
        self._shard_bytes = shard_bytes
        self._shard_samples = shard_samples
        self._sink = make_sink(destination, hidden(store_options))
        self._manifest = _Manifest(name, self.ending, dict(metadata or {}))
        self._saved: bytes | None = None
        self._turns = asyncio.Lock()
        self._is_open = False
        self._begin()

    @property
    def shards(self) -> list[str]:
        """The names of the finished shards."""
        return [entry.file for entry in self._manifest.shards]

    async def __aenter__(self) -> Self:
        """Find the shards already written.

        Raises:
            StateMismatchError: If the existing shards were made of something else, or
                not by a writer.
            DatasetError: If the store refuses.
        """
        manifest = self._manifest
        try:
            there = await self._sink.open(manifest.name)
            self._saved = await self._sink.read(manifest.file)
            self._manifest = manifest.resumed(self._saved, there, self._sink.label)
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
        """Begin a shard; an unfinished one is discarded."""
        self._first = self.next_sample
        self._waiting: list[Any] = []
        self._waiting_bytes = self._sent_bytes = 0

    async def write(self, sample: Mapping[str, Any]) -> None:
        """Write one sample; concurrent calls are served in order.

        Raises:
            TypeError: If the sample, or a value in it, has an unsuitable type. It is
                not written, and the writer can continue, as after a ValueError.
            ValueError: If it could not be read back unchanged. Values of Parquet are
                checked when a row group is full: the error may name an earlier row,
                which is the only one that is not written.
            DatasetError: If the store refuses. The writer is closed then, as after any
                other error: open another one, which resumes after the last shard.
            RuntimeError: If the writer is not open.
        """
        async with self._turns:
            if not self._is_open:
                raise RuntimeError(
                    f"{self!r} is not open: use it in 'async with', and not after an "
                    f"error; open another one, which resumes"
                )
            encoded, size = await self._encode(sample)
            self._is_open = False  # until this succeeds
            self._waiting.append(encoded)
            self._waiting_bytes += size
            self.next_sample += 1
            is_full = self._sent_bytes + self._waiting_bytes >= self._shard_bytes
            if is_full or self._count == self._shard_samples:
                await self._finish()
            elif self._waiting_bytes >= self._due_bytes:
                await self._send()
            self._is_open = True

    async def _send(self, *, is_end: bool = False) -> None:
        waiting, count = self._waiting, len(self._waiting)
        try:
            data = await in_thread(partial(self._pack, is_end=is_end), waiting)
        except ValueError:
            if len(waiting) < count:  # the one that the error names is gone
                self._waiting_bytes = self._waiting_bytes * len(waiting) // count
                self.next_sample -= 1
                self._is_open = True
            raise
        del waiting
        self._waiting, self._waiting_bytes = [], 0
        await self._sink.write(self._manifest.next_shard, data)
        self._sent_bytes += len(data)

    async def _finish(self) -> None:
        """Name the shard in the manifest, then make it visible to readers."""
        await self._send(is_end=True)
        before, index, size = self._manifest, self._index(), self._sent_bytes
        shards = (*before.shards, _FinishedShard(before.next_shard, self._count, size))
        manifest = replace(before, shards=shards, schema=self._schema())
        await self._save(manifest)
        if index is not None:  # only once no other writer is possible
            await self._sink.put(f"{before.next_shard}.idx", index)
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
        """Finish the last shard; after an error, discard it.

        Raises:
            RuntimeError: If an error that the block has caught closed the writer.
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
        """Return the next sample as ``_pack`` takes it, and its approximate size."""

    @abc.abstractmethod
    def _pack(self, encoded: list[Any], *, is_end: bool) -> bytes:
        """Return samples as the next bytes of the shard; runs in a thread.

        Before anything is made of them, one may be refused by a ValueError that names
        it: it is taken out of ``encoded``.
        """

    def _index(self) -> bytes | None:
        """Return the index of a shard that has been sent, if it is a separate file."""
        return None

    def _schema(self) -> str:
        """Return the schema of the shards as text; only tables have one."""
        return ""

    def _resume(self, schema: str) -> None:  # noqa: B027  (tars have none)
        """Take the schema of the existing shards, if there are."""


class TarWriter(ShardWriter):
    """Writes tar shards that ``TarDataset`` and WebDataset read.

    A sample is a dict: ``__key__`` names it (default: its number), other names are the
    extensions of its members. Bytes and text are written as they are; values that
    ``Decoder`` makes are encoded by extension: ``cls`` numbers, ``json``, ``npy``,
    ``pth``, ``jpg`` and ``png`` images of Pillow, NumPy and torch. The same samples
    give the same bytes. Next to each shard is its index (``.tar.idx``), with which
    several readers can share it. Otherwise like ``ShardWriter``.

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
        if all(isinstance(value, _LIGHT) for value in sample.values()):
            members = members_of(key, sample)
        else:
            members = await in_thread(members_of, key, sample)
        self._key = key
        self._starts.append(self._sent_bytes + self._waiting_bytes)
        return members, len(members)

    def _pack(self, encoded: list[bytes], *, is_end: bool) -> bytes:
        return b"".join([*encoded, _END] if is_end else encoded)

    def _index(self) -> bytes:
        """Return the samples' starts and the last one's end, as in an index."""
        self._starts.append(self._sent_bytes - len(_END))
        return np.asarray(self._starts).astype("<u8").tobytes()


class ParquetWriter(ShardWriter):
    """Writes Parquet shards that ``ParquetDataset`` and other libraries read.

    A sample is a row: a dict of values by column. The schema of all shards is that of
    the first row group, if none is given.

    Args:
        destination: As for ``ShardWriter``, like all arguments not listed here.
        name: Prefix of the names of the shards.
        schema: A pyarrow schema.
        compression: As in pyarrow.
        row_group_bytes: Approximate size of a row group.
        options: Those of ``ShardWriter``.

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
        self._given: Any = None
        self._may_round = schema is not None
        if schema is not None:
            self._take(schema)
        self._compression = compression
        self._due_bytes = row_group_bytes

    def _take(self, schema: Any) -> None:
        self._given, self._columns = schema, frozenset(schema.names)

    def _begin(self) -> None:
        super()._begin()
        self._output = Output()
        self._file: Any = None

    async def _encode(self, sample: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        number = self.next_sample
        check_is(sample, Mapping, f"row {number:,}", "a dict of columns")
        if self._given is not None and not sample.keys() <= self._columns:
            unknown = ", ".join(sorted(sample.keys() - self._columns))
            raise ValueError(
                f"row {number:,} has columns that the schema lacks: {unknown}; pass a "
                f"schema that has all"
            )
        row = {name: copied(value) for name, value in sample.items()}
        return row, sum(map(bytes_of, row.values()))

    def _pack(self, encoded: list[dict[str, Any]], *, is_end: bool) -> bytes:
        """Return rows as a row group, and at the end the footer."""
        if encoded:
            pa = _import_pyarrow()
            import pyarrow.parquet as pq  # noqa: PLC0415  (it takes a while)

            first, may_round = self.next_sample - len(encoded), self._may_round
            table = table_of(pa, encoded, first, self._given, may_round=may_round)
            if self._file is None:
                self._take(table.schema)
                output = pa.PythonFile(self._output, "w")
                options = {"compression": self._compression}
                self._file = pq.ParquetWriter(output, table.schema, **options)
            self._file.write_table(table, row_group_size=len(encoded))
        if is_end:
            self._file.close()
        return self._output.taken()

    def _schema(self) -> str:
        return base64.b64encode(self._given.serialize()).decode()

    def _resume(self, schema: str) -> None:
        if not schema:
            return
        pa = _import_pyarrow()
        found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema)))
        if self._given is not None and not self._given.equals(found):
            raise StateMismatchError(
                f"{self!r} was started with another schema: {found}; pass that one, "
                "or write to another place",
                expected=str(found),
                found=str(self._given),
            )
        self._take(found)


async def write_parquet(
    rows: "RowIterable | Callable[[int], RowIterable]",
    destination: "Destination",
    name: str = "part",
    **options: Unpack[ParquetOptions],
) -> list[str]:
    """Write rows to Parquet shards, and return the shards' names.

    Called again after a crash, with the same rows, it resumes after the last shard.

    Args:
        rows: Dicts of values by column: an iterable, an async one, or a stream, whose
            rows already written are skipped; or a function that returns one, starting
            at a given row number.
        destination: As for ``ShardWriter``.
        name: As for ``ShardWriter``.
        options: Those of ``ParquetWriter``.

    Raises:
        ValueError: If there are fewer rows than already written.
        StateMismatchError: If the place has other data.
        DatasetError: If the store refuses.
    """
    async with ParquetWriter(destination, name, **options) as writer:
        first = writer.next_sample
        passed = first
        if callable(rows):
            rows, passed = rows(first), 0
        async with aclosing(_each(rows)) as each:
            async for row in each:
                if passed:
                    passed -= 1
                else:
                    await writer.write(row)
        if passed:
            raise ValueError(
                f"{first:,} rows are in {writer!r}, but the source has {passed:,} fewer"
                ": write to another place"
            )
    return writer.shards


async def _each(rows: RowIterable) -> AsyncGenerator[Mapping[str, Any], None]:
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
            if number % _TURN == 0:
                await asyncio.sleep(0)
            yield row


def _import_pyarrow() -> Any:
    return imported("pyarrow", "arrow", "writing Parquet needs pyarrow")
