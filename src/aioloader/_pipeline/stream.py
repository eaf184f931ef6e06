"""Iterable datasets: one stream, cut into the batches that were asked for.

``SyncStream`` is pulled in a thread, ``AsyncStream`` on the loop. Both number samples
by their place in the stream, and end every later request at once. An iterator that
offers ``pull`` gives a whole batch at once, as a list or in columns.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from torch.utils.data import ChainDataset

from aioloader._collate import default_collate
from aioloader._order.blocks import Bad, Block, join
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.work import Outcome, Work


class _Stream:
    """What both streams share: when a batch is whole, and what an error means."""

    def __init__(self, recipe: Recipe, *, drop_last: bool) -> None:
        self._recipe = recipe
        self._drop_last = drop_last
        self._ended = False

    def _close_batch(self, work: Work) -> None:
        """Set the end as the outcome, if ``work`` may not be delivered."""
        found, wanted = len(work.samples), len(work.indices)
        if not found or (self._drop_last and found < wanted):
            work.outcome = Outcome(is_end=True)

    def _recover(self, work: Work, error: Exception, *, can_go_on: bool) -> Any:
        """Return what stands for a sample that the iterator failed to give.

        A generator that raised is finished: to skip its error would end the epoch
        early and quietly, so it is raised whatever the policy.
        """
        if not can_go_on:
            self._ended = True
            error.add_note(f"aioloader: {self._recipe.place('fetch', work)}")
            raise error
        return self._recipe.resolve("fetch", work, len(work.samples), error)


class SyncStream(_Stream):
    """One iterator of a sync iterable, entered and closed where it is pulled."""

    def __init__(self, recipe: Recipe, *, drop_last: bool) -> None:
        super().__init__(recipe, drop_last=drop_last)
        self._iterator: Iterator[Any] | None = None
        self._stack = contextlib.ExitStack()

    def pull(self, work: Work) -> None:
        """Read the samples of ``work``, or set the end as its outcome."""
        self._recipe.policy.begin(len(work.indices))
        while not self._ended and len(work.samples) < len(work.indices):
            try:
                work.samples.append(next(self._open()))
            except StopIteration:
                self._ended = True
            except Exception as error:  # raised, or the policy decides
                can_go_on = self._iterator is not None and not inspect.isgenerator(
                    self._iterator
                )
                work.samples.append(self._recover(work, error, can_go_on=can_go_on))
        self._close_batch(work)

    def close(self) -> None:
        """Close the iterator, where it was pulled."""
        self._ended = True
        self._stack.close()
        self._iterator = None

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            iterator = iter(self._recipe.dataset)
            if hasattr(iterator, "__enter__") and iterator is not self._recipe.dataset:
                iterator = self._stack.enter_context(iterator)
            if inspect.isgenerator(iterator):
                self._stack.callback(iterator.close)
            self._iterator = iterator
        return self._iterator


class AsyncStream(_Stream):
    """One iterator of an async iterable, entered and closed on the loop."""

    def __init__(self, recipe: Recipe, *, drop_last: bool) -> None:
        super().__init__(recipe, drop_last=drop_last)
        self._iterator: AsyncIterator[Any] | None = None
        self._pulls = False
        self._rest: Block = []  # of a block, behind a sample that was raised

    async def pull(self, work: Work, stack: contextlib.AsyncExitStack) -> None:
        """Read the samples of ``work``, or set the end as its outcome."""
        self._recipe.policy.begin(len(work.indices))
        while not self._ended and len(work.samples) < len(work.indices):
            try:
                iterator = await self._open(stack)
                if self._pulls:
                    await self._pull_block(work, iterator)
                else:
                    work.samples.append(await anext(iterator))
            except StopAsyncIteration:
                self._ended = True
            except Exception as error:  # raised, or the policy decides
                can_go_on = self._iterator is not None and not inspect.isasyncgen(
                    self._iterator
                )
                work.samples.append(self._recover(work, error, can_go_on=can_go_on))
        if not isinstance(work.samples, list) and not self._takes_columns():
            work.samples = list(work.samples)
        self._close_batch(work)

    async def _pull_block(self, work: Work, iterator: Any) -> None:
        """Add a block to the samples of ``work``; what failed is for the policy."""
        block, self._rest = self._rest, []
        if not len(block):
            block = await iterator.pull(len(work.indices) - len(work.samples))
        self._ended = not len(block)
        if not isinstance(block, list) or Bad not in set(map(type, block)):
            work.samples = join([work.samples, block])
            return
        work.samples = list(work.samples)
        for place, sample in enumerate(block):
            if type(sample) is Bad:
                self._rest = block[place + 1 :]  # if the policy is to raise
                sample = self._recover(work, sample.error, can_go_on=True)  # noqa: PLW2901
            work.samples.append(sample)
        self._rest = []

    def _takes_columns(self) -> bool:
        recipe = self._recipe
        is_default = recipe.batched and recipe.collate_fn is default_collate
        return is_default and recipe.transform is None

    async def _open(self, stack: contextlib.AsyncExitStack) -> AsyncIterator[Any]:
        if self._iterator is None:
            begin_epoch = getattr(self._recipe.dataset, "begin_epoch", None)
            if begin_epoch is not None:
                begin_epoch(self._recipe.epoch)
            iterator = _aiter(self._recipe.dataset)
            self._pulls = hasattr(iterator, "pull")
            if hasattr(iterator, "__aenter__") and iterator is not self._recipe.dataset:
                iterator = await stack.enter_async_context(iterator)
            if inspect.isasyncgen(iterator):
                stack.push_async_callback(iterator.aclose)
            self._iterator = iterator
        return self._iterator


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
        iterator = aiter(dataset)
        try:
            async for sample in iterator:
                yield sample
        finally:
            if inspect.isasyncgen(iterator):
                await iterator.aclose()
