"""Streams of shards: order, slots and shares, common to all formats."""

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
_MANY = 1 << 10
# Deals of passes that are cached for all readers here.
_DEALS = 2


class OrderOptions(TypedDict, total=False):
    """Keywords of every ``ShardedStream``."""

    shuffle: bool
    seed: int
    interleave: int
    deterministic: bool
    max_bytes: int


class StreamOptions(OrderOptions, total=False):
    """Keywords of every stream whose shards are in a store or on disk."""

    store: "str | PathLike[str] | ObjectStore | Source | None"
    store_options: Mapping[str, Any] | None
    requests: Requests | None
    cache: str | PathLike[str] | None
    cache_bytes: int
    unpack_bytes: int


class ShardedStream(Stream[Sample_co]):
    """A stream of shards.

    The shards, permuted in each epoch if ``shuffle`` is set, go to the readers
    (one for each rank and worker, unless ``readers`` sets their number): each shard to
    the reader that has the least bytes, or rows, so far, or the fewest shards where
    lengths are unknown, as those of URLs that are not listed. So readers differ by at
    most one shard, nothing is read twice and nothing is left out, and there must be a
    shard for each. A reader spreads its shards over slots that take turns; each slot
    reads its shards one after the other. A state can be loaded where the shards have
    the same names and lengths in the same order, whatever their common directory,
    bucket or host.

    Args:
        made_by: The format, which lists and opens shards.
        shuffle: Whether the shards are permuted.
        seed: Seed of the permutation.
        interleave: Number of shards open at once, of all readers together; rounded up
            to a multiple of their number.
        deterministic: Whether slots take turns strictly; otherwise samples come from
            whichever slot has some, and the order differs from run to run, so another
            number of ranks cannot resume it.
        max_bytes: Bytes that one rank, or worker, reads ahead in all: its slots have
            equal parts, and each takes what one read needs even if that is more.

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
            StateMismatchError: If the state is of other shards.
            ValueError: If there are too few, or if ranks or readers must take turns
                with slots that do not.
        """
        share, known = reading.share, state.get("shards")
        if share.in_turns and not self._deterministic:
            raise ValueError(
                f"{self!r} has deterministic=False, and no order for ranks to share: "
                "use as many readers as ranks (times workers), or deterministic=True"
            )
        if id(self) not in reading.listed:
            began = perf_counter()
            find = self._list if reading.agreement is None else self._agreed
            found = reading.listed[id(self)] = await find(reading, known)
            if (counters := COUNTERS.get()) is not None:
                counters.listed_shards += len(found.shards)
                counters.listed_seconds += perf_counter() - began
        shards, summary, sizes = reading.listed[id(self)]
        is_same = known is None or known == summary
        if summary["count"] < share.readers or not is_same:
            raise self._mismatch(summary, known, share.readers)
        mine = (await self._shares(reading, len(shards), sizes))[share.reader]
        lanes = min(-(-self._interleave // share.readers), len(mine))
        states = state.get("lanes") or [{} for _ in range(lanes)]
        budget = self._max_bytes // max(1, lanes * share.per_rank)
        if lanes == 1:
            (only,) = states
            return ShardSequence(self.made_by, shards, mine, budget, only, summary)
        opened = [
            ShardSequence(self.made_by, shards, mine[lane::lanes], budget, one)
            for lane, one in zip(range(lanes), states, strict=True)
        ]
        kind = Interleaved if self._deterministic else AsTheyCome
        return kind(opened, state, summary)

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead: not if its order may change."""
        changes = self.made_by.changes or not self._deterministic
        return Ahead.NEVER if changes else Ahead.FREE

    def places(self) -> list[str]:
        """Return what distinguishes it from streams of equal description.

        It is alike on all ranks.
        """
        return [""]

    def describe(self) -> State:
        """Return the format's description, and the order of shards and slots."""
        return {
            "kind": type(self).__name__,
            **self.made_by.describe(),
            "shuffle": self._shuffle,
            "seed": self._seed if self._shuffle else 0,
            "interleave": self._interleave,
            "deterministic": self._deterministic,
        }

    async def _agreed(self, reading: Reading, known: Summary | None) -> "_ShardListing":
        """Return the shards that all ranks have.

        A DatasetError if other ranks have found other shards.
        """
        assert reading.agreement is not None

        def find(stack: AsyncExitStack, theirs: Any) -> Awaitable[_ShardListing]:
            return self._list(replace(reading, stack=stack), known or theirs)

        what = [self.describe(), *self.places()]
        agreement, stack = reading.agreement, reading.stack
        found: _ShardListing = await agreement.on(what, repr(self), stack, find)
        return found

    async def _list(self, reading: Reading, known: Summary | None) -> "_ShardListing":
        """Return all shards, cut if too few."""
        made_by, readers = self.made_by, reading.share.readers
        shards = await made_by.shards(reading.stack, known)
        if made_by.count(shards) < readers:
            shards = await made_by.cut(shards, readers)
        is_quick = len(shards) <= _MANY
        summary = await in_thread(made_by.summary, shards, is_quick=is_quick)
        # The deal depends on lengths; with a state, if it did when that was saved.
        sizes: Sequence[int] | None = None
        must = known is not None and "sizes" in known
        if 1 < readers < len(shards) and (known is None or must):
            sizes = await made_by.sizes(shards, must=must)
        if sizes is None or min(sizes) == max(sizes):
            return _ShardListing(shards, summary, None)
        text = ",".join(map(str, sizes)).encode()
        summary = {**summary, "sizes": f"{zlib.crc32(text):08x}"}
        return _ShardListing(shards, summary, sizes)

    async def _shares(
        self, reading: Reading, count: int, sizes: Sequence[int] | None
    ) -> Sequence[Sequence[int]]:
        """Return the shards of each reader; the same object for all readers here."""
        # For each pass of ``repeat``; readers here may be in different ones.
        deals = reading.listed.setdefault((id(self), "deals"), {})
        if reading.epoch not in deals:
            order: Sequence[int] | ShuffledIndices = range(count)
            if self._shuffle:
                order = keyed_order(count, self._seed, reading.epoch, 0)
            args = order, sizes, reading.share.readers
            found = await in_thread(_dealt, *args, is_quick=count <= CHUNK)
            deals[reading.epoch] = found
            while len(deals) > _DEALS:
                del deals[next(iter(deals))]
        shares: Sequence[Sequence[int]] = deals[reading.epoch]
        return shares

    def _mismatch(self, summary: Summary, known: Any, readers: int) -> Exception:
        """Return the error for too few shards, or for others than in the state."""
        count = summary["count"]
        if count < readers:
            return ValueError(
                f"{self!r} has {count} shards for {readers} readers (ranks x workers, "
                f"or as `readers` says): {readers - count} would have nothing to read; "
                "use fewer, or more, smaller shards"
            )
        others = f"has {count}"
        if known["count"] == count:
            others = "has others, of other lengths, or in another order"
        return StateMismatchError(
            f"the state was saved with {known['count']} shards, but {self!r} "
            f"{others}; load it with the same shards",
            expected=known,
            found=summary,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.made_by).__name__})"


