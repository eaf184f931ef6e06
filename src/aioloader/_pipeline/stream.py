"""Iterable datasets: one stream, cut into the batches that were asked for.

``SyncStream`` is pulled in a thread, ``AsyncStream`` on the loop. Both number samples
by their place in the stream, and end every later request at once. An iterator that
offers ``pull`` gives a whole batch at once, as a list or in columns. Of several ranks
each reads the whole stream and keeps its part.
"""

import contextlib
import inspect
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

from torch.utils.data import ChainDataset

from aioloader._collate.collate import default_collate
from aioloader._order.blocks import Bad, Block, join
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask
from aioloader._pipeline.keys import BatchSeeds
from aioloader._pipeline.position import Position, StreamState
from aioloader.protocols import HasLifespan


class _Stream:
    """What both streams share: whose a sample is, when a batch is whole, errors.

    Args:
        maker: The user's functions, and which part of the stream is read here.
        drop_last: Whether a short last batch is left out.
        resume: Where to begin; None: at the beginning.
    """

    def __init__(
        self, maker: BatchMaker, *, drop_last: bool, resume: StreamState | None = None
    ) -> None:
        self._maker = maker
        self._drop_last = drop_last
        self._ended = False
        self._position = Position(maker.dataset, resume, maker.snapshot_every)
        self._rank, self._ranks = maker.part.rank, maker.part.world_size
        self._found = 0  # of the global batch under way
        self._latest: Any = MISSING
        self._any: Any = MISSING
        self._wanted = 0
        self._debt = 0  # of a batch that raised, what other ranks still read of it

    def _begin(self, task: BatchTask) -> int:
        """Begin a batch; return how many samples of the stream it comes from."""
        self._maker.policy.begin(len(task.indices))
        self._found = 0
        self._wanted = len(task.indices) * self._ranks
        return self._wanted

    def _is_mine(self) -> bool:
        """Tell whether the next sample is this rank's."""
        return self._ranks == 1 or self._found % self._ranks == self._rank

    def _add(self, task: BatchTask, sample: Any) -> None:
        """Take the next sample, if it is this rank's."""
        if self._is_mine():
            task.samples.append(sample)
            self._latest = sample
        self._any = sample
        self._found += 1

    def _close_batch(self, task: BatchTask, wanted: int) -> None:
        """Set the end as the result, if ``task`` may not be delivered."""
        found = self._found
        self._position.read += found
        if not found or (self._drop_last and found < wanted):
            task.result = BatchResult(is_end=True)
            task.state = self._position.end()
            return
        if found < wanted and self._ranks > 1:
            self._deal_tail(task)
        task.state = self._position.state(task.number, has_ended=self._ended)

    def _deal_tail(self, task: BatchTask) -> None:
        """Make our part of the last global batch what the tail's mode says."""
        mine, padding = self._maker.part.share(self._found)
        del task.samples[mine:]
        if padding:
            stand_in = self._any if self._latest is MISSING else self._latest
            task.samples += [stand_in] * padding
            task.padding = padding
        if not task.samples:
            task.result = BatchResult(is_end=True)

    def _recover(self, task: BatchTask, error: Exception, *, can_go_on: bool) -> Any:
        """Return what stands for a sample that the iterator failed to give.

        A generator that raised is finished: to skip its error would end the epoch
        early and quietly, so it is raised whatever the policy.
        """
        if not can_go_on:
            self._ended = True
            error.add_note(f"aioloader: {self._maker.place('fetch', task)}")
            raise error
        if not self._is_mine():
            return None  # it is another rank's to deal with
        try:
            return self._maker.resolve("fetch", task, len(task.samples), error)
        except BaseException:
            # They are behind us, though nothing comes of them.
            self._position.read += self._found + 1
            if self._maker.keeps_step:
                self._debt = self._wanted - self._found - 1
            raise


