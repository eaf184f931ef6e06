"""Datasets of fixed-length samples from token files, and a writer of such files.

Samples are in the order of the tokens: sample ``k`` starts at token ``k * length``. No
index of samples is built, so a file of any size opens at once. A local file is memory
mapped; from a store, each sample is read by a ranged request.
"""

import asyncio
import json
import mmap
import operator
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from anyio.from_thread import start_blocking_portal
from torch.utils.data import Dataset
from typing_extensions import Buffer

from aioloader._base.cancellation import in_thread
from aioloader.datasets._checks import (
    check_at_least,
    check_is,
    names_options,
    position_of,
)
from aioloader.datasets._stores.addresses import is_local, path_of, sealed
from aioloader.datasets._stores.bytes import read_local
from aioloader.datasets._stores.failures import (
    ExpectedVersion,
    Version,
    changed,
    file_failure,
    version_of_file,
)
from aioloader.datasets._stores.options import StoreOptions, check_no_options, hidden
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.sources import Requests, Source, policy_of
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._tokens import (
    IGNORED,
    Array,
    Documents,
    Index,
    Sidecar,
    TokenFile,
    check_fits,
    code_of,
    dtype_of,
    index_of,
    megatron_pair,
    samples_of,
)
from aioloader.datasets._write.sinks import MakeIndex, make_token_sink
from aioloader.errors import StateMismatchError
from aioloader.protocols import HasLifespan

if TYPE_CHECKING:
    from obstore.store import ObjectStore


FindFile: TypeAlias = Callable[..., TokenFile]
_FIELDS = "input_ids", "labels", "position_ids"
_HAS_MADVISE = hasattr(mmap, "MADV_WILLNEED")
# Samples and documents with more tokens are processed in a thread, not on the loop.
_MAX_INLINE_TOKENS = 1 << 16
_MAX_TOKEN = np.iinfo(np.int64).max
# How many bytes of an index to read ahead while the index is copied.
_INDEX_READ_AHEAD = 16 << 20


