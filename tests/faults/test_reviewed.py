"""Corners that a review found broken, kept shut."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from aioloader.testing import no_leaks
from samples import AsyncMap, AsyncStream, collect

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
                for row in range(2_000):  # beyond what is read ahead
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
    assert found == [[row, row + 1] for row in range(0, 2_000, 2)]


def test_nested_with_blocks() -> None:
    """The inner one closes nothing that the outer still needs."""
    loader = DataLoader(AsyncMap(16), batch_size=4)
    with loader:
        iterator = iter(loader)
        next(iterator)
        with loader:
            pass
        assert len(list(iterator)) == 3
