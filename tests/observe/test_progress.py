"""A progress display: what it shows, where, and that it leaves nothing behind."""

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
    """Have the display's time go by hand."""
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
    assert not [one for one in gc.get_objects() if is_bar(one)]
    assert not [
        one for one in threading.enumerate() if type(one).__name__ == "TMonitor"
    ]


def is_bar(one: object) -> bool:
    """Tell whether it is a bar that was not closed."""
    return type(one).__name__ == "Bar" and isinstance(one, tqdm) and not one.disable


@pytest.mark.parametrize("way", ["for", "async for"])
async def test_figures(clock: Clock, terminal: Terminal, way: str) -> None:
    """Rates, bytes, the share of waiting; of the whole at the end."""
    shown = progress(Counting(clock), desc="train", file=terminal)
    if way == "for":
        numbers = [one["number"] for one in shown]
    else:
        numbers = [one["number"] async for one in shown]
    assert numbers == list(range(8))
    last = terminal.lines()[-1]
    assert last.startswith("train: ")
    assert "100%" in last
    assert "5 samples/s, 1 kB/s, waiting 25%" in last
    assert len(terminal.lines()) >= 8


def test_a_resumed_epoch(clock: Clock, terminal: Terminal) -> None:
    """Begins where the loader does."""
    loader = Counting(clock, batches=3)
    loader.figures.resumed_at = 5
    for _ in progress(loader, file=terminal):
        pass
    lines = terminal.lines()
    assert "6/8" in lines[0] or "6 of 8" in lines[0]
    assert "8/8" in lines[-1] or "8 of 8" in lines[-1]
    assert "5 samples/s, 1 kB/s, waiting 25%, resumed at 5" in lines[-1]


@pytest.mark.parametrize(("costs", "looks"), [(0.0, range(18, 23)), (0.005, [3])])
def test_looks_seldom(clock: Clock, costs: float, looks: Sequence[int]) -> None:
    """By time; figures take a thousandth of it, and the position is always shown."""
    loader, terminal = Counting(clock, batches=1000, seconds=0.01), Terminal()
    loader.costs = costs
    for _ in progress(loader, file=terminal):
        pass
    assert loader.looks in looks
    assert len(terminal.lines()) >= 18


def test_elsewhere_a_line_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is logged, also where epochs are shorter; nothing is printed."""
    caplog.set_level(logging.INFO, "aioloader")
    loader = Counting(clock, batches=40)
    for _ in range(5):
        for _ in progress(loader, desc="train"):
            pass
    assert capsys.readouterr() == ("", "")
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("train: 20 of 40 batches (50%), ")
    assert said[0].endswith("samples/s, 1 kB/s, waiting 25%")


def test_nothing_to_write_to(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without a stderr, nor with a closed one."""
    closed = io.StringIO()
    closed.close()
    for file in (None, closed):
        monkeypatch.setattr(sys, "stderr", file)
        assert len(list(progress(Counting(clock)))) == 8


def test_a_terminal_that_goes(clock: Clock, terminal: Terminal) -> None:
    """Does not end the training."""
    taken = 0
    for _ in progress(Counting(clock), file=terminal):
        taken += 1
        if taken == 4:
            terminal.close()
    assert taken == 8


def test_a_break(clock: Clock, terminal: Terminal) -> None:
    """Ends the display, as ``close`` does; the loader's iterator is gone."""
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


async def test_cancellation(clock: Clock, terminal: Terminal) -> None:
    """As ``break``, from outside."""
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


async def test_a_wait_is_cancelled(clock: Clock, terminal: Terminal) -> None:
    """No batch is lost; the iteration can go on."""
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
        for one in progress(Counting(clock), file=terminal):
            1 / (3 - one["number"])

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert caught.value.__traceback__ is not None
    assert terminal.getvalue().endswith("\n")


class Failing(Numbers):
    """Raises at one sample."""

    def __getitem__(self, index: int) -> int:
        return 6 // (index - 1)


def test_an_exception_of_the_dataset(clock: Clock, terminal: Terminal) -> None:
    """Is raised as it is, holds no iterator; a caller may go on."""
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


async def test_exceptions_in_async_for(clock: Clock, terminal: Terminal) -> None:
    """The same."""
    batches = aiter(progress(DataLoader(Failing(), None), file=terminal))
    assert await anext(batches) == -6
    with pytest.raises(ZeroDivisionError) as caught:
        await anext(batches)
    gone = weakref.ref(batches)
    await batches.aclose()
    del batches
    assert gone() is None
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("at", [4, 8])
def test_an_interrupt_loses_no_batch(clock: Clock, terminal: Terminal, at: int) -> None:
    """It comes while figures are read: before a batch is asked for; or at the end."""

    class Interrupted(Counting):
        is_pending = True

        def stats(self) -> Any:
            if self.is_pending and self.figures.batches == at:
                self.is_pending = False
                raise KeyboardInterrupt
            return super().stats()

    batches = iter(progress(Interrupted(clock), file=terminal))
    taken = [next(batches)["number"] for _ in range(at)]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [*taken, *(one["number"] for one in batches)] == list(range(8))
    assert terminal.getvalue().endswith("\n")


def test_epochs_of_one_display(clock: Clock, terminal: Terminal) -> None:
    """Each has its bar; the loader's length is its own."""
    loader = DataLoader(range(6), 2)
    shown = progress(loader, file=terminal, leave=False)
    assert len(shown) == 3
    assert [len(list(shown)) for _ in range(2)] == [3, 3]
    with pytest.raises(TypeError):
        len(progress(DataLoader(iter(range(3)), None)))