class TokenDataset(Dataset[Any]):
    """Reads samples of ``length`` tokens from one file, map-style.

    The file is a sequence of integers, or Megatron's ``.bin`` with its ``.idx``. Sample
    ``k`` has the tokens from ``k * length`` up to ``(k + 1) * length``, as a dict of
    ``input_ids``, ``labels`` and ``position_ids``, int64, shape ``(length,)``. A label
    is the next token; the last label is the token after the sample. So there are
    ``(tokens - 1) // length`` samples, and up to ``length`` tokens at the end are
    unused. The label is -100 where a document ends; positions restart at each document
    and sample.

    A local file is mapped when the first sample is read, and ``__getitem__`` is a plain
    method. From a URL, each sample is read by a ranged request, and ``__getitem__`` is
    a coroutine; each process copies the ``.idx`` to a temporary file (20 bytes per
    document). A dataset can be pickled, and shared by threads, event loops and
    processes.

    Args:
        path: Path or URL of the tokens; ``.bin`` or ``.idx`` may be omitted.
        length: Number of tokens per sample.
        dtype: Type of the tokens, such as ``"uint16"``; not needed with an ``.idx`` or
            the sidecar of ``TokenWriter``.
        eos: The token that ends each document. Default: the ``.idx`` or the sidecar
            decides; without them, the file is one document.
        store: Base of a relative ``path``; as for ``ObjectDataset``.
        store_options: Options of the store that a URL names.
        requests: Timeouts and retries of requests.

    Raises:
        ValueError: If ``length`` is below 1, ``dtype`` is unknown or not an integer
            type, the file ends within a token, or the ``.idx`` is truncated, has
            another format, or belongs to another file.
        DatasetError: If a file is missing or cannot be read.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     np.array([5, 6, 0, 7, 8, 9], "uint16").tofile(file.name)
        ...     TokenDataset(file.name, 4, "uint16", eos=0)[0]["labels"].tolist()
        [6, 0, -100, 8]
    """

    def __new__(
        cls, path: Any = "", *_args: Any, store: Any = None, **_options: Any
    ) -> Self:
        """Create the dataset; for a file in a store, its class is an async subclass."""
        subclass: Any = cls
        if cls is TokenDataset and not _is_file(path, store):
            subclass = _StoredTokens
        dataset: Self = super().__new__(subclass)
        return dataset

    @names_options
    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        path: str | os.PathLike[str],
        length: int,
        dtype: Any = None,
        eos: int | None = None,
        *,
        store: "str | os.PathLike[str] | ObjectStore | Source | None" = None,
        store_options: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
    ) -> None:
        check_is(path, (str, os.PathLike), "path", "a path or URL")
        self.length: int = check_at_least(length, 1, "length")
        self._token_bytes: Buffer = b""
        self._maps: list[tuple[Buffer, TokenFile | Index]] = []
        self._tokens: Array | None = None
        self._documents: Documents | None = None
        eos = None if eos is None else operator.index(eos)
        find = partial(TokenFile.find, dtype=dtype, eos=eos)
        options = hidden(store_options)
        self._file = self._find(find, path, store, options, policy_of(requests))

    @classmethod
    @names_options
    async def discover(  # noqa: PLR0913  (those of the class)
        cls,
        path: str | os.PathLike[str],
        length: int,
        dtype: Any = None,
        eos: int | None = None,
        *,
        store: "str | os.PathLike[str] | ObjectStore | Source | None" = None,
        store_options: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
    ) -> Self:
        """Create a dataset without blocking the loop; arguments as for the class."""
        make = partial(cls, path, length, dtype, eos, store=store)
        make = partial(make, store_options=store_options, requests=requests)
        return await in_thread(make, abandon_on_cancel=True)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens in the file."""
        return self._file.dtype

    @property
    def eos(self) -> int | None:
        """The token that ends documents, given or from the sidecar; None if unknown."""
        return self._file.eos

    def __len__(self) -> int:
        return max(0, self._file.tokens - 1) // self.length

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Read one sample.

        Args:
            index: Number of the sample; negative ones count from the end.

        Returns:
            A dict of arrays, owned by the caller; for a URL, a coroutine of the dict.

        Raises:
            IndexError: If ``index`` is out of range.
            DatasetError: If the sample cannot be read.
            ValueError: If a token is above int64's limit.
        """
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> "TokenRows":
        """Read the samples of a batch, in the order of ``indices``."""
        starts = [self._start(index) for index in indices]
        tokens = self._map() if self._tokens is None else self._tokens
        for mapped, file in self._maps:
            # Reading past the end of a file that was truncated would kill the process.
            size = mapped.size() if isinstance(mapped, mmap.mmap) else 0
            if size != file.version.size:
                current = file.version._replace(size=size)
                raise changed(file.address, file.version, current)
        length, itemsize = self.length + 1, tokens.itemsize
        for start in starts:
            _prefetch(self._token_bytes, start * itemsize, length * itemsize)
        windows = [tokens[start : start + length] for start in starts]
        return self._samples(windows, starts)

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the samples, as JSON-serialisable data."""
        return {
            "kind": "TokenDataset",
            "length": self.length,
            "tokens": self._file.tokens,
            "dtype": self.dtype.name,
            "eos": self.eos if self._file.index is None else None,
        }

    async def __aenter__(self) -> Self:
        """Return the dataset; a file on disk has no connections to open."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing; a file on disk has no connections to close."""

    def _find(
        self,
        find: FindFile,
        path: str | os.PathLike[str],
        store: Any,
        options: StoreOptions,
        policy: Requests,  # noqa: ARG002  (files are not retried)
    ) -> TokenFile:
        """Return the description of the file at ``path``, made by ``find``."""
        if not _is_file(path, store):
            raise TypeError(
                f"{type(self).__name__} derives from the class for files: to read a "
                "URL, hold a TokenDataset instead"
            )
        name = path_of(os.fsdecode(path))
        if store is not None:
            name = os.path.join(path_of(os.fsdecode(store)), name)  # noqa: PTH118
        check_no_options(name, options)

        def read(path: str, start: int, stop: int) -> bytes:
            return read_local(path, start, stop, None)[0]

        return find(name, version_of=_version_of, read=read)

    def _start(self, index: SupportsIndex) -> int:
        return position_of(index, len(self)) * self.length

    def _samples(self, windows: Sequence[Array], starts: Sequence[int]) -> "TokenRows":
        """Convert windows of ``length + 1`` tokens to samples.

        ``starts`` are the positions of the windows in the file, in tokens.
        """
        length, eos = self.length, self._file.eos
        inputs = np.empty((len(windows), length), np.int64)
        if not windows:
            return TokenRows(dict.fromkeys(_FIELDS, inputs))
        following = np.empty(len(windows), np.int64)
        for row, window in enumerate(windows):
            if window.dtype == np.uint64 and (largest := window.max()) > _MAX_TOKEN:
                number = starts[row] + int(window.argmax())
                raise ValueError(
                    f"token {number:,} of {self._label()!r} is {largest:,}, which is "
                    "above int64's limit; pass the dtype that the file was written with"
                )
            inputs[row], following[row] = window[:-1], window[-1]
        tokens = inputs.reshape(-1)
        begin = np.arange(0, len(tokens), length)
        ends = np.array([], np.int64)
        if (documents := self._documents) is not None:
            ends = np.array(
                [
                    first + end
                    for first, start in zip(begin.tolist(), starts, strict=True)
                    for end in documents.between(start, start + length)
                ],
                np.int64,
            )
        elif eos is not None:
            ends = np.flatnonzero(tokens == eos) + 1
        if len(ends):
            # If both a document and a sample end, the next token is another document's.
            following[ends[ends % length == 0] // length - 1] = IGNORED
            begin = np.sort(np.concatenate([begin, ends[ends < len(tokens)]]))
        sizes = np.diff(begin, append=len(tokens)).tolist()
        return TokenRows(samples_of(tokens, sizes, following.tolist()))

    def _map(self) -> Array:
        """Map the file and its index, and return the tokens; forks share the maps."""
        file = self._file
        parts: list[TokenFile | Index] = [file]
        if file.index is not None:
            parts.append(file.index)
        self._maps = [(_map_file(part.address, part.version), part) for part in parts]
        if file.index is not None:
            self._documents = Documents(self._maps[1][0], file.index)
        self._token_bytes = self._maps[0][0]
        self._tokens = np.frombuffer(memoryview(self._token_bytes), file.dtype)
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_tokens": None, "_documents": None}
        return {**state, "_token_bytes": b"", "_maps": []}

    def __repr__(self) -> str:
        return f"TokenDataset({self._label()!r}, {self.length}, {len(self):,} samples)"

    def _label(self) -> str:
        return self._file.address


class TokenRows(Sequence[dict[str, Array]]):
    """A batch's samples, which are rows of arrays of shape ``(samples, length)``."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["input_ids"])

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, or the samples of a slice."""
        rows = {name: array[index] for name, array in self._arrays.items()}
        return TokenRows(rows) if isinstance(index, slice) else rows

    def collate(self) -> dict[str, torch.Tensor]:
        """Return the same batch as ``default_collate``, without copying."""
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


class _StoredTokens(TokenDataset, HasLifespan):
    """A token file in a store; a loader enters it on each loop that reads it."""

    # Without this, `for x in dataset` never ends: only awaiting raises IndexError.
    __iter__: ClassVar[None] = None
    __getitems__: ClassVar[None] = None  # type: ignore[assignment]

    async def __getitem__(self, index: SupportsIndex) -> dict[str, Array]:
        start, file, length = self._start(index), self._file, self.length
        if file.index is not None and self._documents is None:
            await self._fetch_index(file.index)
        itemsize = file.dtype.itemsize
        begin, end = start * itemsize, (start + length + 1) * itemsize
        data = await self._storage.read(file.address, begin, end, file.version)
        windows = [np.frombuffer(memoryview(data), file.dtype)]
        is_quick = length <= _MAX_INLINE_TOKENS
        (sample,) = await in_thread(self._samples, windows, [start], is_quick=is_quick)
        return sample

    def _find(
        self,
        find: FindFile,
        path: str | os.PathLike[str],
        store: Any,
        options: StoreOptions,
        policy: Requests,
    ) -> TokenFile:
        (address,) = sealed(path)
        self._storage = storage = Storage(store, options, policy, None, [address])
        self._lock = PerLoop(asyncio.Lock)
        seen: dict[str, Version] = {}
        with start_blocking_portal() as portal:

            def look(address: str) -> Version:
                return seen.setdefault(address, portal.call(storage.version, address))

            def read(address: str, start: int, stop: int) -> bytes:
                args = (address, start, stop, seen[address])
                return portal.call(storage.part, *args)[0]

            try:
                return find(address, version_of=look, read=read)
            finally:
                portal.call(storage.aclose)

    async def _fetch_index(self, index: Index) -> None:
        """Copy the index to a temporary file; other reads on this loop wait for it."""
        async with self._lock.here():
            if self._documents is not None:
                return
            expected = ExpectedVersion(index.version)
            source = self._storage.open(index.address, 0, _INDEX_READ_AHEAD, expected)
            file = await in_thread(tempfile.TemporaryFile)
            try:
                while memoryview(piece := await source.read()):
                    await in_thread(file.write, piece)
                self._documents = await in_thread(_map_copy, file, index)
            finally:
                await source.aclose()
                await in_thread(file.close)

    def lifespan(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        self._storage.enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._storage.aclose()

    def _label(self) -> str:
        return self._storage.label(self._file.address)


def _is_file(path: Any, store: Any) -> bool:
    root = path if store is None else store
    return isinstance(root, (str, os.PathLike)) and is_local(os.fsdecode(root))


def _version_of(path: str) -> Version:
    return read_local(path, -1, 0, None)[1]


def _map_file(path: str, version: Version) -> Buffer:
    """Map a file; raise a DatasetError if it has changed since ``version``."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            current = version_of_file(file.fileno())
            if not current.is_of(version):
                raise changed(path, version, current)
            return _map_descriptor(file.fileno()) if current.size else b""
    except OSError as error:
        raise file_failure(path, error) from error


def _map_descriptor(descriptor: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if _HAS_MADVISE:
        # By default, the kernel reads megabytes around each page that is not cached.
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def _map_copy(file: Any, index: Index) -> Documents:
    file.flush()
    return Documents(_map_descriptor(file.fileno()), index)


def _prefetch(mapped: Buffer, start: int, length: int) -> None:
    """Tell the operating system to read a byte range ahead; a batch then waits once."""
    if _HAS_MADVISE and isinstance(mapped, mmap.mmap):
        offset = start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, start - offset, length + offset)


class TokenWriter:
    """Writes documents of tokens to one file, for ``TokenDataset``.

    It is an async context manager, like ``TarWriter``. A flat file is a sequence of
    little-endian integers, which other libraries can map. ``format="megatron"`` writes
    Megatron's ``.bin`` and ``.idx``, with one sequence per document. The writer puts a
    sidecar, ``FILE.json``, next to the file. Readers see only a complete file. After a
    crash or an error, a new writer for the same path resumes: pass it the same
    documents, from number ``next_sample`` on. An upload to a store starts over. The
    writer buffers ``save_bytes`` in memory. Run one writer at a time.

    Args:
        path: A path or URL, such as ``"train.bin"``.
        dtype: Type of the tokens in the file, such as ``"uint16"``.
        format: ``"flat"`` or ``"megatron"``.
        eos: A token to append to each document.
        metadata: JSON-serialisable data about the documents' origin, which is stored.
            Writing resumes only with equal metadata.
        save_bytes: Bytes between saves; a killed writer resumes at the last save.
        store_options: Options of the store that a URL names.

    Attributes:
        next_sample: Number of the next document, from 0; known once the writer is open.
        tokens: Number of tokens in all documents before ``next_sample``.

    Raises:
        ImportError: If ``path`` is in a store, and obstore is not installed.
        TypeError: If ``metadata`` is not JSON-serialisable.
        ValueError: If an argument is wrong.

    Example:
        >>> import asyncio, tempfile
        >>> path = tempfile.mkdtemp() + "/train.bin"
        >>> async def write():
        ...     async with TokenWriter(path, "uint16", eos=0) as writer:
        ...         for document in [[5, 6], [7, 8, 9]][writer.next_sample :]:
        ...             await writer.write(document)
        >>> asyncio.run(write())
        >>> TokenDataset(path, 3)[1]["input_ids"].tolist()
        [7, 8, 9]
    """

    @names_options
    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        path: str | os.PathLike[str],
        dtype: Any,
        *,
        format: Literal["flat", "megatron"] = "flat",  # noqa: A002
        eos: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        save_bytes: int = 16 << 20,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_is(path, (str, os.PathLike), "path", "a path or URL")
        if format not in {"flat", "megatron"}:
            raise ValueError(f"format must be 'flat' or 'megatron', got {format!r}")
        self._dtype = dtype_of(dtype).newbyteorder("<")
        self._eos = None if eos is None else operator.index(eos)
        if self._eos is not None:
            check_fits(self._eos, self._dtype, "eos")
        json.dumps(metadata)  # raises if not JSON-serialisable
        self._save_bytes = check_at_least(save_bytes, 1, "save_bytes")
        (address,) = sealed(path)
        index = None
        if format == "megatron":
            code_of(self._dtype)
            address, index = megatron_pair(address)
        self._sink = make_token_sink(address, index, hidden(store_options))
        made_of = dict(metadata or {})
        self._sidecar = Sidecar(format, self._dtype.name, self._eos, made_of)
        self.next_sample: int = 0
        self.tokens: int = 0
        self._lock = asyncio.Lock()
        self._is_open = self._is_finished = False
        self._begin()

    def _begin(self) -> None:
        """Discard the buffered documents, which have not been saved."""
        self._pending: list[Array] = []
        self._pending_bytes = 0
        self._sizes = array("i")

    async def __aenter__(self) -> Self:
        """Open the file, and find the documents that are already written.

        Raises:
            StateMismatchError: If the file has other settings or metadata, was not made
                by a writer, or has another open writer.
            DatasetError: If the store fails.
        """
        sink = self._sink
        try:
            sidecar = self._resumed(*await sink.open())
            if not self._is_finished:
                num_bytes = sidecar.tokens * self._dtype.itemsize
                if not await sink.begin(num_bytes, sidecar.documents):
                    sidecar = self._sidecar
                await sink.append(b"", b"", sidecar.dump())
        except BaseException:
            await sink.aclose()
            raise
        self.next_sample, self.tokens = sidecar.documents, sidecar.tokens
        self._begin()
        self._is_open = True
        return self

    def _resumed(self, text: bytes | None, is_finished: bool) -> Sidecar:  # noqa: FBT001
        """Return an earlier writer's sidecar to continue from, or a new sidecar."""
        self._is_finished = is_finished
        if text is not None:
            return self._sidecar.resumed(text, self._sink.label)
        if is_finished:
            raise StateMismatchError(
                f"{self._sink.label!r} exists, without the sidecar of a TokenWriter: "
                "write to another path, or remove it if nobody needs it"
            )
        return self._sidecar

    async def write(self, tokens: npt.ArrayLike) -> None:
        """Write one document; concurrent calls are served in order.

        After a TypeError or ValueError the document is not written, and the writer
        stays open. A failed save closes the writer: open another one, which resumes.

        Args:
            tokens: 1-D integers, copied; an empty sequence is an empty document.

        Raises:
            TypeError: If ``tokens`` are not 1-D integers.
            ValueError: If a token does not fit the type of the file.
            StateMismatchError: If an earlier writer finished the file.
            DatasetError: If the store fails.
            RuntimeError: If the writer is not open.
        """
        async with self._lock:
            if not self._is_open:
                raise RuntimeError(
                    f"{self!r} is not open: use it in 'async with', and not after an "
                    f"error; open another one, which resumes"
                )
            if self._is_finished:
                raise StateMismatchError(
                    f"{self._sink.label!r} is finished, with {self.next_sample:,} "
                    "documents: remove it, or write to another path"
                )
            array = np.asarray(tokens)
            if array.size > _MAX_INLINE_TOKENS:
                document = await in_thread(self._encode, array)
            else:
                document = self._encode(array)
            self._pending.append(document)
            self._pending_bytes += document.nbytes
            self._sizes.append(len(document))
            self.next_sample += 1
            self.tokens += len(document)
            if self._pending_bytes >= self._save_bytes:
                self._is_open = False  # until this succeeds
                data, sizes = await self._take_pending()
                await self._sink.append(data, sizes, self._progress().dump())
                self._is_open = True

    def _encode(self, array: Array) -> Array:
        """Return a document in the file's dtype, with ``eos`` appended."""
        number, is_empty = self.next_sample, array.shape == (0,)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and not is_empty):
            raise TypeError(
                f"document {number:,} must be 1-D integers, got {array.dtype} of shape "
                f"{array.shape}"
            )
        if not is_empty and array.dtype != self._dtype:
            for token in (array.min(), array.max()):
                check_fits(int(token), self._dtype, f"a token of document {number:,}")
        size = len(array)
        document = np.empty(size + (self._eos is not None), self._dtype)
        document[:size] = array
        document[size:] = self._eos or 0
        return document

    async def _take_pending(self) -> tuple[bytes, bytes]:
        pending, sizes = self._pending, np.asarray(self._sizes, "<i4")
        self._begin()
        return await in_thread(b"".join, pending), sizes.tobytes()

    def _progress(self) -> Sidecar:
        return replace(self._sidecar, documents=self.next_sample, tokens=self.tokens)

    async def __aexit__(
        self, _kind: object, exc: BaseException | None, *_: object
    ) -> None:
        """Finish the file, or after an error, leave its saved part for the next writer.

        Raises:
            RuntimeError: If ``write`` failed and the block suppressed its error.
        """
        is_whole, self._is_open = self._is_open, False
        try:
            if exc is None and not is_whole:
                raise RuntimeError(
                    f"an error in 'write' closed {self!r}, whose file is not finished: "
                    f"open another one, which resumes"
                )
            if exc is None and not self._is_finished:
                make_index: MakeIndex | None = None
                if self._sidecar.format == "megatron":
                    make_index = partial(index_of, self._dtype, self.next_sample)
                new = await self._take_pending()
                await self._sink.finish(*new, make_index, self._progress().dump())
        finally:
            self._begin()
            await self._sink.aclose()

    def __repr__(self) -> str:
        return f"TokenWriter({self._sink.label!r}, {self.next_sample:,} documents)"
