"""Where loaders work: any thread, any loop, nested, several at once."""

import asyncio
import threading
from typing import Any

import pytest

from aioloader import DataLoader
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]


@pytest.mark.parametrize("make", KINDS)
def test_in_another_thread(make: Any) -> None:
    """``for`` and ``async for`` off the main thread."""
    found: list[Any] = []

    def work() -> None:
        loader = DataLoader(make(), batch_size=4)
        found.append(labels(list(loader)))
        found.append(labels(asyncio.run(collect(loader))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [EXPECTED, EXPECTED]


@pytest.mark.blocking
@pytest.mark.parametrize("make", KINDS)
async def test_plain_for_inside_a_running_loop(make: Any) -> None:
    """It blocks the loop, as plain loops do, and works all the same."""
    assert labels(list(DataLoader(make(), batch_size=4))) == EXPECTED


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
async def test_nested(make: Any, loop: Any) -> None:
    """A loop over a loader inside of a loop over it."""
    loader = DataLoader(make(), batch_size=4, loop=loop)
    inner = [[labels([b])[0] async for b in loader] async for _ in loader]
    assert inner == [EXPECTED] * 5


def test_two_threads_share_one_iterator() -> None:
    """The same for threads, over the thread and over the loop."""
    for dataset in (SyncMap(), AsyncMap()):
        iterator = iter(DataLoader(dataset, batch_size=4, prefetch_factor=2))
        found: list[Any] = []
        threads = [
            threading.Thread(target=found.extend, args=(iterator,)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(labels(found)) == EXPECTED


def test_for_cannot_be_hosted_on_the_callers_loop() -> None:
    """It would wait for the loop that it blocks: said at once."""
    with pytest.raises(RuntimeError, match="use `async for`, or loop='thread'"):
        next(iter(DataLoader(AsyncMap(), loop="caller")))
    assert len(list(DataLoader(SyncMap(), loop="caller"))) == 20


async def test_for_does_not_block_the_callers_loop_forever() -> None:
    """Nor over an iterator of ``async for``."""
    iterator = aiter(DataLoader(AsyncMap(), batch_size=4, loop="caller"))
    with pytest.raises(RuntimeError, match="a plain `for` would block it"):
        next(iterator)
    await iterator.aclose()


async def test_the_callers_loop_is_where_coroutines_run() -> None:
    """And with the default they do not run there."""
    seen: set[Any] = set()

    class Looking(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            seen.add(asyncio.get_running_loop())
            return await super().__getitem__(index)

    await collect(DataLoader(Looking(), loop="caller"))
    assert seen == {asyncio.get_running_loop()}
    seen.clear()
    await collect(DataLoader(Looking()))
    assert len(seen) == 1
    assert seen != {asyncio.get_running_loop()}


async def test_plain_functions_do_not_run_on_the_loop() -> None:
    """Transform and collate run in the loader's thread, wherever coroutines run."""
    threads: set[str] = set()

    def look(value: Any) -> Any:
        threads.add(threading.current_thread().name)
        return value

    for loop in ("thread", "caller"):
        options: Any = {"transform": look, "collate_fn": look, "loop": loop}
        await collect(DataLoader(AsyncMap(), **options))
    await collect(DataLoader(SyncMap(), transform=look, collate_fn=look))
    assert threads == {"aioloader-cpu"}
