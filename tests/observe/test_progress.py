"""A progress display: what it shows, where, and that it leaves nothing open."""

import asyncio
import gc
import io
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tqdm import tqdm

from aioloader import DataLoader, progress
from aioloader._observe import progress as module
from observe.showing import Clock, Counting, Terminal
from samples import AsyncMap
from working import AsyncNumbers, Numbers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the display's clock, which only advances by assignment."""
    clock = Clock()
    monkeypatch.setattr(module, "clock", clock)
    monkeypatch.setattr(module, "_logged", weakref.WeakKeyDictionary())
    return clock


@pytest.fixture(params=["tqdm", "plain"])
def terminal(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    """Return a terminal, with tqdm and without; no bar may be left."""
    monkeypatch.setenv("COLUMNS", "200")
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    yield Terminal()
    assert not any(map(is_bar, gc.get_objects()))
    assert not [t for t in threading.enumerate() if type(t).__name__ == "TMonitor"]


def is_bar(bar: object) -> bool:
    """Return whether an object is an open bar."""
    return type(bar).__name__ == "Bar" and isinstance(bar, tqdm) and not bar.disable


@pytest.mark.parametrize("way", ["for", "async for"])
async def test_the_display_shows_rates_bytes_and_waiting(
    clock: Clock, terminal: Terminal, way: str
) -> None:
    """At the end, of the whole epoch."""
    shown = progress(Counting(clock), desc="train", file=terminal)
    if way == "for":
        numbers = [batch["number"] for batch in shown]
    else:
        numbers = [batch["number"] async for batch in shown]
    assert numbers == list(range(8))
    last = terminal.lines()[-1]
    assert last.startswith("train: ")
    assert "100%" in last
    assert "5 samples/s, 1 kB/s, waiting 25%" in last
    assert len(terminal.lines()) >= 8


def test_a_resumed_epoch_begins_at_its_position(
    clock: Clock, terminal: Terminal
) -> None:
    loader = Counting(clock, batches=3)
    loader.figures.resumed_at = 5
    for _ in progress(loader, file=terminal):
        pass
    lines = terminal.lines()
    assert "6/8" in lines[0] or "6 of 8" in lines[0]
    assert "8/8" in lines[-1] or "8 of 8" in lines[-1]
    assert "5 samples/s, 1 kB/s, waiting 25%, resumed at 5" in lines[-1]


@pytest.mark.parametrize(("costs", "looks"), [(0.0, range(18, 23)), (0.005, [3])])
def test_stats_are_read_seldom(
    clock: Clock, costs: float, looks: Sequence[int]
) -> None:
    """That takes a thousandth of the time; the position is always shown."""
    loader, terminal = Counting(clock, batches=1000, seconds=0.01), Terminal()
    loader.costs = costs
    for _ in progress(loader, file=terminal):
        pass
    assert loader.looks in looks
    assert len(terminal.lines()) >= 18


def test_a_line_a_minute_is_logged_without_a_terminal(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if epochs are shorter; nothing is printed."""
    caplog.set_level(logging.INFO, "aioloader")
    loader = Counting(clock, batches=40)
    for _ in range(5):
        for _ in progress(loader, desc="train"):
            pass
    assert capsys.readouterr() == ("", "")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("train: 20 of 40 batches (50%), ")
    assert said[0].endswith("samples/s, 1 kB/s, waiting 25%")


def test_a_missing_or_closed_stderr_is_no_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for file in (None, closed):
        monkeypatch.setattr(sys, "stderr", file)
        assert len(list(progress(Counting(clock)))) == 8


def test_a_closed_terminal_ends_no_training(clock: Clock, terminal: Terminal) -> None:
    taken = 0
    for _ in progress(Counting(clock), file=terminal):
        taken += 1
        if taken == 4:
            terminal.close()
    assert taken == 8


def test_a_break_ends_the_display(clock: Clock, terminal: Terminal) -> None:
    """So does ``close``; the loader's iterator is released."""
    loader = DataLoader(AsyncMap(64), 2)
    for number, _ in enumerate(progress(loader, file=terminal)):
        clock.now += 1
        if number == 3:
            break
    assert loader.stats().in_flight == 0
    assert terminal.getvalue().endswith("\n")
    batches = iter(progress(loader, file=terminal))
    next(batches)
    batches.close()
    assert list(batches) == []
    loader.close()


async def test_cancellation_ends_the_display(clock: Clock, terminal: Terminal) -> None:
    loader = DataLoader(AsyncMap(64), 2)
    taken = asyncio.Event()

    async def train() -> None:
        async for _ in progress(loader, file=terminal):
            clock.now += 1
            if clock.now > 1003:
                taken.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(train())
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert terminal.getvalue().endswith("\n")
    assert "RuntimeError" not in terminal.getvalue()
    await loader.aclose()


async def test_cancelling_a_wait_loses_nothing(
    clock: Clock, terminal: Terminal
) -> None:
    """Iteration can resume."""
    arrived = asyncio.Event()

    class Slow(AsyncNumbers):
        async def __getitem__(self, index: int) -> Any:
            if index == 2:
                await arrived.wait()
            return index

    loader = DataLoader(Slow(4), None, loop="caller")
    batches = aiter(progress(loader, file=terminal))
    assert [await anext(batches), await anext(batches)] == [0, 1]
    task = asyncio.ensure_future(anext(batches))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    arrived.set()
    assert [batch async for batch in batches] == [2, 3]


def test_an_exception_of_the_consumer_holds_no_iterator(clock: Clock) -> None:
    """Its traceback is kept, as in a notebook."""
    terminal = Terminal()

    def train() -> None:
        for batch in progress(Counting(clock), file=terminal):
            1 / (3 - batch["number"])

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert caught.value.__traceback__ is not None
    assert terminal.getvalue().endswith("\n")


class Failing(Numbers):
    """Raises at one sample."""

    def __getitem__(self, index: int) -> int:
        return 6 // (index - 1)


def test_an_exception_of_the_dataset_is_raised(
    clock: Clock, terminal: Terminal
) -> None:
    """It holds no iterator; iteration can resume."""
    batches = iter(progress(DataLoader(Failing(4), None), file=terminal))
    assert next(batches) == -6
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    assert list(batches) == [6, 3]
    gone = weakref.ref(batches)
    del batches
    assert gone() is None
    frames = [name.name for name in traceback.extract_tb(caught.value.__traceback__)]
    assert "__next__" in frames


async def test_async_exceptions_hold_no_iterator(
    clock: Clock, terminal: Terminal
) -> None:
    batches = aiter(progress(DataLoader(Failing(), None), file=terminal))
    assert await anext(batches) == -6
    with pytest.raises(ZeroDivisionError) as caught:
        await anext(batches)
    gone = weakref.ref(batches)
    await batches.aclose()
    del batches
    assert gone() is None
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("n", [4, 8])
def test_an_interrupt_loses_no_batch(clock: Clock, terminal: Terminal, n: int) -> None:
    """It comes while figures are read, before a batch is requested or at the end."""

    class Interrupted(Counting):
        is_pending = True

        def stats(self) -> Any:
            if self.is_pending and self.figures.batches == n:
                self.is_pending = False
                raise KeyboardInterrupt
            return super().stats()

    batches = iter(progress(Interrupted(clock), file=terminal))
    taken = [next(batches)["number"] for _ in range(n)]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [*taken, *(batch["number"] for batch in batches)] == list(range(8))
    assert terminal.getvalue().endswith("\n")


def test_each_epoch_of_a_display_has_a_bar(clock: Clock, terminal: Terminal) -> None:
    """Its length is the loader's."""
    loader = DataLoader(range(6), 2)
    shown = progress(loader, file=terminal, leave=False)
    assert len(shown) == 3
    assert [len(list(shown)) for _ in range(2)] == [3, 3]
    with pytest.raises(TypeError):
        len(progress(DataLoader(iter(range(3)), None)))
