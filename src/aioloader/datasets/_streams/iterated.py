"""The base of all streams, with iteration, sharding among ranks, and positions.

Cancelling ``anext`` of an iterator loses no samples. The read continues in a separate
task, and the next ``anext`` gets its result.
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
_MAX_AHEAD = 256
_GROUP_STORE = RankStore()  # the store of the process group, if there is one


class Iterated(Dataset[Sample_co], OwnStream):
    """The base of all streams; ``Stream`` adds methods that append steps."""

    sources: "tuple[Iterated[Any], ...]" = ()  # the streams that this stream reads
    leaves_out = False  # whether other samples take the places of failed ones
    refills = False  # whether the first samples are repeated until all ranks end

    # Without this, `for x in stream` would call `__getitem__`, and never end.
    __iter__: ClassVar[None] = None

    def __init__(self, *sources: "Iterated[Any]") -> None:
        self._epoch = 0
        self._is_chosen = False
        self._loaded: State | None = None
        self.sources = sources
        first: Any = sources[0] if sources else None  # its settings apply
        self.ranks: tuple[int, int] | None = getattr(first, "ranks", None)
        self.has_peers: bool = getattr(first, "has_peers", False)
        self.num_readers: int | None = getattr(first, "num_readers", None)
        self.rank_store: RankStore = getattr(first, "rank_store", _GROUP_STORE)
        self.is_endless: bool = any(source.is_endless for source in sources)
        self.continues: bool = any(source.continues for source in sources)
        self.reread: list[str] = [name for up in sources for name in up.reread]

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        """Return an iterator over this rank's part of the current epoch.

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
        assignment = ReaderAssignment(rank * workers + number, ranks, readers)
        if (cost := assignment.cost()) is not None:
            warn(cost)
        agrees = world_size > 1 or self.has_peers
        store = self.rank_store.resolved() if agrees else None
        agreement: Agreement | None = None
        if store is not None:
            agreement = Agreement(store, assignment.rank, ranks, epoch, workers)
        iterator = StreamIterator(self, epoch, assignment, state, agreement)
        self._loaded = None
        if driver is None and not self._is_chosen:
            self._epoch = epoch + 1
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Iterate in the order of ``epoch`` until the next call of ``set_epoch``."""
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
        """Return a copy of the stream that reads the part of one rank.

        Args:
            rank: The number of the rank.
            world_size: The number of ranks.
            has_peers: Whether other processes read the same part, as tensor-parallel
                ones do. Such processes agree on shards even if there is only one rank.

        Raises:
            ValueError: If ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range({world_size}), got {rank}")
        ranks = operator.index(rank), operator.index(world_size)
        return self._clone(ranks=ranks, has_peers=has_peers)

    def agree(self, store: Any = None, *, timeout: float | None = None) -> Self:
        """Let the ranks agree through a store of ``torch.distributed``.

        The first rank to arrive stores what it found (names, or the keys where a table
        is cut). Other ranks use this as well, or raise an error, so no samples are
        lost or duplicated if the list changes. No rank waits for another here. With the
        loader's ``tail``, ranks also agree on the end of an epoch of unknown length.
        Processes that read the same part, as tensor-parallel ones do, agree like ranks.

        Args:
            store: Shared by all ranks, and used by this run alone: a ``TCPStore`` or a
                ``FileStore``, say. Default: the process group's store, if there is one.
            timeout: Seconds that one operation of the store may take (default: 60), and
                that a rank waits for another at the end (default: 1,800).
        """
        return self._clone(rank_store=RankStore(store, timeout))

    def readers(self, count: int) -> Self:
        """Fix the number of readers, so that the order fits any number of ranks.

        Readers take turns, sample by sample, and ranks share the readers. The ``k``-th
        batches of all ranks together have the same samples for any number of ranks, if
        the batches' total size is the same. A reader that ends early leaves its turns
        empty. By default each rank (each worker, with ``fetch="workers"``) is one
        reader, so the order depends on the number of ranks (or workers).

        Each reader has separate slots, steps and ``shuffle`` windows, and reads an
        iterable from its start; all readers of a rank share ``max_bytes``. There must
        be at least as many shards as readers. ``count`` should be a multiple of all
        planned numbers of ranks (24 for 1, 2, 3, 4, 6, 8 and 12): otherwise several
        ranks read the same reader, and a warning says so.

        Raises:
            ValueError: If ``count`` is below 1.
        """
        return self._clone(num_readers=check_at_least(count, 1, "count"))

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor at ``state``, or at the beginning if the state is empty."""
        raise NotImplementedError

    def describe(self) -> State:
        """Return a JSON-serialisable description, which a loaded state must match.

        It contains everything that determines the samples and their order: ``"kind"``,
        parameters, and ``"of"``, the previous step's description. It omits the shard
        names (summarised in the state itself), the data's location, credentials, caches
        and read-ahead. Different function names (``"function"``) only cause a warning.
        """
        return {"kind": type(self).__name__}

    def ahead(self) -> Ahead:
        """Return how far this stream may be read ahead of the samples passed on."""
        return min((source.ahead() for source in self.sources), default=Ahead.FREE)

    def total(self) -> int | None:
        """Return the number of samples in an epoch of all ranks; None if unknown."""
        return None

    def is_mixed(self) -> bool:
        """Tell whether samples of several sources alternate."""
        return len(self.sources) > 1 or any(up.is_mixed() for up in self.sources)

    def places(self) -> list[str]:
        """Return labels of the sources, which tell equally described streams apart."""
        return [place for source in self.sources for place in source.places()]

    def evened(self, tail: Tail, *, is_skipped: bool = False) -> Self:  # noqa: ARG002
        """Return a copy of the stream that evens the ranks' parts as ``tail`` says.

        If the length is known, the sources are evened in the same way. Failed samples
        of sources count as samples, because later steps of the stream may also fail.
        """
        is_known = self.total() is not None
        inner: Tail = tail if is_known else "uneven"
        is_open = not (is_known or self.is_endless)
        return self._clone(
            refills=is_open and tail in {"wrap", "pad"},
            sources=tuple(source.evened(inner) for source in self.sources),
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
            end_talk=self._end_rounds,
        )

    def _end_rounds(self, tail: Tail, start: tuple[int, int]) -> EpochEndRounds | None:
        store, (rank, ranks) = self.rank_store.resolved(), self.ranks or (0, 1)
        if store is None:
            return None
        subject = [self.describe(), self.places(), tail]
        return EpochEndRounds(store, rank, ranks, subject, start, repr(self))

    def carried(self, state: State, passed: int, share: ReaderShare) -> State | None:  # noqa: ARG002
        """Return a reader's first state in the next epoch; None for the beginning.

        In this epoch, the reader passed on ``passed`` samples after ``state``.
        """
        return None

    def following(self, state: State, epoch: int, workers: int = 1) -> State:
        ranks = (self.ranks or (0, 1))[1] * workers
        readers, streams = state["readers"], dict[str, State]()
        # Ranks of uneven parts end at different positions; the epoch is over for all.
        least = (self.total() or 0) if state.get("ended") else 0
        position = max(state["position"], least)
        for name, reader in state["streams"].items():
            share = ReaderShare(int(name), readers, ranks=ranks)
            passed = -(-(position - int(name)) // readers) - reader["taken"]
            passed = 0 if reader.get("ended") else max(0, passed)
            first = self.carried(reader["state"], passed, share)
            streams[name] = {"taken": 0, "state": first}
        return state_of(
            stream=self.describe(),
            epoch=self._epoch if self._is_chosen else epoch,
            begun=state["begun"],
            position=0,
            readers=readers,
            streams=streams,
        )

    def load_state_dict(self, state: State, *, strict: bool = True) -> None:
        """Start the next iteration where an iterator's ``state_dict`` was saved.

        The number of ranks may differ if ``merge_states`` made the state from the
        states of all ranks. The state also sets the number of readers. The data may
        have moved, but the chain of steps must be the same.

        Args:
            state: The state.
            strict: Whether shards must have the same times or ETags as when the state
                was saved; if not, only their lengths are compared.

        Raises:
            StateMismatchError: If the state is of another version or stream (the error
                names the differences), or was modified.
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


