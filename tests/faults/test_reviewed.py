"""Rare orders of cancellation and closing that once went wrong."""

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
async def test_user_code_that_swallows_cancellation_can_be_closed(
    dataset: Any, loop: Any
) -> None:
    """The cancellation is sent only once."""
    with no_leaks():
        iterator = aiter(DataLoader(dataset, batch_size=1, loop=loop))
        await anext(iterator)
        await asyncio.wait_for(iterator.aclose(), 5)


@pytest.mark.parametrize("is_plain", [False, True])
async def test_cancelling_the_draw_of_a_long_order_loses_nothing(is_plain: Any) -> None:
    """A plain step waits for the thread that draws."""
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
    batches = [batch[0] for part in parts for batch in part]
    assert torch.equal(torch.cat(batches).sort().values, dataset.tensors[0])


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [2, 3, 6])
async def test_tasks_that_share_a_long_order_lose_nothing(consumers: int) -> None:
    """A task does not draw while another one's thread does, at the end neither."""
    dataset = TensorDataset(torch.arange(1 << 18))
    loader = DataLoader(
        dataset, batch_size=1 << 16, shuffle=True, generator=torch.Generator()
    )
    for _ in range(10):
        iterator = aiter(loader)
        parts = await asyncio.gather(*(collect(iterator) for _ in range(consumers)))
        indices = torch.cat([batch[0] for part in parts for batch in part])
        assert torch.equal(indices.sort().values, dataset.tensors[0])


async def test_cancelling_all_tasks_before_the_first_step_is_clean() -> None:
    """A service may do so; closing neither waits nor prints."""
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
async def test_an_iterators_exit_leaves_its_siblings_alone(loop: Any) -> None:
    """Its error is raised as it is, in no group."""

    class Table:
        async def __aiter__(self) -> AsyncIterator[int]:
            try:
                for row in range(2_000):  # beyond what is read ahead
                    yield row
            finally:
                raise ValueError("cursor")

    loader = DataLoader(Table(), batch_size=2, loop=loop)
    first, second = aiter(loader), aiter(loader)
    await anext(first)
    batches = [(await anext(second)).tolist()]
    with pytest.raises(ValueError, match="cursor"):
        await first.aclose()
    with pytest.raises(ValueError, match="cursor"):
        while True:
            batches.append((await anext(second)).tolist())
    assert batches == [[row, row + 1] for row in range(0, 2_000, 2)]


def test_an_inner_with_block_closes_no_outer_iterator() -> None:
    loader = DataLoader(AsyncMap(16), batch_size=4)
    with loader:
        iterator = iter(loader)
        next(iterator)
        with loader:
            pass
        assert len(list(iterator)) == 3
