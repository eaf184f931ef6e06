"""Random access to the samples of shards, so that all can be shuffled together.

The offsets of samples come from an index (``.idx`` files, the heads of MDS shards, or a
pack) or a scan. Concurrent ranged requests read remote samples; one request may read
several neighbours. Local shards are memory mapped. Memory holds 4 bytes per sample (8
if a shard has 4 GiB), and the reads in flight.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np
from anyio.from_thread import start_blocking_portal
from torch.utils.data import Dataset
from typing_extensions import Buffer

from aioloader._base.cancellation import cancel, each, in_order, in_thread
from aioloader._order.shuffled_blocks import ShuffledBlocks
from aioloader._order.stream_states import checksum
from aioloader.datasets._checks import check_is, names_options, position_of
from aioloader.datasets._indexed.local import LocalReads, MappedShards
from aioloader.datasets._indexed.reads import RemoteReads
from aioloader.datasets._stores.addresses import (
    Address,
    name_of,
    sealed,
    shown_address,
    sibling,
)
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.per_loop import LoopDataset, PerLoop
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.datasets._streams.edges import (
    Edges,
    EdgesBuilder,
    IndexPack,
    Offsets,
    changed,
    changed_since,
    index_name,
    read_pack,
)
from aioloader.datasets._streams.engine import (
    ByteFormat,
    ByteFormatSpec,
    sample_of,
    scanned,
)
from aioloader.datasets._streams.shards import names_of, summary_of
from aioloader.datasets._write.sinks import make_sink
from aioloader.datasets.sharded import StoredStream
from aioloader.datasets.tables import ArrowDataset
from aioloader.errors import DatasetError, ObjectNotFoundError

_SCAN_BYTES = 4 << 20
# Larger samples are decoded in a thread.
_MAX_INLINE_BYTES = 1 << 20
# Called with the number of indexed shards, and the number of all shards.
OnProgress: TypeAlias = Callable[[int, int], object]
# The shards' addresses, sample offsets and formats, and a reader if all are local.
FoundShards: TypeAlias = tuple[list[Address], Edges, list[ByteFormatSpec], Any]


class IndexedDataset(Dataset[Coroutine[Any, Any, Any]], LoopDataset):
    r"""Reads single samples of shards, many at a time, by ``async def __getitem__``.

    It is a map-style dataset of a stream's samples, for any sampler, ``Subset`` or
    ``random_split``. The offsets of the samples come from

    - the ``pack`` that ``save`` or ``aioloader index --pack`` wrote: one file for all
      shards, with their versions;
    - or else ``X.tar.idx`` next to each shard, as written by ``aioloader index``,
      Megatron-Energon and NeMo, or the head of each MDS shard;
    - or else a scan of all bytes of a shard, if ``scan`` is set.

    If a shard changes after it was packed, scanned or first read, its next read fails.
    Concurrent reads of nearby samples of a shard are merged. Several event loops can
    share the dataset. Leaving its async context calls ``aclose``; a loader does this.

    Args:
        stream: ``TarDataset``, ``MDSDataset``, ``JSONLinesDataset``, ``TextDataset`` or
            a ``ByteStream``, without steps and shuffling. Its shards must be
            uncompressed, on a server that supports ranges. Or a local ``ArrowDataset``,
            whose rows need no index.
        pack: Path or URL of a pack; store options are those of ``stream``.
        scan: Whether to scan each shard that has no index, now. A function means True,
            and is called after each shard, with the numbers of indexed and all shards.

    Raises:
        TypeError: If ``stream`` is none of these.
        ValueError: If ``stream`` sets an order, ranks, readers or filters; if a shard
            is compressed; if ``pack`` and ``scan`` are both given; or if either is
            given for an ``ArrowDataset``.
        ObjectNotFoundError: If there is no index, and ``scan`` is not set.
        DatasetError: If an index cannot be read, or belongs to other shards.

    Example:
        >>> import asyncio, pathlib, tempfile
        >>> from aioloader.datasets import TextDataset
        >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
        >>> _ = path.write_text("first\nsecond\n")
        >>> lines = IndexedDataset(TextDataset(path), scan=True)
        >>> len(lines), asyncio.run(lines[1])
        (2, 'second')
    """

    @names_options
    def __init__(
        self,
        stream: StoredStream[Any],
        *,
        pack: "str | os.PathLike[str] | None" = None,
        scan: bool | OnProgress = False,
    ) -> None:
        with start_blocking_portal() as portal:
            shards = portal.call(_find, stream, pack, scan)
        self._set_shards(stream, shards)

    @classmethod
    @names_options
    async def discover(
        cls,
        stream: StoredStream[Any],
        *,
        pack: "str | os.PathLike[str] | None" = None,
        scan: bool | OnProgress = False,
    ) -> Self:
        """Create a dataset without blocking the loop; arguments as for the class."""
        shards = await _find(stream, pack, scan)
        self = cls.__new__(cls)
        self._set_shards(stream, shards)
        return self

    def _set_shards(self, stream: StoredStream[Any], shards: FoundShards) -> None:
        self._stream, storage = stream, stream.made_by.storage
        self._addresses, self._edges, self._kinds, self._local = shards
        self._known: dict[str, Any] = {}
        self._labels = [*map(storage.label, self._addresses)]
        make: Any = partial(RemoteReads, storage, self._addresses, self._edges)
        if self._local is not None:
            make = partial(LocalReads, self._local)
        self._readers: PerLoop[Any] = PerLoop(make)

    def __len__(self) -> int:
        return len(self._edges)

    async def __getitem__(self, index: SupportsIndex) -> Any:
        """Read one sample.

        Args:
            index: Number of the sample; negative ones count from the end.

        Raises:
            IndexError: If ``index`` is out of range.
            ShardChangedError: If the shard changed after its pack, scan or first read.
            DatasetError: If reading failed, after all retries, or the sample is
                damaged.
        """
        if not (isinstance(index, int) and 0 <= index < len(self)):
            index = position_of(index, len(self))  # a plain integer, without its block
        if self._local is not None:
            (sample,) = await self._readers.here().read([index])
            return sample
        (shard, start, _), data = await self._readers.here().read(index)
        kind, label = self._kinds[shard], self._labels[shard]
        if kind.waits or len(data) > _MAX_INLINE_BYTES:
            return await in_thread(sample_of, kind, label, start, data)
        return sample_of(kind, label, start, data)

    @property
    def __getitems__(self) -> "Callable[[Sequence[SupportsIndex]], Any] | None":
        """Function that reads a batch of local samples; None if a shard is remote."""
        return None if self._local is None else self._read_local

    async def _read_local(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        count = len(self)
        positions = [position_of(index, count) for index in indices]
        samples: list[Any] = await self._readers.here().read(positions)
        return samples

    def shuffled(
        self, block: int = 16, window: int = 4096, seed: int = 0, lanes: int = 64
    ) -> ShuffledBlocks:
        """Return a shuffling sampler; one request reads ``block`` neighbouring samples.

        Each sample comes once per epoch. A block's samples are spread over a window,
        and buffered until used. Buffers hold about ``window`` samples on all ranks, at
        most twice as many on one rank. Each event loop has its own buffer, so use
        ``fetch="loader"`` with worker processes. A ``Subset`` reads no blocks.

        Args:
            block: Number of samples per request.
            window: Number of samples to permute at a time, on all ranks together; 0:
                none. Successive batches are similar unless the window is many times
                (say, 64 times) the batch of all ranks.
            seed: Seed of the order.
            lanes: Number of parts of the order to interleave; best is the batch size of
                all ranks together. If the number of ranks divides it, each block is
                read by one rank, except blocks in which a part begins.

        Raises:
            ValueError: If ``block`` or ``lanes`` is below 1, or ``window`` is below 0.
        """
        return ShuffledBlocks(len(self), block, window, seed, lanes)

    async def save(self, pack: "str | os.PathLike[str]") -> None:
        """Write the index of all shards to one file, completely or not at all.

        The file includes the shards' versions, which each later read checks.

        Args:
            pack: Path or URL of the file.

        Raises:
            ValueError: If the samples are rows of Arrow files, or two shards' addresses
                differ only in their query.
            DatasetError: If a shard has changed since it was indexed, or the file
                cannot be written.
        """
        edges = self._edges
        if not self._kinds:
            raise ValueError("rows of Arrow files need no index")
        if None in (edges.versions or [None]):
            async with self:
                version_of = self._readers.here().version
                versions = await each(version_of, range(len(edges.counts)))
            edges = Edges(edges.counts, edges.offsets, versions)
        packed = IndexPack(pack_names(self._addresses), edges, kind_of(self._stream))
        await write(self._stream, pack, await in_thread(packed.contents))

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of shard names, sample counts and, if known, versions."""
        edges = self._edges
        if not self._known:
            ends = [edges.end(shard) for shard in range(len(edges.counts))]
            samples = checksum([kind_of(self._stream), edges.counts, ends])
            self._known["shards"] = {**summary_of(self._addresses), "samples": samples}
            if None not in (edges.versions or [None]):
                self._known["versions"] = checksum(edges.versions)
        return self._known

    async def aclose(self) -> None:
        """Cancel this loop's requests and clear its buffer; reading can continue."""
        await self._readers.here().aclose()

    def __repr__(self) -> str:
        return f"IndexedDataset({self._stream!r}, {len(self):,} samples)"


