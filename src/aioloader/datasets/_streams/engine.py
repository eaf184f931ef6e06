"""Byte formats: a generator makes samples of the bytes of a shard.

The generator starts where a sample starts, and reads forward. There are two kinds:

- A user's generator gets a blocking binary ``file`` and yields samples. At each yield
  the file is where the next sample starts: resuming needs nothing else. It runs in a
  separate thread, which may block, and is closed in that thread.
- A built-in generator (``Steps``) gets a ``ByteFeed`` and yields blocks of samples with
  the offset after each, or None where it needs another piece of the bytes. It never
  waits, so it runs where the bytes are: in a thread of the loop, or on the loop.

The reader unpacks, and limits blocks in number, bytes and time.
"""

import array
import asyncio
import concurrent.futures
import contextlib
import functools
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
from aioloader.datasets._streams.cursors import name_of
from aioloader.datasets._streams.edges import Numbers, read_index
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
_LOOK = 1 << 16
# Files up to this size may be read whole, to find enough lines for all readers.
_SMALL = 1 << 24
# Most samples of a block: short lines would be many. Fewer of those that are
# containers, because the garbage collector scans all that are held: with more of
# them it costs more than parsing.
_AT_ONCE, _TRACKED_AT_ONCE = 2048, 256
# Bytes that make a block of a user's generator full, and seconds.
_FULL_BYTES, _FULL_SECONDS = 1 << 22, 0.02
# Seconds of the processor that a turn without a thread may take.
_TURN = 0.002
# Buffer of the file that a user's generator gets.
_BUFFER = 1 << 16
_NOTHING = memoryview(b"")
_END: Any = ()


class ShardPart(NamedTuple):
    """A part of a shard: the bytes from ``start`` to ``stop`` of a version of it."""

    address: Address
    start: int
    stop: int | None
    version: Version | None


# Finds where all but the first of ``count`` even parts of a shard start, in order, by
# its address, size and ``count``; or returns why it cannot be cut, and what to do.
Cuts: TypeAlias = Callable[[Storage, Address, int, int], Awaitable[Sequence[int] | str]]


async def cut_shards(
    storage: Storage, shards: Sequence[Address], count: int, cuts: Cuts
) -> list[ShardPart]:
    """Return ``count`` parts of all shards, in order; shards stay whole if possible.

    They depend only on the shards' sizes, so each rank finds the same. A ValueError if
    not enough parts can be cut.
    """
    versions = await each(partial(_version, storage), shards)
    numbers = shares([version.size for version in versions], count)
    reasons = [""] * len(shards)

    async def cut(at: int) -> list[ShardPart]:
        shard, version, inner = shards[at], versions[at], list[int]()
        if unpacker_of(storage.label(shard)):
            reasons[at] = "is compressed: unpack or split it"
        elif numbers[at] > 1:
            found = await cuts(storage, shard, version.size, numbers[at])
            if isinstance(found, str):
                reasons[at] = found
            else:
                inner = [*found]
        return [
            ShardPart(shard, *edges, version)
            for edges in pairwise([0, *inner, version.size])
        ]

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


