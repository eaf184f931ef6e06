"""Byte formats, whose generators turn the bytes of a shard into samples.

A generator starts where a sample starts, and reads forward. There are two kinds:

- A user's generator gets a blocking binary ``file`` and yields samples. At each yield
  the file's position is the start of the next sample; resuming needs nothing else.
  It runs, and is closed, in a separate thread, which may block.
- A built-in generator (``Steps``) gets a ``ByteFeed`` and yields blocks of samples with
  the offset after each, or None where it needs another piece of the bytes. It never
  waits, so it runs in any of the loop's worker threads, or on the loop.

``ByteReader`` decompresses the bytes, and limits each block's samples, bytes and time.
"""

import array
import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import io
import math
import re
import sys
import time
import zlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import Buffer

from aioloader._base.blocks import FailedSample
from aioloader._base.cancellation import each, in_thread
from aioloader._base.failures import noted
from aioloader.datasets._stores.addresses import Address
from aioloader.datasets._stores.bytes import FileBytes
from aioloader.datasets._stores.failures import (
    ANY_VERSION,
    ExpectedVersion,
    NoRangesError,
    Version,
)
from aioloader.datasets._stores.storage import Storage, read_whole
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.datasets._streams.cursors import qualname
from aioloader.datasets._streams.edges import Offsets, read_index
from aioloader.datasets._streams.shards import (
    BlockReader,
    PositionedBlocks,
    ShardFormat,
    ShardPosition,
    ShardReader,
    Summary,
    summary_of,
)
from aioloader.errors import DatasetError, TruncatedReadError
from aioloader.protocols import generator_of, is_async_function

# Bytes to search at once for the end of a line.
_SEARCH_BYTES = 1 << 16
# Files up to this size may be read whole, to find enough lines for all readers.
_SMALL_FILE_BYTES = 1 << 24
# Most samples of a block; fewer if they are containers, because the garbage collector
# would take longer to scan more of them than parsing takes.
_MAX_SAMPLES, _MAX_CONTAINERS = 2048, 256
# Limits of a block of a user's generator.
_MAX_BYTES, _MAX_SECONDS = 1 << 22, 0.02
# Most CPU seconds of a turn on the loop.
_TURN_SECONDS = 0.002
# Buffer size of the file that a user's generator gets.
_BUFFER_BYTES = 1 << 16
_EMPTY = memoryview(b"")
_END: Any = ()


class ShardPart(NamedTuple):
    """The bytes of a shard version from ``start`` to ``stop`` (None: to the end)."""

    address: Address
    start: int
    stop: int | None
    version: Version | None


# Gets the storage, a shard's address and size, and a number of parts. Returns the start
# offsets of all parts but the first, or else why the shard cannot be cut (as text).
Cuts: TypeAlias = Callable[[Storage, Address, int, int], Awaitable[Sequence[int] | str]]


async def cut_shards(
    storage: Storage, shards: Sequence[Address], count: int, cuts: Cuts
) -> list[ShardPart]:
    """Cut shards into ``count`` parts, in order; the largest shards are cut first.

    The parts depend only on the shards' sizes and contents, so they are the same on all
    ranks. Raise a ValueError if the shards cannot be cut into enough parts.
    """
    versions = await each(partial(_version, storage), shards)
    counts = shares([version.size for version in versions], count)
    reasons = [""] * len(shards)

    async def cut(number: int) -> list[ShardPart]:
        shard, version, inner = shards[number], versions[number], list[int]()
        if unpacker_of(storage.label(shard)):
            reasons[number] = "is compressed: unpack or split it"
        elif counts[number] > 1:
            starts = await cuts(storage, shard, version.size, counts[number])
            if isinstance(starts, str):
                reasons[number] = starts
            else:
                inner = [*starts]
        edges = pairwise([0, *inner, version.size])
        return [ShardPart(shard, start, stop, version) for start, stop in edges]

    parts = [*chain.from_iterable(await each(cut, range(len(shards))))]
    if len(parts) < count:
        why = "; ".join(
            f"{storage.label(shard)!r} {reason}"
            for shard, reason in zip(shards, reasons, strict=True)
            if reason
        )
        why = why or "they have too few samples"
        raise ValueError(
            f"{len(shards)} shards can be cut into {len(parts)} parts only, but there "
            f"are {count} readers (ranks x workers, or as `readers` says): {why}; or "
            "use fewer readers"
        )
    return parts