# -- finding the samples -----------------------------------------------------------


async def _find(stream: Any, pack: Any, scan: bool | OnProgress) -> FoundShards:  # noqa: FBT001
    made_by = checked(stream)
    is_arrow = not isinstance(made_by, ByteFormat)
    if (pack is not None) + bool(scan) + is_arrow > 1:
        raise ValueError(
            "pack and scan exclude each other, and Arrow files need neither; got "
            f"pack={pack!r}, scan={scan!r}"
        )
    async with AsyncExitStack() as stack:
        shards = await listed(made_by, stack)
        if is_arrow:
            from aioloader.datasets._arrow.single_rows import SingleRows, single_rows  # noqa: PLC0415  (it needs pyarrow)

            files, edges = await single_rows(made_by, shards)
            addresses = [file.address for file in files for _ in file.counts]
            return addresses, edges, [], SingleRows(made_by.storage, files, edges)
        addresses = [*map(made_by.address, shards)]
        if pack is not None:
            edges = await _pack_edges(stream, pack, addresses)
        else:
            edges = await _shard_edges(made_by, shards, scan)
    kinds = [*map(made_by.spec, shards)]
    edges.tail = max((kind.tail for kind in kinds), default=0)
    for shard, version in enumerate(edges.versions):
        if version is not None:
            label = made_by.storage.label(addresses[shard])
            edges.check_end(shard, label, version.size)
    paths = [*map(made_by.storage.path, addresses)]
    if None in paths:
        return addresses, edges, kinds, None
    shards = [*zip(map(str, paths), kinds, strict=True)]
    return addresses, edges, kinds, MappedShards(shards, edges)