class _ShardListing(NamedTuple):
    """The shards, their summary, and their lengths if the deal depends on them."""

    shards: Sequence[Any]
    summary: Summary
    sizes: Sequence[int] | None


def _dealt(
    order: Sequence[int] | ShuffledIndices, sizes: Sequence[int] | None, readers: int
) -> Sequence[Sequence[int]]:
    """Return the shards of each reader, all of about the same length in total.

    Each shard, in order, goes to the reader that has the least so far: then no two
    readers differ by more than the longest shard. Source: Graham, "Bounds on
    multiprocessing timing anomalies", 1969 (list scheduling).
    """
    if isinstance(order, ShuffledIndices):
        order = [*chain.from_iterable(paced(order))]
    if sizes is None:
        return [order[reader::readers] for reader in range(readers)]
    dealt: list[list[int]] = [[] for _ in range(readers)]
    least = [(0, 0, reader) for reader in range(readers)]  # a heap
    for shard in order:
        total, count, reader = least[0]
        dealt[reader].append(shard)
        heapreplace(least, (total + sizes[shard], count + 1, reader))
    return dealt


class StoredStream(ShardedStream[Sample_co]):
    """A stream of shards on disk, in a store or on the web.

    Args:
        addresses: Paths or URLs, one or many; ``{000..127}`` and ``{a,b}`` are
            expanded, ``*`` is looked up.
        made_by: Makes the format of the shards from their addresses and ``Storage``,
            which are its ``places``.
        store: What ``addresses`` are relative to: a URL, a directory, a store of
            obstore, a file system of fsspec, or a ``Source``.
        store_options: Options of the store that a URL names, such as
            ``{"region": "eu-west-1", "client_options": {"timeout": "60s"}}``; those of
            ``obstore.store.from_url``.
        requests: How requests that fail or stall are treated.
        cache: A directory that keeps the bytes read from a store.
        cache_bytes: Its size limit; the least recently used entries are evicted first.
        unpack_bytes: Most memory, in bytes, for unpacking one zstd or xz shard: its
            window or dictionary. Arrow has its own limit for CSV.
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
        kept = None
        if cache is not None:
            check_is(cache, (str, PathLike), "cache", "a directory")
            kept = CacheDir(cache, cache_bytes)
        storage = Storage(
            store,
            hidden(store_options),
            policy_of(requests),
            kept,
            self._addresses,
            check_at_least(unpack_bytes, 1, "unpack_bytes"),
        )
        super().__init__(made_by(self._addresses, storage), **order)

    def cache(
        self, directory: str | PathLike[str], max_bytes: int = CACHE_BYTES
    ) -> Self:
        """Return the stream with its reads from a store cached in a directory."""
        clone = self._clone()
        clone.made_by = copy.copy(self.made_by)
        clone.made_by.storage = self.made_by.storage.cached(
            CacheDir(directory, max_bytes)
        )
        return clone

    def places(self) -> list[str]:
        """Return the place of the shards, as far as it stays when some come or go."""
        first = min(map(shown_address, self._addresses))
        folder, slash, name = first.rpartition("/")
        name = re.sub("[0-9]+", "", name)
        return [f"{self._root} {folder}{slash}{name}"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_addresses(self._addresses)})"


class ByteStream(StoredStream[Sample_co]):
    """A stream of shards of bytes.

    Args:
        addresses: As for ``StoredStream``. Names that end in ``.gz``, ``.zst``,
            ``.bz2`` or ``.xz`` are decompressed.
        make: A generator function that gets a shard as a blocking binary file, at the
            start of a sample, and yields samples; each time it leaves the file where
            the next sample starts.
        options: As for ``StoredStream``.

    Attributes:
        cuts: Finds where a shard can be split, for more readers; None: nowhere.
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
