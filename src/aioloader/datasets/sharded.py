"""Base classes of sharded streams; they divide shards among readers and slots."""

import copy
import operator
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from itertools import chain
from os import PathLike
from pathlib import PurePath
from time import perf_counter
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
)

from aioloader._base.cancellation import in_thread
from aioloader._base.records import COUNTERS
from aioloader._order.permutation import CHUNK, ShuffledIndices, keyed_order, paced
from aioloader.datasets._checks import check_at_least, check_is, names_options
from aioloader.datasets._stores.addresses import (
    Address,
    sealed,
    shown_address,
    shown_addresses,
)
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.options import hidden
from aioloader.datasets._stores.sources import Requests, Source, policy_of
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._stores.unpack import UNPACK_BYTES
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State
from aioloader.datasets._streams.engine import ByteFormat, Cuts, SpecOrGenerator
from aioloader.datasets._streams.interleave import (
    AsTheyCome,
    Interleaved,
    ShardSequence,
)
from aioloader.datasets._streams.shards import ShardFormat, Summary
from aioloader.datasets.streams import CACHE_BYTES, Stream
from aioloader.errors import StateMismatchError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


Addresses: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]
Sample_co = TypeVar("Sample_co", covariant=True)
MAX_BYTES = 128 << 20
MAX_SAMPLE_BYTES = 1 << 28
_MAX_INLINE_SHARDS = 1 << 10
# Number of passes whose shard assignments are cached, for this process's readers.
_MAX_ASSIGNMENTS = 2


class OrderOptions(TypedDict, total=False):
    """Keyword arguments of every ``ShardedStream``."""

    shuffle: bool
    seed: int
    interleave: int
    deterministic: bool
    max_bytes: int


class StreamOptions(OrderOptions, total=False):
    """Keyword arguments of every stream whose shards are in a store or on disk."""

    store: "str | PathLike[str] | ObjectStore | Source | None"
    store_options: Mapping[str, Any] | None
    requests: Requests | None
    cache: str | PathLike[str] | None
    cache_bytes: int
    unpack_bytes: int


