"""What all streams share: iteration, its share and its position, among any ranks.

Cancelling a step of an iteration loses nothing: its read continues in a separate task,
and the next step gets the result.
"""

import asyncio
import operator
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from aioloader._base.blocks import Block, FailedSample, spread
from aioloader._base.cancellation import cancel
from aioloader._base.rank_store import RankStore
from aioloader._base.warnings import warn
from aioloader._order.epoch import UNDER_WAY, under_way
from aioloader._order.ranks import ReaderAssignment, ReaderShare, Tail
from aioloader._order.stream_states import opened, part_of, sealed, state_of
from aioloader.datasets._checks import check_at_least
from aioloader.datasets._streams.agreement import Agreement, EpochEndRounds
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State, fitted
from aioloader.datasets._streams.readers import OneReader, Reader, ReadersInTurn
from aioloader.errors import ShardChangedError
from aioloader.protocols import BlockIterator, Outline, OwnStream

Sample_co = TypeVar("Sample_co", covariant=True)
# Most samples that ``async for`` reads at once, if they come quickly.
_AHEAD = 256
_GROUPS = RankStore()  # that of the process group, if there is one


class Iterated(Dataset[Sample_co], OwnStream):
    """The part of a stream that is not a step."""

    sources: "tuple[Iterated[Any], ...]" = ()  # what it is made of
    leaves_out = False  # whether failed samples do not count: others take their places
    refills = False  # whether samples of the beginning are repeated until all ranks end

    # Without this, `for x in stream` would ask for `__getitem__`, and never end.
    __iter__: ClassVar[None] = None

    def __init__(self, *sources: "Iterated[Any]") -> None:
        self._epoch = 0
        self._is_chosen = False
        self._loaded: State | None = None
        self.sources = sources
        # Those of the first source apply.
        first: Any = sources[0] if sources else None
        self.ranks: tuple[int, int] | None = getattr(first, "ranks", None)
        self.has_peers: bool = getattr(first, "has_peers", False)
        self.num_readers: int | None = getattr(first, "num_readers", None)
        self.rank_store: RankStore = getattr(first, "rank_store", _GROUPS)
        self.is_endless: bool = any(one.is_endless for one in sources)
        self.continues: bool = any(one.continues for one in sources)
        self.reread: list[str] = [name for one in sources for name in one.reread]

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        """Return an iteration over this rank's part.

        Raises:
            StateMismatchError: If a loaded state lacks a reader of this rank.
        """
        state, driver = self._loaded, UNDER_WAY.get()
        epoch = self._epoch
        if driver is not None and not self._is_chosen:
            epoch = driver.epoch
        epoch = epoch if state is None else state["epoch"]
        rank, world_size = self.ranks or (0, 1)
        is_inner = driver is not None and driver.reads_whole
        worker = None if is_inner else get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks = world_size * workers
        readers = self.num_readers or ranks if state is None else state["readers"]
        deal = ReaderAssignment(rank * workers + number, ranks, readers)
        if (cost := deal.cost()) is not None:
            warn(cost)
        agrees = world_size > 1 or self.has_peers
        store = self.rank_store.resolved() if agrees else None
        agreement = (
            Agreement(store, deal.rank, ranks, epoch, workers) if store else None
        )
        iterator = StreamIterator(self, epoch, deal, state, agreement)
        self._loaded = None
        if driver is None and not self._is_chosen:
            self._epoch = epoch + 1
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, until another epoch is chosen."""
        self._epoch = operator.index(epoch)
        self._is_chosen = True

    def for_epoch(
        self,
        ranks: tuple[int, int] | None = None,
        tail: Tail = "uneven",
        *,
        has_peers: bool = False,
        is_skipped: bool = False,
    ) -> Self:
        stream = self.shard(*ranks, has_peers=has_peers) if ranks else self
        if stream.ranks is None or stream.ranks[1] == 1:
            tail = "uneven"
        clone = stream.evened(tail, is_skipped=is_skipped)
        self._loaded = None
        return clone

    def shard(self, rank: int, world_size: int, *, has_peers: bool = False) -> Self:
        """Read the part of one rank.

        Args:
            rank: Its number.
            world_size: How many there are.
            has_peers: Whether other processes read the same part, as tensor-parallel
                ones do: they agree on the shards even if there is only one rank.

        Raises:
            ValueError: If ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range({world_size}), got {rank}")
        ranks = operator.index(rank), operator.index(world_size)
        return self._clone(ranks=ranks, has_peers=has_peers)

    def agree(self, store: Any = None, *, timeout: float | None = None) -> Self:
        """Let the ranks agree through a store of ``torch.distributed``.

        Where ranks share a stream, the first one to arrive stores what it found (names,
        or the keys where a table is cut), and the others adopt it or raise an error: a
        list that changes loses and duplicates nothing. No rank waits for another. With
        the loader's ``tail`` they also agree on the end of an epoch of unknown length.
        Processes that read the same part, as tensor-parallel ones do, agree like ranks.

        Args:
            store: Shared by all ranks, and used by this run alone: a ``TCPStore`` or a
                ``FileStore``, say. Default: that of the process group, if there is one.
            timeout: Seconds that one operation of the store may take (default: 60), and
                that a rank waits for another at the end (default: 1,800).
        """
        return self._clone(rank_store=RankStore(store, timeout))

    def readers(self, count: int) -> Self:
        """Fix the number of readers, so that the order suits any number of ranks.

        Readers take turns, sample by sample, and ranks share them: the batches number
        ``k`` of all ranks have the same samples for any number of ranks, if their sizes
        add up to the same. A reader that ends before the others leaves its turns empty.
        Without this method each rank (each worker, with ``fetch="workers"``) is one
        reader, and the order depends on how many there are.

        Each reader has separate lanes, steps and ``shuffle`` windows, and reads an
        iterable from the start itself; ``max_bytes`` is shared by all on one rank. So
        there must be at least as many shards, and ``count`` is best a multiple of all
        planned numbers of ranks (24 for 1, 2, 3, 4, 6, 8 and 12): otherwise some ranks
        read some readers more than once, with a warning.

        Raises:
            ValueError: If ``count`` is below 1.
        """
        return self._clone(num_readers=check_at_least(count, 1, "count"))

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""
        raise NotImplementedError

    def describe(self) -> State:
        """Return what a state depends on, JSON-serialisable.

        It is what determines the samples and their order, except names of shards,
        which the state itself holds: ``"kind"``, parameters, and ``"of"``, the same for
        the previous step. Left out: where the data lies, credentials, caches and
        read-ahead. Under ``"function"`` are names of the user's functions: if they
        differ, there is only a warning.
        """
        return {"kind": type(self).__name__}

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead of the samples passed on."""
        return min((one.ahead() for one in self.sources), default=Ahead.FREE)

    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if known.

        It is known where ``epoch_length`` is the last step that changes their number.
        """
        return None

    def is_mixed(self) -> bool:
        """Tell whether samples of several sources alternate."""
        return len(self.sources) > 1 or any(one.is_mixed() for one in self.sources)

    def places(self) -> list[str]:
        """Return what distinguishes its sources from others of equal description."""
        return [place for one in self.sources for place in one.places()]

    def evened(self, tail: Tail, *, is_skipped: bool = False) -> Self:  # noqa: ARG002
        """Return the stream whose ranks have equal parts.

        Its sources are evened if it passes on as many samples as they have. Failed
        samples of theirs count: this stream may fail after them.
        """
        is_known = self.total() is not None
        inner: Tail = tail if is_known else "uneven"
        is_open = not (is_known or self.is_endless)
        return self._clone(
            refills=is_open and tail in {"wrap", "pad"},
            sources=tuple(one.evened(inner) for one in self.sources),
        )

    def outline(self, ranks: tuple[int, int] | None = None) -> Outline:
        ranks = ranks or self.ranks
        return Outline(
            ranks=ranks,
            world_size=1 if ranks is None else ranks[1],
            readers=self.num_readers,
            total=self.total(),
            is_endless=self.is_endless,
            continues=self.continues,
            chosen_epoch=self._epoch if self._is_chosen else None,
            reread=self.reread,
            end_talk=self._end_talk,
        )

    def _end_talk(self, tail: Tail, at: tuple[int, int]) -> EpochEndRounds | None:
        store, (rank, ranks) = self.rank_store.resolved(), self.ranks or (0, 1)
        if store is None:
            return None
        what = [self.describe(), self.places(), tail]
        return EpochEndRounds(store, rank, ranks, what=what, at=at, name=repr(self))

    def carried(self, state: State, passed: int, share: ReaderShare) -> State | None:  # noqa: ARG002
        """Return where a cursor begins the epoch after one that stopped at ``state``.

        So many samples were ``passed`` on after it. None: at the beginning.
        """
        return None

    def following(self, state: State, epoch: int, workers: int = 1) -> State:
        ranks = (self.ranks or (0, 1))[1] * workers
        readers, streams = state["readers"], dict[str, State]()
        # Ranks of uneven parts end at different positions; the epoch is over for all.
        least = (self.total() or 0) if state.get("ended") else 0
        position = max(state["position"], least)
        for name, one in state["streams"].items():
            share = ReaderShare(int(name), readers, ranks=ranks)
            passed = -(-(position - int(name)) // readers) - one["taken"]
            passed = 0 if one.get("ended") else max(0, passed)
            begins = self.carried(one["state"], passed, share)
            streams[name] = {"taken": 0, "state": begins}
        return state_of(
            stream=self.describe(),
            epoch=self._epoch if self._is_chosen else epoch,
            begun=state["begun"],
            position=0,
            readers=readers,
            streams=streams,
        )

    def load_state_dict(self, state: State, *, strict: bool = True) -> None:
        """Start the next iteration where ``state_dict`` of an iterator was taken.

        The state may come from another number of ranks, if ``merge_states`` made it
        from the states of all. It then sets the number of readers. The data may have
        moved, but the chain of steps must be the same.

        Args:
            state: The state.
            strict: Whether shards must have the same times or ETags as when it was
                saved; if not, only their lengths are compared.

        Raises:
            StateMismatchError: If it is of another version or stream, and names the
                differences; or if it is not as it was saved.
        """
        self.load_position(opened(state), strict=strict)

    def load_position(self, state: State, *, strict: bool = True) -> None:
        self._loaded = self.fitted(state, strict=strict)

    def fitted(self, state: State, *, strict: bool = True) -> State:
        return fitted(state, self.describe(), strict=strict)

    def _clone(self, **changed: Any) -> Self:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__ | changed)
        return clone


