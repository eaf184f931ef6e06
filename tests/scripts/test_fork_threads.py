"""Forks of a process whose threads hold locks all the time, beside a loop in use."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [3, pytest.param(15, marks=pytest.mark.fuzz)])
def test_fork_beside_threads(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hang, no wrong batch, and the loop still hears its sockets."""
    monkeypatch.syspath_prepend(FOLDER)
    path = FOLDER / "fork_threads.py"
    spec = importlib.util.spec_from_file_location("fork_threads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fork_threads", module)
    spec.loader.exec_module(module)
    figures = module.watch("aioloader", epochs)
    assert figures | {"ms": 0} == {"epochs": epochs, "hung": 0, "deaf": 0, "ms": 0}