class ShardedStream(Stream[Sample_co]):
    """A stream that reads its samples from shards.

    The shards, permuted in each epoch if ``shuffle`` is set, are divided among the
    readers. There is one reader per rank and worker, unless ``readers`` sets their
    number. Each shard goes to the reader with the fewest bytes (or rows) so far. If
    lengths are unknown, as for URLs that are not listed, each shard counts as one. So
    each shard is read once, and readers differ by at most one shard. Each reader needs
    at least one shard. It divides its shards among slots, which it interleaves; a slot
    reads its shards in sequence. A state requires shards of the same names and lengths
    in the same order; their common directory, bucket or server may differ.

    Args:
        made_by: The format, which lists and opens shards.
        shuffle: Whether to permute the shards.
        seed: Seed of the permutation.
        interleave: Number of shards to read concurrently, in all readers together;
            rounded up to a multiple of the number of readers.
        deterministic: Whether to interleave slots in a fixed order. Otherwise the order
            differs from run to run, and a resume needs the same number of ranks.
        max_bytes: Read-ahead of one rank, or worker, in bytes; divided equally among
            its slots. A slot may exceed its share by one read.

    Raises:
        ValueError: If ``interleave`` or ``max_bytes`` is below 1.
    """

    @names_options
    def __init__(
        self,
        made_by: ShardFormat,
        *,
        shuffle: bool = False,
        seed: int = 0,
        interleave: int = 1,
        deterministic: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__()
        check_is(seed, SupportsIndex, "seed", "an integer")
        self.made_by = made_by
        self._shuffle = shuffle
        self._seed = operator.index(seed)
        self._interleave = check_at_least(interleave, 1, "interleave")
        self._deterministic = deterministic
        self._max_bytes = check_at_least(max_bytes, 1, "max_bytes")

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor over the slots of this reader.

        Raises:
            StateMismatchError: If the state belongs to other shards.
            ValueError: If there are fewer shards than readers, or if ranks share a
                reader whose order is not deterministic.
        """
        share, known = reading.share, state.get("shards")
        if share.in_turns and not self._deterministic:
            raise ValueError(
                f"{self!r} has deterministic=False, and no order for ranks to share: "
                "use as many readers as ranks (times workers), or deterministic=True"
            )
        if id(self) not in reading.listed:
            began = perf_counter()
            find = self._list if reading.agreement is None else self._agree
            listing = reading.listed[id(self)] = await find(reading, known)
            if (counters := COUNTERS.get()) is not None:
                counters.listed_shards += len(listing.shards)
                counters.listed_seconds += perf_counter() - began
        shards, summary, sizes = reading.listed[id(self)]
        is_same = known is None or known == summary
        if summary["count"] < share.readers or not is_same:
            raise self._mismatch(summary, known, share.readers)
        mine = (await self._assignment(reading, len(shards), sizes))[share.reader]
        slots = min(-(-self._interleave // share.readers), len(mine))
        states = state.get("lanes") or [{} for _ in range(slots)]
        budget = self._max_bytes // max(1, slots * share.per_rank)
        if slots == 1:
            (only,) = states
            return ShardSequence(self.made_by, shards, mine, budget, only, summary)
        sequences = [
            ShardSequence(self.made_by, shards, mine[slot::slots], budget, saved)
            for slot, saved in zip(range(slots), states, strict=True)
        ]
        kind = Interleaved if self._deterministic else AsTheyCome
        return kind(sequences, state, summary)

    def ahead(self) -> Ahead:
        """Return how far to read ahead: not at all if the order may change."""
        changes = self.made_by.changes or not self._deterministic
        return Ahead.NEVER if changes else Ahead.FREE

    def places(self) -> list[str]:
        """Return strings that identify the shards' location, equal on all ranks."""
        return [""]

    def describe(self) -> State:
        """Return the format's description, and the settings of the order."""
        return {
            "kind": type(self).__name__,
            **self.made_by.describe(),
            "shuffle": self._shuffle,
            "seed": self._seed if self._shuffle else 0,
            "interleave": self._interleave,
            "deterministic": self._deterministic,
        }

    async def _agree(self, reading: Reading, known: Summary | None) -> "_ShardListing":
        """List the shards; raise a DatasetError if ranks list different shards."""
        assert reading.agreement is not None

        def find(stack: AsyncExitStack, theirs: Any) -> Awaitable[_ShardListing]:
            return self._list(replace(reading, stack=stack), known or theirs)

        key = [self.describe(), *self.places()]
        agreement, stack = reading.agreement, reading.stack
        listing: _ShardListing = await agreement.on(key, repr(self), stack, find)
        return listing

    async def _list(self, reading: Reading, known: Summary | None) -> "_ShardListing":
        """List all shards; split them if there are fewer than readers."""
        made_by, readers = self.made_by, reading.share.readers
        shards = await made_by.shards(reading.stack, known)
        if made_by.count(shards) < readers:
            shards = await made_by.cut(shards, readers)
        is_quick = len(shards) <= _MAX_INLINE_SHARDS
        summary = await in_thread(made_by.summary, shards, is_quick=is_quick)
        # Assignments depend on lengths; after a resume, only if the state has "sizes".
        sizes: Sequence[int] | None = None
        must = known is not None and "sizes" in known
        if 1 < readers < len(shards) and (known is None or must):
            sizes = await made_by.sizes(shards, must=must)
        if sizes is None or min(sizes) == max(sizes):
            return _ShardListing(shards, summary, None)
        text = ",".join(map(str, sizes)).encode()
        summary = {**summary, "sizes": f"{zlib.crc32(text):08x}"}
        return _ShardListing(shards, summary, sizes)

    async def _assignment(
        self, reading: Reading, count: int, sizes: Sequence[int] | None
    ) -> Sequence[Sequence[int]]:
        """Return each reader's shard numbers, cached for all readers of the process."""
        # One entry for each pass of ``repeat``; readers may be in different passes.
        assignments = reading.listed.setdefault((id(self), "deals"), {})
        if reading.epoch not in assignments:
            order: Sequence[int] | ShuffledIndices = range(count)
            if self._shuffle:
                order = keyed_order(count, self._seed, reading.epoch, 0)
            args = order, sizes, reading.share.readers
            assigned = await in_thread(_assign, *args, is_quick=count <= CHUNK)
            assignments[reading.epoch] = assigned
            while len(assignments) > _MAX_ASSIGNMENTS:
                del assignments[next(iter(assignments))]
        shares: Sequence[Sequence[int]] = assignments[reading.epoch]
        return shares

    def _mismatch(self, summary: Summary, saved: Any, readers: int) -> Exception:
        """Return the error for too few shards, or shards other than the state's."""
        count = summary["count"]
        if count < readers:
            return ValueError(
                f"{self!r} has {count} shards for {readers} readers (ranks x workers, "
                f"or as `readers` says): {readers - count} would have nothing to read; "
                "use fewer, or more, smaller shards"
            )
        difference = f"has {count}"
        if saved["count"] == count:
            difference = "has others, of other lengths, or in another order"
        return StateMismatchError(
            f"the state was saved with {saved['count']} shards, but {self!r} "
            f"{difference}; load it with the same shards",
            expected=saved,
            found=summary,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.made_by).__name__})"