# Frameworks add samplers to all but IterableDatasets. Streams are registered as such
# instead of derived, because torch's class has an `__iter__`, and a stream has none.
IterableDataset.register(Iterated)


class StreamIterator(BlockIterator, Generic[Sample_co]):
    """One iteration of a stream; a loader pulls blocks, ``async for`` single samples.

    ``assignment``: the readers to use. ``agreement``: compares the ranks' shards.
    """

    reads_whole = True

    def __init__(
        self,
        stream: Iterated[Sample_co],
        epoch: int,
        assignment: ReaderAssignment,
        state: State | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.fills: bool = assignment.is_alone
        total = stream.total()
        self.real: int | None = None if total is None else assignment.part(total)
        self.leaves_out: bool = stream.leaves_out
        self.refills: bool = stream.refills
        self._stream = stream
        self.epoch = epoch
        self._assignment = assignment
        fresh = {str(k): {"taken": 0, "state": {}} for k in assignment.assigned()}
        self._known: State = {
            "stream": stream.describe(),
            "epoch": epoch,
            "begun": epoch if state is None else state["begun"],
            "readers": assignment.readers,
        }
        if state is None:
            state = state_of(**self._known, position=0, streams=fresh)
        elif not state["streams"]:  # all are at their beginning
            state = {**state, "streams": fresh}
        self._state = part_of(state, assignment)
        # Ranks take turns from this position on, even if their counts differed before.
        position: int = self._state["position"]
        self.at: int = -(-(position - assignment.rank) // assignment.ranks)
        self._shift = position - self.at * assignment.ranks
        self._agreement = agreement
        self._stack = AsyncExitStack()
        self._cursors: list[Cursor] = []
        self._readers: OneReader | ReadersInTurn | None = None
        # A state, and how many samples ``take`` has returned since it was made.
        self._mark: State | None = None
        self._since = 0
        # A mixture's state counts samples by source, so it is taken after each block.
        self._is_mixed = stream.is_mixed()
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
        """Return a block of one sample, read in a task that outlives a cancellation."""
        if self._reading is None:
            if self._is_closed:
                raise StopAsyncIteration
            self._state = self.position()  # stays if this step is cancelled
            self._reading = _start(self.pull(None))
        if not self._reading.done():
            await asyncio.wait([self._reading])  # cancellation does not reach it
        reading, self._reading = self._reading, None
        if reading is None:  # closed meanwhile
            raise StopAsyncIteration
        return reading.result()

    def again(self, state: State | None) -> "StreamIterator[Sample_co]":
        return StreamIterator(self._stream, self.epoch, self._assignment, state)

    def take(self, size: int, most: int) -> list[tuple[Block, State]]:
        readers = self._readers
        is_over = self.leaves_out or self._is_closed or self._refusal is not None
        if is_over or not isinstance(readers, OneReader) or not readers.has_more(size):
            return []
        mark, before = self._mark or self._now(), self._since
        blocks = readers.take(size, 1 if self._is_mixed else most)
        self._mark, self._since = mark, before + size * len(blocks)
        start, step = mark["position"], self._assignment.ranks
        states = [
            {**mark, "position": start + (before + size * k) * step}
            for k in range(1, 1 + len(blocks))
        ]
        if blocks and (self._is_mixed or not readers.has_more()):  # exact again
            self._mark, self._since = None, 0
            states[-1] = self._now()
        return list(zip(blocks, states, strict=True))

    async def pull(self, limit: int | None, more: int = 0) -> Block:
        """Return the samples at the next ``limit`` positions; None means one sample.

        Up to ``more`` samples are read in advance if they come quickly. If the iterator
        ``fills``, a block has 1 to ``limit`` samples, and is empty at the end.
        Otherwise any block may be empty. A ``FailedSample`` in a list is a failure; the
        stream continues after it. Once cancelled, the iterator can only be closed.

        Raises:
            StopAsyncIteration: At the end, if ``limit`` is None or ``fills`` is false.
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
                # No sample follows the position in the state: raise it again.
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
        assignment, listed, readers = self._assignment, dict[Any, Any](), list[Reader]()
        each = zip(assignment.assigned(), assignment.upcoming(self.at), strict=True)
        for number, wanted in each:
            known = self._state["streams"][str(number)]
            has_ended = known.get("ended", False)
            first = known["taken"] if has_ended else wanted
            cursor: Cursor | None = None
            if self.fills or not has_ended:
                part = self.epoch, assignment.share(number), self._stack, listed
                reading = Reading(*part, self._agreement, self._known["begun"])
                cursor = await self._stream.open(reading, known["state"])
                self._cursors.append(cursor)
                if self.fills:
                    ahead = _MAX_AHEAD if self._stream.ahead() is Ahead.FREE else 1
                    options: Any = {"ahead": ahead, "leaves_out": self.leaves_out}
                    return OneReader(cursor, known, first, self.at, **options)
            readers.append(Reader(cursor, known, first, assignment.stride))
        return ReadersInTurn(assignment, readers, self.at, self._shift)

    def state_dict(self) -> State:
        """Return the position after the last sample returned, as JSON-ready data.

        It contains all ranks' progress, if they are in step, and the positions of this
        rank's readers. ``merge_states`` combines the states of all ranks.
        """
        return sealed(self.position())

    def position(self) -> State:
        """Return what ``state_dict`` does, but without the checksum, to save time."""
        if self._reading is not None or self._is_closed:
            return self._state
        if self._mark is None:
            return self._now()
        position = self._mark["position"] + self._since * self._assignment.ranks
        return {**self._mark, "position": position}

    def _now(self) -> State:
        readers, assignment = self._readers, self._assignment
        if readers is None:
            return self._state
        position = readers.position * assignment.ranks + self._shift
        end = {"ended": True} if readers.has_ended() else {}
        names = map(str, assignment.assigned())
        streams = dict(zip(names, readers.states(), strict=True))
        return state_of(**self._known, position=position, streams=streams, **end)

    async def aclose(self) -> None:
        """Stop pending work and wait until it ends; if cancelled, closing continues."""
        if self._closing is None:
            self._closing = _start(self._close())
        await asyncio.wait([self._closing])
        self._closing.result()

    async def _close(self) -> None:
        self._settle()
        reading, self._reading = self._reading, None
        if reading is not None:
            await cancel([reading])
        await self._release()

    def _settle(self) -> None:
        """Keep the current position as the final state, and refuse further reads."""
        self._state = self.position()
        self._is_closed = True

    async def _release(self) -> None:
        """Close the readers and cursors; may be called again if cancelled."""
        self._settle()
        async with self._stack:
            if self._readers is not None:
                await self._readers.aclose()
            for cursor in self._cursors:
                await cursor.aclose()
        self._cursors = []

    def lifespan(self) -> Self:
        """Return this iterator, a context manager that closes the iterator on exit."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()


def _start(job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task; Python 3.12 and later run it at once up to its first wait."""
    if sys.version_info >= (3, 12):
        loop = asyncio.get_running_loop()
        return asyncio.Task(job, loop=loop, eager_start=True)
    return asyncio.create_task(job)
