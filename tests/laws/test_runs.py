"""Loaders resume after any batch of a run, and bound how far they prefetch."""

import asyncio
import json
import multiprocessing
import time
from itertools import islice
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from datasets.shards import Make
from laws.chains import MAKES, made, upper
from stateful import Counted, Cursors

pytestmark = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


def named(samples: Any) -> list[str]:
    return [upper(sample) for sample in samples]


def loader_of(make: Make, **options: Any) -> Any:
    stream = made(make, ()).repeat(4)
    return DataLoader(stream, 3, collate_fn=named, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_stream_resumes_after_any_batch(make: Make) -> None:
    """Blocks and runs of batches may begin anywhere."""
    assert_resumes(lambda: loader_of(make))


def assert_resumes(make: Any, step: int = 1) -> None:
    batches, states = list[Any](), list[str]()
    with make() as loader:
        for batch in loader:
            batches.append(batch)
            states.append(json.dumps(loader.state_dict()))
    for number in range(1, 41 * step, step):
        with make() as loader:
            loader.load_state_dict(json.loads(states[number - 1]))
            assert list(islice(loader, 25)) == batches[number : number + 25], number


class ManyCounted(Counted):
    def __len__(self) -> int:
        return 1_000


@pytest.mark.slow
@pytest.mark.parametrize("make", [range, ManyCounted, Cursors])
def test_workers_resume_after_any_batch(make: Any) -> None:
    """Hundreds of batches are prefetched; the dataset may have a state."""
    options: Any = {"num_workers": 2, "collate_fn": list}
    size = () if make is ManyCounted else (1_000,)
    assert_resumes(lambda: DataLoader(make(*size), 3, **options), step=7)


def counted(stream: Any, **options: Any) -> int:
    """Return the highest number of batches in flight."""
    most = 0
    with DataLoader(stream, 2, **options) as loader:
        for _ in loader:
            most = max(most, loader.stats().in_flight)
    return most


def test_a_given_prefetch_factor_is_kept() -> None:
    """Without one, quick batches are prefetched further, up to a run of 256."""
    stream = from_iterable(range(2_000))
    assert counted(stream, prefetch_factor=2) <= 2
    assert 8 < counted(stream) <= 256 + 64
    numbers: Any = range(2_000)
    assert counted(numbers, num_workers=2, prefetch_factor=2) <= 4
    assert 8 < counted(numbers, num_workers=2) <= 256 + 4


def slow(index: int) -> int:
    time.sleep(0.002)
    return index


def large(index: int) -> torch.Tensor:
    return torch.full((1 << 15,), index)


@pytest.mark.parametrize("transform", [slow, large])
def test_workers_prefetch_no_more_heavy_batches(transform: Any) -> None:
    """Only small and quick batches are prefetched further."""
    assert counted(range(80), num_workers=2, transform=transform) <= 4


# Sent in a pipe, in a frame, or in shared memory.
SIZES = (9_000, 1, 500, 60_000, 9_000, 150_000, 3_000, 16_000, 150_000, 1)


class Gated:
    """Samples of various sizes; sample ``index`` waits until the gate is open."""

    def __init__(self, index: int) -> None:
        context = multiprocessing.get_context("fork")
        self.at, self.gate, self.reached = index, context.Event(), context.Event()

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.reached.set()
            assert self.gate.wait(20)
        return torch.full((SIZES[index % len(SIZES)],), index)


def first(batch: Any) -> int:
    number = batch[0, 0].item()
    assert (batch == number).all()
    return int(number)


@pytest.mark.usefixtures("fork_is_default")
def test_a_waiting_batch_delays_no_other() -> None:
    """Quick batches before and after it come from both workers."""
    dataset: Any = Gated(200)
    iterator = iter(DataLoader(dataset, num_workers=2, in_order=False))
    numbers = [first(next(iterator)) for _ in range(299)]
    dataset.gate.set()
    assert [first(batch) for batch in iterator] == [200]
    assert sorted(numbers) == [*range(200), *range(201, 300)]


@pytest.mark.usefixtures("fork_is_default")
def test_small_and_large_results_arrive_in_order() -> None:
    """A pipe may be full while the consumer takes nothing."""
    dataset: Any = Gated(128)
    dataset.gate.set()
    iterator = iter(DataLoader(dataset, num_workers=2, prefetch_factor=64))
    numbers = [first(next(iterator))]
    assert dataset.reached.wait(20)
    assert [*numbers, *map(first, iterator)] == [*range(300)]


async def test_tasks_get_batches_in_order_of_request() -> None:
    """Waiting tasks come before a task whose batch is already there."""
    async with DataLoader(range(900), 2, transform=abs) as loader:
        batches, taken = aiter(loader), list[tuple[int, int]]()

        async def take(place: int) -> None:
            batch = await anext(batches)
            taken.append((place, int(batch[0])))

        places = iter(range(450))
        while tasks := [asyncio.create_task(take(k)) for k in islice(places, 7)]:
            await asyncio.wait(tasks)
    assert taken == [(place, 2 * place) for place in range(450)]
