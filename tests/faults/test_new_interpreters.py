"""Workers that are new interpreters: which faults they survive, and that none leak."""

import errno
import gc
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader._transport import segments
from aioloader.errors import BatchTimeoutError
from faulty import Faulty, sleep_forever, spin_in_c, stop_itself
from python_process import python

pytestmark = pytest.mark.slow
SPAWNED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}


class Large:
    """Samples of 200 KB."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50_000,), index)


@pytest.mark.parametrize("act", [sleep_forever, spin_in_c, stop_itself])
def test_a_stuck_interpreter_is_named(act: Any) -> None:
    """With its stack, also where it holds the GIL, or is stopped."""
    loader = DataLoader(Faulty(8, (5,), act), 4, timeout=8, **SPAWNED)
    with pytest.raises(BatchTimeoutError) as caught:
        list(loader)
    text = str(caught.value)
    assert "batch 1 has been in stage 'fetch' of worker " in text
    assert f"in {act.__name__}" in text
    assert ("it is stopped" in text) == (act is stop_itself)
    loader.close()


def test_a_stuck_interpreter_is_replaced(tmp_path: Path) -> None:
    data = Faulty(24, (5,), sleep_forever, tmp_path)
    loader = DataLoader(data, 4, timeout=10, on_timeout="restart", **SPAWNED)
    assert [i for batch in loader for i in batch[-1].tolist()] == [*range(24)]
    assert loader.stats().worker_restarts == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_batches_come_by_pipe_without_shared_memory(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are writable."""

    def refused(_nbytes: int) -> Any:
        raise OSError(number, "nothing left")

    monkeypatch.setattr(segments, "new_segment", refused)
    batches = list(DataLoader(Large(), 4, **SPAWNED))
    assert [batch[:, 0].tolist() for batch in batches] == [
        [*range(first, first + 4)] for first in range(0, 24, 4)
    ]
    batches[0] += 1


SCRIPT = """
import _thread, os, signal, sys, threading
from aioloader import DataLoader
data, mode = list(range(64)), sys.argv[1]
loader = DataLoader(
    data, 2, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
)
if mode == "interrupted":
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        list(loader)
        list(loader)
        threading.Event().wait(5)
    except KeyboardInterrupt:
        print("interrupted")
    loader.close()
else:
    print(len(list(loader)))
    iterator = iter(loader)
    next(iterator)  # and both are open at the exit
    del iterator
"""


@pytest.mark.parametrize(
    ("mode", "shown"), [("open", "32"), ("interrupted", "interrupted")]
)
def test_scripts_end_silently(mode: str, shown: str, tmp_path: Path) -> None:
    """The resource tracker prints nothing; no process holds the output open."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = python("-W", "error", script, shown)
    assert (result.stdout, result.stderr) == (f"{shown}\n", "")
    assert result.returncode == 0


@pytest.mark.linux
def test_a_pipe_is_forgotten_before_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child forked in between would close another file of the same number."""
    close, closed, kept = os.close, list[int](), list[int]()

    def noted(descriptor: int) -> None:
        closed.append(descriptor)
        objects: Any = (x for x in gc.get_objects() if type(x) is Connection)
        kept.extend(pipe._handle for pipe in objects if pipe._handle == descriptor)
        close(descriptor)

    loader = DataLoader(range(8), 4, **SPAWNED)
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr(os, "close", noted)
    monkeypatch.setattr(Connection, "_close", lambda pipe: noted(pipe._handle))
    batches.close()
    monkeypatch.undo()
    assert closed
    assert not kept
