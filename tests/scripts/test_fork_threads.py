"""Forks of a process whose threads hold locks all the time, while a loop runs."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [3, pytest.param(15, marks=pytest.mark.fuzz)])
def test_forks_with_threads_work(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker hangs, batches are right, and the loop still polls its sockets."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    figures = importlib.import_module("fork_threads").watch("aioloader", epochs)
    assert figures | {"ms": 0} == {"epochs": epochs, "hung": 0, "deaf": 0, "ms": 0}