async def _version(storage: Storage, shard: Address) -> Version:
    try:
        return await storage.version(shard)
    except NoRangesError:
        label = storage.label(shard)
        raise ValueError(
            f"{label!r} cannot be cut for more readers: its server gives no ranges; "
            "use fewer readers, or more shards"
        ) from None


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return how many parts to cut each shard into; larger shards get more parts."""
    parts = [1] * len(sizes)
    heap = [(-size, shard) for shard, size in enumerate(sizes)]
    heapify(heap)
    for _ in range(count - len(sizes)):
        shard = heap[0][1]
        parts[shard] += 1
        heapreplace(heap, (-sizes[shard] // parts[shard], shard))
    return parts


async def at_line_ends(
    storage: Storage, address: Address, size: int, count: int
) -> Sequence[int]:
    """Return line starts that cut a file into up to ``count`` parts of similar size."""
    even = [size * number // count for number in range(1, count)]
    starts = await each(lambda cut: _next_line(storage, address, cut, size), even)
    cuts = sorted({start for start in starts if 0 < start < size})
    if len(cuts) < count - 1 and size <= _SMALL_FILE_BYTES:  # lines of uneven lengths
        data = await read_whole(storage.open(address, 0, _SEARCH_BYTES, stop=size))
        lines = [0, *(match.end() for match in re.finditer(rb"\n", data))]
        return nearest([line for line in lines if line < size], size, count)
    return cuts


async def _next_line(storage: Storage, address: Address, cut: int, size: int) -> int:
    """Return the first line start at or after ``cut``, or ``size`` if there is none."""
    offset = max(0, cut - 1)
    source = storage.open(address, offset, _SEARCH_BYTES, stop=size)
    try:
        while data := bytes(await source.read()):
            end = data.find(b"\n")
            if end >= 0:
                return offset + end + 1
            offset += len(data)
    finally:
        await source.aclose()
    return size


def nearest(starts: Sequence[int], size: int, count: int) -> Sequence[int]:
    """Return up to ``count - 1`` of ``starts`` that cut ``size`` bytes about evenly."""
    last = len(starts) - count
    place, cuts = 0, []
    for number in range(1, min(count, len(starts))):
        place = max(place + 1, bisect_left(starts, size * number // count))
        place = min(place, max(last, 0) + number)
        cuts.append(starts[place])
    return cuts


class ByteFeed(io.RawIOBase):
    """A feed of a shard's bytes, which are read piece by piece and only forward.

    ``Steps`` use ``take`` and ``skip``, or the ``view``. For a user's generator a feed
    is the raw file under a ``ShardFile``'s buffer, and waits for pieces itself.

    Attributes:
        url: Redacted address of the shard, for samples and errors; also ``name``.
        is_part: Whether the bytes end before the shard does, between two samples.
        want: Most samples to yield at once.
        left: Bytes to read until a block of a user's generator is full.
        wait: Returns the next piece; only set if the generator may wait.
        view: The current piece, valid until the next one.
        used: How many bytes of the view were used or skipped, perhaps beyond its end.
        has_ended: Whether there are no more pieces.
    """

    def __init__(self, url: str, start: int, *, is_part: bool = False) -> None:
        self.url = url
        self.name: str = url
        self.is_part = is_part
        self.want: int = 1
        self.left: int = 0
        self.wait: Callable[[], Buffer]
        self.view: memoryview = _EMPTY
        self.used: int = 0
        self.has_ended: bool = False
        self._base = start

    def restart(self, start: int, piece: memoryview) -> None:
        """Continue with a ``piece`` that starts at byte ``start`` of another shard."""
        self.view, self.used, self._base = piece, 0, start

    @property
    def at(self) -> int:
        """The offset of the next byte in the shard."""
        return self._base + self.used

    def give(self, piece: Buffer) -> None:
        """Replace the current, used-up piece; an empty ``piece`` marks the end."""
        self._base += len(self.view)
        self.used -= len(self.view)
        self.view = memoryview(piece).cast("B")
        self.has_ended = not self.view

    def take(self, count: int) -> Generator[None, None, bytes]:
        """Return ``count`` bytes, or fewer at the end. Needs ``yield from``."""
        parts: list[bytes] = []
        left = count
        while True:
            part = bytes(self.view[self.used : self.used + left])
            self.used += len(part)
            left -= len(part)
            parts.append(part)
            if not left or self.has_ended:
                return part if len(parts) == 1 else b"".join(parts)
            yield

    def skip(self, count: int) -> Generator[None, None, int]:
        """Skip ``count`` bytes; return how many are missing. Needs ``yield from``."""
        self.used += count
        while (missing := self.used - len(self.view)) > 0 and not self.has_ended:
            yield
        return max(0, missing)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_CUR:
            offset += self.at
        if whence == io.SEEK_END or offset < self.at:
            raise io.UnsupportedOperation("a shard is read forward only")
        self.used += offset - self.at
        return offset

    def readinto(self, buffer: Buffer, /) -> int:
        """Copy the next bytes into a buffer; wait for a piece if none are left."""
        target = memoryview(buffer).cast("B")
        while self.used >= len(self.view) and not self.has_ended:
            self.give(self.wait())
        part = self.view[self.used : self.used + len(target)]
        target[: len(part)] = part
        self.used += len(part)
        self.left -= len(part)
        return len(part)


class ShardFile(io.BufferedReader):
    """A shard as a blocking, forward-only binary file, for a user's generator.

    It has the methods of ``io.BufferedReader``, such as ``peek``, and ``readexactly``.
    """

    def readexactly(self, n: int, /) -> bytes:
        """Return exactly ``n`` bytes.

        Raises:
            TruncatedReadError: If the shard ends first.
        """
        data = self.read(n)
        if (missing := n - len(data)) > 0:
            url, end = str(self.name), self.tell()
            raise TruncatedReadError(
                f"{url!r} lacks {missing:,} of the {n:,} bytes from byte "
                f"{end - len(data):,} on: it ends at byte {end:,}; write or copy it "
                "again, or check the length that was read",
                location=url,
                expected=end + missing,
                received=end,
            )
        return data


# Yields blocks with the position after them, or None to ask for another piece.
Steps: TypeAlias = Generator[tuple[list[Any], Any] | None, None, None]


class ByteFormatSpec(NamedTuple):
    """The specification of how the bytes of a format's shards become samples."""

    steps: Callable[[ByteFeed], Steps]  # returns the generator of blocks
    is_quick: bool = False  # whether a small piece takes less time than a thread costs
    waits: bool = False  # whether the generator waits for pieces (a user's does)
    piece: int = 1 << 17  # bytes of a file read at once without a thread
    # Makes the only sample in some bytes of a shard, given the URL, their offset and
    # the bytes; returns NotImplemented where only the steps can make it.
    quick: Callable[[str, int, memoryview], Any] | None = None
    tail: int = 0  # how many bytes must follow the last sample of a shard


