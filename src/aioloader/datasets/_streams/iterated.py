"""What all streams are: described, iterated, shared out to ranks, and resumed."""

import operator
from typing import Any, ClassVar, Self, TypeVar

from torch.utils.data import Dataset, get_worker_info

from aioloader._observe.warnings import warn
from aioloader._order.ranks import Tail
from aioloader._order.shares import Deal
from aioloader.datasets._options import check_at_least
from aioloader.datasets._streams.agreement import TIMEOUT, RankStore
from aioloader.datasets._streams.cursors import Ahead, Cursor, State
from aioloader.datasets._streams.descriptions import fitted
from aioloader.datasets._streams.iterators import Reading, StreamIterator
from aioloader.protocols import OwnStream

Sample_co = TypeVar("Sample_co", covariant=True)


class Iterated(Dataset[Sample_co], OwnStream):
    """What of a stream is not a step.

    Attributes:
        rank_store: Where ranks compare their lists of shards.
        leaves_out: Whether samples that failed do not count, for others take their
            places.
    """

    leaves_out = False

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
        """Return an iteration over what this rank reads.

        Raises:
            StateMismatchError: If a loaded state lacks what this rank reads.
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
        """Choose the order of ``epoch``, until another one is chosen."""
        self._epoch = operator.index(epoch)
        self._is_chosen = True

    def begin_epoch(self, epoch: int) -> None:
        """Take the number of an epoch that begins, unless the user has chosen one."""
        if not self._is_chosen:
            self._epoch = epoch

    def for_epoch(self) -> Self:
        """Return a copy to be read, in workers too; a loaded state goes with it."""
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
        clone.ranks = rank, world_size
        return clone

    def agree(self, store: Any = None, *, timeout: float = TIMEOUT) -> Self:
        """Compare the shards of all ranks through a store of ``torch.distributed``.

        Where ranks share a stream, the first one to come leaves there what it has found
        (names, or the keys where a table is cut), and the others take it over or are an
        error, so that a list that changes loses and doubles nothing. No rank waits for
        another one.

        Args:
            store: The same for all ranks, and of this run alone: a ``TCPStore`` or a
                ``FileStore``, say. Default: that of the process group, if there is one.
            timeout: Seconds that an operation of the store may take.
        """
        clone = self._clone()
        clone.rank_store = RankStore(store, timeout)
        return clone

    def readers(self, count: int) -> Self:
        """Make the order of ``count`` readers, so that any number of ranks has it.

        Readers take turns, sample by sample, and ranks share them: the samples of all
        ranks' batches number ``k`` are the same ones for each number of ranks, if their
        sizes add up to the same. A reader that ends before the others leaves its turns
        empty. Without this method each rank (each worker, with ``fetch="workers"``) is
        one reader, and the order depends on how many there are.

        Each reader has lanes, steps and windows of ``shuffle`` of its own, and reads an
        iterable from the front by itself; ``max_bytes`` is for all on one rank. So
        there must be as many shards; and best it is a multiple of all numbers of ranks
        that are to come (24 for 1, 2, 3, 4, 6, 8 and 12): others read some readers more
        than once, and warn.

        Raises:
            ValueError: If ``count`` is below 1.
        """
        check_at_least(count, 1, "count")
        clone = self._clone()
        clone.num_readers = operator.index(count)
        return clone

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead of what is passed on."""
        return Ahead.FREE

    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if that is known.

        It is where ``epoch_length`` is the last step that changes their number.
        """
        return None

    def evened(
        self,
        tail: Tail,  # noqa: ARG002  (for those that know how)
        *,
        is_skipped: bool = False,  # noqa: ARG002
    ) -> Self:
        """Return the stream whose ranks have equal parts of a known total.

        Args:
            tail: ``"drop"``: what is left over is dropped; ``"wrap"`` and ``"pad"``:
                some ranks have one sample more; ``"uneven"``: nothing is done.
            is_skipped: Whether samples that failed are left out.
        """
        return self

    def load_state_dict(self, state: State, *, strict: bool = True) -> None:
        """Begin the next iteration where ``state_dict`` of an iterator was taken.

        It may have been taken on another number of ranks, if it is what
        ``merge_states`` made of the states of all. The number of readers is then that
        of the state. The data may have moved, but the chain of steps must be the same.

        Args:
            state: The state.
            strict: Whether a state of another stream is an error. If not, the epoch is
                loaded, the position in each source that is the same, and the state of
                steps that are the same; a warning says what is ignored.

        Raises:
            StateMismatchError: If it is of another version or stream; names what
                differs.
        """
        self._loaded = self.fitted(state, strict=strict)

    def fitted(self, state: State, *, strict: bool = True) -> State:
        """Return a state as ``load_state_dict`` takes it; raise or warn as that does.

        Raises:
            StateMismatchError: If it is of another version or stream.
        """
        return fitted(state, self.describe(), strict=strict and "strict" not in state)

    def _clone(self) -> Self:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def _deal(self, readers: int | None) -> Deal:
        """Return what this rank, or this worker of it, reads."""
        rank, world_size = self.ranks or (0, 1)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks = world_size * workers
        return Deal(
            rank * workers + number, ranks, readers or self.num_readers or ranks
        )

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""
        raise NotImplementedError

    def describe(self) -> State:
        """Return what a state is bound to, ready for JSON.

        That is what determines the samples and their order, but for the names of the
        shards, which the state itself holds: ``"kind"``, parameters, and ``"of"``, the
        same of the stream before it. Not: where the data lies, credentials, caches and
        what is read ahead. Under ``"function"`` are names of the user's functions: if
        they differ, that is a warning only.
        """
        return {"kind": type(self).__name__}
