"""A loop that has ended takes its pipelines with it; the loader serves the next one.

A warning is an error here: that a read has not returned would be a false one.
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
    """Notes the waits of this thread that were given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given_up: list[float] = []
        mine, wait = threading.get_ident(), threading.Condition.wait

        def noting(one: threading.Condition, timeout: float | None = None) -> bool:
            is_set = wait(one, timeout)
            if not is_set and timeout and threading.get_ident() == mine:
                self.given_up.append(timeout)
            return is_set

        monkeypatch.setattr(threading.Condition, "wait", noting)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Note waits in vain."""
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
def test_the_loop_is_gone(
    run: Any, kind: Any, begin: Any, again: bool, waits: Waits
) -> None:
    """There is nothing to wait for, and a second run works at once."""

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
def test_a_loop_that_was_closed_amid_an_epoch(kind: Any, waits: Waits) -> None:
    """Its tasks were never cancelled: an interactive session's loop, say.

    What nobody makes any more is an error, not a wait without end.
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


async def close(*closed: Any) -> None:
    """Close in this loop what another one has left."""
    async with asyncio.timeout(PATIENCE / 4):
        for one in closed:
            await one.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("begin", [first, enter])
@pytest.mark.parametrize("kind", KINDS)
def test_closing_from_another_loop(kind: Any, begin: Any, by: str) -> None:
    """``aclose`` in a second run, of what the first has left."""
    loader = make("caller", kind(), **BY[by])
    iterator = asyncio.run(begin(loader))
    asyncio.run(close(iterator, loader))


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("begin", [first, enter])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_stands_still(kind: Any, begin: Any, by: str) -> None:
    """It is not closed, but nobody runs it: its tasks end when somebody does."""
    loop = asyncio.new_event_loop()
    loader = make("caller", kind(), **BY[by])
    iterator = loop.run_until_complete(begin(loader))
    assert labels(asyncio.run(collect(loader))) == EXPECTED
    asyncio.run(close(iterator, loader))
    loop.run_until_complete(quiet())
    assert asyncio.all_tasks(loop) == set()
    loop.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_runs_now_and_then(kind: Any) -> None:
    """As notebooks and test frameworks do: an epoch goes on in the next call."""
    loop = asyncio.new_event_loop()
    loader = make("caller", kind())
    iterator = loop.run_until_complete(first(loader))
    rest = loop.run_until_complete(collect(iterator))
    assert labels(rest) == EXPECTED[1:]
    loader.close()
    loop.run_until_complete(quiet())
    assert asyncio.all_tasks(loop) == set()
    loop.close()


def test_two_loops_at_once() -> None:
    """Two threads, each with a loop, share a loader of the caller's loop."""
    loader = make("caller", AsyncMap())
    found: list[Any] = []

    def work() -> None:
        found.append(labels(asyncio.run(collect(loader))))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [EXPECTED] * 2
