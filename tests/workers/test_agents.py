"""Agents that start a thread in every Python process, as profilers and tracers do."""

import os
from pathlib import Path

import pytest

from python_process import python

AGENT = """
import threading
threading.Thread(target=threading.Event().wait, name="agent-7", daemon=True).start()
"""
SCRIPT = """
import asyncio, multiprocessing, os, signal, sys, threading, warnings
import torch
from aioloader import DataLoader

class Rows:
    def __init__(self, kills=""):
        self.kills, self.shared = kills, torch.zeros(1).share_memory_()
    def __len__(self): return 6
    def __getitem__(self, index):
        if index == 3 and self.kills and not os.path.exists(self.kills):
            open(self.kills, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        assert multiprocessing.parent_process().pid == int(os.environ["LOADER"])
        assert [thread.name for thread in threading.enumerate()].count("agent-7") == 1
        self.shared += 1
        return index

class AsyncRows(Rows):
    async def __getitem__(self, index): return super().__getitem__(index)

def main():
    os.environ["LOADER"] = str(os.getpid())
    for kind, method in (AsyncRows, None), (Rows, "spawn"):
        dataset = kind(f"{sys.argv[1]}-{kind.__name__}-{method}")
        options = dict(num_workers=2, multiprocessing_context=method)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with DataLoader(dataset, 2, **options) as loader:
                for epoch in range(2):
                    print(sorted(n for batch in loader for n in batch.tolist()))
        print(*{str(warning.message) for warning in caught})
        assert loader.stats().worker_restarts == 1
        assert dataset.shared >= 12
    iterator = iter(DataLoader(AsyncRows(), num_workers=2, persistent_workers=True))
    next(iterator)
    os.kill(os.getpid(), signal.SIGKILL)
main()
"""


@pytest.mark.slow
def test_workers_start_beside_threads_of_an_agent(tmp_path: Path) -> None:
    """Each is a new interpreter; one warning; deaths are handled as always."""
    (tmp_path / "sitecustomize.py").write_text(AGENT, encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # It returns when no process has this one's output open.
    result = python(script, tmp_path / "mark", env=environment, timeout=300)
    assert result.returncode == -9, result.stderr
    lines = result.stdout.splitlines()
    batches, warned = lines[:2] + lines[3:5], lines[2::3]
    assert batches == ["[0, 1, 2, 3, 4, 5]"] * 4
    assert "agent-7" in warned[0]
    assert "multiprocessing_context='fork'" in warned[0]
    assert warned[1:] == [""]