# A user's format is a generator function of a file.
SpecOrGenerator: TypeAlias = ByteFormatSpec | Callable[[ShardFile], Iterable[Any]]


def spec_of(make: SpecOrGenerator) -> ByteFormatSpec:
    if isinstance(make, ByteFormatSpec):
        return make
    is_async = generator_of(make) == "async generator" or is_async_function(make)
    if not callable(make) or is_async or not _takes_file(make):
        raise TypeError(
            f"make must be a plain generator function of a file, got {make!r}"
        )
    return ByteFormatSpec(partial(_run_generator, make), waits=True)


def _takes_file(make: Callable[..., Any]) -> bool:
    """Tell whether a function can be called with one argument; True if unknown."""
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        pass
    return True


def _run_generator(
    generate: Callable[[ShardFile], Iterable[Any]], feed: ByteFeed
) -> Steps:
    """Run a user's generator on a blocking file; yield its samples in blocks."""
    file = ShardFile(feed, _BUFFER_BYTES)
    samples: Any = generate(file)
    if not isinstance(samples, Iterator):  # a list has no position to resume at
        raise TypeError(
            f"make must be a generator function, and {qualname(generate)!r} returned a "
            f"value of type {type(samples).__name__!r}"
        )
    failure: BaseException | None = None
    is_going, now = True, time.monotonic
    with contextlib.ExitStack() as stack:
        if hasattr(samples, "close"):  # `map` has none
            stack.callback(samples.close)
        while is_going:
            block, want, is_going = list[Any](), feed.want, False
            feed.left, stop = _MAX_BYTES, now() + _MAX_SECONDS
            try:
                for sample in samples:
                    block.append(sample)
                    if len(block) >= want or feed.left <= 0 or now() > stop:
                        is_going = True
                        break
            except BaseException as error:  # noqa: BLE001  (raised after the block)
                failure = error
            yield block, file.tell()
    if failure is not None:
        raise noted(failure, f"in {feed.url!r}, read up to byte {file.tell():,}")