async def _shard_edges(
    made_by: ByteFormat,
    shards: Sequence[Any],
    scan: bool | OnProgress,  # noqa: FBT001
) -> Edges:
    """Return the sample offsets from each shard's index, or from a scan."""
    builder, find = EdgesBuilder(), partial(numbers_of, made_by, may_scan=bool(scan))
    async with aclosing(in_order(find, shards)) as results:
        async for numbers, version in results:
            builder.add(numbers, version)
            if callable(scan):
                scan(len(builder), len(shards))
    return builder.done()


async def listed(made_by: Any, stack: AsyncExitStack) -> list[Any]:
    """Return the shards of a format; raise a ValueError if one is compressed."""
    shards = [*await made_by.shards(stack)]
    if not isinstance(made_by, ByteFormat):
        return shards
    for label in map(made_by.storage.label, map(made_by.address, shards)):
        if unpacker_of(label):
            raise ValueError(
                f"{label!r} is compressed, and can only be read from its start: unpack "
                "it, or read the stream itself"
            )
    return shards


def checked(stream: Any) -> Any:
    """Return a stream's format; raise an error if random access is not possible."""
    expected = "a stream of shards, such as TarDataset, whose steps go to transform="
    check_is(stream, StoredStream, "stream", expected)
    if not (isinstance(stream, ArrowDataset) or isinstance(stream.made_by, ByteFormat)):
        raise TypeError(
            f"{stream!r} has rows in columns, and a row costs all of its row group, or "
            "file: write the samples to tars, by TarWriter or `aioloader pack`"
        )
    order = {"shuffle": False, "interleave": 1, "deterministic": True}
    described = {**stream.describe(), "ranks": stream.ranks or stream.num_readers}
    if described != {**described, **order, "ranks": None}:
        raise ValueError(
            f"{stream!r} sets shuffle, interleave, deterministic, shard or readers, "
            "which random access would ignore: leave them out, and give the loader a "
            "sampler and rank="
        )
    return stream.made_by


def kind_of(stream: StoredStream[Any]) -> dict[str, Any]:
    """Return the stream's settings that determine how bytes become samples."""
    ignored = {"shuffle", "seed", "interleave", "deterministic"}
    described = stream.describe()
    return {name: described[name] for name in described.keys() - ignored}


