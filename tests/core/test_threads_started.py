"""How many threads a request and an epoch start: none without plain user code."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from beside import beside
from core.kit import ASYNC_WAYS, PATIENCE, WAYS, bounded, counted_starts, make, outcomes
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels
from working import AsyncNumbers, double_async, total_async

MONKEYS = pytest.MonkeyPatch
EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]


async def request(loader: DataLoader[Any]) -> Any:
    """Take one batch and close, as a request does."""
    async with loader:
        return await anext(aiter(loader))


# -- on the caller's loop -----------------------------------------------------------


async def many(loaders: Iterable[DataLoader[Any]]) -> list[Any]:
    return await bounded(asyncio.gather(*map(collect, loaders)))


TAKEN: dict[str, Callable[[], Any]] = {
    "a request": lambda: request(make("caller", AsyncMap())),
    "a request of a stream": lambda: request(make("caller", AsyncStream())),
    "a shuffled request": lambda: request(make("caller", AsyncMap(), shuffle=True)),
    "an epoch": lambda: collect(make("caller", AsyncMap())),
    "async functions": lambda: collect(
        make("caller", AsyncNumbers(8), transform=double_async, collate_fn=total_async)
    ),
    "tensors": lambda: collect(make("caller", TensorDataset(torch.arange(20)))),
    "a list": lambda: collect(make("thread", [*range(20)], shuffle=True)),
    "a tuple of single samples": lambda: collect(
        make("thread", (*range(20),), batch_size=None)
    ),
    "fifty loaders": lambda: many(make("caller", AsyncMap()) for _ in range(50)),
    "one, fifty times": lambda: many([make("caller", AsyncMap())] * 50),
}


@pytest.mark.parametrize("case", TAKEN)
async def test_async_reads_start_no_thread(case: str, monkeypatch: MONKEYS) -> None:
    """Reads of a list start none, either; batches are collated by torch's rules."""
    await TAKEN["a request"]()  # the first of a process imports modules in a thread
    with counted_starts(monkeypatch) as started:
        assert await TAKEN[case]()
    assert started == []


SLOW: dict[str, Callable[[], DataLoader[Any]]] = {
    "transform": lambda: make("thread", [*range(20)], transform=abs),
    "collate_fn": lambda: make("thread", [*range(20)], collate_fn=list),
    "large": lambda: make("thread", [torch.zeros(1 << 17)] * 4),
    "large at the end": lambda: make("thread", [*"abcd", "e" * (1 << 20)]),
    "of any size": lambda: make("thread", [torch.zeros(1)] * 4, batch_size=1),
    "dataset": lambda: make("thread", SyncMap()),
}


@pytest.mark.parametrize("case", SLOW)
async def test_slow_stages_run_in_a_thread(case: str, monkeypatch: MONKEYS) -> None:
    """Slow stages are user code, and large batches, even of a list."""
    with counted_starts(monkeypatch) as started:
        assert await collect(SLOW[case]())
    assert "aioloader-cpu" in started


def threads_of_loaders() -> list[threading.Thread]:
    """Return all threads except the watchdog of blocked loops."""
    return [t for t in threading.enumerate() if t.name != "aioloader-watch"]


class Crowd:
    """Loaders that each hold one batch until all have one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = 0
        self.all = asyncio.Event()
        self.threads = 0

    async def join(self, loader: DataLoader[Any]) -> None:
        """Take a batch, wait for the others, and close."""
        async with loader:
            async for _ in loader:
                self.arrived += 1
                if self.arrived == self.number:
                    self.threads = len(threads_of_loaders())
                    self.all.set()
                await self.all.wait()
                return


def double(sample: Any) -> Any:
    return sample[0] * 2, sample[1]


def first_of(samples: Any) -> Any:
    """Collate, in plain code."""
    return samples[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "number", "options", "most"),
    [
        ("caller", 200, {}, 0),
        ("caller", 200, {"transform": double}, 10),
        ("caller", 200, {"collate_fn": first_of}, 10),
        ("thread", 50, {}, 200),
    ],
    ids=["nothing is plain", "transform", "collate_fn", "private loops"],
)
async def test_concurrent_loaders_share_threads(
    way: str, number: int, options: dict[str, Any], most: int
) -> None:
    """On a caller's loop, plain code runs in a few threads."""
    before = len(threads_of_loaders())
    crowd = Crowd(number)
    loaders = [make(way, AsyncMap(), **options) for _ in range(number)]
    await bounded(asyncio.gather(*map(crowd.join, loaders)))
    assert crowd.arrived == number
    assert crowd.threads - before <= most