# Frameworks add samplers to what is no IterableDataset. It is registered and not a
# base: torch's class adds an `__iter__`, and a stream has none.
IterableDataset.register(Iterated)


class StreamIterator(BlockIterator, Generic[Sample_co]):
    """One iteration; a loader pulls blocks, ``async for`` single samples.

    It reads the positions of a ``deal``; ranks compare their shards by ``agreement``.
    """

    reads_whole = True

    def __init__(
        self,
        stream: Iterated[Sample_co],
        epoch: int,
        deal: ReaderAssignment,
        state: State | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.fills: bool = deal.is_alone
        total = stream.total()
        self.real: int | None = None if total is None else deal.part(total)
        self.leaves_out: bool = stream.leaves_out
        self.refills: bool = stream.refills
        self._stream = stream
        self.epoch = epoch
        self._deal = deal
        fresh = {str(reader): {"taken": 0, "state": {}} for reader in deal.assigned()}
        self._known: State = {
            "stream": stream.describe(),
            "epoch": epoch,
            "begun": epoch if state is None else state["begun"],
            "readers": deal.readers,
        }
        if state is None:
            state = state_of(**self._known, position=0, streams=fresh)
        elif not state["streams"]:  # all are at their beginning
            state = {**state, "streams": fresh}
        self._state = part_of(state, deal)
        # Ranks take turns from the position on, also if not all had as many before.
        position: int = self._state["position"]
        self.at: int = -(-(position - deal.rank) // deal.ranks)
        self._shift = position - self.at * deal.ranks
        self._agreement = agreement
        self._stack = AsyncExitStack()
        self._cursors: list[Cursor] = []
        self._readers: OneReader | ReadersInTurn | None = None
        # The position before samples that ``take`` returned, and how many these are.
        self._mark: State | None = None
        # Their number from each source is counted in the state itself.
        self._is_mixed = stream.is_mixed()
        self._since = 0
        self._is_closed = False
        self._refusal: ShardChangedError | None = None
        self._reading: asyncio.Task[Block] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        return self

    async def __anext__(self) -> Sample_co:
        block: Block | None = None
        if self._readers is not None and self._reading is None and not self._is_closed:
            block = self._readers.take_one()
        if block is None:
            block = await self._next()
        sample = block[0]
        if type(sample) is FailedSample:
            raise sample.error
        result: Sample_co = sample
        return result

    async def _next(self) -> Block:
        """Return a block of one sample, read in a separate task."""
        if self._reading is None:
            if self._is_closed:
                raise StopAsyncIteration
            # If this step is cancelled, the state stays that before it.
            self._state = self.position()
            self._reading = _begun(self.pull(None))
        if not self._reading.done():
            await asyncio.wait([self._reading])  # cancellation does not reach it
        reading, self._reading = self._reading, None
        if reading is None:  # closed meanwhile
            raise StopAsyncIteration
        return reading.result()

    def again(self, state: State | None) -> "StreamIterator[Sample_co]":
        return StreamIterator(self._stream, self.epoch, self._deal, state)

    def take(self, size: int, most: int) -> list[tuple[Block, State]]:
        readers = self._readers
        is_over = self.leaves_out or self._is_closed or self._refusal is not None
        if is_over or not isinstance(readers, OneReader) or not readers.has_more(size):
            return []
        mark, before = self._mark or self._now(), self._since
        blocks = readers.take(size, 1 if self._is_mixed else most)
        self._mark, self._since = mark, before + size * len(blocks)
        position, step = mark["position"], self._deal.ranks
        positions = [
            {**mark, "position": position + (before + size * k) * step}
            for k in range(1, 1 + len(blocks))
        ]
        if blocks and (self._is_mixed or not readers.has_more()):  # exact again
            self._mark, self._since = None, 0
            positions[-1] = self._now()
        return list(zip(blocks, positions, strict=True))

    async def pull(self, limit: int | None, more: int = 0) -> Block:
        """Return the samples at the next ``limit`` positions; None: the next sample.

        Up to so many ``more`` are read with them, if they come quickly.

        If it ``fills``, there are 1 to ``limit``, and an empty block is the end.
        Otherwise there may be fewer. A ``FailedSample`` in a list is a failure,
        and the stream continues after it. Once cancelled, it can only be closed.

        Raises:
            StopAsyncIteration: At the end, if it does not fill; or of single samples.
        """
        block: Block | None = None
        if not self._is_closed:
            if self._refusal is not None:
                raise self._refusal
            readers = self._readers
            if readers is None:
                with under_way(self):
                    readers = self._readers = await self._open()
            try:
                with under_way(self):
                    self._mark, self._since = None, 0
                    pull = readers.one() if limit is None else readers.pull(limit, more)
                    block = await pull
            except ShardChangedError as error:
                # Nothing follows the position of the state, even if pulled again.
                self._refusal = error
                raise
            if block is None:
                self._state = self._now()
                await self._release()
        if block is None and (limit is None or not self.fills):
            raise StopAsyncIteration
        if block is None:
            return []
        return spread(block) if self.leaves_out else block

    async def _open(self) -> OneReader | ReadersInTurn:
        """Open the readers at their positions in the state."""
        deal, listed, found = self._deal, dict[Any, Any](), list[Reader]()
        for number, wanted in zip(deal.assigned(), deal.upcoming(self.at), strict=True):
            known = self._state["streams"][str(number)]
            has_ended = known.get("ended", False)
            first = known["taken"] if has_ended else wanted
            cursor: Cursor | None = None
            if self.fills or not has_ended:
                part = self.epoch, deal.share(number), self._stack, listed
                reading = Reading(*part, self._agreement, self._known["begun"])
                cursor = await self._stream.open(reading, known["state"])
                self._cursors.append(cursor)
                if self.fills:
                    ahead = _AHEAD if self._stream.ahead() is Ahead.FREE else 1
                    how: Any = {"ahead": ahead, "leaves_out": self.leaves_out}
                    return OneReader(cursor, known, first, self.at, **how)
            found.append(Reader(cursor, known, first, deal.stride))
        return ReadersInTurn(deal, found, self.at, self._shift)

    def state_dict(self) -> State:
        """Return the position after the last sample returned, ready for JSON.

        It has the progress of all ranks in step, and the positions of the readers that
        this one reads; ``merge_states`` makes one state from those of all ranks.
        """
        return sealed(self.position())

    def position(self) -> State:
        """Return the state without its checksum, which takes longer."""
        if self._reading is not None or self._is_closed:
            return self._state
        if self._mark is None:
            return self._now()
        position = self._mark["position"] + self._since * self._deal.ranks
        return {**self._mark, "position": position}

    def _now(self) -> State:
        readers, deal = self._readers, self._deal
        if readers is None:
            return self._state
        position = readers.at * deal.ranks + self._shift
        end = {"ended": True} if readers.has_ended() else {}
        streams = dict(zip(map(str, deal.assigned()), readers.states(), strict=True))
        return state_of(**self._known, position=position, streams=streams, **end)

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end; if cancelled, it continues."""
        if self._closing is None:
            self._closing = _begun(self._close())
        await asyncio.wait([self._closing])
        self._closing.result()

    async def _close(self) -> None:
        self._settle()
        reading, self._reading = self._reading, None
        if reading is not None:
            await cancel([reading])
        await self._release()

    def _settle(self) -> None:
        self._state = self.position()
        self._is_closed = True

    async def _release(self) -> None:
        """Close what is open; can be called again if that was cancelled."""
        self._settle()
        async with self._stack:
            if self._readers is not None:
                await self._readers.aclose()
            for cursor in self._cursors:
                await cursor.aclose()
        self._cursors = []

    def lifespan(self) -> Self:
        """Return itself: leaving it closes it."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()


def _begun(job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task; where Python allows it, it has already run to its first wait."""
    if sys.version_info >= (3, 12):
        loop = asyncio.get_running_loop()
        return asyncio.Task(job, loop=loop, eager_start=True)
    return asyncio.create_task(job)