def checksum_of(parts: Sequence[ShardPart]) -> str:
    text = ";".join(f"{part.start}-{part.stop}" for part in parts)
    return f"{zlib.crc32(text.encode()):08x}"


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of parts per shard; the largest parts are divided first."""
    shares = [1] * len(sizes)
    heap = [(-size, at) for at, size in enumerate(sizes)]
    heapify(heap)
    for _ in range(count - len(sizes)):
        at = heap[0][1]
        shares[at] += 1
        heapreplace(heap, (-sizes[at] // shares[at], at))
    return shares


async def at_line_ends(
    storage: Storage, address: Address, size: int, count: int
) -> Sequence[int]:
    """Return starts of lines, as ``Cuts`` does, after even shares of the bytes."""
    after = [size * number // count for number in range(1, count)]
    starts = await each(lambda at: _line_after(storage, address, at, size), after)
    found = sorted({start for start in starts if 0 < start < size})
    if len(found) < count - 1 and size <= _SMALL:  # few lines, of uneven lengths
        data = await read_whole(storage.open(address, 0, _LOOK, stop=size))
        ends = [0, *(one.end() for one in re.finditer(rb"\n", data))]
        return nearest([end for end in ends if end < size], size, count)
    return found


async def _line_after(storage: Storage, address: Address, at: int, size: int) -> int:
    """Return where the first line starts that starts at ``at`` or later."""
    at = max(0, at - 1)
    source = storage.open(address, at, _LOOK, stop=size)
    try:
        while data := bytes(await source.read()):
            end = data.find(b"\n")
            if end >= 0:
                return at + end + 1
            at += len(data)
    finally:
        await source.aclose()
    return size


def nearest(starts: Sequence[int], size: int, count: int) -> Sequence[int]:
    """Return the ``starts`` closest to even shares of ``size``, without the first one.

    There are ``count - 1``, all different, if there are enough.
    """
    last = len(starts) - count
    place, found = 0, []
    for one in range(1, min(count, len(starts))):
        place = max(place + 1, bisect_left(starts, size * one // count))
        place = min(place, max(last, 0) + one)
        found.append(starts[place])
    return found


class ByteFeed(io.RawIOBase):
    """The bytes of a shard, piece by piece, forward only.

    ``Steps`` use ``take`` and ``skip``, or the ``view``; for a user's generator, which
    may wait, it is the raw file, and gets pieces from ``wait``.

    Attributes:
        url: Redacted address of the shard, for samples and errors.
        is_part: Whether the bytes end before the shard does, between two samples.
        want: Most samples that should be yielded at once.
        left: Bytes until a block of a user's generator is full.
        wait: Returns the next piece.
        view: The current piece, valid until the next one.
        used: How many bytes of it were used.
        has_ended: Whether there are no more pieces.
    """

    def __init__(self, url: str, at: int, *, is_part: bool = False) -> None:
        self.url = url
        self.name: str = url
        self.is_part = is_part
        self.want: int = 1
        self.left: int = 0
        self.wait: Callable[[], Buffer]
        self.view: memoryview = _NOTHING
        self.used: int = 0
        self.has_ended: bool = False
        self._base = at

    def restart(self, at: int, piece: memoryview) -> None:
        """Start again, with a piece at an offset of another shard."""
        self.view, self.used, self._base = piece, 0, at

    @property
    def at(self) -> int:
        """The offset in the shard of the next byte."""
        return self._base + self.used

    def give(self, piece: Buffer) -> None:
        """Replace the current piece, all of which is used; an empty one is the end."""
        self._base += len(self.view)
        self.used -= len(self.view)
        self.view = memoryview(piece).cast("B")
        self.has_ended = not self.view

    def take(self, count: int) -> Generator[None, None, bytes]:
        """Return a copy of the next bytes, by ``yield from``; fewer only at the end."""
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
        """Use the next bytes, by ``yield from``; return how many are missing."""
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
        """Copy the next bytes, and wait for a piece if there are none."""
        target = memoryview(buffer).cast("B")
        while self.used >= len(self.view) and not self.has_ended:
            self.give(self.wait())
        part = self.view[self.used : self.used + len(target)]
        target[: len(part)] = part
        self.used += len(part)
        self.left -= len(part)
        return len(part)


class ShardFile(io.BufferedReader):
    """The blocking binary file that a format's generator gets: a shard, forward only.

    Besides ``read``, ``readinto``, ``readline``, ``peek`` and ``seek``, it has
    ``readexactly``.
    """

    def readexactly(self, n: int, /) -> bytes:
        """Return exactly ``n`` bytes.

        Raises:
            TruncatedReadError: If the shard ends before.
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


# Blocks with the position after them; None to ask for another piece.
Steps: TypeAlias = Generator[tuple[list[Any], Any] | None, None, None]


class ByteFormatSpec(NamedTuple):
    """How the shards of one format become samples."""

    steps: Callable[[ByteFeed], Steps]  # makes the generator
    is_quick: bool = False  # whether a small piece needs less time than a thread costs
    waits: bool = False  # whether the generator takes the pieces itself, and waits
    piece: int = 1 << 17  # bytes of a file read at once without a thread
    # Makes the only sample in the bytes of a shard from a start on, quickly; or returns
    # NotImplemented, and the steps make it. None: they always do.
    quick: Callable[[str, int, memoryview], Any] | None = None


# What a user has for a format: a generator function of a file.
SpecOrGenerator: TypeAlias = ByteFormatSpec | Callable[[ShardFile], Iterable[Any]]