async def test_shared_threads_do_not_wait_for_each_other() -> None:
    """The transforms of four requests wait for each other at a barrier."""
    barrier = threading.Barrier(4)

    def meet(sample: Any) -> Any:
        if sample[1] == 0:
            barrier.wait(PATIENCE)
        return sample

    loaders = [make("caller", AsyncMap(8), transform=meet) for _ in range(4)]
    epochs = await bounded(asyncio.gather(*map(collect, loaders)))
    assert [labels(batches) for batches in epochs] == [EXPECTED[:2]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_shared_threads_may_iterate_loaders(way: str) -> None:
    """Each transform of 24 requests iterates an inner loader with a transform."""

    def inner(_: Any) -> int:
        loader = make(way, AsyncMap(), transform=double, timeout=PATIENCE)
        if way == "for":
            return len(list(loader))
        return len(asyncio.run(collect(loader)))

    loaders = [make("caller", AsyncMap(4), transform=inner) for _ in range(24)]
    epochs = await bounded(asyncio.gather(*map(collect, loaders)))
    assert [batch.tolist() for batches in epochs for batch in batches] == [[5] * 4] * 24


# -- a private loop -----------------------------------------------------------------


class Nesting(AsyncMap):
    """A dataset that reads another loader, by ``async for`` or by ``for``."""

    def __init__(self, inner: Any, how: str) -> None:
        super().__init__(8)
        self.inner = inner
        self.how = how

    async def __getitem__(self, index: int) -> Any:
        if self.how == "for":  # it blocks its loop, which is not the inner loader's
            batches = list(self.inner())
        else:
            batches = await collect(self.inner())
        return sum(len(batch[1]) for batch in batches)


@pytest.mark.slow
@pytest.mark.blocking
@pytest.mark.parametrize("inner_kind", [SyncMap, AsyncMap, SyncStream, AsyncStream])
@pytest.mark.parametrize("how", ["for", "async for"])
@pytest.mark.parametrize("way", ["for", "thread"])
async def test_nested_loaders_do_not_hang(way: str, how: str, inner_kind: Any) -> None:
    """Each of the two loaders has its own loop."""
    dataset = Nesting(lambda: DataLoader(inner_kind(), 4, timeout=PATIENCE), how)
    assert await outcomes(way, make(way, dataset)) == [[20] * 4] * 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["transform", "collate_fn", "sync dataset"])
@pytest.mark.parametrize("way", ["for", "thread"])
async def test_plain_user_code_may_iterate_another_loader(way: str, place: str) -> None:
    """The inner loader reads an async dataset while the outer one waits."""

    def inner(_: Any) -> int:
        return len(list(DataLoader(AsyncMap(), 4, timeout=PATIENCE)))

    dataset: Any = AsyncMap(8)
    options: Any = {place: inner}
    if place == "sync dataset":
        dataset, options = Reading(inner), {}
    batches = await outcomes(way, make(way, dataset, **options))
    assert batches == ([5, 5] if place == "collate_fn" else [[5] * 4] * 2)


class Reading(SyncMap):
    """Reads by a function."""

    def __init__(self, read: Any) -> None:
        super().__init__(8)
        self.read = read

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


# -- epochs of a loader that is kept open -------------------------------------------

EPOCHS: dict[str, Any] = {
    "sync map, async for": ("thread", SyncMap, {}),
    "async map, async for": ("thread", AsyncMap, {}),
    "async map, caller": ("caller", AsyncMap, {}),
    "async map, transform, caller": ("caller", AsyncMap, {"transform": double}),
    "sync map, caller": ("caller", SyncMap, {}),
    "sync stream, async for": ("thread", SyncStream, {}),
    "async stream, async for": ("thread", AsyncStream, {}),
    "async map, for": ("for", AsyncMap, {}),
    "async map, collate, for": ("for", AsyncMap, {"collate_fn": first_of}),
    "sync map ahead, for": ("for", SyncMap, {"prefetch_factor": 2}),
    "async stream, for": ("for", AsyncStream, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EPOCHS)
async def test_a_later_epoch_starts_no_thread(case: str, monkeypatch: MONKEYS) -> None:
    """The loader is kept open by ``with`` or ``async with``."""
    way, kind, options = EPOCHS[case]
    loader = make(way, kind(), **options)

    def epochs() -> list[str]:
        with loader:
            list(loader)
            with counted_starts(monkeypatch) as started:
                assert len(list(loader)) == 5
        return started

    if way == "for":
        assert await beside(epochs) == []
        return
    async with loader:
        await collect(loader)
        with counted_starts(monkeypatch) as started:
            assert len(await collect(loader)) == 5
    assert started == []


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_later_epoch_opens_no_loop(way: str, monkeypatch: MONKEYS) -> None:
    """A break out of an epoch does not change that."""
    opened: list[int] = []
    created = asyncio.BaseEventLoop.__init__

    def noting(loop: Any) -> None:
        opened.append(1)
        created(loop)

    async with make(way, AsyncMap()) as loader:
        await collect(loader)
        async for _ in loader:
            break
        monkeypatch.setattr(asyncio.BaseEventLoop, "__init__", noting)
        monkeypatch.setattr("uvloop.new_event_loop", lambda: noting(None))
        assert labels(await bounded(collect(loader))) == EXPECTED
    assert opened == []


def test_a_plain_epoch_starts_no_thread(monkeypatch: MONKEYS) -> None:
    """Neither the first epoch nor later ones."""
    with counted_starts(monkeypatch) as started:
        for kind in (SyncMap, SyncStream):
            assert len(list(make("for", kind()))) == 5
    assert started == []
