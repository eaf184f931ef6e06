"""A loop that ended takes its pipelines with it; the loader works on the next loop.

Warnings are errors here: one about a read that has not returned would be false.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from aioloader.errors import LoaderClosedError
from aioloader.testing import no_leaks
from core.kit import BY, PATIENCE, bounded, make, quiet
from samples import AsyncMap, AsyncStream, SyncMap, collect, labels

RUNS: list[Callable[..., Any]] = [asyncio.run, uvloop.run]
EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
KINDS = [SyncMap, AsyncMap, AsyncStream]


class Waits:
    """Records the timeouts of this thread's waits that expired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given_up: list[float] = []
        mine, wait = threading.get_ident(), threading.Condition.wait

        def noting(lock: threading.Condition, timeout: float | None = None) -> bool:
            is_set = wait(lock, timeout)
            if not is_set and timeout and threading.get_ident() == mine:
                self.given_up.append(timeout)
            return is_set

        monkeypatch.setattr(threading.Condition, "wait", noting)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Record waits that expire."""
    return Waits(monkeypatch)


async def first(loader: Any) -> Any:
    """Take one batch and leave the iterator as it is."""
    iterator = aiter(loader)
    await anext(iterator)
    return iterator


async def enter(loader: Any) -> Any:
    """Enter a loader and never leave it."""
    await loader.__aenter__()
    return await first(loader)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("begin", [first, enter])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS, ids=["asyncio", "uvloop"])
def test_a_loader_closes_without_waiting_after_its_loop_ended(
    run: Any, kind: Any, begin: Any, again: bool, waits: Waits
) -> None:
    """A second ``run`` of the same loader works, too."""

    async def entered() -> Any:
        async with loader:
            return await collect(loader)

    with no_leaks():
        loader = make("caller", kind())
        iterator = run(begin(loader))
        if again:
            assert labels(run(entered())) == EXPECTED
            assert labels(run(collect(loader))) == EXPECTED
        iterator.close()
        loader.close()
        assert waits.given_up == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_works_after_its_loop_closed_midway(kind: Any, waits: Waits) -> None:
    """Its tasks were never cancelled, as in an interactive session.

    A batch that no loop makes any more is an error, not an endless wait.
    """
    loop = asyncio.new_event_loop()
    loader = make("caller", kind())
    iterator = loop.run_until_complete(first(loader))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    if kind is not SyncMap:
        with pytest.raises(LoaderClosedError, match="loop of the loader has ended"):
            asyncio.run(bounded(collect(iterator)))
    iterator.close()
    loader.close()
    assert labels(asyncio.run(collect(loader))) == EXPECTED
    assert waits.given_up == []


async def close(*resources: Any) -> None:
    """Close iterators and loaders that another loop left open."""
    async with asyncio.timeout(PATIENCE / 4):
        for resource in resources:
            await resource.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("begin", [first, enter])
@pytest.mark.parametrize("kind", KINDS)
def test_another_loop_can_close_what_one_left(kind: Any, begin: Any, by: str) -> None:
    """``aclose`` in a second ``run``, of the iterator and loader of the first."""
    loader = make("caller", kind(), **BY[by])
    iterator = asyncio.run(begin(loader))
    asyncio.run(close(iterator, loader))


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("begin", [first, enter])
@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_loop_delays_no_other_loop(kind: Any, begin: Any, by: str) -> None:
    """The tasks of a paused loop end when it runs again."""
    loop = asyncio.new_event_loop()
    loader = make("caller", kind(), **BY[by])
    iterator = loop.run_until_complete(begin(loader))
    assert labels(asyncio.run(collect(loader))) == EXPECTED
    asyncio.run(close(iterator, loader))
    loop.run_until_complete(quiet())
    assert asyncio.all_tasks(loop) == set()
    loop.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_continues_when_its_loop_runs_again(kind: Any) -> None:
    """Notebooks and test frameworks run a loop call by call."""
    loop = asyncio.new_event_loop()
    loader = make("caller", kind())
    iterator = loop.run_until_complete(first(loader))
    rest = loop.run_until_complete(collect(iterator))
    assert labels(rest) == EXPECTED[1:]
    loader.close()
    loop.run_until_complete(quiet())
    assert asyncio.all_tasks(loop) == set()
    loop.close()


def test_two_running_loops_share_a_loader() -> None:
    """Each loop runs in its own thread; ``loop="caller"``."""
    loader = make("caller", AsyncMap())
    results: list[Any] = []

    def work() -> None:
        results.append(labels(asyncio.run(collect(loader))))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [EXPECTED] * 2