def spec_of(make: SpecOrGenerator) -> ByteFormatSpec:
    if isinstance(make, ByteFormatSpec):
        return make
    is_async = generator_of(make) == "async generator" or is_async_function(make)
    if not callable(make) or is_async or not _takes_file(make):
        raise TypeError(
            f"make must be a plain generator function of a file, got {make!r}"
        )
    return ByteFormatSpec(functools.partial(_generated, make), waits=True)


def _takes_file(make: Callable[..., Any]) -> bool:
    """Return whether one argument is enough."""
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # a built-in that has no signature
        pass
    return True


def _generated(generate: Callable[[ShardFile], Iterable[Any]], feed: ByteFeed) -> Steps:
    """Run a user's generator over a blocking file, in blocks."""
    file = ShardFile(feed, _BUFFER)
    samples: Any = generate(file)
    if not isinstance(samples, Iterator):  # a list is read whole: it has no position
        raise TypeError(
            f"make must be a generator function, and {name_of(generate)!r} returned a "
            f"value of type {type(samples).__name__!r}"
        )
    failure: BaseException | None = None
    is_going, now = True, time.monotonic
    with contextlib.ExitStack() as stack:
        if hasattr(samples, "close"):  # `map`, for one, has none
            stack.callback(samples.close)
        while is_going:
            block, want, is_going = list[Any](), feed.want, False
            feed.left, stop = _FULL_BYTES, now() + _FULL_SECONDS
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


def sample_of(kind: ByteFormatSpec, url: str, start: int, data: memoryview) -> Any:
    """Return the sample of exactly these bytes of a shard, as a stream gives it.

    Raises:
        DatasetError: If they are not those of one sample.
        BaseException: What the user's generator raises, or the error of the sample.
    """
    if kind.quick is not None:
        sample = kind.quick(url, start, data)
        if type(sample) is FailedSample:
            raise sample.error
        if sample is not NotImplemented:
            return sample
    feed, pieces = ByteFeed(url, start, is_part=True), iter((data, b""))
    feed.wait = lambda: next(pieces, b"")
    samples: list[Any] = []
    for step in kind.steps(feed):
        if step is None:
            feed.give(feed.wait())
        else:
            samples += step[0]
    if len(samples) != 1:
        stop = start + len(data)
        text = f"{url!r} has {len(samples)} samples in its bytes {start:,} to {stop:,}"
        raise DatasetError(
            f"{text}, which are one by its index; write the index again by `aioloader "
            "index`",
            location=url,
        )
    (sample,) = samples
    if type(sample) is FailedSample:
        raise sample.error
    return sample


def scanned(
    kind: ByteFormatSpec, url: str, read: Callable[[], Buffer]
) -> "array.array[int]":
    """Return the numbers of a shard that is read to its end, in a thread.

    A sample that fails alone has its place. ``read`` returns the next piece.

    Raises:
        DatasetError: If the shard is damaged, so that samples after it are lost.
    """
    feed = ByteFeed(url, 0)
    feed.wait = read
    numbers = array.array("Q", [0])
    for step in kind.steps(feed):
        if step is None:
            feed.give(read())
            continue
        samples, after = step
        for sample in samples:  # one at most, because the feed wants one
            if type(sample) is FailedSample and sample.ends:
                raise sample.error
            numbers.append(after)
        if len(numbers) > 1:  # perhaps empty lines, or members of no sample, follow
            numbers[-1] = after
    return numbers


