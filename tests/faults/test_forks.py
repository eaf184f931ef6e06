"""What the fork at ``iter()`` leaves as it was, also when several threads fork."""

import gc
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from faulty import await_gone, pools_of
from working import Numbers

pytestmark = pytest.mark.linux


class Collecting(Numbers):
    """Tells whether the garbage collector is on where samples are read."""

    def __getitem__(self, index: int) -> bool:
        return gc.isenabled()


@pytest.mark.slow
def test_threads_that_fork_at_once() -> None:
    """Collectors stay on, here and in every worker."""
    found: list[Any] = []

    def run() -> None:
        for _ in range(4):
            found.extend(b for b in DataLoader(Collecting(8), None, num_workers=1))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * (3 * 4 * 8)
    assert gc.isenabled()


def test_the_process_stays_no_daemon() -> None:
    """As it was: ``False``, and not ``None``."""
    list(DataLoader(Collecting(), None, num_workers=1))
    assert multiprocessing.current_process().daemon is False


@pytest.mark.usefixtures("fork_is_default")
def test_an_interrupt_as_signals_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just before a fork is raised there, and later ones still come."""
    change = signal.pthread_sigmask

    def interrupted(how: int, mask: Any) -> Any:
        before = change(how, mask)
        if how == signal.SIG_BLOCK and signal.SIGINT in mask:
            raise KeyboardInterrupt
        return before

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(DataLoader(range(8), num_workers=1))
    monkeypatch.undo()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert gc.isenabled()


@pytest.mark.usefixtures("fork_is_default")
def test_joining_all_children_is_bounded() -> None:
    """A supervisor is among ``active_children()``: who waits for it waits as told."""
    iterator = iter(DataLoader(Collecting(), None, num_workers=1))
    (supervisor,) = multiprocessing.active_children()
    supervisor.join(timeout=0.01)  # would not return before the iterator is closed
    assert supervisor.is_alive()
    iterator.close()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("fork_is_default")
def test_a_stopped_supervisor_is_continued_to_end() -> None:
    """Its workers would not end else."""
    iterator = iter(DataLoader(Collecting(), None, num_workers=1))
    supervisor = pools_of(iterator)._launcher._process.pid
    os.kill(supervisor, signal.SIGSTOP)
    iterator.close()
    assert await_gone([supervisor]) == []


class Stuck(Numbers):
    """Is unpickled for ever; leaves its process in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __setstate__(self, state: Any) -> None:
        path = state["path"].with_suffix(".new")
        path.write_text(str(os.getpid()))
        path.rename(state["path"])
        signal.pause()


@pytest.mark.slow
def test_an_unused_iterator_ends_a_supervisor_that_is_stuck(tmp_path: Path) -> None:
    """It is below the fork server, unpickles, and hears nothing."""
    path = tmp_path / "pid"
    loader = DataLoader(
        Stuck(path), num_workers=1, multiprocessing_context="forkserver"
    )
    iterator = iter(loader)
    while not path.exists():
        os.sched_yield()
    del iterator
    assert await_gone([int(path.read_text())]) == []
