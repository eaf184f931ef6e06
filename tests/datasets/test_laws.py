"""What holds for every dataset, whatever the samples are read from."""

import asyncio
import pickle
import threading
from typing import Any, TypeAlias

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from aioloader.datasets import FileDataset, ObjectDataset, SQLRows

AnyDataset: TypeAlias = FileDataset | ObjectDataset | SQLRows


@pytest.fixture
def bodies(contents: dict[str, bytes]) -> list[bytes]:
    return [contents[name] for name in sorted(contents)]


def names(dataset: AnyDataset) -> list[str]:
    table = dataset.paths if isinstance(dataset, FileDataset) else dataset.keys
    return list(table)


def body_of(sample: Any) -> memoryview:
    return memoryview(sample["body"] if isinstance(sample, dict) else sample)


async def read_all(dataset: AnyDataset) -> list[bytes]:
    reads: Any = (dataset[index] for index in range(len(dataset)))
    return [bytes(body_of(sample)) for sample in await asyncio.gather(*reads)]


async def test_it_is_like_a_list(
    dataset: AnyDataset, contents: dict[str, bytes], bodies: list[bytes]
) -> None:
    """But no iterable: that would never end, for the IndexError comes when awaited."""
    assert len(dataset) == len(contents)
    assert names(dataset) == sorted(contents)
    assert body_of(await dataset[-1]) == bodies[-1]
    assert body_of(await dataset[-len(bodies)]) == bodies[0]
    assert body_of(await dataset[np.int64(2)]) == bodies[2]
    for index in (12, -13, 2**40):
        with pytest.raises(IndexError, match=f"{index} is out of range for 12 samp"):
            await dataset[index]
    with pytest.raises(TypeError, match="not iterable"):
        iter(dataset)


@pytest.mark.slow
async def test_reads_each_index(dataset: AnyDataset, bodies: list[bytes]) -> None:
    for index, body in enumerate(bodies):
        read = body_of(await dataset[index])
        assert read == body
        assert np.frombuffer(read, np.uint8).nbytes == len(body)


@pytest.mark.slow
async def test_wrappers_pass_the_awaitable_on(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    assert body_of(await Subset(dataset, [3, 1])[1]) == bodies[1]
    both = ConcatDataset[Any]([dataset, dataset])
    assert body_of(await both[len(bodies) + 2]) == bodies[2]


@pytest.mark.slow
async def test_pickles_while_in_use(dataset: AnyDataset, bodies: list[bytes]) -> None:
    async with dataset:
        await dataset[0]
        if "memory://" in repr(dataset):
            with pytest.raises(pickle.PicklingError, match="one process"):
                pickle.dumps(dataset)
            return
        copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    assert await read_all(copy) == bodies
    if not isinstance(copy, FileDataset):
        await copy.aclose()


@pytest.mark.slow
async def test_cancelled_reads_leave_nothing(
    dataset: AnyDataset, bodies: list[bytes], noise: list[Any]
) -> None:
    async with dataset:
        for turns in range(4):
            tasks = [asyncio.create_task(read_all(dataset)) for _ in range(4)]
            other = asyncio.create_task(read_all(dataset))
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            assert await other == bodies
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.slow
async def test_enters_nest_and_it_reads_after_the_last_exit(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    async with dataset:
        async with dataset as same:
            assert same is dataset
        assert await read_all(dataset) == bodies
    assert await read_all(dataset) == bodies
    async with dataset:
        assert await read_all(dataset) == bodies


@pytest.mark.slow
async def test_several_loops_read_at_once(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    found: list[list[bytes]] = []

    async def enter_and_read() -> None:
        async with dataset:
            found.extend([await read_all(dataset) for _ in range(5)])

    def run() -> None:
        asyncio.run(enter_and_read())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    await enter_and_read()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert found == [bodies] * 15


async def test_a_server_that_went_away_does_not_hang_the_exit(
    loopback: Any, noise: list[Any]
) -> None:
    hanging = ObjectDataset(loopback.at("hang"), ["cats/z.bin"])
    task = asyncio.create_task(hanging[0])
    await asyncio.to_thread(loopback.entered.wait)
    await hanging.aclose(seconds=0.0)
    with pytest.raises(asyncio.CancelledError):
        await task
