"""``async for`` yields to the caller's loop, and draws no long permutation on it.

A step spins for more than a millisecond, after which the loop must get a turn. The
beats of a concurrent task are counted, batch by batch.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Sampler, TensorDataset

from aioloader import DataLoader
from core.kit import ASYNC_WAYS, PROCESSES, THREADS, bounded, make
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream
from working import Numbers, double_async, total_async

MANY = 1 << 20


class Beats:
    """A task that counts the turns of its loop."""

    def __init__(self) -> None:
        self.count = 0

    async def beat(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


def spin(seconds: float) -> None:
    """Block, as a training step does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def beats_of(loader: Any, seconds: float) -> list[int]:
    """Return for each batch how often the loop had turned by then."""
    beats = Beats()
    seen: list[int] = []
    task = asyncio.create_task(beats.beat())
    async for _ in loader:
        seen.append(beats.count)
        spin(seconds)
    task.cancel()
    await asyncio.wait([task])
    return seen


def rows(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.zeros(n, 2))


SOURCES: dict[str, Any] = {
    "tensors": (rows, {}),
    "map": (SyncMap, {"prefetch_factor": 16}),
    "async map": (AsyncMap, {"prefetch_factor": 16}),
    "stream": (SyncStream, {"prefetch_factor": 16}),
    "async stream": (AsyncStream, {"prefetch_factor": 16}),
    "async transform": (Numbers, {"transform": double_async}),
    "async collate": (Numbers, {"collate_fn": total_async}),
    "worker threads": (SyncMap, {**THREADS, "prefetch_factor": 16}),
    "worker processes": (SyncMap, {**PROCESSES, "prefetch_factor": 16}),
    "tensors in processes": (rows, {**PROCESSES, "prefetch_factor": 16}),
    "async map in processes": (AsyncMap, {**PROCESSES, "prefetch_factor": 16}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("source", SOURCES)
async def test_the_loop_turns_for_each_long_step(source: str, way: str) -> None:
    """Whatever the number of batches that are ready."""
    dataset, options = SOURCES[source]
    seen = await bounded(beats_of(make(way, dataset(80), **options), 0.002))
    turns = [later - sooner for sooner, later in pairwise(seen)]
    assert len(turns) == 19
    assert min(turns) >= 1, turns


@pytest.mark.slow
@pytest.mark.parametrize("source", ["tensors", "map", "async map", "worker processes"])
async def test_the_loop_turns_after_some_short_steps(source: str) -> None:
    """Time adds up over batches: the loop gets a turn after each millisecond."""
    dataset, options = SOURCES[source]
    seen = await bounded(beats_of(make("thread", dataset(400), **options), 0.0003))
    turns = [later - sooner for sooner, later in zip(seen, seen[10:], strict=False)]
    assert min(turns) >= 1, turns


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_timer_fires_while_batches_are_ready(way: str) -> None:
    """The timer does not wait for the end of the epoch."""
    fired: list[int] = []
    loader = make(way, AsyncMap(400), prefetch_factor=16)
    asyncio.get_running_loop().call_later(0.001, fired.append, 0)
    async for _ in loader:
        spin(0.0015)
        if fired:
            break
    assert fired == [0]


class Ordered(Sampler[int]):
    """A user's sampler that records the threads that iterate it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.threads.add(threading.get_ident())
        return iter(torch.randperm(self.n).tolist())


class Long(SyncMap):
    """Reports a great length."""

    def __init__(self) -> None:
        super().__init__(MANY)


class AsyncLong(AsyncMap):
    """Reports a great length."""

    def __init__(self) -> None:
        super().__init__(MANY)


def long_rows() -> TensorDataset:
    return TensorDataset(torch.zeros(MANY))


LONG = [Long, AsyncLong, long_rows]


async def first_of(loader: DataLoader[Any]) -> None:
    """Take one batch."""
    iterator = aiter(loader)
    await bounded(anext(iterator))
    await iterator.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("dataset", LONG)
async def test_a_long_sampler_is_iterated_off_the_loop(dataset: Any, way: str) -> None:
    """A user's sampler may take any time to start."""
    sampler = Ordered(MANY)
    await first_of(make(way, dataset(), sampler=sampler))
    assert threading.get_ident() not in sampler.threads


@pytest.fixture
def permuting(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Record the threads that draw large permutations."""
    threads: set[int] = set()
    drawn = torch.randperm

    def randperm(n: int, *args: Any, **options: Any) -> torch.Tensor:
        if n >= MANY // 4:
            threads.add(threading.get_ident())
        return drawn(n, *args, **options)

    monkeypatch.setattr(torch, "randperm", randperm)
    return threads


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("dataset", LONG)
async def test_a_permutation_is_drawn_off_the_loop(
    dataset: Any, way: str, permuting: set[int]
) -> None:
    """For ``shuffle=True``, and again after a state was loaded."""
    generator = torch.Generator().manual_seed(1)
    loader = make(way, dataset(), shuffle=True, generator=generator)
    await first_of(loader)
    assert permuting
    loader.load_state_dict(loader.state_dict())
    await first_of(loader)
    assert threading.get_ident() not in permuting


class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the random numbers that this thread draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "rand" in str(func) and isinstance(result, torch.Tensor):
            self.count += result.numel()
        return result


@pytest.mark.slow
def test_saving_and_loading_a_state_draws_nothing() -> None:
    """A generator's state is copied, not replayed: saving happens on the loop."""
    generator = torch.Generator().manual_seed(1)
    torch.empty(MANY).random_(generator=generator)
    loader = DataLoader(SyncMap(20), 4, shuffle=True, generator=generator)
    next(iter(loader))
    torch.empty(MANY).random_(generator=generator)
    with Drawn() as drawn:
        state = loader.state_dict()
        loader.load_state_dict(state)
    assert drawn.count == 0
    with Drawn() as drawn:
        next(iter(loader))
    assert drawn.count < 100