class SyncStream(_Stream):
    """One iterator of a sync iterable, opened and closed where it is pulled."""

    def __init__(
        self,
        maker: BatchMaker,
        *,
        drop_last: bool,
        resume: StreamState | None = None,
        keys: BatchSeeds | None = None,
    ) -> None:
        super().__init__(maker, drop_last=drop_last, resume=resume)
        self._keys = keys
        self._iterator: Iterator[Any] | None = None
        self._stack = contextlib.ExitStack()

    def pull(self, task: BatchTask) -> None:
        """Read the samples of ``task``, or set the end as its result."""
        wanted = self._begin(task)
        if self._position.has_ended and not self._ended:
            self._open(task)  # its dataset may have to know where the epoch ended
            self._ended = True
        self._pay()
        while not self._ended and self._found < wanted:
            try:
                self._take(task, wanted)
            except StopIteration:
                self._ended = True
            except Exception as error:  # raised, or the policy decides
                sample = self._recover(task, error, can_go_on=self._can_go_on())
                self._add(task, sample)
        self._close_batch(task, wanted)

    def _pay(self) -> None:
        """Read what is left of a batch that raised, as the other ranks do."""
        debt, self._debt = self._debt, 0
        self._position.read += debt
        with contextlib.suppress(StopIteration):  # it will be found again
            if self._iterator is not None:
                self._skip(self._iterator, debt)

    def _take(self, task: BatchTask, wanted: int) -> None:
        """Take the next sample; where all of them are ours, those up to ``wanted``."""
        # An iterator may be false: one that has a length, say.
        iterator = self._begun(task) if self._iterator is None else self._iterator
        # To be sliced it is iterated: one of the user's might begin anew.
        is_own = type(iterator).__module__ not in {"builtins", "itertools"}
        if self._ranks > 1 or is_own:
            self._add(task, next(iterator))
            return
        try:
            # What came before an error stays in the list.
            task.samples.extend(itertools.islice(iterator, wanted - self._found))
        finally:
            self._found = len(task.samples)
        self._ended = self._found < wanted

    def close(self) -> None:
        """Close the iterator, where it was pulled."""
        self._ended = True
        self._stack.close()
        self._iterator = None

    def _can_go_on(self) -> bool:
        return self._iterator is not None and not inspect.isgenerator(self._iterator)

    def _begun(self, task: BatchTask) -> Iterator[Any]:
        """Open the iterator; read what was delivered before ``task``, and drop it.

        What is read again is drawn again, with the seeds that its batches had.
        """
        whole = len(task.indices) * self._ranks
        earlier = -(-self._position.to_skip // whole)
        for number in range(task.number - earlier, task.number):
            seeded = BatchTask(number, task.indices)
            if self._keys is not None:
                seeded.key, seeded.sample_keys = self._keys(number, whole)
            with self._maker.around(seeded):
                iterator = self._open(seeded)
                count = min(whole, self._position.to_skip)
                self._position.to_skip -= count
                self._skip(iterator, count)
        if earlier:
            self._reseed(task)
        return self._open(task)

    def _open(self, task: BatchTask) -> Iterator[Any]:
        """Return the iterator, opened once, before ``task``.

        The user's code may restore global generators, or draw: the batch is drawn with
        its own seeds all the same.
        """
        if self._iterator is not None:
            return self._iterator
        dataset = self._maker.dataset
        if self._position.load_dataset():
            self._reseed(task)
        iterator: Any = iter(dataset)
        self._position.load_iterator(iterator)
        if inspect.isgenerator(iterator):
            self._stack.callback(iterator.close)
        self._iterator = iterator
        if task.number:
            self._reseed(task)
        opened: Iterator[Any] = iterator
        return opened

    def _reseed(self, task: BatchTask) -> None:
        if self._maker.reseed is not None:
            self._maker.reseed(task)

    def _skip(self, iterator: Iterator[Any], count: int) -> None:
        for _ in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise
            except Exception:  # it was dealt with when it was first read
                if not self._can_go_on():
                    raise StopIteration from None


class AsyncStream(_Stream):
    """One iterator of an async iterable, opened and closed on the loop."""

    def __init__(
        self, maker: BatchMaker, *, drop_last: bool, resume: StreamState | None = None
    ) -> None:
        super().__init__(maker, drop_last=drop_last, resume=resume)
        self._iterator: AsyncIterator[Any] | None = None
        self._pulls = False
        self._fills = True
        self._rest: Block = []  # of a block, behind a sample that was raised

    async def pull(self, task: BatchTask, stack: contextlib.AsyncExitStack) -> None:
        """Read the samples of ``task``, or set the end as its result."""
        wanted = self._begin(task)
        if self._position.has_ended and not self._ended:
            await self._opened(stack)  # as above
            self._ended = True
        while not self._ended and self._found < wanted:
            try:
                iterator = await self._open(stack)
                await self._pay(iterator)
                if self._pulls:
                    await self._pull_block(task, iterator, wanted)
                    continue
                sample = await anext(iterator)
            except StopAsyncIteration:
                self._ended = True
                break
            except Exception as error:  # raised, or the policy decides
                sample = self._recover(task, error, can_go_on=self._can_go_on())
            self._add(task, sample)
        if not isinstance(task.samples, list) and not self._takes_columns():
            task.samples = list(task.samples)
        self._close_batch(task, wanted)

    def _close_batch(self, task: BatchTask, wanted: int) -> None:
        """Set as the result that there is nothing, if so it is."""
        super()._close_batch(task, wanted)
        # Others may have more of it: its place is not the next batch's.
        least = len(task.indices) if self._drop_last else 1
        if not self._fills and task.result is None and len(task.samples) < least:
            task.result = BatchResult(is_empty=True)

    async def _pay(self, iterator: Any) -> None:
        """Read what is left of a batch that raised, as the other ranks do."""
        debt, self._debt = self._debt, 0
        if not debt:
            return
        self._position.read += debt
        held, self._rest = len(self._rest), []
        # Where a pull is a batch, no more of it is to come.
        self._position.to_skip = debt - held if self._fills else 0
        await self._skip(iterator)

    async def _pull_block(self, task: BatchTask, iterator: Any, wanted: int) -> None:
        """Add a block to the samples of ``task``; what failed is for the policy."""
        block, self._rest = self._rest, []
        if not len(block):
            block = await iterator.pull(wanted - self._found)
        self._ended = self._fills and not len(block)
        if isinstance(block, list) and Bad in set(map(type, block)):
            self._add_each(task, block)
        else:
            task.samples = join([task.samples, block])
            self._found += len(block)
        if not self._fills and not len(self._rest):
            self._found = wanted

    def _add_each(self, task: BatchTask, block: list[Any]) -> None:
        task.samples = list(task.samples)
        for place, sample in enumerate(block):
            if type(sample) is Bad:
                self._rest = block[place + 1 :]  # if the policy is to raise
                sample = self._recover(task, sample.error, can_go_on=True)  # noqa: PLW2901
            task.samples.append(sample)
            self._found += 1
        self._rest = []

    def _can_go_on(self) -> bool:
        return self._iterator is not None and not inspect.isasyncgen(self._iterator)

    def _takes_columns(self) -> bool:
        maker = self._maker
        is_default = maker.batched and maker.collate_fn is default_collate
        return is_default and maker.transform is None

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        iterator = await self._opened(stack)
        if self._position.to_skip:
            await self._skip(iterator)
        return iterator

    async def _opened(self, stack: contextlib.AsyncExitStack) -> Any:
        if self._iterator is None:
            dataset = self._maker.dataset
            begin_epoch = getattr(dataset, "begin_epoch", None)
            if begin_epoch is not None:
                begin_epoch(self._maker.epoch)
            self._position.load_dataset()
            iterator: Any = _aiter(dataset)
            self._position.load_iterator(iterator)
            self._pulls = hasattr(iterator, "pull")
            self._fills = getattr(iterator, "fills", True)
            if isinstance(iterator, HasLifespan):
                await stack.enter_async_context(iterator.lifespan())
            if inspect.isasyncgen(iterator):
                stack.push_async_callback(iterator.aclose)
            self._iterator = iterator
        return self._iterator

    async def _skip(self, iterator: Any) -> None:
        """Read what was delivered before, and drop it."""
        position = self._position
        while position.to_skip:
            if self._pulls:
                await self._skip_block(iterator)
                continue
            try:
                await anext(iterator)
            except StopAsyncIteration:
                position.to_skip = 0
                raise
            except Exception:  # it was dealt with when it was first read
                if not self._can_go_on():
                    position.to_skip = 0
                    raise StopAsyncIteration from None
            position.to_skip -= 1

    async def _skip_block(self, iterator: Any) -> None:
        position = self._position
        block = await iterator.pull(position.to_skip)
        if not len(block) and self._fills:
            position.to_skip = 0
            raise StopAsyncIteration
        position.to_skip -= len(block) if self._fills else position.to_skip


def _aiter(dataset: Any) -> Any:
    """Return the async iterator of a dataset, or of a chain of datasets."""
    if isinstance(dataset, ChainDataset) and not hasattr(dataset, "__aiter__"):
        return _chain(dataset.datasets)
    return aiter(dataset)


async def _chain(datasets: Any) -> AsyncIterator[Any]:
    """Yield from sync and async iterables, one after the other."""
    for dataset in datasets:
        if not hasattr(dataset, "__aiter__"):
            for sample in dataset:
                yield sample
            continue
        async with contextlib.AsyncExitStack() as stack:
            iterator = aiter(dataset)
            if isinstance(iterator, HasLifespan):
                await stack.enter_async_context(iterator.lifespan())
            elif inspect.isasyncgen(iterator):
                stack.push_async_callback(iterator.aclose)
            async for sample in iterator:
                yield sample  # noqa: ASYNC119  (its reader closes it)