async def numbers_of(
    made_by: ByteFormat, shard: Any, *, may_scan: bool
) -> tuple[Offsets, Version | None]:
    """Return a shard's sample offsets, and the shard's version if it was scanned."""
    numbers = await made_by.offsets(shard)
    if numbers is not None and numbers[-1]:
        return numbers, None
    storage, address = made_by.storage, made_by.address(shard)
    if may_scan or numbers is not None:  # an empty shard is read now, or never
        scan, version = await scan_of(storage, address, made_by.spec(shard))
        if numbers is not None and len(scan) > 1:
            change = f"it had no samples, and has {len(scan) - 1:,}"
            raise changed(storage.label(address), change)
        return scan, version
    beside = storage.label(sibling(address, index_name))
    raise ObjectNotFoundError(
        f"{storage.label(address)!r} has no index, {beside!r}: write it by `aioloader "
        "index`, or pass scan=True, which reads all of each such shard now",
        location=beside,
    )


async def scan_of(
    storage: Storage, address: Address, kind: ByteFormatSpec
) -> tuple[Offsets, Version | None]:
    """Scan a shard for sample offsets, in a thread since a user's format may block."""
    source, loop = storage.open(address, 0, _SCAN_BYTES), asyncio.get_running_loop()
    thread, is_over = ThreadPoolExecutor(1, "aioloader-scan"), threading.Event()
    reading: list[asyncio.Future[Buffer]] = []

    async def piece() -> Buffer:
        if is_over.is_set():
            raise asyncio.CancelledError
        reading[:] = [asyncio.ensure_future(source.read())]
        return await reading[0]

    def read() -> Buffer:
        return asyncio.run_coroutine_threadsafe(piece(), loop).result()

    async with AsyncExitStack() as stack:
        stack.push_async_callback(source.aclose)
        stack.push_async_callback(in_thread, thread.shutdown)
        stack.push_async_callback(cancel, reading)
        stack.callback(is_over.set)
        args = kind, storage.label(address), read
        scan = in_thread(scanned, *args, executor=thread, abandon_on_cancel=True)
        return np.frombuffer(await scan, np.uint64), source.version


async def pack_at(stream: StoredStream[Any], pack: Any) -> IndexPack:
    """Read a pack, with the store options of ``stream``."""
    check_is(pack, str | os.PathLike, "pack", "a path or URL")
    (address,) = sealed(pack)
    storage = stream.made_by.storage.elsewhere(address)
    try:
        return await read_pack(storage, address)
    finally:
        await storage.aclose()


def pack_names(addresses: Sequence[Address]) -> list[str]:
    """Return the names of shards in a pack; raise if two shards share one."""
    names = names_of(addresses)
    if len({*names}) < len({*addresses}):
        raise ValueError(
            "a pack records no queries and accounts, and without them, two of the "
            "shards have the same name: give them different paths"
        )
    return names


async def _pack_edges(
    stream: StoredStream[Any], pack: Any, addresses: Sequence[Address]
) -> Edges:
    """Return the sample offsets of the given shards, from a pack."""
    (names, edges, of), shown = await pack_at(stream, pack), shown_address(str(pack))
    if of != (kind := kind_of(stream)):
        raise DatasetError(
            f"{shown} is the index of samples as {of}, and they are read as {kind}; "
            "write the index again by `aioloader index --pack`, or by `save`"
        )
    numbers, shards = {name: n for n, name in enumerate(names)}, pack_names(addresses)
    # The pack's names may start at a higher folder, common to more shards.
    parts = name_of(addresses[0])[: -len(shards[0])].split("/")
    folders = ["/".join(parts[start:]) for start in range(len(parts))]
    folder = next((part for part in folders if part + shards[0] in numbers), "")
    shards = [folder + name for name in shards]
    if missing := [name for name in shards if name not in numbers]:
        raise DatasetError(
            f"{shown} is the index of {len(names):,} shards, and {len(missing):,} of "
            f"{len(shards):,} are not among them, such as {missing[0]!r}; write the "
            "index again by `aioloader index --pack`"
        )
    edges = edges.of_shards([numbers[name] for name in shards])
    storage = stream.made_by.storage

    async def check(shard: int) -> None:
        now, known = await storage.version(addresses[shard]), edges.version(shard)
        if known is not None and not now.is_of(known):
            raise changed_since(storage.label(addresses[shard]), known, now)

    # Empty shards are never read.
    await each(check, [shard for shard, count in enumerate(edges.counts) if not count])
    return edges


async def write(stream: StoredStream[Any], address: Any, data: bytes) -> None:
    """Write a file, completely or not at all, with the store options of ``stream``."""
    (address,) = sealed(address)
    folder, slash, name = address.rpartition("/")
    options = stream.made_by.storage.options_of(address)
    sink = make_sink(folder + slash or ".", options)
    try:
        await sink.put(name, data)
    finally:
        await sink.aclose()