def sample_of(spec: ByteFormatSpec, url: str, start: int, data: memoryview) -> Any:
    """Return the only sample in ``data``, which starts at a shard's byte ``start``.

    Raises:
        DatasetError: If the bytes contain no sample, or several.
        BaseException: The error of the user's generator, or of the sample.
    """
    if spec.quick is not None:
        sample = spec.quick(url, start, data)
        if type(sample) is FailedSample:
            raise sample.error
        if sample is not NotImplemented:
            return sample
    feed, pieces = ByteFeed(url, start, is_part=True), iter((data, b""))
    feed.wait = lambda: next(pieces, b"")
    samples: list[Any] = []
    for step in spec.steps(feed):
        if step is None:
            feed.give(feed.wait())
        else:
            samples += step[0]
    if len(samples) != 1:
        stop = start + len(data)
        raise DatasetError(
            f"{url!r} has {len(samples)} samples in its bytes {start:,} to {stop:,}, "
            "and its index says one; write the index again by `aioloader index`",
            location=url,
        )
    (sample,) = samples
    if type(sample) is FailedSample:
        raise sample.error
    return sample


def scanned(
    spec: ByteFormatSpec, url: str, read: Callable[[], Buffer]
) -> "array.array[int]":
    """Read a shard; return its samples' start offsets and the last one's end. Blocks.

    Failed samples also have offsets. ``read`` returns the shard's next piece.

    Raises:
        DatasetError: If the shard is damaged, so that its later samples are lost.
    """
    feed = ByteFeed(url, 0)
    feed.wait = read
    offsets = array.array("Q", [0])
    for step in spec.steps(feed):
        if step is None:
            feed.give(read())
            continue
        samples, after = step
        for sample in samples:  # at most one, as ``feed.want`` says
            if type(sample) is FailedSample and sample.ends:
                raise sample.error
            offsets.append(after)
        if len(offsets) > 1:  # empty lines, or members of no sample, may follow
            offsets[-1] = after
    return offsets


