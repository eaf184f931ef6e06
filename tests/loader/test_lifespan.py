"""``lifespan=``: entered once where samples are read, and left however that ends."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aioloader import DataLoader
from beside import beside
from lifespans import (
    ONCE,
    PLACES,
    SyncLog,
    join,
    pass_on,
    plain,
)
from samples import collect

Loader: Any = DataLoader  # options are tables here


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
async def test_once_in_each_place(name: str) -> None:
    """Per epoch, for iterations at the same time, and inside ``async with``."""
    make, lifespan, options, place, events = PLACES[name]
    dataset = make()
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)
    assert len(await collect(loader)) == 4
    assert dataset.taken() == (events, {place})
    await asyncio.gather(*(collect(loader) for _ in range(3)))
    found, _ = dataset.taken()
    assert [found[0], found[-1]] == ["enter", "leave"]
    assert found.count("enter") == found.count("leave") == 1
    async with loader:
        await collect(loader)
        await collect(loader)
        found, _ = dataset.taken()
        assert found[0] == "enter"
        assert found.count("enter") == 1
        assert "leave" not in found
    assert dataset.taken() == (["leave"], {place})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "cancellation", "error"])
@pytest.mark.parametrize("name", PLACES)
async def test_left_however_it_ends(name: str, how: str) -> None:
    """The consumer leaves or is cancelled, or a later stage fails."""

    def refuse(_samples: Any) -> Any:
        raise KeyError("collate")

    make, lifespan, options, place, events = PLACES[name]
    dataset = make(40)
    if how == "error":
        options = {**options, "collate_fn": refuse}
        if name == "iterable beside a loop":
            options["transform"] = pass_on
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)

    async def consume() -> None:
        async with loader:
            async for _ in loader:
                if how == "break":
                    break
                task.cancel()

    task = asyncio.ensure_future(consume())
    await asyncio.wait([task])
    assert task.cancelled() == (how == "cancellation")
    if how == "error":
        with pytest.raises(KeyError, match="collate"):
            await task
    assert dataset.taken() == (events, {place})


def test_inline() -> None:
    """In the consumer's thread, without a thread or a loop."""
    dataset = SyncLog()
    loader = DataLoader(dataset, batch_size=2, lifespan=plain)
    threads = set(threading.enumerate())  # fsspec's never ends
    for _ in loader:
        assert set(threading.enumerate()) <= threads
    assert dataset.taken() == (ONCE, {"MainThread"})
    for _ in loader:
        break
    gc.collect()
    assert dataset.taken() == (ONCE, {"MainThread"})
    with loader:
        list(loader)
        list(loader)
        assert dataset.taken()[0] == ["enter", "read"]
    assert dataset.taken() == (["leave"], {"MainThread"})
    list(DataLoader(dataset, batch_size=2, lifespan=plain, timeout=60))
    assert dataset.taken() == (ONCE, {"aioloader-cpu"})
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    gc.collect()
    assert dataset.taken() == (ONCE, {"MainThread"})


def test_inline_of_tensors() -> None:
    """Those that would be gathered too."""
    import torch  # noqa: PLC0415
    from torch.utils.data import TensorDataset  # noqa: PLC0415

    events: list[Any] = []

    @contextlib.contextmanager
    def lifespan(dataset: Any) -> Iterator[None]:
        events.append(dataset)
        yield
        events.append("leave")

    data = TensorDataset(torch.arange(6))
    batches = list(DataLoader(data, batch_size=3, lifespan=lifespan))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert events == [data, "leave"]


@pytest.mark.parametrize("name", ["thread", "loop", "threads"])
async def test_left_by_the_collector(name: str) -> None:
    """An iterator that is dropped."""
    make, lifespan, options, place, events = PLACES[name]
    dataset = make(40)
    left = threading.Event()

    class Watched(make):  # type: ignore[misc, valid-type]
        def note(self, event: str) -> None:
            super().note(event)
            if event == "leave":
                left.set()

    dataset = Watched(40)
    iterator = aiter(Loader(dataset, batch_size=2, lifespan=lifespan, **options))
    await anext(iterator)
    del iterator
    gc.collect()
    await beside(lambda: left.wait(10))
    assert dataset.taken() == (events, {place})
    join()