class _ShardListing(NamedTuple):
    """The shards, their summary, and their lengths if assignments depend on lengths."""

    shards: Sequence[Any]
    summary: Summary
    sizes: Sequence[int] | None


def _assign(
    order: Sequence[int] | ShuffledIndices, sizes: Sequence[int] | None, readers: int
) -> Sequence[Sequence[int]]:
    """Return each reader's shard numbers; readers have about equal total lengths.

    Each shard in turn goes to the reader with the smallest total so far, so two readers
    differ by at most the longest shard. Source: Graham, "Bounds on multiprocessing
    timing anomalies", 1969 (list scheduling).
    """
    if isinstance(order, ShuffledIndices):
        order = [*chain.from_iterable(paced(order))]
    if sizes is None:
        return [order[reader::readers] for reader in range(readers)]
    assigned: list[list[int]] = [[] for _ in range(readers)]
    least = [(0, 0, reader) for reader in range(readers)]  # a heap
    for shard in order:
        total, count, reader = least[0]
        assigned[reader].append(shard)
        heapreplace(least, (total + sizes[shard], count + 1, reader))
    return assigned


class StoredStream(ShardedStream[Sample_co]):
    """A stream of shards on disk, in a store or on the web.

    Args:
        addresses: Paths or URLs, one or many; ``{000..127}`` and ``{a,b}`` are
            expanded, and ``*`` matches names.
        made_by: Function that makes the format from addresses and a ``Storage``.
        store: Base of relative ``addresses``: a URL, a directory, an obstore store, an
            fsspec file system, or a ``Source``.
        store_options: Options of the store that a URL names, such as
            ``{"region": "eu-west-1", "client_options": {"timeout": "60s"}}``; those of
            ``obstore.store.from_url``.
        requests: Timeouts and retries of requests.
        cache: Directory in which to cache bytes from a store.
        cache_bytes: Limit of the cache; the least recently used entries are evicted.
        unpack_bytes: Maximum size of the window or dictionary for decompressing one
            zstd or xz shard, in bytes. Arrow has its own limit for CSV.
        order: As for ``ShardedStream``.
    """

    made_by: Any

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        addresses: Addresses,
        made_by: Callable[[list[Address], Storage], ShardFormat],
        *,
        store: "str | PathLike[str] | ObjectStore | Source | None" = None,
        store_options: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
        cache: str | PathLike[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        unpack_bytes: int = UNPACK_BYTES,
        **order: Unpack[OrderOptions],
    ) -> None:
        self._addresses = sealed(addresses)
        if not self._addresses:
            raise ValueError("no shards: the list of addresses is empty")
        self._root = type(store).__name__
        if isinstance(store, (str, PurePath)):
            self._root = shown_address(str(store))
        check_at_least(cache_bytes, 1, "cache_bytes")
        cache_dir = None
        if cache is not None:
            check_is(cache, (str, PathLike), "cache", "a directory")
            cache_dir = CacheDir(cache, cache_bytes)
        storage = Storage(
            store,
            hidden(store_options),
            policy_of(requests),
            cache_dir,
            self._addresses,
            check_at_least(unpack_bytes, 1, "unpack_bytes"),
        )
        super().__init__(made_by(self._addresses, storage), **order)

    def cache(
        self, directory: str | PathLike[str], max_bytes: int = CACHE_BYTES
    ) -> Self:
        """Return the stream with bytes from stores cached in a directory."""
        clone = self._clone()
        clone.made_by = copy.copy(self.made_by)
        clone.made_by.storage = self.made_by.storage.cached(
            CacheDir(directory, max_bytes)
        )
        return clone

    def places(self) -> list[str]:
        """Return the location, without digits that would change if shards are added."""
        first = min(map(shown_address, self._addresses))
        folder, slash, name = first.rpartition("/")
        name = re.sub("[0-9]+", "", name)
        return [f"{self._root} {folder}{slash}{name}"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(self._addresses)})"


class ByteStream(StoredStream[Sample_co]):
    """A stream of shards of bytes, which a generator function turns into samples.

    Args:
        addresses: As for ``StoredStream``. Names that end in ``.gz``, ``.zst``,
            ``.bz2`` or ``.xz`` are decompressed.
        make: A generator function that takes a shard as a blocking binary file, at the
            start of a sample, and yields samples. At each yield, the file must be at
            the start of the next sample.
        options: As for ``StoredStream``.

    Attributes:
        cuts: Function that returns offsets to split at, or why not; None: never split.
    """

    cuts: ClassVar[Cuts | None] = None

    def __init__(
        self,
        addresses: Addresses,
        make: SpecOrGenerator,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(ByteFormat, make=make, cuts=type(self).cuts)
        super().__init__(addresses, made_by, **options)
