"""Whoever is warned finds their own line."""

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


def test_for() -> None:
    """A loop."""
    loader = loaded()
    with pytest.warns(UserWarning, match="read again") as found:
        iterator, here = iter(loader), line()
        next(iterator)
    assert found[0].filename == __file__
    assert found[0].lineno in {here, here + 1}


def test_async_for() -> None:
    """A loop in a coroutine."""

    async def iterated() -> int:
        async for _ in loader:
            break
        return line()

    loader = loaded()
    with pytest.warns(UserWarning, match="read again") as found:
        end = asyncio.run(iterated())
    assert (found[0].filename, found[0].lineno) == (__file__, end - 2)


def test_on_a_thread_of_ours() -> None:
    """Nobody of the user's is there: it points at whoever warns."""
    ours: dict[str, Any] = {"__name__": "aioloader._there", "warn": warn}
    exec(compile("def run(): warn('beware')", "there.py", "exec"), ours)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=ours["run"])
        thread.start()
        thread.join()
    assert found[0].filename == "there.py"
