"""Warnings point at the user's line."""

import asyncio
import inspect
import threading
import warnings
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader._base.warnings import warn


class Unstated:
    """An iterable that has to be read again."""

    def __iter__(self) -> Any:
        return iter(range(9))


def loaded() -> Any:
    """Return a loader that warns where its iteration begins."""
    loader: Any = DataLoader(Unstated(), 2)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    return loader


def line() -> int:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_points_at_the_for_loop() -> None:
    loader = loaded()
    with pytest.warns(UserWarning, match="read again") as caught:
        iterator, here = iter(loader), line()
        next(iterator)
    assert caught[0].filename == __file__
    assert caught[0].lineno in {here, here + 1}


def test_a_warning_points_at_the_async_for_loop() -> None:
    async def iterated() -> int:
        async for _ in loader:
            break
        return line()

    loader = loaded()
    with pytest.warns(UserWarning, match="read again") as caught:
        end = asyncio.run(iterated())
    assert (caught[0].filename, caught[0].lineno) == (__file__, end - 2)


def test_a_warning_on_a_loaders_thread_points_at_its_code() -> None:
    """No line of the user is on the stack."""
    ours: dict[str, Any] = {"__name__": "aioloader._there", "warn": warn}
    exec(compile("def run(): warn('beware')", "there.py", "exec"), ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=ours["run"])
        thread.start()
        thread.join()
    assert caught[0].filename == "there.py"
