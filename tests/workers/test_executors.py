"""A user's executor as workers: it remains the user's."""

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader
from aioloader.errors import WorkerStartError
from beside import beside
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels
from working import Drawing, Numbers, double, double_async, total


def process_pool(method: str = "fork") -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method))


@pytest.fixture(params=[ThreadPoolExecutor, process_pool], ids=["threads", "processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Return an executor that is shut down at the end."""
    make = request.param
    with make(2) if make is ThreadPoolExecutor else make() as executor:
        yield executor


def make(dataset: Any, executor: Executor, **options: Any) -> Any:
    """Return a loader that makes two batches at once."""
    return DataLoader(dataset, **{"num_workers": 2, "workers": executor, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", [SyncMap, AsyncMap, SyncStream, AsyncStream], ids=lambda d: d.__name__
)
def test_an_executor_serves_every_dataset(executor: Executor, dataset: Any) -> None:
    """The loader reads streams and coroutines, once; the order is kept."""
    loader = make(dataset(), executor, batch_size=6)
    expected = labels(list(TorchLoader(SyncMap(), batch_size=6)))
    for _ in range(2):
        assert labels(list(loader)) == expected
    assert executor.submit(int, "3").result() == 3


@pytest.mark.parametrize("transform", [double, double_async])
def test_functions_may_be_plain_or_async(executor: Executor, transform: Any) -> None:
    """Plain ones run in the executor, coroutines on the loop."""
    loader = make(
        Numbers(10), executor, batch_size=4, transform=transform, collate_fn=total
    )
    assert list(loader) == [12, 44, 34]


def test_random_draws_are_those_of_worker_processes() -> None:
    """They are seeded by the batch."""

    def numbers(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(Drawing(), 4, generator=generator, **options)
        return [batch[1].tolist() for batch in loader]

    expected = numbers(num_workers=0, rng="batch")
    with process_pool() as executor:
        assert numbers(num_workers=2, workers=executor) == expected


def test_what_cannot_be_pickled_is_named() -> None:
    """The message is that of worker processes."""
    lock = multiprocessing.get_context("fork").Lock()._semlock  # type: ignore[attr-defined]
    with process_pool() as executor:
        loader = make(Numbers(), executor, transform=lambda value: lock and value)
        with pytest.raises(WorkerStartError, match=r"transform\.<lock> cannot be"):
            list(loader)
        assert executor.submit(int, "3").result() == 3


def kill(_sample: Any) -> None:
    """End the process that runs this."""
    signal.raise_signal(signal.SIGKILL)


async def test_a_broken_pool_is_an_error() -> None:
    """The executor's own error, not a hang."""
    with process_pool() as executor:
        loader = make(Numbers(), executor, transform=kill)
        with pytest.raises(BrokenProcessPool):
            await asyncio.wait_for(collect(loader), 30)


async def test_a_shut_down_executor_is_an_error() -> None:
    """The executor's own error."""
    with ThreadPoolExecutor(1) as executor:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        await beside(lambda: list(make(Numbers(), executor)))


def test_shutting_the_executor_down_midway_is_an_error() -> None:
    """Not a hang."""
    with ThreadPoolExecutor(1) as executor:

        def end(index: int) -> int:
            if index == 0:
                executor.shutdown(wait=False, cancel_futures=True)
            return index

        iterator = iter(make(Numbers(3), executor, transform=end, prefetch_factor=2))
        with pytest.raises(RuntimeError, match=r"shut ?(it )?down"):
            list(iterator)


def test_a_dropped_iterator_leaves_the_executor_usable(executor: Executor) -> None:
    """Its pending batches are cancelled."""
    iterator = iter(make(Numbers(100), executor, prefetch_factor=10))
    next(iterator)
    del iterator
    assert executor.submit(int, "3").result() == 3


@pytest.mark.slow
def test_a_pool_of_spawned_processes_can_be_used() -> None:
    with process_pool("spawn") as executor:
        loader = make(Numbers(), executor, batch_size=4, transform=lambda x: x + 1)
        assert torch.cat(list(loader)).tolist() == [*range(1, 13)]


def test_an_init_function_is_refused() -> None:
    """The executor has its own initializer."""
    given = pytest.raises(ValueError, match="give the executor an initializer")
    with ThreadPoolExecutor(1) as executor, given:
        make(Numbers(), executor, worker_init_fn=kill)


def set_clock(seconds: float) -> None:
    """Shift this process's clock, as if it ran on another machine."""
    here = time.perf_counter
    for module in [*sys.modules.values()]:
        if vars(module).get("perf_counter") is here:
            vars(module)["perf_counter"] = lambda: here() + seconds


@pytest.mark.parametrize("seconds", [-1e5, 1e5])
def test_times_of_other_machines_are_converted(seconds: float) -> None:
    """A batch is made between its request and its end."""
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, context, set_clock, (seconds,)) as pool,
        DataLoader(range(8), 2, num_workers=1, workers=pool) as loader,
    ):
        began = time.perf_counter()
        assert len(list(loader)) == 4
        stats = loader.stats()
    for record in stats._records:
        assert began < record.made[0] <= record.made[4] <= record.taken
