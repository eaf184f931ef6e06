"""The supervisor forks the workers; they end with it and with the parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.testing import Resources
from faults.planted import WAYS, Marks, in_time, marks  # noqa: F401  (fixtures too)
from faulty import (
    await_gone,
    await_ready,
    is_alive,
    pids_of,
    pools_of,
    session,
    sleep_forever,
)
from python_process import python

FORKS: list[int] = []
os.register_at_fork(after_in_parent=lambda: FORKS.append(os.getpid()))


def killed(iterator: Any) -> list[Any]:
    """Return the batches of an epoch in which each worker is killed once."""
    batches = [next(iterator)]
    pool = pools_of(iterator)
    for pid in pids_of(pool).values():
        await_ready(pool)  # three deaths in a row before that would be too many
        os.kill(pid, signal.SIGKILL)
        await_gone([pid])
        batches.append(next(iterator))
    return batches + list(iterator)


@pytest.mark.linux
@pytest.mark.usefixtures("fork_is_default")
def test_this_process_is_forked_once_per_epoch() -> None:
    """Workers and their replacements are children of the supervisor."""
    loader = DataLoader(range(64), 2, num_workers=2)
    FORKS.clear()
    for epochs in (1, 2):
        assert len(killed(iter(loader))) == 32
        assert len(FORKS) == epochs


async def used(loader: Any, how: str, *, is_async: bool) -> Any:
    """Iterate over a loader; return the open iterator if it is kept."""
    if is_async:
        iterator = aiter(loader)
        await anext(iterator)
        if how == "end":
            assert len([batch async for batch in iterator]) == 31
    else:
        iterator = iter(loader)
        next(iterator)
        if how == "end":
            assert len(list(iterator)) == 31
    return iterator if how == "kept" else None


@pytest.mark.blocking
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("how", ["end", "left", "kept"])
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_no_process_outlives_a_close(
    way: Any, is_kept: bool, how: str, is_async: bool
) -> None:
    """Neither a supervisor, nor workers whose iterator was dropped before."""
    before = Resources.now().children
    options: Any = {"persistent_workers": is_kept, "multiprocessing_context": way}
    loader = DataLoader[Any](range(64), 2, num_workers=2, **options)
    iterator = await used(loader, how, is_async=is_async)
    if is_async:
        await loader.aclose()
    else:
        loader.close()
    assert Resources.now().children - before == set()
    del iterator


class Parents:
    """Its workers have children: a process of multiprocessing, and a program."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.children: list[Any] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if not self.children:
            context = torch.multiprocessing.get_context("fork")
            process = context.Process(target=self.live, daemon=True)
            process.start()
            program = subprocess.Popen(["sleep", "600"])
            with self.marks.path.open("a", encoding="utf-8") as file:
                file.write(f"{program.pid} program\n")
            self.children += [process, program]
        return index

    def live(self) -> None:
        """Leave a mark and stay."""
        self.marks.add("child")
        sleep_forever()


def await_marks(marks: Marks, number: int) -> list[int]:
    """Return the processes that left ``number`` marks; all of them run."""
    while len(marks) < number:
        os.sched_yield()
    pids = marks.pids()
    assert all(map(is_alive, pids))
    return pids


@pytest.mark.parametrize("how", ["end", "break", "close", "worker killed"])
@pytest.mark.parametrize("way", WAYS)
def test_children_of_workers_end_with_them(way: Any, how: str, marks: Marks) -> None:
    """Whether the epoch ends, is left, or the worker is killed."""
    loader = DataLoader(Parents(marks), 4, num_workers=1, multiprocessing_context=way)
    iterator = iter(loader)
    next(iterator)
    children = await_marks(marks, 2)
    if how == "worker killed":
        for pid in pids_of(pools_of(iterator)).values():
            os.kill(pid, signal.SIGKILL)
        assert await_gone(children) == []
    elif how == "close":
        loader.close()
    if how == "end":
        list(iterator)
    del iterator
    loader.close()
    assert await_gone(marks.pids()) == []


PARENT = """
import os, sys, subprocess, threading
from aioloader import DataLoader

class Stuck(list):
    def __getitem__(self, index):
        if index == 4:
            subprocess.Popen(["sleep", "600"])
            os.write(1, b"stuck\\n")
            threading.Event().wait()
        return index

if __name__ == "__main__":
    way = sys.argv[1] if sys.argv[1:] else None
    data = Stuck(range(8))
    list(DataLoader(data, 2, num_workers=2, multiprocessing_context=way))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, "fork", "forkserver", "spawn"])
def test_workers_end_with_their_parent(way: str | None, tmp_path: Path) -> None:
    """After SIGKILL, while one of them and its child are stuck."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, str(script), *([way] if way else [])],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"stuck\n"
    assert len(session(process.pid)) >= 3  # a spawned worker may not have a name yet
    process.kill()
    process.wait()
    process.stdout.close()
    assert await_gone(session(process.pid)) == []


TERMINATED = """
import os, signal, sys
from aioloader import DataLoader

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("saving", flush=True))
    way = sys.argv[1] if sys.argv[1:] else None
    labels = []
    for batch in DataLoader(range(40), 2, num_workers=2, multiprocessing_context=way):
        labels += batch.tolist()
        if len(labels) == 8:
            os.killpg(0, signal.SIGTERM)
    assert labels == [*range(40)]
"""


def where(_sample: int) -> tuple[int, int]:
    return os.getpid(), os.getsid(0)


@pytest.mark.parametrize("way", ["fork", "forkserver", "spawn"])
def test_each_worker_leads_a_session(way: str) -> None:
    """A busy machine gives each its own share; it may read the terminal (pdb)."""
    options: Any = {"transform": where, "multiprocessing_context": way}
    for processes, sessions in DataLoader(range(8), 2, num_workers=2, **options):
        assert processes.tolist() == sessions.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, "forkserver"])
def test_sigterm_to_the_group_ends_no_epoch(way: str | None, tmp_path: Path) -> None:
    """Preemption: the program's handler runs; workers and supervisor continue."""
    script = tmp_path / "group.py"
    script.write_text(TERMINATED)
    ended = python(script, *([way] if way else []), start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, "saving\n"), ended.stderr


CLOSED = """
from aioloader import DataLoader

class Squares:
    def __len__(self):
        return 8

    async def __getitem__(self, index):
        return index * index

for num_workers in (0, 1):
    batches = list(DataLoader(Squares(), 4, num_workers=num_workers))
    assert [batch.tolist() for batch in batches] == [[0, 1, 4, 9], [16, 25, 36, 49]]
"""


@pytest.mark.slow
def test_a_loader_works_with_closed_standard_streams() -> None:
    """As `<&-` in a shell; libuv would abort when it closes descriptor 0."""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, CLOSED]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
