"""Forks of a process whose threads hold locks all the time, beside a loop in use."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [3, pytest.param(15, marks=pytest.mark.fuzz)])
def test_fork_beside_threads(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hang, no wrong batch, and the loop still hears its sockets."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    figures = importlib.import_module("fork_threads").watch("aioloader", epochs)
    assert figures | {"ms": 0} == {"epochs": epochs, "hung": 0, "deaf": 0, "ms": 0}
