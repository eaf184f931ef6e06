"""The fork at ``iter()`` changes nothing in this process, also when threads fork."""

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
    """Each sample says whether the garbage collector is enabled there."""

    def __getitem__(self, index: int) -> bool:
        return gc.isenabled()


@pytest.mark.slow
def test_the_collector_stays_on_when_threads_fork_at_once() -> None:
    """Here, and in every worker."""
    states: list[Any] = []

    def run() -> None:
        for _ in range(4):
            states.extend(b for b in DataLoader(Collecting(8), None, num_workers=1))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [True] * (3 * 4 * 8)
    assert gc.isenabled()


def test_a_fork_leaves_the_daemon_flag_false() -> None:
    """Not ``None``."""
    list(DataLoader(Collecting(), None, num_workers=1))
    assert multiprocessing.current_process().daemon is False


@pytest.mark.usefixtures("fork_is_default")
def test_an_interrupt_before_a_fork_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later interrupts still arrive: signals are unblocked."""
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
def test_joining_a_supervisor_respects_the_timeout() -> None:
    """It is among ``active_children()``, which programs join at their end."""
    iterator = iter(DataLoader(Collecting(), None, num_workers=1))
    (supervisor,) = multiprocessing.active_children()
    supervisor.join(timeout=0.01)  # would not return before the iterator is closed
    assert supervisor.is_alive()
    iterator.close()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("fork_is_default")
def test_close_ends_a_stopped_supervisor() -> None:
    """Otherwise its workers would not end."""
    iterator = iter(DataLoader(Collecting(), None, num_workers=1))
    supervisor = pools_of(iterator)._launcher._process.pid
    os.kill(supervisor, signal.SIGSTOP)
    iterator.close()
    assert await_gone([supervisor]) == []


class Stuck(Numbers):
    """Unpickling never returns; writes the process's ID to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __setstate__(self, state: Any) -> None:
        path = state["path"].with_suffix(".new")
        path.write_text(str(os.getpid()))
        path.rename(state["path"])
        signal.pause()


@pytest.mark.slow
def test_dropping_an_unused_iterator_ends_a_stuck_supervisor(tmp_path: Path) -> None:
    """The supervisor, below the fork server, is still unpickling the dataset."""
    path = tmp_path / "pid"
    loader = DataLoader(
        Stuck(path), num_workers=1, multiprocessing_context="forkserver"
    )
    iterator = iter(loader)
    while not path.exists():
        os.sched_yield()
    del iterator
    assert await_gone([int(path.read_text())]) == []
