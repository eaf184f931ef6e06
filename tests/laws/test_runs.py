"""Runs of batches: each batch of one can be resumed after, and the window is kept."""

import asyncio
import json
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from datasets.shards import Make
from laws.chains import MAKES, made, upper

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
    batches, states = list[Any](), list[str]()
    with loader_of(make) as loader:
        for batch in loader:
            batches.append(batch)
            states.append(json.dumps(loader.state_dict()))
    for number, state in enumerate(states[:40], 1):
        with loader_of(make) as loader:
            loader.load_state_dict(json.loads(state))
            assert list(islice(loader, 25)) == batches[number : number + 25], number


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


@pytest.mark.blocking
@pytest.mark.parametrize("blocks", [False, True], ids=["waits", "blocks"])
def test_what_is_made_is_not_held_back_by_a_slow_read(blocks: bool) -> None:
    """The reader goes on only when its consumer has had all that it has read."""
    had = threading.Semaphore(0)

    class Numbers:
        async def __aiter__(self) -> AsyncIterator[int]:
            for number in range(600):
                if number % 200 == 100:
                    assert had.acquire() if blocks else await to_thread(had.acquire)
                yield number

    loader: Any = DataLoader(Numbers(), 2, timeout=20)
    for number, batch in enumerate(loader):
        assert batch.tolist() == [2 * number, 2 * number + 1]
        if number % 100 == 49:
            had.release()