class ByteReader(BlockReader):
    """Samples of one shard of bytes, in order; of a part, if it is not compressed.

    They are made in threads, a block at a time; by a quick generator without a thread,
    as long as a file's bytes are in the page cache. A position is the start of a block
    and the number of samples passed on since. A failed sample counts too: it is
    reported once. A compressed shard can only start at its beginning; samples read
    before are read again, and dropped.
    """

    def __init__(
        self,
        storage: Storage,
        part: ShardPart,
        kind: ByteFormatSpec,
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
        self._kind, self._feed = kind, ByteFeed(location, start, is_part=is_part)
        self._unpacking = unpacker and unpacker(location, storage.unpack_bytes)
        self._is_quick = kind.is_quick and unpacker is None
        self._steps = self.generator = kind.steps(self._feed)
        self._next: Any = start  # the mark before the next block
        self._limit = _TRACKED_AT_ONCE
        # Whether the generator wants a piece; whether one must be read, or is here.
        self._asks, self._is_hungry = False, not isinstance(source, FileBytes)
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
        """Make a block of bytes that are here, or in the page cache.

        None if a thread must do it: from the first time on that samples are large, or
        bytes of a file are missing. Other tasks of the loop get a turn before it.
        """
        source = self._source
        read: Callable[[], Buffer | None] = self._take_piece
        if not self._is_quick or self._is_hungry:
            return None
        if isinstance(source, FileBytes):
            await source.open()
            read = functools.partial(source.read_here, self._kind.piece)
        await asyncio.sleep(0)
        made = self.gather(self._blocks(2 * self._kind.piece, read, _TURN))
        self._is_quick = self._is_hungry or bool(made)
        return made if made or self.is_over else None

    async def make(self) -> PositionedBlocks:
        """Make a block in a thread; or only get a piece, of which one is made here."""
        source = self._source
        if self._kind.waits:
            if self.thread is None:
                await self._start_thread()
            # One step, which is limited in bytes and time where it reads.
            blocks = self._blocks(0, lambda: None, 0.0)
            return await in_thread(self.gather, blocks, executor=self.thread)
        if isinstance(source, FileBytes):
            most = source.at_once
            return await source.use(lambda read: self.gather(self._blocks(most, read)))
        if self._is_hungry:
            self._piece, self._is_hungry = await source.read(), False
            if self._is_quick:
                return []
        return await in_thread(self.gather, self._blocks(sys.maxsize, self._take_piece))

    async def interrupt(self) -> None:
        """End the wait of a generator for bytes."""
        if self._fetching is not None:
            self._fetching.cancel()

    async def release(self) -> None:
        await self._source.aclose()

    async def _start_thread(self) -> None:
        loop = asyncio.get_running_loop()
        read: Callable[[], Buffer] = functools.partial(self._fetch, loop)
        if isinstance(self._source, FileBytes):
            await self._source.open()
            read = self._source.read_here
        if self._unpacking is None:
            self._feed.wait = read
        else:
            self._feed.wait = lambda: self._unpacked(read) or b""
        self.own_thread()

    def _fetch(self, loop: asyncio.AbstractEventLoop) -> Buffer:
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
        self._is_hungry = piece is None
        return piece

    def _blocks(
        self, most: int, read: Callable[[], Buffer | None], seconds: float = math.inf
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Run the generator until a block is full, or ``read`` has no piece yet.

        No piece is read after ``most`` bytes; with ``seconds`` (of processor time,
        after which a block ends), only if there are no samples.
        """
        feed, count, limit = self._feed, 0, self._limit
        stop = time.thread_time() + seconds
        while count < limit:
            if self._asks:
                if most <= 0:
                    return
                piece = self._unpacked(read) if self._unpacking else read()
                if piece is None:
                    return
                feed.give(piece)
                most -= len(feed.view)
            feed.want = limit - count
            step = next(self._steps, _END)
            self._asks = step is None
            if step is _END:
                self.is_over = True
                return
            if step:
                made, after = step
                if made:
                    yield self._next, made
                    count += len(made)
                    is_tracked = gc.is_tracked(made[-1])
                    self._limit = _TRACKED_AT_ONCE if is_tracked else _AT_ONCE
                if self._unpacking is None:
                    self._next = after
                if time.thread_time() > stop and not feed.has_ended:
                    return

    def _unpacked(self, read: Callable[[], Buffer | None]) -> Buffer | None:
        """Return the next piece, unpacked; None if ``read`` has none."""
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
    """Shards at ``addresses``, which are patterns; ``cuts``: where they can be cut."""

    def __init__(
        self,
        addresses: Any,
        storage: Storage,
        make: SpecOrGenerator,
        cuts: Cuts | None = None,
    ) -> None:
        self._addresses = addresses
        self.storage: Storage = storage
        self._kind = spec_of(make)
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
        return {**names, "cuts": checksum_of(shards)}

    def open(self, shard: Any, position: ShardPosition, budget: int) -> ShardReader:
        part = (
            shard if isinstance(shard, ShardPart) else ShardPart(shard, 0, None, None)
        )
        return ByteReader(self.storage, part, self._kind, position, budget)

    def address(self, shard: Any) -> Address:
        """Return the address of a whole shard."""
        address: Address = shard
        return address

    def kind(self, shard: Any) -> ByteFormatSpec:  # noqa: ARG002  (here they are all alike)
        """Return how a shard becomes samples."""
        return self._kind

    async def numbers(self, shard: Any) -> Numbers | None:
        """Return where the samples of a shard start, and the last ends, by its index.

        None if it has none.
        """
        return await read_index(self.storage, shard)