class ByteReader(BlockReader):
    """A reader of the samples in a shard's bytes, or in a range of them.

    Blocks are made in threads. Quick formats make them on the loop from bytes that were
    fetched or are in the page cache. A position consists of a block's start and of how
    many of its samples were passed on. Failed samples count, so each is reported once.
    Resuming reads a compressed shard from its beginning.
    """

    def __init__(
        self,
        storage: Storage,
        part: ShardPart,
        spec: ByteFormatSpec,
        position: ShardPosition,
        budget: int,
    ) -> None:
        address, start, stop, version = part
        start, location = position.get("byte", start), storage.label(address)
        if unpacker := unpacker_of(location):
            start, stop = 0, None
        super().__init__(location, start, position.get("sample", 0))
        known = (
            ExpectedVersion.of(position, version)
            if position or version
            else ANY_VERSION
        )
        self._source = source = storage.open(address, start, budget, known, stop)
        is_part = bool(stop and version and stop < version.size)
        self._spec, self._feed = spec, ByteFeed(location, start, is_part=is_part)
        self._unpacking = unpacker and unpacker(location, storage.unpack_bytes)
        self._is_quick = spec.is_quick and unpacker is None
        self._steps = self.generator = spec.steps(self._feed)
        self._next_mark: Any = start  # before the next block
        self._limit = _MAX_CONTAINERS
        self._needs_piece = False  # whether the generator has asked for a piece
        self._must_fetch = not isinstance(source, FileBytes)  # whether no piece is here
        self._piece: Buffer | None = None
        self._fetching: concurrent.futures.Future[Buffer] | None = None

    def begin(self) -> None:
        self._source.begin()

    def position(self) -> ShardPosition:
        count = self.taken if self._unpacking is None else self.passed
        return {"byte": self.mark, "sample": count + self.skip}

    def version(self) -> tuple[str, Version] | None:
        version = self._source.version
        return None if version is None else (self.location, version)

    def bytes_ahead(self) -> int | None:
        return self._source.bytes_ahead()

    def is_draining(self) -> bool:
        return self._source.is_draining()

    async def make_here(self) -> PositionedBlocks | None:
        """Make blocks on the loop, from bytes already fetched or in the page cache.

        Return None if a thread must make them. Once samples are large, or a file's
        bytes are not cached, threads make all later blocks. Let other tasks run first.
        """
        source = self._source
        read: Callable[[], Buffer | None] = self._take_piece
        if not self._is_quick or self._must_fetch:
            return None
        if isinstance(source, FileBytes):
            await source.open()
            read = partial(source.read_here, self._spec.piece)
        await asyncio.sleep(0)
        blocks = self.gather(self._blocks(2 * self._spec.piece, read, _TURN_SECONDS))
        self._is_quick = self._must_fetch or bool(blocks)
        return blocks if blocks or self.is_over else None

    async def make(self) -> PositionedBlocks:
        """Make blocks in a thread, or fetch the piece that ``make_here`` needs."""
        source = self._source
        if self._spec.waits:
            if self.thread is None:
                await self._start_thread()
            # One step: ``_run_generator`` limits its bytes and time.
            blocks = self._blocks(0, lambda: None, 0.0)
            return await in_thread(self.gather, blocks, executor=self.thread)
        if isinstance(source, FileBytes):
            size = source.at_once
            return await source.use(lambda read: self.gather(self._blocks(size, read)))
        if self._must_fetch:
            self._piece, self._must_fetch = await source.read(), False
            if self._is_quick:
                return []
        return await in_thread(self.gather, self._blocks(sys.maxsize, self._take_piece))

    async def interrupt(self) -> None:
        """Cancel the read that a generator's thread waits for."""
        if self._fetching is not None:
            self._fetching.cancel()

    async def release(self) -> None:
        await self._source.aclose()

    async def _start_thread(self) -> None:
        loop = asyncio.get_running_loop()
        read: Callable[[], Buffer] = partial(self._fetch, loop)
        if isinstance(self._source, FileBytes):
            await self._source.open()
            read = self._source.read_here
        if self._unpacking is None:
            self._feed.wait = read
        else:
            self._feed.wait = lambda: self._unpacked(read) or b""
        self.own_thread()

    def _fetch(self, loop: asyncio.AbstractEventLoop) -> Buffer:
        """Read a piece on the loop; wait for it in the generator's thread."""
        read = self._source.read()
        self._fetching = asyncio.run_coroutine_threadsafe(read, loop)
        if self.is_over:
            self._fetching.cancel()
        try:
            return self._fetching.result()
        except concurrent.futures.CancelledError:
            raise GeneratorExit from None  # as `close` raises it in the generator

    def _take_piece(self) -> Buffer | None:
        piece, self._piece = self._piece, None
        self._must_fetch = piece is None
        return piece

    def _blocks(
        self, size: int, read: Callable[[], Buffer | None], seconds: float = math.inf
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Yield each block with the mark before it, until ``read`` returns None.

        Also stop at the end, or after a full block, ``size`` bytes or CPU ``seconds``.
        """
        feed, count, limit = self._feed, 0, self._limit
        stop = time.thread_time() + seconds
        while count < limit:
            if self._needs_piece:
                if size <= 0:
                    return
                piece = self._unpacked(read) if self._unpacking else read()
                if piece is None:
                    return
                feed.give(piece)
                size -= len(feed.view)
            feed.want = limit - count
            step = next(self._steps, _END)
            self._needs_piece = step is None
            if step is _END:
                self.is_over = True
                return
            if step:
                block, after = step
                if block:
                    yield self._next_mark, block
                    count += len(block)
                    is_container = gc.is_tracked(block[-1])
                    self._limit = _MAX_CONTAINERS if is_container else _MAX_SAMPLES
                if self._unpacking is None:
                    self._next_mark = after
                if time.thread_time() > stop and not feed.has_ended:
                    return

    def _unpacked(self, read: Callable[[], Buffer | None]) -> Buffer | None:
        """Return the next decompressed piece, or None if ``read`` returns None."""
        assert self._unpacking is not None
        packed: Buffer | None = None
        try:
            while (piece := self._unpacking.send(packed)) is None:
                packed = read()
                if packed is None:
                    return None
        except StopIteration:
            return b""
        return piece


class ByteFormat(ShardFormat):
    """A format of byte shards at ``addresses`` (or patterns); ``cuts`` may cut them."""

    def __init__(
        self,
        addresses: Any,
        storage: Storage,
        make: SpecOrGenerator,
        cuts: Cuts | None = None,
    ) -> None:
        self._addresses = addresses
        self.storage: Storage = storage
        self._spec = spec_of(make)
        self._cuts = cuts

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[Any]:
        stack.push_async_callback(self.storage.aclose)
        return await self.storage.expand(self._addresses)

    async def cut(self, shards: Sequence[Any], count: int) -> Sequence[Any]:
        if self._cuts is None:
            return shards
        return await cut_shards(self.storage, shards, count, self._cuts)

    async def sizes(self, shards: Sequence[Any], *, must: bool) -> Sequence[int] | None:
        if isinstance(shards[0], ShardPart):
            return [part.stop - part.start for part in shards]
        return await self.storage.sizes(shards, must=must)

    def summary(self, shards: Sequence[Any]) -> Summary:
        if not isinstance(shards[0], ShardPart):
            return summary_of(shards)
        names = summary_of(part.address for part in shards)
        cuts = ";".join(f"{part.start}-{part.stop}" for part in shards)
        return {**names, "cuts": f"{zlib.crc32(cuts.encode()):08x}"}

    def open(self, shard: Any, position: ShardPosition, budget: int) -> ShardReader:
        part = (
            shard if isinstance(shard, ShardPart) else ShardPart(shard, 0, None, None)
        )
        return ByteReader(self.storage, part, self._spec, position, budget)

    def address(self, shard: Any) -> Address:
        """Return the address of a whole shard."""
        address: Address = shard
        return address

    def spec(self, shard: Any) -> ByteFormatSpec:  # noqa: ARG002  (the same for all)
        """Return the specification of how the bytes of a shard become samples."""
        return self._spec

    async def offsets(self, shard: Any) -> Offsets | None:
        """Return the offsets from a shard's ``.idx`` file; None if there is no file."""
        return await read_index(self.storage, shard)
