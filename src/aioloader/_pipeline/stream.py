"""Read a stream (an iterable dataset) in blocks, and cut the blocks into batches.

The same code reads an async iterable on the loop, and a plain iterable in a thread,
where it never suspends. Several ranks may read the same stream; each keeps only its
samples. After the stream's end, every request reports the end at once.
"""

import contextlib
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import ChainDataset, get_worker_info

from aioloader._base.blocks import (
    Block,
    FailedSample,
    SameErrors,
    failed,
    join,
    read_block,
    read_block_async,
)
from aioloader._base.failures import SKIP, noted
from aioloader._base.raising import STOPS, WrappedExit, ends_task, raisable
from aioloader._collate.collate import default_collate
from aioloader._pipeline.awaiting import run_now
from aioloader._pipeline.batch_maker import BatchMaker, SampleKeys
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask
from aioloader._pipeline.position import StreamPosition, StreamState
from aioloader.errors import DatasetError, ShardChangedError
from aioloader.protocols import BlockIterator, HasLifespan, Kind, OwnStream, has_aiter


@dataclass(eq=False, repr=False)
class StreamBatcher:
    """A reader of one stream's batches that handles ranks, failures and resuming.

    The stream is opened, read and closed in one task, or in one thread.
    """

    maker: BatchMaker
    _: KW_ONLY
    resume: InitVar[StreamState | None] = None  # where to start; None: at the beginning
    # Seeds of the batches that are read again to resume; None: no seeds.
    keys: SampleKeys | None = None

    def __post_init__(self, resume: StreamState | None) -> None:
        maker = self.maker
        # A plain stream is read with the global generators seeded.
        self._is_async = maker.kind is Kind.ASYNC_ITERABLE
        self._position = StreamPosition(maker.dataset, resume, maker.loads)
        self._rank, self._ranks = maker.part.rank, maker.part.world_size
        self._source: _BlockSource | None = None
        self._stack = AsyncExitStack()  # closes the iterator
        self._has_ended = False
        self._unread = 0  # positions of a failed batch that other ranks still read
        # With several ranks: the latest sample of all ranks and of this one, to pad.
        self._latest: Any = MISSING
        self._latest_mine: Any = MISSING
        # Whether any sample was delivered; the last two errors of skipped samples.
        self._has_samples = self._position.read > 0
        self._skipped_errors: list[BaseException] = []
        # Whether ``collate_fn`` takes samples in columns.
        is_bare = maker.collate_fn is default_collate and maker.transform is None
        self._is_padded = maker.part.tail == "pad"
        self._takes_columns = is_bare and maker.batched and not self._is_padded

    def pull(self, task: BatchTask) -> None:
        """Read a batch from a plain iterable, as ``pull_async`` does."""
        run_now(self.pull_async(task))

    def take(self, tasks: deque[BatchTask]) -> deque[BatchTask]:
        """Pop, fill and return the tasks whose samples came with an earlier batch."""
        began, source = perf_counter(), self._simple_source(tasks[0])
        taken = deque[BatchTask]()
        if source is not None and self._position.is_own:
            size = len(tasks[0].indices)
            for block, position in source.take(size, len(tasks)):
                task = tasks.popleft()
                task.began, task.state = began, self._position.advance(size, position)
                self._fill(task, block)
                taken.append(task)
        return taken

    def _simple_source(self, task: BatchTask) -> "_BlockSource | None":
        """Return the source if ``task`` needs just the stream's next samples."""
        source = self._source
        if source is None or source.refills or self._is_padded or self._ranks > 1:
            return None
        return None if self._has_ended or self._unread or task.again else source

    def _fill(self, task: BatchTask, block: Block) -> None:
        """Give ``task`` the samples of a full batch, in which no sample has failed."""
        self._has_samples = True
        self.maker.policy.begin(len(block))
        is_ready = self._takes_columns or isinstance(block, list)
        task.samples = block if is_ready else list(block)
        task.read = perf_counter()

    async def pull_async(self, task: BatchTask, waiting: int = 0) -> None:
        """Read the samples of ``task``, or set its result if there is no batch.

        Samples of the next ``waiting`` batches may be read ahead, for ``take``.
        """
        task.began, source = perf_counter(), self._simple_source(task)
        block = None
        if source is not None and source.is_bare:  # the usual case, quickly
            block = await source.take_async(len(task.indices))
        if block is None:
            await self._pull(task, waiting)
        else:
            self._position.read += len(block)
            task.state = self._position.state(has_ended=False)
            self._fill(task, block)

    async def _pull(self, task: BatchTask, waiting: int = 0) -> None:
        size, read = len(task.indices), 0
        wanted = size * self._ranks
        self.maker.policy.begin(0 if task.again else size)
        try:
            await self._prepare(task, wanted)
            while read < wanted and not (task.again or self._has_ended):
                read += await self._add_block(task, read, wanted, waiting)
            is_short = 0 < len(task.samples) < size and not self.maker.drop_last
            if task.again or is_short:
                await self._refill(task)
            if not task.again:
                self._finish(task, read, wanted)
            elif not len(task.samples):
                task.result = BatchResult(is_end=True)
            if not isinstance(task.samples, list) and not self._takes_columns:
                task.samples = list(task.samples)
            task.missing = size - len(task.samples)
            task.state = self._position.state(has_ended=self._has_ended)
            if self._source is not None and self._source.refills:
                task.state |= self._source.repeat_state()
        except (*STOPS, WrappedExit) as error:
            if self._is_async and ends_task(error):
                raise
            # No variable may hold it: its traceback has this frame.
            raise self._noted(raisable(error, "the dataset"), task)  # noqa: B904  (it keeps its cause)
        task.read = perf_counter()

    def close(self) -> None:
        run_now(self.aclose())

    async def aclose(self) -> None:
        self._has_ended, self._source = True, None
        await self._stack.aclose()

    def _noted(self, error: BaseException, task: BatchTask) -> BaseException:
        return noted(error, self.maker.stage_note("fetch", task))

    def _name(self) -> str:
        return type(self.maker.dataset).__name__

    async def _prepare(self, task: BatchTask, wanted: int) -> None:
        """Open the stream if needed, and advance to the first sample of ``task``."""
        loads, position = self.maker.loads, self._position
        try:
            if self._source is None and not self._has_ended:
                rng_state = torch.get_rng_state() if loads.keeps_generator else None
                loads.keeps_generator = False
                if position.to_skip:
                    await self._skip(task, wanted)
                    if rng_state is not None:
                        torch.set_rng_state(rng_state)
                else:
                    self._source = await self._open(task, rng_state)
                # A stream that had ended is opened, too: its dataset may have a state.
                self._has_ended |= position.has_ended
            if self._unread:
                unread, self._unread = self._unread, 0
                position.read += await self._drop(unread)
        except BaseException as error:
            self._has_ended = True  # under any policy
            self._noted(error, task)
            raise

    async def _skip(self, task: BatchTask, wanted: int) -> None:
        """Open the stream, and read and drop the samples delivered before ``task``.

        The dropped samples are read with the seeds of their batches.
        """
        left = self._position.to_skip
        earlier = -(-left // wanted)
        for number in range(task.number - earlier, task.number):
            skipped = BatchTask(number, task.indices)
            if self.keys is not None:
                skipped.key, skipped.sample_keys = self.keys(number, wanted)
            with nullcontext() if self._is_async else self.maker.around(skipped):
                if self._source is None:
                    self._source = await self._open(skipped)
                left -= await self._drop(min(wanted, left))
        if left > 0:
            raise ShardChangedError(
                f"{self._name()} ended after {self._position.read - left:,} samples, "
                f"but the state was saved after {self._position.read:,}; resume with "
                "the same samples, or restart the epoch"
            )
        self._reseed(task)

    async def _open(
        self,
        task: BatchTask,
        rng_state: torch.Tensor | None = None,
        *,
        is_sure: bool = False,
    ) -> "_BlockSource":
        """Open an iterator where this epoch starts or resumes; return its source.

        If given, ``rng_state`` is then set in torch. If the first sample reveals that
        the dataset started from a wrong state, the dataset is opened again, unless
        ``is_sure``.
        """
        dataset, position = self.maker.dataset, self._position
        before = None if self._is_async else torch.get_rng_state()
        await self._stack.aclose()  # of an iterator from the wrong state
        if position.load_dataset():
            self._reseed(task)
        if self._is_async:
            iterator = await _open_async(dataset, self._stack)
        else:
            iterator = _iterator(iter, dataset)
            if inspect.isgenerator(iterator):
                self._stack.callback(iterator.close)
        position.load_iterator(iterator)
        if task.number:
            self._reseed(task)
        size, repeats_from = len(task.indices), position.repeats_from
        source = _BlockSource(iterator, size, repeats_from, is_async=self._is_async)
        source.is_bare = not (source.is_own or position.is_stateful())
        self._stack.push_async_callback(source.aclose)
        if rng_state is not None:
            torch.set_rng_state(rng_state)
        if is_sure or position.has_ended or not self.maker.loads.is_pending:
            return source
        block, _, has_ended = await source.read(1)
        source.rest = block, has_ended
        if position.must_reopen(is_empty=not len(block)):
            source = await self._open(task, is_sure=True)
            if before is not None:
                torch.set_rng_state(before)
        return source

    def _reseed(self, task: BatchTask) -> None:
        """Seed the generators for ``task`` again: user code may have changed them."""
        if not self._is_async and self.maker.reseed is not None:
            self.maker.reseed(task)

    async def _drop(self, count: int) -> int:
        """Read and drop up to ``count`` positions; return how many were read.

        An error that ends the stream is raised: no sample was delivered after it.
        """
        source: Any = self._source
        dropped = 0
        while dropped < count and not self._has_ended:
            block, more, self._has_ended = await source.read(count - dropped)
            dropped += more
            if len(block) and type(block[-1]) is FailedSample:
                if self._has_ended:
                    raise block[-1].error
                dropped -= source.leaves_out  # it has no position
        return dropped

    async def _add_block(
        self, task: BatchTask, read: int, wanted: int, waiting: int
    ) -> int:
        """Add a block's samples to ``task``; return how many positions were read."""
        assert self._source is not None
        left, more = wanted - read, waiting * wanted
        block, positions, self._has_ended = await self._source.read(left, more)
        count = len(block)
        failure = block[-1] if count and isinstance(block, list) else None
        if type(failure) is FailedSample:
            block = block[:-1]
        if len(block):
            self._has_samples = True
            if self._ranks > 1:  # this rank's part
                self._latest = block[-1]
                block = list(block)[(self._rank - read) % self._ranks :: self._ranks]
                if block:
                    self._latest_mine = block[-1]
            task.samples = join([task.samples, block]) if len(task.samples) else block
        if type(failure) is not FailedSample:
            return positions
        if self._has_ended:  # skipping it would silently end the epoch early
            raise self._noted(failure.error, task)
        if (read + count - 1) % self._ranks == self._rank:
            try:
                positions -= self._replace(task, failure.error)
            except BaseException:
                # These samples are lost, but they were read.
                self._position.read += read + positions
                self._unread = wanted - read - positions if self.maker.keeps_step else 0
                raise
        return positions

    def _replace(self, task: BatchTask, error: BaseException) -> bool:
        """Add the replacement of a failed sample, or raise, as the policy decides.

        Return True if the next sample takes the position of a skipped sample.
        """
        sample = self.maker.resolve("fetch", task, len(task.samples), error)
        if sample is not SKIP:
            self._has_samples = True
        elif not self._has_samples:
            self._skipped_errors = [*self._skipped_errors[-1:], error]
        assert self._source is not None
        if sample is SKIP and self._source.leaves_out:
            self.maker.policy.begin(1)  # one more attempt
            task.extra += 1
            return True
        task.samples = [*task.samples, sample]
        if self._ranks > 1 and sample is not SKIP:
            self._latest_mine = sample
        return False

    async def _refill(self, task: BatchTask) -> None:
        """Fill up a short batch from the stream's beginning, if its source refills."""
        if self._source is not None and self._source.refills:
            lacking = len(task.indices) - len(task.samples)
            samples = await self._source.repeat(lacking)
            task.samples = join([task.samples, samples])
            task.padding = len(samples)

    def _finish(self, task: BatchTask, read: int, wanted: int) -> None:
        """Count the samples of ``task``; set its result if there is no batch."""
        maker, position = self.maker, self._position
        position.read += read
        if read < wanted:
            mine = -(-max(0, read - self._rank) // self._ranks)
            task.extra -= len(task.indices) - mine
            maker.policy.begin(mine - len(task.indices))  # fewer attempts
        if self._has_ended:
            self._check_end()
        if not read or (maker.drop_last and read < wanted):
            task.result = BatchResult(is_end=True)
            self._has_ended = True
            return
        if read < wanted and self._ranks > 1:
            self._share_tail(task, read)
        source = self._source
        if source is None:  # closed by the user's code
            return
        if source.real is not None and maker.part.tail == "pad":
            # Readers that have ended leave positions without samples at the end.
            real = max(0, source.real - (position.read - read))
            task.padding = max(0, len(task.samples) - real)
        # The batch is empty on this rank only: other ranks may have samples of it.
        least = len(task.indices) if maker.drop_last else 1
        if not source.fills and not task.result and len(task.samples) < least:
            task.result = BatchResult(is_empty=True)

    def _check_end(self) -> None:
        """Raise an error if every sample has failed, or if a resumed epoch is empty.

        If other readers share the stream, a single failed sample is tolerated.
        """
        errors, self._skipped_errors = self._skipped_errors, []
        may_fail = len(errors) == 1 and self._is_part()
        if not self._has_samples and errors and not may_fail:
            text = "aioloader: all samples of this stream failed; none is left"
            errors[-1].add_note(text)
            raise errors[-1]
        if not self._position.read and self._position.last_epoch:
            raise DatasetError(
                f"the resumed epoch of {self._name()} has no samples, but the one "
                f"before had {self._position.last_epoch:,}; a dataset must start again "
                "after its end, also from the state that it has there"
            )

    def _is_part(self) -> bool:
        """Tell whether other ranks or workers read parts of this stream, too."""
        dataset, worker = self.maker.dataset, get_worker_info()
        is_rank = isinstance(dataset, OwnStream) and dataset.outline().world_size > 1
        return is_rank or (worker is not None and worker.num_workers > 1)

    def _share_tail(self, task: BatchTask, read: int) -> None:
        """Cut or pad this rank's part of the last batch, as ``tail`` says."""
        mine, padding = self.maker.part.share(read)
        del task.samples[mine:]
        latest = self._latest_mine
        filler = self._latest if latest is MISSING else latest
        if padding and filler is not MISSING:
            task.samples += [filler] * padding
            task.padding = padding
        if not task.samples:
            task.result = BatchResult(is_end=True)


class _BlockSource:
    """A source of sample blocks, from a plain, async or aioloader iterator.

    Reading a plain iterator never suspends.
    """

    # As in ``BlockIterator``.
    fills, leaves_out, refills = True, False, False
    real: int | None = None

    def __init__(
        self,
        iterator: Any,
        max_block: int,
        repeats_from: StreamState | None,
        *,
        is_async: bool,
    ) -> None:
        self._iterator = iterator  # its state is the one after the latest block
        self.is_bare = False  # whether it is the user's and nothing has a state
        self._max_block = max_block  # limit on samples held in memory at once
        self._is_async = is_async
        # Samples read but not used yet, and whether the stream has ended with them.
        self.rest: tuple[Block, bool] | None = None
        self._same_errors = SameErrors()
        self.is_own = isinstance(iterator, BlockIterator)
        if self.is_own:
            self.fills, self.leaves_out = iterator.fills, iterator.leaves_out
            self.refills, self.real = iterator.refills, iterator.real
        self._repeated: BlockIterator | None = None
        self._start = repeats_from  # of the repeated samples; None: the first one
        self._has_repeated = repeats_from is not None  # any sample since ``_start``

    def take(self, size: int, most: int) -> Iterable[tuple[Block, StreamState]]:
        """Return blocks of an aioloader stream's ``take``, none if ``rest`` is set."""
        has_blocks = self.is_own and self.rest is None
        return self._iterator.take(size, most) if has_blocks else ()

    async def take_async(self, count: int) -> Block | None:
        """Return exactly ``count`` samples, or None if the caller must use ``read``."""
        if self.rest is not None:
            return None
        block, has_ended = await self._pull(min(count, self._max_block), 0)
        is_list = isinstance(block, list)
        is_whole = len(block) == count and not has_ended
        if not is_whole or (is_list and FailedSample in set(map(type, block))):
            self.rest = block, has_ended
            return None
        return block

    async def read(self, limit: int, more: int = 0) -> tuple[Block, int, bool]:
        """Read a block; only its last sample may be a ``FailedSample``.

        Up to ``more`` further samples may be read ahead, for ``take``.

        Returns:
            The block; its number of positions in the stream (more than its samples if
            several readers alternate and some have ended); whether the stream has
            ended. If so, a last ``FailedSample`` is the cause and cannot be skipped.
        """
        limit = min(limit, self._max_block)
        block, has_ended = self.rest or await self._pull(limit, more)
        self.rest = None
        is_list = self.is_own and isinstance(block, list)
        if is_list and FailedSample in set(map(type, block)):
            kinds = enumerate(map(type, block), 1)
            stop = next(count for count, kind in kinds if kind is FailedSample)
            if stop < len(block):
                self.rest, has_ended = (block[stop:], has_ended), False
                block = block[:stop]
        is_whole = not (self.fills or self.rest or has_ended)
        return block, limit if is_whole else len(block), has_ended

    async def _pull(self, limit: int, more: int) -> tuple[Block, bool]:
        if not self.is_own:
            if self._is_async:
                block, has_ended = await read_block_async(self._iterator, limit)
            else:
                block, has_ended = read_block(self._iterator, limit)
            return block, self._same_errors.is_stuck(block) or has_ended
        try:
            block = await self._iterator.pull(limit, more)
        except StopAsyncIteration:
            return [], True
        except BaseException as error:
            if ends_task(error):
                raise
            # No sample failed: the stream cannot be read at all.
            return [failed(error)], True
        return block, self.fills and not len(block)

    async def repeat(self, count: int) -> Block:
        """Return ``count`` samples, read again from an aioloader stream's beginning.

        At the stream's end, start over. Skip failed samples; if all fail, return fewer.
        """
        parts: list[Block] = []
        while count:
            if self._repeated is None:
                self._repeated = self._iterator.again(self._start)
            block: Block | None = None
            with contextlib.suppress(StopAsyncIteration):
                block = await self._repeated.pull(count)
            if block is None or (self.fills and not len(block)):
                if not self._has_repeated:
                    break
                await self.aclose()
                self._start, self._has_repeated = None, False
                continue
            if isinstance(block, list):
                block = [sample for sample in block if type(sample) is not FailedSample]
            self._has_repeated |= len(block) > 0
            parts.append(block)
            count -= len(block)
        return join(parts)

    def repeat_state(self) -> StreamState:
        """Return the entry of a stream's state from which ``repeat`` continues."""
        now = self._start if self._repeated is None else self._repeated.position()
        return {} if now is None else {"again": now}

    async def aclose(self) -> None:
        """Close the iterator of repeated samples."""
        repeated, self._repeated = self._repeated, None
        if repeated is not None:
            await repeated.aclose()


def _iterator(make: Callable[[Any], Any], dataset: Any) -> Any:
    try:
        return make(dataset)
    except StopIteration as error:  # a coroutine must not raise it
        raise raisable(error, "the dataset") from error


async def _open_async(dataset: Any, stack: AsyncExitStack) -> Any:
    """Return an async iterator of ``dataset``, which ``stack`` closes."""
    is_chain = isinstance(dataset, ChainDataset) and not has_aiter(dataset)
    iterator = _chained(dataset.datasets) if is_chain else _iterator(aiter, dataset)
    if isinstance(iterator, HasLifespan):
        await stack.enter_async_context(iterator.lifespan())
    if inspect.isasyncgen(iterator):
        stack.push_async_callback(iterator.aclose)
    return iterator


async def _chained(datasets: Any) -> AsyncIterator[Any]:
    """Yield from plain and async iterables, one after the other."""
    for dataset in datasets:
        if not has_aiter(dataset):
            for sample in dataset:
                yield sample
            continue
        async with AsyncExitStack() as stack:
            async for sample in await _open_async(dataset, stack):
                yield sample  # noqa: ASYNC119  (its reader closes it)
