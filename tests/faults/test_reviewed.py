"""Corners that a review found broken, kept shut."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, TensorDataset

from aioloader import DataLoader
from aioloader.testing import no_leaks
from samples import AsyncMap, AsyncStream, SyncMap, collect

LOOPS: list[Any] = ["thread", "caller"]


class Stubborn(AsyncMap):
    """Turns its cancellation into an error, or into a sample."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__(8)
        self.returns = returns

    async def __getitem__(self, index: int) -> Any:
        try:
            if index:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.returns:
                return await super().__getitem__(index)
            raise OSError("connection lost") from None
        return await super().__getitem__(index)


class StubbornStream(AsyncStream):
    """Raises while it is closed."""

    async def __aiter__(self) -> Any:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            raise OSError("connection lost")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "dataset",
    [Stubborn(returns=True), Stubborn(returns=False), StubbornStream()],
    ids=["returns", "raises", "stream"],
)
async def test_user_code_that_swallows_its_cancellation(
    dataset: Any, loop: Any
) -> None:
    """It comes only once, and is enough."""
    with no_leaks():
        iterator = aiter(DataLoader(dataset, batch_size=1, loop=loop))
        await anext(iterator)
        await asyncio.wait_for(iterator.aclose(), 5)


@pytest.mark.parametrize("loop", LOOPS)
async def test_two_tasks_wait_for_the_last_batch(loop: Any) -> None:
    """One gets it, the other the end."""
    for _ in range(5):
        iterator = aiter(DataLoader(AsyncMap(2), batch_size=2, loop=loop))
        tasks = [asyncio.ensure_future(collect(iterator)) for _ in range(3)]
        found = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert sorted(map(len, found)) == [0, 0, 1]


@pytest.mark.parametrize("is_plain", [False, True])
async def test_a_cancelled_first_step_of_a_long_permutation(is_plain: Any) -> None:
    """What was drawn for it is not lost; a plain step waits for the thread."""
    dataset = TensorDataset(torch.arange(1 << 19))
    iterator = aiter(DataLoader(dataset, batch_size=1 << 17, shuffle=True))
    task = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if is_plain:
        parts = [await asyncio.to_thread(list, iterator)]
    else:
        parts = await asyncio.gather(*(collect(iterator) for _ in range(2)))
    if not task.cancelled():  # the draw took less than a turn of the loop
        parts.append([task.result()])
    found = [batch[0] for part in parts for batch in part]
    assert torch.equal(torch.cat(found).sort().values, dataset.tensors[0])


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [2, 3, 6])
async def test_tasks_that_share_long_permutations(consumers: int) -> None:
    """No task draws while the thread of another one does (so again at the end)."""
    dataset = TensorDataset(torch.arange(1 << 18))
    loader = DataLoader(
        dataset, batch_size=1 << 16, shuffle=True, generator=torch.Generator()
    )
    for _ in range(10):
        iterator = aiter(loader)
        parts = await asyncio.gather(*(collect(iterator) for _ in range(consumers)))
        found = torch.cat([batch[0] for part in parts for batch in part])
        assert torch.equal(found.sort().values, dataset.tensors[0])


async def test_all_tasks_are_cancelled_before_a_pipeline_takes_its_first_step() -> None:
    """As a service does that gives up: closing waits for nothing, and says nothing."""
    async with DataLoader(AsyncMap(8), batch_size=2, loop="caller") as loader:
        iterator = aiter(loader)
        step = asyncio.ensure_future(anext(iterator))
        # Until there are this one, the step, and the pipeline's.
        while len(asyncio.all_tasks()) < 3:  # noqa: ASYNC110  (no event tells)
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([step])
        await asyncio.wait_for(iterator.aclose(), 5)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("loop", LOOPS)
async def test_the_exit_of_one_iterator_leaves_its_siblings_alone(loop: Any) -> None:
    """Its error is its own, and no group."""

    class Table:
        async def __aiter__(self) -> AsyncIterator[int]:
            try:
                for row in range(200):  # beyond what is read ahead
                    yield row
            finally:
                raise ValueError("cursor")

    loader = DataLoader(Table(), batch_size=2, loop=loop)
    one, other = aiter(loader), aiter(loader)
    await anext(one)
    found = [(await anext(other)).tolist()]
    with pytest.raises(ValueError, match="cursor"):
        await one.aclose()
    with pytest.raises(ValueError, match="cursor"):
        while True:
            found.append((await anext(other)).tolist())
    assert found == [[row, row + 1] for row in range(0, 200, 2)]


def test_gathering_stays_within_bounds_and_is_contiguous() -> None:
    """As indexing row by row would."""
    dataset = TensorDataset(torch.arange(15.0).view(3, 5).T)
    for batch in DataLoader(dataset, batch_size=2):
        assert batch[0].is_contiguous()
    loader = DataLoader(dataset, batch_size=4, sampler=SequentialSampler(range(10)))
    with pytest.raises(IndexError, match="out of bounds"):
        list(loader)


@pytest.mark.parametrize(("make", "num_workers"), [(AsyncMap, 0), (SyncMap, 2)])
def test_a_forked_child_uses_the_loader_anew(make: Any, num_workers: int) -> None:
    """The parent's iterator is of no use there, and says so; a new one works."""
    loader: Any = DataLoader(make(8), batch_size=4, num_workers=num_workers)
    with loader:
        iterator = iter(loader)
        next(iterator)
        pid = os.fork()
        if pid == 0:
            try:
                next(iterator)
            except RuntimeError as error:
                said = "does not survive a fork" in str(error)
            os._exit(0 if said and len(list(loader)) == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(list(iterator)) == 1


def test_nested_with_blocks() -> None:
    """The inner one closes nothing that the outer still needs."""
    loader = DataLoader(AsyncMap(16), batch_size=4)
    with loader:
        iterator = iter(loader)
        next(iterator)
        with loader:
            pass
        assert len(list(iterator)) == 3
