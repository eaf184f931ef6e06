"""Code that blocks the event loop is measured and named."""

import asyncio
import os
import select
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aioloader
from aioloader._pipeline.loop_watch import watch_of

STEPS = 24


def block(seconds: float) -> None:
    """Wait without leaving the loop, as many drivers do."""
    select.select([], [], [], seconds)


class Blocking:
    """Each eighth read sleeps without leaving the loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8 * STEPS

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.001)
        if index % 8 == 0:
            block(self.seconds)
        return index


class Computing(Blocking):
    """Each eighth read computes for that long."""

    async def __getitem__(self, index: int) -> int:
        end = time.thread_time() + self.seconds
        while index % 8 == 0 and time.thread_time() < end:
            pass
        return index


class Stream:
    """An async generator that sleeps without leaving the loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(8 * STEPS):
            if number % 8 == 0:
                block(self.seconds)
            yield number


def loader_of(dataset: Any, **options: Any) -> Any:
    return aioloader.DataLoader(dataset, batch_size=8, prefetch_factor=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Blocking(0.04), Computing(0.12), Stream(0.04)])
def test_code_that_blocks_the_loop_is_named(dataset: Any) -> None:
    with loader_of(dataset) as loader:
        loader.report()
        assert sum(1 for _ in loader) == STEPS
        lag, report = loader.stats().loop_lag, loader.report()
    method = "__aiter__" if isinstance(dataset, Stream) else "__getitem__"
    assert lag is not None
    assert lag.culprit.startswith(f"{type(dataset).__name__}.{method} (test_loop_lag")
    assert lag.share > 0.3
    assert lag.seconds > 0.02
    assert lag.computes == isinstance(dataset, Computing)
    assert not lag.is_callers
    assert report.stage == "loop"
    assert lag.culprit in report.headline
    assert lag.culprit in str(loader.stats())


@pytest.mark.slow
def test_a_report_starts_the_watch_on_the_loop(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A trace or a debug logger starts it, too."""
    with loader_of(Blocking(0.04)) as loader:
        for _ in loader:
            threads = {thread.name for thread in threading.enumerate()}
            assert "aioloader-watch" not in threads
        first = loader.report()
        assert (first.stage, first.advice) == ("loop", None)
        assert "call report() again" in str(first)
        assert loader.report().stage == "loop"  # no batch has come since
        list(loader)
        assert "Blocking.__getitem__" in loader.report().headline
    with loader_of(Blocking(0.04)) as loader, loader.trace(tmp_path / "trace.json"):
        list(loader)
        assert "Blocking.__getitem__" in loader.report().headline
    with caplog.at_level("DEBUG", "aioloader"), loader_of(Blocking(0.04)) as loader:
        list(loader)
    assert "Blocking.__getitem__" in caplog.text


@pytest.mark.slow
async def test_a_step_that_blocks_the_callers_loop_is_named() -> None:
    """It delays the reads, which could run on another loop."""

    async def main() -> Any:
        async with loader_of(Blocking(0.0), loop="caller") as loader:
            loader.report()
            async for _ in loader:
                block(0.04)
            return loader.stats().loop_lag

    lag = await main()
    assert lag is not None
    assert (
        "test_a_step_that_blocks_the_callers_loop_is_named.<locals>.main" in lag.culprit
    )
    assert lag.is_callers


def test_no_code_is_blamed_if_the_loop_is_free() -> None:
    with loader_of(Blocking(0.0)) as loader:
        for _ in loader:
            block(0.01)
        lag = loader.stats().loop_lag
    assert lag is None or not lag.culprit
    assert "event loop blocked" not in str(loader.stats()) or lag is not None


def test_the_watch_on_the_loop_ends_with_the_iteration() -> None:
    with loader_of(Blocking(0.04)) as loader:
        loader.report()
        for _ in loader:
            pass
    for thread in threading.enumerate():
        if thread.name == "aioloader-watch":
            thread.join(10)
            assert not thread.is_alive()


async def test_the_watch_on_the_loop_leaves_no_timer() -> None:
    """Neither after the end, nor after a break; the next iteration has one again."""
    loop = asyncio.get_running_loop()
    watch = watch_of(loop, is_callers=True)
    for _ in range(2):
        async with loader_of(Blocking(0.0), loop="caller") as loader:
            async for _batch in loader:
                later = asyncio.Event()  # than the 20 ms after which it is set
                loop.call_later(0.03, later.set)
                await later.wait()
                assert watch._timer is not None
                break
        assert watch._timer is None


@pytest.mark.slow
def test_a_forked_child_watches_its_own_loop() -> None:
    """It has no copy of its parent's thread."""
    with loader_of(Blocking(0.04)) as loader:
        loader.report()
        for _ in loader:
            if any(t.name == "aioloader-watch" for t in threading.enumerate()):
                break
        else:
            raise AssertionError("no watch has started")
        child = os.fork()
        if not child:
            code = 1
            try:
                with loader_of(Blocking(0.04)) as another:
                    another.report()
                    list(another)
                    lag = another.stats().loop_lag
                code = 0 if lag is not None and lag.culprit else 2
            finally:
                os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
