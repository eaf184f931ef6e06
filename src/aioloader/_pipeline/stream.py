"""Iterable datasets: one stream, read in blocks and cut into batches.

``SyncStream`` is read in a thread, ``AsyncStream`` on the loop; both run the same code.
Samples are numbered by their position in the stream. Once it has ended, every later
request ends at once. With several ranks, each reads the whole stream and keeps its
part.
"""

import abc
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch.utils.data import get_worker_info

from aioloader._collate.collate import default_collate
from aioloader._order.blocks import Bad, Block, join
from aioloader._order.failures import SKIP, noted
from aioloader._order.raising import STOPS, Carried, ends_task, raisable
from aioloader._pipeline.awaiting import run_now
from aioloader._pipeline.batch_maker import BatchMaker, Keys
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask
from aioloader._pipeline.block_sources import (
    BlockSource,
    IteratorSource,
    OwnSource,
    Read,
    open_async,
)
from aioloader._pipeline.position import Position, StreamState
from aioloader.errors import DatasetError, ShardChangedError
from aioloader.protocols import BlockIterator, OwnStream


class _Stream(abc.ABC):
    """Read the batches of one stream: ranks, tails, failures, resuming, state.

    Args:
        maker: The user's functions, and which part of the stream is read here.
        resume: Where to start; None: at the beginning.
        keys: Seeds of the batches that are read again to resume; None: no seeds.

    Attributes:
        is_on_loop: Whether coroutines read it. If not, the global generators are
            seeded while it is read.
    """

    is_on_loop: ClassVar[bool]

    def __init__(
        self,
        maker: BatchMaker,
        *,
        resume: StreamState | None = None,
        keys: Keys | None = None,
    ) -> None:
        self._maker = maker
        self._drop_last = maker.drop_last
        self._keys = keys
        self._position = Position(maker.dataset, resume, maker.loads)
        self._rank, self._ranks = maker.part.rank, maker.part.world_size
        self._source: BlockSource | None = None
        self._first: Read | None = None  # what was read to look at the dataset's state
        self._has_ended = False
        self._owed = 0  # positions of a failed batch that other ranks still read
        # With several ranks: the latest sample of all and of this one, for padding.
        self._latest: Any = MISSING
        self._latest_mine: Any = MISSING
        # Whether any sample was read without an error; the errors of the others.
        self._has_good = self._position.read > 0
        self._lost: list[BaseException] = []
        self._real: int | None = None  # samples that are not padding, if known

    @abc.abstractmethod
    async def _open(self, task: BatchTask) -> BlockSource:
        """Open the dataset and the iterator, at the position to resume."""

    async def _read(self, task: BatchTask) -> None:
        """Read the samples of ``task``, or set the end as its result."""
        task.began = perf_counter()
        wanted = len(task.indices) * self._ranks
        found = 0
        self._maker.policy.begin(0 if task.again else len(task.indices))
        try:
            await self._prepare(task, wanted)
            while found < wanted and not (task.again or self._has_ended):
                found += await self._add_block(task, found, wanted)
            if task.again or (len(task.samples) and not self._drop_last):
                await self._refill(task)
            if task.again:
                self._repeated(task)
            else:
                self._finish(task, found, wanted)
        except (*STOPS, Carried) as error:
            if self.is_on_loop and ends_task(error):
                raise
            # No variable may hold it: its traceback has this frame.
            raise self._noted(raisable(error, "the dataset"), task)  # noqa: B904  (it keeps its cause)
        task.read = perf_counter()

    def _noted(self, error: BaseException, task: BatchTask) -> BaseException:
        return noted(error, self._maker.place("fetch", task))

    def _name(self) -> str:
        return type(self._maker.dataset).__name__

    # -- before the samples of a batch ------------------------------------------------

    async def _prepare(self, task: BatchTask, wanted: int) -> None:
        """Open the stream if needed, and advance to the first sample of ``task``."""
        try:
            if self._source is None and not self._has_ended:
                await self._resume(task, wanted)
                # A stream that had ended is opened too: its dataset may have a state.
                self._has_ended |= self._position.has_ended
            owed, self._owed = self._owed, 0
            self._position.read += await self._drop(owed)
        except BaseException as error:
            self._has_ended = True  # an error whatever the policy
            self._noted(error, task)
            raise

    async def _resume(self, task: BatchTask, wanted: int) -> None:
        """Open the stream and drop the samples delivered before ``task``.

        They are read again with the seeds of their batches.
        """
        kept = self._maker.loads.kept_generator()
        left = self._position.to_skip
        earlier = -(-left // wanted)
        for number in range(task.number - earlier, task.number):
            before = BatchTask(number, task.indices)
            if self._keys is not None:
                before.key, before.sample_keys = self._keys(number, wanted)
            with nullcontext() if self.is_on_loop else self._maker.around(before):
                if self._source is None:
                    self._source = await self._begin(before)
                left -= await self._drop(min(wanted, left))
        if left > 0:
            raise ShardChangedError(
                f"{self._name()} ended after {self._position.read - left:,} samples, "
                f"but the state was saved after {self._position.read:,}; resume with "
                "the same samples, or restart the epoch"
            )
        if earlier:
            self._reseed(task)
        if self._source is None:
            self._source = await self._begin(task, kept)
        elif kept is not None:
            torch.set_rng_state(kept)

    async def _begin(
        self, task: BatchTask, kept: torch.Tensor | None = None
    ) -> BlockSource:
        """Open the dataset where this epoch starts."""
        before = None if self.is_on_loop else torch.get_rng_state()
        source = await self._open(task)
        if kept is not None:
            torch.set_rng_state(kept)
        if not self._position.is_doubtful:
            return source
        first = await source.read(1)
        if not self._position.starts_again(is_empty=not len(first.block)):
            self._first = first
            return source
        source = await self._open(task)
        if before is not None:
            torch.set_rng_state(before)
        return source

    async def _next(self, limit: int) -> Read:
        first, self._first = self._first, None
        assert self._source is not None
        return await self._source.read(limit) if first is None else first

    def _reseed(self, task: BatchTask) -> None:
        """Seed the generators for ``task`` again: the user's code may have drawn."""
        if not self.is_on_loop and self._maker.reseed is not None:
            self._maker.reseed(task)

    async def _drop(self, places: int) -> int:
        """Read and drop samples, failed ones too; return how many positions they had.

        An error that ends the stream is raised: nothing was delivered after it.
        """
        dropped = 0
        while dropped < places and not self._has_ended:
            block, more, self._has_ended = await self._next(places - dropped)
            dropped += more
            if len(block) and type(block[-1]) is Bad:
                if self._has_ended:
                    raise block[-1].error
                assert self._source is not None
                dropped -= self._source.leaves_out  # it has no position
        return dropped

    # -- the samples of a batch -----------------------------------------------------

    async def _add_block(self, task: BatchTask, found: int, wanted: int) -> int:
        """Add a block's samples to ``task``; return how many positions were read."""
        block, places, self._has_ended = await self._next(wanted - found)
        last = block[-1] if len(block) and isinstance(block, list) else None
        if type(last) is not Bad:
            self._add(task, block, found)
            return places
        self._add(task, block[:-1], found)
        if self._has_ended:  # skipping it would silently end the epoch early
            raise self._noted(last.error, task)
        if (found + len(block) - 1) % self._ranks == self._rank:
            try:
                is_left_out = self._replace(task, last.error)
            except BaseException:
                # These samples are lost, but they were read.
                self._position.read += found + places
                self._owed = wanted - found - places if self._maker.keeps_step else 0
                raise
            places -= is_left_out
        return places

    def _add(self, task: BatchTask, block: Block, found: int) -> None:
        """Add this rank's samples of ``block``."""
        self._has_good = self._has_good or len(block) > 0
        if self._ranks > 1:
            if len(block):
                self._latest = block[-1]
            block = list(block)[(self._rank - found) % self._ranks :: self._ranks]
            if block:
                self._latest_mine = block[-1]
        task.samples = join([task.samples, block]) if len(task.samples) else block

    def _replace(self, task: BatchTask, error: BaseException) -> bool:
        """Add the replacement of a failed sample, or raise by the policy.

        Return True if there is none and the next sample takes its position.
        """
        sample = self._maker.resolve("fetch", task, len(task.samples), error)
        if sample is not SKIP:
            self._has_good = True
        elif not self._has_good:
            self._lost = [*self._lost[-1:], error]
        assert self._source is not None
        if sample is SKIP and self._source.leaves_out:
            self._maker.policy.begin(1)  # one more attempt
            return True
        task.samples = [*task.samples, sample]
        if self._ranks > 1 and sample is not SKIP:
            self._latest_mine = sample
        return False

    async def _refill(self, task: BatchTask) -> None:
        """Fill a short batch from the stream's beginning, if all ranks end together."""
        lacking, source = len(task.indices) - len(task.samples), self._source
        if lacking and isinstance(source, OwnSource) and source.refills:
            samples = await source.again(lacking)
            is_whole = not len(task.samples)
            task.samples = samples if is_whole else join([task.samples, samples])
            task.padding = len(samples)

    def _repeated(self, task: BatchTask) -> None:
        """Set the state of ``task``, which was filled from the stream's beginning."""
        task.state = self._state()
        if not len(task.samples):
            task.result = BatchResult(is_end=True)
        self._show(task)

    # -- after the samples of a batch -------------------------------------------------

    def _finish(self, task: BatchTask, found: int, wanted: int) -> None:
        """Set the state of ``task``, and its result if there is no batch."""
        self._position.read += found
        if found < wanted:
            mine = -(-max(0, found - self._rank) // self._ranks)
            self._maker.policy.take_back(len(task.indices) - mine)
        if self._has_ended:
            self._check_rest()
            if not self._position.read and self._position.owes:
                raise DatasetError(
                    f"the resumed epoch of {self._name()} has no samples, but the one "
                    f"before had {self._position.owes:,}; a dataset must start again "
                    "after its end, also from the state that it has there"
                )
        if not found or (self._drop_last and found < wanted):
            task.result = BatchResult(is_end=True)
            self._has_ended = True
            task.state = self._state()
            return
        if found < wanted and self._ranks > 1:
            self._share_tail(task, found)
        task.state = self._state()
        if self._real is not None and self._maker.part.tail == "pad":
            # Readers that have ended leave places without samples at the end.
            real = max(0, self._real - (self._position.read - found))
            task.padding = max(0, len(task.samples) - real)
        self._show(task)
        if self._source is not None and not self._source.fills and not task.result:
            # Only this batch is empty here: other ranks may have samples of it.
            least = len(task.indices) if self._drop_last else 1
            if len(task.samples) < least:
                task.result = BatchResult(is_empty=True)

    def _state(self) -> StreamState:
        """Return where the stream is after the latest batch."""
        state = self._position.state(has_ended=self._has_ended)
        if isinstance(self._source, OwnSource):
            state |= self._source.repeated()
        return state

    def _show(self, task: BatchTask) -> None:
        """Leave the samples as the functions take them."""
        if not isinstance(task.samples, list) and not self._takes_columns():
            task.samples = list(task.samples)
        task.missing = len(task.indices) - len(task.samples)

    def _check_rest(self) -> None:
        """Raise the last error if every sample of the stream failed.

        With several readers, a single shard may fail.
        """
        lost, self._lost = self._lost, []
        if self._has_good or not lost or (len(lost) == 1 and self._is_part()):
            return
        lost[-1].add_note("aioloader: all samples of this stream failed; none is left")
        raise lost[-1]

    def _is_part(self) -> bool:
        """Tell whether other readers have parts of this stream too."""
        dataset, worker = self._maker.dataset, get_worker_info()
        ranks = dataset.ranks if isinstance(dataset, OwnStream) else None
        return (ranks or (0, 1))[1] > 1 or (
            worker is not None and worker.num_workers > 1
        )

    def _share_tail(self, task: BatchTask, found: int) -> None:
        """Cut or pad this rank's part of the last batch, by ``tail``."""
        mine, padding = self._maker.part.share(found)
        del task.samples[mine:]
        latest = self._latest_mine
        stand_in = self._latest if latest is MISSING else latest
        if padding and stand_in is not MISSING:
            task.samples += [stand_in] * padding
            task.padding = padding
        if not task.samples:
            task.result = BatchResult(is_end=True)

    def _takes_columns(self) -> bool:
        maker = self._maker
        is_default = maker.batched and maker.collate_fn is default_collate
        return is_default and maker.transform is None and maker.part.tail != "pad"


class SyncStream(_Stream):
    """One iterator of a plain iterable, opened and closed where it is pulled."""

    is_on_loop = False
    _close: Callable[[], None] | None = None

    def pull(self, task: BatchTask) -> None:
        """Read the samples of ``task``, or set the end as its result."""
        run_now(self._read(task))

    def close(self) -> None:
        """Close the iterator."""
        self._has_ended, self._source = True, None
        close, self._close = self._close, None
        if close is not None:
            close()

    async def _open(self, task: BatchTask) -> BlockSource:
        if self._close is not None:
            self._close()
        if self._position.load_dataset():
            self._reseed(task)
        iterator: Any = iter(self._maker.dataset)
        if inspect.isgenerator(iterator):
            self._close = iterator.close
        self._position.load_iterator(iterator)
        if task.number:
            self._reseed(task)
        return IteratorSource(iterator, len(task.indices), is_async=False)


class AsyncStream(_Stream):
    """One iterator of an async iterable, opened and closed on the loop."""

    is_on_loop = True
    _stack: AsyncExitStack

    async def pull(self, task: BatchTask, stack: AsyncExitStack) -> None:
        """Read the samples of ``task``; ``stack`` closes the iterator later."""
        self._stack = stack
        await self._read(task)

    async def _open(self, task: BatchTask) -> BlockSource:
        dataset = self._maker.dataset
        if isinstance(dataset, OwnStream):
            dataset.begin_epoch(self._maker.epoch)
        self._position.load_dataset()
        iterator = await open_async(dataset, self._stack)
        self._position.load_iterator(iterator)
        if isinstance(iterator, BlockIterator):
            self._real = iterator.real
            source = OwnSource(iterator, self._position.again)
            self._stack.push_async_callback(source.aclose)
            return source
        return IteratorSource(iterator, len(task.indices), is_async=True)
