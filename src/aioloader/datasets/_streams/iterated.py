"""What all streams share: descriptions, iteration, sharing among ranks, resuming."""

import math
import operator
from typing import Any, ClassVar, Self, TypeVar

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from aioloader._observe.warnings import warn
from aioloader._order.ranks import Tail
from aioloader._order.shares import Deal, Share
from aioloader._order.stream_states import opened, state_of
from aioloader.datasets._options import check_at_least
from aioloader.datasets._streams.agreement import RankStore
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State
from aioloader.datasets._streams.descriptions import fitted
from aioloader.datasets._streams.end_talk import StoreTalk
from aioloader.datasets._streams.iterators import StreamIterator
from aioloader.protocols import OwnStream

Sample_co = TypeVar("Sample_co", covariant=True)


class Iterated(Dataset[Sample_co], OwnStream):
    """The part of a stream that is not a step.

    Attributes:
        rank_store: Where ranks compare their lists of shards.
        leaves_out: Whether failed samples do not count, because others take their
            places.
        is_inner: Whether a stream that has it as its source shares it among workers.
        refills: Whether samples of the beginning are repeated until all ranks end.
    """

    leaves_out = False
    is_inner = False
    refills = False

    # Without this, `for x in stream` would ask for `__getitem__`, and never end.
    __iter__: ClassVar[None] = None

    def __init__(self) -> None:
        self._epoch = 0
        self._is_chosen = False
        self.ranks: tuple[int, int] | None = None
        self.num_readers: int | None = None
        self._loaded: State | None = None
        self.rank_store: RankStore = RankStore()

    # -- iterating ----------------------------------------------------------------

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        """Return an iteration over this rank's part.

        Raises:
            StateMismatchError: If a loaded state lacks a reader of this rank.
        """
        state = self._loaded
        epoch = self._epoch if state is None else state["epoch"]
        deal = self._deal(None if state is None else state["readers"])
        cost = deal.cost()
        if cost is not None:
            warn(cost)
        iterator: StreamIterator[Sample_co]
        store = self.rank_store.found() if (self.ranks or (0, 1))[1] > 1 else None
        iterator = StreamIterator(self, epoch, deal, state, store)
        self._loaded = None
        if not self._is_chosen:
            self._epoch = epoch + 1
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, until another epoch is chosen."""
        self._epoch = operator.index(epoch)
        self._is_chosen = True

    def begin_epoch(self, epoch: int) -> None:
        """Take the number of a new epoch, unless the user has chosen one."""
        if not self._is_chosen:
            self._epoch = epoch

    def for_epoch(self) -> Self:
        """Return a copy to be read, in workers too, with the loaded state."""
        clone = self._clone()
        self._loaded = None
        return clone

    def shard(self, rank: int, world_size: int) -> Self:
        """Read the part of one rank.

        Raises:
            ValueError: If ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range({world_size}), got {rank}")
        clone = self._clone()
        clone.ranks = operator.index(rank), operator.index(world_size)
        return clone

    def agree(self, store: Any = None, *, timeout: float | None = None) -> Self:
        """Let the ranks agree through a store of ``torch.distributed``.

        Where ranks share a stream, the first one to arrive stores what it found (names,
        or the keys where a table is cut), and the others adopt it or raise an error: a
        list that changes loses and duplicates nothing. No rank waits for another. With
        the loader's ``tail`` they also agree on the end of an epoch of unknown length.

        Args:
            store: Shared by all ranks, and used by this run alone: a ``TCPStore`` or a
                ``FileStore``, say. Default: that of the process group, if there is one.
            timeout: Seconds that one operation of the store may take (default: 60), and
                that a rank waits for another at the end (default: 1,800).
        """
        clone = self._clone()
        clone.rank_store = RankStore(store, timeout)
        return clone

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
        check_at_least(count, 1, "count")
        clone = self._clone()
        clone.num_readers = operator.index(count)
        return clone

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead of the samples passed on."""
        return Ahead.FREE

    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if known.

        It is known where ``epoch_length`` is the last step that changes their number.
        """
        return None

    def reread(self) -> list[str]:
        """Return the names of its parts without a state, which are read again."""
        return []

    def is_endless(self) -> bool:
        """Tell whether an epoch never ends."""
        return False

    def places(self) -> list[str]:
        """Return what distinguishes its sources from others of equal description."""
        return []

    def check_batches(self, ranks: int, size: int) -> None:
        """Check that in each step all ranks deliver a batch, or have ended.

        A reader that has ended leaves its turns empty. A batch with fewer samples than
        the rank has readers may then be empty, so the rank would deliver its next one
        while others deliver this one.

        Raises:
            ValueError: If not: their states could not be merged.
        """
        readers = self.num_readers or ranks
        least = readers // math.gcd(readers, ranks)
        end_together = self.is_endless() or self.total() is not None
        if ranks == 1 or size >= least or end_together:
            return
        raise ValueError(
            f"batches of {size} samples are too small for readers({readers}) on "
            f"{ranks} ranks (times workers): each takes turns at {least} readers, so "
            "when some have ended, a batch may be empty, ranks are no longer in step, "
            f"and their states cannot be merged; use a batch_size of {least} or more, "
            f"readers({ranks}), or epoch_length(count)"
        )

    def evened(
        self,
        tail: Tail,
        *,
        is_skipped: bool = False,  # noqa: ARG002  (used by subclasses)
    ) -> Self:
        """Return the stream whose ranks have equal parts.

        Args:
            tail: ``"drop"``: the remainder is dropped; ``"wrap"`` and ``"pad"``: some
                ranks have more, of a known total one sample; ``"uneven"``: nothing is
                done.
            is_skipped: Whether failed samples are left out.
        """
        clone = self._clone()
        is_open = self.total() is None and not self.is_endless()
        clone.refills = is_open and tail in {"wrap", "pad"}
        return clone

    def has_store(self) -> bool:
        """Tell whether its ranks can agree through a store now."""
        return self.rank_store.found() is not None

    def end_talk(self, tail: Tail, at: tuple[int, int]) -> StoreTalk:
        """Return what its ranks agree by on the end of an iteration.

        Args:
            tail: What happens to the remainder.
            at: The epoch, and how many of its batches were delivered before.
        """
        store, (rank, ranks) = self.rank_store.found(), self.ranks or (0, 1)
        assert store is not None
        what = [self.describe(), self.places(), tail]
        return StoreTalk(store, rank, ranks, what=what, at=at, name=repr(self))

    def carried(
        self,
        state: State,  # noqa: ARG002  (used by subclasses)
        passed: int,  # noqa: ARG002
        share: Share,  # noqa: ARG002
    ) -> State | None:
        """Return where a cursor begins the epoch after one that stopped at ``state``.

        Args:
            state: A state of the cursor in the earlier epoch.
            passed: How many samples were delivered after it.
            share: The reader's part of the stream.

        Returns:
            A state; None if each epoch starts at the beginning.
        """
        return None

    def continues(self) -> bool:
        """Tell whether an epoch continues where the previous one stopped."""
        return self.carried({}, 0, Share()) is not None

    def following(self, state: State, epoch: int, workers: int = 1) -> State:
        """Return where the epoch after one that stopped at ``state`` starts.

        Args:
            state: The state of an iterator; the stream ``continues``.
            epoch: Number of the next epoch, unless the user has chosen one.
            workers: Number of workers of each rank that read.
        """
        ranks = (self.ranks or (0, 1))[1] * workers
        readers, streams = state["readers"], dict[str, State]()
        for name, one in state["streams"].items():
            share = Share(int(name), readers, ranks=ranks)
            passed = -(-(state["position"] - int(name)) // readers) - one["taken"]
            passed = 0 if one.get("ended") else max(0, passed)
            begins = self.carried(one["state"], passed, share)
            streams[name] = {"taken": 0, "state": begins}
        epoch = self._epoch if self._is_chosen else epoch
        begun = state["begun"]
        return state_of(self.describe(), epoch, readers, 0, streams, begun=begun)

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
        """Start the next iteration at the ``position`` of an iterator."""
        self._loaded = self.fitted(state, strict=strict)

    def fitted(self, state: State, *, strict: bool = True) -> State:
        """Return a state in the form ``load_state_dict`` takes; raise or warn like it.

        Raises:
            StateMismatchError: If it is of another version or stream.
        """
        return fitted(state, self.describe(), strict=strict and "strict" not in state)

    def _clone(self) -> Self:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def _deal(self, readers: int | None) -> Deal:
        """Return the part of this rank, or of this worker of it."""
        rank, world_size = self.ranks or (0, 1)
        worker = None if self.is_inner else get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks = world_size * workers
        return Deal(
            rank * workers + number, ranks, readers or self.num_readers or ranks
        )

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


# Frameworks add samplers to what is no IterableDataset. It is registered and not a
# base: torch's class adds an `__iter__`, and a stream has none.
IterableDataset.register(Iterated)
