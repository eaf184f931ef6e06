"""Runs of batches: each batch of one can be resumed after, and the window is kept."""

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
def test_a_state_after_each_batch(make: Make) -> None:
    """It is that of the batch, wherever the blocks and runs begin."""
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
def test_a_state_after_each_batch_of_workers(make: Any) -> None:
    """Though hundreds are read ahead, by datasets and readers with and without one."""
    options: Any = {"num_workers": 2, "collate_fn": list}
    size = () if make is ManyCounted else (1_000,)
    assert_resumes(lambda: DataLoader(make(*size), 3, **options), step=7)


def counted(stream: Any, **options: Any) -> int:
    """Return how many batches were in flight at most."""
    most = 0
    with DataLoader(stream, 2, **options) as loader:
        for _ in loader:
            most = max(most, loader.stats().in_flight)
    return most


def test_a_window_is_exact_if_it_is_given() -> None:
    """Otherwise what is read quickly is read further ahead, up to a run of 256."""
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
def test_workers_make_no_heavy_batches_further_ahead(transform: Any) -> None:
    """Only small ones that come quickly."""
    assert counted(range(80), num_workers=2, transform=transform) <= 4


# They grow and shrink: in a pipe, in a frame, in shared memory.
SIZES = (9_000, 1, 500, 60_000, 9_000, 150_000, 3_000, 16_000, 150_000, 1)


class Gated:
    """Sizes vary; the sample at the gate waits until it is opened."""

    def __init__(self, at: int) -> None:
        context = multiprocessing.get_context("fork")
        self.at, self.gate, self.reached = at, context.Event(), context.Event()

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
def test_a_batch_that_waits_holds_no_other_back() -> None:
    """Quick ones before and after it come, from either worker."""
    dataset: Any = Gated(200)
    iterator = iter(DataLoader(dataset, num_workers=2, in_order=False))
    found = [first(next(iterator)) for _ in range(299)]
    dataset.gate.set()
    assert [first(batch) for batch in iterator] == [200]
    assert sorted(found) == [*range(200), *range(201, 300)]


@pytest.mark.usefixtures("fork_is_default")
def test_small_and_large_results_are_all_there() -> None:
    """Also those for which a pipe has no room while the consumer takes none."""
    dataset: Any = Gated(128)
    dataset.gate.set()
    iterator = iter(DataLoader(dataset, num_workers=2, prefetch_factor=64))
    found = [first(next(iterator))]
    assert dataset.reached.wait(20)
    assert [*found, *map(first, iterator)] == [*range(300)]


async def test_tasks_get_batches_in_the_order_in_which_they_ask() -> None:
    """Those that wait come before one that finds its batch there."""
    async with DataLoader(range(900), 2, transform=abs) as loader:
        batches, taken = aiter(loader), list[tuple[int, int]]()

        async def take(place: int) -> None:
            batch = await anext(batches)
            taken.append((place, int(batch[0])))

        places = iter(range(450))
        while tasks := [asyncio.create_task(take(k)) for k in islice(places, 7)]:
            await asyncio.wait(tasks)
    assert taken == [(place, 2 * place) for place in range(450)]
